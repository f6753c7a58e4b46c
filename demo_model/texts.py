"""What is written in an image, line by line.

Owns: drawing words, numbers, prices, phrases and receipts from the training or the held-out side.
Does not own how any of it looks.
"""

from __future__ import annotations

import random

from demo_model import data, lexicon

Line = list[str]


def _case(rng: random.Random, word: str, plain: float) -> str:
    kind = rng.random()
    if kind < plain:
        return word
    return word.capitalize() if kind < plain + (1 - plain) * 0.6 else word.upper()


def held_out_phrase(words: list[str]) -> bool:
    """One combination of words in sixteen is kept for evaluation."""
    return data.is_held_out(" ".join(words).lower())


def draw_word(rng: random.Random, held_out: bool = False, plain: float = 0.7) -> list[Line]:
    """One word of the list."""
    return [[_case(rng, rng.choice(lexicon.WORDS), plain)]]


def draw_number(rng: random.Random, held_out: bool = False) -> list[Line]:
    """A number of 1 to 8 digits."""
    return [[data.draw_digits(rng, held_out)]]


def draw_price(rng: random.Random, held_out: bool = False) -> list[Line]:
    """A price, date, time, percentage or the like."""
    return [[data.draw_dressed(rng, held_out)]]


def draw_words(rng: random.Random, held_out: bool = False, plain: float = 0.7) -> list[Line]:
    """Two to four words on one to four lines, of at most 13 characters each."""
    while True:
        count = rng.choice((2, 2, 3, 4))
        words = [rng.choice(lexicon.WORDS) for _ in range(count)]
        if held_out_phrase(words) != held_out:
            continue
        lines: list[Line] = [[]]
        broken = rng.random() < 0.4  # one word a line
        for word in words:
            if lines[-1] and (broken or len(" ".join([*lines[-1], word])) > 13):
                lines.append([])
            lines[-1].append(word)
        if len(lines) > 4:
            continue
        how = rng.random()
        return [[_case(random.Random(how), w, plain) for w in line] for line in lines]


MENU = (
    *("coffee", "tea", "cake", "bread", "milk", "soup", "pizza", "juice", "sugar", "rice", "salad"),
    *("beer", "wine", "butter", "cheese", "pasta", "chicken", "fish", "water"),
)


def draw_receipt(rng: random.Random, held_out: bool = False) -> list[Line]:
    """One to three priced articles and their total, which stands last."""
    words = [w for w in lexicon.WORDS if len(w) <= 7]
    while True:
        count = rng.randint(1, 3)
        names = [rng.choice(MENU if rng.random() < 0.5 else words) for _ in range(count)]
        cents = [rng.randint(50, 2999) for _ in range(count)]
        total = sum(cents)
        text = f"{total / 100:.2f}"
        if "total" in names or data.is_held_out(text) != held_out:
            continue
        style = rng.choice((str.capitalize, str.capitalize, str.lower, str.upper))
        lines = [[style(n), f"{c / 100:.2f}"] for n, c in zip(names, cents, strict=True)]
        return [*lines, [style("total"), text]]
