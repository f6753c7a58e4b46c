"""Cold beginnings for backends that call a dense kernel: staged, or attended where they lie.

Owns: ColdParts, the two ways of adding a batch's cold keys to its attention over what is on the
device: StagedParts brings them through the ring to the kernel, HostParts takes the few rows to the
CPU instead. Does not own: which of the two (cold_costs.py), the ring (staging.py), or keys on the
device (cpu.py, torch_cuda.py).

Parts are merged by their log-sum-exp in float32: first what is on the device, then the cold keys in
order of position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from kv_offload.host_memory import HostMemory
from kv_offload.kv_cache import KVCache
from kv_offload.superblock import SUPERBLOCK_TOKENS
from lm_engine.attention.base import AttentionBatch, SequenceSlice, Staged
from lm_engine.attention.cold import ColdWalk, first_seen
from lm_engine.attention.cpu_kernel import flash_cpu
from lm_engine.attention.dense import DenseKernel, RowGroup, merge_parts, plan_rows
from lm_engine.attention.merge import merge_into, merge_stacked
from lm_engine.attention.staging import StagingRing

_HOST_SUPERBLOCKS = 64
"""Attended on the host in one call: partial results stay small at any length."""


class ColdParts(Protocol):
    """Attention over a batch's cold keys."""

    def begin(self, q: torch.Tensor, batch: AttentionBatch, cache: KVCache) -> None:
        """A layer's rows q [T, Hq, d] are known, and nothing was attended yet."""
        ...

    def add(
        self,
        layer: int,
        q: torch.Tensor,
        window: int | None,
        scale: float,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Merges the cold keys into out [T, Hq, d] and lse [T, Hq], float32, in place."""
        ...


class StagedParts:
    """Piece by piece through the ring to the device's kernel."""

    def __init__(self, kernel: DenseKernel, ring: StagingRing, split_tokens: int) -> None:
        self._kernel, self._ring, self._split = kernel, ring, split_tokens
        self._batch: AttentionBatch | None = None
        self._cache: KVCache | None = None
        self._walk: ColdWalk | None = None
        self._groups: dict[int | None, list[list[RowGroup]]] = {}

    def begin(self, q: torch.Tensor, batch: AttentionBatch, cache: KVCache) -> None:
        """See ColdParts.begin."""
        if batch is not self._batch or cache is not self._cache:
            self._batch, self._cache = batch, cache
            self._walk = ColdWalk(batch, cache.layout, self._ring.superblocks)
            self._groups = {}

    def add(
        self,
        layer: int,
        q: torch.Tensor,
        window: int | None,
        scale: float,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """See ColdParts.add."""
        assert self._walk is not None
        assert self._cache is not None
        cache, walk = self._cache, self._walk
        for index, groups in enumerate(self._plan(window)):
            buffer = self._ring.take(walk, layer, window, index)
            if cache.device.type != "cpu":
                buffer = buffer.transpose(1, 2)
            staged = Staged(buffer, walk.pieces(window)[index].places)
            for group in groups:
                rows = slice(group.first_row, group.first_row + group.num_rows)
                merge_parts(
                    self._kernel, layer, q, group, cache, scale, out[rows], lse[rows], staged
                )
            self._ring.release()

    def _plan(self, window: int | None) -> list[list[RowGroup]]:
        """Per piece, the row groups that see any of it."""
        assert self._walk is not None
        assert self._batch is not None
        assert self._cache is not None
        if window not in self._groups:
            self._groups[window] = [
                [
                    group
                    for span in piece.spans
                    for group in plan_rows(
                        self._batch.sequences[span.sequence],
                        self._cache,
                        self._split,
                        window,
                        low=span.start,
                        high=span.end,
                    )
                    if group.parts
                ]
                for piece in self._walk.pieces(window)
            ]
        return self._groups[window]


@dataclass(frozen=True, slots=True)
class _HostRun:
    """Superblocks in consecutive host slots that every row sees whole, or one that some do not."""

    slot: int
    count: int
    mask: torch.Tensor | None
    """bool [rows, tokens] over the first rows; each of them sees a key."""


class HostParts:
    """Where they lie, by the CPU beside the device: the rows travel, not the keys."""

    def __init__(self) -> None:
        self._batch: AttentionBatch | None = None
        self._host: HostMemory | None = None
        self._rows: list[tuple[SequenceSlice, torch.Tensor]] = []
        self._runs: dict[tuple[int, int | None], list[_HostRun]] = {}

    def begin(self, q: torch.Tensor, batch: AttentionBatch, cache: KVCache) -> None:
        """See ColdParts.begin. The rows are fetched now, so that the device goes on meanwhile."""
        if cache.host is None:
            raise ValueError("cold superblocks are named, but the cache has no host tier")
        self.begin_in(q, batch, cache.host)

    def begin_in(self, q: torch.Tensor, batch: AttentionBatch, host: HostMemory) -> None:
        """`begin` for keys in a memory without a cache."""
        if batch is not self._batch or host is not self._host:
            self._batch, self._host, self._runs = batch, host, {}
        self._rows = [
            (s, q[s.query_start : s.query_start + s.query_len].to("cpu"))
            for s in batch.sequences
            if s.cold
        ]

    def add(
        self,
        layer: int,
        q: torch.Tensor,
        window: int | None,
        scale: float,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """See ColdParts.add."""
        assert self._host is not None
        for sequence, rows in self._rows:
            key = (sequence.query_start, window)
            if key not in self._runs:
                self._runs[key] = list(_host_runs(sequence, window))
            total = torch.zeros(rows.shape, dtype=torch.float32)
            total_lse = torch.full(rows.shape[:2], -torch.inf)
            for run in self._runs[key]:
                _attend_run(self._host, layer, rows, run, scale, total, total_lse)
            at = slice(sequence.query_start, sequence.query_start + sequence.query_len)
            merge_into(out[at], lse[at], total.to(out.device), total_lse.to(out.device))


def _host_runs(sequence: SequenceSlice, window: int | None) -> Iterator[_HostRun]:
    """In order of position. Superblocks that no row sees are left out."""
    size = SUPERBLOCK_TOKENS
    before = sequence.context_len - sequence.query_len
    whole = 0 if window is None else -(-max(0, sequence.context_len - window) // size)
    first = first_seen(sequence, window) // size
    for i in range(first, min(whole, len(sequence.cold))):
        assert window is not None
        queries = torch.arange(before, sequence.context_len)[:, None]
        mask = torch.arange(i * size, (i + 1) * size) > queries - window
        yield _HostRun(sequence.cold[i], 1, mask[mask.any(1)])
    slots = sequence.cold[max(first, whole) :]
    start = 0
    for i in range(1, len(slots) + 1):
        if i == len(slots) or slots[i] != slots[i - 1] + 1 or i - start == _HOST_SUPERBLOCKS:
            yield _HostRun(slots[start], i - start, None)
            start = i


def _attend_run(
    host: HostMemory,
    layer: int,
    rows: torch.Tensor,
    run: _HostRun,
    scale: float,
    total: torch.Tensor,
    total_lse: torch.Tensor,
) -> None:
    """Merges one run into total [C, Hq, d] and total_lse [C, Hq]; rows [C, Hq, d] on the CPU."""
    lying = host.superblocks[run.slot : run.slot + run.count, layer]
    keys, values = (lying if host.layout.head_major else lying.transpose(2, 3)).unbind(1)
    if run.mask is not None:
        rows = rows[: run.mask.shape[0]]
    q = rows.to(keys.dtype).transpose(0, 1)
    heads, count, dim = q.shape
    # The query heads of a KV head become rows of one head, the superblocks a batch.
    mask = run.mask
    if mask is None:
        q = q.reshape(keys.shape[1], -1, dim)
    q = q.unsqueeze(0).expand(run.count, *q.shape)
    out, lse = flash_cpu(q, keys, values, causal=False, mask=mask, scale=scale)
    part, part_lse = merge_stacked(
        out.reshape(run.count, heads, count, dim), lse.reshape(run.count, heads, count)
    )
    here = slice(0, count)
    merge_into(total[here], total_lse[here], part.transpose(0, 1), part_lse.transpose(0, 1))
