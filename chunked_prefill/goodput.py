"""What users saw, in numbers: TTFT, TPOT, gaps, and the share of kept promises.

Owns: RequestTimes (when one request's tokens came), Promise, percentiles, goodput and its
intervals, and their JSON form. Does not own: clocks (a simulator, a load generator or an engine
fills RequestTimes), plots or tables (api). Imports no torch.

TTFT = first token - arrival. TPOT = (E2E - TTFT) / (n - 1), 0 for one token. ITL: the times between
two deliveries. Goodput = |{TTFT <= s1 and TPOT <= s2}| / N, with failed requests in N. The largest
gap of each request is reported too, because a mean hides it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import ceil, floor, inf, nan, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

PERCENTILES = (50, 90, 95, 99)
_Z95 = 1.959963984540054
_RESAMPLES = 1000


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """One request, seen from outside. Times are seconds on one clock of any origin."""

    request_id: str
    arrival_s: float
    """When the last byte of the request was there."""
    delivered_s: Sequence[float]
    """When output came, ascending. A delivery may bring several tokens."""
    output_tokens: int
    prompt_tokens: int = 0
    """With those of images."""
    cached_tokens: int = 0
    """Of the prompt, those whose KV was found."""
    image_tokens: int = 0
    isolated_s: float | None = None
    """TTFT of the same request on an idle server; None when nobody knows."""
    error: str | None = None
    """Why it has no answer, as one word or two; None when it was answered to its end."""

    @property
    def ttft_s(self) -> float:
        return self.delivered_s[0] - self.arrival_s if len(self.delivered_s) else inf

    @property
    def e2e_s(self) -> float:
        return self.delivered_s[-1] - self.arrival_s if len(self.delivered_s) else inf

    @property
    def tpot_s(self) -> float:
        if not len(self.delivered_s):
            return inf
        return (self.delivered_s[-1] - self.delivered_s[0]) / max(1, self.output_tokens - 1)

    @property
    def max_gap_s(self) -> float:
        """Longest time between two deliveries; 0 with fewer than two."""
        return float(max(np.diff(self.delivered_s), default=0.0))


@dataclass(frozen=True, slots=True)
class Promise:
    """What is promised to a request; inf promises nothing."""

    ttft_s: float = inf
    tpot_s: float = inf
    isolated_factor: float = 0.0
    """A request whose TTFT on an idle server is known is promised so many times that, if it is
    more than `ttft_s`: no queue makes a prompt of 128k tokens start in 200 ms."""

    def ttft_limit_s(self, request: RequestTimes) -> float:
        return max(self.ttft_s, self.isolated_factor * (request.isolated_s or 0.0))

    def missed(self, request: RequestTimes) -> str | None:
        """ "failed", "ttft", "tpot", "both", or None when the promise was kept."""
        if request.error is not None or not len(request.delivered_s):
            return "failed"
        late = request.ttft_s > self.ttft_limit_s(request)
        slow = request.tpot_s > self.tpot_s
        if late and slow:
            return "both"
        return "ttft" if late else "tpot" if slow else None


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and the bounds of its 95 % confidence interval."""

    value: float
    low: float
    high: float


def wilson(successes: int, total: int, z: float = _Z95) -> Interval:
    """A share's score interval (Wilson, 1927), which stays within 0 and 1 and means something at
    both ends."""
    if total == 0:
        return Interval(0.0, 0.0, 1.0)
    share = successes / total
    middle = share + z * z / (2 * total)
    half = z * sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    low, high = (middle - half) / scale, (middle + half) / scale
    return Interval(share, max(0.0, min(low, share)), min(1.0, max(high, share)))


def bootstrap(
    values: Sequence[float] | Floats,
    statistic: Callable[[Floats], float],
    seed: int = 0,
    resamples: int = _RESAMPLES,
) -> Interval:
    """`statistic` of the values and the central 95 % of what it is for resamples of them (Efron's
    percentile bootstrap). NaN without values."""
    data = np.asarray(values, dtype=np.float64)
    if len(data) == 0:
        return Interval(nan, nan, nan)
    draws = np.random.default_rng(seed)
    found = [statistic(data[draws.integers(0, len(data), len(data))]) for _ in range(resamples)]
    low, high = np.percentile(found, (2.5, 97.5))
    return Interval(float(statistic(data)), float(low), float(high))


def percentile(values: Sequence[float] | Floats, percent: float) -> Interval:
    """A percentile and the order statistics between which that of the population lies, whatever
    its distribution (a binomial count of values below it, by its normal approximation). NaN
    without values."""
    data = np.sort(np.asarray(values, dtype=np.float64))
    if len(data) == 0:
        return Interval(nan, nan, nan)
    share = percent / 100
    middle = share * len(data)
    half = _Z95 * sqrt(len(data) * share * (1 - share))
    low = max(0, floor(middle - half) - 1)
    high = min(len(data) - 1, ceil(middle + half))
    return Interval(float(np.percentile(data, percent)), float(data[low]), float(data[high]))


