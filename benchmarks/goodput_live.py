"""A longlens server under load, from settings to what its users saw.

Owns: Live (one server, its settings, the words of its prompts, replays), how long prompts take
alone, and the figures of a run. Does not own: processes (servers.py), HTTP and prompts
(api/bench_*.py), settings (chunked_prefill/settings.py), or what is compared (goodput.py,
goodput_grid.py, shares.py, validate.py).

One calibrated server serves all arms of a comparison; its settings change between them, while it is
idle. What it learns of its own step times meanwhile it keeps.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import nan
from pathlib import Path
from statistics import median

import numpy as np

from api.bench_http import Address
from api.bench_load import Load, Outcome, State
from api.bench_target import Endpoint, Target, TargetClient
from api.bench_words import PromptMaker, Vocabulary, learn
from api.tune_calibration import calibrated
from api.tune_server import Control, Scheduling
from benchmarks import servers
from chunked_prefill.calibration_file import Calibration
from chunked_prefill.goodput import Promise, Report, RequestTimes
from chunked_prefill.settings import SchedulingSettings
from chunked_prefill.trace import TraceRequest
from chunked_prefill.workload import synthesize

MOST_TOKENS = 1024
"""Of a step, in any arm."""
_TIMEOUT_S = 300.0
_WARM_UP = "chat:rate=4,duration=3,input=200,output=16,spread=0.5"
_LEARNT_FROM = "chat:rate=1.5,duration=20,input=120,output=24"
_PROBED = (64, 256, 1024, 2048)
"""Lengths of prompts that are timed alone."""


def static(tokens: int, max_num_seqs: int = 64) -> SchedulingSettings:
    """By arrival, at most `tokens` in a step."""
    return SchedulingSettings(
        "fcfs", max_num_batched_tokens=tokens, tpot_slo_s=0.0, max_num_seqs=max_num_seqs
    )


class Live:
    """A running server. Prompts are new in every replay."""

    def __init__(self, url: str, endpoint: Endpoint = "completions") -> None:
        self.url = url
        self._endpoint: Endpoint = endpoint
        self._target, self._vocabulary = asyncio.run(self._learn())

    def replay(
        self,
        requests: Sequence[TraceRequest],
        on_change: Callable[[State], None] = lambda state: None,
    ) -> list[RequestTimes]:
        """In the order of `requests`; seconds from the start of the replay."""
        return [times for _, times in self.outcomes(requests, on_change)]

    def outcomes(
        self,
        requests: Sequence[TraceRequest],
        on_change: Callable[[State], None] = lambda state: None,
    ) -> list[tuple[Outcome, RequestTimes]]:
        maker = PromptMaker(self._vocabulary, secrets.token_hex(8))
        load = Load(self._target, maker, endpoint=self._endpoint, timeout_s=_TIMEOUT_S)
        state = asyncio.run(load.run(requests, on_change))
        if state.interrupted:
            raise KeyboardInterrupt
        return [(outcome, outcome.times(state.started_s)) for outcome in state.outcomes]

    def apply(self, settings: SchedulingSettings) -> Scheduling:
        """Puts the settings in force. Raises TuneError with the server's words."""
        with Control(Address.parse(self.url), None) as control:
            return control.change(asdict(settings))

    def answered(self, requests: Sequence[TraceRequest]) -> list[tuple[Outcome, RequestTimes]]:
        """As `outcomes`; raises RuntimeError for a request without an answer."""
        found = self.outcomes(requests)
        failed = [f"{times.error}: {outcome.message}" for outcome, times in found if times.error]
        if failed:
            raise RuntimeError(f"{len(failed)} requests failed, the first with {failed[0]}")
        return found

    def calibrate(self) -> Calibration:
        """The server's own if it has one, else one that is made now, on a crowded machine from
        some traffic. Raises TuneError."""
        traffic = list(synthesize(_LEARNT_FROM))
        with Control(Address.parse(self.url), None) as control:
            found, source = calibrated(control, self, traffic, lambda done, total, what: None)
        print(f"calibration: {source}; {found}", flush=True)
        return found

    async def _learn(self) -> tuple[Target, Vocabulary]:
        async with TargetClient(Address.parse(self.url), None, _TIMEOUT_S) as client:
            target = await client.find(None)
            count, _ = await client.counter(target, self._endpoint)
            return target, await learn(count)


@contextmanager
def serving(
    model: str, threads: int, *flags: str, endpoint: Endpoint = "completions"
) -> Iterator[Live]:
    """A server that can be told other settings, after a few seconds of traffic; ended at exit.
    Raises RuntimeError, which names its log, when it does not start."""
    server = servers.longlens(
        *(model, threads, "--allow-tuning"),
        *("--max-num-batched-tokens", str(MOST_TOKENS), "--log-level", "warning", *flags),
    )
    server.start(Path(tempfile.mkdtemp(prefix="longlens-bench-")))
    try:
        live = Live(f"http://127.0.0.1:{server.port}", endpoint)
        live.replay(list(synthesize(_WARM_UP)))
        yield live
    finally:
        server.stop()


# -- prompts alone ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Alone:
    """TTFT on an idle server: weights of 1, n and n² for a prompt of n tokens."""

    weights: tuple[float, float, float]

    @classmethod
    def measured(cls, live: Live, rounds: int = 2) -> Alone:
        """Medians at a few lengths, and the parabola with the least relative error."""
        found = []
        for tokens in _PROBED:
            seen = [live.replay([TraceRequest(0.0, tokens, 2)])[0].ttft_s for _ in range(rounds)]
            found.append(median(seen))
        lengths = np.array(_PROBED, dtype=np.float64)
        c, b, a = np.polyfit(lengths, found, 2, w=1 / np.array(found))
        return cls((float(a), float(b), float(c)))

    def seconds(self, tokens: int) -> float:
        a, b, c = self.weights
        return max(0.0, a + b * tokens + c * tokens * tokens)

    def told(self, times: Sequence[RequestTimes]) -> list[RequestTimes]:
        """Each request with what its prompt takes alone."""
        return [replace(t, isolated_s=self.seconds(t.prompt_tokens)) for t in times]


# -- figures ------------------------------------------------------------------------------------

_STARVED = 10.0


def starved(times: Sequence[RequestTimes], promise: Promise) -> int:
    """Requests without an answer, or whose first token came after ten times what was promised."""
    return sum(t.error is not None or t.ttft_s > _STARVED * promise.ttft_limit_s(t) for t in times)


def heading(width: int) -> str:
    """Of the columns of `row`."""
    return (
        f"{'':{width}} {'requests':>8} {'goodput':>8} {'TTFT p50':>9} {'p95':>7} "
        f"{'TPOT p50':>9} {'p95':>5} {'gap p99':>8} ms {'long TTFT':>10} s {'starved':>8}"
    )


def row(
    name: str, width: int, report: Report, times: Sequence[RequestTimes], longest: int = 1000
) -> str:
    """One run, or several together; a long prompt has more than `longest` tokens."""
    longs = [t.ttft_s for t in times if t.error is None and t.prompt_tokens > longest]
    ttft, tpot = report.ttft_s, report.tpot_s
    return (
        f"{name:{width}} {report.requests:8,} {report.goodput.value:8.1%} {ttft.p50 * 1e3:9,.0f} "
        f"{ttft.p95 * 1e3:7,.0f} {tpot.p50 * 1e3:9.0f} {tpot.p95 * 1e3:5.0f} "
        f"{report.max_gap_s.p99 * 1e3:8.0f}    {median(longs) if longs else nan:10.1f}   "
        f"{starved(times, report.promise):8}"
    )
