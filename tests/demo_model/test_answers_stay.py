"""The demo's right answers stay right however the prompt is cut and wherever its rows come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.demo_model import serving

PICTURES = sorted((Path(__file__).parents[1] / "data" / "numbers").iterdir())
QUESTION = "What number is written in the image?"


@pytest.mark.slow
def test_right_answers_stay_right_in_any_chunks_and_with_rows_cached_or_encoded_again(
    folder: Path,
) -> None:
    prompts = serving.prompts(folder, [(p.read_bytes(), QUESTION) for p in PICTURES], 32)
    assert len(prompts) >= 20
    engine = serving.engine(folder, 512, 64 * len(prompts))
    first = [answer.text for answer in engine.generate(prompts)]
    right = [path.stem in said for said, path in zip(first, PICTURES, strict=True)]
    assert sum(right) >= 17, [a for a, r in zip(first, right, strict=True) if not r]
    encoded = engine.stats().images_encoded
    cached = [answer.text for answer in engine.generate(prompts)]
    assert engine.stats().images_encoded == encoded, "every image's rows were still there"
    assert cached == first
    for budget in (7, 33, 100):
        # Room for one image: each evicts the one before, and the second round encodes all again.
        engine = serving.engine(folder, budget, 64)
        for _ in range(2 if budget == 100 else 1):
            assert [answer.text for answer in engine.generate(prompts)] == first, budget
    assert engine.stats().images_encoded == 2 * len(prompts)
