"""From blocks and superblocks to the bytes that move.

Owns: TierCopies: the works that copy between a KVCache, HostMemory and staging buffers, on the CPU
and in a device's queue. Does not own: when they run
(copy_engine.py, copy_cuda.py), or which copies are allowed (transfer.py).

On the CPU, whole runs of blocks move as one strided copy by numpy, which is single-threaded and
releases the interpreter's lock: 18 GB/s for a run of 256 tokens of SmolLM2-135M, 10 GB/s in runs of
16. In a device's queue, blocks are gathered on the device and cross as one piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kv_offload.host_memory import HostMemory, block_sums
from kv_offload.kv_cache import KVCache
from kv_offload.superblock import SuperblockLayout
from kv_offload.tickets import CopyError

DAMAGED = "damaged"
"""Cause of a copy whose check sums differ."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockCopy:
    """Device blocks to or from consecutive blocks of one superblock; a Work."""

    device: torch.Tensor
    """[L, 2, ...], the cache's storage."""
    host: torch.Tensor
    """The superblock, of the layout's shape."""
    layout: SuperblockLayout
    runs: tuple[tuple[int, int, int], ...]
    """(first device slot, first token of the superblock, tokens)."""
    to_host: bool
    sums: np.ndarray | None
    """uint64 [blocks], of the whole superblock: written by a store, compared by a load."""

    @property
    def num_bytes(self) -> int:
        return self.layout.kv.bytes_per_token * sum(count for _, _, count in self.runs)

    def run(self) -> None:
        device, host = _bytes_of(self.device), _bytes_of(self.host)
        axis = self.layout.token_axis
        for slot, token, count in self.runs:
            here = _cut(device, axis, slot, count)
            there = _cut(host, axis, token, count)
            np.copyto(*((there, here) if self.to_host else (here, there)))
            if self.sums is not None:
                self._check(here, token)

    def _check(self, here: np.ndarray, token: int) -> None:
        assert self.sums is not None
        found = block_sums(here, self.layout)
        first = token // self.layout.kv.block_size
        kept = self.sums[first : first + len(found)]
        if self.to_host:
            kept[:] = found
        elif not np.array_equal(kept, found):
            raise CopyError(DAMAGED)

    def enqueue(self) -> None:
        """Issue the copy to the current queue of the device. Temporaries belong to that queue."""
        axis = self.layout.token_axis
        first, tokens = self.runs[0][1], sum(count for _, _, count in self.runs)
        whole = tokens == self.layout.tokens
        if self.to_host:
            parts = [self.device.narrow(axis, slot, count) for slot, _, count in self.runs]
            target = self.host if whole else self.host.narrow(axis, first, tokens)
            target.copy_(torch.cat(parts, axis), non_blocking=True)
            return
        # Also for a few blocks: one piece crosses faster than a piece per layer.
        staged = self.host.to(self.device.device, non_blocking=True)
        for slot, token, count in self.runs:
            self.device.narrow(axis, slot, count).copy_(staged.narrow(axis, token, count))


