"""The search on surfaces that are known, and what is said of what it finds."""

from __future__ import annotations

from random import Random

import pytest

from chunked_prefill.goodput import Interval, Promise, RequestTimes
from chunked_prefill.settings import SchedulingSettings
from chunked_prefill.simulator import Outcome
from chunked_prefill.step_time import StepTimeModel
from chunked_prefill.tuner import Family, Knob, Point, Search, Trial
from chunked_prefill.tuner_evaluation import Served, faster, one_at_a_time, trial
from chunked_prefill.tuner_space import DEADLINE, STATIC, families, settings_of
from chunked_prefill.tuner_verdict import (
    Reached,
    binding,
    judge_idle,
    judge_load,
    rate_that_holds,
)
from chunked_prefill.workload import synthesize

SIDE = 7
FAMILIES = (
    Family("hill", tuple(Knob(name, tuple(range(SIDE)), 0) for name in "xyz")),
    Family("plain", (Knob("x", (0, 1, 2)),)),
)
OPTIMUM = (0, 5, 2, 4)
REQUESTS = 200


class Surface:
    """Goodput falls with the distance from OPTIMUM; each replication shifts all points alike."""

    def __init__(self) -> None:
        self.asked: list[tuple[Point, int]] = []

    def __call__(self, point: Point, replication: int) -> Trial:
        self.asked.append((point, replication))
        share = 0.3
        if point[0] == 0:
            away = sum(abs(a - b) for a, b in zip(point[1:], OPTIMUM[1:], strict=True))
            share = 0.95 - 0.06 * away
        draws = Random(replication)
        kept = tuple(draws.random() < share for _ in range(REQUESTS))
        return Trial(kept, 2.0 - share)


def search(surface: Surface, seed: int = 0, **more: object) -> Search:
    return Search(FAMILIES, surface, seed=seed, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(8))
def test_the_optimum_of_a_known_surface_is_found(seed: int) -> None:
    surface = Surface()
    found = search(surface, seed).run(24, 9)
    assert found[0].point == OPTIMUM
    assert len(found[0].trials) == 9
    tried = {point for point, _ in surface.asked}
    assert len(tried) < FAMILIES[0].size / 3, "it looks at a part of the points only"


def test_the_same_seed_gives_the_same_search_and_another_one_another() -> None:
    asked = []
    for seed in (3, 3, 4):
        surface = Surface()
        search(surface, seed).run(24, 9)
        asked.append(surface.asked)
    assert asked[0] == asked[1]
    assert asked[0] != asked[2]


def test_points_are_compared_on_the_same_draws() -> None:
    surface = Surface()
    one, other = surface((0, 5, 2, 4), 3), surface((0, 5, 2, 3), 3)
    # A point that is worse on equal draws keeps no promise that the better one breaks.
    assert all(a or not b for a, b in zip(one.kept, other.kept, strict=True))


def test_no_trial_is_made_twice_and_few_points_get_many_replications() -> None:
    surface = Surface()
    tuner = search(surface)
    tuner.run(24, 9)
    assert len(surface.asked) == len(set(surface.asked))
    first = {p for p, replication in surface.asked if replication == 0}
    last = {p for p, replication in surface.asked if replication == 8}
    assert len(last) < len(first)


def test_a_search_that_runs_out_of_time_tells_what_it_knows() -> None:
    surface = Surface()
    told: list[tuple[int, int]] = []
    tuner = search(
        surface,
        on_trial=lambda made, planned: told.append((made, planned)),
        stop=lambda: len(surface.asked) >= 10,
    )
    found = tuner.run(24, 9)
    assert len(surface.asked) == 10
    assert found
    assert all(len(standing.trials) == 1 for standing in found)
    assert [made for made, _ in told] == list(range(1, 11))
    assert all(planned >= made for made, planned in told)
    assert sum(found[0].kept) == max(sum(s.kept) for s in found)


