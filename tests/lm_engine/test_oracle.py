"""The engine against transformers: same checkpoint, same prompt, same logits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.checkpoints import TEXT_FAMILIES, VARIANTS, VISION_FAMILIES
from tests.lm_engine.harness import (
    MARGIN,
    TEXT,
    Lab,
    Picture,
    assert_follows,
    assert_same_distribution,
    greedy,
    picture,
    run_one,
    teacher_forced,
)

Labs = Callable[[str], Lab]
A, B, C, D = (
    picture(*size, seed=i) for i, size in enumerate([(70, 50), (40, 90), (64, 64), (150, 60)])
)
LAYOUTS: dict[str, tuple[str | Picture, ...]] = {
    "alone": (C,),
    "middle": ("see ", C, " ok"),
    "first": (A, " what is it?"),
    "last": ("see ", B),
    "adjacent": ("see ", A, C, " ok"),
    "sizes": ("the ", A, " and ", B, " then ", D, " end"),
    "repeated": (A, " or ", B, " or ", A, "?"),
}


@pytest.mark.parametrize("name", [*TEXT_FAMILIES, *VARIANTS])
def test_text_logits_are_transformers(lab: Labs, name: str) -> None:
    family = lab(name)
    prompt = family.prompt(TEXT)
    ours = teacher_forced(family.engine(), prompt)
    oracle = family.oracle(prompt)
    assert_same_distribution(ours, oracle, note=name)
    assert (ours - oracle).abs().max() < 1e-4


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_image_logits_are_transformers(lab: Labs, family: str, layout: str) -> None:
    this = lab(family)
    prompt = this.prompt(*LAYOUTS[layout])
    ours = teacher_forced(this.engine(), prompt)
    oracle = this.oracle(prompt)
    assert_same_distribution(ours, oracle, note=f"{family} {layout}")
    assert (ours - oracle).abs().max() < 1e-4


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_an_image_changes_every_logit_after_it(lab: Labs, family: str) -> None:
    """Guards the tests above against an oracle and an engine that both ignore pictures."""
    this = lab(family)
    one, other = (this.prompt("see ", picture(64, 64, seed), " ok") for seed in (1, 2))
    assert one.token_ids == other.token_ids
    engine = this.engine()
    delta = (teacher_forced(engine, one) - teacher_forced(engine, other)).abs().amax(-1)
    start = one.spans[0].offset
    assert delta[:start].max() == 0
    assert delta[start:].min() > 10 * MARGIN


@pytest.mark.parametrize("family", [*TEXT_FAMILIES, *VISION_FAMILIES])
def test_greedy_tokens_follow_transformers(lab: Labs, family: str) -> None:
    """Pictures' ids are kept out of the answer: transformers takes one for a missing picture."""
    this = lab(family)
    prompt = this.prompt(*LAYOUTS["sizes"]) if this.takes_images else this.prompt(TEXT)
    barred = sorted({prompt.token_ids[span.offset] for span in prompt.spans})
    bias = tuple((token, -100.0) for token in barred)
    result = run_one(this.engine(budget=16), prompt, greedy(24, logit_bias=bias))
    tokens = result.tokens()
    assert len(tokens) == 24
    oracle = this.oracle(prompt, tokens)[len(prompt) - 1 : -1]
    expected = oracle.log_softmax(-1)
    for index, entry in enumerate(result.logprobs()):
        assert abs(entry.logprob - float(expected[index, entry.token_id])) < 1e-4
        for token, _, logprob in entry.top:
            assert abs(logprob - float(expected[index, token])) < 1e-4
    oracle[:, barred] -= 100.0
    assert assert_follows(tokens, oracle, family) >= 20
