"""The step-time model finds the weights that made the times, and the budget keeps to it."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunked_prefill.budget import Budget, TimeBudget, TokenBudget
from chunked_prefill.share_control import ShareControl
from chunked_prefill.spending import Spending
from chunked_prefill.step_time import (
    StepLoad,
    StepTimeEstimator,
    StepTimeModel,
    non_negative_least_squares,
    prior_model,
)

TRUTH = StepTimeModel(0.012, 0.0008, 0.0011, 1.5e-6, 2.4e-7)
PRIOR = prior_model(linear_flops_per_token=2.1e8, attention_flops_per_pair=7e4, flops_per_s=5e10)


def test_loads_count_decodes_and_pairs() -> None:
    load = StepLoad.of([(99, 1), (9, 1), (100, 50), (0, 4)])
    assert load == StepLoad(56, 4, 110, 50 * 125 + 4 * 2)
    assert load.kind == "mixed"
    assert StepLoad.of([(5, 1)]).kind == "decode"
    assert StepLoad.of([(0, 3)]).kind == "prefill"


@given(
    depth=st.integers(0, 100_000),
    decodes=st.lists(st.integers(0, 8000), max_size=16),
    limit_s=st.floats(0.001, 3),
)
def test_the_longest_chunk_is_the_longest(depth: int, decodes: list[int], limit_s: float) -> None:
    chunks = [(context, 1) for context in decodes]
    length = TRUTH.longest_chunk(depth, StepLoad.of(chunks), limit_s)

    def time_with(extra: int) -> float:
        return TRUTH.predict_s(StepLoad.of([*chunks, (depth, extra)]))

    # A chunk of one token is priced as a decode; from two on it is a chunk.
    if length >= 2:
        assert time_with(length) <= limit_s + 1e-9
    assert time_with(max(2, length + 1)) > limit_s - 1e-9


def random_steps(rng: random.Random, count: int) -> list[StepLoad]:
    loads = []
    for _ in range(count):
        chunks = [(rng.randrange(2000), 1) for _ in range(rng.randrange(12))]
        if rng.random() < 0.6 or not chunks:
            chunks.append((rng.choice([0, 500, 4000]), rng.choice([16, 64, 200, 500])))
        loads.append(StepLoad.of(chunks))
    return loads


@pytest.mark.parametrize("seed", range(4))
def test_the_weights_are_found_under_noise(seed: int) -> None:
    rng = random.Random(seed)
    estimator = StepTimeEstimator(PRIOR)
    for load in random_steps(rng, 120):
        estimator.observe(load, TRUTH.predict_s(load) * rng.uniform(0.95, 1.05))
    held_out = random_steps(rng, 60)
    errors = [abs(estimator.model.predict_s(x) / TRUTH.predict_s(x) - 1) for x in held_out]
    assert np.median(errors) < 0.05
    assert max(errors) < 0.2
    assert 1.0 <= estimator.guard < 1.15


def test_one_kind_of_step_sets_the_speed_for_all() -> None:
    """Decodes alone were seen: a chunk's price is the prior's, scaled to this machine."""
    estimator = StepTimeEstimator(PRIOR)
    slow = 3.0
    for context in range(100, 140):
        load = StepLoad.of([(context, 1)] * 4)
        estimator.observe(load, slow * PRIOR.predict_s(load))
    chunk = StepLoad.of([(1000, 200)])
    assert estimator.model.predict_s(chunk) == pytest.approx(slow * PRIOR.predict_s(chunk), rel=0.3)


def test_a_hiccup_changes_nothing_and_a_new_speed_is_learnt() -> None:
    rng = random.Random(0)
    estimator = StepTimeEstimator(PRIOR)
    for load in random_steps(rng, 60):
        estimator.observe(load, TRUTH.predict_s(load))
    before = estimator.model
    load = StepLoad.of([(100, 1)])
    estimator.observe(load, 50 * TRUTH.predict_s(load))
    assert estimator.model == before
    for load in random_steps(rng, 300):
        estimator.observe(load, 6 * TRUTH.predict_s(load))
    for load in random_steps(rng, 20):
        assert estimator.model.predict_s(load) == pytest.approx(6 * TRUTH.predict_s(load), rel=0.25)


@given(st.integers(0, 10_000))
def test_no_times_break_it(seed: int) -> None:
    """Steps of any length, in any order: a prediction stays a positive number."""
    rng = random.Random(seed)
    estimator = StepTimeEstimator(PRIOR)
    for load in random_steps(rng, 40):
        estimator.observe(load, 10.0 ** rng.uniform(-9, 3))
        assert 0 < estimator.model.predict_s(StepLoad.of([(0, 100)])) < float("inf")
        assert estimator.guard >= 1.0


@given(st.integers(0, 10_000))
def test_non_negative_least_squares_is_optimal(seed: int) -> None:
    """Karush-Kuhn-Tucker: x >= 0, the gradient is >= 0, and 0 where x is positive."""
    rng = np.random.default_rng(seed)
    rows, wanted = rng.normal(size=(20, 5)), rng.normal(size=20)
    x = np.array(non_negative_least_squares(rows, wanted))
    gradient = rows.T @ (rows @ x - wanted)
    assert (x >= 0).all()
    assert (gradient >= -1e-6).all()
    assert np.abs(gradient[x > 0]).max(initial=0) < 1e-6


# -- budgets ------------------------------------------------------------------------------------


def settled() -> StepTimeEstimator:
    estimator = StepTimeEstimator(TRUTH)
    rng = random.Random(1)
    for load in random_steps(rng, 80):
        estimator.observe(load, TRUTH.predict_s(load))
    return estimator


def chunk_of(budget: Budget, contexts: list[int], depth: int) -> int:
    """Tokens of the first prompt of a step, which stands at `depth`."""
    spending = Spending(budget)
    for context in contexts[: budget.decodes(len(contexts), True, 1)]:
        spending.decode(context)
    return spending.most(0, depth, 1 << 20)


def test_the_chunk_shrinks_with_depth_so_that_steps_are_equal() -> None:
    budget = TimeBudget(512, 0.2, settled())
    contexts = [200] * 8
    chunks = [chunk_of(budget, contexts, depth) for depth in (0, 2000, 4000, 8000)]
    assert chunks == sorted(chunks, reverse=True)
    assert chunks[0] > 1.5 * chunks[-1]
    for depth, chunk in zip((0, 2000, 4000, 8000), chunks, strict=True):
        load = StepLoad.of([*((c, 1) for c in contexts), (depth, chunk)])
        assert TRUTH.predict_s(load) == pytest.approx(0.15, rel=0.1)


def test_without_decodes_the_whole_budget_is_used() -> None:
    budget = TimeBudget(512, 0.2, settled())
    assert chunk_of(budget, [], 4000) == 512
    assert budget.decodes(600, False, 1) == 512


def test_the_token_budget_stays_a_hard_cap() -> None:
    budget = TimeBudget(64, 100.0, settled())
    assert chunk_of(budget, [100] * 8, 0) == 56


def test_what_one_prompt_leaves_over_is_priced_where_the_next_stands() -> None:
    """90 tokens of a short prompt, then one behind 20,000: not as many as at the start."""
    budget, contexts = TimeBudget(512, 0.2, settled()), [200] * 8
    spending = Spending(budget)
    for context in contexts:
        spending.decode(context)
    spending.spend(0, 0, spending.most(0, 0, 90))
    deep = spending.most(1, 20_000, 100_000)
    spending.spend(1, 20_000, deep)
    assert 0 < deep < chunk_of(budget, contexts, 0) - 90
    assert TRUTH.predict_s(spending.load) == pytest.approx(0.15, rel=0.1)


def test_every_running_prompt_advances_within_the_same_time() -> None:
    """Four prompts behind the first share a quarter of what is left."""
    budget, contexts = TimeBudget(512, 0.2, settled()), [200] * 8
    spending = Spending(budget)
    for context in contexts:
        spending.decode(context)
    depths = [0, 30_000, 60_000, 90_000, 120_000]
    spending.keep((i, depth, 50_000) for i, depth in enumerate(depths) if i)
    lengths = []
    for i, depth in enumerate(depths):
        lengths.append(spending.most(i, depth, 50_000))
        spending.spend(i, depth, lengths[-1])
    assert all(lengths)
    assert lengths[0] > max(lengths[1:])
    assert TRUTH.predict_s(spending.load) <= 1.1 * 0.15


def test_a_prompt_advances_however_late_the_step_is() -> None:
    budget = TimeBudget(512, 0.001, settled())
    assert chunk_of(budget, [4000] * 30, 100_000) == 16


def test_tokens_know_no_time() -> None:
    budget = TokenBudget(100)
    assert [chunk_of(budget, [0] * 8, depth) for depth in (0, 50_000)] == [92, 92]
    budget.observe(StepLoad.of([(0, 5)]), 3.0)
    assert chunk_of(budget, [0] * 8, 0) == 92


@pytest.mark.parametrize("promise_s", [0.0, -1.0])
def test_a_promise_is_positive(promise_s: float) -> None:
    with pytest.raises(ValueError, match="cannot be kept"):
        TimeBudget(512, promise_s, settled())


def mixed_steps(budget: TimeBudget, count: int, slower: float) -> list[float]:
    """Seconds of steps that fill the budget on a machine `slower` than its model says, whose own
    correction is held back."""
    contexts, depth, times = [200] * 8, 2000, []
    for _ in range(count):
        chunk = chunk_of(budget, contexts, depth)
        load = StepLoad.of([*((c, 1) for c in contexts), (depth, chunk)])
        times.append(slower * TRUTH.predict_s(load))
        budget.control.observe(times[-1] / budget.promise_s)
    return times


@pytest.mark.parametrize("slower", [1.3, 1.6, 0.8])
def test_the_share_follows_what_steps_take(slower: float) -> None:
    """A promise that the model breaks is kept again within some hundred steps; where there is room
    it is used."""
    budget = TimeBudget(512, 0.2, settled())
    times = mixed_steps(budget, 400, slower)
    late = times[-200:]
    assert sum(t > budget.promise_s for t in late) <= 0.1 * len(late)
    assert sum(late) / len(late) >= 0.7 * budget.promise_s


def test_a_share_stays_between_its_bounds() -> None:
    control = ShareControl(0.5, 0.3, 0.8)
    for _ in range(1000):
        control.observe(5.0)
    assert control.share == 0.3
    for _ in range(1000):
        control.observe(0.1)
    assert control.share == 0.8
    with pytest.raises(ValueError, match="between its bounds"):
        ShareControl(0.9, 0.3, 0.8)
