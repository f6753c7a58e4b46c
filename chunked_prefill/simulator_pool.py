"""KV books for a simulator: the same numbers, without places in memory.

Owns: CountingPool, a BlockPool that hands out any free block in constant time, and `counting_kv`,
the KV manager over it. Does not own: what is decided from these numbers. Imports no torch.

How many blocks are free does not depend on which ones are, and no decision of the scheduler asks
for more; the search for a gap, which keeps a real sequence's KV in one piece, costs a pool of a
large device more than everything else in a step.
"""

from __future__ import annotations

from collections.abc import Sequence

from kv_offload.block_pool import BlockPool, OutOfBlocksError
from kv_offload.kv_manager import KVManager


class CountingPool(BlockPool):
    """Blocks last given back are given out first."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(1)
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._counts = [0] * num_blocks
        self._spare = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._spare)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._spare)

    def ref_count(self, block: int) -> int:
        return self._counts[block]

    def allocate(self, count: int, *, owner: int, after: int | None, reach: int) -> list[int]:
        if count > len(self._spare):
            raise OutOfBlocksError(count, len(self._spare))
        blocks = [self._spare.pop() for _ in range(count)]
        for block in blocks:
            self._counts[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        counts = self._counts
        for block in blocks:
            if counts[block] < 1:
                raise ValueError(f"block {block} is free and cannot be shared")
            counts[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        counts = self._counts
        for block in blocks:
            if counts[block] < 1:
                raise ValueError(f"block {block} is freed twice")
            counts[block] -= 1
            if counts[block] == 0:
                self._spare.append(block)

    def release_claims(self, owner: int) -> None:
        """Nobody claims anything."""

    def check_invariants(self) -> None:
        if sorted(self._spare) != [b for b, count in enumerate(self._counts) if count == 0]:
            raise AssertionError("the free blocks are not those without a reference")


def counting_kv(num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> KVManager:
    """A device pool's books; no tier below it."""
    pool = CountingPool(num_blocks)
    return KVManager(num_blocks, block_size, prefix_caching=prefix_caching, pool=pool)
