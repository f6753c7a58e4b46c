"""Which blocks hold which tokens of which sequence.

Owns: block tables, copy-on-write, and the answer "does it ever fit". Does not own: free lists
(block_pool.py), KV bytes (kv_cache.py), or how far a sequence may advance (the scheduler).
Imports no torch.

Life of a token's KV: `reserve` gives its position a block that nobody else writes → the step
computes it (use) → the sequence's counter passes it (commit). A failed or preempted step is undone
by `free`; the counter never passed, so nobody can read what was not written.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kv_offload.block_pool import BlockPool, OutOfBlocksError


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the whole of block `source` over block `target` before the step's first write."""

    source: int
    target: int


@dataclass(slots=True)
class _Table:
    blocks: list[int] = field(default_factory=list)
    runs: list[tuple[int, int]] = field(default_factory=list)
    """`blocks` as (first block, count) runs, kept in step with it."""


class KVManager:
    """Block tables over one device pool; owners are sequence ids."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._tables: dict[int, _Table] = {}

    @property
    def capacity_tokens(self) -> int:
        return self.pool.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def held_blocks(self, owner: int) -> int:
        table = self._tables.get(owner)
        return len(table.blocks) if table else 0

    def runs(self, owner: int) -> tuple[tuple[int, int], ...]:
        """The block table as (first block, number of blocks) runs in token order."""
        return tuple(self._tables[owner].runs)

    def reserve(
        self, owner: int, start: int, end: int, *, reach_tokens: int
    ) -> tuple[BlockCopy, ...] | None:
        """Makes positions [start, end) writable by `owner` alone, all or nothing.

        Positions before `start` keep their KV. Returns the block copies to make before the step
        (a block shared with another owner is replaced by a copy), or None, with nothing changed,
        when the pool has too few free blocks. `reach_tokens` is how long the sequence may become.
        """
        table = self._tables.setdefault(owner, _Table())
        first_written = start // self.block_size
        shared = [
            i
            for i in range(first_written, min(len(table.blocks), self.blocks_for(end)))
            if self.pool.ref_count(table.blocks[i]) > 1
        ]
        grow = max(0, self.blocks_for(end) - len(table.blocks))
        if grow + len(shared) > self.pool.num_free:
            if not table.blocks:
                del self._tables[owner]
            return None
        copies = tuple(self._unshare(owner, table, i, start) for i in shared)
        if grow:
            after = table.blocks[-1] if table.blocks else None
            reach = max(grow, self.blocks_for(reach_tokens) - len(table.blocks))
            for block in self.pool.allocate(grow, owner=owner, after=after, reach=reach):
                _append(table, block)
        return tuple(c for c in copies if c is not None)

    def _unshare(self, owner: int, table: _Table, index: int, start: int) -> BlockCopy | None:
        old = table.blocks[index]
        (new,) = self.pool.allocate(1, owner=owner, after=None, reach=1)
        self.pool.free([old])
        table.blocks[index] = new
        table.runs = _runs(table.blocks)
        holds_kept_tokens = index * self.block_size < start
        return BlockCopy(old, new) if holds_kept_tokens else None

    def fork(self, parent: int, child: int) -> None:
        """`child` starts with the parent's blocks, shared; whoever writes a shared block first
        gets a copy of its own."""
        if child in self._tables:
            raise ValueError(f"sequence {child} already has blocks")
        blocks = list(self._tables[parent].blocks)
        self.pool.share(blocks)
        self._tables[child] = _Table(blocks, _runs(blocks))

    def free(self, owner: int) -> None:
        """Gives back everything the owner holds; unknown owners hold nothing."""
        table = self._tables.pop(owner, None)
        self.pool.release_claims(owner)
        if table:
            self.pool.free(table.blocks)

    def check_invariants(self) -> None:
        self.pool.check_invariants()
        counts: dict[int, int] = {}
        for table in self._tables.values():
            if len(set(table.blocks)) != len(table.blocks):
                raise AssertionError("a table names a block twice")
            if table.runs != _runs(table.blocks):
                raise AssertionError("a table's runs do not match its blocks")
            for block in table.blocks:
                counts[block] = counts.get(block, 0) + 1
        for block in range(self.pool.num_blocks):
            if self.pool.ref_count(block) != counts.get(block, 0):
                raise AssertionError(
                    f"block {block}: {self.pool.ref_count(block)} references, "
                    f"{counts.get(block, 0)} tables name it"
                )


def _append(table: _Table, block: int) -> None:
    table.blocks.append(block)
    if table.runs and sum(table.runs[-1]) == block:
        first, count = table.runs[-1]
        table.runs[-1] = (first, count + 1)
    else:
        table.runs.append((block, 1))


def _runs(blocks: list[int]) -> list[tuple[int, int]]:
    table = _Table()
    for block in blocks:
        _append(table, block)
    return table.runs


__all__ = ["BlockCopy", "KVManager", "OutOfBlocksError"]
