"""Which device blocks are free, and who is expected to grow into which.

Owns: reference counts of the device pool's blocks and soft claims on free blocks that lie ahead
of a growing sequence. Does not own: which tokens a block holds (kv_manager.py) or the memory
(kv_cache.py). Imports no torch.

A sequence's blocks should be contiguous, because the CPU attends contiguous runs as views and has
to gather everything else. So an owner says how many blocks it expects in the end (`reach`), its run
is placed in a gap that long, and the rest of the gap is *claimed*: others use claimed blocks only
when nothing else is free. A claim never makes an allocation fail.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_UNCLAIMED = -1


class OutOfBlocksError(Exception):
    """Fewer free blocks than asked for; nothing was allocated."""

    def __init__(self, need_blocks: int, free_blocks: int) -> None:
        super().__init__(f"{need_blocks} blocks needed, {free_blocks} free")
        self.need_blocks = need_blocks
        self.free_blocks = free_blocks


class BlockPool:
    """Reference-counted blocks 0 .. num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._refs = np.zeros(num_blocks, dtype=np.int32)
        self._claims = np.full(num_blocks, _UNCLAIMED, dtype=np.int64)
        self._num_free = num_blocks

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_used(self) -> int:
        return self.num_blocks - self._num_free

    def ref_count(self, block: int) -> int:
        return int(self._refs[block])

    def allocate(self, count: int, *, owner: int, after: int | None, reach: int) -> list[int]:
        """`count` blocks with one reference each, contiguous with `after` where possible.

        `after` is the owner's last block, or None for its first allocation. `reach` is how many
        blocks, these included, the owner expects to take in the end.
        Raises OutOfBlocksError, with nothing allocated, when fewer than `count` are free.
        """
        if count > self._num_free:
            raise OutOfBlocksError(count, self._num_free)
        blocks: list[int] = []
        cursor = after
        while len(blocks) < count:
            if cursor is None or not self._extends(cursor, owner):
                cursor = self._open_run(owner, max(reach, count) - len(blocks))
            else:
                cursor += 1
            self._refs[cursor] = 1
            self._num_free -= 1
            blocks.append(cursor)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """One more reference on each block, all of which are in use."""
        for block in blocks:
            if self._refs[block] < 1:
                raise ValueError(f"block {block} is free and cannot be shared")
            self._refs[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """One reference less on each block; those without any are free again."""
        for block in blocks:
            if self._refs[block] < 1:
                raise ValueError(f"block {block} is freed twice")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._num_free += 1

    def release_claims(self, owner: int) -> None:
        """The owner will not grow any more."""
        self._claims[self._claims == owner] = _UNCLAIMED

    def _extends(self, last: int, owner: int) -> bool:
        nxt = last + 1
        if nxt >= self.num_blocks or self._refs[nxt] != 0:
            return False
        claim = int(self._claims[nxt])
        return claim in (_UNCLAIMED, owner)

    def _open_run(self, owner: int, reach: int) -> int:
        """First block of the best gap: the first unclaimed one of at least `reach` blocks, else the
        longest unclaimed one, else the longest of free blocks whoever claims them."""
        free = self._refs == 0
        starts, lengths = _gaps(free & (self._claims == _UNCLAIMED))
        if len(starts) == 0:
            starts, lengths = _gaps(free)
            best = int(lengths.argmax())
            return int(starts[best])
        wide = np.flatnonzero(lengths >= reach)
        best = int(wide[0]) if len(wide) else int(lengths.argmax())
        start, length = int(starts[best]), int(lengths[best])
        self._claims[start : start + min(reach, length)] = owner
        return start

    def check_invariants(self) -> None:
        if (self._refs < 0).any():
            raise AssertionError("a block has a negative reference count")
        free = int((self._refs == 0).sum())
        if free != self._num_free:
            raise AssertionError(f"{free} blocks have no reference, {self._num_free} are counted")


def _gaps(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Start and length of each run of True in `mask`."""
    edges = np.diff(mask.astype(np.int8), prepend=0, append=0)
    starts = np.flatnonzero(edges == 1)
    return starts, np.flatnonzero(edges == -1) - starts
