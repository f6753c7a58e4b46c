"""Generated images of printed numbers, and where each character stands in them.

Owns: drawing (fonts, colours, noise, rotation, JPEG artefacts), the split into training and
held-out fonts and strings, and the resize that the Idefics3 image processor performs, so that the
tower trains on what it will be served. Does not own the model, its losses or its evaluation.
"""

from __future__ import annotations

import hashlib
import io
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFilter, ImageFont

TILE_PX = 256
PATCH_PX = 16
GRID = TILE_PX // PATCH_PX
CELL_PX = 32  # one image token covers two by two patches
CELLS = TILE_PX // CELL_PX
CHARS = "0123456789.,$%-:/"  # class of a character = its index here
BLANK = len(CHARS)
MAX_DIGITS = 8
# How numbers are dressed: each 0 becomes a digit.
PATTERNS = (
    *("$0.00", "$00.00", "$000.00", "$0,000", "$00", "$000", "$0000", "0.0", "0.00", "00.00"),
    *("000.00", "0.000", "0,000", "00,000", "000,000", "0%", "00%", "0.0%", "00.0%", "-0", "-00"),
    *("-00.0", "-0.00", "00:00", "0:00", "00/00", "0/0", "00/00/00", "00-00", "000-0000"),
)
BAND_ROWS = (4, 6, 8, 12, 16)  # heights of the crops used in training, in patches

FONT_ROOT = Path("/usr/share/fonts")
# Whole families and single faces that training never sees.
HELD_OUT_FACES = (
    "Caladea-Bold",
    "Caladea-BoldItalic",
    "Caladea-Italic",
    "Caladea-Regular",
    "Hack-Bold",
    "Hack-BoldItalic",
    "Hack-Italic",
    "Hack-Regular",
    "Inconsolata",
    "LiberationSansNarrow-Regular",
    "OpenSans-Semibold",
    "RobotoCondensed-Medium",
)
# Hairlines vanish at the tile's resolution; the mathematical face has no ordinary text.
UNUSED_FACES = ("Lato-Hairline", "Lato-HairlineItalic", "DejaVuMathTeXGyre")

Array = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Sample:
    """One drawn image; `boxes` holds (x0, y0, x1, y1) per character, in image pixels."""

    image: Image.Image
    text: str
    boxes: tuple[tuple[float, float, float, float], ...]


@lru_cache(maxsize=1)
def _all_faces() -> tuple[Path, ...]:
    files = [*FONT_ROOT.rglob("*.ttf"), *FONT_ROOT.rglob("*.otf")]
    return tuple(sorted((f for f in files if f.stem not in UNUSED_FACES), key=lambda f: f.name))


def faces(held_out: bool) -> list[Path]:
    """The font files of one side of the split."""
    found = [f for f in _all_faces() if (f.stem in HELD_OUT_FACES) == held_out]
    if not found:
        raise FileNotFoundError("no fonts: install the Debian packages listed in MODEL_CARD.md")
    return found


def is_held_out(text: str) -> bool:
    """One string in sixteen, chosen by its hash, is kept for evaluation (from three characters)."""
    return len(text) >= 3 and hashlib.sha256(text.encode()).digest()[0] % 16 == 0


def draw_digits(rng: random.Random, held_out: bool = False) -> str:
    """A number of 1 to 8 digits from the asked side of the split."""
    length = rng.randint(1, MAX_DIGITS)
    while True:
        text = "".join(rng.choice("0123456789") for _ in range(length))
        if text[0] == "0" and length > 1 and rng.random() < 0.8:
            continue
        # One- and two-digit numbers are too few to hold out: only their looks are unseen.
        if length < 3 or is_held_out(text) == held_out:
            return text


def draw_dressed(rng: random.Random, held_out: bool = False) -> str:
    """A price, decimal, percentage, time, date or the like, of at most 8 characters."""
    pattern = rng.choice(PATTERNS)
    while True:
        text = "".join(rng.choice("0123456789") if c == "0" else c for c in pattern)
        if len(text) < 3 or is_held_out(text) == held_out:
            return text


@lru_cache(maxsize=1024)
def _font(path: Path, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(path), size)


def _luminance(colour: tuple[int, int, int]) -> float:
    return 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]


