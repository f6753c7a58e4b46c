"""A prefix is computed once: followers wait for the leader, and go on in its place."""

from __future__ import annotations

from itertools import count

import pytest

from chunked_prefill.budget import TokenBudget
from chunked_prefill.prefixes import Leaders
from chunked_prefill.request import ImageSpan, Request, SamplingParams
from chunked_prefill.scheduler import Scheduler
from chunked_prefill.sequence import Sequence
from chunked_prefill.step_plan import StepPlan
from chunked_prefill.step_time import StepLoad
from kv_offload.kv_manager import KVManager


class Driver:
    """Steps a scheduler with a prefix cache as the engine does."""

    def __init__(
        self, *, blocks: int = 200, block_size: int = 4, budget: int = 16, seats: int = 16
    ) -> None:
        kv = KVManager(blocks, block_size, prefix_caching=True)
        self.scheduler = Scheduler(kv, TokenBudget(budget), seats)
        self.numbers = count()
        self.computed = 0
        self.finished: list[Sequence] = []

    def add(
        self,
        ids: list[int],
        outputs: int = 2,
        *,
        priority: int = 0,
        tenant: str = "",
        whole: int | None = None,
        spans: tuple[ImageSpan, ...] = (),
    ) -> Sequence:
        number = next(self.numbers)
        sampling = SamplingParams(outputs, prompt_logprobs=whole)
        request = Request(
            f"r{number}",
            tuple(ids),
            sampling,
            priority=priority,
            tenant=tenant,
            image_spans=spans,
        )
        sequence = Sequence(request, number, number)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        self.computed += plan.num_tokens
        self.scheduler.commit(plan)
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if sequence.remaining == 0:
                sequence.append(1000 + sequence.seq_id)
                if sequence.num_output_tokens == sequence.request.sampling.max_tokens:
                    self.scheduler.finish(sequence)
                    self.finished.append(sequence)
        self.scheduler.check_invariants()
        return plan

    def run(self) -> None:
        for _ in range(10_000):
            if not self.scheduler.running and not self.scheduler.waiting:
                return
            assert self.step().chunks, "work exists, but nothing advances"
        raise AssertionError("not finished")


PREFIX = list(range(100, 200))


def test_eight_at_once_compute_a_shared_prefix_once() -> None:
    driver = Driver(budget=32)
    line = [driver.add([*PREFIX, index, index + 1], 2) for index in range(8)]
    driver.run()
    # 100 tokens once, of each the two of its own and one decoded; nothing is left to chance.
    assert driver.computed == 100 + 8 * 3
    assert [s.num_cached_tokens for s in line] == [0] + [100] * 7


def test_a_follower_starts_once_the_leader_has_passed_what_they_share() -> None:
    driver = Driver(budget=20)
    driver.add([*PREFIX, 1])
    follower = driver.add([*PREFIX[:50], 2, 3])
    while not follower.num_output_tokens:
        leaders = [s for s in driver.scheduler.running if s is not follower]
        before = leaders[0].num_computed_tokens if leaders else 101
        if follower in {chunk.sequence for chunk in driver.step().chunks}:
            assert before >= 48
    assert follower.num_cached_tokens == 50


def test_those_behind_a_follower_are_not_held_up() -> None:
    driver = Driver(budget=64)
    driver.add([*PREFIX, 1])
    follower = driver.add([*PREFIX, 2])
    other = driver.add([1, 2, 3])
    driver.step()
    assert other.num_output_tokens == 0
    assert follower in driver.scheduler.waiting
    driver.step()
    assert other.num_output_tokens == 1


def test_a_follower_takes_over_when_the_leader_is_aborted() -> None:
    driver = Driver()
    leader = driver.add([*PREFIX, 1])
    followers = [driver.add([*PREFIX, 2]), driver.add([*PREFIX, 3])]
    for _ in range(3):
        driver.step()
    assert leader.num_computed_tokens == 48
    driver.scheduler.remove(leader)
    driver.run()
    assert followers[0].num_cached_tokens == 48
    assert followers[1].num_cached_tokens == 100
    assert driver.computed == 100 + 2 * 2


