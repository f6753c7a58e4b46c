"""Encoded images: headers, limits, the canonical decode. Cases IMG-01, 02, 03, 05, 07, 08, 16."""

from __future__ import annotations

import functools
import io
import re
import struct
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile, ImageOps

from vision_encoder import media
from vision_encoder.image_header import ImageHeader
from vision_encoder.media import (
    MediaError,
    MediaLimits,
    check,
    check_request,
    content_key,
    decode,
    read_header,
)

Pixels = npt.NDArray[np.uint8]
DRAW = np.random.default_rng(11)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def halves(width: int = 64, height: int = 32) -> Image.Image:
    """Left red, right blue, a green corner: no two orientations look alike."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, : width // 2] = (255, 0, 0)
    pixels[:, width // 2 :] = (0, 0, 255)
    pixels[: height // 2, : width // 4] = (0, 255, 0)
    return Image.fromarray(pixels)


def noise(width: int = 40, height: int = 30) -> Image.Image:
    return Image.fromarray(DRAW.integers(0, 256, (height, width, 3), dtype=np.uint8))


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def raw_png(
    pixels: npt.NDArray[Any], colour: int, bits: int, extra: bytes = b"", packed: bool = False
) -> bytes:
    """A PNG of exactly these samples; Pillow cannot write all kinds."""
    height, width = pixels.shape[:2]
    rows = pixels.astype(">u2" if bits == 16 else np.uint8).reshape(height, -1)
    if packed:
        spread = np.unpackbits(rows[..., None], axis=-1)[..., 8 - bits :].reshape(height, -1)
        rows = np.packbits(spread, axis=-1)
    body = b"".join(b"\0" + row.tobytes() for row in rows)
    head = struct.pack(
        ">IIBBBBB", width if not packed else pixels.shape[1], height, bits, colour, 0, 0, 0
    )
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", head)
        + extra
        + png_chunk(b"IDAT", zlib.compress(body))
        + png_chunk(b"IEND", b"")
    )


def exif(orientation: int) -> Image.Exif:
    block = Image.Exif()
    block[0x0112] = orientation
    return block


# ---------------------------------------------------------------- headers


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp", "gif", "bmp", "tiff"])
@pytest.mark.parametrize("size", [(1, 1), (64, 32), (33, 257), (300, 7)])
def test_headers_say_what_the_decode_gives(kind: str, size: tuple[int, int]) -> None:
    data = encoded(noise(*size), kind)
    header = read_header(data)
    assert (header.format, header.width, header.height) == (kind, *size)
    assert (header.orientation, header.frames, header.bits) == (1, 1, 8)
    assert decode(data, header).shape == (size[1], size[0], 3)


@pytest.mark.parametrize(
    ("data", "mode", "bits"),
    [
        (encoded(noise().convert("L"), "png"), "grey", 8),
        (encoded(noise().convert("1"), "png"), "grey", 1),
        (encoded(noise().convert("LA"), "png"), "grey+alpha", 8),
        (encoded(noise().convert("P"), "png"), "palette", 8),
        (encoded(noise().convert("RGBA"), "png"), "rgb+alpha", 8),
        (encoded(noise().convert("L"), "jpeg"), "grey", 8),
        (encoded(noise().convert("CMYK"), "jpeg"), "cmyk", 8),
        (encoded(noise().convert("RGBA"), "webp", lossless=True), "rgb", 8),
        (encoded(noise().convert("CMYK"), "tiff"), "cmyk", 8),
        (encoded(Image.new("I;16", (4, 4)), "tiff"), "grey", 16),
    ],
)
def test_headers_say_the_kind_of_samples(data: bytes, mode: str, bits: int) -> None:
    header = read_header(data)
    assert (header.mode, header.bits) == (mode, bits)


def test_headers_see_webp_alpha() -> None:
    clear = Image.new("RGBA", (9, 5), (10, 20, 30, 40))
    assert read_header(encoded(clear, "webp", lossless=True)).mode == "rgb+alpha"
    assert read_header(encoded(clear, "webp")).mode == "rgb+alpha"


@pytest.mark.parametrize("kind", ["gif", "png", "webp", "tiff"])
def test_animations_show_their_first_frame(kind: str) -> None:
    frames = [
        Image.new("RGB", (20, 10), colour) for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255))
    ]
    options: dict[str, Any] = {"lossless": True} if kind == "webp" else {}
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    header = read_header(data)
    assert header.frames == 3
    assert np.array_equal(decode(data, header), np.asarray(frames[0]))
    with pytest.raises(MediaError, match=r"3 frames; at most 2") as refused:
        check(header, MediaLimits(max_frames=2))
    assert refused.value.reason == "frames"


def test_a_gif_frame_beyond_the_screen_widens_it() -> None:
    data = bytearray(encoded(halves().convert("P"), "gif"))
    data[6:10] = struct.pack("<HH", 10, 10)
    header = read_header(bytes(data))
    assert (header.width, header.height) == (64, 32)
    assert decode(bytes(data), header).shape == (32, 64, 3)


def test_headers_are_read_without_the_pixels() -> None:
    """The first bytes are enough for those formats that begin with their header."""
    image = noise(400, 300)
    for kind in ("png", "jpeg", "webp", "bmp"):
        assert read_header(encoded(image, kind)[:1000]).width == 400


# ---------------------------------------------------------------- IMG-01: orientation


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["jpeg", "png", "webp", "tiff"])
def test_orientation_is_applied(kind: str, orientation: int) -> None:
    options: dict[str, Any] = {"exif": exif(orientation)}
    if kind == "jpeg":
        options |= {"quality": 95, "subsampling": 0}
    if kind == "webp":
        options["lossless"] = True
    data = encoded(halves(), kind, **options)
    header = read_header(data)
    assert header.orientation == orientation
    assert (header.width, header.height) == ((64, 32) if orientation < 5 else (32, 64))
    with Image.open(io.BytesIO(data)) as image:
        wanted = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    assert np.array_equal(decode(data, header), wanted)
    upright = {tuple(px) for px in decode(data, header)[[0, -1]][:, [0, -1]].reshape(-1, 3) // 128}
    assert len(upright) == 3


def test_orientation_in_big_endian_exif_and_after_the_pixels() -> None:
    block = b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
    plain = encoded(halves(), "png")
    end = plain.index(b"IEND") - 4
    data = plain[:end] + png_chunk(b"eXIf", block) + plain[end:]
    header = read_header(data)
    assert (header.orientation, header.width) == (6, 32)
    with Image.open(io.BytesIO(data)) as image:
        wanted = np.asarray(ImageOps.exif_transpose(image))
    assert np.array_equal(decode(data), wanted)


# Pillow warns of a broken block and goes on.
@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize(
    "block", [b"", b"II", b"II*\0\xff\xff\xff\xff", b"MM\0*\0\0\0\x08\0\x01", b"junk" * 9]
)
def test_senseless_exif_is_no_orientation(block: bytes) -> None:
    plain = encoded(halves(), "jpeg")
    body = b"Exif\0\0" + block
    data = plain[:2] + b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body + plain[2:]
    assert read_header(data).orientation == 1
    assert decode(data).shape == (32, 64, 3)


# ---------------------------------------------------------------- IMG-02, IMG-03: transparency


def square_on(background: Pixels) -> tuple[Pixels, Pixels]:
    """(RGB with a solid centre square, alpha that shows the square alone)."""
    pixels = background.copy()
    pixels[10:22, 10:22] = (200, 30, 60)
    alpha = np.zeros(pixels.shape[:2], np.uint8)
    alpha[10:22, 10:22] = 255
    return pixels, alpha


@pytest.mark.parametrize("kind", ["png", "webp", "tiff"])
def test_hidden_colours_stay_hidden(kind: str) -> None:
    shown = []
    for seed in (1, 2):
        draw = np.random.default_rng(seed)
        pixels, alpha = square_on(draw.integers(0, 256, (32, 32, 3), dtype=np.uint8))
        rgba = Image.fromarray(np.dstack((pixels, alpha)))
        options: dict[str, Any] = {"lossless": True, "exact": True} if kind == "webp" else {}
        shown.append(decode(encoded(rgba, kind, **options)))
    white, _ = square_on(np.full((32, 32, 3), 255, np.uint8))
    assert np.array_equal(shown[0], white)
    assert np.array_equal(shown[1], white)


def test_half_transparency_blends_with_white() -> None:
    rgba = Image.new("RGBA", (3, 3), (100, 0, 200, 128))
    assert np.abs(decode(encoded(rgba, "png"))[0, 0].astype(int) - (177, 127, 227)).max() <= 1


def test_one_picture_in_every_kind_of_transparency() -> None:
    """P, L, RGB with tRNS, LA, RGBA, and low and high bit depths: all show grey 85 on white."""
    where = np.zeros((12, 12), bool)
    where[3:9, 4:10] = True
    wanted = np.where(where[..., None], 85, 255).repeat(3, axis=-1).astype(np.uint8)
    key = 0
    grey = np.where(where, 85, key).astype(np.uint8)
    rgb = grey[..., None].repeat(3, axis=-1)
    alpha = np.where(where, 255, 0).astype(np.uint8)
    palette = png_chunk(b"PLTE", bytes((7, 7, 7, 85, 85, 85)))
    index = where.astype(np.uint8)
    files = {
        "P + tRNS": raw_png(index, 3, 8, palette + png_chunk(b"tRNS", b"\0\xff")),
        "P + tRNS, 1 bit": raw_png(index, 3, 1, palette + png_chunk(b"tRNS", b"\0"), packed=True),
        "L + tRNS": raw_png(grey, 0, 8, png_chunk(b"tRNS", b"\0\0")),
        "L + tRNS, 2 bit": raw_png(grey // 85, 0, 2, png_chunk(b"tRNS", b"\0\0"), packed=True),
        "L + tRNS, 4 bit": raw_png(grey // 17, 0, 4, png_chunk(b"tRNS", b"\0\0"), packed=True),
        "RGB + tRNS": raw_png(rgb, 2, 8, png_chunk(b"tRNS", bytes(6))),
        "LA": raw_png(np.dstack((grey, alpha)), 4, 8),
        "RGBA": raw_png(np.dstack((rgb, alpha)), 6, 8),
        "L + tRNS, 16 bit": raw_png(grey * np.uint16(257), 0, 16, png_chunk(b"tRNS", b"\0\0")),
        "RGB + tRNS, 16 bit": raw_png(rgb * np.uint16(257), 2, 16, png_chunk(b"tRNS", bytes(6))),
        "LA, 16 bit": raw_png(np.dstack((grey, alpha)) * np.uint16(257), 4, 16),
        "RGBA, 16 bit": raw_png(np.dstack((rgb, alpha)) * np.uint16(257), 6, 16),
    }
    for name, data in files.items():
        assert np.array_equal(decode(data), wanted), name


def test_a_transparent_value_is_on_the_files_own_scale() -> None:
    """Value 3 of 2 bits is white and value 1 is 85; only the named one is clear."""
    pixels = np.array([[0, 1, 2, 3]], np.uint8)
    clear_one = raw_png(pixels, 0, 2, png_chunk(b"tRNS", b"\0\x01"), packed=True)
    assert decode(clear_one)[0, :, 0].tolist() == [0, 255, 170, 255]
    clear_black = raw_png(np.array([[0, 1]], np.uint8), 0, 1, png_chunk(b"tRNS", b"\0\0"), True)
    assert decode(clear_black)[0, :, 0].tolist() == [255, 255]
    wide = np.array([[0x1234, 0x1235]], np.uint16)
    deep = raw_png(wide, 0, 16, png_chunk(b"tRNS", b"\x12\x34"))
    assert decode(deep)[0, :, 0].tolist() == [255, 0x12]


def test_transparent_gif() -> None:
    image = Image.new("P", (2, 2))
    image.putpalette([9, 9, 9, 40, 50, 60])
    image.putdata([0, 1, 1, 0])
    data = encoded(image, "gif", transparency=0)
    white, colour = [255, 255, 255], [40, 50, 60]
    assert decode(data).tolist() == [[white, colour], [colour, white]]


# ---------------------------------------------------------------- sample depths, colour models


@pytest.mark.parametrize("kind", ["png", "tiff"])
def test_sixteen_bits_are_scaled_not_clipped(kind: str) -> None:
    ramp = np.linspace(0, 65535, 256).astype(np.uint16)[None].repeat(4, axis=0)
    data = raw_png(ramp, 0, 16) if kind == "png" else encoded(Image.fromarray(ramp), kind)
    got = decode(data)
    assert read_header(data).bits == 16
    assert np.array_equal(got[..., 0], ramp >> 8)
    assert len(np.unique(got)) == 256


def test_sixteen_bit_colour_equals_sixteen_bit_grey() -> None:
    ramp = np.linspace(0, 65535, 64).astype(np.uint16)[None].repeat(2, axis=0)
    colour = ramp[..., None].repeat(3, axis=-1)
    assert np.array_equal(decode(raw_png(colour, 2, 16)), decode(raw_png(ramp, 0, 16)))


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK", "YCbCr"])
def test_colour_models_become_rgb(mode: str) -> None:
    image = halves().convert(mode)
    kind = "tiff" if mode in ("CMYK", "YCbCr") else "png"
    data = encoded(image, kind)
    assert np.array_equal(decode(data), np.asarray(image.convert("RGB")))


def test_cmyk_jpeg_is_not_inverted() -> None:
    data = encoded(halves(128, 64).convert("CMYK"), "jpeg", quality=95)
    got = decode(data).astype(int)
    assert np.abs(got[60, 120] - (0, 0, 255)).max() < 30
    assert np.abs(got[60, 5] - (255, 0, 0)).max() < 30


@pytest.mark.parametrize("mode", ["I", "F"])
def test_samples_without_a_defined_range_are_refused(mode: str) -> None:
    with pytest.raises(MediaError, match="32-bit, floating-point") as refused:
        decode(encoded(Image.new(mode, (4, 4)), "tiff"))
    assert refused.value.reason == "unsupported"


def test_the_picture_is_plain_memory() -> None:
    got = decode(encoded(noise(), "jpeg", exif=exif(5)))
    assert got.dtype == np.uint8
    assert got.flags.c_contiguous
    assert got.flags.writeable


# ---------------------------------------------------------------- IMG-05, IMG-07: broken files


@functools.cache
def broken_files() -> dict[str, bytes]:
    image = noise(200, 150)
    good = encoded(image, "jpeg")
    png = encoded(image, "png")
    idat = png.index(b"IDAT")
    flipped = bytearray(png)
    flipped[idat + 40] ^= 1
    bad_sum = bytearray(png)
    bad_sum[idat - 4 + 8 + struct.unpack(">I", png[idat - 4 : idat])[0]] ^= 1
    signature = b"\x89PNG\r\n\x1a\n"
    head = png_chunk(b"IHDR", struct.pack(">IIBBBBB", 10, 10, 8, 2, 0, 0, 0))
    return {
        "truncated jpeg": good[:-128],
        "half a jpeg": good[: len(good) // 2],
        "png with a flipped bit": bytes(flipped),
        "png with a bad checksum": bytes(bad_sum),
        "png without an end": png[:-12],
        "half a png": png[: len(png) // 2],
        "no bytes": b"",
        "a text": b"this is not an image at all",
        "png signature and garbage": signature + b"\xde\xad\xbe\xef" * 20,
        "png signature": signature,
        "png header alone": signature + head,
        "png of no pixels": raw_png(np.zeros((1, 1, 3), np.uint8), 2, 8).replace(
            struct.pack(">II", 1, 1), struct.pack(">II", 0, 1)
        ),
        "png of an unknown kind": signature
        + png_chunk(b"IHDR", struct.pack(">IIBBBBB", 10, 10, 3, 5, 0, 0, 0)),
        "jpeg start": b"\xff\xd8\xff",
        "jpeg without a frame": b"\xff\xd8\xff\xda\x00\x02",
        "jpeg of no height": good[: good.index(b"\xff\xc0")]
        + b"\xff\xc0\x00\x11\x08\x00\x00\x00\x10\x03"
        + good[good.index(b"\xff\xc0") + 10 :],
        "gif start": b"GIF89a",
        "gif without a frame": encoded(image, "gif")[:13] + b";",
        "half a gif": encoded(image, "gif")[:2000],
        "webp start": b"RIFF\x10\0\0\0WEBP",
        "half a webp": encoded(image, "webp")[:500],
        "bmp start": b"BM" + bytes(12),
        "half a bmp": encoded(image, "bmp")[:500],
        "tiff start": b"II*\0",
        "tiff that points nowhere": b"II*\0\xf0\xff\xff\xff",
        "half a tiff": encoded(image, "tiff")[:-5000],
        "svg": b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>",
        "pickle": b"\x80\x04\x95\x10\x00\x00\x00",
    }


LEAKS = re.compile(r"0x[0-9a-f]{6,}| object at |/usr/|/lib/|Traceback|PIL|libpng|zlib|\.py")


@pytest.mark.parametrize("name", list(broken_files()))
def test_broken_files_are_refused_in_fixed_words(name: str) -> None:
    data = broken_files()[name]
    with pytest.raises(MediaError) as refused:
        decode(data)
    assert not LEAKS.search(str(refused.value))
    assert refused.value.reason in ("empty", "format", "corrupt", "unsupported")
    assert refused.value.__cause__ is None
    assert decode(encoded(halves(), "png")).shape == (32, 64, 3)


def test_a_header_of_other_bytes_is_refused() -> None:
    """Two parsers that disagree are caught, whichever is fooled."""
    data = encoded(noise(40, 30), "png")
    for other in (
        ImageHeader("png", 30, 40),
        ImageHeader("jpeg", 40, 30),
        ImageHeader("png", 4, 3),
    ):
        with pytest.raises(MediaError):
            decode(data, other)


def test_pillows_global_settings_are_untouched() -> None:
    pixels = Image.MAX_IMAGE_PIXELS
    with pytest.raises(MediaError):
        decode(broken_files()["truncated jpeg"])
    decode(encoded(noise(), "tiff"))
    assert pixels == Image.MAX_IMAGE_PIXELS
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False


# ---------------------------------------------------------------- IMG-16: bombs, limits


@functools.cache
def bombs() -> dict[str, bytes]:
    def bomb(width: int, height: int) -> bytes:
        head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        return (
            b"\x89PNG\r\n\x1a\n"
            + png_chunk(b"IHDR", head)
            + png_chunk(b"IDAT", zlib.compress(bytes(1 << 20)))
            + png_chunk(b"IEND", b"")
        )

    tiny_webp = bytearray(encoded(Image.new("RGBA", (8, 8), (1, 2, 3, 4)), "webp"))
    place = tiny_webp.index(b"VP8X") + 12
    tiny_webp[place : place + 6] = b"\xff\x3f\0\xff\x3f\0"
    tiny_gif = bytearray(encoded(Image.new("P", (8, 8)), "gif"))
    tiny_gif[6:10] = b"\xff\xff\xff\xff"
    tiny_bmp = bytearray(encoded(Image.new("RGB", (8, 8)), "bmp"))
    tiny_bmp[18:26] = struct.pack("<ii", 40_000, -40_000)
    return {
        "12000 x 12000 png": bomb(12_000, 12_000),
        "60000 x 60000 png": bomb(60_000, 60_000),
        "webp canvas": bytes(tiny_webp),
        "gif screen": bytes(tiny_gif),
        "bmp": bytes(tiny_bmp),
    }


@pytest.mark.parametrize("name", list(bombs()))
def test_bombs_are_refused_by_their_header(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bombs()[name]

    def refuse(*_: Any) -> Any:
        raise AssertionError("a decoder was opened")

    for kind in list(media._DECODERS):
        monkeypatch.setitem(media._DECODERS, kind, refuse)
    start = time.perf_counter()
    header = read_header(data)
    with pytest.raises(MediaError, match="pixels; at most 50,000,000") as refused:
        check(header, MediaLimits())
    with pytest.raises(MediaError, match="can be decoded"):
        decode(data, header)
    assert time.perf_counter() - start < 1
    assert refused.value.reason == "pixels"


@pytest.mark.parametrize(
    ("header", "num_bytes", "reason"),
    [
        (ImageHeader("png", 100, 100), 33 << 20, "bytes"),
        (ImageHeader("png", 8000, 7000), 1, "pixels"),
        (ImageHeader("png", 640, 1), 1, "aspect"),
        (ImageHeader("png", 1, 201), 1, "aspect"),
        (ImageHeader("gif", 10, 10, frames=1001), 1, "frames"),
    ],
)
def test_limits_of_one_image(header: ImageHeader, num_bytes: int, reason: str) -> None:
    with pytest.raises(MediaError) as refused:
        check(header, MediaLimits(), num_bytes)
    assert refused.value.reason == reason
    check(header, MediaLimits(64 << 20, media.MAX_PIXELS, 1000, 2000), num_bytes)


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (27, 257), (257, 27), (200, 1), (8064, 6048)])
def test_odd_but_legal_sizes_pass(size: tuple[int, int]) -> None:
    check(ImageHeader("png", *size), MediaLimits(), 1000)


def test_limits_of_a_request() -> None:
    limits = MediaLimits(max_images=3, max_total_pixels=250)
    check_request([ImageHeader("png", 10, 10)] * 2, limits)
    with pytest.raises(MediaError, match="300 pixels together; at most 250"):
        check_request([ImageHeader("png", 10, 10)] * 3, limits)
    with pytest.raises(MediaError, match="4 images; at most 3") as refused:
        check_request([ImageHeader("png", 1, 1)] * 4, limits)
    assert refused.value.reason == "images"


@pytest.mark.parametrize(
    "wrong",
    [{"max_pixels": 0}, {"max_pixels": 10**9}, {"max_images": 0}, {"max_aspect": 0.5}],
)
def test_senseless_limits_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        MediaLimits(**wrong)


@pytest.mark.parametrize(
    "data",
    [
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", struct.pack(">IIBBBBB", 9, 9, 8, 2, 0, 0, 0))
        + b"\0\0\0\0aaaa\0\0\0\0" * 400_000,
        b"GIF89a\x09\0\x09\0\0\0\0,\0\0\0\0\x09\0\x09\0\0\x08" + b"\x01a" * 2_000_000,
        b"RIFF\0\0\0\0WEBP" + b"aaaa\0\0\0\0" * 500_000,
        b"\xff\xd8" + b"\xff\x01" * 2_000_000,
        b"II*\0\x08\0\0\0" + (b"\0\0" + b"\x0e\0\0\0") * 600_000,
    ],
    ids=["png", "gif", "webp", "jpeg", "tiff"],
)
def test_files_of_endless_blocks_take_no_time(data: bytes) -> None:
    start = time.perf_counter()
    with pytest.raises(MediaError):
        check(read_header(data), MediaLimits(max_frames=1, max_pixels=80))
    assert time.perf_counter() - start < 1


# ---------------------------------------------------------------- robustness

SEEDS = [
    encoded(noise(24, 18), "png"),
    encoded(noise(24, 18), "jpeg", exif=exif(6)),
    encoded(noise(24, 18), "jpeg", progressive=True),
    encoded(noise(24, 18).convert("CMYK"), "jpeg"),
    encoded(noise(24, 18), "webp"),
    encoded(noise(24, 18).convert("RGBA"), "webp", lossless=True, exif=exif(3)),
    encoded(noise(24, 18), "gif"),
    encoded(noise(24, 18), "bmp"),
    encoded(noise(24, 18), "tiff", compression="tiff_lzw"),
    encoded(noise(24, 18).convert("P"), "png", transparency=3),
    encoded(Image.fromarray(DRAW.integers(0, 65535, (9, 9)).astype(np.uint16)), "tiff"),
]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(1, 6))):
        place = draw(st.integers(0, max(0, min(len(data) - 1, 400))))
        match draw(st.integers(0, 3)):
            case 0:
                data[place : place + 1] = bytes([draw(st.integers(0, 255))])
            case 1:
                del data[place : place + draw(st.integers(1, 16))]
            case 2:
                data[place:place] = draw(st.binary(max_size=8))
            case _:
                del data[place + draw(st.integers(0, len(data))) :]
    return bytes(data)


@settings(max_examples=200, deadline=None)
@given(mutated())
@example(b"")
@example(b"II*\0\x08\0\0\0\x01\0\x00\x01\x03\0\x01\0\0\0\x09\0\0\0\0\0\0\0")
def test_whatever_the_bytes_only_a_media_error_comes_out(data: bytes) -> None:
    picture, said = None, ""
    try:
        header = read_header(data)
        check(header, MediaLimits(max_pixels=1_000_000), len(data))
        picture = decode(data, header)
    except MediaError as refused:
        said = str(refused)
    assert not LEAKS.search(said)
    assert said or (picture is not None and picture.shape == (header.height, header.width, 3))


def test_threads_decode_at_once() -> None:
    files = [encoded(noise(120, 90), kind) for kind in ("png", "jpeg", "webp", "gif", "tiff")] * 8
    alone = [decode(data) for data in files]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(decode, files))
    assert all(np.array_equal(a, b) for a, b in zip(alone, together, strict=True))


# ---------------------------------------------------------------- keys


def test_keys_separate_everything_that_rows_depend_on() -> None:
    parts = (b"bytes", b"plan", b"revision")
    keys = {
        content_key(*parts),
        content_key(b"bytes", b"plan", b"revision", b"tenant"),
        content_key(b"bytes", b"planrevision", b""),
        content_key(b"bytes", b"", b"planrevision"),
        content_key(b"bytesplan", b"", b"revision"),
        content_key(b"", b"plan", b"revision"),
        content_key(b"bytes", b"plan", b"revision", b""),
    }
    assert len(keys) == 7
    assert {len(key) for key in keys} == {32}
    assert content_key(*parts) == content_key(*parts)


def test_keys_do_without_blake3(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = content_key(b"a", b"b", b"c")
    monkeypatch.setitem(sys.modules, "blake3", None)
    media._hash.cache_clear()
    try:
        slow = content_key(b"a", b"b", b"c")
        assert media._hash()[0] == "blake2b"
    finally:
        media._hash.cache_clear()
    assert len(slow) == 32
    assert slow != fast
