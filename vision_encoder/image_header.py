"""What the first bytes of an image file say, read without an image library.

Owns: ImageHeader and `read_header` for PNG, JPEG, WebP, GIF, BMP and TIFF; MediaError.
Does not own: limits, pixels (media.py). Imports neither torch nor Pillow.

Its own parser, because Pillow allocates a WebP's canvas on opening, warns through a process-wide
switch about large images, and leaves the orientation to be asked for. Nothing here allocates
memory by a size that a file claims, and every walk over a file's blocks is bounded.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Literal

Format = Literal["png", "jpeg", "webp", "gif", "bmp", "tiff"]
Mode = Literal["grey", "grey+alpha", "rgb", "rgb+alpha", "palette", "cmyk", "other"]
Reason = Literal[
    "empty",
    "format",
    "corrupt",
    "unsupported",
    "bytes",
    "pixels",
    "aspect",
    "frames",
    "images",
]

SUPPORTED = "PNG, JPEG, WebP, GIF, BMP and TIFF"

_MAX_BLOCKS = 1 << 16
"""Most chunks, segments or directories that a header is followed through."""
_MAX_SUB_BLOCKS = 1 << 18
"""Most GIF data sub-blocks (255 bytes each) followed while counting frames."""


class MediaError(ValueError):
    """An image is refused. `reason` is a stable word; the message is for the user and is made of
    fixed text and of numbers from the header and the limits, never of a library's words."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


CORRUPT = "the image is damaged or incomplete and cannot be decoded"


def corrupt() -> MediaError:
    return MediaError("corrupt", CORRUPT)


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What is known of an image before any pixel is decoded."""

    format: Format
    width: int
    """Pixels, after the orientation is applied."""
    height: int
    orientation: int = 1
    """EXIF orientation, 1 to 8; XMP's is not read, as browsers do not."""
    frames: int = 1
    """Pictures in the file; only the first is ever shown. At least so many, in a GIF of more than
    262,144 data blocks."""
    mode: Mode = "other"
    """The kind of samples that are stored; "rgb" for YCbCr."""
    bits: int = 8
    """Bits per sample as stored (of an index, for a palette)."""

    @property
    def stored_size(self) -> tuple[int, int]:
        """(width, height) of the file's own pixel order."""
        if self.orientation >= 5:
            return self.height, self.width
        return self.width, self.height

    @property
    def pixels(self) -> int:
        return self.width * self.height


def read_header(data: bytes) -> ImageHeader:
    """Size, orientation and kind of an encoded image, in time that does not depend on its pixels.

    Raises MediaError: "empty", "format" (not one of the six), "corrupt", "unsupported".
    """
    if not data:
        raise MediaError("empty", "the image has no bytes")
    for read, accepts in _READERS:
        if accepts(data):
            try:
                header = read(data)
            except (struct.error, IndexError):
                raise corrupt() from None
            if header.width < 1 or header.height < 1:
                raise corrupt()
            return header
    raise MediaError("format", f"the bytes are not an image of a supported format ({SUPPORTED})")


def _header(
    kind: Format, stored: tuple[int, int], orientation: int, frames: int, mode: Mode, bits: int
) -> ImageHeader:
    width, height = stored if orientation < 5 else (stored[1], stored[0])
    return ImageHeader(kind, width, height, orientation, max(frames, 1), mode, bits)


def png_chunks(data: bytes) -> list[tuple[bytes, int, int]]:
    """(type, first byte, length) of each whole chunk of a PNG, up to IEND."""
    chunks: list[tuple[bytes, int, int]] = []
    position = 8
    while position + 12 <= len(data):
        (length,) = struct.unpack_from(">I", data, position)
        if position + 12 + length > len(data):
            break
        kind = data[position + 4 : position + 8]
        chunks.append((kind, position + 8, length))
        if kind == b"IEND":
            break
        if len(chunks) > _MAX_BLOCKS:
            raise corrupt()
        position += 12 + length
    return chunks


_PNG_MODES: dict[int, tuple[Mode, frozenset[int]]] = {
    0: ("grey", frozenset((1, 2, 4, 8, 16))),
    2: ("rgb", frozenset((8, 16))),
    3: ("palette", frozenset((1, 2, 4, 8))),
    4: ("grey+alpha", frozenset((8, 16))),
    6: ("rgb+alpha", frozenset((8, 16))),
}


