"""Attention on the CPU with torch's own kernels.

Owns: CpuAttention, which sends chunks to the flash kernel and batches of lone rows to ragged.py.
Does not own: that kernel's traps (cpu_kernel.py), the cutting of contexts (dense.py), staged cold
keys (cold_parts.py) or the merge (merge.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kv_offload.kv_cache import KVCache
from lm_engine.attention.base import (
    DEFAULT_SPLIT_TOKENS,
    AttentionBatch,
    SequenceSlice,
    stretches,
)
from lm_engine.attention.cold_parts import ColdParts
from lm_engine.attention.cpu_kernel import flash_cpu
from lm_engine.attention.dense import RowGroup, attend_group, plan_rows
from lm_engine.attention.ragged import RaggedKeys, RaggedRows, fits

_FEWEST_RAGGED_KEYS = 4096
"""A decode row without company runs through the flash kernel as fast below this, with no index to
build."""

_LONGEST_RAGGED_KEYS = 16_384
"""A bag is summed from end to end in float32; longer contexts are cut into splits instead, whose
sums stay short."""

_MOST_RAGGED_ENTRIES = 1 << 21
"""Scores of one ragged batch (8 MB, and as much for their columns); more rows start another."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """How one batch is attended under one window, prepared once for all layers."""

    ragged: tuple[RaggedRows, ...]
    groups: tuple[RowGroup, ...]


class CpuAttention:
    """AttentionBackend for the CPU. Use one per engine: it remembers the batch it prepared last.

    `cold` adds cold keys to what is on the device; without it they are gathered like all others.
    """

    def __init__(
        self, split_tokens: int = DEFAULT_SPLIT_TOKENS, cold: ColdParts | None = None
    ) -> None:
        self.split_tokens = split_tokens
        self._cold = cold
        self._prepared_for: tuple[AttentionBatch, KVCache] | None = None
        self._plans: dict[tuple[int, int | None], _Plan] = {}

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        batch: AttentionBatch,
        cache: KVCache,
        *,
        window: int | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionBackend.attend."""
        plan = self._plan(batch, cache, q.shape[1], window)
        cold = self._cold if any(s.cold for s in batch.sequences) else None
        if cold is not None:
            cold.begin(q, batch, cache)
        parts: list[tuple[slice | torch.Tensor, torch.Tensor, torch.Tensor]] = [
            (rows.selection, *rows.attend(layer, q[rows.selection], cache, scale))
            for rows in plan.ragged
        ]
        for group in plan.groups:
            selection = slice(group.first_row, group.first_row + group.num_rows)
            parts.append((selection, *attend_group(flash_cpu, layer, q, group, cache, scale)))
        if len(parts) == 1 and cold is None:
            return parts[0][1].to(q.dtype).contiguous(), parts[0][2].contiguous()
        out = torch.empty(q.shape, dtype=q.dtype if cold is None else torch.float32)
        lse = torch.empty(q.shape[:2])
        for rows_of, part, part_lse in parts:
            out[rows_of], lse[rows_of] = part, part_lse
        if cold is not None:
            cold.add(layer, q, window, scale, out, lse)
        return out.to(q.dtype), lse

    def _plan(
        self, batch: AttentionBatch, cache: KVCache, num_heads: int, window: int | None
    ) -> _Plan:
        known = self._prepared_for
        if known is None or known[0] is not batch or known[1] is not cache:
            self._prepared_for = (batch, cache)
            self._plans = {}
        plan = self._plans.get((num_heads, window))
        if plan is None:
            plan = self._plans[(num_heads, window)] = self._prepare(batch, cache, num_heads, window)
        return plan

    def _first_here(self, sequence: SequenceSlice) -> int:
        return 0 if self._cold is None else sequence.cold_tokens

    def _prepare(
        self, batch: AttentionBatch, cache: KVCache, num_heads: int, window: int | None
    ) -> _Plan:
        lone: list[RaggedKeys] = []
        dense: list[SequenceSlice] = []
        for sequence in batch.sequences:
            keys = _lone_row(sequence, cache, window)
            if keys is None:
                dense.append(sequence)
            else:
                lone.append(keys)
        if len(lone) == 1 and _suits_flash(lone[0]):
            dense, lone = list(batch.sequences), []
        groups = [
            group
            for sequence in dense
            for group in plan_rows(
                sequence, cache, self.split_tokens, window, low=self._first_here(sequence)
            )
        ]
        ragged = [
            RaggedRows(rows, num_heads, cache)
            for rows in _batches(lone, _MOST_RAGGED_ENTRIES // num_heads)
        ]
        return _Plan(tuple(ragged), tuple(groups))


def _lone_row(sequence: SequenceSlice, cache: KVCache, window: int | None) -> RaggedKeys | None:
    """The sequence as a row for ragged.py, if it is one and may go there."""
    if sequence.query_len != 1 or cache.dtype != torch.float32:
        return None
    end = sequence.context_len
    start = 0 if window is None else max(0, end - window)
    if end - start > _LONGEST_RAGGED_KEYS or not fits(end - start, cache):
        return None
    where = stretches(sequence, cache.layout.block_size, start, end)
    if any(stretch.host is not None for stretch in where):
        return None
    return RaggedKeys(sequence.query_start, tuple((s.slot, s.length) for s in where))


def _suits_flash(only: RaggedKeys) -> bool:
    return len(only.stretches) == 1 and only.num_keys < _FEWEST_RAGGED_KEYS


def _batches(rows: Sequence[RaggedKeys], most_keys: int) -> list[list[RaggedKeys]]:
    """Rows in order, in batches of at most `most_keys` keys (a longer row is alone)."""
    batches: list[list[RaggedKeys]] = []
    room = 0
    for item in rows:
        if not batches or item.num_keys > room:
            batches.append([])
            room = most_keys
        batches[-1].append(item)
        room -= item.num_keys
    return batches
