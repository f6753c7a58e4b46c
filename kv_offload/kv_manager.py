"""Which blocks hold which tokens of which sequence.

Owns: who has which table, what a sequence takes from the prefix cache, and the answers "does it
ever fit" and "does it fit now". Does not own: how tables change (table_blocks.py), what is found
(prefix_lookup.py) and what becomes findable (prefix_commit.py), what lies on the host
(cold_prefix.py) and how it comes and goes (lower_tiers.py), KV bytes (kv_cache.py), or how far a
sequence may advance (the scheduler). Imports no torch.

Life of a token's KV: `reserve` gives its position a block that nobody else writes → the step
computes it (use) → the sequence's counter passes it (commit). A failed or preempted step is undone
by `free`; the counter never passed, so nobody can read what was not written. Only `commit` and
`seal` put blocks into the cache, up to that counter: what was computed and not kept is never found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kv_offload.block_pool import BlockPool, OutOfBlocksError
from kv_offload.block_table import BlockCopy, BlockTable, Sources, runs_of
from kv_offload.cold_prefix import BlockStore, ColdPrefixes
from kv_offload.host_cache import HostCache
from kv_offload.host_pool import HostPool
from kv_offload.kv_events import KVEventSink
from kv_offload.lower_tiers import LowerTiers
from kv_offload.prefix_commit import PrefixCommit
from kv_offload.prefix_lookup import Frontier, PrefixLookup
from kv_offload.radix_cache import CacheKey, HeldBlocks, RadixCache
from kv_offload.recall import Loaded
from kv_offload.recall_cost import CostModel
from kv_offload.superblock import SUPERBLOCK_TOKENS
from kv_offload.table_blocks import TableBlocks
from kv_offload.transfer import Transfers


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
        pool: BlockPool | None = None,
        superblock_tokens: int = SUPERBLOCK_TOKENS,
        events: KVEventSink | None = None,
    ) -> None:
        """`host` takes the beginnings of sequences that the pool cannot hold (cold_prefix.py), to
        which a step adds up to `chunk_tokens` tokens, and what is kept for later (`connect`), in
        superblocks of `superblock_tokens`. `pool`: of `num_blocks` free blocks; None makes one.
        `events` is told what can be found, on the device and on the host."""
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.block_size = block_size
        self.pool = pool or BlockPool(num_blocks)
        self.cold: ColdPrefixes | None = None
        if host is not None:
            index = HostCache(host, superblock_tokens, events)
            self.cold = ColdPrefixes(index, num_blocks, block_size, chunk_tokens)
        self.cache = RadixCache(self.pool, block_size, events)
        self.prefix_caching = prefix_caching
        self.tiers: LowerTiers | None = None
        self._tables: dict[int, BlockTable] = {}
        self._lookup = PrefixLookup(self.cache, self.cold)
        self._blocks = TableBlocks(self.pool, self.cache, self.cold, self._lookup)
        self._commit = PrefixCommit(self.cache, self.cold, self._lookup, self._tables.get)

    def connect(self, transfers: Transfers, cost: CostModel, bytes_per_token: int) -> None:
        """Makes host and disk levels of the prefix cache. `transfers` counts its references on
        blocks by `copied_blocks`. Without prefix caching it only knows them."""
        if self.cold is None:
            raise ValueError("there is no host tier to connect")
        self.tiers = LowerTiers(
            self.cold,
            transfers,
            cost,
            block_size=self.block_size,
            bytes_per_token=bytes_per_token,
        )
        if self.prefix_caching:
            self._lookup.tiers = self._commit.tiers = self.tiers

    @property
    def copied_blocks(self) -> HeldBlocks:
        """What Transfers must ask for references on the device's blocks."""
        return HeldBlocks(self.cache, self.pool)

    # -- asking --------------------------------------------------------------------------------

    @property
    def capacity_tokens(self) -> int:
        """Longest sequence that can ever be held."""
        held = self.pool.num_blocks * self.block_size
        return held if self.cold is None else max(held, self.cold.capacity_tokens)

    @property
    def num_available(self) -> int:
        """Blocks that can be had: free ones, and those that only the cache holds."""
        return self._blocks.num_available

    def blocks_for(self, num_tokens: int) -> int:
        return self._blocks.blocks_for(num_tokens)

    def held_blocks(self, owner: int) -> int:
        """On the device."""
        table = self._tables.get(owner)
        return len(table.blocks) if table else 0

    def held_tokens(self, owner: int) -> int:
        """How many tokens have a place, on the device or on the host."""
        return (self._blocks.cold_blocks(owner) + self.held_blocks(owner)) * self.block_size

    def cold_tokens(self, owner: int) -> int:
        """Of the owner's beginning, that lie on the host and are attended from there."""
        return self._blocks.cold_blocks(owner) * self.block_size

    def lacking_blocks(self, owner: int, num_tokens: int, reach_tokens: int) -> int:
        """Device blocks that the owner will still ask for until it has `num_tokens` tokens."""
        return max(0, self._device_blocks(num_tokens, reach_tokens) - self.held_blocks(owner))

    def device_bound(self, reach_tokens: int) -> int | None:
        """Most device blocks of a sequence that may reach `reach_tokens`; None when the pool is the
        only bound."""
        return self.cold.quota_blocks if self.cold and self._is_large(reach_tokens) else None

    def _is_large(self, reach_tokens: int) -> bool:
        return self.cold is not None and self.cold.is_large(reach_tokens)

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

    def sources(self, owner: int) -> Sources:
        """Where the KV came from that the owner found when it started."""
        table = self._tables.get(owner)
        return Sources() if table is None else table.sources

    def stored(self, owner: int) -> tuple[int, float]:
        """How many tokens of the beginning of what the owner computed lie on the host, where they
        can be found, and the seconds to bring them to the device; (0, 0.0) without a host tier."""
        table = self._tables.get(owner)
        if table is None or self.cold is None or self.tiers is None or not self.prefix_caching:
            return 0, 0.0
        host = self.cold.cache
        depth = 0
        for node in table.path:
            if not (node.alive and (node.pending or host.holds(node))):
                break
            depth += 1
        tokens = depth * host.tokens
        return tokens, self.tiers.worth.load_s(tokens) if tokens else 0.0

    # -- what the cache has --------------------------------------------------------------------

    def look_up(
        self, owner: int, key: CacheKey, ids: Sequence[int], limit: int, reach_tokens: int = 0
    ) -> int:
        """How many of the first `limit` tokens of an owner without blocks some tier has KV of.

        Nothing is held by this: a later look-up may find more, or less. `reserve`, or `load` where
        `wants_load` says so, takes what the last one found. `ids` of one owner stay the same; it
        may become `reach_tokens` long.
        """
        if self._is_large(reach_tokens):
            self._tables.setdefault(owner, BlockTable()).large = True
        if not self.prefix_caching:
            return 0
        table = self._tables.setdefault(owner, BlockTable())
        if table.blocks:
            raise ValueError(f"sequence {owner} has blocks; it is too late to look it up")
        return self._lookup.find(table, key, ids, limit)

    def frontier(self, owner: int, ids: Sequence[int]) -> Frontier | None:
        """Where the owner's next whole block belongs; None when its tokens are not all known, or
        nobody is to find it."""
        table = self._tables.get(owner)
        return None if table is None else self._lookup.frontier(table, ids)

    def wants_load(self, owner: int) -> bool:
        """Whether part of what the last look-up found has to be brought first: to the device, or
        from disk to the host, where a large owner uses it."""
        table = self._tables.get(owner)
        return table is not None and self._lookup.waits(table)

    def load_s(self, owner: int) -> float:
        """Seconds that `load` would take now, as fast as copies have been so far; 0 where nothing
        has to be brought."""
        table = self._tables.get(owner)
        if table is None or self.tiers is None or not self._lookup.waits(table):
            return 0.0
        have = 0 if table.large else self._lookup.on_device(table)
        return self.tiers.worth.recall_s(have, table.below_tokens, table.seen, large=table.large)

    def can_start(
        self,
        owner: int,
        num_tokens: int,
        *,
        promised_blocks: int,
        without: Iterable[int] = (),
        reach_tokens: int = 0,
        choices: int = 1,
    ) -> bool:
        """Whether an owner without blocks that may become `reach_tokens` long, `choices` times,
        finds room for `num_tokens` tokens beside `promised_blocks` for others, were the owners
        `without` gone."""
        without = tuple(without)
        table = self._tables.get(owner)
        if self.cold is not None and self.cold.is_large(reach_tokens):
            shared = [] if table is None else self._lookup.in_place(table)
            if not self.cold.has_room(
                owner, reach_tokens, num_tokens, choices, without=without, shared=shared
            ):
                return False
        gone = [self._tables[o] for o in without if o in self._tables]
        leaving = Counter(block for table in gone for block in table.blocks)
        freed = sum(self._blocks.would_be_free(block, count) for block, count in leaving.items())
        node = table.node if table is not None and table.starts_with else None
        while node is not None and node.depth:
            if node.alive and self.cache.users(node.block) > leaving[node.block]:
                break
            node = node.parent
        kept = node.depth if node is not None else 0
        need = promised_blocks + self._device_blocks(num_tokens, reach_tokens) - kept
        return need <= self.num_available + freed

    # -- reserve -------------------------------------------------------------------------------

    def has_place(self, owner: int, start: int, end: int) -> bool:
        """Whether positions [start, end) are writable by `owner` alone as things are: so it is for
        most tokens of an answer."""
        table = self._tables.get(owner)
        return table is not None and self._blocks.is_inside_last(table, start, end)

    def reserve(
        self,
        owner: int,
        start: int,
        end: int,
        *,
        reach_tokens: int,
        known_tokens: int = 0,
        choices: int = 1,
    ) -> tuple[BlockCopy | BlockStore, ...] | None:
        """Makes positions [start, end) writable by `owner` alone, all or nothing.

        Positions before `start` keep their KV; those of an owner without blocks are what its last
        look-up found. Returns the copies to make before the step (a block shared with another owner
        is replaced by a copy; the beginning of a large sequence goes to the host), or None, with
        no block changed, when there is too little room (a large sequence's promise is kept).
        `known_tokens` is how long the sequence is, `reach_tokens` how long it may become, and so
        each of the `choices` that are forked from it.
        """
        if self.has_place(owner, start, end):
            return ()
        table = self._tables.setdefault(owner, BlockTable())
        reach = self.blocks_for(max(reach_tokens, end))
        wish = self.blocks_for(min(reach_tokens, known_tokens))
        if self.cold is not None and self.cold.is_large(reach_tokens):
            table.large = True
            # Kept also when there is no room now: who asked first is not overtaken for ever.
            self.cold.promise(owner, reach_tokens, known_tokens, choices)
            reach = wish = self.cold.quota_blocks
        if start and not table.blocks and not self._blocks.cold_blocks(owner):
            return self._start(owner, table, start, end, reach=reach, wish=wish)
        stores = self._blocks.cool(owner, table, start, end)
        if stores is None:
            return None
        cold = self._blocks.cold_blocks(owner)
        shared = self._blocks.shared(table, start // self.block_size - cold)
        grow = max(0, self.blocks_for(end) - cold - len(table.blocks))
        if not self._blocks.make_room(grow + len(shared), wish - len(table.blocks)):
            if stores:
                raise AssertionError("a superblock left the device, but its room was not enough")
            if not table.blocks and table.node is None:
                del self._tables[owner]
            return None
        kept = start - cold * self.block_size
        copies = tuple(self._blocks.unshare(owner, table, i, kept) for i in shared)
        self._blocks.grow(owner, table, grow, reach)
        return (*stores, *(c for c in copies if c is not None))

    def load(
        self,
        owner: int,
        ids: Sequence[int],
        *,
        reach_tokens: int,
        known_tokens: int = 0,
        choices: int = 1,
    ) -> bool:
        """Gives an owner of which `wants_load` is true the blocks of all that its last look-up
        found, and asks for what is missing of them; False, with nothing changed, when there is no
        room. `poll` tells when it may go on, and from where."""
        table = self._tables[owner]
        if self.tiers is None or table.root is None:
            raise ValueError(f"there is nothing to load for sequence {owner}")
        end = table.below_tokens
        self._check_start(owner, table, end)
        if table.large and self.cold is not None:
            self.cold.promise(owner, reach_tokens, known_tokens, choices)
            table.node = table.tail = None
            count = end // self.cold.cache.tokens
            self.tiers.recalls.begin_in_place(owner, table.root, ids, count)
            return True
        wish = self.blocks_for(min(reach_tokens, known_tokens))
        reach = self.blocks_for(max(reach_tokens, end))
        if not self._blocks.take(owner, table, end, reach=reach, wish=wish):
            return False
        assert table.node is not None
        have = table.node.depth * self.block_size
        table.sources = Sources(device=have)
        self.tiers.recalls.begin(owner, table.root, ids, have, table.blocks[table.node.depth :])
        return True

    def poll(self) -> list[Loaded]:
        """Once per step: what happened to copies between tiers. An owner whose load has ended,
        well or not, may go on from the tokens that are told; their KV is valid."""
        ended = [] if self.tiers is None else self.tiers.poll()
        for loaded in ended:
            table = self._tables[loaded.owner]
            table.below_tokens = 0
            if loaded.handles and self.cold is not None:
                self.cold.take(loaded.owner, loaded.handles)
                self.cold.host.free(loaded.handles)
                table.seen = loaded.node
                self._lookup.enter(table, len(loaded.handles))
                host = loaded.tokens - loaded.from_disk
                table.sources = Sources(host=host, disk=loaded.from_disk)
                continue
            keep = loaded.tokens // self.block_size
            if keep < len(table.blocks):
                leaving = table.blocks[keep:]
                table.set_blocks(table.blocks[:keep])
                self.cache.give_up(leaving)
            device = table.sources.device
            host = loaded.tokens - device - loaded.from_disk
            table.sources = Sources(device, host, loaded.from_disk)
        return ended

    def start_loads(self) -> None:
        """The copies that `reserve` returned are issued: what `load` asked for may overwrite the
        blocks that they read. Without this call it starts with the next `poll` or `wait`."""
        if self.tiers is not None:
            self.tiers.transfers.start_loads()

    @property
    def copying(self) -> bool:
        """Whether copies between tiers are under way or about to start."""
        return self.tiers is not None and self.tiers.busy

    def wait(self, timeout_s: float) -> None:
        """Sleeps until `poll` may have something to say, when there is nothing else to do."""
        if self.tiers is not None:
            self.tiers.wait(timeout_s)

    def close(self) -> None:
        """Ends all copies; nothing is asked of this afterwards."""
        if self.tiers is not None:
            self.tiers.close()

    def _check_start(self, owner: int, table: BlockTable, start: int) -> None:
        found, node, tail = self._lookup.tokens(table), table.node, table.tail
        gone = node is None or not node.alive or (tail is not None and not tail[0].alive)
        if found != start or (gone and not table.in_place):
            raise ValueError(f"sequence {owner} starts at {start}, but the cache has {found} of it")

    def _start(
        self, owner: int, table: BlockTable, start: int, end: int, *, reach: int, wish: int
    ) -> tuple[BlockCopy | BlockStore, ...] | None:
        """The first blocks of an owner: those of the cache, then its own."""
        self._check_start(owner, table, start)
        if self.wants_load(owner):
            raise ValueError(f"the KV of sequence {owner} has to be loaded first")
        if table.in_place:
            return self._blocks.start_in_place(owner, table, end, reach=reach, wish=wish)
        tail = table.tail
        if tail:
            self.cache.touch(tail[0])
        if not self._blocks.take(owner, table, end, reach=reach, wish=wish):
            return None
        table.tail, table.sources = None, Sources(device=start)
        # What is copied may just have been evicted: copies come before writes, in their order, and
        # a block that becomes its own copy has what it needs.
        index = start // self.block_size
        if tail is None or tail[0].block == table.blocks[index]:
            return ()
        return (BlockCopy(tail[0].block, table.blocks[index]),)

    # -- commit, forks and endings -------------------------------------------------------------

    def commit(self, owner: int, ids: Sequence[int], num_tokens: int) -> None:
        """The KV of the owner's first `num_tokens` tokens is valid: from now on others find its
        full blocks. Where the cache has the same KV already, the owner's copy is given back."""
        self._commit.commit(owner, self._tables[owner], ids, num_tokens)

    def seal(self, owner: int, ids: Sequence[int], num_tokens: int) -> None:
        """The owner will write no more: also its last block, which is not full, can be found."""
        self._commit.seal(owner, self._tables[owner], ids, num_tokens)

    def fork(self, parent: int, child: int) -> None:
        """`child` starts with the parent's blocks, shared; whoever writes a shared block first
        gets a copy of its own."""
        if child in self._tables:
            raise ValueError(f"sequence {child} already has blocks")
        table = self._tables[parent]
        self.pool.share(table.blocks)
        self._tables[child] = table.fork()
        if table.large and self.cold is not None:
            self.cold.fork(parent, child)

    def free(self, owner: int) -> None:
        """Gives back everything the owner holds; unknown owners hold nothing."""
        table = self._tables.pop(owner, None)
        self.pool.release_claims(owner)
        if self.tiers is not None:
            self.tiers.recalls.cancel(owner)
        if self.cold is not None:
            self.cold.free(owner)
        if table:
            self.cache.give_up(table.blocks)

    def clear(self, tenant: str | None = None) -> None:
        """Forgets what requests have left, of one tenant or of all, on every tier. Sequences that
        run keep theirs, but nobody finds it any more."""
        self.cache.clear(tenant)
        if self.tiers is not None:
            self.tiers.clear(tenant)
        elif self.cold is not None:
            self.cold.cache.clear(tenant)

    def check_invariants(self) -> None:
        self.pool.check_invariants()
        self.cache.check_invariants()
        if self.cold is not None:
            self.cold.check_invariants()
            self.cold.cache.check_invariants()
        held: Counter[int] = Counter()
        if self.tiers is not None:
            self.tiers.check_invariants()
            held = self.tiers.transfers.held_blocks()
        counts: Counter[int] = Counter()
        for table in self._tables.values():
            if len(set(table.blocks)) != len(table.blocks):
                raise AssertionError("a table names a block twice")
            if table.runs != runs_of(table.blocks):
                raise AssertionError("a table's runs do not match its blocks")
            counts.update(table.blocks)
            node = table.node
            held_path = table.blocks and node is not None and node.alive
            if held_path and node is not None and table.blocks[: node.depth] != node.path():
                raise AssertionError("a table's blocks are not those of its path in the cache")
        for block in range(self.pool.num_blocks):
            if self.cache.users(block) != counts[block] or self.cache.holds(block) != held[block]:
                raise AssertionError(
                    f"block {block}: {self.cache.users(block)} users and {self.cache.holds(block)} "
                    f"copies by its references, {counts[block]} tables and {held[block]} tickets "
                    "name it"
                )


__all__ = ["BlockCopy", "BlockStore", "Frontier", "KVManager", "OutOfBlocksError", "Sources"]
