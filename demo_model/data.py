"""What all generated images share: fonts, number strings, colours, backgrounds, degradations.

Owns: the split into training and held-out fonts and strings, and the resize that the Idefics3 image
processor performs, so that the tower trains on what it will be served. Does not own what stands in
an image and where (`scenes`, `shapes`).
"""

from __future__ import annotations

import hashlib
import io
import random
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
MAX_DIGITS = 8
# How numbers are dressed: each 0 becomes a digit.
PATTERNS = (
    *("$0.00", "$00.00", "$000.00", "$0,000", "$00", "$000", "$0000", "0.0", "0.00", "00.00"),
    *("000.00", "0.000", "0,000", "00,000", "000,000", "0%", "00%", "0.0%", "00.0%", "-0", "-00"),
    *("-00.0", "-0.00", "00:00", "0:00", "00/00", "0/0", "00/00/00", "00-00", "000-0000"),
)

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
def font(path: Path, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(path), size)


def _luminance(colour: tuple[int, int, int]) -> float:
    return 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]


def colours(rng: random.Random) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
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


def background(
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


def texture(rng: random.Random, width: int, height: int) -> Image.Image:
    """Something without text or shapes: plain paper, or blurred colours of every size, as in a
    photograph."""
    paper, _ = colours(rng)
    image = background(rng, width, height, paper)
    if rng.random() < 0.3:
        return image
    noise = np.random.default_rng(rng.getrandbits(32))
    pixels = np.asarray(image, dtype=np.float32)
    fade = rng.uniform(0.4, 0.9)
    strength = rng.uniform(20, 90)
    side = rng.choice((2, 3, 5))
    while side < max(width, height):
        tint = 3 if rng.random() < 0.7 else 1
        grid = noise.normal(0, strength, (side, side, tint)).repeat(3 // tint, axis=2)
        coarse = Image.fromarray(np.clip(grid + 128, 0, 255).astype(np.uint8))
        fine = coarse.resize((width, height), Image.Resampling.BICUBIC)
        pixels = pixels + np.asarray(fine, dtype=np.float32) - 128
        side, strength = side * 2 + rng.randint(0, 2), strength * fade
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def degrade(rng: random.Random, image: Image.Image, glyph_px: float) -> Image.Image:
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
