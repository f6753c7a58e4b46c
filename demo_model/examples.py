"""From a drawn scene to a training example: what stands where, and which cells to keep.

Owns: the supervision of text, where captions stand, and the choice of cells. Does not own drawing
(`scenes`), the supervision of shapes (`shapes`), or batching (`train`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from demo_model import data, lexicon
from demo_model.data import CELL_PX, CELLS, GRID, PATCH_PX
from demo_model.scenes import Array, Ints, Item, Layout, draw_whole, paint_cells, to_cells

SUBCOLS = 2 * GRID  # character labels are per half patch
SPOTS = 10  # places of a character in its item that are told apart; the last stands for all beyond


@dataclass(frozen=True)
class Example:
    """Kept cells of one tile with their supervision.

    `pixels` (N, 4, 16, 16, 3) uint8 and `cells` (N,) their indices in the tile, ascending;
    `classes` (N,) what each cell says. Per patch: `glyphs` (N, 4, 2) character per half patch;
    `mates` (N, 4, 4) the characters two and one before and one and two after the patch's own in its
    item, `spots` (N, 4, 2) how many characters of the item stand before and after it, both -1 off
    items; `aims` (N, 4, 2) row and column of the cell that says what is on the patch, `words`
    (N, 4) class of the word on it, `tags` (N, 4) of shapes, -1 where there is none.
    """

    pixels: Array
    cells: Ints
    classes: Ints
    glyphs: Ints
    mates: Ints
    spots: Ints
    aims: Ints
    words: Ints
    tags: Ints


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


def place(items: tuple[Item, ...]) -> list[int]:
    """The cell in which each item's caption begins; it goes on in the cells after.

    Text is said from the first cell on, wherever in the image it stands: a rule about the middle of
    a word leaves two cells that cannot agree on which of them speaks. Words follow one another,
    over the ends of lines too, as the language model reads a phrase without gaps best. A line with
    a number has a row of cells to itself, with one cell left before the number, as the space before
    it is a token of its own.
    """
    numbered = {item.line for item in items if not item.text.isalpha()}
    cells: list[int] = []
    row = col = 0
    line = 0
    for item in items:
        count = len(lexicon.tokens_of(item.text))
        if item.line != line:
            if {line, item.line} & numbered:
                row, col = row + 1, 0
            line = item.line
        elif col and not item.text.isalpha():
            col += 1
        if col + count > CELLS or row >= CELLS:
            raise ValueError(f"{item.text!r}: a tile says {CELLS} rows of {CELLS} tokens")
        cells.append(row * CELLS + col)
        col += count
    return cells


def captions(items: tuple[Item, ...]) -> Ints:
    """What all cells of the tile say, (64,) classes."""
    out = np.full(CELLS * CELLS, lexicon.FILLER, dtype=np.int64)
    for item, cell in zip(items, place(items), strict=True):
        classes = lexicon.tokens_of(item.text)
        out[cell : cell + len(classes)] = classes
    return out


def label(items: tuple[Item, ...]) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Tile-wide `glyphs`, `mates`, `spots`, `aims` and `words`; the first axis is the cell."""
    glyphs = np.full((GRID, SUBCOLS), lexicon.NO_GLYPH, dtype=np.int64)
    mates = np.full((GRID, GRID, 4), -1, dtype=np.int64)
    spots = np.full((GRID, GRID, 2), -1, dtype=np.int64)
    aims = np.full((GRID, GRID, 2), -1, dtype=np.int64)
    words = np.full((GRID, GRID), -1, dtype=np.int64)
    mid_y = (np.arange(GRID) + 0.5) * PATCH_PX
    mid_x = (np.arange(SUBCOLS) + 0.5) * PATCH_PX / 2
    for item, cell in zip(items, place(items), strict=True):
        classes = lexicon.tokens_of(item.text)
        x0, y0, x1, y1 = item.box
        rows = (mid_y >= y0) & (mid_y < y1)
        if not rows.any():
            rows[min(GRID - 1, max(0, int((y0 + y1) / 2 // PATCH_PX)))] = True
        cols = (mid_x[::2] + 4 >= x0) & (mid_x[::2] + 4 < x1)
        if len(classes) == 1:
            words[np.ix_(rows, cols)] = classes[0]
        spelled = [lexicon.glyph(c) for c in item.text]
        padded = [lexicon.NO_GLYPH] * 2 + spelled + [lexicon.NO_GLYPH] * 2
        for j, (cx0, cy0, cx1, cy1) in enumerate(item.boxes):
            own = (mid_x[::2] + 4 >= cx0) & (mid_x[::2] + 4 < cx1)
            mates[np.ix_(rows, own)] = (*padded[j : j + 2], *padded[j + 3 : j + 5])
            after = len(spelled) - 1 - j
            spots[np.ix_(rows, own)] = (min(j, SPOTS - 1), min(after, SPOTS - 1))
            aims[np.ix_(rows, own)] = divmod(cell + (j if len(classes) > 1 else 0), CELLS)
            across = (mid_x >= cx0) & (mid_x < cx1)
            across[min(SUBCOLS - 1, max(0, int((cx0 + cx1) / PATCH_PX)))] = True
            down = (mid_y >= cy0) & (mid_y < cy1)
            down[min(GRID - 1, max(0, int((cy0 + cy1) / 2 // PATCH_PX)))] = True
            glyphs[np.ix_(down, across)] = spelled[j]
    w = words.reshape(CELLS, 2, CELLS, 2).transpose(0, 2, 1, 3).reshape(-1, 4)
    g, m, s, a = (
        x.reshape(CELLS, 2, CELLS, 2, -1).transpose(0, 2, 1, 3, 4).reshape(CELLS * CELLS, 4, -1)
        for x in (glyphs, mates, spots, aims)
    )
    return g, m, s, a, w


def needed_cells(items: tuple[Item, ...]) -> set[int]:
    """Cells touched by ink, those that say something, and after each line one that does not."""
    need: set[int] = set()
    for item, cell in zip(items, place(items), strict=True):
        x0, y0, x1, y1 = item.box
        for r in range(max(0, int((y0 - 3) // CELL_PX)), min(CELLS, int((y1 + 3) // CELL_PX) + 1)):
            for c in range(
                max(0, int((x0 - 6) // CELL_PX)), min(CELLS, int((x1 + 6) // CELL_PX) + 1)
            ):
                need.add(r * CELLS + c)
        need.update(range(cell, cell + len(lexicon.tokens_of(item.text)) + 1))
    return need


def text_draft(rng: random.Random, layout: Layout, real: bool = False) -> Draft:
    """Supervise a layout; with `real` the image is drawn at its own size and squashed."""

    def make(keep: Ints) -> Example:
        if real:
            pixels = to_cells(data.squash(draw_whole(rng, layout)))[keep]
        else:
            pixels = paint_cells(rng, layout, keep)
        said, tags = captions(layout.items), np.full((CELLS * CELLS, 4), -1)
        labels = (part[keep] for part in (said, *label(layout.items), tags))
        return Example(pixels, keep, *labels)

    return Draft(frozenset(needed_cells(layout.items)), make)


def no_characters(cells: int) -> tuple[Ints, Ints, Ints]:
    """`glyphs`, `mates` and `spots` of cells without any text."""
    glyphs = np.full((cells, 4, 2), lexicon.NO_GLYPH, dtype=np.int64)
    return glyphs, np.full((cells, 4, 4), -1), np.full((cells, 4, 2), -1)


def empty_draft(rng: random.Random) -> Draft:
    """An image with nothing to say about."""
    need = {*range(10), *rng.sample(range(CELLS * CELLS), 8)}
    size = (rng.randint(64, 320), rng.randint(64, 320))

    def make(keep: Ints) -> Example:
        pixels = to_cells(data.squash(data.texture(rng, *size)))[keep]
        n = len(keep)
        off = np.full((n, 4), -1)
        silence = np.full(n, lexicon.FILLER)
        return Example(pixels, keep, silence, *no_characters(n), np.full((n, 4, 2), -1), off, off)

    return Draft(frozenset(need), make)