def _colours(rng: random.Random) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Background and ink, at least 80 grey levels apart."""
    if rng.random() < 0.6:
        paper = rng.randint(225, 255)
        ink = rng.randint(0, 60)
        pair = ((paper,) * 3, (ink,) * 3)
        return pair if rng.random() < 0.8 else (pair[1], pair[0])
    while True:
        a = (rng.randint(0, 255), rng.randint(0, 255), rng.randint(0, 255))
        b = (rng.randint(0, 255), rng.randint(0, 255), rng.randint(0, 255))
        if abs(_luminance(a) - _luminance(b)) >= 80:
            return a, b


def _background(
    rng: random.Random, width: int, height: int, colour: tuple[int, int, int]
) -> Image.Image:
    image = Image.new("RGB", (width, height), colour)
    kind = rng.random()
    if kind < 0.75:
        return image
    if kind < 0.87:  # a gradient towards a nearby colour
        other = tuple(min(255, max(0, c + rng.randint(-45, 45))) for c in colour)
        mask = Image.linear_gradient("L").rotate(rng.choice((0, 90, 180, 270)))
        image.paste(Image.new("RGB", (width, height), other), mask=mask.resize((width, height)))
        return image
    draw = ImageDraw.Draw(image)
    shade = tuple(min(255, max(0, c + rng.choice((-40, -25, 25, 40)))) for c in colour)
    if kind < 0.95:  # a frame
        inset = rng.randint(0, max(1, min(width, height) // 12))
        draw.rectangle(
            (inset, inset, width - 1 - inset, height - 1 - inset),
            outline=shade,
            width=rng.randint(1, max(1, min(width, height) // 40)),
        )
    else:  # ruled paper
        step = rng.randint(6, 40)
        for y in range(rng.randint(0, step), height, step):
            draw.line((0, y, width, y), fill=shade)
    return image


def _degrade(rng: random.Random, image: Image.Image, glyph_px: float) -> Image.Image:
    """Blur, noise and JPEG, in amounts that a reader of glyphs of this height would survive."""
    if rng.random() < 0.15:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.2, 0.035 * glyph_px)))
    if rng.random() < 0.15:
        pixels = np.asarray(image, dtype=np.int16)
        noise = np.random.default_rng(rng.getrandbits(32)).normal(
            0, rng.uniform(2, 15), size=pixels.shape
        )
        image = Image.fromarray(np.clip(pixels + noise, 0, 255).astype(np.uint8))
    if rng.random() < 0.3:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=rng.randint(35, 95))
        image = Image.open(buffer).convert("RGB")
    return image


@dataclass(frozen=True)
class _Line:
    """The ink of one text line: a mask, and each character's box inside it."""

    mask: Image.Image
    boxes: list[tuple[float, float, float, float]]


def _draw_line(
    rng: random.Random, text: str, font: ImageFont.FreeTypeFont, spacing: float, degrees: float
) -> _Line:
    stroke = 1 if font.size > 40 and rng.random() < 0.1 else 0
    # The cap height of digits, not the font's whole line, says where the ink is.
    _, top, _, bottom = font.getbbox(text, anchor="ls")
    pad = 3 + int(font.size * 0.15)
    offsets, x = [], float(pad)
    for char in text:
        advance = font.getlength(char)
        offsets.append((x, x + advance))
        x += advance + spacing
    width, height = math.ceil(x - spacing + pad), int(bottom - top) + 2 * pad
    mask = Image.new("L", (width, height), 0)
    draw = ImageDraw.Draw(mask)
    for char, (left, _) in zip(text, offsets, strict=True):
        draw.text((left, pad - top), char, fill=255, font=font, anchor="ls", stroke_width=stroke)
    boxes = [(left, float(pad), right, float(height - pad)) for left, right in offsets]
    if degrees:
        rotated = mask.rotate(degrees, Image.Resampling.BICUBIC, expand=True)
        cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
        moved = []
        for x0, y0, x1, y1 in boxes:
            dx, dy = (x0 + x1) / 2 - width / 2, (y0 + y1) / 2 - height / 2
            cx = rotated.width / 2 + dx * cos + dy * sin
            cy = rotated.height / 2 - dx * sin + dy * cos
            w, h = (x1 - x0) / 2, (y1 - y0) / 2
            moved.append((cx - w, cy - h, cx + w, cy + h))
        mask, boxes = rotated, moved
    return _Line(mask, boxes)


