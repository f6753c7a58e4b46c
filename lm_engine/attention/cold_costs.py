"""Which way cold keys are attended, by what each would cost.

Owns: ColdRates and their measurement, ColdChoice (staged on the device, or attended where they lie
by the CPU beside it), and the smallest chunk whose compute hides the transfer of what it reads.
Does not own: either way (cold_parts.py), or the budget of a step (chunked_prefill/budget.py).

Per layer, with L cold tokens of n_kv heads of d numbers of s bytes, met by C rows of n_q heads:

    transfer    2 n_kv d s L / B        at B bytes/s over the link
    compute     4 n_q d C L / F         at F FLOP/s, on the device or on the host
    reading     2 n_kv d s L / M        at M bytes/s of the host's memory

Staged, the longer of transfer and compute is paid; on the host, the longer of reading and compute,
and the way of the rows there and back. Both sides of the first comparison grow with L, so that
transfer hides behind compute from C = s F / (2 g B) rows on, g = n_q / n_kv, at any depth; and from
fewer where L is small, since the linears of the rows, w FLOP each, hide it too:

    C (w + 4 n_q d L) / F = 2 n_kv d s L / B
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kv_offload.copies import TierCopies, copy_now
from kv_offload.host_memory import HostMemory
from kv_offload.kv_cache import KVCache
from kv_offload.layout import KVLayout
from kv_offload.superblock import SUPERBLOCK_TOKENS, SuperblockLayout
from lm_engine.attention.base import AttentionBatch, SequenceSlice
from lm_engine.attention.cold_parts import ColdParts, HostParts, StagedParts
from lm_engine.attention.dense import DenseKernel
from lm_engine.models.config import DecoderConfig

logger = logging.getLogger(__name__)

_MEASURED_SUPERBLOCKS, _MEASURED_ROWS, _TRIES = 64, 256, 4
"""64 superblocks of one layer are 16 to 64 MB: more than a core's share of the caches."""


@dataclass(frozen=True, slots=True)
class ColdRates:
    link_bytes_per_s: float
    """From host memory to the device."""
    host_bytes_per_s: float
    """At which the CPU attends few rows, in bytes of keys and values."""
    device_flops_per_s: float
    host_flops_per_s: float
    round_trip_s: float = 1e-4
    """Of a layer's rows to the host and their results back, beside any arithmetic: two waits for
    the device and some launches; a guess on the high side."""


@dataclass(frozen=True, slots=True)
class ColdLoad:
    """What one layer of a batch asks of its cold keys."""

    link_bytes: float
    """Keys and values, each superblock once."""
    host_bytes: float
    """The same for each sequence that has it."""
    flops: float

    @classmethod
    def of(cls, batch: AttentionBatch, num_heads: int, layout: KVLayout) -> ColdLoad:
        per_token = layout.bytes_per_token / layout.num_layers
        cold = [s for s in batch.sequences if s.cold]
        distinct = len({slot for s in cold for slot in s.cold})
        pairs = sum(s.cold_tokens * s.query_len for s in cold)
        return cls(
            per_token * distinct * SUPERBLOCK_TOKENS,
            per_token * sum(s.cold_tokens for s in cold),
            4.0 * num_heads * layout.head_dim * pairs,
        )


def staged_s(load: ColdLoad, rates: ColdRates) -> float:
    """Seconds of a layer whose cold keys pass through the ring."""
    return max(load.link_bytes / rates.link_bytes_per_s, load.flops / rates.device_flops_per_s)


def hosted_s(load: ColdLoad, rates: ColdRates) -> float:
    """Seconds of a layer whose cold keys are attended by the CPU."""
    reading_s = load.host_bytes / rates.host_bytes_per_s
    return rates.round_trip_s + max(reading_s, load.flops / rates.host_flops_per_s)


def least_hiding_chunk(
    rates: ColdRates,
    layout: KVLayout,
    num_heads: int,
    cold_tokens: int | None = None,
    linear_flops: float = 0.0,
) -> int:
    """Rows from which a chunk's compute hides the transfer of the keys that it meets: a prefill
    over a cold beginning should not be cut smaller than this. At any depth, or behind `cold_tokens`
    cold ones, where the linears of a row take `linear_flops` FLOP per layer."""
    key_s = layout.bytes_per_token / layout.num_layers / rates.link_bytes_per_s
    pair_flops = 4.0 * num_heads * layout.head_dim
    if cold_tokens is not None:
        pair_flops += linear_flops / cold_tokens
    return max(1, math.ceil(key_s * rates.device_flops_per_s / pair_flops))


def rates_of(cache: KVCache, num_heads: int) -> Callable[[], ColdRates] | None:
    """Measures the rates at its first call. None without host memory, and on a CPU: there a copy is
    hidden from 2 rows on (SmolLM2-135M: 23 GB/s against 70 GFLOP/s), and measuring takes a
    second."""
    if cache.host is None or cache.device.type == "cpu":
        return None

    def measure() -> ColdRates:
        from lm_engine.attention.torch_cuda import sdpa_cuda

        return measure_rates(cache, num_heads, sdpa_cuda)

    return functools.cache(measure)


