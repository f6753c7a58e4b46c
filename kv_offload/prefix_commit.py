"""What a sequence computed becomes findable.

Owns: PrefixCommit: full blocks into the device's tree, full superblocks offered to the host, and
the cold beginnings of large sequences by their names. Does not own: the trees (radix_cache.py,
host_cache.py), what is done with offers (write_through.py), or tables (kv_manager.py). Imports no
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kv_offload.block_table import BlockTable
from kv_offload.cold_prefix import ColdPrefixes
from kv_offload.lower_tiers import LowerTiers
from kv_offload.prefix_lookup import PrefixLookup
from kv_offload.radix_cache import Node, RadixCache

TableOf = Callable[[int], BlockTable | None]


class PrefixCommit:
    """`table_of` gives an owner's table while it has one."""

    def __init__(
        self,
        cache: RadixCache,
        cold: ColdPrefixes | None,
        lookup: PrefixLookup,
        table_of: TableOf,
    ) -> None:
        self._cache, self._cold, self._lookup, self._table_of = cache, cold, lookup, table_of
        self.tiers: LowerTiers | None = None

    def commit(self, owner: int, table: BlockTable, ids: Sequence[int], num_tokens: int) -> None:
        """The KV of the owner's first `num_tokens` tokens is valid."""
        if table.large:
            self._commit_large(owner, table, ids, num_tokens)
        elif table.node is not None and table.node.alive:
            self._insert(table, table.node, ids, num_tokens)
            self._offer(owner, table, ids)

    def seal(self, owner: int, table: BlockTable, ids: Sequence[int], num_tokens: int) -> None:
        """The owner will write no more: also its last block, which is not full, can be found, and
        what a large one still has on the device goes to the host."""
        self.commit(owner, table, ids, num_tokens)
        if table.large:
            if self._cold is not None and self.tiers is not None:
                self._cold.settle(owner)
                self.tiers.stores.start_all(owner)
            return
        if table.node is None or not table.node.alive:
            return
        start = table.node.depth * self._cache.block_size
        if num_tokens - start >= self._cache.least_copied_tokens:
            last = table.blocks[table.node.depth]
            self._cache.insert(table.node, tuple(ids[start:num_tokens]), last)

    def _insert(self, table: BlockTable, node: Node, ids: Sequence[int], num_tokens: int) -> None:
        """Where the cache has the same KV already, the owner's copy is given back."""
        size, doubled = self._cache.block_size, False
        for index in range(node.depth, num_tokens // size):
            own = table.blocks[index]
            node = self._cache.insert(node, tuple(ids[index * size : (index + 1) * size]), own)
            if node.block != own:
                self._cache.take([node.block])
                self._cache.give_up([own])
                table.blocks[index] = node.block
                doubled = True
        table.node = node
        if doubled:
            table.set_blocks(table.blocks)

    # -- to the host ---------------------------------------------------------------------------

    def _offer(self, owner: int, table: BlockTable, ids: Sequence[int]) -> None:
        """Every full superblock of the owner's path that is not on the host, parents first."""
        if self._cold is None or self.tiers is None or table.node is None:
            return
        size, offered = self._cold.size, self._lookup.offered(table)
        count = table.node.depth // size
        if count <= offered:
            return
        last = table.node
        ends: list[Node] = []
        while last.depth > offered * size:
            if last.depth % size == 0:
                ends.append(last)
            assert last.parent is not None
            last = last.parent
        path = self._lookup.path(table, ids, count)
        for target, end in zip(path[offered:], reversed(ends), strict=bool(path)):
            self.tiers.stores.offer(owner, target, partial(_blocks_before, end, size))

    def _commit_large(
        self, owner: int, table: BlockTable, ids: Sequence[int], num_tokens: int
    ) -> None:
        if self._cold is None or not self._name(owner, table, ids) or self.tiers is None:
            return
        offered, count = self._lookup.offered(table), num_tokens // self._cold.cache.tokens
        for index in range(offered, count):
            path = self._lookup.path(table, ids, index + 1)
            if not path:
                return
            blocks = partial(self._hot_blocks, owner, index)
            self.tiers.stores.offer(owner, path[index], blocks)

    def _name(self, owner: int, table: BlockTable, ids: Sequence[int]) -> bool:
        """Makes the cold beginning findable; whether all of it is."""
        assert self._cold is not None
        host, handles = self._cold.cache, self._cold.superblocks(owner)
        if self._lookup.offered(table) < table.named:
            table.named = 0
        while table.named < len(handles):
            handle, index = handles[table.named], table.named
            path = self._lookup.path(table, ids, index + 1) if host.pool.keeps(handle) else []
            if not path:
                return False
            if not host.holds(path[index]):
                host.fill(path[index], handle)
                if self.tiers is not None:
                    self.tiers.stores.keep(path[index])
            elif path[index].handle != handle:
                self._cold.replace(owner, index, path[index].handle)
            table.named += 1
        return True

    def _hot_blocks(self, owner: int, index: int) -> list[int] | None:
        """Device blocks of superblock `index` of a large owner; None when it has left."""
        table = self._table_of(owner)
        if table is None or self._cold is None or index < self._cold.count(owner):
            return None
        start = index * self._cold.size - self._cold.num_blocks(owner)
        blocks = table.blocks[start : start + self._cold.size]
        return blocks if len(blocks) == self._cold.size else None


def _blocks_before(end: Node, count: int) -> list[int] | None:
    """The blocks of the node `end` and of those before it, `count` in all; None when it has left
    the tree."""
    if not end.alive:
        return None
    blocks, node = [end.block], end
    while len(blocks) < count:
        assert node.parent is not None
        node = node.parent
        blocks.append(node.block)
    return blocks[::-1]
