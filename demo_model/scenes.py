"""Scenes of printed text: what is written where, drawn whole or straight into the tower's tile.

Owns: layouts, and the two ways of drawing one: a real image of any size, or some cells of the
256 x 256 tile that the processor would make of it, several times cheaper. Does not own fonts,
colours and degradations (`data`), what is written (`texts`) or the supervision (`examples`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from demo_model import data
from demo_model.data import CELLS, PATCH_PX, TILE_PX

Array = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Box = tuple[float, float, float, float]
LEAST_PITCH_PX = 18.5  # of a line's characters, in the tile


@dataclass(frozen=True)
class Item:
    """One word or number of the `line`-th line; `boxes` per character, in tile pixels."""

    text: str
    boxes: tuple[Box, ...]
    line: int

    @property
    def box(self) -> Box:
        xs0, ys0, xs1, ys1 = zip(*self.boxes, strict=True)
        return min(xs0), min(ys0), max(xs1), max(ys1)


@dataclass(frozen=True)
class Placed:
    """A line's ink (`mask`, native pixels) with its upper left corner in the image."""

    mask: Image.Image
    x: int
    y: int


@dataclass(frozen=True)
class Layout:
    """An image of `width` x `height` pixels before colours: lines of ink and their items."""

    width: int
    height: int
    lines: tuple[Placed, ...]
    items: tuple[Item, ...]
    glyph_px: float


@lru_cache(maxsize=256)
def _advances(path: Path) -> Callable[[str], float]:
    """The width of a face's characters, in em."""
    unit = data.font(path, 200)
    return lru_cache(maxsize=256)(lambda char: unit.getlength(char) / 200)


def _line_ink(
    rng: random.Random,
    words: list[str],
    path: Path,
    size: int,
    spacing: float,
    degrees: float,
    gap_em: float,
) -> tuple[Image.Image, list[list[Box]]]:
    """The mask of a line of words and, per word, its characters' boxes inside the mask."""
    font = data.font(path, size)
    advances = _advances(path)
    text = " ".join(words)
    _, top, _, bottom = font.getbbox(text, anchor="ls")
    pad = 2 + int(size * 0.1)
    stroke = 1 if size > 40 and rng.random() < 0.1 else 0
    places: list[list[tuple[str, float, float]]] = []
    x = float(pad)
    for word in words:
        row = []
        for char in word:
            advance = advances(char) * size
            row.append((char, x, x + advance))
            x += advance + spacing
        places.append(row)
        x += gap_em * size
    width = math.ceil(x - spacing - gap_em * size + pad)
    height = int(bottom - top) + 2 * pad
    mask = Image.new("L", (width, height), 0)
    draw = ImageDraw.Draw(mask)
    for row in places:
        for char, left, _ in row:
            draw.text(
                (left, pad - top), char, fill=255, font=font, anchor="ls", stroke_width=stroke
            )
    boxes = [[(x0, float(pad), x1, float(height - pad)) for _, x0, x1 in row] for row in places]
    if not degrees:
        return mask, boxes
    rotated = mask.rotate(degrees, Image.Resampling.BICUBIC, expand=True)
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))

    def turn(box: Box) -> Box:
        x0, y0, x1, y1 = box
        dx, dy = (x0 + x1) / 2 - width / 2, (y0 + y1) / 2 - height / 2
        cx, cy = rotated.width / 2 + dx * cos + dy * sin, rotated.height / 2 - dx * sin + dy * cos
        w, h = (x1 - x0) / 2, (y1 - y0) / 2
        return cx - w, cy - h, cx + w, cy + h

    return rotated, [[turn(b) for b in row] for row in boxes]


Line = list[str]


