"""Attention on the CPU with the kernel of native/attention.cpp.

Owns: NativeAttention - how a step's rows are cut into the kernel's tasks, and its calls.
Does not own: the arithmetic (attention.cpp), how the library comes about (native/library.py), or
types other than float32 (cpu.py).

A lane is one query row of one head. A task is up to 64 lanes of one sequence and KV head over a
range of keys. Sequences with few lanes over many keys are cut along their keys too, at fixed
positions that depend on nothing but the slice itself, so that the number of threads never changes
an answer; the parts are merged in order of position.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from kv_offload.kv_cache import KVCache
from lm_engine.attention.base import AttentionBatch, SequenceSlice, Stretch, stretches

LANES = 64
"""Most lanes of a task (`LANES` of attention.cpp)."""
SPLIT_TOKENS = 256
"""Canonical splits (`SPLIT` of attention.cpp)."""
MOST_HEAD_DIM = 256
"""`MOST_DIM` of attention.cpp."""
_FEW_LANES = 8
_KEYS_PER_FEW = 512
_KEYS_PER_TASK = 2048
_FEWEST_TASKS = 32
"""A slice with fewer tasks than this per key range is cut along its keys."""


class _Call(ctypes.Structure):
    """`Call` of attention.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "out", "lse", "partials")),
        *((name, ctypes.c_void_p) for name in ("sequences", "pieces", "tasks", "regions")),
        *((name, ctypes.c_long) for name in ("q_row", "q_head", "window", "num_tasks")),
        *((name, ctypes.c_int) for name in ("kv_heads", "group", "dim", "layer")),
        ("scale", ctypes.c_float),
    )


_DEVICE, _HOST = 0, 1
"""Regions, in their order in `_regions`."""


def _regions(cache: KVCache) -> np.ndarray:
    """int64 [2, 4], `Region` of attention.cpp: address, and the strides in floats of a layer, from
    a key to its value, and of a head."""
    layers, halves, heads, *_ = cache.storage.stride()
    rows = [(cache.storage.data_ptr(), layers, halves, heads), (0, 0, 0, 0)]
    if cache.host is not None:
        superblocks = cache.host.superblocks
        _, layers, halves, heads, *_ = superblocks.stride()
        rows[_HOST] = (superblocks.data_ptr(), layers, halves, heads)
    return np.array(rows, dtype=np.int64)


def _piece(position: int, stretch: Stretch, cache: KVCache) -> tuple[int, int, int, int]:
    """A row of `pieces`: position, offset in floats, length, region."""
    offset = stretch.slot * cache.layout.head_dim
    if stretch.host is None:
        return position, offset, stretch.length, _DEVICE
    if cache.host is None:
        raise ValueError(f"host superblock {stretch.host} is named, but the cache has no host tier")
    offset += stretch.host * cache.host.superblocks.stride(0)
    return position, offset, stretch.length, _HOST


@dataclass(slots=True, eq=False)
class _Plan:
    """The tasks of one batch under one window; the arrays are kept alive for `call`."""

    call: _Call
    arrays: tuple[np.ndarray, ...]
    merges: np.ndarray
    """int64 [M, 6]: sequence, KV head, first lane, lanes, first partial, parts."""
    partials: torch.Tensor
    """float32 [lanes of all parts, d + 2]: unnormalised output, maximum, sum."""


class NativeAttention:
    """AttentionBackend for float32 on the CPU. Use one per engine: it remembers the batch it
    prepared last, and its calls must not overlap."""

    def __init__(self, library: ctypes.CDLL) -> None:
        limits = (ctypes.c_long * 4)()
        library.longlens_attention_limits(limits)
        assert tuple(limits) == (LANES, SPLIT_TOKENS, MOST_HEAD_DIM, _FEW_LANES)
        self._attend = library.longlens_attend
        self._attend.argtypes = (ctypes.c_void_p, ctypes.c_int)
        self._merge = library.longlens_merge
        self._merge.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_int)
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
        dtype, q = q.dtype, q.float()
        if q.stride(-1) != 1:
            q = q.contiguous()
        plan = self._plan(batch, cache, q.shape[1], window)
        out = torch.empty(q.shape, dtype=torch.float32)
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        call = plan.call
        call.q, call.out, call.lse = q.data_ptr(), out.data_ptr(), lse.data_ptr()
        call.q_row, call.q_head = q.stride(0), q.stride(1)
        call.layer, call.scale = layer, scale
        threads, address = torch.get_num_threads(), ctypes.addressof(call)
        self._attend(address, threads)
        if len(plan.merges):
            self._merge(address, plan.merges.ctypes.data, len(plan.merges), threads)
        return out.to(dtype), lse

    def _plan(
        self, batch: AttentionBatch, cache: KVCache, num_heads: int, window: int | None
    ) -> _Plan:
        known = self._prepared_for
        if known is None or known[0] is not batch or known[1] is not cache:
            self._prepared_for = (batch, cache)
            self._plans = {}
        plan = self._plans.get((num_heads, window))
        if plan is None:
            plan = self._plans[(num_heads, window)] = _prepare(batch, cache, num_heads, window)
        return plan