@dataclass(frozen=True, slots=True)
class Distribution:
    """Seconds; all NaN without values."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float] | Floats) -> Distribution:
        data = np.asarray(values, dtype=np.float64)
        if len(data) == 0:
            return cls(0, nan, nan, nan, nan, nan, nan)
        p50, p90, p95, p99 = (float(q) for q in np.percentile(data, PERCENTILES))
        return cls(len(data), float(data.mean()), p50, p90, p95, p99, float(data.max()))


@dataclass(frozen=True, slots=True)
class Report:
    """What a run of many requests was like."""

    promise: Promise
    requests: int
    answered: int
    errors: dict[str, int]
    """Failed requests by `RequestTimes.error`."""
    missed: dict[str, int]
    """Requests by how the promise was broken."""
    goodput: Interval
    """Share of the requests whose promise was kept."""
    duration_s: float
    """From the first arrival to the last delivery."""
    ttft_s: Distribution
    ttft_p95_s: Interval
    tpot_s: Distribution
    """Of requests with at least two tokens."""
    tpot_p95_s: Interval
    itl_s: Distribution
    max_gap_s: Distribution
    """Of requests with at least two deliveries."""
    e2e_s: Distribution
    prompt_tokens: int
    cached_tokens: int
    image_tokens: int
    output_tokens: int

    @classmethod
    def of(cls, requests: Sequence[RequestTimes], promise: Promise) -> Report:
        """Latencies are those of answered requests."""
        answered = [r for r in requests if r.error is None and len(r.delivered_s)]
        misses = [promise.missed(r) for r in requests]
        ttft = [r.ttft_s for r in answered]
        tpot = [r.tpot_s for r in answered if r.output_tokens > 1]
        gaps = [np.diff(r.delivered_s) for r in answered if len(r.delivered_s) > 1]
        last = max((r.delivered_s[-1] for r in answered), default=0.0)
        first = min((r.arrival_s for r in requests), default=last)
        return cls(
            promise=promise,
            requests=len(requests),
            answered=len(answered),
            errors=_counts(
                r.error or "no output" for r in requests if r.error or not len(r.delivered_s)
            ),
            missed=_counts(m for m in misses if m is not None),
            goodput=wilson(misses.count(None), len(requests)),
            duration_s=max(0.0, last - first),
            ttft_s=Distribution.of(ttft),
            ttft_p95_s=percentile(ttft, 95),
            tpot_s=Distribution.of(tpot),
            tpot_p95_s=percentile(tpot, 95),
            itl_s=Distribution.of(np.concatenate(gaps) if gaps else []),
            max_gap_s=Distribution.of([float(g.max()) for g in gaps]),
            e2e_s=Distribution.of([r.e2e_s for r in answered]),
            prompt_tokens=sum(r.prompt_tokens for r in answered),
            cached_tokens=sum(r.cached_tokens for r in answered),
            image_tokens=sum(r.image_tokens for r in answered),
            output_tokens=sum(r.output_tokens for r in answered),
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values; numbers that are none (no promise, no requests) are null."""
        row = _plain(asdict(self))
        assert isinstance(row, dict)
        seconds = self.duration_s
        row["requests_per_s"] = self.answered / seconds if seconds else None
        row["good_requests_per_s"] = (
            self.goodput.value * self.requests / seconds if seconds else None
        )
        row["output_tokens_per_s"] = self.output_tokens / seconds if seconds else None
        return row


def goodput_over_time(
    requests: Sequence[RequestTimes], promise: Promise, window_s: float
) -> list[tuple[float, Interval, int]]:
    """(start of the window, share of kept promises, requests) by arrival, from the first on;
    windows without requests are left out. Shows how soon a shift of traffic is dealt with."""
    if not requests:
        return []
    first_s = min(request.arrival_s for request in requests)
    windows: dict[int, list[bool]] = {}
    for request in requests:
        place = int((request.arrival_s - first_s) / window_s)
        windows.setdefault(place, []).append(promise.missed(request) is None)
    return [
        (first_s + place * window_s, wilson(sum(kept), len(kept)), len(kept))
        for place, kept in sorted(windows.items())
    ]


def request_json(request: RequestTimes, promise: Promise) -> dict[str, Any]:
    """One request as plain values, for a file with one line each."""
    row = _plain(
        {
            "request_id": request.request_id,
            "arrival_s": request.arrival_s,
            "ttft_s": request.ttft_s,
            "tpot_s": request.tpot_s,
            "e2e_s": request.e2e_s,
            "max_gap_s": request.max_gap_s,
            "output_tokens": request.output_tokens,
            "prompt_tokens": request.prompt_tokens,
            "cached_tokens": request.cached_tokens,
            "image_tokens": request.image_tokens,
            "isolated_s": request.isolated_s,
            "missed": promise.missed(request),
            "error": request.error,
        }
    )
    assert isinstance(row, dict)
    return row


def _counts(names: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in names:
        found[name] = found.get(name, 0) + 1
    return dict(sorted(found.items()))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, float) and not -inf < value < inf:
        return None
    return value
