"""What an operator's dashboards read.

Owns: Metrics - vLLM's names with the label `model_name`, in a registry of its own, from request
timings and from the engine's last snapshot. Does not own: when something is observed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from lm_engine.client import EngineStats, EngineStatus, TierStats
from lm_engine.client import Histogram as Counts
from lm_engine.outputs import Timing, Usage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0)
_ITL_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0)
_SPAN_S = (0.01, 0.05, 0.1, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 960.0)
_TOKENS = tuple(float(2**power) for power in range(18))

_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("num_requests_running", "Sequences being computed", lambda s: s.num_running),
    ("num_requests_waiting", "Sequences waiting", lambda s: s.num_waiting),
    (
        "kv_cache_usage_perc",
        "Share of KV blocks in use, 0 to 1",
        lambda s: s.kv_blocks_used / max(1, s.kv_blocks_total),
    ),
    ("kv_blocks_used", "KV blocks that requests hold", lambda s: s.kv_blocks_used),
    ("kv_blocks_cached", "KV blocks kept for reuse", lambda s: s.kv_blocks_cached),
    ("embedding_rows_used", "Image rows that requests hold", lambda s: s.embedding_rows_used),
    ("embedding_rows_cached", "Image rows kept for reuse", lambda s: s.embedding_rows_cached),
    ("embedding_rows", "Image rows in all", lambda s: s.embedding_rows_total),
    (
        "kv_oldest_job_age_seconds",
        "Age of the oldest copy of KV between tiers, 0 when there is none",
        lambda s: s.tiers.oldest_copy_age_s if s.tiers else 0.0,
    ),
)
_COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("prompt_tokens", "Prompt tokens computed", lambda s: s.prompt_tokens),
    ("generation_tokens", "Tokens generated", lambda s: s.generation_tokens),
    ("prefix_cache_queries", "Prompt tokens looked up", lambda s: s.prefix_cache_queries),
    ("prefix_cache_hits", "Prompt tokens found in the cache", lambda s: s.prompt_tokens_cached),
    ("num_preemptions", "Sequences preempted", lambda s: s.preemptions),
    ("engine_steps", "Steps of the engine", lambda s: s.steps),
    ("step_seconds_predicted", "Of steps, before each began", lambda s: s.predicted_s),
    ("step_seconds_measured", "Of the same steps", lambda s: s.measured_s),
    ("mm_cache_queries", "Images looked up", lambda s: s.image_cache_queries),
    ("mm_cache_hits", "Images found in the cache", lambda s: s.image_cache_hits),
    ("images_encoded", "Images encoded", lambda s: s.images_encoded),
)
_Row = tuple[dict[str, str], float]


def _source(stats: EngineStats) -> Iterable[_Row]:
    below = stats.prompt_tokens_from_host + stats.prompt_tokens_from_disk
    yield {"source": "device"}, stats.prompt_tokens_cached - below
    yield {"source": "host"}, stats.prompt_tokens_from_host
    yield {"source": "disk"}, stats.prompt_tokens_from_disk
    yield {"source": "computed"}, stats.prompt_tokens_uncached


def _blocks(stats: EngineStats) -> Iterable[_Row]:
    tiers = stats.tiers or TierStats()
    for tier, total, used, cached in (
        ("device", stats.kv_blocks_total, stats.kv_blocks_used, stats.kv_blocks_cached),
        ("host", tiers.host_superblocks, tiers.host_used, tiers.host_cached),
        ("disk", tiers.disk_superblocks, 0, tiers.disk_cached),
    ):
        yield {"tier": tier, "state": "used"}, used
        yield {"tier": tier, "state": "cached"}, cached
        yield {"tier": tier, "state": "free"}, total - used - cached


def _evictions(stats: EngineStats) -> Iterable[_Row]:
    tiers = stats.tiers or TierStats()
    yield {"tier": "device", "reason": "room"}, stats.kv_evictions
    yield {"tier": "device", "reason": "reset"}, stats.kv_cleared
    yield {"tier": "host", "reason": "room"}, tiers.host_evictions
    yield {"tier": "host", "reason": "reset"}, tiers.host_cleared
    yield {"tier": "disk", "reason": "room"}, tiers.disk_evictions
    yield {"tier": "disk", "reason": "reset"}, tiers.disk_cleared
    yield {"tier": "disk", "reason": "broken"}, tiers.disk_broken


def _stalls(stats: EngineStats) -> Iterable[_Row]:
    tiers = stats.tiers or TierStats()
    yield {"phase": "load"}, tiers.stalled_s
    yield {"phase": "stream"}, tiers.staging_stalled_s


def _bytes(stats: EngineStats) -> Iterable[_Row]:
    for direction, count in (stats.tiers or TierStats()).bytes_copied:
        yield {"dir": direction}, count


def _failures(stats: EngineStats) -> Iterable[_Row]:
    for direction, cause, count in (stats.tiers or TierStats()).failures:
        yield {"dir": direction, "cause": cause}, count


_Rows = Callable[[EngineStats], Iterable[_Row]]
_LABELLED_GAUGES: tuple[tuple[str, str, tuple[str, ...], _Rows], ...] = (
    (
        "kv_blocks",
        "KV blocks by tier and state; on host and disk, superblocks of 256 tokens",
        ("tier", "state"),
        _blocks,
    ),
)
_LABELLED_COUNTERS: tuple[tuple[str, str, tuple[str, ...], _Rows], ...] = (
    (
        "kv_prompt_tokens",
        "Prompt tokens of begun requests by where their KV came from",
        ("source",),
        _source,
    ),
    ("kv_evictions", "Cached KV blocks given up, as in kv_blocks", ("tier", "reason"), _evictions),
    ("kv_transfer_bytes", "Bytes of KV copied between tiers", ("dir",), _bytes),
    ("kv_transfer_failures", "Copies between tiers that failed", ("dir", "cause"), _failures),
    ("kv_copy_stall_seconds", "Time that compute waited for copies", ("phase",), _stalls),
)


class _EngineCollector:
    """Reads the engine's snapshot at scrape time."""

    def __init__(self, prefix: str, model: str, status: Callable[[], EngineStatus]):
        self._prefix = prefix
        self._labels = [model]
        self._status = status

    def collect(self) -> Iterable[Metric]:
        stats = self._status().stats or EngineStats()
        for name, help_text, read in _GAUGES:
            gauge = GaugeMetricFamily(self._prefix + name, help_text, labels=["model_name"])
            gauge.add_metric(self._labels, read(stats))
            yield gauge
        for name, help_text, read in _COUNTERS:
            counter = CounterMetricFamily(self._prefix + name, help_text, labels=["model_name"])
            counter.add_metric(self._labels, read(stats))
            yield counter
        yield from self._labelled(stats)
        for name, help_text, found in (
            ("iteration_tokens_total", "Tokens per step", stats.iteration_tokens),
            ("step_time_ratio", "Time of a step over what was predicted", stats.step_ratio),
        ):
            if found is not None:
                yield self._histogram(name, help_text, found)

    def _histogram(self, name: str, help_text: str, found: Counts) -> Metric:
        total = 0
        buckets = []
        for bound, count in zip((*found.bounds, "+Inf"), found.counts, strict=True):
            total += count
            buckets.append((str(bound), float(total)))
        family = HistogramMetricFamily(self._prefix + name, help_text, labels=["model_name"])
        family.add_metric(self._labels, buckets, found.total)
        return family

    def _labelled(self, stats: EngineStats) -> Iterable[Metric]:
        for kind, families in (
            (GaugeMetricFamily, _LABELLED_GAUGES),
            (CounterMetricFamily, _LABELLED_COUNTERS),
        ):
            for name, help_text, labels, rows in families:
                family = kind(self._prefix + name, help_text, labels=["model_name", *labels])
                for values, number in rows(stats):
                    family.add_metric([*self._labels, *(values[label] for label in labels)], number)
                yield family


