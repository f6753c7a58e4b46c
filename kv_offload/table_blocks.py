"""How a block table grows, shares and gives up blocks.

Owns: TableBlocks: room in the pool, and the changes to one owner's table, each all or nothing. Does
not own: which owner changes when (kv_manager.py), free lists (block_pool.py), the device's tree
(radix_cache.py), or what lies on the host (cold_prefix.py). Imports no torch.
"""

from __future__ import annotations

from kv_offload.block_pool import BlockPool
from kv_offload.block_table import BlockCopy, BlockTable, Sources
from kv_offload.cold_prefix import BlockStore, ColdPrefixes
from kv_offload.prefix_lookup import PrefixLookup
from kv_offload.radix_cache import RadixCache

_MOST_AHEAD_BLOCKS = 32
"""Idle blocks that are evicted beyond what is needed, so that a growing sequence finds a run."""


class TableBlocks:
    """`cold` is None without a host tier. `reach` and `wish` are always the blocks that an owner
    may need in the end, and those that it is known to need."""

    def __init__(
        self,
        pool: BlockPool,
        cache: RadixCache,
        cold: ColdPrefixes | None,
        lookup: PrefixLookup,
    ) -> None:
        self.pool, self.cache, self.cold = pool, cache, cold
        self.block_size = cache.block_size
        self._lookup = lookup

    @property
    def num_available(self) -> int:
        """Blocks that can be had: free ones, and those that only the cache holds."""
        return self.pool.num_free + self.cache.num_idle

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def cold_blocks(self, owner: int) -> int:
        """Blocks whose worth of tokens lies on the host."""
        return 0 if self.cold is None else self.cold.num_blocks(owner)

    def would_be_free(self, block: int, users: int = 1) -> bool:
        """Whether the block could be had if `users` of it gave it up."""
        return self.cache.users(block) == users and not self.cache.is_held(block)

    def is_inside_last(self, table: BlockTable, start: int, end: int) -> bool:
        """Whether all of it goes into the last block, which is the owner's alone: so it is for most
        tokens of an answer, and nothing changes."""
        blocks, size = table.blocks, self.block_size
        place = len(blocks) * size
        return (
            place - size <= start < end <= place
            and not table.large
            and self.pool.ref_count(blocks[-1]) == 1
        )

    def shared(self, table: BlockTable, first: int) -> list[int]:
        """Indices from `first` on of blocks that somebody else has, too."""
        return [
            i for i in range(first, len(table.blocks)) if self.pool.ref_count(table.blocks[i]) > 1
        ]

    def take(self, owner: int, table: BlockTable, end: int, *, reach: int, wish: int) -> bool:
        """The cache's blocks up to the table's node, and new ones up to `end`."""
        assert table.node is not None
        blocks = table.node.path()
        self.cache.take(blocks)
        grow = self.blocks_for(end) - len(blocks)
        if not self.make_room(grow, wish - len(blocks)):
            self.cache.give_up(blocks)
            return False
        table.set_blocks(blocks)
        self.grow(owner, table, grow, reach)
        return True

    def start_in_place(
        self, owner: int, table: BlockTable, end: int, *, reach: int, wish: int
    ) -> tuple[BlockCopy | BlockStore, ...] | None:
        """A large owner begins with superblocks where they lie on the host."""
        assert self.cold is not None
        handles = self._lookup.in_place(table)
        start = len(handles) * self.cold.cache.tokens
        grow = self.blocks_for(end - start)
        if not self.make_room(grow, wish):
            return None
        self.cold.take(owner, handles)
        self._lookup.enter(table, len(handles))
        table.node = table.tail = None
        table.sources = Sources(host=start)
        self.grow(owner, table, grow, reach)
        return ()

    def cool(
        self, owner: int, table: BlockTable, start: int, end: int
    ) -> tuple[BlockStore, ...] | None:
        """Moves the oldest superblocks of a large sequence to the host, as many as take it back to
        its quota; None, with nothing changed, when that would not do."""
        if self.cold is None or not table.large:
            return ()
        size, cold = self.cold.size, self.cold_blocks(owner)
        done = start // (size * self.block_size) - cold // size
        grow = max(0, self.blocks_for(end) - cold - len(table.blocks))
        excess = len(table.blocks) + grow - self.cold.quota_blocks
        count = -(-excess // size) if excess > 0 else 0
        if count and table.node is not None:
            # A hit leaves whole, see BlockTable.large; it is short enough for that (look_up).
            count = max(count, -(-table.node.depth // size))
        count = min(done, count)
        leaving = table.blocks[: count * size]
        freed = sum(self.would_be_free(block) for block in leaving)
        shared = self.shared(table, start // self.block_size - cold)
        if grow + len(shared) > self.num_available + freed:
            return None
        stores = self.cold.push(owner, leaving, table.path[cold // size :])
        if stores is None:
            return None
        if count:
            table.set_blocks(table.blocks[count * size :])
            table.node = None
            self.cache.give_up(leaving)
        return stores

    def make_room(self, need: int, wish: int) -> bool:
        """Evicts until `need` blocks are free, and then some for one run as far as `wish`."""
        short = need - self.pool.num_free
        if short <= 0:
            return True
        idle = self.cache.num_idle
        if short > idle:
            return False
        ahead = min(_MOST_AHEAD_BLOCKS, self.pool.num_blocks // 32)
        self.cache.evict(min(idle, max(short, wish - self.pool.num_free) + ahead))
        return True

    def grow(self, owner: int, table: BlockTable, count: int, reach: int) -> None:
        if not count:
            return
        after = table.blocks[-1] if table.blocks else None
        ahead = max(count, reach - len(table.blocks))
        for block in self.pool.allocate(count, owner=owner, after=after, reach=ahead):
            table.append(block)

    def unshare(self, owner: int, table: BlockTable, index: int, start: int) -> BlockCopy | None:
        old = table.blocks[index]
        (new,) = self.pool.allocate(1, owner=owner, after=None, reach=1)
        self.cache.give_up([old])
        table.blocks[index] = new
        table.set_blocks(table.blocks)
        holds_kept_tokens = index * self.block_size < start
        return BlockCopy(old, new) if holds_kept_tokens else None
