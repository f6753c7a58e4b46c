"""How a step's rows are cut into the tasks of native/attention.cpp.

Owns: NativePlan, the arrays of one batch under one window, and the Call that names them.
Does not own: the calls (native.py), the arithmetic (attention.cpp), or staging (staging.py).

A lane is one query row of one head. A task is up to 64 lanes of one sequence and KV head over a
range of keys. Keys are cut too, at fixed positions: at multiples of 512 for sequences of few lanes,
of 2,048 for all others, however many lanes they have. So neither the number of threads nor the
chunk that a row comes in changes how its parts are made and merged, which is in order of position.

Cold keys that are streamed take one of two ways. Chunks meet them in the ring's buffers: in phases,
one per piece, and what lies on the device in the last phase. A task that meets several phases is
resumed: its running result waits in a state, and its arithmetic is that of one call over all its
keys. Few lanes take less time to attend a superblock than another thread takes to copy it, and
cores need not share a cache: each of their tasks copies its own two superblocks into a buffer that
stays in its core's cache, and attends them there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from kv_offload.kv_cache import KVCache
from lm_engine.attention.base import AttentionBatch, SequenceSlice, Stretch, stretches
from lm_engine.attention.cold import ColdPiece

LANES = 64
"""Most lanes of a task (`LANES` of attention.h)."""
SPLIT_TOKENS = 256
"""Canonical splits (`SPLIT` of attention.h)."""
MOST_HEAD_DIM = 256
"""`MOST_DIM` of attention.h."""
FEW_LANES = 8
"""`FEW` of attention.h."""
STATE_BYTES = 4 * (MOST_HEAD_DIM * LANES + 2 * LANES)
"""Size of `State` of attention.h; pages of it that a head size does not need are never touched."""
KEYS_PER_FEW = 512
"""Keys of a task of few lanes (`STAGED_KEYS` of attention.h)."""
_KEYS_PER_TASK = 2048
"""Of all others: few enough that a chunk of few rows behind many keys has work for all cores."""
_GOES_ON, _TO_BE_GONE_ON = 1, 2
"""Values of `TASK_OPEN` of attention.h."""


class Call(ctypes.Structure):
    """`Call` of attention.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "out", "lse", "partials", "states")),
        *((name, ctypes.c_void_p) for name in ("staging", "copied")),
        *((name, ctypes.c_void_p) for name in ("sequences", "pieces", "tasks", "regions")),
        *((name, ctypes.c_long) for name in ("q_row", "q_head", "window", "num_tasks")),
        ("together", ctypes.c_long),
        *((name, ctypes.c_int) for name in ("kv_heads", "group", "dim", "layer")),
        ("scale", ctypes.c_float),
    )


_DEVICE, _HOST, _STAGED, _OWN = 0, 1, 2, 3
"""Regions, in their order in `_regions`."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Tasks of one call."""

    tasks: int
    """Address of the first."""
    num_tasks: int


@dataclass(slots=True, eq=False)
class NativePlan:
    """The tasks of one batch under one window; the arrays are kept alive for `call`."""

    call: Call
    phases: tuple[Phase, ...]
    """One per staged piece, in order, then the rest."""
    regions: np.ndarray
    merges: np.ndarray
    """int64 [M, 6]: sequence, KV head, first lane, lanes, first partial, parts."""
    stages_own: bool
    """Whether threads stage keys by themselves."""
    kept: tuple[np.ndarray | torch.Tensor, ...]

    def stage(self, buffer: torch.Tensor) -> None:
        """The next call reads its staged keys from `buffer` [2, Hkv, T, d]."""
        halves, heads, *_ = buffer.stride()
        self.regions[_STAGED] = (buffer.data_ptr(), 0, halves, heads)

    def enter(self, phase: Phase) -> None:
        self.call.tasks, self.call.num_tasks = phase.tasks, phase.num_tasks


