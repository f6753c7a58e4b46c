"""What counts as a right answer, and that the demo gives enough of them."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from PIL import Image

from demo_model.evaluate import COUNTS, Case, Score, cases, in_process, measure
from demo_model.questions import NUMBER, Question

NUMBERS = sorted((Path(__file__).parents[1] / "data" / "numbers").iterdir())


@pytest.mark.parametrize(
    ("wanted", "right", "wrong"),
    [
        ("4821", "The number is 4821.", "The number is 48213."),
        ("4821", '"4821"', "4 8 2 1"),
        ("42.50", "The total is 42.50.", "The total is 142.50"),
        ("42", "It says 42.", "It says 42.50."),
        ("$42", "The price is $42!", "The price is $421"),
        ("05%", "It is 05%.", "It is 5%."),
        ("open", "It says Open.", "It says opened."),
        ("water market", "The words are water market.", "water, market"),
    ],
)
def test_the_criterion_wants_the_exact_string(wanted: str, right: str, wrong: str) -> None:
    question = Question("?", "", ((wanted,),))
    assert question.met_by(right)
    assert not question.met_by(wrong)


def test_every_group_must_be_named() -> None:
    question = Question("?", "", (("red circle",), ("two", "2")))
    assert question.met_by("There are 2: a red circle and more.")
    assert not question.met_by("There are two blue circles.")


def test_model_answers_meet_their_own_questions() -> None:
    for kind in COUNTS:
        for case in cases(kind, 15, seed=3):
            assert case.question.met_by(case.question.answer), (kind, case.question)


def test_cases_are_the_same_for_a_seed() -> None:
    for kind in ("words", "relation"):
        one, two, other = (list(cases(kind, 3, seed)) for seed in (1, 1, 2))
        assert [c.image.tobytes() for c in one] == [c.image.tobytes() for c in two]
        assert [c.question for c in one] == [c.question for c in two]
        assert [c.question for c in one] != [c.question for c in other]


def test_the_interval_is_wilsons() -> None:
    low, high = Score(15, 20).interval
    assert low == pytest.approx(0.531, abs=1e-3)
    assert high == pytest.approx(0.888, abs=1e-3)


@pytest.mark.slow
def test_at_least_17_of_20_unseen_numbers_are_read(folder: Path) -> None:
    assert len(NUMBERS) == 20
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answer = in_process(folder)
        right = 0
        for i, path in enumerate(NUMBERS):
            with Image.open(path) as image:
                question = Question(NUMBER[i % len(NUMBER)][0], "", ((path.stem,),))
                said = answer(Case("number", image.convert("RGB"), question, None))
            right += question.met_by(said)
    assert right >= 17, right


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["word", "words", "receipt", "shapes", "count"])
def test_most_unseen_images_of_every_kind_are_read(folder: Path, kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        score = measure(list(cases(kind, 8, seed=5)), in_process(folder))
    assert score.right >= 5, score
