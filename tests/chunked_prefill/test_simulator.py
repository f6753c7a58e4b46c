"""The simulator: nobody is lost, equal seeds give equal runs, and an engine decides the same."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path

import pytest

from chunked_prefill.budget import Budget, TimeBudget, TokenBudget
from chunked_prefill.encode_time import EncodeTimeModel
from chunked_prefill.goodput import Promise, Report
from chunked_prefill.policy import Deadline, Fcfs, TtftPromise
from chunked_prefill.scheduler import Scheduler
from chunked_prefill.settings import SchedulingSettings
from chunked_prefill.simulator import Delays, Outcome, Simulator, StuckError, VirtualClock
from chunked_prefill.simulator_executor import GivenExecutor, ModelExecutor, shift
from chunked_prefill.simulator_pool import CountingPool, counting_kv
from chunked_prefill.simulator_server import simulate_server
from chunked_prefill.simulator_vision import GridImages, VisionStage
from chunked_prefill.step_plan import StepPlan
from chunked_prefill.step_time import StepLoad, StepTimeModel
from chunked_prefill.step_time_estimator import StepTimeEstimator
from chunked_prefill.trace import TraceRequest, read_trace
from chunked_prefill.workload import Changes, changed, synthesize
from kv_offload.block_pool import OutOfBlocksError
from kv_offload.kv_manager import KVManager

MODEL = StepTimeModel(
    constant_s=0.008,
    sequence_s=0.0002,
    token_s=0.0005,
    decode_context_s=2e-7,
    pair_s=1e-7,
)
IMAGES = GridImages(EncodeTimeModel(image_s=0.05, patch_s=0.00025), pixels=32)
TRACES = os.environ.get("LONGLENS_TRACES")
"""Folder with the public traces, which the project does not contain."""


class Server:
    """A small scheduler on a virtual clock, and how it was simulated."""

    def __init__(
        self,
        *,
        blocks: int = 400,
        block_size: int = 16,
        seats: int = 16,
        budget: Budget | None = None,
        deadline: bool = True,
        caching: bool = True,
        plain_pool: bool = False,
    ) -> None:
        self.clock = VirtualClock()
        kv = KVManager if plain_pool else counting_kv
        self.scheduler = Scheduler(
            kv(blocks, block_size, prefix_caching=caching),
            budget or TokenBudget(512),
            seats,
            policy=Deadline(TtftPromise(0.5), lambda: MODEL, 512) if deadline else Fcfs(),
            clock=self.clock,
        )
        self.decisions: list[list[tuple[int, int, int]]] = []
        self.starts_s: list[float] = []

    def see(self, plan: StepPlan, now_s: float) -> None:
        self.decisions.append([(c.sequence.seq_id, c.start, c.length) for c in plan.chunks])
        self.starts_s.append(now_s)

    def simulator(self, **how: object) -> Simulator:
        how = {
            "executor": ModelExecutor(MODEL.predict_s),
            "images": IMAGES,
            "vision": VisionStage(),
            "on_step": self.see,
        } | how
        return Simulator(self.scheduler, self.clock, **how)  # type: ignore[arg-type]

    def run(self, trace: list[TraceRequest] | Iterator[TraceRequest], **how: object) -> Outcome:
        outcome = self.simulator(**how).run(trace)
        self.scheduler.check_invariants()
        kv = self.scheduler.kv
        assert not list(self.scheduler.in_order())
        assert kv.pool.num_used == kv.cache.num_idle, "at the end every block is free or cached"
        return outcome


def _mixed(seed: int, rate: float = 6.0) -> list[TraceRequest]:
    spec = (
        f"chat:rate={rate},input=150,output=40,long=0.05x2000-4000,shared=64x3,duration=8"
        f"+images:rate={rate / 4},input=20,output=20,images=0.8x1-3,size=320x320|640x320,"
        "tenant=b,priority=1,duration=8"
    )
    return list(synthesize(spec, seed))


# -- nobody is lost -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("deadline", [True, False])
def test_every_request_ends_exactly_once(seed: int, deadline: bool) -> None:
    """With too little memory for all, priorities, images and prompts that never fit."""
    rng = random.Random(seed)
    trace = _mixed(seed)
    server = Server(
        blocks=rng.choice((150, 220, 300)),
        seats=rng.choice((3, 16)),
        budget=rng.choice((TokenBudget(64), TokenBudget(512))),
        deadline=deadline,
        caching=rng.random() < 0.7,
    )
    outcome = server.run(trace, vision=VisionStage(own_process=rng.random() < 0.5, slowdown=1.3))
    assert sorted(int(t.request_id) for t in outcome.times) == list(range(len(trace)))
    refused = 0
    for answer in outcome.answers:
        times, asked = answer.times, trace[int(answer.times.request_id)]
        assert times.arrival_s == asked.arrival_s
        if times.error is not None:
            assert times.error == "never_fits"
            refused += 1
            continue
        assert times.output_tokens == len(times.delivered_s) == asked.output_tokens
        assert times.delivered_s[0] > asked.arrival_s
        assert all(a < b for a, b in pairwise(times.delivered_s))
        assert times.prompt_tokens == asked.prompt_tokens + times.image_tokens
        assert (times.image_tokens > 0) == bool(asked.images)
        parts = (answer.queue_s, answer.image_s, answer.prefill_s)
        assert all(seconds >= -1e-9 for seconds in parts)
        assert sum(parts) == pytest.approx(times.ttft_s)
        assert not answer.image_s or asked.images
    assert refused == sum(
        r.prompt_tokens + r.output_tokens - 1 > server.scheduler.kv.capacity_tokens for r in trace
    )
    if server.scheduler.kv.pool.num_blocks == 150:
        assert refused > 0
    assert outcome.steps == len(server.decisions)
    assert outcome.output_tokens == sum(t.output_tokens for t in outcome.times)


def test_small_memory_preempts_and_its_tokens_are_computed_again() -> None:
    trace = [TraceRequest(0.0, 100, 120) for _ in range(8)]
    outcome = Server(blocks=60, caching=False).run(trace)
    assert outcome.preemptions > 0
    assert sum(a.preemptions for a in outcome.answers) == outcome.preemptions
    assert outcome.computed_tokens > 8 * (100 + 119)
    assert all(t.error is None for t in outcome.times)


def test_without_trouble_every_token_is_computed_once() -> None:
    outcome = Server(caching=False).run([TraceRequest(i * 0.1, 90 + i, 10) for i in range(20)])
    assert outcome.preemptions == 0
    assert outcome.computed_tokens == sum(90 + i + 9 for i in range(20))


# -- the same again -----------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_run() -> None:
    def run(seed: int) -> tuple[list[list[tuple[int, int, int]]], list[object]]:
        server = Server(blocks=200)
        executor = ModelExecutor(MODEL.predict_s, (0.9, 1.0, 1.05, 1.6), seed=seed)
        outcome = server.run(_mixed(1), executor=executor)
        return server.decisions, [(t.request_id, tuple(t.delivered_s)) for t in outcome.times]

    first = run(3)
    assert first == run(3)
    assert first != run(4)


def test_books_without_places_decide_as_those_with_places() -> None:
    """CountingPool only leaves out where blocks lie."""
    runs = []
    for plain_pool in (True, False):
        server = Server(blocks=160, plain_pool=plain_pool)
        server.run(_mixed(2))
        runs.append(server.decisions)
    assert runs[0] == runs[1]


def test_a_pool_that_only_counts_refuses_what_a_pool_refuses() -> None:
    pool = CountingPool(4)
    blocks = pool.allocate(3, owner=1, after=None, reach=3)
    with pytest.raises(OutOfBlocksError):
        pool.allocate(2, owner=1, after=None, reach=2)
    pool.share(blocks[:1])
    pool.free(blocks)
    assert (pool.num_free, pool.num_used) == (3, 1)
    pool.free(blocks[:1])
    with pytest.raises(ValueError, match="freed twice"):
        pool.free(blocks[:1])
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.share(blocks[:1])
    pool.check_invariants()


@pytest.mark.parametrize("seed", range(8))
def test_decodes_taken_many_at_a_time_are_those_taken_one_by_one(seed: int) -> None:
    """Who sees every plan gets every step from the scheduler; otherwise most are not asked for."""

    def run(every_plan: bool) -> tuple[object, int]:
        rng = random.Random(seed)
        spec = (
            f"chat:rate={rng.choice((1, 4, 9))},input=120,output=60,long=0.05x900-1500,"
            "shared=40x3,duration=12+chat:rate=1,input=30,output=90,priority=1,duration=12"
        )
        estimator = StepTimeEstimator(MODEL)
        server = Server(
            blocks=rng.choice((110, 200, 2000)),
            block_size=rng.choice((4, 16)),
            seats=rng.choice((3, 24)),
            budget=rng.choice((TokenBudget(12), TimeBudget(256, 0.04, estimator))),
            caching=rng.random() < 0.7,
        )
        executor = ModelExecutor(MODEL.predict_s, (0.8, 1.0, 1.4), seed=seed)
        delays = Delays(0.003, rng.choice((0.0, 0.002)), 0.001)
        scheduled = 0
        plain = server.scheduler.schedule

        def schedule() -> StepPlan:
            nonlocal scheduled
            scheduled += 1
            return plain()

        server.scheduler.schedule = schedule  # type: ignore[method-assign]
        simulator = server.simulator(
            executor=executor, delays=delays, on_step=server.see if every_plan else None
        )
        outcome = simulator.run(synthesize(spec, seed), until_s=rng.choice((9.0, inf)))
        server.scheduler.check_invariants()
        answers = [
            replace(a, times=replace(a.times, delivered_s=list(a.times.delivered_s)))
            for a in outcome.answers
        ]
        state = (estimator.model, estimator.guard, server.scheduler.kv.cache.num_blocks)
        return (
            replace(outcome, answers=answers, step_s=round(outcome.step_s, 9)),
            state,
            server.scheduler.step,
        ), scheduled

    one_by_one, all_steps = run(True)
    at_once, asked = run(False)
    assert at_once == one_by_one
    assert asked < all_steps


# -- time ---------------------------------------------------------------------------------------


def test_one_request_takes_the_models_time() -> None:
    outcome = Server().run([TraceRequest(0.0, 1000, 3)])
    prefill_s = MODEL.prefill_s(0, 1000, 512)
    (times,) = outcome.times
    assert times.ttft_s == pytest.approx(prefill_s)
    decode_s = MODEL.constant_s + MODEL.sequence_s + MODEL.token_s
    expected = [decode_s + MODEL.decode_context_s * (1001 + i) for i in range(2)]
    assert [b - a for a, b in pairwise(times.delivered_s)] == pytest.approx(expected)
    assert outcome.step_s == pytest.approx(outcome.end_s)


def test_delays_stand_where_they_happen() -> None:
    quiet = Server().run([TraceRequest(0.0, 100, 3)]).times[0]
    delays = Delays(ingress_s=1.0, between_steps_s=0.25, egress_s=0.5)
    late = Server().run([TraceRequest(0.0, 100, 3)], delays=delays).times[0]
    assert late.ttft_s == pytest.approx(quiet.ttft_s + 1.5)
    assert late.tpot_s == pytest.approx(quiet.tpot_s + 0.25)


def test_residuals_are_drawn_between_their_quantiles() -> None:
    server = Server()
    executor = ModelExecutor(MODEL.predict_s, (1.0, 2.0), seed=1)
    outcome = server.run([TraceRequest(0.0, 1, 400)], executor=executor)
    plain = Server().run([TraceRequest(0.0, 1, 400)])
    assert outcome.step_s / plain.step_s == pytest.approx(1.5, rel=0.05)
    with pytest.raises(ValueError, match="ascending"):
        ModelExecutor(MODEL.predict_s, (2.0, 1.0))


def test_a_machine_that_slows_down_does_so_when_it_says() -> None:
    executor = ModelExecutor(MODEL.predict_s, factor=shift((1.0,), (1.0, 3.0)))
    server = Server()
    server.run([TraceRequest(0.0, 1, 200)], executor=executor)
    lengths = [(a, b - a) for a, b in pairwise(server.starts_s)]
    before = [length for start, length in lengths if start < 1.0]
    after = [length for start, length in lengths if start >= 1.0]
    assert max(before) * 2.9 < min(after)
    with pytest.raises(ValueError, match="one more factor"):
        shift((1.0,), (1.0,))


def test_what_is_unfinished_at_the_end_is_said_to_be() -> None:
    server = Server()
    simulator = server.simulator()
    outcome = simulator.run(synthesize("chat:rate=5,duration=1000", 1), until_s=3.0)
    assert 3.0 <= outcome.end_s < 4.0
    unfinished = [t for t in outcome.times if t.error == "unfinished"]
    assert unfinished
    assert all(t.arrival_s <= outcome.end_s for t in outcome.times)
    assert not list(server.scheduler.in_order())


def test_a_scheduler_that_stops_is_noticed() -> None:
    class Nothing(TokenBudget):
        def split(self, *args: object) -> object:  # type: ignore[override]
            return super().split([], None, 0)

    server = Server(budget=Nothing(8))
    server.scheduler.max_num_seqs = 0
    with pytest.raises(StuckError, match="1 requests wait at 0 s"):
        server.run([TraceRequest(0.0, 10, 1)])


# -- images -------------------------------------------------------------------------------------


def test_text_ahead_of_an_image_is_computed_while_it_is_encoded() -> None:
    """DESIGN idea 2: readiness is a watermark."""
    request = TraceRequest(0.0, 400, 2, images=((320, 320),), hash_ids=(1,), block_tokens=384)
    server = Server()
    (times,) = server.run([request]).times
    encode_s = IMAGES([(320, 320)])[0].encode_s
    ahead_s = MODEL.prefill_s(0, 384, 512)
    assert ahead_s > encode_s
    assert server.decisions[0] == [(0, 0, 384)]
    assert times.ttft_s == pytest.approx(ahead_s + MODEL.prefill_s(384, 500, 512))


def test_without_text_ahead_an_image_is_waited_for() -> None:
    request = TraceRequest(0.0, 20, 2, images=((640, 320), (320, 320)))
    (answer,) = Server().run([request]).answers
    encode_s = sum(cost.encode_s for cost in IMAGES(request.images))
    # The first image is prefilled while the second is encoded.
    rest_s = MODEL.prefill_s(200, 320, 512)
    first_s = MODEL.prefill_s(0, 200, 512)
    first_encode_s, second_encode_s = (cost.encode_s for cost in IMAGES(request.images))
    expected = max(encode_s, first_encode_s + first_s) + rest_s
    assert answer.times.ttft_s == pytest.approx(expected)
    assert answer.image_s == pytest.approx(first_encode_s + max(0.0, second_encode_s - first_s))


@pytest.mark.parametrize("own_process", [True, False])
def test_an_image_is_encoded_without_breaking_a_stream(own_process: bool) -> None:
    """Beside steps, or between them for as long as the scheduler grants."""
    trace = [TraceRequest(0.0, 50, 60), TraceRequest(0.1, 20, 2, images=((640, 640),))]
    encode_s = IMAGES([(640, 640)])[0].encode_s
    vision = VisionStage(own_process=own_process, slowdown=1.5)
    server = Server(budget=TimeBudget(32, 0.03, StepTimeEstimator(MODEL)))
    stream, seeing = sorted(server.run(trace, vision=vision).times, key=lambda t: t.arrival_s)
    assert encode_s > 10 * 0.03
    assert stream.max_gap_s < 1.2 * 0.03
    assert vision.busy_s == pytest.approx(encode_s)
    assert encode_s < seeing.ttft_s < 3 * encode_s


def test_stages_that_share_a_machine_slow_each_other_down() -> None:
    vision = VisionStage(slowdown=1.5)
    trace = [TraceRequest(0.0, 50, 200), TraceRequest(0.0, 20, 1, images=((640, 640),))]
    server = Server()
    outcome = server.run(trace, vision=vision)
    plain = Server().run(trace)
    assert outcome.step_s == pytest.approx(plain.step_s + 0.5 * vision.busy_s, rel=0.02)


def test_an_image_under_a_prefix_hit_is_not_encoded_again() -> None:
    """Rows that nobody computes are not asked for."""
    request = TraceRequest(0.0, 300, 2, token_ids=tuple(range(300)))
    again = TraceRequest(9.0, 300, 2, token_ids=tuple(range(300)))
    vision = VisionStage()
    outcome = Server().run([request, again], vision=vision)
    assert [t.cached_tokens for t in outcome.times] == [0, 299]
    assert vision.busy_s == 0.0


def test_more_pixels_are_more_tokens_up_to_a_limit() -> None:
    grid = GridImages(EncodeTimeModel(), pixels=28, fewest=4, most=100)
    tokens = [cost.tokens for cost in grid([(28, 28), (280, 140), (280, 280), (2800, 2800)])]
    assert tokens == [4, 50, 100, 100]


def test_a_trace_with_images_needs_a_model_of_them() -> None:
    with pytest.raises(ValueError, match="nothing was said of what they cost"):
        Server().run([TraceRequest(0.0, 5, 1, images=((8, 8),))], images=None)


def test_what_ttft_consists_of_is_told_apart() -> None:
    image = TraceRequest(0.0, 20, 2, images=((640, 640),))
    parts = Server().run([image]).ttft_parts()
    assert parts["queue"] == 0.0
    assert parts["image"] + parts["prefill"] == pytest.approx(1.0)
    assert parts["image"] > 0.5
    queue = [TraceRequest(0.0, 400, 2) for _ in range(8)]
    outcome = Server(seats=1).run(queue)
    assert outcome.ttft_parts()["queue"] > 0.7
    late = outcome.ttft_parts(Promise(ttft_s=1.0))
    assert outcome.ttft_parts()["queue"] < late["queue"] < 1.0
    assert outcome.ttft_parts(Promise(ttft_s=1e9)) == {"queue": 0.0, "image": 0.0, "prefill": 0.0}
    assert 0 < outcome.kv_peak_blocks <= 26


# -- prefixes -----------------------------------------------------------------------------------


def test_prompts_that_begin_alike_are_computed_once() -> None:
    trace = [
        TraceRequest(i * 1.0, 1100, 2, hash_ids=(7, i + 10, i + 50), block_tokens=512)
        for i in range(5)
    ]
    outcome = Server(blocks=800).run(trace)
    assert [t.cached_tokens for t in outcome.times] == [0, 512, 512, 512, 512]
    other = [
        TraceRequest(r.arrival_s, 1100, 2, hash_ids=r.hash_ids, tenant=str(i))
        for i, r in enumerate(trace)
    ]
    assert [t.cached_tokens for t in Server(blocks=800).run(other).times] == [0] * 5


# -- policies -----------------------------------------------------------------------------------


def _goodput(budget: Budget, *, deadline: bool, factor: float = 1.0) -> float:
    server = Server(blocks=4000, seats=64, budget=budget, deadline=deadline)
    trace = synthesize("chat:rate=3.2,input=80,output=20,long=0.03x3000-4000,duration=90", 5)
    outcome = server.run(trace, executor=ModelExecutor(MODEL.predict_s, factor=factor))
    return Report.of(outcome.times, Promise(0.5, 0.05)).goodput.value


def test_deadlines_in_milliseconds_keep_more_promises_than_arrival_in_tokens() -> None:
    """What the simulator is for: the two of DESIGN idea 3, compared on the same requests."""
    static = _goodput(TokenBudget(512), deadline=False)
    ours = _goodput(TimeBudget(512, 0.045, StepTimeEstimator(MODEL)), deadline=True)
    assert ours > static + 0.15
    assert ours > 0.9


@pytest.mark.parametrize("factor", [0.7, 1.3])
def test_a_predictor_that_is_wrong_by_a_third_learns(factor: float) -> None:
    right = _goodput(TimeBudget(512, 0.045, StepTimeEstimator(MODEL)), deadline=True, factor=factor)
    scaled = StepTimeModel(*(w * factor for w in (0.008, 0.0002, 0.0005, 2e-7, 1e-7)))
    known = _goodput(
        TimeBudget(512, 0.045, StepTimeEstimator(scaled)), deadline=True, factor=factor
    )
    assert right >= known - 0.02


# -- the decisions of an engine -----------------------------------------------------------------


@pytest.mark.parametrize(("blocks", "deadline"), [(60, False), (200, True)])
def test_an_engine_on_the_same_arrivals_and_times_decides_the_same(
    tmp_path_factory: pytest.TempPathFactory, blocks: int, deadline: bool
) -> None:
    """A tiny engine that computes, and a simulation of it: equal chunks in every step."""
    from chunked_prefill.request import SamplingParams
    from tests.lm_engine.harness import Lab, Prompt, greedy

    lab = Lab("llama", tmp_path_factory.mktemp("simulated"))
    rng = random.Random(blocks)
    vocabulary = lab.config["vocab_size"]
    opening = [rng.randrange(3, vocabulary) for _ in range(16)]
    trace = [
        TraceRequest(
            i * 0.02,
            len(ids),
            rng.randint(1, 60),
            token_ids=tuple(ids),
        )
        for i in range(24)
        for ids in [
            (opening if i % 3 else [])
            + [rng.randrange(3, vocabulary) for _ in range(rng.randint(1, 30))]
        ]
    ]
    seconds = [rng.uniform(0.005, 0.06) for _ in range(5000)]

    clock = VirtualClock()
    engine = lab.engine(budget=24, block_size=4, blocks=blocks, seats=6)
    engine.scheduler._clock = clock
    server = Server(blocks=blocks, block_size=4, seats=6, budget=TokenBudget(24), deadline=deadline)
    # Both are without state.
    engine.scheduler.policy = server.scheduler.policy
    engine.scheduler.budget = server.scheduler.budget
    live: list[list[tuple[int, int, int]]] = []
    preempted = 0
    plain = engine.scheduler.schedule

    def schedule() -> StepPlan:
        nonlocal preempted
        plan = plain()
        preempted += len(plan.preempted)
        if plan.chunks:
            live.append([(c.sequence.seq_id, c.start, c.length) for c in plan.chunks])
        return plan

    engine.scheduler.schedule = schedule  # type: ignore[method-assign]
    todo = list(enumerate(trace))
    times = iter(seconds)
    while todo or engine.has_work():
        if not engine.has_work():
            clock.now_s = max(clock.now_s, todo[0][1].arrival_s)
        while todo and todo[0][1].arrival_s <= clock.now_s:
            number, request = todo.pop(0)
            sampling: SamplingParams = greedy(request.output_tokens)
            prompt = Prompt(request.token_ids)
            assert not engine.add(
                prompt.request(str(number), sampling, arrival_s=request.arrival_s)
            )
        before = len(live)
        engine.step()
        if len(live) > before:
            clock.now_s += next(times)

    outcome = server.run(trace, executor=GivenExecutor(seconds))
    assert server.decisions == live
    assert outcome.preemptions == preempted
    assert (blocks == 60) == (preempted > 0)


def test_more_steps_than_times_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 steps were given a time, and there are more"):
        Server().run([TraceRequest(0.0, 5, 9)], executor=GivenExecutor([0.1, 0.1]))


# -- a server from what it was started with -------------------------------------------------------


def test_a_server_is_simulated_from_its_settings_and_its_calibration() -> None:
    settings = SchedulingSettings("deadline", 0.5, 0.05, max_num_seqs=8, max_num_batched_tokens=256)
    delays = Delays(ingress_s=0.02, between_steps_s=0.003, egress_s=0.001)

    def simulate(trace: list[TraceRequest], **how: object) -> Outcome:
        return simulate_server(
            trace,
            settings,
            model=MODEL,
            kv_blocks=600,
            images=IMAGES,
            vision=VisionStage(slowdown=1.5),
            delays=delays,
            **how,  # type: ignore[arg-type]
        )

    (alone,) = simulate([TraceRequest(0.0, 600, 3)]).times
    prefill_s = MODEL.prefill_s(0, 600, 256)
    assert alone.ttft_s == pytest.approx(0.021 + prefill_s + 2 * 0.003)
    assert alone.isolated_s == pytest.approx(alone.ttft_s)
    gaps = [b - a for a, b in pairwise(alone.delivered_s)]
    assert gaps == pytest.approx(
        [MODEL.predict_s(StepLoad(1, 1, 601 + i, 0.0)) + 0.003 for i in range(2)]
    )
    trace = _mixed(3)
    drawn = [simulate(trace, residuals=(0.9, 1.0, 1.3), seed=seed) for seed in (1, 1, 2)]
    assert [o.times for o in drawn[:1]] == [o.times for o in drawn[1:2]]
    assert drawn[0].end_s != drawn[2].end_s
    assert len(drawn[0].times) == len(trace)
    assert all(t.error is None for t in drawn[0].times)
    long = [TraceRequest(0.0, 20, 60), TraceRequest(0.1, 3000, 1)]
    tokens = replace(settings, tpot_slo_s=0.0, policy="fcfs", max_num_batched_tokens=3000)
    gap_s = [
        max(t.max_gap_s for t in simulate_server(long, s, model=MODEL, kv_blocks=600).times)
        for s in (replace(tokens, tpot_slo_s=0.05), tokens)
    ]
    assert gap_s[0] < 0.06
    assert gap_s[1] > 1.5


# -- whole traces -------------------------------------------------------------------------------


def _azure(path: Path) -> None:
    rng = random.Random(1)
    rows = [
        f"2023-11-16 18:1{i // 60}:{i % 60:02d}.{rng.randrange(10**7):07d},"
        f"{rng.randint(100, 4000)},{rng.randint(1, 400)}"
        for i in range(300)
    ]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))


def _mooncake(path: Path) -> None:
    rng = random.Random(2)
    rows = []
    for i in range(60):
        blocks = rng.randint(1, 20)
        tokens = blocks * 512 - rng.randrange(512)
        ids = [0, *range(100 * i + 1, 100 * i + blocks)]
        row = {"timestamp": 1000 * i, "input_length": tokens, "output_length": 9, "hash_ids": ids}
        rows.append(json.dumps(row))
    path.write_text("\n".join(rows))


@pytest.mark.parametrize("write", [_azure, _mooncake])
def test_an_excerpt_of_a_trace_runs_to_its_end(tmp_path: Path, write: object) -> None:
    path = tmp_path / "trace"
    write(path)  # type: ignore[operator]
    trace = list(changed(read_trace(path), Changes(duration_s=45, lengths=1 / 16)))
    assert len(trace) >= 40
    outcome = Server(blocks=2000).run(trace)
    assert all(t.error is None for t in outcome.times)
    assert len(outcome.times) == len(trace)
    assert any(t.cached_tokens for t in outcome.times) == (write is _mooncake)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(TRACES is None, reason="LONGLENS_TRACES names no folder of traces")
@pytest.mark.parametrize(
    ("name", "requests"),
    [
        ("AzureLLMInferenceTrace_conv.csv", 19_366),
        ("AzureLLMInferenceTrace_code.csv", 8_819),
        ("mooncake_conversation_trace.jsonl", 12_031),
    ],
)
def test_the_public_traces_run_to_their_end(name: str, requests: int) -> None:
    """An 8B model on one H200, in round figures; for Mooncake on as many as it takes to keep up."""
    devices = 8 if name.startswith("mooncake") else 1
    model = StepTimeModel(*(w / devices for w in (0.0045, 2e-5, 3.2e-5, 3.4e-8, 1.3e-9)))
    clock = VirtualClock()
    scheduler = Scheduler(
        counting_kv(devices * 14_000, 64),
        TokenBudget(8192),
        256,
        policy=Deadline(TtftPromise(1.0), lambda: model, 8192),
        clock=clock,
    )
    simulator = Simulator(scheduler, clock, ModelExecutor(model.predict_s))
    assert TRACES is not None
    outcome = simulator.run(read_trace(Path(TRACES) / name))
    assert len(outcome.times) == requests
    assert all(t.error is None for t in outcome.times)
    cached = sum(t.cached_tokens for t in outcome.times) / sum(
        t.prompt_tokens for t in outcome.times
    )
    assert (0.2 < cached < 0.40) == (devices == 8)
    assert outcome.end_s < inf
