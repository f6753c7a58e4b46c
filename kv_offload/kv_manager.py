"""Which blocks hold which tokens of which sequence.

Owns: block tables, copy-on-write, what a sequence takes from the prefix cache and gives to it, and
the answers "does it ever fit" and "does it fit now". Does not own: free lists (block_pool.py), the
cache's tree (radix_cache.py), what lies on the host (cold_prefix.py), KV bytes (kv_cache.py), or
how far a sequence may advance (the scheduler). Imports no torch.

Life of a token's KV: `reserve` gives its position a block that nobody else writes → the step
computes it (use) → the sequence's counter passes it (commit). A failed or preempted step is undone
by `free`; the counter never passed, so nobody can read what was not written. Only `commit` and
`seal` put blocks into the cache, up to that counter: what was computed and not kept is never found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kv_offload.block_pool import BlockPool, OutOfBlocksError
from kv_offload.cold_prefix import BlockStore, ColdPrefixes
from kv_offload.host_pool import HostPool
from kv_offload.radix_cache import BlockIds, CacheKey, Node, RadixCache

Frontier = tuple[Node, BlockIds]
"""The place of a block that is not in the cache yet: owners with equal ones need the same KV."""

_MOST_AHEAD_BLOCKS = 32
"""Idle blocks that are evicted beyond what is needed, so that a growing sequence finds a run."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the whole of block `source` over block `target` before the step's first write. Copies
    of a step are made in their order: a source may be the target of a later one."""

    source: int
    target: int


@dataclass(slots=True)
class _Table:
    blocks: list[int] = field(default_factory=list)
    runs: list[tuple[int, int]] = field(default_factory=list)
    """`blocks` as (first block, count) runs, kept in step with it."""
    node: Node | None = None
    """The deepest node on the owner's path whose block is in `blocks`, or will be when the owner
    starts; None before the first look-up. One that has left the tree while the owner held its block
    was cleared: what is computed after it must not be found."""
    tail: tuple[Node, int] | None = None
    """Of an owner without blocks: a node that holds its next tokens, and how many, to be copied."""
    version: int = -1
    """The cache's version at the last look-up."""
    large: bool = False
    """Whether its beginning may leave the device. What it computes is not put into the cache: a
    node's ancestors are used as long as it is, and these could then not leave."""


