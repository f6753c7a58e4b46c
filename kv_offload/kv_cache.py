"""The device's keys and values: one preallocated tensor, addressed by slot.

Owns: KVCache, its memory order, and the moves of bytes inside it (write, copy, poison).
Does not own: which blocks are free or shared (block_pool.py), the host tier, or attention.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kv_offload.host_memory import HostMemory
from kv_offload.layout import KVLayout


@dataclass(frozen=True, slots=True)
class _WritePlan:
    """Where the rows of one step go, found once per step and used by every layer."""

    slots: torch.Tensor
    """int64 [T], the step's slots (a private copy)."""
    runs: tuple[tuple[int, int, int], ...]
    """(first row, first slot, rows): stretches of consecutive slots, worth a plain copy."""
    rows: torch.Tensor | None
    """int64: the rows outside `runs`; None when that is none of them, or all."""
    row_slots: torch.Tensor | None
    """int64: the slots of the rows outside `runs`; None when there are none."""


_SHORTEST_RUN = 16
"""Rows from which a plain copy beats a share of one indexed write (5 against 12 µs at 16)."""


class RowWriter(Protocol):
    """Puts rows into slots faster than torch's own calls."""

    def __call__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        """keys, values [Hkv, slots, d] of one layer; slots int64 [T]; k, v [T, Hkv, d] of the same
        dtype, dense but for the distance of rows."""
        ...