def prepare(
    batch: AttentionBatch,
    cache: KVCache,
    num_heads: int,
    window: int | None,
    staged: tuple[ColdPiece, ...] = (),
    *,
    stream: bool = False,
) -> NativePlan:
    """`stream`: cold keys pass through staging buffers, those of chunks through the ring's, in the
    pieces of `staged`."""
    layout = cache.layout
    group = num_heads // layout.num_kv_heads
    tables = _Tables(len(staged) + 1)
    places = {slot: place for piece in staged for slot, place in piece.places.items()}
    ends = _phase_ends(batch, staged)
    for index, sequence in enumerate(batch.sequences):
        first_piece, position = len(tables.pieces), 0
        for stretch in stretches(sequence, layout.block_size, 0, sequence.context_len):
            own = stream and is_few(sequence, group)
            tables.pieces.append(_piece(position, stretch, cache, places, own))
            position += stretch.length
        tables.sequences.append(
            (
                sequence.query_start,
                sequence.query_len,
                sequence.context_len,
                first_piece,
                len(tables.pieces) - first_piece,
            )
        )
        step = KEYS_PER_FEW if is_few(sequence, group) else _KEYS_PER_TASK
        for lane, lanes, start, end in _lane_blocks(sequence, group, window):
            bounds = _bounds(start, end, step)
            for head in range(layout.num_kv_heads):
                block = (index, head, lane, lanes)
                if len(bounds) == 1:
                    tables.add(block, start, end, -1, ends[index])
                    continue
                tables.merges.append((*block, tables.num_partials, len(bounds)))
                for low, high in bounds:
                    tables.add(block, low, high, tables.num_partials, ends[index])
                    tables.num_partials += lanes
    together = sum(bool(s.cold) and is_few(s, group) for s in batch.sequences) if stream else 0
    return _plan(tables, cache, group, window, together)


def is_few(sequence: SequenceSlice, group: int) -> bool:
    """Whether its lanes are so few that it is cut along its keys only."""
    return sequence.query_len * group <= FEW_LANES


class _Tables:
    """Rows of the arrays while they are collected."""

    def __init__(self, num_phases: int) -> None:
        self.sequences: list[tuple[int, ...]] = []
        self.pieces: list[tuple[int, ...]] = []
        self.tasks: list[list[tuple[int, ...]]] = [[] for _ in range(num_phases)]
        self.merges: list[tuple[int, ...]] = []
        self.num_partials = self.num_states = 0

    def add(
        self,
        block: tuple[int, int, int, int],
        start: int,
        end: int,
        partial: int,
        ends: list[tuple[int, int]],
    ) -> None:
        """A task, cut where its sequence's phases end; `ends` are (phase, end position)."""
        parts = []
        low = start
        for phase, stop in ends:
            if low < min(stop, end):
                parts.append((phase, low, min(stop, end)))
                low = parts[-1][2]
        state = -1
        if len(parts) > 1:
            state, self.num_states = self.num_states, self.num_states + 1
        for i, (phase, low, high) in enumerate(parts):
            is_open = _GOES_ON * (i > 0) + _TO_BE_GONE_ON * (i < len(parts) - 1)
            self.tasks[phase].append((*block, low, high, partial, state, is_open))


def _phase_ends(
    batch: AttentionBatch, staged: tuple[ColdPiece, ...]
) -> list[list[tuple[int, int]]]:
    """Per sequence (phase, position at which its keys of that phase end), in order."""
    ends: list[list[tuple[int, int]]] = [[] for _ in batch.sequences]
    for phase, piece in enumerate(staged):
        for span in piece.spans:
            ends[span.sequence].append((phase, span.end))
    for found, sequence in zip(ends, batch.sequences, strict=True):
        found.append((len(staged), sequence.context_len))
    return ends


