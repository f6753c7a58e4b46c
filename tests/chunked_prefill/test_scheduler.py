"""The scheduler without a model: progress, fairness, preemption, admission."""

from __future__ import annotations

import random
from itertools import count

import pytest

from chunked_prefill.budget import TokenBudget
from chunked_prefill.forecast import OutputForecast
from chunked_prefill.policy import Deadline, TtftPromise
from chunked_prefill.request import Request, SamplingParams
from chunked_prefill.scheduler import Scheduler
from chunked_prefill.sequence import Sequence
from chunked_prefill.step_plan import StepPlan
from chunked_prefill.step_time import StepTimeModel
from kv_offload.kv_manager import KVManager


class Driver:
    """Steps a scheduler as the engine does, with tokens that mean nothing."""

    def __init__(
        self,
        *,
        blocks: int = 64,
        block_size: int = 4,
        budget: int = 16,
        seats: int = 8,
        by_deadline: bool = False,
    ) -> None:
        """A second passes per step, in which a prompt of `budget` tokens is computed alone."""
        model = StepTimeModel(1.0, 0.0, 0.0, 0.0, 0.0)
        self.scheduler = Scheduler(
            KVManager(blocks, block_size),
            TokenBudget(budget),
            seats,
            policy=Deadline(TtftPromise(4.0), lambda: model, budget) if by_deadline else None,
            clock=lambda: 1.0 + len(self.plans),
        )
        self.ids, self.orders = count(), count()
        self.plans: list[StepPlan] = []
        self.ends: dict[int, int] = {}
        """Answers that end by themselves, by sequence."""
        self.ended: dict[Sequence, int] = {}
        """In which step."""
        self.finished: list[Sequence] = []

    def add(self, prompt: int, outputs: int, n: int = 1, priority: int = 0) -> Sequence:
        request = Request(
            f"r{prompt}-{outputs}",
            tuple(range(prompt)),
            SamplingParams(max_tokens=outputs, n=n),
            priority=priority,
        )
        assert self.scheduler.never_fits(request) is None
        sequence = Sequence(request, next(self.ids), next(self.orders))
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        self.plans.append(plan)
        assert plan.num_tokens <= self.scheduler.budget.max_num_batched_tokens
        assert len({c.sequence.seq_id for c in plan.chunks}) == len(plan.chunks)
        self.scheduler.commit(plan)
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if sequence.remaining:
                continue
            family = [sequence]
            for choice in range(1, sequence.width):
                child = sequence.fork(next(self.ids), choice)
                self.scheduler.fork(sequence, child)
                family.append(child)
            for member in family:
                member.append(0)
                if member.num_output_tokens == self.ends.get(
                    member.seq_id, member.request.sampling.max_tokens
                ):
                    self.scheduler.finish(member)
                    self.finished.append(member)
                    self.ended[member] = len(self.plans)
        self.scheduler.check_invariants()
        return plan

    def run(self, limit: int = 20_000) -> int:
        for steps in range(limit):
            if not self.scheduler.running and not self.scheduler.waiting:
                return steps
            assert self.step().chunks, "work exists, but nothing advances"
        raise AssertionError(f"not finished after {limit} steps")