class KVCache:
    """Keys and values of all layers, `num_blocks` blocks of `layout.block_size` slots.

    Memory is [L, 2, Hkv, slots, d] on the CPU: the keys of one head are then one dense matrix,
    which makes reading 8k of context for one row 1.5 to 2 times as fast as [slots, Hkv, d] does
    (there a head's rows lie Hkv * d apart); chunks run equally fast either way. On other devices
    it is [L, 2, slots, Hkv, d], which paged kernels address by block. `keys`, `values` and `view`
    hide the difference.

    Nothing is written at construction, so on the CPU pages that were never used take no memory.
    Slots that were never written hold arbitrary bits, NaN included: readers must slice or mask
    by select, never by multiplication with zero.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        device: torch.device | str,
        writer: RowWriter | None = None,
        host: HostMemory | None = None,
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; a cache needs at least 1")
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = torch.device(device)
        self.dtype: torch.dtype = getattr(torch, layout.dtype)
        slots = num_blocks * layout.block_size
        heads, dim = layout.num_kv_heads, layout.head_dim
        if self.device.type == "cpu":
            shape, order = (layout.num_layers, 2, heads, slots, dim), (0, 1, 2, 3, 4)
        else:
            shape, order = (layout.num_layers, 2, slots, heads, dim), (0, 1, 3, 2, 4)
        self.storage, self._memory = _allocate(shape, self.dtype, self.device)
        """The tensor itself, in its memory order."""
        self._by_head = self.storage.permute(order)
        halves = [pair.unbind(0) for pair in self._by_head.unbind(0)]
        self.keys: tuple[torch.Tensor, ...] = tuple(pair[0] for pair in halves)
        """Per layer a view [Hkv, slots, d] of all keys."""
        self.values: tuple[torch.Tensor, ...] = tuple(pair[1] for pair in halves)
        """Per layer a view [Hkv, slots, d] of all values."""
        self._rows = tuple((k.transpose(0, 1), v.transpose(0, 1)) for k, v in halves)
        self._flat = tuple(
            (k.reshape(heads * slots, dim), v.reshape(heads * slots, dim))
            for k, v in (halves if self.device.type == "cpu" else ())
        )
        self._plan: _WritePlan | None = None
        self._writer = writer
        self.host = host
        """Memory of the host tier, whose superblocks may hold the beginning of a context."""

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.layout.block_size

    @property
    def num_bytes(self) -> int:
        """Bytes of address space; on the CPU, of memory once every slot has been written."""
        return self.num_blocks * self.layout.bytes_per_block

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store row t of `k` and `v` [T, Hkv, d] in slot `slots[t]` (int64 [T], all different).

        Rows may be strided views (a slice of a fused projection). Rows of another dtype are
        converted.
        """
        if self._writer is not None and k.dtype == self.dtype:
            self._writer(self.keys[layer], self.values[layer], slots, k, v)
            return
        key_rows, value_rows = self._rows[layer]
        if self.device.type != "cpu":
            key_rows.index_copy_(0, slots, k.to(self.dtype))
            value_rows.index_copy_(0, slots, v.to(self.dtype))
            return
        plan = self._plan
        if plan is None or not torch.equal(plan.slots, slots):
            plan = self._plan = _plan_write(slots)
        for row, slot, length in plan.runs:
            key_rows[slot : slot + length].copy_(k[row : row + length])
            value_rows[slot : slot + length].copy_(v[row : row + length])
        if plan.row_slots is not None:
            if plan.rows is not None:
                k, v = k[plan.rows], v[plan.rows]
            key_rows[plan.row_slots] = k.to(self.dtype)
            value_rows[plan.row_slots] = v.to(self.dtype)

    def view(
        self, layer: int, first_block: int, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [Hkv, num_tokens, d] of the slots from the start of `first_block`; no
        copy."""
        start = first_block * self.layout.block_size
        return (
            self.keys[layer][:, start : start + num_tokens],
            self.values[layer][:, start : start + num_tokens],
        )

    def layer_views(
        self, first_slot: int, num_slots: int
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Keys and values [1, Hkv, num_slots, d] of consecutive slots, for every layer at once
        (one call costs less than one slice per layer)."""
        part = self._by_head[:, :, :, first_slot : first_slot + num_slots].unsqueeze(2)
        return part[:, 0].unbind(0), part[:, 1].unbind(0)

    def flat(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and all values of a layer as matrices [Hkv * slots, d]: row h * slots + s is
        slot s of KV head h. Only the CPU's memory order has this view."""
        return self._flat[layer]

    def copy_blocks(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy block src[i] onto block dst[i], in all layers (copy-on-write). No block of `dst`
        may also be in `src`: the order of the copies is not defined."""
        if len(src) != len(dst):
            raise ValueError(f"copy_blocks got {len(src)} sources for {len(dst)} targets")
        overlap = set(src) & set(dst)
        if overlap:
            raise ValueError(f"blocks {sorted(overlap)} are both source and target of one copy")
        size = self.layout.block_size
        for source, target in zip(src, dst, strict=True):
            self._by_head[:, :, :, target * size : (target + 1) * size].copy_(
                self._by_head[:, :, :, source * size : (source + 1) * size]
            )

    def forget(self) -> None:
        """No slot holds anything that will be read: on the CPU their pages go back to the system,
        and come again when they are written."""
        if self._memory is not None:
            self._memory.madvise(mmap.MADV_DONTNEED)

    def poison(self, blocks: Sequence[int]) -> None:
        """Fill blocks with NaN, so that a test sees any read of freed or unwritten memory."""
        size = self.layout.block_size
        for block in blocks:
            self._by_head[:, :, :, block * size : (block + 1) * size].fill_(float("nan"))


def _allocate(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, mmap.mmap | None]:
    """Memory for the storage; on the CPU straight from the kernel in small pages. From malloc it
    might come in huge ones, and each layer and head that a short sequence touches would take 2 MiB.
    """
    if device.type != "cpu" or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.empty(shape, dtype=dtype, device=device), None
    count = math.prod(shape)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape), memory


def _plan_write(slots: torch.Tensor) -> _WritePlan:
    """Split a step's slots into stretches of consecutive slots and single rows."""
    values = slots.tolist()
    runs: list[tuple[int, int, int]] = []
    rows: list[int] = []
    start = 0
    for row in range(1, len(values) + 1):
        if row < len(values) and values[row] == values[row - 1] + 1:
            continue
        length = row - start
        if length >= _SHORTEST_RUN or length == len(values):
            runs.append((start, values[start], length))
        else:
            rows.extend(range(start, row))
        start = row
    saved = slots.clone()
    if not rows:
        return _WritePlan(saved, tuple(runs), None, None)
    if not runs:
        return _WritePlan(saved, (), None, saved)
    index = torch.tensor(rows, dtype=torch.int64)
    return _WritePlan(saved, tuple(runs), index, saved[index])