def test_a_follower_takes_over_when_the_leader_waits_for_an_image() -> None:
    driver = Driver()
    span = (ImageSpan(60, 10, b"image"),)
    leader = driver.add([*PREFIX, 1], spans=span)
    leader.num_ready_tokens = 60
    follower = driver.add([*PREFIX, 2], spans=span)
    follower.num_ready_tokens = 60
    for _ in range(6):
        driver.step()
    assert leader.num_computed_tokens == 60
    assert follower in driver.scheduler.waiting
    follower.num_ready_tokens = follower.num_tokens
    while follower not in driver.finished:
        assert driver.step().chunks
    assert leader.num_computed_tokens == 60
    leader.num_ready_tokens = leader.num_tokens
    driver.run()


def test_a_preempted_leader_finds_what_it_had_computed() -> None:
    driver = Driver(blocks=30, budget=64)
    low = driver.add([*PREFIX, 1], 10, priority=1)
    driver.step()
    driver.add(list(range(80)), 4)
    driver.run()
    assert low.num_preemptions == 1
    assert low in driver.finished
    # The other one's 20 blocks and those still free: what it needed was evicted, the rest found.
    assert low.num_cached_tokens > 0


def test_nobody_waits_for_one_that_ranks_behind() -> None:
    driver = Driver(budget=8)
    young = driver.add([*PREFIX, 1], priority=1)
    driver.step()
    old = driver.add([*PREFIX, 2], priority=0)
    behind = driver.add([*PREFIX, 2], priority=2)
    scheduler = driver.scheduler
    for sequence in (old, behind):
        scheduler._prefixes.look_up(sequence)
    assert scheduler.running == (young,)
    leaders = Leaders(scheduler.kv, scheduler.running)
    assert not leaders.hold_back(old)
    assert leaders.hold_back(behind)


def test_a_hit_over_an_image_that_others_evict_in_the_same_step_waits_for_its_rows() -> None:
    driver = Driver(blocks=40, budget=200)
    span = (ImageSpan(10, 20, b"image"),)
    driver.add(PREFIX[:40], 1, spans=span)
    driver.run()
    driver.add(list(range(300, 400)), 1)
    driver.run()
    assert driver.scheduler.kv.pool.num_free == 5
    driver.add(list(range(500, 536)), 4)
    late = driver.add(PREFIX[:40], 1, spans=span)
    driver.scheduler.look_up_images()
    assert late.num_cached_tokens == 39, "no rows are asked for"
    plan = driver.step()
    assert late not in {chunk.sequence for chunk in plan.chunks}
    assert late.num_cached_tokens < 30
    assert late.num_ready_tokens == late.num_cached_tokens
    late.num_ready_tokens = late.num_tokens
    driver.run()


def test_the_budget_knows_how_deep_a_hit_starts() -> None:
    asked: list[tuple[int, int]] = []

    class Seen(TokenBudget):
        def chunk(
            self, load: StepLoad, depth: int, wanted: int, *, share: float = 1.0, least: int = 0
        ) -> int:
            asked.append((depth, wanted))
            return super().chunk(load, depth, wanted, share=share, least=least)

    driver = Driver(budget=200)
    driver.add(PREFIX, 1)
    driver.run()
    driver.scheduler.budget = Seen(200)
    driver.add([*PREFIX, 5], 1)
    driver.run()
    assert (100, 1) in asked
    assert max(wanted for _, wanted in asked) == 1


def test_prompts_whose_logprobs_are_asked_for_are_computed_in_full() -> None:
    driver = Driver(budget=64)
    driver.add(PREFIX)
    driver.run()
    before = driver.computed
    whole = driver.add(PREFIX, 1, whole=0)
    driver.run()
    assert driver.computed == before + 100
    assert whole.num_cached_tokens == 0


def test_tenants_neither_share_nor_wait() -> None:
    driver = Driver(budget=64)
    first = driver.add(PREFIX, tenant="a")
    other = driver.add(PREFIX, tenant="b")
    driver.step()
    driver.step()
    assert first.num_computed_tokens == 100 or other.num_computed_tokens > 0
    driver.run()
    assert other.num_cached_tokens == 0
    again = driver.add(PREFIX, tenant="b")
    driver.run()
    assert again.num_cached_tokens == 99


@pytest.mark.parametrize("budget", [1, 3])
def test_a_tiny_budget_with_followers_goes_on(budget: int) -> None:
    driver = Driver(budget=budget)
    decode = driver.add([1, 2], 30)
    for index in range(3):
        driver.add([*PREFIX[:30], index])
    driver.run()
    assert decode.num_output_tokens == 30
    assert len(driver.finished) == 4
