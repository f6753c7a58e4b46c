"""Encoded images: limits from the header, and the one decode that everyone uses.

Owns: MediaLimits, `check`, `decode`, `content_key`.
Does not own: header parsing (image_header.py), fetching (api/media.py), resizing
(preprocess.py). Imports no torch.

The canonical picture of a file: its first frame, upright after EXIF orientation, flattened on
white, 16-bit samples cut to their high byte (as libpng does), CMYK by the plain formula, RGB.
Pillow does the decoding with no global setting changed: its decoders are called directly, so
that neither its bomb warning nor its registry of further formats comes into play.
"""

from __future__ import annotations

import functools
import hashlib
import io
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from vision_encoder.image_header import (
    Format,
    ImageHeader,
    MediaError,
    corrupt,
    png_chunks,
    read_header,
)

__all__ = [
    "MAX_PIXELS",
    "ImageHeader",
    "MediaError",
    "MediaLimits",
    "check",
    "check_request",
    "content_key",
    "decode",
    "read_header",
]

MAX_PIXELS = 89_478_485
"""Most pixels that `decode` takes whatever the limits say: beyond it Pillow's own guards warn."""


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """What an image, and a request's images together, may claim in their headers."""

    max_bytes: int = 32 << 20
    """Encoded bytes of one image."""
    max_pixels: int = 50_000_000
    """Width times height of one image, before any resizing."""
    max_aspect: float = 200.0
    """Longest over shortest edge."""
    max_frames: int = 1_000
    """Frames of an animation, of which only the first is used."""
    max_images: int = 128
    """Images of one request."""
    max_total_pixels: int = 400_000_000
    """Pixels of a request's images together."""

    def __post_init__(self) -> None:
        if not 1 <= self.max_pixels <= MAX_PIXELS:
            raise ValueError(
                f"max_pixels is {self.max_pixels}; it must lie between 1 and {MAX_PIXELS}"
            )
        for name in ("max_bytes", "max_frames", "max_images", "max_total_pixels"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_aspect < 1:
            raise ValueError(f"max_aspect is {self.max_aspect}; it must be at least 1")


def check(header: ImageHeader, limits: MediaLimits, num_bytes: int = 0) -> None:
    """Refuses an image by its header (and its encoded size). Raises MediaError."""
    if num_bytes > limits.max_bytes:
        raise MediaError(
            "bytes",
            f"the image has {num_bytes:,} bytes; at most {limits.max_bytes:,} are accepted",
        )
    size = f"{header.width} x {header.height}"
    if header.pixels > limits.max_pixels:
        raise MediaError(
            "pixels",
            f"the image has {size} = {header.pixels:,} pixels; at most {limits.max_pixels:,} are "
            "accepted, send it scaled down",
        )
    longest, shortest = max(header.width, header.height), min(header.width, header.height)
    if longest > limits.max_aspect * shortest:
        raise MediaError(
            "aspect",
            f"the image has {size} pixels; its longest edge may be at most "
            f"{limits.max_aspect:g} times its shortest",
        )
    if header.frames > limits.max_frames:
        raise MediaError(
            "frames",
            f"the image has {header.frames:,} frames; at most {limits.max_frames:,} are accepted "
            "(only the first is shown to the model)",
        )


def check_request(headers: Sequence[ImageHeader], limits: MediaLimits) -> None:
    """Refuses a request's images taken together. Raises MediaError."""
    if len(headers) > limits.max_images:
        raise MediaError(
            "images",
            f"the request has {len(headers)} images; at most {limits.max_images} are accepted",
        )
    total = sum(header.pixels for header in headers)
    if total > limits.max_total_pixels:
        raise MediaError(
            "pixels",
            f"the request's images have {total:,} pixels together; at most "
            f"{limits.max_total_pixels:,} are accepted",
        )


_DECODERS: dict[Format, Callable[[io.BytesIO], ImageFile.ImageFile]] = {
    "png": PngImagePlugin.PngImageFile,
    "jpeg": JpegImagePlugin.JpegImageFile,
    "webp": WebPImagePlugin.WebPImageFile,
    "gif": GifImagePlugin.GifImageFile,
    "bmp": BmpImagePlugin.BmpImageFile,
    "tiff": TiffImagePlugin.TiffImageFile,
}

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode(data: bytes, header: ImageHeader | None = None) -> npt.NDArray[np.uint8]:
    """The canonical picture, uint8 [height, width, 3], contiguous and writable.

    `header` is read_header's of the same bytes. A picture is whole or refused: whatever is wrong
    with the bytes raises MediaError (MemoryError stays what it is). Threads may call it at once.
    """
    header = header or read_header(data)
    if header.pixels > MAX_PIXELS:
        raise MediaError(
            "pixels",
            f"the image has {header.width} x {header.height} pixels; at most {MAX_PIXELS:,} can "
            "be decoded",
        )
    try:
        if header.format == "png":
            _verify_png(data)
        with _DECODERS[header.format](io.BytesIO(data)) as image:
            picture = _upright_rgb(image, header)
    except MediaError:
        raise
    except MemoryError:
        raise
    except Exception:
        # Pillow raises OSError, SyntaxError, ValueError, struct.error and others by format; their
        # texts may hold addresses and paths, so none of it is passed on.
        raise corrupt() from None
    if picture.shape != (header.height, header.width, 3):
        raise corrupt()
    return picture


def _upright_rgb(image: ImageFile.ImageFile, header: ImageHeader) -> npt.NDArray[np.uint8]:
    # Pillow turns a TIFF upright by itself, and says so in `size` from the start.
    turned = header.format == "tiff"
    if image.size != ((header.width, header.height) if turned else header.stored_size):
        # Two parsers that disagree about a size are how a limit is walked around.
        raise corrupt()
    image.load()
    rgb = _flattened(image, header)
    turn = None if turned else _TURNS.get(header.orientation)
    if turn is not None:
        rgb = rgb.transpose(turn)
    return np.array(rgb)


def _flattened(image: Image.Image, header: ImageHeader) -> Image.Image:
    """RGB, transparency on white."""
    image = _eight_bit(image, header)
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    if image.mode == "La":
        image = image.convert("LA")
    rgba = image if image.mode == "RGBA" else image.convert("RGBA")
    flat = Image.new("RGB", rgba.size, (255, 255, 255))
    flat.paste(rgba, mask=rgba)
    return flat


def _eight_bit(image: Image.Image, header: ImageHeader) -> Image.Image:
    """8-bit samples, and a single transparent value (PNG's tRNS, GIF's index) on their scale."""
    if image.mode in ("I", "F", "LAB", "HSV"):
        raise MediaError(
            "unsupported",
            "images of 32-bit, floating-point or Lab samples are not supported; send 8 or 16 bits "
            "per sample",
        )
    value = image.info.get("transparency")
    if image.mode.startswith("I;16"):
        samples = np.asarray(image)
        grey = Image.fromarray((samples >> 8).astype(np.uint8))
        if isinstance(value, int):
            opaque = Image.fromarray(np.where(samples == value, 0, 255).astype(np.uint8))
            return Image.merge("LA", (grey, opaque))
        return grey
    if image.mode == "L" and isinstance(value, int) and header.bits < 8:
        image.info["transparency"] = value * 255 // ((1 << header.bits) - 1)
    elif image.mode == "RGB" and isinstance(value, tuple) and header.bits == 16:
        # The samples' low bytes are gone by now; the high ones decide.
        image.info["transparency"] = tuple(part >> 8 for part in value)
    return image


def _verify_png(data: bytes) -> None:
    """Pillow does not check the checksums of image data, nor that a file ends."""
    chunks = png_chunks(data)
    if not chunks or chunks[-1][0] != b"IEND":
        raise corrupt()
    view = memoryview(data)
    for _, start, length in chunks:
        told = int.from_bytes(view[start + length : start + length + 4], "big")
        if zlib.crc32(view[start - 4 : start + length]) != told:
            raise corrupt()


def content_key(data: bytes, fingerprint: bytes, revision: bytes, *more: bytes) -> bytes:
    """32 bytes that stand for an image's embedding rows: equal keys mean equal rows.

    Made of the encoded bytes, the plan's fingerprint (resolution, tiles, filter, normalisation),
    the model's revision, and whatever else rows depend on or must not be shared across (a
    tenant). Every part is length-prefixed, so that no two lists of parts read alike.
    """
    name, digest = _hash()
    outer = bytearray(name.encode())
    for part in (digest(data), fingerprint, revision, *more):
        outer += len(part).to_bytes(8, "little") + part
    return digest(bytes(outer))


@functools.cache
def _hash() -> tuple[str, Callable[[bytes], bytes]]:
    """The process's hash: blake3 where it is installed, else hashlib's blake2b (3 to 10 times
    slower). Its name goes into every key, so that keys of the two never meet."""
    try:
        from blake3 import blake3
    except ImportError:
        return "blake2b", lambda part: hashlib.blake2b(part, digest_size=32).digest()
    return "blake3", lambda part: blake3(part).digest()
