"""Every answer ends by itself: on blank images, photographs, and questions without an answer."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from PIL import Image

from tests.demo_model import serving

data = pytest.importorskip("demo_model.data")

QUESTIONS = ("What does the image show?", "What word is written in the image?", "Who wrote this?")
MOST = 64  # tokens of an answer
PHOTOGRAPHS = ("astronaut", "camera", "cat", "coffee", "coins", "page", "brick", "grass")


def _pictures() -> list[tuple[str, Image.Image]]:
    rng = random.Random(8)
    found = [
        ("white", Image.new("RGB", (300, 200), (250, 250, 250))),
        ("black", Image.new("RGB", (64, 64))),
        *((f"texture {i}", data.texture(rng, 240, 180)) for i in range(6)),
    ]
    try:
        from skimage import data as samples
    except ImportError:
        return found
    for name in PHOTOGRAPHS:  # those that come with the package: nothing is downloaded
        found.append((name, Image.fromarray(getattr(samples, name)()).convert("RGB")))
    return found


@pytest.mark.slow
def test_answers_about_nothing_end_by_themselves(folder: Path) -> None:
    pictures = _pictures()
    numbers = sorted((Path(__file__).parents[1] / "data" / "numbers").iterdir())[:6]
    asked = [(serving.png(image), q) for _, image in pictures for q in QUESTIONS]
    names = [f"{name}: {q}" for name, _ in pictures for q in QUESTIONS]
    for path in numbers:
        for question in ("Who wrote this?", "What colour is the car?"):
            asked.append((path.read_bytes(), question))
            names.append(f"{path.stem}: {question}")
    answers = serving.engine(folder).generate(serving.prompts(folder, asked, MOST))
    endless = [
        (name, a.text) for name, a in zip(names, answers, strict=True) if a.finish_reason != "stop"
    ]
    assert not endless