class Metrics:
    def __init__(self, prefix: str, model: str, status: Callable[[], EngineStatus]):
        self._registry = CollectorRegistry()
        self._model = model
        self._prefix = prefix

        self._ttft = self._histogram("time_to_first_token_seconds", "From arrival", _TTFT_S)
        self._itl = self._histogram("inter_token_latency_seconds", "Between events", _ITL_S)
        self._e2e = self._histogram("e2e_request_latency_seconds", "From arrival to end", _SPAN_S)
        self._queue = self._histogram("request_queue_time_seconds", "Waiting", _SPAN_S)
        self._prefill = self._histogram("request_prefill_time_seconds", "Prefill", _SPAN_S)
        self._decode = self._histogram("request_decode_time_seconds", "Decoding", _SPAN_S)
        self._prompt = self._histogram("request_prompt_tokens", "Per request", _TOKENS)
        self._generated = self._histogram("request_generation_tokens", "Per request", _TOKENS)
        self._success = Counter(
            f"{prefix}request_success",
            "Choices that ended",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._responses = Counter(
            f"{prefix}http_responses",
            "Responses by status",
            ["model_name", "status"],
            registry=self._registry,
        )
        self._in_flight = Gauge(
            f"{prefix}http_requests_in_flight",
            "Generating requests being served",
            ["model_name"],
            registry=self._registry,
        ).labels(model)
        self._registry.register(_EngineCollector(prefix, model, status))

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(
            self._prefix + name, help_text, ["model_name"], buckets=buckets, registry=self._registry
        )
        return family.labels(self._model)

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def token_gap(self, seconds: float) -> None:
        self._itl.observe(seconds)

    def ended(self, seconds: float, usage: Usage, timings: Iterable[Timing]) -> None:
        """A request that ended well; `seconds` since its arrival."""
        self._e2e.observe(seconds)
        self._prompt.observe(usage.prompt_tokens)
        self._generated.observe(usage.completion_tokens)
        for timing in timings:
            self._queue.observe(timing.queue_s)
            self._prefill.observe(timing.prefill_s)
            self._decode.observe(timing.decode_s)

    def choice_ended(self, reason: str) -> None:
        self._success.labels(self._model, reason).inc()

    def responded(self, status: int) -> None:
        self._responses.labels(self._model, str(status)).inc()

    def in_flight(self, requests: int) -> None:
        self._in_flight.set(requests)

    def render(self) -> bytes:
        return generate_latest(self._registry)
