"""What the tiers have of a prompt that is about to start.

Owns: PrefixLookup: the deepest blocks and superblocks on an owner's path, and which of them it
would start from. Does not own: the trees (radix_cache.py, host_cache.py), whether a copy pays
(recall_cost.py), or the start itself (kv_manager.py). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from kv_offload.block_table import BlockTable
from kv_offload.cold_prefix import ColdPrefixes
from kv_offload.host_cache import HostNode
from kv_offload.lower_tiers import LowerTiers
from kv_offload.radix_cache import BlockIds, CacheKey, Node, RadixCache

Frontier = tuple[Node, BlockIds]
"""The place of a block that is not in the cache yet: owners with equal ones need the same KV."""


class PrefixLookup:
    """`cold` is None without a host tier."""

    def __init__(self, cache: RadixCache, cold: ColdPrefixes | None) -> None:
        self._cache, self._cold = cache, cold
        self.tiers: LowerTiers | None = None
        """Who brings KV back to the device; None when nobody does."""

    def find(self, table: BlockTable, key: CacheKey, ids: Sequence[int], limit: int) -> int:
        """How many of the first `limit` tokens of `ids` the owner could start from. What the table
        says of an earlier look-up is brought up to date."""
        host = None if self._cold is None else self._cold.cache
        version = (self._cache.version, 0 if host is None else host.version)
        if table.node is None or table.version != version:
            on_device = limit
            if table.large and self._cold is not None:
                # A hit is taken on the device, where the sequence needs room to go on as well.
                half = self._cold.quota_blocks // 2 * self._cache.block_size
                on_device = min(limit, half)
            self._find_on_device(table, key, ids, on_device)
            self._find_below(table, key, ids, limit)
            table.version = version
        return self.tokens(table)

    def tokens(self, table: BlockTable) -> int:
        """What the last look-up found."""
        if table.below_tokens:
            return table.below_tokens
        return self.on_device(table)

    def on_device(self, table: BlockTable) -> int:
        """On the device."""
        if table.node is None:
            return 0
        return table.node.depth * self._cache.block_size + (table.tail[1] if table.tail else 0)

    def _find_on_device(
        self, table: BlockTable, key: CacheKey, ids: Sequence[int], limit: int
    ) -> None:
        node = table.node
        while node is not None and not node.alive:
            node = node.parent
        node = self._cache.walk(node or self._cache.root(key), ids, limit)
        table.node, table.tail = node, self._cache.beginning(node, ids, limit)

    def _find_below(self, table: BlockTable, key: CacheKey, ids: Sequence[int], limit: int) -> None:
        table.below_tokens = 0
        if self._cold is None:
            return
        host = self._cold.cache
        if table.root is None or not table.root.alive:
            table.root = host.root(key)
        seen = table.seen if table.seen is not None and table.seen.alive else table.root
        table.seen = host.walk(seen, ids)
        if table.large:
            in_place = min(table.seen.depth, limit // host.tokens) * host.tokens
            if self.tiers is not None:
                fetched = self.tiers.worth.fetching(table.seen, ids, table.disk_keys, limit)
                in_place = max(in_place, fetched)
            if in_place > self.on_device(table):
                table.below_tokens = in_place
        elif self.tiers is not None:
            table.below_tokens = self.tiers.worth.loading(
                table.seen, ids, table.disk_keys, self.on_device(table), limit
            )

    def waits(self, table: BlockTable) -> bool:
        """Whether part of what was found has to be brought before the owner can use it."""
        if not table.large or table.seen is None or self._cold is None:
            return table.below_tokens > 0
        return table.below_tokens > table.seen.depth * self._cold.cache.tokens

    def in_place(self, table: BlockTable) -> list[int]:
        """The superblocks that a large owner would start from."""
        if self._cold is None or table.seen is None or not table.in_place:
            return []
        host = self._cold.cache
        return host.handles(table.seen)[: table.below_tokens // host.tokens]

    def frontier(self, table: BlockTable, ids: Sequence[int]) -> Frontier | None:
        """Where the owner's next whole block belongs; None when its tokens are not all known, or
        nobody is to find it."""
        if table.large or table.node is None or not table.node.alive:
            return None
        start = table.node.depth * self._cache.block_size
        block = tuple(ids[start : start + self._cache.block_size])
        return (table.node, block) if len(block) == self._cache.block_size else None

    def enter(self, table: BlockTable, count: int) -> None:
        """The owner starts from the first `count` superblocks of those last seen."""
        node, path = table.seen, []
        while node is not None and node.parent is not None:
            path.append(node)
            node = node.parent
        table.path = path[::-1][:count]
        table.named = count
        if path and self._cold is not None:
            self._cold.cache.touch(path[0])

    def offered(self, table: BlockTable) -> int:
        """Superblocks of the owner's path that were filled or offered, and are in the tree."""
        return len(table.path) if table.path and table.path[-1].alive else 0

    def path(self, table: BlockTable, ids: Sequence[int], count: int) -> list[HostNode]:
        """The owner's first `count` superblocks in the host's tree, made where they are not there:
        whoever asks fills or offers the new ones. Empty when nobody is to find them."""
        if self._cold is None or table.root is None or not table.root.alive:
            return []
        host = self._cold.cache
        if not self.offered(table):
            table.path.clear()
        while len(table.path) < count:
            parent = table.path[-1] if table.path else table.root
            table.path.append(host.child(parent, host.ids_at(ids, len(table.path))))
        return table.path