def lay_out(
    rng: random.Random,
    lines: list[Line],
    fonts: list[Path],
    longest_px: tuple[int, int] = (64, 1024),
    tall: float = 2.2,
    columns: bool = False,
) -> Layout:
    """Place lines of words in an image of any shape, readable once it is squashed.

    `columns` spreads lines of two items to both edges, as receipts do; `tall` bounds how far the
    squash may stretch text upwards.
    """
    longest_line = max(len(" ".join(line)) for line in lines)
    for attempt in range(1000):
        path = rng.choice(fonts)
        advances = _advances(path)
        spacing_em = rng.uniform(0.0, 0.1) if rng.random() < 0.2 else 0.0
        gap_em = rng.uniform(0.25, 0.7)
        widths = [
            sum(advances(c) + spacing_em for word in line for c in word) + gap_em * (len(line) - 1)
            for line in lines
        ]
        wide = max(widths)
        # Tile pixels per em, sideways and downwards.
        least = LEAST_PITCH_PX * longest_line / wide
        most = min((TILE_PX - 6) / wide, 80.0)
        if most < least:
            if attempt > 20:
                least = most * 0.98
            else:
                continue
        # Rather small than large: that is where reading is hard, and training cheap.
        em_x = least * max(1.0, min(most / least, 2.4)) ** (rng.random() ** 1.5)
        pitch_em = rng.uniform(1.15, 1.9)  # of the lines
        most_y = (TILE_PX - 4) / ((len(lines) - 1) * pitch_em + 1.0)
        stretch = 0.75 * (tall / 0.75) ** (rng.random() ** 1.3)
        em_y = min(em_x * stretch, most_y, 200)
        if em_y < 0.62 * em_x or em_y < 30:
            continue
        aspect = em_y / em_x
        longest = math.exp(rng.uniform(math.log(longest_px[0]), math.log(longest_px[1])))
        width = longest if aspect >= 1 else longest * aspect
        height = longest if aspect < 1 else longest / aspect
        size = em_x * width / TILE_PX
        if size < 11:
            continue
        w, h = round(width), round(height)
        degrees = rng.gauss(0, 1.7) if rng.random() < 0.25 else 0.0
        if len(lines) > 1:
            degrees *= 0.5
        gaps = [
            gap_em + (wide - own if columns and len(line) == 2 else 0.0)
            for line, own in zip(lines, widths, strict=True)
        ]
        drawn = [
            _line_ink(rng, line, path, int(size), spacing_em * size, degrees, gap)
            for line, gap in zip(lines, gaps, strict=True)
        ]
        block = max(m.width for m, _ in drawn)
        if block > w * 1.04:
            continue
        step = size * pitch_em
        tall_px = step * (len(lines) - 1) + drawn[-1][0].height
        if tall_px > h * 1.06:
            continue
        left = rng.uniform(*sorted((-1.0, w - block + 1.0)))
        top = rng.uniform(*sorted((-1.0, h - tall_px + 1.0)))
        align = rng.choice(("left", "left", "centre", "right"))
        placed, items = [], []
        sx, sy = TILE_PX / w, TILE_PX / h
        for i, (line, (mask, boxes)) in enumerate(zip(lines, drawn, strict=True)):
            share = {"left": 0.0, "centre": 0.5, "right": 1.0}[align]
            x, y = round(left + (block - mask.width) * share), round(top + step * i)
            placed.append(Placed(mask, x, y))
            for word, row in zip(line, boxes, strict=True):
                moved = tuple(
                    ((x0 + x) * sx, (y0 + y) * sy, (x1 + x) * sx, (y1 + y) * sy)
                    for x0, y0, x1, y1 in row
                )
                items.append(Item(word, moved, i))
        return Layout(w, h, tuple(placed), tuple(items), size)
    raise ValueError(f"no layout for {lines}")


def draw_whole(rng: random.Random, layout: Layout) -> Image.Image:
    """The layout as a real image, with colours, background and degradations."""
    paper, ink = data.colours(rng)
    image = data.background(rng, layout.width, layout.height, paper)
    for line in layout.lines:
        image.paste(Image.new("RGB", line.mask.size, ink), (line.x, line.y), line.mask)
    return data.degrade(rng, image, layout.glyph_px)


def _tile_mask(layout: Layout) -> Image.Image:
    tile = Image.new("L", (TILE_PX, TILE_PX), 0)
    sx, sy = TILE_PX / layout.width, TILE_PX / layout.height
    for line in layout.lines:
        x0, y0 = line.x * sx, line.y * sy
        x1, y1 = (line.x + line.mask.width) * sx, (line.y + line.mask.height) * sy
        size = (max(1, round(x1) - round(x0)), max(1, round(y1) - round(y0)))
        squashed = line.mask.resize(size, Image.Resampling.BICUBIC)
        at = (round(x0), round(y0))
        tile.paste(255, (at[0], at[1], at[0] + size[0], at[1] + size[1]), squashed)
    return tile


def to_cells(tile: Array) -> Array:
    """(256, 256, C) to (64, 4, 16, 16, C): cells in reading order, patches of a cell likewise."""
    s = PATCH_PX
    parts = tile.reshape(CELLS, 2, s, CELLS, 2, s, -1).transpose(0, 3, 1, 4, 2, 5, 6)
    return parts.reshape(CELLS * CELLS, 4, s, s, -1)


def paint_cells(rng: random.Random, layout: Layout, keep: Ints) -> Array:
    """The kept cells (N, 4, 16, 16, 3) of the tile that this layout would become."""
    paper, ink = data.colours(rng)
    inked = to_cells(np.asarray(_tile_mask(layout))[:, :, None])[keep]
    kind, noisy = rng.random(), rng.random() < 0.2
    if kind <= 0.75 and not noisy:
        ramp = np.linspace(np.asarray(paper), np.asarray(ink), 256).astype(np.uint8)
        return ramp[inked[..., 0]]
    mask = inked.astype(np.float32) / np.float32(255)
    base: npt.NDArray[np.float32] = np.broadcast_to(
        np.asarray(paper, np.float32), (*mask.shape[:-1], 3)
    )
    if kind > 0.75:
        shade = Image.new("L", (TILE_PX, TILE_PX), 0)
        draw = ImageDraw.Draw(shade)
        if kind < 0.87:
            shade = Image.linear_gradient("L").rotate(rng.choice((0, 90, 180, 270)))
        elif kind < 0.95:
            inset = rng.randint(0, 20)
            far = TILE_PX - 1 - inset
            draw.rectangle((inset, inset, far, far), outline=255, width=rng.randint(1, 6))
        else:
            gap = rng.randint(8, 60)
            for y in range(rng.randint(0, gap), TILE_PX, gap):
                draw.line((0, y, TILE_PX, y), fill=255)
        other = [min(255, max(0, c + rng.choice((-40, -25, 25, 40)))) for c in paper]
        share = to_cells(np.asarray(shade)[:, :, None])[keep].astype(np.float32) / np.float32(255)
        base = base + (np.asarray(other, np.float32) - base) * share
    out = base + (np.asarray(ink, np.float32) - base) * mask
    if noisy:
        noise = np.random.default_rng(rng.getrandbits(32)).standard_normal(
            out.shape, dtype=np.float32
        )
        out = out + noise * np.float32(rng.uniform(2, 15))
    return np.clip(out, 0, 255).astype(np.uint8)