def _read_png(data: bytes) -> ImageHeader:
    if data[12:16] != b"IHDR" or len(data) < 33:
        raise corrupt()
    width, height, bits, colour = struct.unpack_from(">IIBB", data, 16)
    mode, depths = _PNG_MODES.get(colour, ("other", frozenset()))
    if bits not in depths:
        raise corrupt()
    orientation, frames = 1, 1
    for kind, start, length in png_chunks(data):
        if kind == b"eXIf":
            orientation = _exif_orientation(data[start : start + length])
        elif kind == b"acTL":
            (frames,) = struct.unpack_from(">I", data, start)
    return _header("png", (width, height), orientation, frames, mode, bits)


_JPEG_MODES: dict[int, Mode] = {1: "grey", 3: "rgb", 4: "cmyk"}


def _read_jpeg(data: bytes) -> ImageHeader:
    found: tuple[int, int, int, int] | None = None
    orientation: int | None = None
    position = 2
    for _ in range(_MAX_BLOCKS):
        if data[position] != 0xFF:
            raise corrupt()
        marker = data[position + 1]
        if marker == 0xFF:
            position += 1
            continue
        if marker == 0x01 or 0xD0 <= marker <= 0xD7:
            position += 2
            continue
        (length,) = struct.unpack_from(">H", data, position + 2)
        if marker in (0xD8, 0xD9) or length < 2:
            raise corrupt()
        body = position + 4
        if marker == 0xDA:
            break
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            bits, height, width, components = struct.unpack_from(">BHHB", data, body)
            found = (width, height, bits, components)
        elif marker == 0xE1 and orientation is None and data[body : body + 6] == b"Exif\0\0":
            orientation = _exif_orientation(data[body : position + 2 + length])
        position += 2 + length
    if found is None:
        raise corrupt()
    width, height, bits, components = found
    mode = _JPEG_MODES.get(components, "other")
    return _header("jpeg", (width, height), orientation or 1, 1, mode, bits)


def _read_webp(data: bytes) -> ImageHeader:
    size: tuple[int, int] | None = None
    alpha, orientation, frames = False, 1, 0
    position = 12
    for _ in range(_MAX_BLOCKS):
        if position + 8 > len(data):
            break
        kind = data[position : position + 4]
        (length,) = struct.unpack_from("<I", data, position + 4)
        body = position + 8
        if kind == b"VP8X":
            alpha = bool(data[body] & 0x10)
            size = (
                1 + int.from_bytes(data[body + 4 : body + 7], "little"),
                1 + int.from_bytes(data[body + 7 : body + 10], "little"),
            )
        elif kind == b"VP8 " and size is None:
            width, height = struct.unpack_from("<HH", data, body + 6)
            size = (width & 0x3FFF, height & 0x3FFF)
        elif kind == b"VP8L" and size is None:
            (packed,) = struct.unpack_from("<I", data, body + 1)
            size = (1 + (packed & 0x3FFF), 1 + (packed >> 14 & 0x3FFF))
            alpha = bool(packed >> 28 & 1)
        elif kind == b"ANMF":
            frames += 1
        elif kind == b"EXIF":
            orientation = _exif_orientation(data[body : body + length])
        position = body + length + length % 2
    if size is None:
        raise corrupt()
    return _header("webp", size, orientation, frames, "rgb+alpha" if alpha else "rgb", 8)


def _read_gif(data: bytes) -> ImageHeader:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    position = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    frames, blocks = 0, 0
    while position < len(data) and blocks < _MAX_SUB_BLOCKS:
        introducer = data[position]
        if introducer == 0x21:
            position += 2
        elif introducer == 0x2C:
            left, top, wide, high, local = struct.unpack_from("<HHHHB", data, position + 1)
            if frames == 0:
                # A first frame that reaches beyond the screen widens it, as in browsers.
                width, height = max(width, left + wide), max(height, top + high)
            frames += 1
            position += 11 + (3 << (local & 7) + 1 if local & 0x80 else 0)
        else:
            break
        while position < len(data) and data[position] and blocks < _MAX_SUB_BLOCKS:
            position += 1 + data[position]
            blocks += 1
        position += 1
        blocks += 1
    if frames == 0:
        raise corrupt()
    return _header("gif", (width, height), 1, frames, "palette", 8)