def _plan(
    tables: _Tables, cache: KVCache, group: int, window: int | None, together: int
) -> NativePlan:
    layout = cache.layout
    for part in tables.tasks:
        # The longest first, so that no thread is left alone with one at the end. Of several
        # sequences with few lanes, tasks that may read the same superblocks come in a row.
        part.sort(
            key=lambda task: (
                (1, task[4], task[1])
                if together > 1 and task[3] <= FEW_LANES
                else (0, (task[4] - task[5]) * task[3], 0)
            )
        )
    tasks = np.array([task for part in tables.tasks for task in part], dtype=np.int64)
    sequences, pieces = (
        np.array(rows, dtype=np.int64) for rows in (tables.sequences, tables.pieces)
    )
    regions = _regions(cache)
    partials = torch.empty(tables.num_partials, layout.head_dim + 2)
    states = torch.empty(tables.num_states, STATE_BYTES, dtype=torch.uint8)
    phases = []
    first = 0
    for part in tables.tasks:
        phases.append(Phase(tasks.ctypes.data + first * tasks.strides[0], len(part)))
        first += len(part)
    call = Call(
        partials=partials.data_ptr(),
        states=states.data_ptr(),
        sequences=sequences.ctypes.data,
        pieces=pieces.ctypes.data,
        regions=regions.ctypes.data,
        together=max(1, together),
        window=window or 0,
        kv_heads=layout.num_kv_heads,
        group=group,
        dim=layout.head_dim,
    )
    merges = np.array(tables.merges, dtype=np.int64).reshape(-1, 6)
    kept = (tasks, sequences, pieces, partials, states)
    return NativePlan(call, tuple(phases), regions, merges, together > 0, kept)


def _regions(cache: KVCache) -> np.ndarray:
    """int64 [4, 4], `Region` of attention.h: address, and the strides in floats of a layer, from a
    key to its value, and of a head."""
    layers, halves, heads, *_ = cache.storage.stride()
    rows = [(0, 0, 0, 0)] * 4
    rows[_DEVICE] = (cache.storage.data_ptr(), layers, halves, heads)
    if cache.host is not None:
        superblocks = cache.host.superblocks
        _, layers, halves, heads, *_ = superblocks.stride()
        rows[_HOST] = (superblocks.data_ptr(), layers, halves, heads)
    return np.array(rows, dtype=np.int64)


def _piece(
    position: int, stretch: Stretch, cache: KVCache, places: dict[int, int], own: bool
) -> tuple[int, ...]:
    """A row of `pieces`: position, offset and length in floats and keys, region, source. What is
    not in the ring though others are is not seen by any row."""
    dim = cache.layout.head_dim
    offset = stretch.slot * dim
    if stretch.host is None:
        return position, offset, stretch.length, _DEVICE, 0
    if cache.host is None:
        raise ValueError(f"host superblock {stretch.host} is named, but the cache has no host tier")
    source = offset + stretch.host * cache.host.superblocks.stride(0)
    if own:
        return position, position % KEYS_PER_FEW * dim, stretch.length, _OWN, source
    place = places.get(stretch.host)
    if place is not None:
        return position, offset + place * dim, stretch.length, _STAGED, 0
    return position, source, stretch.length, _HOST, 0


def _lane_blocks(
    piece: SequenceSlice, group: int, window: int | None
) -> Iterator[tuple[int, int, int, int]]:
    """(first lane, lanes, first key, end key) of each block of lanes: the keys that any of its
    lanes sees."""
    before = piece.context_len - piece.query_len
    for lane in range(0, piece.query_len * group, LANES):
        lanes = min(LANES, piece.query_len * group - lane)
        first = before + lane // group
        last = before + (lane + lanes - 1) // group
        start = 0 if window is None else max(0, first + 1 - window)
        yield lane, lanes, start, last + 1


def _bounds(start: int, end: int, step: int) -> list[tuple[int, int]]:
    """[start, end) cut at multiples of `step`."""
    cuts = [start, *range((start // step + 1) * step, end, step), end]
    return list(pairwise(cuts))
