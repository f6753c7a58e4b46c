"""The peak of future KV, against stepping through the future one token at a time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunked_prefill.forecast import Growth, OutputForecast, peak_blocks

BLOCK = 4


def stepped_peak(growths: list[Growth]) -> int:
    """Most blocks beyond those held now, by living through every step."""
    peak = 0
    for step in range(1, max((g.remaining for g in growths), default=0) + 1):
        demand = 0
        for growth in growths:
            demand -= growth.held_blocks
            if growth.remaining < step:
                continue
            blocks = -(-(growth.tokens + step) // BLOCK)
            blocks += (growth.width - 1) * (blocks - growth.tokens // BLOCK)
            if growth.most_blocks is not None:
                blocks = min(blocks, growth.most_blocks)
            demand += max(growth.held_blocks, blocks)
        peak = max(peak, demand)
    return peak


@st.composite
def _growth(draw: st.DrawFn) -> Growth:
    tokens = draw(st.integers(1, 60))
    held = draw(st.integers(0, -(-tokens // BLOCK)))
    bound = draw(st.none() | st.integers(held, 20))
    return Growth(tokens, held, draw(st.integers(1, 40)), draw(st.integers(1, 3)), bound)


@given(st.lists(_growth(), max_size=12))
def test_peak_is_that_of_living_through_every_step(growths: list[Growth]) -> None:
    assert peak_blocks(growths, BLOCK) == stepped_peak(growths)


@pytest.mark.parametrize("seed", range(20))
def test_many_sequences_miss_the_peak_by_little(seed: int) -> None:
    """Not every moment is looked at: between two of them each sequence grows by few tokens."""
    rng = random.Random(seed)
    growths = [
        Growth(tokens, rng.randint(0, tokens // BLOCK), rng.randint(1, 80))
        for tokens in (rng.randint(1, 60) for _ in range(rng.randint(60, 120)))
    ]
    found, true = peak_blocks(growths, BLOCK), stepped_peak(growths)
    assert found <= true <= found + 3 * len(growths)


def test_what_ends_first_makes_room_for_the_rest() -> None:
    """Two answers of 40 tokens at once want 20 blocks; if one ends in a step, 10 and its own."""
    long = Growth(tokens=4, held_blocks=1, remaining=36)
    assert peak_blocks([long, long], BLOCK) == 18
    assert peak_blocks([long, Growth(tokens=4, held_blocks=1, remaining=1)], BLOCK) == 8
    assert peak_blocks([], BLOCK) == 0


def test_nothing_is_foretold_from_few_answers() -> None:
    forecast = OutputForecast()
    for _ in range(15):
        forecast.observe(100)
    assert forecast.remaining(0, 1000) == 1
    forecast.observe(100)
    assert forecast.remaining(0, 1000) == 100


def test_an_answer_is_compared_with_those_that_became_longer() -> None:
    forecast = OutputForecast()
    for length in [10] * 12 + [100] * 12:
        forecast.observe(length)
    assert forecast.remaining(0, 1000) == 55
    assert forecast.remaining(10, 1000) == 90
    assert forecast.remaining(10, 20) == 20, "never more than its limit leaves"
    assert forecast.remaining(100, 1000) == 1, "none became longer: it may end with any token"


def test_old_answers_are_forgotten() -> None:
    forecast = OutputForecast()
    for length in [1000] * 100 + [8] * 512:
        forecast.observe(length)
    assert forecast.remaining(0, 5000) == 8
    assert forecast.remaining(8, 5000) == 1