@dataclass(frozen=True, slots=True, eq=False)
class LayerCopy:
    """One layer of superblocks into a staging buffer; a Work."""

    superblocks: torch.Tensor
    """[slots, L, 2, ...], the host's memory."""
    layer: int
    runs: tuple[tuple[int, int, int], ...]
    """(first slot, slots, tokens of each): full neighbours are one copy."""
    into: torch.Tensor
    """[2, Hkv, T, d] or [2, T, Hkv, d]; T is at most the tokens of all slots."""
    axis: int
    """Which axis of `into` counts tokens."""

    @property
    def num_bytes(self) -> int:
        return self.into.nbytes

    @property
    def to_host(self) -> bool:
        return False

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Targets and sources, [2, Hkv, slots, tokens, d] or [2, slots, tokens, Hkv, d]."""
        at = 0
        for slot, count, tokens in self.runs:
            rows = self.superblocks[slot : slot + count, self.layer]
            source = rows.narrow(1 + self.axis, 0, tokens).movedim(0, self.axis)
            target = self.into.narrow(self.axis, at, count * tokens)
            yield target.view(source.shape), source
            at += count * tokens

    def run(self) -> None:
        for target, source in self._pairs():
            np.copyto(_bytes_of(target), _bytes_of(source))

    def enqueue(self) -> None:
        """Issue the copy to the current queue of the device."""
        for target, source in self._pairs():
            target.copy_(source, non_blocking=True)


class TierCopies:
    """Works between one cache and one host memory.

    With `memory.sums`, a load compares them with what arrived on the device: a difference is a
    failure (DAMAGED) instead of a wrong answer.

    Raises ValueError when the two do not order tokens and heads alike, or have other geometries.
    """

    def __init__(self, cache: KVCache, memory: HostMemory) -> None:
        head_major = cache.device.type == "cpu"
        if memory.layout.kv != cache.layout or memory.layout.head_major != head_major:
            raise ValueError(
                f"the host tier is laid out for {memory.layout}, the device's cache is "
                f"{cache.layout} with head_major={head_major}"
            )
        self.layout = memory.layout
        self._storage = cache.storage
        self._superblocks = memory.superblocks
        self._sums = memory.sums

    def store(self, blocks: Sequence[int], slot: int) -> BlockCopy:
        """Device blocks into the first blocks of a slot."""
        return self._copy(blocks, slot, 0, to_host=True)

    def load(self, slot: int, first: int, blocks: Sequence[int]) -> BlockCopy:
        """Blocks `first`, ... of a slot into device blocks."""
        return self._copy(blocks, slot, first, to_host=False)

    def stream(self, slots: Sequence[int], layer: int, into: torch.Tensor) -> LayerCopy:
        """One layer of the slots' superblocks, in order. `into` is [2, Hkv, T, d] ([2, T, Hkv, d]
        without head_major), T tokens at most those of all slots; its last axis is dense."""
        axis, size = self.layout.token_axis - 1, self.layout.tokens
        want = list(self.layout.shape[1:])
        want[axis] = tokens = into.shape[axis]
        full, rest = divmod(tokens, size)
        if list(into.shape) != want or full + (rest > 0) > len(slots):
            raise ValueError(
                f"a staging buffer of {list(into.shape)} does not take a layer of {len(slots)} "
                f"superblocks of {list(self.layout.shape[1:])}"
            )
        runs: list[tuple[int, int, int]] = []
        for slot in slots[:full]:
            if runs and sum(runs[-1][:2]) == slot:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1, size)
            else:
                runs.append((slot, 1, size))
        if rest:
            runs.append((slots[full], 1, rest))
        return LayerCopy(self._superblocks, layer, tuple(runs), into, axis)

    def _copy(self, blocks: Sequence[int], slot: int, first: int, *, to_host: bool) -> BlockCopy:
        if not 1 <= len(blocks) <= self.layout.blocks - first:
            raise ValueError(
                f"{len(blocks)} blocks from block {first} on do not fit a superblock of "
                f"{self.layout.blocks}"
            )
        size = self.layout.kv.block_size
        runs: list[tuple[int, int, int]] = []
        for index, block in enumerate(blocks, first):
            if runs and runs[-1][0] + runs[-1][2] == block * size:
                runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + size)
            else:
                runs.append((block * size, index * size, size))
        sums = None if self._sums is None else self._sums[slot]
        return BlockCopy(
            self._storage, self._superblocks[slot], self.layout, tuple(runs), to_host, sums
        )


def copy_now(work: BlockCopy | LayerCopy, device: torch.device) -> None:
    """Without a ticket: by the calling thread, or in the device's queue of compute."""
    if device.type == "cpu":
        work.run()
    else:
        work.enqueue()


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).numpy()


def _cut(array: np.ndarray, axis: int, start: int, count: int) -> np.ndarray:
    return array[(slice(None),) * axis + (slice(start, start + count),)]