def render_easy(rng: random.Random, text: str, fonts: list[Path]) -> Sample:
    """Dark text on light paper, of nearly one size and shape: what the tower learns first."""
    while True:
        width = height = TILE_PX
        path = rng.choice(fonts)
        left, _, right, _ = _font(path, 100).getbbox(text)
        size = rng.uniform(32, 52)
        if (right - left) * size / 100 > width - 8:
            continue
        line = _draw_line(rng, text, _font(path, int(size)), 0.0, 0.0)
        if line.mask.width <= width + 4:
            break
    image = Image.new("RGB", (width, height), (rng.randint(215, 255),) * 3)
    ink = (rng.randint(0, 60),) * 3
    x = rng.randint(*sorted((0, width - line.mask.width)))
    y = rng.randint(0, height - line.mask.height)
    image.paste(Image.new("RGB", line.mask.size, ink), (x, y), line.mask)
    return Sample(
        image, text, tuple((x0 + x, y0 + y, x1 + x, y1 + y) for x0, y0, x1, y1 in line.boxes)
    )


def render(
    rng: random.Random, text: str, fonts: list[Path], longest_px: tuple[int, int] = (64, 640)
) -> Sample:
    """Draw `text` as one line at a readable size somewhere in an image of any shape."""
    while True:
        aspect = math.exp(rng.uniform(math.log(0.7), math.log(4.0)))
        low = max(longest_px[0], 15 * len(text))
        longest = round(math.exp(rng.uniform(math.log(low), math.log(max(low + 1, longest_px[1])))))
        width = longest if aspect >= 1 else max(48, round(longest * aspect))
        height = longest if aspect < 1 else max(24, round(longest / aspect))
        path = rng.choice(fonts)
        unit = _font(path, 100)
        left, top, right, bottom = unit.getbbox(text)
        spacing_em = rng.uniform(0.0, 0.12) if rng.random() < 0.3 else 0.0
        unit_width = (right - left) / 100 + spacing_em * (len(text) - 1)
        unit_height = (bottom - top) / 100
        # Wide enough that neighbouring digits stay about a patch apart in the tile.
        least = min(0.9, 21 * len(text) / TILE_PX)
        size = min(
            rng.uniform(max(0.3, least), 0.95) * width / unit_width,
            rng.uniform(0.2, 0.75) * height / unit_height,
        )
        drawn_width, drawn_height = size * unit_width, size * unit_height
        pitch_px = drawn_width / len(text) / width * TILE_PX
        tile_height_px = drawn_height / height * TILE_PX
        if pitch_px < 19 or tile_height_px < 24 or drawn_height < 9:
            continue
        degrees = rng.gauss(0, 2.0) if rng.random() < 0.3 else 0.0
        line = _draw_line(rng, text, _font(path, max(8, int(size))), spacing_em * size, degrees)
        if line.mask.width > width * 1.08 or line.mask.height > height * 1.15:
            continue
        break
    paper, ink = _colours(rng)
    image = _background(rng, width, height, paper)
    # The mask carries a margin; letting it hang over the edge a little puts ink near the edge.
    x = rng.randint(*sorted((-2, width - line.mask.width + 2)))
    y = rng.randint(*sorted((-2, height - line.mask.height + 2)))
    image.paste(Image.new("RGB", line.mask.size, ink), (x, y), line.mask)
    boxes = tuple((x0 + x, y0 + y, x1 + x, y1 + y) for x0, y0, x1, y1 in line.boxes)
    return Sample(_degrade(rng, image, drawn_height), text, boxes)


def squash(image: Image.Image) -> Array:
    """The processor's two resizes (longest edge to the tile, then square), as uint8 pixels."""
    width, height = image.size
    aspect = width / height
    if width >= height:
        first = (TILE_PX, int(TILE_PX / aspect))
        first = (first[0], max(1, first[1] + first[1] % 2))
    else:
        first = (int(TILE_PX * aspect), TILE_PX)
        first = (max(1, first[0] + first[0] % 2), first[1])
    if image.size != first:
        image = image.resize(first, Image.Resampling.BICUBIC)
    if image.size != (TILE_PX, TILE_PX):
        image = image.resize((TILE_PX, TILE_PX), Image.Resampling.BICUBIC)
    return np.asarray(image.convert("RGB"), dtype=np.uint8)


