"""Draws, penalties, truncation and log-probabilities against plain definitions."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from chunked_prefill.request import SamplingParams
from lm_engine.sampler import (
    History,
    Sampled,
    SamplingError,
    SamplingRow,
    sample,
    sample_each,
    uniform,
)


def row(
    seed: int = 1,
    choice: int = 0,
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
    banned: tuple[int, ...] = (),
    **params: Any,
) -> SamplingRow:
    return SamplingRow(SamplingParams(max_tokens=9, **params), seed, choice, prompt, output, banned)


def name(token_id: int) -> bytes:
    return str(token_id).encode()


def draw(logits: torch.Tensor, one: SamplingRow) -> int:
    return sample(logits[None], [one], name)[0].token_id


def test_frequencies_follow_the_probabilities() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    counts = torch.zeros(4)
    for seed in range(4000):
        counts[draw(logits, row(seed))] += 1
    expected = logits.softmax(0) * 4000
    assert ((counts - expected).abs() < 5 * expected.sqrt()).all()


def test_temperature_flattens() -> None:
    logits = torch.tensor([0.0, 3.0])
    hits = sum(draw(logits, row(seed, temperature=3.0)) for seed in range(2000))
    assert hits / 2000 == pytest.approx(torch.sigmoid(torch.tensor(1.0)).item(), abs=0.04)


@pytest.mark.parametrize("vocab", [50, 5000])
def test_truncation_keeps_exactly_the_defined_set(vocab: int) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    probs = logits.softmax(0)
    order = probs.argsort(descending=True).tolist()
    nucleus: set[int] = set()
    mass = 0.0
    for token_id in order:
        if mass >= 0.8:
            break
        nucleus.add(token_id)
        mass += probs[token_id].item()
    allowed = {
        "top_k": (row, {"top_k": 7}, set(order[:7])),
        "top_p": (row, {"top_p": 0.8}, nucleus),
        "min_p": (row, {"min_p": 0.2}, {i for i in order if probs[i] >= 0.2 * probs.max()}),
    }
    for params, keep in ((entry[1], entry[2]) for entry in allowed.values()):
        seen = {draw(logits, row(seed, **params)) for seed in range(600)}
        assert seen <= keep
        likely = {i for i in keep if probs[i] > 0.05 * sum(probs[j].item() for j in keep)}
        assert likely <= seen


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": -0.0},
        {"temperature": 1e-9},
        {"temperature": 1e-40},
        {"temperature": 1e-4},
        {"top_p": 1e-9},
        {"top_k": 1},
        {"min_p": 1.0},
    ],
)
def test_smp_04_extremes_are_greedy(params: dict[str, float]) -> None:
    logits = torch.randn(500, generator=torch.Generator().manual_seed(3))
    assert {draw(logits, row(seed, **params)) for seed in range(20)} == {int(logits.argmax())}


def test_smp_04_huge_top_k_is_everything() -> None:
    logits = torch.zeros(4)
    assert {draw(logits, row(seed, top_k=10**9)) for seed in range(100)} == {0, 1, 2, 3}


def test_smp_01_a_seeded_row_ignores_its_mates() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(300, generator=generator)
    own = row(42, temperature=0.8, top_p=0.95)
    alone = draw(logits, own)
    for size in range(1, 6):
        mates = torch.randn(size, 300, generator=generator)
        rows = [*(row(i) for i in range(size)), own]
        assert sample(torch.cat((mates, logits[None])), rows, name)[-1].token_id == alone


def test_smp_02_order_in_the_batch_does_not_matter() -> None:
    logits = torch.randn(2, 200, generator=torch.Generator().manual_seed(5))
    a = row(temperature=0.0, repetition_penalty=2.0, prompt=(3, 4), output=(5,))
    b = row(7, top_k=1)
    forward = [s.token_id for s in sample(logits, [a, b], name)]
    backward = [s.token_id for s in sample(logits.flip(0), [b, a], name)]
    assert forward == backward[::-1]


def test_choices_and_positions_draw_different_numbers() -> None:
    numbers = {uniform(1, choice, position) for choice in range(30) for position in range(30)}
    assert len(numbers) == 900
    assert all(0.0 <= u < 1.0 for u in numbers)
    assert abs(sum(numbers) / 900 - 0.5) < 0.05


def test_penalties_follow_their_definitions() -> None:
    logits = torch.tensor([2.0, -2.0, 1.9, 0.0])
    greedy = {"temperature": 0.0}
    assert draw(logits, row(**greedy, repetition_penalty=1.1, prompt=(0,))) == 2
    assert draw(logits, row(**greedy, presence_penalty=0.2, prompt=(0,))) == 0
    assert draw(logits, row(**greedy, presence_penalty=0.2, output=(0,))) == 2
    assert draw(logits, row(**greedy, frequency_penalty=0.06, output=(0,))) == 0
    assert draw(logits, row(**greedy, frequency_penalty=0.06, output=(0, 0))) == 2
    assert draw(logits, row(**greedy, logit_bias=((3, 5.0),))) == 3
    assert draw(logits, row(**greedy, banned=(0, 2))) == 3
    low = torch.tensor([-1.0, -1.05])
    assert draw(low, row(**greedy, repetition_penalty=1.2, output=(0,))) == 1


def test_logprobs_are_the_models_own() -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(9))
    before = logits.clone()
    one = row(temperature=0.0, logprobs=3, logit_bias=((7, 50.0),), presence_penalty=1.0)
    sampled = sample(logits, [one], name)[0]
    assert torch.equal(logits, before)
    assert sampled.token_id == 7
    report = sampled.logprob
    assert report is not None
    truth = before.log_softmax(-1)[0]
    assert report.logprob == pytest.approx(truth[7].item(), abs=1e-6)
    assert report.rank == int((truth > truth[7]).sum()) + 1
    best = truth.topk(3)
    assert [i for i, _, _ in report.top] == best.indices.tolist()
    assert [v for _, _, v in report.top] == pytest.approx(best.values.tolist())
    assert report.token == b"7"


def test_logprobs_of_a_mixed_batch_stay_with_their_rows() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(2))
    rows = [
        row(temperature=0.0),
        row(temperature=0.0, logprobs=0),
        row(temperature=0.0, logprobs=2),
    ]
    sampled = sample(logits, rows, name)
    assert sampled[0].logprob is None
    assert sampled[1].logprob is not None
    assert sampled[1].logprob.top == ()
    assert sampled[2].logprob is not None
    assert sampled[2].logprob.token_id == int(logits[2].argmax())
    assert math.isclose(sampled[2].logprob.logprob, sampled[2].logprob.top[0][2])


# -- one row's fault ----------------------------------------------------------------------------


@pytest.mark.parametrize("plain", [True, False], ids=["greedy mates", "drawing mates"])
@pytest.mark.parametrize(
    ("spoil", "params"),
    [
        (math.nan, {"temperature": 0.0}),
        (math.nan, {"temperature": 0.7, "top_p": 0.9}),
        (math.inf, {"temperature": 0.0, "logprobs": 2}),
        (-math.inf, {"temperature": 1.0}),
        (None, {"temperature": 1.0, "logprobs": 1}),
        (None, {"logit_bias": ((999, 1.0),)}),
    ],
    ids=["nan", "nan drawn", "inf", "nothing left", "all banned", "an error inside"],
)
def test_a_row_that_cannot_be_sampled_fails_alone(
    spoil: float | None, params: dict[str, Any], plain: bool
) -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(4))
    mates = [
        row(temperature=0.0, logprobs=2) if plain else row(3, temperature=0.8, top_k=5, logprobs=2),
        row(temperature=0.0) if plain else row(8, repetition_penalty=1.2, output=(1, 2)),
    ]
    alone = [sample(logits[i][None], [mates[i // 2]], name)[0] for i in (0, 2)]
    banned = tuple(range(40)) if spoil is None and "logit_bias" not in params else ()
    bad = row(banned=banned, **params)
    if spoil is not None:
        logits[1] = spoil
    first, middle, last = sample_each(logits, [mates[0], bad, mates[1]], name)
    assert isinstance(middle, Exception)
    assert isinstance(middle, SamplingError) == ("logit_bias" not in params)
    assert [first, last] == alone
    with pytest.raises(type(middle)):
        sample(logits, [mates[0], bad, mates[1]], name)


# -- histories ----------------------------------------------------------------------------------


class CountedList(list[int]):
    """Counts the ids that are read out of it."""

    read = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.read += len(found) if isinstance(index, slice) else 1
        return found


@pytest.mark.parametrize("seed", range(3))
def test_a_growing_history_counts_each_token_once(seed: int) -> None:
    rng = random.Random(seed)
    prompt = [rng.randrange(30) for _ in range(rng.choice([0, 1, 50]))]
    ids = CountedList(prompt)
    history = History(ids, len(prompt))
    params: dict[str, Any] = {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
    }
    logits = torch.randn(60, 30, generator=torch.Generator().manual_seed(seed)) * 2
    for step in range(60):
        output = tuple(ids[len(prompt) :])
        assert list(history) == list(output)
        ids.read = 0
        one = SamplingRow(SamplingParams(99, **params), seed, 0, tuple(prompt), history)
        again = row(seed, prompt=tuple(prompt), output=output, **params)
        token_id = draw(logits[step], one)
        # The prompt once, then what is new: not the whole answer for every token of it.
        assert ids.read <= (len(prompt) if step == 0 else 1)
        assert token_id == draw(logits[step], again)
        ids.append(token_id)
    assert [history[0], history[-1]] == [ids[len(prompt)], ids[-1]]
    assert history[2:4] == ids[len(prompt) :][2:4]
    with pytest.raises(IndexError):
        history[60]


def test_an_untouched_history_is_not_copied() -> None:
    ids = CountedList(range(1000))
    one = SamplingRow(SamplingParams(9, temperature=0.9), 1, 0, (), History(ids, 10))
    assert isinstance(sample_each(torch.randn(1, 40), [one], name)[0], Sampled)
    assert ids.read == 0
