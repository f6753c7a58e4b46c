"""Settings that make sense, and the change of a scheduler's between two steps."""

from __future__ import annotations

from dataclasses import asdict, replace
from math import inf, nan
from random import Random

import pytest

from chunked_prefill.policy import Deadline, Fcfs
from chunked_prefill.request import Request, SamplingParams
from chunked_prefill.scheduler import Scheduler
from chunked_prefill.sequence import Sequence
from chunked_prefill.settings import SchedulingSettings, SettingsError, build
from chunked_prefill.simulator import VirtualClock
from chunked_prefill.simulator_pool import counting_kv
from chunked_prefill.step_time import StepLoad, StepTimeModel
from chunked_prefill.step_time_estimator import StepTimeEstimator

MODEL = StepTimeModel(0.01, 0.0, 0.001, 0.0, 0.0)
SETTINGS = SchedulingSettings(tpot_slo_s=0.1, max_num_seqs=8, max_num_batched_tokens=64)


def scheduler(settings: SchedulingSettings = SETTINGS) -> tuple[Scheduler, VirtualClock]:
    clock = VirtualClock()
    return build(settings, counting_kv(400, 4), StepTimeEstimator(MODEL), clock=clock), clock


def sequence(number: int, prompt: int = 20, *, n: int = 1, arrival_s: float = 0.0) -> Sequence:
    ids = tuple(range(number * 1000, number * 1000 + prompt))
    request = Request(str(number), ids, SamplingParams(30, n=n), arrival_s=arrival_s)
    return Sequence(request, number, number)


def step(server: Scheduler, clock: VirtualClock) -> None:
    plan = server.schedule()
    server.check_invariants()
    clock.now_s += 0.05
    server.commit(plan)
    for chunk in plan.chunks:
        if chunk.samples:
            chunk.sequence.append(7)
            if chunk.sequence.num_output_tokens == 30:
                server.finish(chunk.sequence)
    if plan.chunks:
        load = StepLoad.of([(c.start, c.length) for c in plan.chunks])
        server.budget.observe(load, 0.05)
    server.check_invariants()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("policy", "lifo"), ("ttft_slo_s", 0.0), ("ttft_slo_s", -1.0), ("ttft_slo_s", inf)),
        *(("tpot_slo_s", -0.1), ("tpot_slo_s", nan), ("step_share", (0.5, 0.4))),
        *(("step_share", (0.0, 0.4)), ("step_share", (0.5, 1.1)), ("max_num_seqs", 0)),
        *(("max_num_batched_tokens", 0), ("long_prompt_share", 0.0), ("long_prompt_share", 1.5)),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(SettingsError, match=f"^{name} is .*, expected ") as caught:
        replace(SETTINGS, **{name: value})  # type: ignore[arg-type]
    assert caught.value.name == name


def test_more_than_a_server_was_started_for_is_refused_with_the_flag() -> None:
    SETTINGS.check(max_num_seqs=8, max_num_batched_tokens=64)
    with pytest.raises(SettingsError, match=r"at most 7.*--max-num-seqs"):
        SETTINGS.check(max_num_seqs=7, max_num_batched_tokens=64)
    with pytest.raises(SettingsError, match=r"at most 63.*--max-num-batched-tokens"):
        SETTINGS.check(max_num_seqs=8, max_num_batched_tokens=63)


def test_all_settings_reach_the_scheduler_and_what_was_learnt_stays() -> None:
    server, clock = scheduler()
    for number in range(3):
        server.add(sequence(number))
    for _ in range(4):
        step(server, clock)
    estimator = server.budget.estimator
    assert estimator is not None
    observed = estimator.num_observed
    assert observed == 4
    changed = SchedulingSettings(
        policy="fcfs", tpot_slo_s=0.25, max_num_seqs=3, max_num_batched_tokens=17
    )
    server.reconfigure(changed)
    assert server.settings == changed
    assert isinstance(server.policy, Fcfs)
    assert server.budget.estimator is estimator
    assert estimator.num_observed == observed
    assert server.budget.max_num_batched_tokens == 17
    assert server.max_num_seqs == 3
    server.reconfigure(SETTINGS)
    assert isinstance(server.policy, Deadline)


def test_lowered_seats_drop_nobody_and_admit_nobody_until_they_are_free() -> None:
    server, clock = scheduler()
    running = [sequence(number) for number in range(8)]
    for one in running:
        server.add(one)
    while len(server.running) < 8:
        step(server, clock)
    late = sequence(9)
    server.add(late)
    server.reconfigure(replace(SETTINGS, max_num_seqs=2))
    seen = []
    while server.running or server.waiting:
        step(server, clock)
        seen.append(len(server.running))
        if late in server.running:
            assert len(server.running) <= 2
    assert seen[0] == 8, "all go on"
    assert all(one.num_output_tokens == 30 for one in (*running, late))
    assert server.num_preemptions == 0


def test_choices_of_a_request_that_is_here_keep_their_seats() -> None:
    server, _ = scheduler()
    server.add(sequence(0, n=4))
    before = server.settings, server.budget, server.policy
    with pytest.raises(SettingsError, match="at least 4"):
        server.reconfigure(replace(SETTINGS, max_num_seqs=3))
    assert (server.settings, server.budget, server.policy) == before
    server.reconfigure(replace(SETTINGS, max_num_seqs=4))


def test_those_who_wait_are_due_by_the_new_promise() -> None:
    server, clock = scheduler(replace(SETTINGS, policy="fcfs"))
    clock.now_s = 10.0
    waiting = sequence(0, arrival_s=9.0)
    server.add(waiting)
    assert waiting.deadline_s == inf
    clock.now_s = 11.0
    server.reconfigure(replace(SETTINGS, ttft_slo_s=2.0))
    assert waiting.deadline_s == pytest.approx(11.0)
    server.reconfigure(replace(SETTINGS, ttft_slo_s=5.0))
    assert waiting.deadline_s == pytest.approx(14.0)


@pytest.mark.parametrize("seed", range(6))
def test_any_changes_at_any_time_leave_every_request_served(seed: int) -> None:
    draws = Random(seed)
    server, clock = scheduler()
    sequences = [
        sequence(number, draws.randint(1, 120), n=1, arrival_s=0.01 * number)
        for number in range(12)
    ]
    pending = list(sequences)
    for _ in range(3000):
        if pending and draws.random() < 0.3:
            server.add(pending.pop(0))
        if draws.random() < 0.2:
            server.reconfigure(
                SchedulingSettings(
                    policy=draws.choice(("deadline", "fcfs")),
                    ttft_slo_s=draws.choice((None, 0.1, 3.0)),
                    tpot_slo_s=draws.choice((0.0, 0.02, 0.2)),
                    step_share=draws.choice(((0.1, 0.2), (0.3, 0.9), (1.0, 1.0))),
                    max_num_seqs=draws.randint(1, 8),
                    max_num_batched_tokens=draws.randint(1, 64),
                    long_prompt_share=draws.choice((0.1, 1.0)),
                )
            )
        step(server, clock)
        if not pending and not server.running and not server.waiting:
            break
    assert all(one.num_output_tokens == 30 for one in sequences)


def test_settings_are_plain_values() -> None:
    assert SchedulingSettings(**asdict(SETTINGS)) == SETTINGS
