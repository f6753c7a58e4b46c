"""The demo reads printed numbers it has never seen, through its language model."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from PIL import Image

from demo_model.assemble import DemoUnavailable, assemble
from demo_model.evaluate import QUESTIONS, Score, contains, in_process

IMAGES = sorted((Path(__file__).parents[1] / "data" / "numbers").iterdir())


def test_the_criterion_wants_the_exact_digits() -> None:
    assert contains("The number is 4821.", "4821")
    assert not contains("The number is 48213.", "4821")
    assert not contains("4 8 2 1", "4821")


def test_the_interval_is_wilsons() -> None:
    low, high = Score(15, 20).interval
    assert low == pytest.approx(0.531, abs=1e-3)
    assert high == pytest.approx(0.888, abs=1e-3)


@pytest.mark.slow
def test_at_least_15_of_20_unseen_numbers_are_read(tmp_path: Path) -> None:
    assert len(IMAGES) == 20
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            answer = in_process(assemble(tmp_path))
        except DemoUnavailable as error:
            pytest.skip(str(error))
        right = 0
        for i, path in enumerate(IMAGES):
            with Image.open(path) as image:
                right += contains(answer(image, QUESTIONS[i % len(QUESTIONS)]), path.stem)
    assert right >= 15, right
