"""What a search means in words: whether a promise can be kept, what is possible instead, and why.

Owns: the judgement of a promise against simulations, the rate at which it would hold, and the
binding constraint. Does not own: the simulations (tuner_evaluation.py), the search (tuner.py), or
who is told (api). Imports no torch.

A promise is called impossible only where the bound that 95 % confidence puts under a percentile is
above it; a close miss is for the live verification to decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from chunked_prefill.goodput import Interval, Promise, RequestTimes, percentile
from chunked_prefill.simulator import Outcome

_BISECTIONS = 5
_SLOWEST = 1 / 32
"""Least factor on the rate that is looked at."""
_NEVER_S = 1e9
_PARTS = {"queue": "queueing", "prefill": "prefill", "image": "waiting for images"}


@dataclass(frozen=True, slots=True)
class Reached:
    """95th percentiles with their intervals, over all requests; a failed one never ends."""

    ttft_s: Interval
    tpot_s: Interval

    @classmethod
    def of(cls, times: Sequence[RequestTimes]) -> Reached:
        ttft = [_NEVER_S if t.error else min(t.ttft_s, _NEVER_S) for t in times]
        tpot = [_NEVER_S if t.error else min(t.tpot_s, _NEVER_S) for t in times]
        return cls(percentile(ttft, 95), percentile(tpot, 95))

    def broken(self, promise: Promise) -> tuple[str, ...]:
        """The promises that are broken beyond doubt: "ttft", "tpot"."""
        found = []
        if self.ttft_s.low > promise.ttft_s:
            found.append("ttft")
        if self.tpot_s.low > promise.tpot_s:
            found.append("tpot")
        return tuple(found)

    def __str__(self) -> str:
        return f"p95 TTFT {ms(self.ttft_s.value)} and TPOT {ms(self.tpot_s.value)}"


@dataclass(frozen=True, slots=True)
class Impossible:
    """Why a promise cannot be kept, and what can be."""

    why: str
    achievable: tuple[str, ...]


def judge_idle(idle: Reached, promise: Promise) -> Impossible | None:
    """`idle`: each request alone on the server. Whatever is scheduled, it is no faster."""
    names = idle.broken(promise)
    if not names:
        return None
    faults = []
    if "ttft" in names:
        faults.append(
            f"the first token takes {ms(idle.ttft_s.value)} at p95 on an idle server, "
            f"{ms(promise.ttft_s)} are promised"
        )
    if "tpot" in names:
        faults.append(
            f"a token takes {ms(idle.tpot_s.value)} at p95 on an idle server, "
            f"{ms(promise.tpot_s)} are promised"
        )
    return Impossible(
        f"No load is low enough: {', and '.join(faults)}.",
        (
            f"Idle, this server reaches {idle}. Promise more than that, shorten prompts, or use a "
            "faster device or a smaller model.",
        ),
    )


def judge_load(
    best: Reached, promise: Promise, holds_at: float | None, settings_text: str
) -> Impossible | None:
    """`best`: under the settings that keep most promises. `holds_at`: the factor on the rate at
    which the promise holds, None where there is none."""
    if not best.broken(promise):
        return None
    lines = [f"At this rate, the best settings found ({settings_text}) reach {best}."]
    if holds_at is None:
        lines.append(f"Not even {_SLOWEST:.0%} of this rate is low enough for the promise.")
    else:
        lines.append(f"The promise holds at {holds_at:.2f} times this rate with these settings.")
    return Impossible("No settings keep the promise at this rate.", tuple(lines))


def rate_that_holds(holds: Callable[[float], bool]) -> float | None:
    """The largest factor on the rate, at most 1, at which `holds`, to about 5 %; None if none."""
    if holds(1.0):
        return 1.0
    low, high = _SLOWEST, 1.0
    if not holds(low):
        return None
    for _ in range(_BISECTIONS + 2):
        middle = (low * high) ** 0.5
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


def binding(outcome: Outcome, promise: Promise, kv_blocks: int) -> str:
    """What stands in the way of more kept promises."""
    missed = [promise.missed(answer.times) for answer in outcome.answers]
    late = sum(m in ("ttft", "both") for m in missed)
    slow = sum(m in ("tpot", "both") for m in missed)
    failed = missed.count("failed")
    if failed > max(late, slow):
        return f"Capacity-bound: {failed} of {len(missed)} requests do not fit or did not end."
    if not late and not slow:
        reached = Reached.of(outcome.times)
        shares = {
            "TTFT": reached.ttft_s.value / promise.ttft_s,
            "TPOT": reached.tpot_s.value / promise.tpot_s,
        }
        nearest = max(shares, key=lambda name: shares[name])
        parts = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
        words = f"Nothing binds yet; {nearest} would first: at p95, of its promise: {parts}"
    elif late >= slow:
        shares = outcome.ttft_parts(promise)
        order = sorted(shares, key=lambda name: -shares[name])
        parts = ", ".join(f"{shares[n]:.0%} {_PARTS[n]}" for n in order if shares[n] >= 0.005)
        words = f"TTFT-bound: {parts} in the first-token times of the {late} late requests"
    else:
        words = (
            f"TPOT-bound: {slow} answers were slow, {late} late; mean step "
            f"{ms(outcome.step_s / max(1, outcome.steps))}"
        )
    if outcome.kv_peak_blocks > 0.95 * kv_blocks:
        words += f"; the KV pool was full at its peak ({outcome.preemptions} preemptions)"
    return words + "."


def ms(seconds: float) -> str:
    if seconds >= _NEVER_S or seconds == inf:
        return "for ever"
    value = seconds * 1e3
    return f"{value:,.0f} ms" if value >= 10 else f"{value:.1f} ms"
