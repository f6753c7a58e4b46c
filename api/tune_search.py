"""From a calibrated server to the settings that are worth verifying.

Owns: the order and the time of simulations: the idle server, a first look, the resolution of
images, the search. Does not own: the search itself (chunked_prefill/tuner.py), the simulated server
(tuner_evaluation.py), or judgements (tuner_verdict.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from api.tune_server import Scheduling
from chunked_prefill.goodput import Promise, RequestTimes
from chunked_prefill.settings import SchedulingSettings
from chunked_prefill.simulator import Outcome
from chunked_prefill.trace import TraceRequest
from chunked_prefill.tuner import Point, Search, Sensitivity, Standing, Trial
from chunked_prefill.tuner_evaluation import Served, faster, one_at_a_time, trial
from chunked_prefill.tuner_space import families, settings_of
from chunked_prefill.tuner_verdict import (
    Impossible,
    Reached,
    judge_idle,
    judge_load,
    rate_that_holds,
)

_SEARCH_S = 60.0
_FIRST_LOOK = 12
_MOST_POINTS, _FEWEST_POINTS = 60, 16
_LONG_SHARE = 0.125
"""Of the KV pool: a prompt that takes more is long enough for their share of it to matter."""
_GOOD_ENOUGH = 0.01
"""Goodput that a larger resolution may cost."""
VERIFIED = 3
_ALIKE = 0.02
"""Difference of strain at equal goodput below which two settings do the same."""

Advance = Callable[[float, float, str], None]


@dataclass(frozen=True, slots=True)
class Candidate:
    family: str
    settings: SchedulingSettings
    standing: Standing


@dataclass(frozen=True, slots=True)
class Found:
    """What the simulations say."""

    candidates: tuple[Candidate, ...]
    """Worth verifying, best first."""
    everything: tuple[Candidate, ...]
    """Every point that was tried, on the first excerpt alone."""
    sensitivities: tuple[Sensitivity, ...]
    outcome: Outcome
    """Of the best on the first excerpt."""
    idle: Reached
    resolutions: tuple[tuple[int | None, Standing], ...]
    """The best settings under each limit of images' resolution; empty without images."""
    resolution: int | None
    trials: int


