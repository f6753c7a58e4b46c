"""How long the server's steps take, before anything is simulated.

Owns: how a calibration is come by, and what happens outside of steps, from a few requests that find
the server idle. Does not own: the measurement of steps (lm_engine/calibration.py), its file
(chunked_prefill/calibration_file.py), or the model of their times. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Protocol

from api.bench_load import State
from api.bench_screen import say
from api.tune_screen import Advance
from api.tune_server import CalibrationRefusedError, Control
from chunked_prefill.calibration_file import Calibration
from chunked_prefill.goodput import RequestTimes
from chunked_prefill.simulator import Delays
from chunked_prefill.trace import TraceRequest
from chunked_prefill.tuner_evaluation import Served

_CALIBRATE_S = 45.0
_LEARN_S = 20.0
_PROBES = 6
_PROBE_TOKENS = 24


class Replay(Protocol):
    def replay(
        self, requests: Sequence[TraceRequest], on_change: Callable[[State], None]
    ) -> list[RequestTimes]: ...


def calibrated(
    control: Control, traffic: Replay, requests: Sequence[TraceRequest], advance: Advance
) -> tuple[Calibration, str]:
    """And where it comes from, for people: the server's own, or one that is made now; where the
    server does not believe what it measured, what it learns from the beginning of the traffic."""
    known = control.show().calibration
    if known is not None:
        return known, f"{known.steps} steps, measured before"
    try:
        made = control.calibrate(_CALIBRATE_S, advance)
    except CalibrationRefusedError as refused:
        say(f"warning: {refused}. What it learns from this traffic is used instead.")
        return _learnt(control, traffic, requests, advance), f"steps of this traffic; {refused}"
    return made, f"{made.steps} steps in {made.seconds:.0f} s"


def _learnt(
    control: Control, traffic: Replay, requests: Sequence[TraceRequest], advance: Advance
) -> Calibration:
    first = [r for r in requests if r.arrival_s < _LEARN_S] or list(requests[:1])
    traffic.replay(first, lambda s: advance(s.ended, s.total, f"{s.ended}/{s.total} requests"))
    now = control.show()
    residuals = (1 / now.guard, 1.0, now.guard)
    return Calibration(now.learnt, residuals, now.guard - 1, now.observed, _LEARN_S)


def delays(
    control: Control,
    traffic: Replay,
    served: Served,
    requests: Sequence[TraceRequest],
    advance: Advance,
) -> Delays:
    """What a request takes outside of steps, and a token between two: what is measured of requests
    that find the server idle, less what a simulation of the same says."""
    settings = control.show().settings
    probes = _probes(requests)
    expected = served.simulate(_apart(probes, [1e3] * len(probes)), settings).answers
    waits = [2 * answer.times.e2e_s + 0.1 for answer in expected]
    told = traffic.replay(
        _apart(probes, waits), lambda s: advance(s.ended, s.total, f"{s.ended}/{s.total} requests")
    )
    by_number = {answer.times.request_id: answer.times for answer in expected}
    pairs = [(t, by_number[t.request_id]) for t in told if t.error is None]
    if not pairs:
        return Delays()
    between_s = max(0.0, median(real.tpot_s - model.tpot_s for real, model in pairs))
    around_s = max(0.0, median(real.ttft_s - model.ttft_s for real, model in pairs))
    # Which half is on which side of the steps makes no difference to anybody's times.
    return Delays(around_s / 2, between_s, around_s / 2)


def _probes(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Evenly from the shorter nine tenths, without images and with short answers."""
    texts = sorted((r for r in requests if not r.images), key=lambda r: r.prompt_tokens)
    usual = texts[: max(1, len(texts) * 9 // 10)] or [requests[0]]
    picked = [usual[place * len(usual) // _PROBES] for place in range(_PROBES)]
    return [
        replace(
            r, output_tokens=min(max(2, r.output_tokens), _PROBE_TOKENS), hash_ids=(), images=()
        )
        for r in picked
    ]


def _short(tokens: int) -> int:
    return min(max(2, tokens), _PROBE_TOKENS)


def _apart(requests: Sequence[TraceRequest], waits_s: Sequence[float]) -> list[TraceRequest]:
    """One after another, each after the wait of the one before."""
    found, at_s = [], 0.0
    for request, wait_s in zip(requests, waits_s, strict=True):
        found.append(replace(request, arrival_s=at_s))
        at_s += wait_s
    return found
