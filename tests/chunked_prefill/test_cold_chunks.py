"""A prompt whose cold beginning is brought to the device in each step is not cut into slivers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from chunked_prefill.budget import Budget, TimeBudget, TokenBudget
from chunked_prefill.request import Request, SamplingParams
from chunked_prefill.scheduler import Scheduler
from chunked_prefill.sequence import Sequence
from chunked_prefill.spending import Pass, Spending
from chunked_prefill.step_time import StepTimeModel
from chunked_prefill.step_time_estimator import StepTimeEstimator
from kv_offload.host_pool import HostPool
from kv_offload.kv_manager import KVManager

SUPERBLOCK, BUDGET, LENGTH = 16, 32, 1500
MODEL = StepTimeModel(1e-3, 0.0, 1e-4, 1e-8, 1e-7)


def world(
    cold_chunk: Callable[[int], int] | None, prompts: int
) -> tuple[Scheduler, list[Sequence]]:
    """Prompts that a device of 640 tokens cannot hold; the last in rank is halfway."""
    kv = KVManager(
        160,
        4,
        host=HostPool(prompts * 120),
        chunk_tokens=BUDGET,
        superblock_tokens=SUPERBLOCK,
    )
    scheduler = Scheduler(kv, TokenBudget(BUDGET), 8)
    scheduler.cold_chunk, scheduler.long_prompts.share = cold_chunk, 1.0
    sequences = [
        Sequence(Request(f"r{i}", tuple(range(LENGTH)), SamplingParams(1)), i, i)
        for i in range(prompts)
    ]
    for sequence in reversed(sequences):
        scheduler.add(sequence)
        for _ in range(LENGTH // 2 // BUDGET if sequence.seq_id else 0):
            scheduler.commit(scheduler.schedule())
    return scheduler, sequences


def serve(scheduler: Scheduler, sequences: list[Sequence]) -> tuple[int, int, int]:
    """To the end: steps, cold tokens brought (each step brings a sequence's whole beginning), and
    the most steps that one of those that ran had to wait."""
    brought = longest = 0
    for step in range(1, 2000):
        plan = scheduler.schedule()
        assert plan.num_tokens <= BUDGET
        for chunk in plan.chunks:
            sequence = chunk.sequence
            brought += scheduler.kv.cold_tokens(sequence.seq_id)
            if sequence.last_step >= 0:
                longest = max(longest, scheduler.step - sequence.last_step)
        scheduler.commit(plan)
        scheduler.check_invariants()
        for sequence in [s for s in sequences if s.remaining == 0 and s in scheduler.running]:
            scheduler.remove(sequence)
        if not scheduler.running and not scheduler.waiting:
            return step, brought, longest
    raise AssertionError(f"stuck: {list(scheduler.in_order())}")


@pytest.mark.parametrize("prompts", [1, 2])
@pytest.mark.parametrize("worth", [8, 20, 500])
def test_fewer_passes_for_the_same_work(prompts: int, worth: int) -> None:
    plain = serve(*world(None, prompts))
    bounded = serve(*world(lambda cold: worth, prompts))
    assert bounded[0] <= plain[0] + 2, "no more steps"
    if prompts == 1:
        assert bounded == plain, "alone, a prompt has the whole step anyway"
        return
    assert bounded[1] < 0.8 * plain[1]
    assert bounded[2] <= 4 * (prompts + 1) + 2, "nobody waits longer than its part is small"


def test_a_sliver_is_taken_where_it_ends_the_prompt() -> None:
    spending = Spending(TokenBudget(BUDGET), {1: Pass(20, 1)})
    spending.spend(0, 0, spending.most(0, 0, 25))
    assert spending.most(1, 400, 300) == 0, "7 of 300 tokens are not worth the way"
    assert spending.most(1, 400, 5) == 5


@pytest.mark.parametrize("budget", [8, 32, 512])
@pytest.mark.parametrize("worth", [1, 20, 9000])
def test_a_pass_leaves_the_others_their_part_and_keeps_the_budget(budget: int, worth: int) -> None:
    passes = {name: Pass(worth, 30) for name in (3, 4)}
    spending = Spending(TokenBudget(budget), passes)
    spending.keep((name, 100 * name, 400) for name in (1, 2, 3, 4))
    given = {}
    for name in range(5):
        given[name] = spending.most(name, 100 * name, 400)
        if given[name]:
            spending.spend(name, 100 * name, given[name])
    assert sum(given.values()) == spending.load.tokens <= budget
    assert given[1] > 0
    assert given[2] > 0 or budget < 12
    assert given[3] > 0 or budget < 12, "its turn has come"


@pytest.mark.parametrize("worth", [40, 300, 9000])
def test_the_first_makes_its_pass_worthwhile_while_others_decode(worth: int) -> None:
    """The step lasts as long as the pass; the token budget is kept in any case."""
    budget: Budget = TimeBudget(512, 0.02, StepTimeEstimator(MODEL))
    plain, passing = Spending(budget), Spending(budget, {0: Pass(worth, 1)})
    lengths = []
    for spending in (plain, passing):
        spending.decodes(8, 8 * 500)
        lengths.append(spending.most(0, 4000, 9000))
    assert lengths[0] < 40
    assert lengths[1] == min(worth, 512 - 8)
