"""The search for settings that keep most promises.

Owns: knobs and the points between them, Search (a spread of points, successive halving over
replications, then steps to better neighbours), and what one step of each knob costs. Does not own:
what a point means (tuner_space.py), how good it is (tuner_evaluation.py, by simulation; any
function here), or what follows from it (tuner_verdict.py). Imports no torch.

A replication is one piece of traffic with its own draws, the same for every point: differences
between points are then the points' own (common random numbers). Most points are tried on the first
alone; only those that do well are tried on more (Jamieson and Talwalkar 2016, "Non-stochastic best
arm identification", AISTATS).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

_KEEP = 3
"""One in so many points goes on to the next rung, which has so many times the replications."""
_CLIMB_ROUNDS = 6

Point = tuple[int, ...]
"""Number of the family, then an index into each of its knobs' values."""


@dataclass(frozen=True, slots=True)
class Knob:
    name: str
    values: tuple[Any, ...]
    """In an order: neighbours are one step apart."""
    start: int = 0
    """Index of what is used where nobody tunes."""


@dataclass(frozen=True, slots=True)
class Family:
    """Points that differ in the same knobs."""

    name: str
    knobs: tuple[Knob, ...]

    @property
    def size(self) -> int:
        count = 1
        for knob in self.knobs:
            count *= len(knob.values)
        return count


@dataclass(frozen=True, slots=True)
class Trial:
    """One point in one replication."""

    kept: tuple[bool, ...]
    """Of each request: whether its promise was."""
    strain: float
    """The larger of p95 TTFT and p95 TPOT, each divided by its promise: at most 1 where both
    promises hold."""
    ttft_p95_s: float = 0.0
    tpot_p95_s: float = 0.0
    gap_p99_s: float = 0.0

    @property
    def goodput(self) -> float:
        return sum(self.kept) / max(1, len(self.kept))


@dataclass(frozen=True, slots=True)
class Standing:
    """What is known of one point."""

    point: Point
    trials: tuple[Trial, ...]

    @property
    def kept(self) -> tuple[bool, ...]:
        """Over all replications."""
        return tuple(kept for trial in self.trials for kept in trial.kept)

    @property
    def goodput(self) -> float:
        kept = self.kept
        return sum(kept) / max(1, len(kept))

    @property
    def strain(self) -> float:
        return sum(trial.strain for trial in self.trials) / max(1, len(self.trials))

    def better_first(self) -> tuple[float, float, Point]:
        """Where as many promises are kept, the one further away from breaking them is better."""
        return (-self.goodput, self.strain, self.point)


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What one step of a knob does to the best point, everything else as it is."""

    knob: str
    value: Any
    best: Any
    goodput: float
    """Difference to the best point's."""
    strain: float


class _OutOfTimeError(Exception):
    """The search has to end with what it knows."""