def columns(centres: list[float]) -> list[int]:
    """Adjacent token columns for characters with the given centres (in cells).

    Adjacent even where the characters lie further apart: with blanks in between, the language
    model reads 1215 as 12 and 15.
    """
    n = len(centres)
    first = round((centres[0] + centres[-1]) / 2 - n / 2)
    first = min(CELLS - n, max(0, first))
    return list(range(first, first + n))


@dataclass(frozen=True)
class Example:
    """A training example: a band of the tile with its supervision.

    `pixels` (rows*16, 256, 3) uint8; `first_row` the band's first patch row in the tile;
    `patch_labels` (rows, 16) and `cell_labels` (rows/2, 8) classes 0..BLANK; `text` the string.
    """

    pixels: Array
    first_row: int
    patch_labels: npt.NDArray[np.int64]
    cell_labels: npt.NDArray[np.int64]
    text: str


def to_example(rng: random.Random, sample: Sample, whole: bool = False) -> Example:
    """Squash a sample and cut the smallest band of patches that holds its line."""
    sx, sy = TILE_PX / sample.image.width, TILE_PX / sample.image.height
    boxes = [(x0 * sx, y0 * sy, x1 * sx, y1 * sy) for x0, y0, x1, y1 in sample.boxes]
    patches = np.full((GRID, GRID), BLANK, dtype=np.int64)
    mid = (np.arange(GRID) + 0.5) * PATCH_PX
    for char, (x0, y0, x1, y1) in zip(sample.text, boxes, strict=True):
        across = (mid >= x0) & (mid < x1)
        down = (mid >= y0) & (mid < y1)
        across[min(GRID - 1, max(0, int((x0 + x1) / 2 // PATCH_PX)))] = True
        down[min(GRID - 1, max(0, int((y0 + y1) / 2 // PATCH_PX)))] = True
        patches[np.ix_(down, across)] = CHARS.index(char)
    cells = np.full((CELLS, CELLS), BLANK, dtype=np.int64)
    centre_y = sum(b[1] + b[3] for b in boxes) / (2 * len(boxes))
    row = min(CELLS - 1, max(0, int(centre_y // CELL_PX)))
    for char, col in zip(
        sample.text, columns([(b[0] + b[2]) / 2 / CELL_PX for b in boxes]), strict=True
    ):
        cells[row, col] = CHARS.index(char)
    top = max(0, int(min(b[1] for b in boxes) // PATCH_PX))
    bottom = min(GRID, math.ceil(max(b[3] for b in boxes) / PATCH_PX))
    rows = GRID
    if not whole:
        rows = next(r for r in BAND_ROWS if r >= min(GRID, bottom - top + 1 + (top % 2)))
    low, high = max(0, bottom - rows), min(top, GRID - rows)
    low += low % 2
    first = (
        rng.randrange(low, high + 1, 2) if high >= low else max(0, min(GRID - rows, top // 2 * 2))
    )
    pixels = squash(sample.image)[first * PATCH_PX : (first + rows) * PATCH_PX]
    return Example(
        pixels,
        first,
        patches[first : first + rows],
        cells[first // 2 : (first + rows) // 2],
        sample.text,
    )


def examples(
    seed: int, whole_share: float, easy: int = 0, dressed_share: float = 0.0
) -> Iterator[Example]:
    """An endless stream of training examples; `whole_share` of them are whole tiles.

    Over the first `easy` examples the share of easy ones falls from all to none.
    """
    rng = random.Random(seed)
    fonts = faces(held_out=False)
    made = 0
    while True:
        made += 1
        if rng.random() * easy > made - easy / 3:
            yield to_example(rng, render_easy(rng, draw_digits(rng), fonts))
            continue
        text = draw_dressed(rng) if rng.random() < dressed_share else draw_digits(rng)
        sample = render(rng, text, fonts)
        yield to_example(rng, sample, whole=rng.random() < whole_share)
