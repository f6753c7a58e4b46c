"""Which host superblocks are free, filled, and worth keeping.

Owns: reference counts of superblocks, which of them hold valid KV, and the eviction of those that
nobody references, least recently used first.
Does not own: what a superblock means (the prefix cache or a sequence says), its memory
(host_memory.py), or copies (transfer.py). Imports no torch.

Life of a superblock (DESIGN idea 5), with the verbs of BlockPool:

    reserve     one reference for the caller; nothing may be read yet
    commit      `filled` blocks are valid from now on
    free        one reference less. The last one gone: a committed superblock is *cached*, and may
                be evicted by a later reserve; one never committed, or dropped, is free
    drop        nobody will ask for it again: it is not cached when the last reference goes

Every reservation has a number that is never given again. An index that still names an evicted
superblock therefore finds nothing, never another one's KV.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass


class HostPoolError(Exception):
    """Superblocks are used against their state: the caller's books disagree with the pool's."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """What `HostPool.reserve` did."""

    superblocks: tuple[int, ...]
    """Their numbers, in order."""
    evicted: tuple[int, ...]
    """Superblocks that lost their KV to make room: whoever finds KV by them must forget them."""


@dataclass(frozen=True, slots=True)
class HostPoolStats:
    """A snapshot in superblocks; counters count since construction."""

    total: int
    used: int
    """Referenced by somebody."""
    cached: int
    """Valid, referenced by nobody."""
    evictions: int


@dataclass(slots=True)
class _Entry:
    slot: int
    refs: int = 1
    filled: int = 0
    """Valid blocks; 0 until committed."""
    dropped: bool = False


class HostPool:
    """Accounting for `num_superblocks` superblocks in slots 0 .. num_superblocks - 1.

    Raises ValueError for a pool of none: a host tier that holds nothing is no host tier.
    """

    def __init__(self, num_superblocks: int) -> None:
        if num_superblocks < 1:
            raise ValueError(f"num_superblocks must be at least 1, got {num_superblocks}")
        self.num_superblocks = num_superblocks
        self._free_slots = list(range(num_superblocks))
        self._entries: dict[int, _Entry] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._next = 0
        self._evictions = 0

    @property
    def num_free(self) -> int:
        return len(self._free_slots)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_superblocks - self.num_free - self.num_cached

    @property
    def num_available(self) -> int:
        """What a reservation can get: free, or cached and evicted for it."""
        return self.num_free + self.num_cached

    @property
    def next_evicted(self) -> int | None:
        """The superblock that the next reservation of one would evict; None if it needs not."""
        return None if self._free_slots else next(iter(self._cached), None)

    @property
    def stats(self) -> HostPoolStats:
        return HostPoolStats(
            self.num_superblocks,
            self.num_used,
            self.num_cached,
            self._evictions,
        )

    def reserve(self, count: int) -> Reserved | None:
        """`count` superblocks with one reference each, all or nothing: None when fewer are free or
        cached, with nothing changed."""
        if count > self.num_available:
            return None
        evicted = tuple(self._evict_oldest() for _ in range(count - self.num_free))
        found = []
        for _ in range(count):
            # Low slots first keeps those of one reservation next to each other where it can.
            self._entries[self._next] = _Entry(heapq.heappop(self._free_slots))
            found.append(self._next)
            self._next += 1
        return Reserved(tuple(found), evicted)

    def commit(self, superblock: int, filled: int) -> None:
        """The first `filled` blocks are valid; raises HostPoolError when they were before."""
        entry = self._entry(superblock)
        if filled < 1:
            raise ValueError(f"superblock {superblock} is committed with {filled} blocks")
        if entry.filled:
            raise HostPoolError(f"superblock {superblock} is committed twice")
        entry.filled = filled

    def share(self, superblocks: Iterable[int]) -> None:
        """One more reference on each. A cached superblock is in use again."""
        for superblock in superblocks:
            entry = self._entry(superblock)
            entry.refs += 1
            self._cached.pop(superblock, None)

    def free(self, superblocks: Iterable[int]) -> None:
        """One reference less on each."""
        for superblock in superblocks:
            entry = self._entry(superblock)
            if entry.refs < 1:
                raise HostPoolError(f"superblock {superblock} is freed twice")
            entry.refs -= 1
            if entry.refs == 0:
                self._settle(superblock, entry)

    def drop(self, superblock: int) -> None:
        """Nobody will look for this KV again; its memory is free once nobody references it. Unknown
        numbers (evicted ones) are ignored."""
        entry = self._entries.get(superblock)
        if entry is not None:
            entry.dropped = True
            if entry.refs == 0:
                self._cached.pop(superblock)
                self._settle(superblock, entry)

    def touch(self, superblocks: Iterable[int]) -> None:
        """Used just now. Of a path in a tree, name the deepest first: the root is evicted last."""
        for superblock in superblocks:
            if superblock in self._cached:
                self._cached.move_to_end(superblock)

    def filled(self, superblock: int) -> int:
        """Valid blocks of a superblock: 0 when it was evicted, or its copy has not ended."""
        entry = self._entries.get(superblock)
        return 0 if entry is None else entry.filled

    def keeps(self, superblock: int) -> bool:
        """Whether a superblock holds KV, and will until it is evicted."""
        entry = self._entries.get(superblock)
        return entry is not None and entry.filled > 0 and not entry.dropped

    def slot(self, superblock: int) -> int:
        """Where it lies in host memory. Raises HostPoolError when it was evicted."""
        return self._entry(superblock).slot

    def ref_count(self, superblock: int) -> int:
        """0 for cached and for unknown numbers."""
        entry = self._entries.get(superblock)
        return 0 if entry is None else entry.refs

    def _entry(self, superblock: int) -> _Entry:
        entry = self._entries.get(superblock)
        if entry is None:
            raise HostPoolError(f"superblock {superblock} is not there: it was evicted or freed")
        return entry

    def _settle(self, superblock: int, entry: _Entry) -> None:
        if entry.filled and not entry.dropped:
            self._cached[superblock] = None
            return
        del self._entries[superblock]
        heapq.heappush(self._free_slots, entry.slot)

    def _evict_oldest(self) -> int:
        superblock, _ = self._cached.popitem(last=False)
        entry = self._entries.pop(superblock)
        heapq.heappush(self._free_slots, entry.slot)
        self._evictions += 1
        return superblock

    def references(self) -> dict[int, int]:
        """Of every superblock that has some."""
        return {superblock: entry.refs for superblock, entry in self._entries.items() if entry.refs}

    def check_invariants(self) -> None:
        slots = sorted([entry.slot for entry in self._entries.values()] + self._free_slots)
        if slots != list(range(self.num_superblocks)):
            raise AssertionError(f"slots are lost or given twice: {slots}")
        for superblock, entry in self._entries.items():
            cached = superblock in self._cached
            if cached != (entry.refs == 0):
                raise AssertionError(f"superblock {superblock}: {entry.refs} refs, cached {cached}")
            if cached and (entry.dropped or not entry.filled):
                raise AssertionError(f"superblock {superblock} is cached but holds nothing")
        if set(self._cached) - set(self._entries):
            raise AssertionError("a superblock is cached that is not there")
