"""Goodput on this machine: a promise in milliseconds against static token budgets.

Owns: the rates and promises that are compared, the excerpts of the trace, the search for the best
static budget, and the verdicts. Does not own: the server and its load (goodput_live.py).

Excerpts of the Azure conversation trace of 2023, lengths divided by 16, 45 seconds each, one prompt
in a hundred replaced by one of 2,048 to 4,096 tokens, at even distances. The three pairs of rate
and promise are fixed here, before any live result: shares of what the server answers when
everything arrives at once (`capacity`: by arrival, 512 tokens in a step), so that the knee of a
faster machine is elsewhere and the pairs are the same. They are a second choice: the first (0.35,
0.70, 1.10) broke the bound on long prompts in simulation. These were found by simulating six
excerpts with a step-time model like that of two cores: static budgets keep 81 % of the promises at
half of the capacity and 66 % at 0.6, `deadline` 99 and 98 %. Beyond that a long prompt pays for the
others: 2.2 times its TTFT by arrival at 0.7, 2.4 at 0.85, where `deadline` keeps 98 % and static
budgets
half. `crowd` is such a pair; it runs when it is asked for.

The search for the static budget sees the first 15 seconds of the first excerpt; the two best then
run all of it in turn with `deadline`, and the better of these also the excerpts of further rounds.
The promise of a prompt that is long is three times what it takes alone, in all arms.

python -m benchmarks.goodput --model FOLDER --trace AzureLLMInferenceTrace_conv.csv [--threads 2]
    [--rounds 2] [--pairs light knee over] [--budgets 64 128 256 512 1024] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.goodput_live import MOST_TOKENS, Alone, Live, heading, row, serving, static
from chunked_prefill.goodput import Interval, Promise, Report, RequestTimes, bootstrap, request_json
from chunked_prefill.settings import SchedulingSettings
from chunked_prefill.trace import TraceRequest, read_trace
from chunked_prefill.workload import scaled


@dataclass(frozen=True, slots=True)
class Pair:
    """A rate, a promise, and what `deadline` must gain."""

    name: str
    load: float
    """Of the capacity."""
    ttft_s: float
    tpot_s: float
    ahead_points: float
    """By which goodput must exceed that of the best static budget."""

    @property
    def promise(self) -> Promise:
        return Promise(self.ttft_s, self.tpot_s, isolated_factor=_STRETCH)

    @property
    def deadline(self) -> SchedulingSettings:
        return SchedulingSettings(
            "deadline", self.ttft_s, self.tpot_s, max_num_batched_tokens=MOST_TOKENS // 2
        )


PAIRS = (
    Pair("light", 0.30, 1.0, 0.20, -1.0),
    Pair("knee", 0.50, 1.0, 0.25, 15.0),
    Pair("over", 0.60, 1.0, 0.25, 20.0),
    Pair("crowd", 0.85, 1.5, 0.30, 20.0),
)
"""`light` may be a point worse: that is less than one request of an excerpt."""
BUDGETS = (64, 128, 256, 512, 1024)
SECONDS, SEARCH_S = 45.0, 15.0
STARTS_S = (600.0, 1200.0, 2400.0)
"""Of the rounds' excerpts, in the recording."""
_STRETCH = 3.0
_LENGTHS = 1 / 16
_LONG = (2048, 4096)
_LONG_EVERY = 100
_FILLED = 100
"""Requests that measure the capacity."""
_GAP_BOUND, _LONG_BOUND = 1.2, 1.7


# -- traffic ------------------------------------------------------------------------------------