class NativeWriter:
    """RowWriter (kv_offload/kv_cache.py) for float32 on the CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, long = ctypes.c_void_p, ctypes.c_long
        self._store = library.longlens_store
        self._store.argtypes = (
            *(pointer, long, pointer, long, long, long, long, pointer, pointer, pointer, long),
            ctypes.c_int,
        )

    def __call__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        """See RowWriter."""
        assert slots.dtype == torch.int64
        assert slots.is_contiguous()
        for rows in (k, v):
            assert rows.dtype == torch.float32
            assert rows.stride(2) == 1
            assert rows.stride(1) == rows.shape[2]
        self._store(
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            *k.shape,
            slots.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            keys.stride(0),
            torch.get_num_threads(),
        )


def _prepare(batch: AttentionBatch, cache: KVCache, num_heads: int, window: int | None) -> _Plan:
    layout = cache.layout
    group = num_heads // layout.num_kv_heads
    sequences: list[tuple[int, ...]] = []
    pieces: list[tuple[int, int, int, int]] = []
    tasks: list[tuple[int, ...]] = []
    merges: list[tuple[int, ...]] = []
    num_partials = 0
    for index, piece in enumerate(batch.sequences):
        first_piece = len(pieces)
        position = 0
        for stretch in stretches(piece, layout.block_size, 0, piece.context_len):
            pieces.append(_piece(position, stretch, cache))
            position += stretch.length
        sequences.append(
            (
                piece.query_start,
                piece.query_len,
                piece.context_len,
                first_piece,
                len(pieces) - first_piece,
            )
        )
        step = _keys_per_task(piece, group, layout.num_kv_heads)
        for lane, lanes, start, end in _lane_blocks(piece, group, window):
            bounds = _bounds(start, end, step)
            for head in range(layout.num_kv_heads):
                if len(bounds) == 1:
                    tasks.append((index, head, lane, lanes, start, end, -1))
                    continue
                merges.append((index, head, lane, lanes, num_partials, len(bounds)))
                for low, high in bounds:
                    tasks.append((index, head, lane, lanes, low, high, num_partials))
                    num_partials += lanes
    # The longest first, so that no thread is left alone with one at the end.
    tasks.sort(key=lambda task: (task[4] - task[5]) * task[3])
    arrays = tuple(np.array(rows, dtype=np.int64) for rows in (sequences, pieces, tasks))
    arrays += (_regions(cache),)
    partials = torch.empty(num_partials, layout.head_dim + 2)
    call = _Call(
        partials=partials.data_ptr(),
        sequences=arrays[0].ctypes.data,
        pieces=arrays[1].ctypes.data,
        tasks=arrays[2].ctypes.data,
        regions=arrays[3].ctypes.data,
        num_tasks=len(tasks),
        window=window or 0,
        kv_heads=layout.num_kv_heads,
        group=group,
        dim=layout.head_dim,
    )
    return _Plan(call, arrays, np.array(merges, dtype=np.int64).reshape(-1, 6), partials)


def _lane_blocks(
    piece: SequenceSlice, group: int, window: int | None
) -> list[tuple[int, int, int, int]]:
    """(first lane, lanes, first key, end key) of each block of lanes: the keys that any of its
    lanes sees."""
    blocks = []
    before = piece.context_len - piece.query_len
    for lane in range(0, piece.query_len * group, LANES):
        lanes = min(LANES, piece.query_len * group - lane)
        first = before + lane // group
        last = before + (lane + lanes - 1) // group
        start = 0 if window is None else max(0, first + 1 - window)
        blocks.append((lane, lanes, start, last + 1))
    return blocks


def _keys_per_task(piece: SequenceSlice, group: int, num_kv_heads: int) -> int | None:
    lanes = piece.query_len * group
    if lanes <= _FEW_LANES:
        return _KEYS_PER_FEW
    if -(-lanes // LANES) * num_kv_heads < _FEWEST_TASKS:
        return _KEYS_PER_TASK
    return None


def _bounds(start: int, end: int, step: int | None) -> list[tuple[int, int]]:
    """[start, end) cut at multiples of `step`."""
    if step is None:
        return [(start, end)]
    cuts = [start, *range((start // step + 1) * step, end, step), end]
    return list(pairwise(cuts))