def test_one_trial_is_made_even_without_time() -> None:
    assert len(search(Surface(), stop=lambda: True).run(24, 9)) == 1


def test_a_spread_has_all_starts_and_uses_every_value() -> None:
    tuner = search(Surface())
    points = tuner.spread(28)
    assert (0, 0, 0, 0) in points
    assert (1, 0) in points
    for knob in range(1, 4):
        assert {point[knob] for point in points if point[0] == 0} == set(range(SIDE))


def test_sensitivities_say_what_a_step_costs() -> None:
    tuner = search(Surface())
    best = tuner.run(24, 9)[0]
    steps = tuner.sensitivities(best)
    assert {(s.knob, s.value) for s in steps} == {
        *(("x", 4), ("x", 6), ("y", 1), ("y", 3), ("z", 3), ("z", 5))
    }
    for step in steps:
        assert step.goodput == pytest.approx(-0.06, abs=0.03)
        assert step.strain == pytest.approx(0.06)
        assert step.best == dict(zip("xyz", OPTIMUM[1:], strict=True))[step.knob]


def test_equal_goodput_is_decided_by_the_strain() -> None:
    def flat(point: Point, replication: int) -> Trial:
        return Trial((True,) * 10, 0.5 + 0.1 * abs(point[1] - 1))

    assert Search(FAMILIES[1:], flat).run(3, 1)[0].point == (0, 1)


# -- the space -----------------------------------------------------------------------------------


def test_every_point_of_the_space_is_settings_within_the_limits() -> None:
    space = families(tpot_s=0.05, max_num_seqs=48, max_num_batched_tokens=500, long_prompts=True)
    tuner = Search(space, lambda point, replication: Trial((True,), 1.0))
    seen = set()
    for point in tuner.spread(60):
        family = space[point[0]].name
        settings = settings_of(family, tuner.values(point), ttft_s=0.2)
        settings.check(max_num_seqs=48, max_num_batched_tokens=500)
        assert settings.ttft_slo_s == 0.2
        seen.add((family, settings.policy, settings.tpot_slo_s == 0))
    assert seen == {(DEADLINE, "deadline", False), (STATIC, "fcfs", True)}
    start = settings_of(DEADLINE, tuner.values(tuner.start()), ttft_s=0.2)
    assert start == SchedulingSettings(
        ttft_slo_s=0.2, tpot_slo_s=0.05, max_num_seqs=48, max_num_batched_tokens=500
    ), "the start is what `serve` does by itself"


@pytest.mark.parametrize(("seats", "tokens"), [(1, 1), (2, 64), (3, 70)])
def test_small_servers_have_small_spaces(seats: int, tokens: int) -> None:
    for family in families(
        tpot_s=1.0, max_num_seqs=seats, max_num_batched_tokens=tokens, long_prompts=False
    ):
        for knob in family.knobs:
            assert knob.values
            assert 0 <= knob.start < len(knob.values)
            assert knob.name != "long_prompt_share"


# -- simulated servers ---------------------------------------------------------------------------

MODEL = StepTimeModel(0.02, 0.001, 0.001, 0.0, 0.0)
"""A token of a prompt takes 1 ms, a step 20 more."""
SERVED = Served(MODEL, kv_blocks=2000)
SPEC = "chat:rate=2,duration=20,input=200,output=20,spread=0.5"


def simulated(settings: SchedulingSettings, rate: float = 2.0) -> Outcome:
    requests = faster(list(synthesize(SPEC)), rate / 2.0)
    return SERVED.simulate(requests, settings, seed=1)


def test_trials_are_the_same_for_the_same_seed() -> None:
    settings = SchedulingSettings(ttft_slo_s=0.5, tpot_slo_s=0.1)
    promise = Promise(0.5, 0.1)
    served = Served(MODEL, kv_blocks=2000, residuals=(0.8, 1.0, 1.5))
    requests = list(synthesize(SPEC))
    trials = [
        trial(served.simulate(requests, settings, seed=seed).times, promise) for seed in (0, 0, 1)
    ]
    assert trials[0] == trials[1]
    assert trials[0] != trials[2]
    assert len(trials[0].kept) == len(requests)