class Simulations:
    """All simulations of one run of `tune`. `excerpts`: of the same traffic, the first is the one
    that will be verified."""

    def __init__(
        self,
        served: Served,
        server: Scheduling,
        excerpts: Sequence[Sequence[TraceRequest]],
        promise: Promise,
        resolutions: Sequence[int | None],
        seed: int = 0,
    ) -> None:
        self.served = served
        self.promise = promise
        self._server = server
        self._excerpts = excerpts
        self._resolutions = resolutions
        self._seed = seed
        self._resolution: int | None = server.resolution
        pool = served.kv_blocks * served.block_size
        longest = max(r.prompt_tokens for excerpt in excerpts for r in excerpt)
        self._families = families(
            tpot_s=promise.tpot_s,
            max_num_seqs=server.max_num_seqs,
            max_num_batched_tokens=server.max_num_batched_tokens,
            long_prompts=longest > _LONG_SHARE * pool,
        )

    # -- before the search --------------------------------------------------------------------

    def idle(self) -> Reached:
        """Each request alone."""
        start = self._settings((0, *(knob.start for knob in self._families[0].knobs)))
        lowest = self._resolutions[-1] if self._resolutions else None
        alone = one_at_a_time(self._excerpts[0])
        return Reached.of(self.served.simulate(alone, start, resolution=lowest).times)

    def first_look(self, advance: Advance) -> Impossible | None:
        """A verdict from a few settings, without what happens outside of steps: if none of them
        nearly keeps the promise, none does. Chooses the images' resolution to go on with."""
        idle = judge_idle(self.idle(), self.promise)
        if idle is not None:
            return idle
        search = self._search()
        points = search.spread(_FIRST_LOOK)
        self._choose_resolution(search.start(), 1)
        best: tuple[float, Reached, Point] | None = None
        for number, point in enumerate(points):
            advance(number, len(points), "a first look")
            reached = Reached.of(self._times(point))
            if not reached.broken(self.promise):
                return None
            strain = self._strain(reached)
            if best is None or strain < best[0]:
                best = (strain, reached, point)
        assert best is not None
        return self._judge(best[1], best[2])

    # -- the search ---------------------------------------------------------------------------

    def search(self, advance: Advance) -> Found | Impossible:
        began_s = time.monotonic()
        probe = self._search()
        self._evaluate(probe.start(), 0)
        cost_s = max(1e-4, time.monotonic() - began_s)
        replications = min(len(self._excerpts), 9 if cost_s < 0.1 else 3)
        trials = _SEARCH_S / cost_s
        count = int(min(_MOST_POINTS, max(_FEWEST_POINTS, trials / 4)))

        def told(made: int, planned: int) -> None:
            advance(made, planned, f"{made} simulations of {len(self._excerpts[0])} requests")

        search = self._search(told, lambda: time.monotonic() - began_s > _SEARCH_S)
        standings = search.run(count, replications)
        best = standings[0]
        outcome = self._outcome(best.point, 0)
        reached = Reached.of(
            [t for r in range(len(best.trials)) for t in self._times(best.point, r)]
        )
        impossible = self._judge(reached, best.point)
        if impossible is not None:
            return impossible
        sweep = self._choose_resolution(best.point, len(best.trials))
        return Found(
            tuple(self._candidate(search, s) for s in _distinct(standings)),
            tuple(self._candidate(search, s) for s in search.all_standings()),
            tuple(search.sensitivities(best)),
            outcome,
            self.idle(),
            sweep,
            self._resolution,
            search.trials,
        )

    # -- parts --------------------------------------------------------------------------------

    def _search(
        self,
        on_trial: Callable[[int, int], None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> Search:
        return Search(self._families, self._evaluate, seed=self._seed, on_trial=on_trial, stop=stop)

    def _settings(self, point: Point) -> SchedulingSettings:
        family = self._families[point[0]]
        values = {k.name: k.values[i] for k, i in zip(family.knobs, point[1:], strict=True)}
        return settings_of(family.name, values, ttft_s=self.promise.ttft_s)

    def _outcome(self, point: Point, replication: int) -> Outcome:
        return self.served.simulate(
            self._excerpts[replication],
            self._settings(point),
            seed=self._seed + replication,
            resolution=self._resolution,
        )

    def _times(self, point: Point, replication: int = 0) -> list[RequestTimes]:
        return self._outcome(point, replication).times

    def _evaluate(self, point: Point, replication: int) -> Trial:
        return trial(self._times(point, replication), self.promise)

    def _candidate(self, search: Search, standing: Standing) -> Candidate:
        family = self._families[standing.point[0]].name
        return Candidate(family, self._settings(standing.point), standing)

    def _strain(self, reached: Reached) -> float:
        return max(
            reached.ttft_s.value / self.promise.ttft_s, reached.tpot_s.value / self.promise.tpot_s
        )

    def _judge(self, reached: Reached, point: Point) -> Impossible | None:
        if not reached.broken(self.promise):
            return None

        def holds(factor: float) -> bool:
            outcome = self.served.simulate(
                faster(self._excerpts[0], factor),
                self._settings(point),
                seed=self._seed,
                resolution=self._resolution,
            )
            return self._strain(Reached.of(outcome.times)) <= 1

        return judge_load(
            reached, self.promise, rate_that_holds(holds), described(self._settings(point))
        )

    def _choose_resolution(
        self, point: Point, replications: int
    ) -> tuple[tuple[int | None, Standing], ...]:
        """Every limit with these settings; the largest that costs next to nothing is used from now
        on."""
        sweep = []
        for limit in self._resolutions:
            self._resolution = limit
            trials = tuple(self._evaluate(point, r) for r in range(replications))
            sweep.append((limit, Standing(point, trials)))
        if sweep:
            best = max(standing.goodput for _, standing in sweep)
            self._resolution = next(
                limit for limit, standing in sweep if standing.goodput >= best - _GOOD_ENOUGH
            )
        return tuple(sweep)


def _distinct(standings: Sequence[Standing]) -> list[Standing]:
    """The best, without those that did as one before them: a knob that nothing comes near makes no
    difference, and to verify the same twice says nothing new."""
    found: list[Standing] = []
    for standing in standings:
        if len(found) < VERIFIED and not any(_alike(standing, other) for other in found):
            found.append(standing)
    return found


def _alike(one: Standing, other: Standing) -> bool:
    same = abs(one.goodput - other.goodput) < 1e-9
    return same and abs(one.strain - other.strain) < _ALIKE


def described(settings: SchedulingSettings) -> str:
    """In one line."""
    parts: list[str] = [settings.policy]
    if settings.tpot_slo_s:
        least, most = settings.step_share
        parts.append(f"steps of {least:.0%} to {most:.0%} of {settings.tpot_slo_s * 1e3:g} ms")
    parts.append(f"{settings.max_num_batched_tokens} tokens")
    parts.append(f"{settings.max_num_seqs} sequences")
    if settings.policy == "deadline":
        parts.append(f"long prompts {settings.long_prompt_share:.0%} of the KV")
    return ", ".join(parts)
