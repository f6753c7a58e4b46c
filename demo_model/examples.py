"""From a drawn scene to a training example: what stands where, and which cells to keep.

Owns: the supervision of text and the choice of cells. Does not own drawing (`scenes`), shapes'
supervision (`shapes`), or batching (`train`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from demo_model import data, lexicon
from demo_model.data import CELL_PX, CELLS, GRID, PATCH_PX
from demo_model.scenes import Array, Ints, Item, Layout, draw_whole, paint_cells, to_cells

MAX_TOKENS = 8  # of one item
CANDIDATES = 6  # cells where an item may begin
SUBCOLS = 2 * GRID  # character labels are per half patch


@dataclass(frozen=True)
class Example:
    """Kept cells of one tile with their supervision.

    `pixels` (N, 4, 16, 16, 3) uint8 and `cells` (N,) their indices in the tile, ascending;
    `glyphs` (N, 4, 2) character per half patch; `mates` (N, 4, 4) the characters two and one before
    and one and two after the patch's own in its item, -1 off items; `words` (N, 4) class of the
    word on the patch, -1 off words; `tags` (N, 4) of shapes, -1 for text. Items: `starts`
    (I, CANDIDATES) tile cells, -1 unused; `tokens` (I, MAX_TOKENS) classes, -1 unused.
    """

    pixels: Array
    cells: Ints
    glyphs: Ints
    mates: Ints
    words: Ints
    tags: Ints
    starts: Ints
    tokens: Ints


@dataclass(frozen=True)
class Draft:
    """An example before it is painted: the cells it must keep, and how to make it from a choice."""

    need: frozenset[int]
    make: Callable[[Ints], Example]

    def with_cells(self, rng: random.Random, count: int) -> Example:
        """Paint it with `count` cells: those needed and others at random."""
        rest = [c for c in range(CELLS * CELLS) if c not in self.need]
        spare = rng.sample(rest, max(0, min(len(rest), count - len(self.need))))
        return self.make(np.array(sorted(self.need.union(spare))))


def _near(value: float, margin: float, last: int) -> list[int]:
    """The cell that holds `value` (in cells), and a neighbour whose edge is within `margin`."""
    base = min(last, max(0, math.floor(value)))
    out = [base]
    if value - base < margin and base > 0:
        out.append(base - 1)
    if value - base > 1 - margin and base < last:
        out.append(base + 1)
    return out


def place(items: tuple[Item, ...]) -> tuple[Ints, Ints]:
    """Where each item may begin, and its tokens: `Example.starts` and `Example.tokens`.

    A word is one token near its middle; a number's characters stand in adjacent cells about its
    middle, since the language model reads a number with gaps as several. A word before a number
    makes room for it on their line.
    """
    starts = np.full((len(items), CANDIDATES), -1, dtype=np.int64)
    tokens = np.full((len(items), MAX_TOKENS), -1, dtype=np.int64)
    for i, item in enumerate(items):
        classes = lexicon.tokens_of(item.text)
        n = len(classes)
        tokens[i, :n] = classes
        x, y = item.middle
        low, high = 0, CELLS - n
        before, after = _neighbours(items, item)
        if n == 1 and after:
            high = CELLS - 1 - len(lexicon.tokens_of(after.text))
        if n > 1 and before:
            low = min(high, int(before.middle[0] // CELL_PX) + 1)
        if n == 1:
            # Beside a number only one place: the number may begin in the next cell.
            cols = _near(x / CELL_PX, 0.0 if after and high < CELLS - 2 else 0.3, CELLS - 1)
        else:
            first = x / CELL_PX - n / 2
            cols = [round(first), math.floor(first), math.ceil(first)]
        cols = list(dict.fromkeys(min(high, max(low, c)) for c in cols))
        taken = {row_of(m) for m in items} - {row_of(item)}
        rows = [r for r in _near(y / CELL_PX, 0.25, CELLS - 1) if r not in taken]
        cells = [r * CELLS + c for r in rows[:2] for c in cols[:3]]
        starts[i, : len(cells)] = cells
    return starts, tokens


def row_of(item: Item) -> int:
    """The row of cells that holds an item's middle."""
    return min(CELLS - 1, max(0, int(item.middle[1] // CELL_PX)))


def _neighbours(items: tuple[Item, ...], item: Item) -> tuple[Item | None, Item | None]:
    """The items directly before and after on the same line."""
    x, y = item.middle
    line = [m for m in items if abs(m.middle[1] - y) < CELL_PX / 2]
    before = max((m for m in line if m.middle[0] < x), key=lambda m: m.middle[0], default=None)
    after = min((m for m in line if m.middle[0] > x), key=lambda m: m.middle[0], default=None)
    return before, after


def label(layout_items: tuple[Item, ...]) -> tuple[Ints, Ints, Ints]:
    """Tile-wide `glyphs` (64, 4, 2), `mates` (64, 4, 4) and `words` (64, 4)."""
    glyphs = np.full((GRID, SUBCOLS), lexicon.NO_GLYPH, dtype=np.int64)
    mates = np.full((GRID, GRID, 4), -1, dtype=np.int64)
    words = np.full((GRID, GRID), -1, dtype=np.int64)
    mid_y = (np.arange(GRID) + 0.5) * PATCH_PX
    mid_x = (np.arange(SUBCOLS) + 0.5) * PATCH_PX / 2
    for item in layout_items:
        classes = lexicon.tokens_of(item.text)
        x0, y0, x1, y1 = item.box
        word = classes[0] if len(classes) == 1 else lexicon.FILLER
        rows = (mid_y >= y0) & (mid_y < y1)
        if not rows.any():
            rows[min(GRID - 1, max(0, int((y0 + y1) / 2 // PATCH_PX)))] = True
        cols = (mid_x[::2] + 4 >= x0) & (mid_x[::2] + 4 < x1)
        words[np.ix_(rows, cols)] = word
        spelled = [lexicon.glyph(c) for c in item.text]
        padded = [lexicon.NO_GLYPH] * 2 + spelled + [lexicon.NO_GLYPH] * 2
        for j, (cx0, cy0, cx1, cy1) in enumerate(item.boxes):
            own = (mid_x[::2] + 4 >= cx0) & (mid_x[::2] + 4 < cx1)
            mates[np.ix_(rows, own)] = (*padded[j : j + 2], *padded[j + 3 : j + 5])
            across = (mid_x >= cx0) & (mid_x < cx1)
            across[min(SUBCOLS - 1, max(0, int((cx0 + cx1) / PATCH_PX)))] = True
            down = (mid_y >= cy0) & (mid_y < cy1)
            down[min(GRID - 1, max(0, int((cy0 + cy1) / 2 // PATCH_PX)))] = True
            glyphs[np.ix_(down, across)] = spelled[j]
    g = glyphs.reshape(CELLS, 2, CELLS, 2, 2).transpose(0, 2, 1, 3, 4).reshape(-1, 4, 2)
    w = words.reshape(CELLS, 2, CELLS, 2).transpose(0, 2, 1, 3).reshape(-1, 4)
    m = mates.reshape(CELLS, 2, CELLS, 2, 4).transpose(0, 2, 1, 3, 4).reshape(-1, 4, 4)
    return g, m, w


def needed_cells(items: tuple[Item, ...], starts: Ints, tokens: Ints) -> set[int]:
    """Cells touched by ink, or where an item may stand."""
    need: set[int] = set()
    for item in items:
        x0, y0, x1, y1 = item.box
        for r in range(max(0, int((y0 - 3) // CELL_PX)), min(CELLS, int((y1 + 3) // CELL_PX) + 1)):
            for c in range(
                max(0, int((x0 - 6) // CELL_PX)), min(CELLS, int((x1 + 6) // CELL_PX) + 1)
            ):
                need.add(r * CELLS + c)
    for row, toks in zip(starts, tokens, strict=True):
        n = int((toks >= 0).sum())
        for s in row[row >= 0]:
            need.update(range(int(s), int(s) + n))
    return need


def text_draft(rng: random.Random, layout: Layout, real: bool = False) -> Draft:
    """Supervise a layout; with `real` the image is drawn at its own size and squashed."""
    starts, tokens = place(layout.items)

    def make(keep: Ints) -> Example:
        if real:
            pixels = to_cells(data.squash(draw_whole(rng, layout)))[keep]
        else:
            pixels = paint_cells(rng, layout, keep)
        glyphs, mates, words = label(layout.items)
        tags = np.full(words[keep].shape, -1)
        labels = (glyphs[keep], mates[keep], words[keep], tags)
        return Example(pixels, keep, *labels, starts, tokens)

    return Draft(frozenset(needed_cells(layout.items, starts, tokens)), make)


def empty_draft(rng: random.Random) -> Draft:
    """An image with nothing to say about."""
    need = rng.sample(range(CELLS * CELLS), 12)
    size = (rng.randint(64, 320), rng.randint(64, 320))

    def make(keep: Ints) -> Example:
        pixels = to_cells(data.squash(data.texture(rng, *size)))[keep]
        glyphs = np.full((len(keep), 4, 2), lexicon.NO_GLYPH, dtype=np.int64)
        off = np.full((len(keep), 4), -1, dtype=np.int64)
        mates = np.full((len(keep), 4, 4), -1, dtype=np.int64)
        starts = np.empty((0, CANDIDATES), dtype=np.int64)
        tokens = np.empty((0, MAX_TOKENS), dtype=np.int64)
        return Example(pixels, keep, glyphs, mates, off, off, starts, tokens)

    return Draft(frozenset(need), make)
