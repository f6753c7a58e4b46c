"""What the demo's images can say: characters, words, and the captions of shapes.

Owns: the word list, the classes that training supervises (characters of a patch, tokens of a cell)
and their ids in SmolLM2's vocabulary. Does not own drawing, the tower or the language model.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path


def _read(name: str) -> tuple[str, ...]:
    return tuple(Path(__file__).with_name(name).read_text(encoding="utf-8").split())


WORDS = _read("words.txt")
COLOURS = {
    "red": (222, 30, 38),
    "green": (28, 150, 60),
    "blue": (35, 80, 215),
    "yellow": (245, 215, 25),
    "orange": (245, 135, 20),
    "purple": (130, 45, 165),
    "black": (20, 20, 24),
    "white": (250, 250, 250),
}
SHAPES = ("circle", "square", "triangle", "star")
COUNTS = ("one", "two", "three", "four", "five", "six")
EXTRA = tuple(
    w
    for w in (
        *COLOURS,
        *SHAPES,
        *(f"{s}s" for s in SHAPES),
        *COUNTS,
        *("a", "an", "the", "of", "to", "left", "right", "above", "below", "is", "and", "on", "in"),
        *("next", "top", "bottom", "image", "shows", "there", "are", "with"),
    )
    if w not in WORDS
)
# Common words that are not in the list: reported, never trained on.
UNSEEN = _read("unseen.txt")
# The digits come first and the order is that of the weights' heads.
CHARS = "0123456789.,$%-:/"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
GLYPHS = CHARS + LETTERS  # of a patch, upper and lower case alike
NO_GLYPH = len(GLYPHS)
# Classes of an image token: a word with its leading space, a bare character, or the filler.
CLASSES = (*(f" {w}" for w in (*WORDS, *EXTRA)), *CHARS, " ")
FILLER = len(CLASSES) - 1
CLASS_OF = {name: i for i, name in enumerate(CLASSES)}


@lru_cache(maxsize=1)
def _glyph_of() -> dict[str, int]:
    return {c: i for i, c in enumerate(GLYPHS)} | {c.upper(): GLYPHS.index(c) for c in LETTERS}


def glyph(char: str) -> int:
    """The patch class of a character, upper and lower case alike."""
    return _glyph_of()[char]


def tokens_of(text: str) -> list[int]:
    """The image-token classes that say `text`, a word or a string of digits and signs."""
    word = f" {text.lower()}"
    return [CLASS_OF[word]] if word in CLASS_OF else [CLASS_OF[c] for c in text]


def vocabulary_ids(vocabulary: list[str]) -> list[int]:
    """The id of each class in a byte-level vocabulary, which writes a space as Ġ."""
    ids = {token: i for i, token in enumerate(vocabulary)}
    return [ids[name.replace(" ", "Ġ")] for name in CLASSES]