def excerpt(
    trace: Sequence[TraceRequest], start_s: float, rate: float, seconds: float = SECONDS
) -> list[TraceRequest]:
    """So many requests from `start_s` on that they come at `rate` a second, in their own rhythm
    stretched to `seconds`; at even distances some are long (at least one)."""
    count = max(2, round(rate * seconds))
    taken = [r for r in trace if r.arrival_s >= start_s][: count + 1]
    if len(taken) <= count:
        raise SystemExit(f"the trace has no {count} requests after {start_s:g} s")
    first_s, last_s = taken[0].arrival_s, taken[-1].arrival_s
    stretch = seconds / (last_s - first_s)
    requests = [
        replace(scaled(r, _LENGTHS), arrival_s=(r.arrival_s - first_s) * stretch)
        for r in taken[:count]
    ]
    longs = max(1, round(count / _LONG_EVERY))
    lengths = random.Random(f"{start_s} long prompts")
    for number in range(longs):
        place = int((number + 0.125) * count / longs)
        tokens = lengths.randint(*_LONG)
        requests[place] = replace(requests[place], prompt_tokens=tokens)
    return requests


def capacity(live: Live, trace: Sequence[TraceRequest]) -> float:
    """Requests a second when all of an excerpt's are there at once."""
    live.apply(static(512))
    requests = [replace(r, arrival_s=0.0) for r in excerpt(trace, STARTS_S[0], 1.0, _FILLED)]
    times = live.replay(requests)
    return len(times) / (max(t.delivered_s[-1] for t in times) - times[0].arrival_s)


# -- comparing ----------------------------------------------------------------------------------

Runs = dict[str, list[list[RequestTimes]]]
"""By arm, one list for each round."""


class Comparison:
    """One pair of rate and promise."""

    def __init__(self, live: Live, alone: Alone, trace: Sequence[TraceRequest], pair: Pair) -> None:
        self.pair = pair
        self.rate = 0.0
        self.best = ""
        """The static arm with the greatest goodput."""
        self.searched: Runs = {}
        self.runs: Runs = {}
        self._live, self._alone, self._trace = live, alone, trace
        self._width = 14

    def run(self, rate: float, budgets: Sequence[int], rounds: int) -> None:
        self.rate = rate
        pair = self.pair
        print(
            f"\n{pair.name}: {rate:.2f} requests/s ({pair.load:.0%} of the capacity), TTFT "
            f"{pair.ttft_s * 1e3:,.0f} ms, TPOT {pair.tpot_s * 1e3:,.0f} ms\n"
            f"{heading(self._width)}",
            flush=True,
        )
        statics = {f"static {tokens}": static(tokens) for tokens in budgets}
        whole = excerpt(self._trace, STARTS_S[0], rate)
        beginning = [r for r in whole if r.arrival_s < SEARCH_S]
        for name, settings in statics.items():
            self._replay(self.searched, name, settings, beginning)
        rivals = _best(self.searched, pair.promise)[:2]
        for number in range(rounds):
            requests = excerpt(self._trace, STARTS_S[number % len(STARTS_S)], rate)
            arms = {name: statics[name] for name in rivals} | {"deadline": pair.deadline}
            # Who goes first changes from round to round.
            for name in list(arms)[:: -1 if number % 2 else 1]:
                self._replay(self.runs, name, arms[name], requests)
            self.best = next(n for n in _best(self.runs, pair.promise) if n in rivals)
            rivals = [self.best]
        print("all rounds")
        for name in (self.best, "deadline"):
            self._print(name, _together(self.runs[name]))

    def _replay(
        self, into: Runs, name: str, settings: SchedulingSettings, requests: list[TraceRequest]
    ) -> None:
        self._live.apply(settings)
        times = self._alone.told(self._live.replay(requests))
        into.setdefault(name, []).append(times)
        self._print(name, times)

    def _print(self, name: str, times: list[RequestTimes]) -> None:
        report = Report.of(times, self.pair.promise)
        print(row(name, self._width, report, times, _LONG[0] - 1), flush=True)

    # -- conclusions --------------------------------------------------------------------------

    def ahead(self) -> Interval:
        """Points of goodput by which `deadline` is ahead of the best static arm, request by
        request."""
        promise = self.pair.promise
        ours, theirs = (_together(self.runs[name]) for name in ("deadline", self.best))
        kept = [
            100.0 * ((promise.missed(a) is None) - (promise.missed(b) is None))
            for a, b in zip(ours, theirs, strict=True)
        ]
        return bootstrap(kept, lambda values: float(np.mean(values)))

    def long_ratio(self) -> float:
        """The median, over long prompts, of TTFT against the same prompt's by arrival."""
        pairs = zip(_together(self.runs["deadline"]), _together(self.runs[self.best]), strict=True)
        return median(a.ttft_s / b.ttft_s for a, b in pairs if a.prompt_tokens >= _LONG[0])

    def verdicts(self) -> list[tuple[str, bool]]:
        pair, ahead = self.pair, self.ahead()
        ours = _together(self.runs["deadline"])
        report = Report.of(ours, pair.promise)
        gap, bound = report.max_gap_s.p99, _GAP_BOUND * pair.tpot_s
        ratio = self.long_ratio()
        unanswered = sum(t.error is not None for t in ours)
        return [
            (
                f"goodput {ahead.value:+.1f} points [{ahead.low:+.1f}, {ahead.high:+.1f}] against "
                f"{self.best} (bound {pair.ahead_points:+.0f})",
                ahead.value >= pair.ahead_points,
            ),
            (f"worst gap p99 {gap * 1e3:.0f} ms (bound {bound * 1e3:.0f})", gap <= bound),
            (f"long prompts' TTFT {ratio:.2f} x (bound {_LONG_BOUND})", ratio <= _LONG_BOUND),
            (f"{unanswered} requests without an answer (bound 0)", unanswered == 0),
        ]

    def as_json(self) -> dict[str, Any]:
        promise = self.pair.promise

        def rows(runs: Runs) -> dict[str, Any]:
            return {
                name: [
                    {
                        "report": Report.of(times, promise).as_json(),
                        "requests": [request_json(t, promise) for t in times],
                    }
                    for times in found
                ]
                for name, found in runs.items()
            }

        return {
            "pair": asdict(self.pair),
            "requests_per_s": self.rate,
            "best_static": self.best,
            "verdicts": [{"what": what, "holds": holds} for what, holds in self.verdicts()],
            "search": rows(self.searched),
            "rounds": rows(self.runs),
        }