def hiding_chunks(
    rates: Callable[[], ColdRates], layout: KVLayout, config: DecoderConfig
) -> Callable[[int], int]:
    """`Scheduler.cold_chunk` of a model whose cold keys are streamed: the least hiding chunk behind
    so many cold tokens."""
    rows = 2 * config.num_heads * config.head_dim + 2 * config.num_kv_heads * config.head_dim
    linear_flops = 2.0 * config.hidden_size * (rows + 3 * config.intermediate_size)

    def least(cold_tokens: int) -> int:
        return least_hiding_chunk(rates(), layout, config.num_heads, cold_tokens, linear_flops)

    return least


class ColdChoice:
    """The cheaper way for each batch, or one that was asked for."""

    def __init__(
        self,
        staged: StagedParts | None,
        hosted: HostParts | None,
        measure: Callable[[], ColdRates] | None = None,
    ) -> None:
        """With both ways, `measure` is called when a batch has cold keys for the first time: by
        then host memory is pinned, which doubles the link's rate."""
        if staged is not None and hosted is not None and measure is None:
            raise ValueError("a choice between two ways needs rates")
        self._staged, self._hosted, self._measure = staged, hosted, measure
        self._rates: ColdRates | None = None

    def of(self, batch: AttentionBatch, num_heads: int, cache: KVCache) -> ColdParts | None:
        """None for a batch without cold keys."""
        if not any(s.cold for s in batch.sequences):
            return None
        if self._staged is None or self._hosted is None or self._measure is None:
            return self._staged or self._hosted
        if self._rates is None:
            self._rates = self._measure()
            chunk = least_hiding_chunk(self._rates, cache.layout, num_heads)
            logger.info(
                "Cold KV is streamed, or attended by the CPU, by %s. Chunks under %d tokens wait "
                "for the link: a lower --max-num-batched-tokens makes long prompts slower.",
                *(self._rates, chunk),
            )
        load = ColdLoad.of(batch, num_heads, cache.layout)
        cheaper = staged_s(load, self._rates) <= hosted_s(load, self._rates)
        return self._staged if cheaper else self._hosted


def measure_rates(cache: KVCache, num_heads: int, kernel: DenseKernel) -> ColdRates:
    """Some tens of milliseconds on memory of its own, but for the link: that is measured on the
    host tier, whose pages are pinned."""
    assert cache.host is not None
    layout = replace(cache.layout, num_layers=1, windows=())
    head_major = cache.host.layout.head_major
    host = HostMemory(SuperblockLayout(layout, head_major=head_major), _MEASURED_SUPERBLOCKS)
    host.superblocks.normal_()
    link = TierCopies(cache, cache.host)
    return ColdRates(
        link_bytes_per_s=_link_rate(link, cache),
        host_bytes_per_s=_host_rate(host, 1, num_heads)[0],
        device_flops_per_s=_device_rate(kernel, cache, num_heads),
        host_flops_per_s=_host_rate(host, _MEASURED_ROWS, num_heads)[1],
    )


def _link_rate(copies: TierCopies, cache: KVCache) -> float:
    """Bytes per second into a staging buffer, in the queue of compute."""
    assert cache.host is not None
    slots = range(min(_MEASURED_SUPERBLOCKS, cache.host.num_superblocks))
    shape = list(copies.layout.shape[1:])
    shape[copies.layout.token_axis - 1] *= len(slots)
    into = torch.empty(shape, dtype=cache.dtype, device=cache.device)
    work = copies.stream(slots, 0, into)
    return work.num_bytes / _shortest_s(lambda: copy_now(work, cache.device), cache.device)


def _host_rate(host: HostMemory, rows: int, num_heads: int) -> tuple[float, float]:
    """(bytes, FLOP) per second that the CPU attends in host memory."""
    layout = host.layout.kv
    slots = tuple(range(host.num_superblocks))
    context = len(slots) * SUPERBLOCK_TOKENS + rows
    sequence = SequenceSlice(0, rows, context, ((0, rows),), slots)
    batch = AttentionBatch((sequence,), torch.zeros(rows, dtype=torch.int64))
    load = ColdLoad.of(batch, num_heads, layout)
    q = torch.randn(rows, num_heads, layout.head_dim).to(host.superblocks.dtype)
    out, lse = torch.zeros(q.shape), torch.full(q.shape[:2], -torch.inf)
    parts = HostParts()
    parts.begin_in(q, batch, host)
    seconds = _shortest_s(lambda: parts.add(0, q, None, 1.0, out, lse), torch.device("cpu"))
    return load.host_bytes / seconds, load.flops / seconds


def _device_rate(kernel: DenseKernel, cache: KVCache, num_heads: int) -> float:
    """FLOP per second of a chunk over keys on the device."""
    layout = cache.layout
    keys = _MEASURED_SUPERBLOCKS * SUPERBLOCK_TOKENS
    q = torch.randn(1, num_heads, _MEASURED_ROWS, layout.head_dim).to(cache.device, cache.dtype)
    both = torch.randn(2, 1, layout.num_kv_heads, keys, layout.head_dim)
    k, v = both.to(cache.device, cache.dtype).unbind(0)
    seconds = _shortest_s(lambda: kernel(q, k, v, causal=False, mask=None, scale=1.0), cache.device)
    return 4.0 * num_heads * layout.head_dim * _MEASURED_ROWS * keys / seconds


def _shortest_s(call: Callable[[], object], device: torch.device) -> float:
    """Of a few tries: what others do on the machine only makes a call longer."""
    found = []
    for _ in range(_TRIES):
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - began)
    return min(found)