@pytest.mark.parametrize("by_deadline", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_everything_finishes_with_exactly_its_tokens(seed: int, by_deadline: bool) -> None:
    rng = random.Random(seed)
    driver = Driver(
        by_deadline=by_deadline,
        blocks=rng.randint(12, 64),
        block_size=rng.choice([1, 3, 16]),
        budget=rng.choice([1, 2, 7, 16, 64]),
        seats=rng.randint(4, 12),
    )
    capacity = driver.scheduler.kv.capacity_tokens
    wanted = 0
    for _ in range(12):
        outputs = rng.randint(1, min(12, capacity - 1))
        prompt = rng.randint(1, max(1, min(40, capacity - outputs)))
        n = rng.choice([1, 1, 1, 3])
        driver.add(prompt, outputs, n)
        wanted += n
        for _ in range(rng.randint(0, 3)):
            driver.step()
    driver.run()
    assert len(driver.finished) == wanted
    for sequence in driver.finished:
        assert sequence.num_output_tokens == sequence.request.sampling.max_tokens
    assert driver.scheduler.kv.pool.num_used == 0


def test_a_small_pool_preempts_the_youngest_and_the_oldest_keeps_its_place() -> None:
    driver = Driver(blocks=10, block_size=4, budget=64)
    first = driver.add(8, 24)
    others = [driver.add(8, 24) for _ in range(3)]
    driver.run()
    assert driver.scheduler.num_preemptions > 0
    assert first.num_preemptions == 0
    assert driver.finished[0] is first
    assert sum(s.num_preemptions for s in others) == driver.scheduler.num_preemptions


def _crowd(seed: int, *, foretell: bool) -> Driver:
    """150 answers that may become longer than they do, over a pool for some six of them."""
    rng = random.Random(seed)
    driver = Driver(blocks=200, block_size=4, budget=256, seats=16)
    if not foretell:
        driver.scheduler.forecast = OutputForecast(fewest=1 << 30)
    for _ in range(150):
        sequence = driver.add(100, 240)
        driver.ends[sequence.seq_id] = rng.randint(20, 60)
    driver.run()
    return driver


@pytest.mark.parametrize("seed", range(3))
def test_admission_by_the_forecast_peak_computes_less_twice(seed: int) -> None:
    """It leaves some room unused: a few more steps, of far fewer tokens."""
    told, untold = _crowd(seed, foretell=True), _crowd(seed, foretell=False)
    assert told.scheduler.num_preemptions < untold.scheduler.num_preemptions / 2
    tokens, more = (sum(plan.num_tokens for plan in d.plans) for d in (told, untold))
    assert tokens < 0.92 * more
    assert len(told.plans) < 1.07 * len(untold.plans)


def test_a_long_prompt_does_not_stand_before_short_ones_and_is_not_starved_by_them() -> None:
    """SCH-03's other side: 16 tokens fit a step, and every step brings another short prompt of 12.
    By arrival all of them wait for the long one; by deadline nobody waits for more than its own
    turn, and the long one keeps at least the quarter that belongs to the late."""
    waits = {}
    for by_deadline in (False, True):
        driver = Driver(blocks=400, budget=16, seats=16, by_deadline=by_deadline)
        long = driver.add(480, 1)
        arrived = {}
        while long not in driver.finished:
            arrived[driver.add(12, 1)] = len(driver.plans)
            driver.step()
            assert len(driver.plans) < 200
        ended = len(driver.plans)
        driver.run()
        waits[by_deadline] = sorted(
            driver.ended[s] - begun for s, begun in arrived.items() if begun < 40
        )
        assert by_deadline or ended <= 42
    middle = {k: w[len(w) // 2] for k, w in waits.items()}
    assert middle[True] <= 4 < 10 < middle[False]


def test_priority_takes_memory_from_those_below() -> None:
    """SCH-08: top-priority requests under a small pool; all finish, they finish first."""
    driver = Driver(blocks=30, block_size=4, budget=64, seats=10)
    for _ in range(15):
        driver.add(8, 16)
    for _ in range(6):
        driver.step()
    urgent = [driver.add(8, 16, priority=-1) for _ in range(5)]
    driver.run()
    assert len(driver.finished) == 20
    last_urgent = max(driver.finished.index(s) for s in urgent)
    assert last_urgent < 10


def test_decodes_advance_in_every_step_beside_a_long_prompt() -> None:
    """SCH-03: one prompt of many budgets; no decode skips a step."""
    driver = Driver(blocks=600, block_size=4, budget=16)
    decodes = [driver.add(3, 200) for _ in range(4)]
    while any(s.num_output_tokens == 0 for s in decodes):
        driver.step()
    long = driver.add(1000, 4)
    while long.num_computed_tokens < 1000:
        plan = driver.step()
        assert {s.seq_id for s in decodes} <= {c.sequence.seq_id for c in plan.chunks}
        assert plan.num_tokens == 16 or long.num_computed_tokens == 1000


@pytest.mark.parametrize("budget", [1, 2, 5, 64])
def test_every_admitted_sequence_keeps_advancing(budget: int) -> None:
    driver = Driver(blocks=400, block_size=4, budget=budget, seats=8)
    sequences = [driver.add(60, 30) for _ in range(8)]
    last = {s.seq_id: 0 for s in sequences}
    while driver.scheduler.running or driver.scheduler.waiting:
        plan = driver.step()
        for chunk in plan.chunks:
            last[chunk.sequence.seq_id] = plan.step
        for sequence in driver.scheduler.running:
            assert plan.step - last[sequence.seq_id] <= 8 * (64 // budget + 2)


def test_a_sequence_that_waits_for_an_image_is_skipped() -> None:
    driver = Driver(budget=8)
    blocked = driver.add(20, 2)
    blocked.num_ready_tokens = 5
    behind = driver.add(6, 2)
    driver.step()
    driver.step()
    assert blocked.num_computed_tokens == 5
    while behind not in driver.finished:
        driver.step()
    assert driver.step().chunks == ()
    blocked.num_ready_tokens = blocked.num_tokens
    driver.run()
    assert blocked in driver.finished


def test_requests_that_never_fit_are_told_so_in_numbers() -> None:
    scheduler = Scheduler(KVManager(8, 4), TokenBudget(8), 4)
    request = Request("big", tuple(range(30)), SamplingParams(max_tokens=4))
    never = scheduler.never_fits(request)
    assert never is not None
    assert (never.need_tokens, never.have_tokens) == (33, 32)
    assert scheduler.never_fits(Request("fits", request.token_ids, SamplingParams(3))) is None


def test_sampling_n_takes_its_seats_from_the_start() -> None:
    driver = Driver(seats=4, budget=64)
    driver.add(4, 6, n=3)
    driver.add(4, 6, n=2)
    driver.step()
    assert len(driver.scheduler.running) == 3
    assert len(driver.scheduler.waiting) == 1
    driver.run()
    assert len(driver.finished) == 5


def test_preempted_work_is_computed_again_from_the_start() -> None:
    """KVO-07 on counters: every sample has all its tokens although some lost their KV."""
    driver = Driver(blocks=13, block_size=4, budget=32)
    for _ in range(6):
        driver.add(5, 40)
    driver.run()
    assert driver.scheduler.num_preemptions > 0
    computed = sum(plan.num_tokens for plan in driver.plans)
    assert computed > 6 * 44
    assert all(s.num_output_tokens == 40 for s in driver.finished)


def test_a_head_that_waits_for_its_image_keeps_no_seat_from_others() -> None:
    driver = Driver(seats=3)
    driver.add(3, 20)
    driver.step()
    wide = driver.add(3, 4, n=3)
    wide.num_ready_tokens = 0
    small = driver.add(3, 4)
    assert small in {chunk.sequence for chunk in driver.step().chunks}