def _read_bmp(data: bytes) -> ImageHeader:
    (size,) = struct.unpack_from("<I", data, 14)
    if size == 12:
        width, height, _, bits = struct.unpack_from("<HHHH", data, 18)
    elif size >= 40:
        width, height, _, bits = struct.unpack_from("<iiHH", data, 18)
    else:
        raise MediaError("unsupported", "this kind of BMP is not supported; send a PNG")
    mode: Mode = "palette" if bits <= 8 else "rgb"
    return _header("bmp", (width, abs(height)), 1, 1, mode, 8)


_TIFF_SIZES = {1: 1, 3: 2, 4: 4, 16: 8}
"""Bytes of the unsigned field types that sizes and switches are stored in."""
_TIFF_MODES: dict[int, Mode] = {0: "grey", 1: "grey", 2: "rgb", 3: "palette", 5: "cmyk", 6: "rgb"}


class _Tiff:
    """The directories of a TIFF file, classic or big, either byte order."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._order: Literal["little", "big"] = "little" if data[:2] == b"II" else "big"
        self._big = self._number(2, 2) == 43
        self._word = 8 if self._big else 4
        self.first = self._number(8 if self._big else 4, self._word)

    def _number(self, at: int, size: int) -> int:
        if at + size > len(self._data):
            raise IndexError
        return int.from_bytes(self._data[at : at + size], self._order)

    def fields(self, directory: int) -> tuple[dict[int, int], int]:
        """(tag → first value) of the unsigned fields, and where the next directory is."""
        count_size, entry_size = (8, 20) if self._big else (2, 12)
        count = self._number(directory, count_size)
        if count > _MAX_BLOCKS:
            raise IndexError
        found: dict[int, int] = {}
        for index in range(count):
            entry = directory + count_size + index * entry_size
            tag, kind = self._number(entry, 2), self._number(entry + 2, 2)
            size = _TIFF_SIZES.get(kind)
            if size is None or tag in found:
                continue
            values = self._number(entry + 4, self._word)
            at = entry + 4 + self._word
            if values * size > self._word:
                at = self._number(at, self._word)
            if values and at + size <= len(self._data):
                found[tag] = self._number(at, size)
        end = directory + count_size + count * entry_size
        return found, self._number(end, self._word)

    def count(self, directory: int) -> int:
        """Directories from this one on; a loop ends the count."""
        seen: set[int] = set()
        count_size, entry_size = (8, 20) if self._big else (2, 12)
        while directory and directory not in seen and len(seen) < _MAX_BLOCKS:
            seen.add(directory)
            try:
                entries = self._number(directory, count_size)
                directory = self._number(directory + count_size + entries * entry_size, self._word)
            except IndexError:
                break
        return len(seen)


def _read_tiff(data: bytes) -> ImageHeader:
    tiff = _Tiff(data)
    fields, _ = tiff.fields(tiff.first)
    if 256 not in fields or 257 not in fields:
        raise corrupt()
    orientation = fields.get(274, 1)
    return _header(
        "tiff",
        (fields[256], fields[257]),
        orientation if 1 <= orientation <= 8 else 1,
        tiff.count(tiff.first),
        _TIFF_MODES.get(fields.get(262, 1), "other"),
        fields.get(258, 1),
    )


def _exif_orientation(block: bytes) -> int:
    """1 to 8; 1 for a block that says nothing or makes no sense."""
    while block.startswith(b"Exif\0\0"):
        block = block[6:]
    if block[:4] not in (b"II*\0", b"MM\0*"):
        return 1
    try:
        tiff = _Tiff(block)
        fields, _ = tiff.fields(tiff.first)
    except IndexError:
        return 1
    value = fields.get(0x0112, 1)
    return value if 1 <= value <= 8 else 1


_READERS = (
    (_read_png, lambda data: data.startswith(b"\x89PNG\r\n\x1a\n")),
    (_read_jpeg, lambda data: data.startswith(b"\xff\xd8\xff")),
    (_read_webp, lambda data: data[:4] == b"RIFF" and data[8:12] == b"WEBP"),
    (_read_gif, lambda data: data[:6] in (b"GIF87a", b"GIF89a")),
    (_read_bmp, lambda data: data[:2] == b"BM"),
    (_read_tiff, lambda data: data[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")),
)