class Search:
    """`evaluate(point, replication)` must give the same for the same arguments. `on_trial` is told
    of each trial made and of how many are planned at least. When `stop` says so, the search ends
    with what it knows; without that its result follows from `seed`."""

    def __init__(
        self,
        families: tuple[Family, ...],
        evaluate: Callable[[Point, int], Trial],
        *,
        seed: int = 0,
        on_trial: Callable[[int, int], None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        self.families = families
        self._evaluate = evaluate
        self._draws = Random(f"{seed} points")
        self._on_trial = on_trial
        self._stop = stop
        self._trials: dict[Point, list[Trial]] = {}
        self._count = self._planned = 0

    # -- points -------------------------------------------------------------------------------

    def values(self, point: Point) -> dict[str, Any]:
        """Of the point's knobs, by their names."""
        knobs = self.families[point[0]].knobs
        return {knob.name: knob.values[index] for knob, index in zip(knobs, point[1:], strict=True)}

    def start(self, family: int = 0) -> Point:
        return (family, *(knob.start for knob in self.families[family].knobs))

    def spread(self, count: int) -> list[Point]:
        """The start of each family and about `count` other points, each knob's values equally often
        (a Latin hypercube), each family by the logarithm of its size."""
        sizes = [family.size.bit_length() for family in self.families]
        found: dict[Point, None] = {self.start(f): None for f in range(len(sizes))}
        for number, family in enumerate(self.families):
            wanted = min(family.size, max(2, count * sizes[number] // sum(sizes)))
            for row in self._rows(family, wanted):
                found[(number, *row)] = None
        return list(found)

    def _rows(self, family: Family, count: int) -> Iterator[tuple[int, ...]]:
        columns = []
        for knob in family.knobs:
            column = [place * len(knob.values) // count for place in range(count)]
            self._draws.shuffle(column)
            columns.append(column)
        yield from zip(*columns, strict=True)

    def neighbours(self, point: Point) -> list[Point]:
        """One step of one knob away."""
        found = []
        for place, knob in enumerate(self.families[point[0]].knobs, start=1):
            for step in (-1, 1):
                index = point[place] + step
                if 0 <= index < len(knob.values):
                    found.append((*point[:place], index, *point[place + 1 :]))
        return found

    # -- search -------------------------------------------------------------------------------

    def run(self, count: int, replications: int) -> list[Standing]:
        """The points that were tried on most replications, best first; at least one."""
        points = self.spread(count)
        self._planned = _planned(len(points), replications)
        made = 1
        try:
            self._try(points, made)
            while made < replications:
                made = min(replications, made * _KEEP)
                points = self._best(points, -(-len(points) // _KEEP))
                self._try(points, made)
            self._climb(self._best(points, 1)[0], replications)
        except _OutOfTimeError:
            pass
        return self.standings()

    def standings(self) -> list[Standing]:
        most = max(map(len, self._trials.values()))
        tried = (Standing(p, tuple(t)) for p, t in self._trials.items() if len(t) == most)
        return sorted(tried, key=Standing.better_first)

    @property
    def trials(self) -> int:
        """How many were made."""
        return self._count

    def all_standings(self) -> list[Standing]:
        """Of every point that was tried at all, on the first replication alone."""
        return [Standing(point, (trials[0],)) for point, trials in self._trials.items()]

    def sensitivities(self, best: Standing) -> list[Sensitivity]:
        """Of all neighbours that were tried as often as `best`."""
        found = []
        own = self.values(best.point)
        for point in self.neighbours(best.point):
            trials = self._trials.get(point, ())
            if len(trials) < len(best.trials):
                continue
            other = Standing(point, tuple(trials[: len(best.trials)]))
            (name,) = (n for n, value in self.values(point).items() if value != own[n])
            found.append(
                Sensitivity(
                    name,
                    self.values(point)[name],
                    own[name],
                    other.goodput - best.goodput,
                    other.strain - best.strain,
                )
            )
        return found

    def _climb(self, point: Point, replications: int) -> None:
        """To the best neighbour, as long as it is better. What was tried on the way stays."""
        for _ in range(_CLIMB_ROUNDS):
            around = [point, *self.neighbours(point)]
            self._try(around, replications)
            best = self._best(around, 1)[0]
            if best == point:
                return
            point = best

    def _best(self, points: Iterable[Point], count: int) -> list[Point]:
        tried = [Standing(point, tuple(self._trials[point])) for point in points]
        return [standing.point for standing in sorted(tried, key=Standing.better_first)[:count]]

    def _try(self, points: Iterable[Point], replications: int) -> None:
        for point in points:
            trials = self._trials.get(point, [])
            while len(trials) < replications:
                if self._trials and self._stop is not None and self._stop():
                    raise _OutOfTimeError
                trials.append(self._evaluate(point, len(trials)))
                self._trials[point] = trials
                self._count += 1
                if self._on_trial is not None:
                    self._on_trial(self._count, max(self._planned, self._count))


def _planned(points: int, replications: int) -> int:
    """Trials of all rungs, without the climb."""
    total = made = 0
    wanted = 1
    while True:
        total += points * (wanted - made)
        made = wanted
        if made >= replications:
            return total
        wanted = min(replications, wanted * _KEEP)
        points = -(-points // _KEEP)