def test_a_promise_that_an_idle_server_breaks_is_impossible() -> None:
    settings = SchedulingSettings(ttft_slo_s=0.1, tpot_slo_s=0.1)
    alone = one_at_a_time(list(synthesize(SPEC)))
    idle = Reached.of(SERVED.simulate(alone, settings).times)
    found = judge_idle(idle, Promise(0.1, 0.1))
    assert found is not None
    assert "first token" in found.why
    assert "100 ms are promised" in found.why
    assert "reaches p95 TTFT" in found.achievable[0]
    assert judge_idle(idle, Promise(1.0, 0.1)) is None
    slow = judge_idle(idle, Promise(1.0, 0.01))
    assert slow is not None
    assert "a token takes" in slow.why


def test_a_rate_that_is_too_high_is_impossible_and_a_lower_one_is_named() -> None:
    settings = SchedulingSettings(ttft_slo_s=0.5, tpot_slo_s=0.1)
    promise = Promise(0.6, 0.1)
    best = Reached.of(simulated(settings, rate=8).times)

    def holds(factor: float) -> bool:
        reached = Reached.of(simulated(settings, rate=8 * factor).times)
        return reached.ttft_s.value <= 0.6 and reached.tpot_s.value <= 0.1

    factor = rate_that_holds(holds)
    assert factor is not None
    assert 1 / 32 <= factor < 1
    assert holds(factor)
    found = judge_load(best, promise, factor, "these")
    assert found is not None
    assert f"{factor:.2f} times this rate" in " ".join(found.achievable)
    assert judge_load(Reached.of(simulated(settings, 0.2).times), promise, 1.0, "these") is None


def test_no_rate_may_be_low_enough() -> None:
    assert rate_that_holds(lambda factor: False) is None
    assert rate_that_holds(lambda factor: True) == 1.0
    factor = rate_that_holds(lambda factor: factor <= 0.3)
    assert factor is not None
    assert 0.27 < factor <= 0.3


def test_a_close_miss_is_not_called_impossible() -> None:
    close = Reached(Interval(0.21, 0.19, 0.3), Interval(0.04, 0.03, 0.05))
    assert close.broken(Promise(0.2, 0.05)) == ()
    assert close.broken(Promise(0.18, 0.02)) == ("ttft", "tpot")


def test_the_binding_constraint_is_named() -> None:
    crowd = SchedulingSettings(ttft_slo_s=0.5, tpot_slo_s=0.1, max_num_seqs=2)
    words = binding(simulated(crowd, 6), Promise(0.5, 0.1), 2000)
    assert words.startswith("TTFT-bound:")
    assert "% queueing" in words
    prompts_first = SchedulingSettings(policy="fcfs", max_num_batched_tokens=2048, tpot_slo_s=0)
    assert binding(simulated(prompts_first, 3), Promise(9, 0.03), 2000).startswith("TPOT-bound:")
    idle = binding(simulated(crowd, 0.2), Promise(9, 9), 2000)
    assert idle.startswith("Nothing binds yet")
    small = Served(MODEL, kv_blocks=40).simulate(list(synthesize(SPEC)), crowd)
    assert "KV pool" in binding(small, Promise(9, 9), 40)


def test_failed_requests_bind_and_count_as_never_answered() -> None:
    tiny = Served(MODEL, kv_blocks=4).simulate(list(synthesize(SPEC)), SchedulingSettings())
    assert binding(tiny, Promise(1, 1), 4).startswith("Capacity-bound:")
    failed = trial(tiny.times, Promise(1, 1))
    assert failed.goodput < 0.5
    assert failed.strain > 1e6
    errors = [RequestTimes("0", 0.0, (), 0, error="timeout")]
    assert Reached.of(errors).broken(Promise(1, 1)) == ("ttft", "tpot")
