"""Estimates of the first token: against the scheduler itself on a clock that does not wait, and in
an engine."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from chunked_prefill.budget import Budget, TimeBudget, TokenBudget
from chunked_prefill.forecast import OutputForecast
from chunked_prefill.policy import Deadline, TtftPromise
from chunked_prefill.request import ImageSpan, Request, SamplingParams
from chunked_prefill.scheduler import Scheduler
from chunked_prefill.sequence import Sequence
from chunked_prefill.step_time import StepLoad, StepTimeModel
from chunked_prefill.step_time_estimator import StepTimeEstimator
from kv_offload.kv_manager import KVManager
from lm_engine.estimate import Answer, Outlook, Prompt, Walk, too_late
from lm_engine.outputs import Estimate, RequestError, RequestOutput
from tests.lm_engine.harness import Lab, check_idle, evict_prefixes, greedy, picture

MODEL = StepTimeModel(0.010, 0.0005, 0.0008, 2e-7, 1e-7)


class Serving:
    """A scheduler whose steps take exactly what the model says."""

    def __init__(
        self,
        *,
        by_deadline: bool = False,
        promise_s: float = 0.2,
        seats: int = 64,
        blocks: int = 4000,
        prefix_caching: bool = False,
        timed: bool = True,
    ) -> None:
        self.now_s = 1.0
        self.estimator = StepTimeEstimator(MODEL)
        self.budget: Budget = TokenBudget(512, self.estimator)
        if timed:
            self.budget = TimeBudget(512, promise_s, self.estimator)
        policy = Deadline(TtftPromise(), lambda: MODEL, 512) if by_deadline else None
        self.scheduler = Scheduler(
            KVManager(blocks, 16, prefix_caching=prefix_caching),
            self.budget,
            seats,
            policy=policy,
            clock=lambda: self.now_s,
        )
        self.outlook = Outlook(self.scheduler, clock=lambda: self.now_s)
        self.ids = count()
        self.first_s: dict[int, float] = {}
        self.lengths: dict[int, int] = {}

    def sequence(self, prompt: int, output: int, *, first: int = 0, **fields: Any) -> Sequence:
        number = next(self.ids)
        ids = tuple(range(first + number * 100_000, first + number * 100_000 + prompt))
        if first < 0:
            ids = tuple(range(prompt))
        request = Request(f"r{number}", ids, SamplingParams(output), arrival_s=self.now_s, **fields)
        self.lengths[number] = output
        return Sequence(request, number, number)

    def add(self, prompt: int, output: int, **fields: Any) -> Sequence:
        sequence = self.sequence(prompt, output, **fields)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> None:
        plan = self.scheduler.schedule()
        assert plan.chunks
        self.now_s += MODEL.predict_s(StepLoad.of((c.start, c.length) for c in plan.chunks))
        self.scheduler.commit(plan)
        for chunk in plan.chunks:
            if chunk.samples:
                sequence = chunk.sequence
                self.first_s.setdefault(sequence.seq_id, self.now_s)
                sequence.append(-1)
                if sequence.num_output_tokens >= self.lengths[sequence.seq_id]:
                    self.scheduler.finish(sequence)

    def ttft_s(self, sequence: Sequence) -> float:
        """Goes on, without arrivals, until the sequence has its first token."""
        self.scheduler.add(sequence)
        while sequence.seq_id not in self.first_s:
            self.step()
        return self.first_s[sequence.seq_id] - sequence.request.arrival_s


def busy(serving: Serving, seed: int, requests: int) -> random.Random:
    """Traffic of about as much as can be served, stopped at some moment in the middle."""
    rng = random.Random(seed)
    for _ in range(requests):
        serving.add(rng.randint(5, 900), rng.randint(1, 80))
        for _ in range(rng.randint(0, 6)):
            if serving.scheduler.running or serving.scheduler.waiting:
                serving.step()
    return rng


@pytest.mark.parametrize("by_deadline", [False, True])
@pytest.mark.parametrize("timed", [False, True])
def test_estimates_come_true_when_nobody_arrives(by_deadline: bool, timed: bool) -> None:
    errors = []
    for seed in range(40):
        serving = Serving(by_deadline=by_deadline, timed=timed)
        rng = busy(serving, seed, requests=rng_count(seed))
        asked = serving.sequence(rng.randint(5, 1500), 4)
        estimate = serving.outlook.of(asked)
        errors.append(estimate.ttft_s / serving.ttft_s(asked) - 1)
        assert 0 <= estimate.queue_s <= estimate.ttft_s
    within = sum(abs(error) <= 0.2 for error in errors)
    assert within >= 36, sorted(errors)


def rng_count(seed: int) -> int:
    """0 (idle) to 12 requests in flight."""
    return (0, 1, 4, 4, 8, 12)[seed % 6]


def test_an_idle_server_is_foreseen_exactly() -> None:
    serving = Serving()
    asked = serving.sequence(1300, 4)
    estimate = serving.outlook.of(asked)
    assert estimate.ttft_s == pytest.approx(serving.ttft_s(asked), rel=1e-3)
    assert estimate.isolated_s == pytest.approx(estimate.ttft_s, rel=1e-3)
    assert (estimate.running, estimate.waiting, estimate.ahead_tokens) == (0, 0, 0)
    assert not estimate.calibrated


def test_the_time_since_arrival_counts() -> None:
    serving = Serving()
    asked = serving.sequence(100, 4)
    before = serving.outlook.of(asked).ttft_s
    serving.now_s += 0.75
    assert serving.outlook.of(asked).ttft_s == pytest.approx(before + 0.75)


def test_cached_tokens_are_not_waited_for() -> None:
    serving = Serving(prefix_caching=True)
    first = serving.add(1000, 2, first=-1)
    while serving.scheduler.running or serving.scheduler.waiting:
        serving.step()
    assert first.seq_id in serving.first_s
    asked = serving.sequence(1010, 2, first=-1)
    estimate = serving.outlook.of(asked)
    assert estimate.cached_tokens == 1000
    assert estimate.ttft_s < 0.3 * serving.outlook.of(serving.sequence(1010, 2)).ttft_s
    assert estimate.ttft_s == pytest.approx(serving.ttft_s(asked), rel=1e-3)


def test_looking_ahead_changes_nothing() -> None:
    plain, asking = Serving(prefix_caching=True), Serving(prefix_caching=True)
    plans: list[list[list[tuple[int, int, int]]]] = [[], []]
    for place, serving in enumerate((plain, asking)):
        rng = random.Random(5)
        for _ in range(10):
            serving.add(rng.randint(5, 700), rng.randint(1, 30))
        asked = 0
        while serving.scheduler.running or serving.scheduler.waiting:
            if serving is asking:
                # Not from `ids`, so that both number alike.
                one = Sequence(Request("q", (1,) * 300, SamplingParams(2)), 10_000 + asked, 500)
                asked += 1
                serving.outlook.of(one)
                serving.scheduler.kv.free(one.seq_id)
            plan = serving.scheduler.schedule()
            plans[place].append([(c.sequence.seq_id, c.start, c.length) for c in plan.chunks])
            serving.scheduler.commit(plan)
            for chunk in plan.chunks:
                if chunk.samples:
                    chunk.sequence.append(-1)
                    if chunk.sequence.num_output_tokens >= serving.lengths[chunk.sequence.seq_id]:
                        serving.scheduler.finish(chunk.sequence)
        serving.scheduler.check_invariants()
    assert plans[0] == plans[1]
    assert asking.scheduler.kv.pool.num_used == plain.scheduler.kv.pool.num_used


def test_a_far_end_is_told_from_the_pace() -> None:
    serving = Serving()
    for _ in range(60):
        serving.add(1500, 8)
    asked = serving.sequence(1500, 4)
    whole = serving.outlook.of(asked, most_steps=100_000).ttft_s
    started = time.perf_counter()
    short = serving.outlook.of(asked, most_steps=16)
    assert time.perf_counter() - started < 1.0
    assert short.ttft_s == pytest.approx(whole, rel=0.35)
    assert short.ahead_tokens == 60 * 1500
    assert short.waiting == 60


def test_seats_are_waited_for() -> None:
    serving = Serving(seats=2)
    serving.scheduler.forecast = OutputForecast(fewest=1)
    serving.scheduler.forecast.observe(50)
    for _ in range(2):
        serving.add(20, 50)
    serving.step()
    asked = serving.sequence(20, 4)
    estimate = serving.outlook.of(asked)
    assert estimate.queue_s > 45 * MODEL.constant_s
    assert estimate.ttft_s == pytest.approx(serving.ttft_s(asked), rel=0.1)


def test_memory_is_waited_for() -> None:
    serving = Serving(blocks=20)
    serving.scheduler.forecast = OutputForecast(fewest=1)
    serving.scheduler.forecast.observe(30)
    serving.add(250, 30)
    serving.step()
    asked = serving.sequence(200, 4)
    estimate = serving.outlook.of(asked)
    assert estimate.queue_s > 25 * MODEL.constant_s
    assert estimate.ttft_s == pytest.approx(serving.ttft_s(asked), rel=0.2)


def test_the_step_under_way_counts_with_what_is_left_of_it() -> None:
    serving = Serving()
    running = serving.add(300, 40)
    plan = serving.scheduler.schedule()
    asked = serving.sequence(100, 4)
    found = serving.outlook.of(asked, computing=(plan, time.perf_counter()))
    step_s = MODEL.predict_s(StepLoad.of([(0, 300)]))
    assert found.queue_s == pytest.approx(step_s, rel=0.05)
    # Half of it has passed, then more than all of it.
    later = serving.outlook.of(asked, computing=(plan, time.perf_counter() - step_s / 2))
    assert later.queue_s == pytest.approx(step_s / 2, rel=0.1)
    over = serving.outlook.of(asked, computing=(plan, time.perf_counter() - 10))
    assert over.queue_s == 0
    assert found.ahead_tokens == 0  # the running prompt ends with this step
    assert running.num_computed_tokens == 0


def test_those_who_came_in_the_middle_of_the_step_go_before() -> None:
    serving = Serving()
    asked = serving.sequence(100, 4)
    before = [serving.sequence(800, 4), serving.sequence(800, 4)]
    alone = serving.outlook.of(asked)
    found = serving.outlook.of(serving.sequence(100, 4), before=before)
    assert found.waiting == 2
    assert found.ahead_tokens == 1600
    assert found.ttft_s > alone.ttft_s + MODEL.prefill_s(0, 1600, 512) * 0.9


def test_images_hold_back_what_follows_them() -> None:
    class Vision:
        def ready_in_s(self, line: Any, candidate: Sequence, media: Any) -> dict[bytes, float]:
            return {b"a": 2.0, b"b": 3.0} if candidate.request.image_spans else {}

    serving = Serving()
    outlook = Outlook(serving.scheduler, Vision(), clock=lambda: serving.now_s)
    spans = (ImageSpan(100, 50, b"a"), ImageSpan(500, 50, b"b"))
    asked = serving.sequence(600, 4, image_spans=spans)
    found = outlook.of(asked)
    assert found.ttft_s == pytest.approx(3.0 + MODEL.prefill_s(500, 600, 512), rel=0.01)
    assert found.isolated_s == pytest.approx(found.ttft_s, rel=0.01)
    assert found.queue_s == 0
    assert found.image_tokens == 100
    # Others go on meanwhile.
    assert outlook.of(serving.sequence(600, 4)).ttft_s < 1.0


def test_a_walk_without_any_way_on_ends() -> None:
    stuck = Prompt(0, 100, blocks=99)
    walk = Walk(TokenBudget(8), MODEL, [stuck], [], seats=1, free_blocks=3)
    assert walk.until_done(stuck) == pytest.approx(MODEL.prefill_s(0, 100, 8))
    waits = Prompt(0, 100)
    full = Walk(TokenBudget(8), MODEL, [waits], [Answer(5, 1000)], seats=1, free_blocks=3)
    assert full.until_done(waits, most_steps=5) > 0


def test_what_is_too_late() -> None:
    found = Estimate(10, 0, 0, 1.25, 1.0, 0.25, 3, 2, 900, True)
    request = Request("r", (1,), SamplingParams(1), ttft_s=1.0)
    assert too_late(request, found) is None
    strict = replace(request, must_meet_ttft=True)
    error = too_late(strict, found)
    assert error is not None
    assert error.kind == "late"
    assert "1250 ms, and 1000 ms were asked for: 3 requests run and 2 wait" in error.message
    assert error.retry_after_s == pytest.approx(0.25)
    never = too_late(replace(strict, ttft_s=0.2), found)
    assert never is not None
    assert "takes 250 ms even on an idle server" in never.message
    assert too_late(replace(strict, ttft_s=1.25), found) is None


# -- an engine ----------------------------------------------------------------------------------


def test_an_engine_tells_and_refuses(lab: Any) -> None:
    tiny: Lab = lab("llama")
    engine = tiny.engine()
    prompt = tiny.prompt("a few words to begin with")
    request = prompt.request("a", greedy(3), wants_estimate=True)
    (event,) = engine.add(request, prompt.media)
    assert event.estimate is not None
    assert not event.finished
    assert event.estimate.prompt_tokens == len(prompt)
    asked = engine.estimate(prompt.request("b", greedy(3)))
    assert isinstance(asked, Estimate)
    assert (asked.running, asked.waiting) == (0, 1)
    strict = prompt.request("c", greedy(3), ttft_s=1e-9, must_meet_ttft=True)
    (refused,) = engine.add(strict)
    assert refused.finished
    assert refused.error is not None
    assert refused.error.kind == "late"
    outputs: list[RequestOutput] = []
    while engine.has_work():
        outputs += engine.step()
    assert outputs[-1].finished
    assert [output.error for output in outputs if output.error] == []
    check_idle(engine)


def test_what_can_never_be_served_has_no_estimate(lab: Any) -> None:
    tiny: Lab = lab("llama")
    engine = tiny.engine()
    prompt = tiny.prompt("words")
    found = engine.estimate(prompt.request("a", greedy(10**9)))
    assert isinstance(found, RequestError)
    assert found.kind == "invalid"
    check_idle(engine)


def test_questions_are_answered_between_layers(lab: Any) -> None:
    tiny: Lab = lab("llama")
    engine = tiny.engine()
    first, second = tiny.prompt("one prompt that is computed"), tiny.prompt("another one")
    found: list[Estimate | RequestError] = []
    engine.between_layers(lambda: found.append(engine.estimate(second.request("q", greedy(2)))))
    engine.add(first.request("a", greedy(2)))
    engine.step()
    assert len(found) == engine.runner.decoder.config.num_layers
    inside = found[0]
    assert isinstance(inside, Estimate)
    assert inside.running == 1
    engine.between_layers(None)
    while engine.has_work():
        engine.step()
    assert len(found) == engine.runner.decoder.config.num_layers
    check_idle(engine)


def test_images_that_are_being_encoded_are_foreseen(lab: Any) -> None:
    tiny: Lab = lab("qwen2_5_vl")
    engine = tiny.engine()
    assert engine.images is not None
    prompt = tiny.prompt("see ", picture(56, 56, 1), " and say")
    tiles = prompt.media[0].plan.tile_patches
    engine.images.pace.observe(tiles, 12.0)
    found = engine.estimate(prompt.request("a", greedy(2)), prompt.media)
    assert isinstance(found, Estimate)
    assert found.image_tokens > 0
    assert found.ttft_s >= 12.0
    engine.add(prompt.request("b", greedy(2)), prompt.media)
    while engine.has_work():
        engine.step()
    assert engine.images.pace.seconds(tiles) < 12.0  # it was observed
    # Its rows are ready, or its KV is cached: nothing is waited for.
    again = engine.estimate(prompt.request("c", greedy(2)), prompt.media)
    assert isinstance(again, Estimate)
    assert again.ttft_s < found.ttft_s
    check_idle(engine)


def test_kv_that_comes_from_the_host_is_waited_for(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny: Lab = lab("llama")
    engine = tiny.engine(budget=64, blocks=200, host_tokens=4096, max_model_len=2048)
    tiers = engine.scheduler.kv.tiers
    assert tiers is not None
    rng = random.Random(0)
    first, second = (tuple(rng.randrange(5, 60) for _ in range(600)) for _ in range(2))

    def serve(ids: tuple[int, ...], name: str) -> None:
        engine.add(Request(name, ids, greedy(2)))
        while engine.has_work():
            engine.step()

    def foreseen(name: str) -> Estimate:
        found = engine.estimate(Request(name, first, greedy(2)))
        assert isinstance(found, Estimate)
        return found

    serve(first, "a")
    serve(second, "b")
    evict_prefixes(engine)
    usual = foreseen("c")
    assert usual.cached_tokens == 512
    monkeypatch.setattr(tiers.worth, "load_s", lambda num_tokens: 0.01 * num_tokens)
    slow = foreseen("d")
    assert slow.cached_tokens == 512
    assert slow.ttft_s == pytest.approx(slow.isolated_s)
    assert slow.ttft_s - 5.12 == pytest.approx(usual.ttft_s, abs=0.5)
    serve(first, "e")
    on_device = foreseen("f")
    assert on_device.cached_tokens == 599
    assert on_device.ttft_s < 1.0
    check_idle(engine)
