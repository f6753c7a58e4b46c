"""Which kinds of image the tower is trained and validated on, and in what shares.

Owns: the kinds by name, drawing one example of a mixture, held-out validation tiles and the truth
that a tile's tokens must say. Does not own how any kind is drawn.
"""

from __future__ import annotations

import random
from functools import lru_cache, partial
from pathlib import Path

from demo_model import data, examples, lexicon, scenes, shapes, texts
from demo_model.data import CELLS
from demo_model.examples import Draft, Example
from demo_model.scenes import Layout

TAGS = 64  # at least shapes.NO_SHAPE + 1
DEFAULT = "word=4,number=1.5,price=1,words=1.5,receipt=0.7"
WHOLE, REAL = 0.03, 0.05  # shares of whole tiles, and of images drawn at their own size


@lru_cache(maxsize=2)
def _fonts(held_out: bool) -> list[Path]:
    return data.faces(held_out)


def lay_out(
    rng: random.Random, kind: str, held_out: bool, longest_px: tuple[int, int] = (64, 1024)
) -> Layout:
    """One layout of a kind of text."""
    place = partial(scenes.lay_out, fonts=_fonts(held_out), longest_px=longest_px)
    if kind == "word":
        lines = texts.draw_word(rng, held_out, 1.0 if held_out else 0.7)
        return place(rng, lines, tall=4.0 if rng.random() < 0.1 else 2.2)
    if kind == "number":
        lines = texts.draw_number(rng, held_out)
        return place(rng, lines, tall=5.0 if rng.random() < 0.35 else 2.2)
    if kind == "price":
        return place(rng, texts.draw_price(rng, held_out), tall=2.5)
    if kind == "words":
        lines = texts.draw_words(rng, held_out, 1.0 if held_out else 0.7)
        return place(rng, lines)
    if kind == "receipt":
        lines = texts.draw_receipt(rng, held_out)
        return place(rng, lines, columns=rng.random() < 0.7)
    raise ValueError(
        f"kind {kind!r}: known are word, number, price, words, receipt, shapes, count, nothing"
    )


def draft(rng: random.Random, kind: str, held_out: bool, real: bool) -> Draft:
    """One image of a kind; shapes have no fonts or strings to hold out."""
    if kind == "shapes":
        return shapes.shape_draft(rng, shapes.two_shapes(rng))
    if kind == "count":
        return shapes.shape_draft(rng, shapes.equal_shapes(rng))
    if kind == "nothing":
        return examples.empty_draft(rng)
    # Larger images look the same once squashed, and take longer to draw.
    layout = lay_out(rng, kind, held_out, (64, 1024) if real else (64, 448))
    return examples.text_draft(rng, layout, real)


def draw(rng: random.Random, mix: dict[str, float]) -> tuple[Draft, int]:
    """One training image of a kind drawn by its share, and how many cells to keep of it."""
    kind = rng.choices(list(mix), list(mix.values()))[0]
    whole, real = rng.random() < WHOLE, rng.random() < REAL
    drawn = draft(rng, kind, False, real)
    spare = 1 + int(rng.expovariate(1.0))
    return drawn, CELLS**2 if whole else min(CELLS**2, len(drawn.need) + spare)


def validation(kind: str, count: int, seed: int = 7) -> list[Example]:
    """Whole tiles of real images with held-out strings in held-out faces."""
    rng = random.Random(seed)
    return [draft(rng, kind, True, True).with_cells(rng, CELLS**2) for _ in range(count)]


def truth(tile: Example) -> list[int]:
    """The classes that the tile's tokens must say, fillers left out."""
    return [int(c) for c in tile.classes if c != lexicon.FILLER]
