"""Times of images: the fit finds what made them, and the pace follows what was measured."""

from __future__ import annotations

import random

import pytest

from chunked_prefill.encode_time import EncodeTimeModel, EncodeTimes, fit

TRUTH = EncodeTimeModel(0.004, 2e-4, 3e-8)


def test_patches_and_pairs_of_each_tile_count() -> None:
    assert TRUTH.seconds((100, 300)) == pytest.approx(0.004 + 2e-4 * 400 + 3e-8 * (1e4 + 9e4))


@pytest.mark.parametrize("seed", range(3))
def test_the_weights_are_found_under_noise(seed: int) -> None:
    rng = random.Random(seed)
    images = []
    for _ in range(30):
        tiles = [int(40 * 100 ** rng.random())] * rng.randrange(1, 5)
        images.append((tiles, TRUTH.seconds(tiles) * rng.uniform(0.97, 1.03)))
    found = fit(images)
    for tiles in ([64], [1000, 1000], [4000]):
        assert found.seconds(tiles) == pytest.approx(TRUTH.seconds(tiles), rel=0.06)


def test_without_a_model_the_first_image_decides_in_proportion() -> None:
    times = EncodeTimes()
    assert times.seconds([100]) == 0
    times.observe([100], 0.5)
    assert times.seconds([200]) == pytest.approx(1.0)


def test_a_prior_is_corrected_by_every_image() -> None:
    times = EncodeTimes(TRUTH)
    assert times.seconds([500]) == TRUTH.seconds([500])
    times.observe([500], 3 * TRUTH.seconds([500]))
    assert times.seconds([900]) == pytest.approx(3 * TRUTH.seconds([900]))
    for _ in range(20):
        times.observe([700], 2 * TRUTH.seconds([700]))
    assert times.seconds([900]) == pytest.approx(2 * TRUTH.seconds([900]), rel=0.02)
    assert times.model.seconds([900]) == pytest.approx(times.seconds([900]))


def test_one_stuck_image_does_not_decide() -> None:
    times = EncodeTimes(TRUTH)
    times.observe([500], TRUTH.seconds([500]))
    times.observe([500], 1e4 * TRUTH.seconds([500]))
    times.observe([500], 0.0)
    times.observe([], 1.0)
    assert times.seconds([500]) < 3 * TRUTH.seconds([500])


def test_what_was_calibrated_replaces_what_was_known() -> None:
    times = EncodeTimes()
    times.observe([100], 9.0)
    times.calibrated(TRUTH)
    assert times.model == TRUTH