def _together(rounds: Sequence[list[RequestTimes]]) -> list[RequestTimes]:
    return [times for found in rounds for times in found]


def _best(runs: Runs, promise: Promise) -> list[str]:
    """Arms by goodput, the greatest first; of equals the one with the lower TTFT."""

    def merit(name: str) -> tuple[float, float]:
        report = Report.of(_together(runs[name]), promise)
        return -report.goodput.value, report.ttft_s.p95

    return sorted(runs, key=merit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of the model to serve")
    parser.add_argument("--trace", type=Path, required=True, help="Azure CSV")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--pairs", nargs="+", default=[p.name for p in PAIRS[:3]], metavar="NAME")
    parser.add_argument("--budgets", nargs="+", type=int, default=list(BUDGETS))
    parser.add_argument("--capacity", type=float, help="requests/s, instead of measuring it")
    parser.add_argument("--json", type=Path, help="also write every request here")
    args = parser.parse_args()
    begin_s = time.monotonic()
    trace = list(read_trace(args.trace))
    comparisons = []
    with serving(args.model, args.threads) as live:
        live.calibrate()
        alone = Alone.measured(live)
        full = args.capacity or capacity(live, trace)
        print(
            f"capacity {full:.2f} requests/s; a prompt alone takes "
            + ", ".join(f"{alone.seconds(n) * 1e3:,.0f} ms ({n:,})" for n in (64, 512, *_LONG))
        )
        for pair in PAIRS:
            if pair.name in args.pairs:
                comparison = Comparison(live, alone, trace, pair)
                comparison.run(pair.load * full, args.budgets, args.rounds)
                comparisons.append(comparison)
    print("\n| pair | what | holds |\n|---|---|---|")
    for comparison in comparisons:
        for what, holds in comparison.verdicts():
            print(f"| {comparison.pair.name} | {what} | {'yes' if holds else 'no'} |")
    print(f"\n{(time.monotonic() - begin_s) / 60:.1f} minutes")
    if args.json:
        found = {
            "capacity_requests_per_s": full,
            "alone": asdict(alone),
            "pairs": [comparison.as_json() for comparison in comparisons],
        }
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