class KVManager:
    """Block tables over one device pool; owners are sequence ids."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = False,
        host: HostPool | None = None,
        chunk_tokens: int = 512,
    ) -> None:
        """`host` takes the beginnings of sequences that the pool cannot hold (cold_prefix.py), to
        which a step adds up to `chunk_tokens` tokens."""
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.cold = (
            None if host is None else ColdPrefixes(host, num_blocks, block_size, chunk_tokens)
        )
        self.cache = RadixCache(self.pool, block_size)
        self.prefix_caching = prefix_caching
        self._tables: dict[int, _Table] = {}

    @property
    def capacity_tokens(self) -> int:
        """Longest sequence that can ever be held."""
        held = self.pool.num_blocks * self.block_size
        return held if self.cold is None else max(held, self.cold.capacity_tokens)

    @property
    def num_available(self) -> int:
        """Blocks that can be had: free ones, and those that only the cache holds."""
        return self.pool.num_free + self.cache.num_idle

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def held_blocks(self, owner: int) -> int:
        """On the device."""
        table = self._tables.get(owner)
        return len(table.blocks) if table else 0

    def held_tokens(self, owner: int) -> int:
        """How many tokens have a place, on the device or on the host."""
        return (self._cold_blocks(owner) + self.held_blocks(owner)) * self.block_size

    def lacking_blocks(self, owner: int, num_tokens: int, reach_tokens: int) -> int:
        """Device blocks that the owner will still ask for until it has `num_tokens` tokens."""
        return max(0, self._device_blocks(num_tokens, reach_tokens) - self.held_blocks(owner))

    def device_bound(self, reach_tokens: int) -> int | None:
        """Most device blocks of a sequence that may reach `reach_tokens`; None when the pool is the
        only bound."""
        large = self.cold is not None and self.cold.is_large(reach_tokens)
        return self.cold.quota_blocks if self.cold is not None and large else None

    def _device_blocks(self, num_tokens: int, reach_tokens: int) -> int:
        """Device blocks of a sequence of `num_tokens` tokens that may reach `reach_tokens`."""
        need, bound = self.blocks_for(num_tokens), self.device_bound(reach_tokens)
        return need if bound is None else min(need, bound)

    def runs(self, owner: int) -> tuple[tuple[int, int], ...]:
        """The block table as (first block, number of blocks) runs in token order, after the cold
        beginning."""
        return tuple(self._tables[owner].runs)

    def cold_slots(self, owner: int) -> tuple[int, ...]:
        """Host slots of the superblocks that hold the owner's beginning."""
        return () if self.cold is None else self.cold.slots(owner)

    def cold_superblocks(self, owner: int) -> tuple[int, ...]:
        """Their numbers in the host's pool, in the order of `cold_slots`."""
        return () if self.cold is None else self.cold.superblocks(owner)

    def _cold_blocks(self, owner: int) -> int:
        return 0 if self.cold is None else self.cold.num_blocks(owner)

    # -- what the cache has -------------------------------------------------------------------

    def look_up(
        self, owner: int, key: CacheKey, ids: Sequence[int], limit: int, reach_tokens: int = 0
    ) -> int:
        """How many of the first `limit` tokens of an owner without blocks the cache has KV of.

        Nothing is held by this: a later look-up may find more, or less. `reserve` takes what the
        last one found. `ids` of one owner stay the same; it may become `reach_tokens` long.
        """
        if self.cold is not None and self.cold.is_large(reach_tokens):
            self._tables.setdefault(owner, _Table()).large = True
            # A hit is taken on the device, where the sequence needs room to go on as well.
            limit = min(limit, self.cold.quota_blocks // 2 * self.block_size)
        if not self.prefix_caching:
            return 0
        table = self._tables.setdefault(owner, _Table())
        if table.blocks:
            raise ValueError(f"sequence {owner} has blocks; it is too late to look it up")
        node = table.node
        if node is None or table.version != self.cache.version:
            while node is not None and not node.alive:
                node = node.parent
            node = self.cache.walk(node or self.cache.root(key), ids, limit)
            table.node, table.tail = node, self.cache.beginning(node, ids, limit)
            table.version = self.cache.version
        return node.depth * self.block_size + (table.tail[1] if table.tail else 0)

    def frontier(self, owner: int, ids: Sequence[int]) -> Frontier | None:
        """Where the owner's next whole block belongs; None when its tokens are not all known, or
        nobody is to find it."""
        table = self._tables.get(owner)
        if table is None or table.large or table.node is None or not table.node.alive:
            return None
        start = table.node.depth * self.block_size
        block = tuple(ids[start : start + self.block_size])
        return (table.node, block) if len(block) == self.block_size else None

    def can_start(
        self,
        owner: int,
        num_tokens: int,
        *,
        promised_blocks: int,
        without: Iterable[int] = (),
        reach_tokens: int = 0,
    ) -> bool:
        """Whether an owner without blocks that may become `reach_tokens` long finds room for
        `num_tokens` tokens beside `promised_blocks` for others, were the owners `without` gone."""
        without = tuple(without)
        if (
            self.cold is not None
            and self.cold.is_large(reach_tokens)
            and not self.cold.has_room(owner, reach_tokens, without)
        ):
            return False
        gone = [self._tables[o] for o in without if o in self._tables]
        leaving = Counter(block for table in gone for block in table.blocks)
        freed = sum(self.cache.users(block) == count for block, count in leaving.items())
        table = self._tables.get(owner)
        node = table.node if table else None
        while node is not None and node.depth:
            if node.alive and self.cache.users(node.block) > leaving[node.block]:
                break
            node = node.parent
        kept = node.depth if node is not None else 0
        need = promised_blocks + self._device_blocks(num_tokens, reach_tokens) - kept
        return need <= self.num_available + freed

    # -- reserve, commit ----------------------------------------------------------------------

    def reserve(
        self, owner: int, start: int, end: int, *, reach_tokens: int, known_tokens: int = 0
    ) -> tuple[BlockCopy | BlockStore, ...] | None:
        """Makes positions [start, end) writable by `owner` alone, all or nothing.

        Positions before `start` keep their KV; those of an owner without blocks are what its last
        look-up found. Returns the copies to make before the step (a block shared with another owner
        is replaced by a copy; the beginning of a large sequence goes to the host), or None, with
        no block changed, when there is too little room (a large sequence's promise is kept).
        `known_tokens` is how long the sequence is, `reach_tokens` how long it may become.
        """
        table = self._tables.setdefault(owner, _Table())
        reach = self.blocks_for(max(reach_tokens, end))
        wish = self.blocks_for(min(reach_tokens, known_tokens))
        if self.cold is not None and self.cold.is_large(reach_tokens):
            table.large = True
            # Kept also when there is no room now: who asked first is not overtaken for ever.
            self.cold.promise(owner, reach_tokens)
            reach = wish = self.cold.quota_blocks
        if not table.blocks and start:
            return self._start(owner, table, start, end, reach=reach, wish=wish)
        stores = self._cool(owner, table, start, end, reach_tokens)
        if stores is None:
            return None
        cold = self._cold_blocks(owner)
        shared = self._shared(table, start // self.block_size - cold)
        grow = max(0, self.blocks_for(end) - cold - len(table.blocks))
        if not self._make_room(grow + len(shared), wish - len(table.blocks)):
            if stores:
                raise AssertionError("a superblock left the device, but its room was not enough")
            if not table.blocks and table.node is None:
                del self._tables[owner]
            return None
        kept = start - cold * self.block_size
        copies = tuple(self._unshare(owner, table, i, kept) for i in shared)
        self._grow(owner, table, grow, reach)
        return (*stores, *(c for c in copies if c is not None))

    def _shared(self, table: _Table, first: int) -> list[int]:
        """Indices from `first` on of blocks that somebody else has, too."""
        return [
            i for i in range(first, len(table.blocks)) if self.pool.ref_count(table.blocks[i]) > 1
        ]

    def _cool(
        self, owner: int, table: _Table, start: int, end: int, reach_tokens: int
    ) -> tuple[BlockStore, ...] | None:
        """Moves the oldest superblocks of a large sequence to the host, as many as take it back to
        its quota; None, with nothing changed, when that would not do."""
        if self.cold is None or not self.cold.is_large(reach_tokens):
            return ()
        size = self.cold.size
        done = start // (size * self.block_size) - self._cold_blocks(owner) // size
        grow = max(0, self.blocks_for(end) - self._cold_blocks(owner) - len(table.blocks))
        excess = len(table.blocks) + grow - self.cold.quota_blocks
        count = -(-excess // size) if excess > 0 else 0
        if count and table.node is not None:
            # A hit leaves whole, see _Table.large; it is short enough for that (look_up).
            count = max(count, -(-table.node.depth // size))
        count = min(done, count)
        leaving = table.blocks[: count * size]
        freed = sum(self.cache.users(block) == 1 for block in leaving)
        shared = self._shared(table, start // self.block_size - self._cold_blocks(owner))
        room = self.num_available + freed
        if grow + len(shared) > room or count > self.cold.host.num_available:
            return None
        stores: list[BlockStore] = []
        for i in range(count):
            store = self.cold.push(owner, leaving[i * size : (i + 1) * size])
            assert store is not None
            stores.append(store)
        if count:
            table.blocks = table.blocks[count * size :]
            table.runs = _runs(table.blocks)
            table.node = None
            self.cache.give_up(leaving)
        return tuple(stores)

    def _start(
        self, owner: int, table: _Table, start: int, end: int, *, reach: int, wish: int
    ) -> tuple[BlockCopy | BlockStore, ...] | None:
        """The first blocks of an owner: those of the cache, then its own."""
        node, tail = table.node, table.tail
        found = 0 if node is None else node.depth * self.block_size + (tail[1] if tail else 0)
        if node is None or not node.alive or found != start or (tail and not tail[0].alive):
            raise ValueError(f"sequence {owner} starts at {start}, but the cache has {found} of it")
        blocks = node.path()
        self.cache.take(blocks)
        if tail:
            self.cache.touch(tail[0])
        grow = self.blocks_for(end) - len(blocks)
        if not self._make_room(grow, wish - len(blocks)):
            self.cache.give_up(blocks)
            return None
        table.blocks, table.runs, table.tail = list(blocks), _runs(blocks), None
        self._grow(owner, table, grow, reach)
        # What is copied may just have been evicted: copies come before writes, in their order, and
        # a block that becomes its own copy has what it needs.
        if tail is None or tail[0].block == table.blocks[len(blocks)]:
            return ()
        return (BlockCopy(tail[0].block, table.blocks[len(blocks)]),)

    def _make_room(self, need: int, wish: int) -> bool:
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

    def _grow(self, owner: int, table: _Table, count: int, reach: int) -> None:
        if not count:
            return
        after = table.blocks[-1] if table.blocks else None
        ahead = max(count, reach - len(table.blocks))
        for block in self.pool.allocate(count, owner=owner, after=after, reach=ahead):
            _append(table, block)

    def _unshare(self, owner: int, table: _Table, index: int, start: int) -> BlockCopy | None:
        old = table.blocks[index]
        (new,) = self.pool.allocate(1, owner=owner, after=None, reach=1)
        self.cache.give_up([old])
        table.blocks[index] = new
        table.runs = _runs(table.blocks)
        holds_kept_tokens = index * self.block_size < start
        return BlockCopy(old, new) if holds_kept_tokens else None

    def commit(self, owner: int, ids: Sequence[int], num_tokens: int) -> None:
        """The KV of the owner's first `num_tokens` tokens is valid: from now on others find its
        full blocks. Where the cache has the same KV already, the owner's copy is given back."""
        table = self._tables[owner]
        node, size = table.node, self.block_size
        if table.large or node is None or not node.alive:
            return
        doubled = False
        for index in range(node.depth, num_tokens // size):
            own = table.blocks[index]
            node = self.cache.insert(node, tuple(ids[index * size : (index + 1) * size]), own)
            if node.block != own:
                self.cache.take([node.block])
                self.cache.give_up([own])
                table.blocks[index] = node.block
                doubled = True
        table.node = node
        if doubled:
            table.runs = _runs(table.blocks)

    def seal(self, owner: int, ids: Sequence[int], num_tokens: int) -> None:
        """The owner will write no more: also its last block, which is not full, can be found."""
        self.commit(owner, ids, num_tokens)
        table = self._tables[owner]
        if table.large or table.node is None or not table.node.alive:
            return
        start = table.node.depth * self.block_size
        if num_tokens - start >= self.cache.least_copied_tokens:
            last = table.blocks[table.node.depth]
            self.cache.insert(table.node, tuple(ids[start:num_tokens]), last)

    # -- forks and endings --------------------------------------------------------------------

    def fork(self, parent: int, child: int) -> None:
        """`child` starts with the parent's blocks, shared; whoever writes a shared block first
        gets a copy of its own."""
        if child in self._tables:
            raise ValueError(f"sequence {child} already has blocks")
        table = self._tables[parent]
        self.pool.share(table.blocks)
        if table.large:
            raise ValueError(f"sequence {parent} is larger than the device; it cannot be forked")
        self._tables[child] = _Table(list(table.blocks), list(table.runs), table.node)

    def free(self, owner: int) -> None:
        """Gives back everything the owner holds; unknown owners hold nothing."""
        table = self._tables.pop(owner, None)
        self.pool.release_claims(owner)
        if self.cold is not None:
            self.cold.free(owner)
        if table:
            self.cache.give_up(table.blocks)

    def check_invariants(self) -> None:
        self.pool.check_invariants()
        self.cache.check_invariants()
        if self.cold is not None:
            self.cold.check_invariants()
        counts: Counter[int] = Counter()
        for table in self._tables.values():
            if len(set(table.blocks)) != len(table.blocks):
                raise AssertionError("a table names a block twice")
            if table.runs != _runs(table.blocks):
                raise AssertionError("a table's runs do not match its blocks")
            counts.update(table.blocks)
            node = table.node
            held = table.blocks and node is not None and node.alive
            if held and node is not None and table.blocks[: node.depth] != node.path():
                raise AssertionError("a table's blocks are not those of its path in the cache")
        for block in range(self.pool.num_blocks):
            if self.cache.users(block) != counts[block]:
                raise AssertionError(
                    f"block {block}: {self.cache.users(block)} users by its references, "
                    f"{counts[block]} tables name it"
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


__all__ = ["BlockCopy", "BlockStore", "KVManager", "OutOfBlocksError"]
