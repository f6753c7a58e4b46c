"""Which rows of the embedding storage belong to which image, and whether they may be read.

Owns: row allocation in granules, who holds an image's rows, single flight, eviction of images
that nobody holds, the epoch of the vision stage, and quarantine. The language stage owns the one
instance; nothing here is shared or locked.
Does not own: the rows' memory (embedding_storage.py), the work (stage.py), or requests: a holder
is any hashable name. Imports no torch.

Life of an entry (DESIGN idea 5: reserve, use, commit):

    acquire -> START      rows reserved, the caller submits an EncodeJob
    mark_ready            committed: rows are valid and stay so until evicted
    mark_failed           rolled back: rows are free, holders are told
    release               the last holder gone: a ready entry is cached, one in flight waits for its
                          reply, because somebody may still be writing into its rows
    new_epoch             the vision stage is a new process: nobody writes into rows any more, and
                          what was in flight is submitted again, or dropped when nobody holds it
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field

CRASHES_TO_QUARANTINE = 2
"""An image that was in flight at this many crashes of the vision stage is not tried again."""
MAX_SUSPECTS = 1024
"""Keys whose crashes are remembered; the oldest is forgotten first."""


class Acquired(enum.Enum):
    """What `EmbeddingArena.acquire` found or did."""

    READY = "ready"
    """The rows are valid; the holder is counted."""
    PENDING = "pending"
    """Another job fills the rows; the holder is counted and waits."""
    START = "start"
    """Rows were reserved by this call; the caller must submit the job. The holder is counted."""
    FULL = "full"
    """No room, even after evicting everything that nobody holds. Nothing changed."""
    QUARANTINED = "quarantined"
    """The image was in flight at repeated crashes; it is not tried again. Nothing changed."""


@dataclass(frozen=True, slots=True)
class ArenaStats:
    """A snapshot. Rows are counted in whole granules; counters count since construction."""

    rows_total: int
    rows_used: int
    """Rows held by someone or being written."""
    rows_cached: int
    """Rows that are valid but held by nobody."""
    queries: int
    """Holders that asked for an image and got it, or its promise."""
    hits: int
    """Queries that needed no new encoding."""
    encodes: int
    """Encodings that were committed."""
    evictions: int


@dataclass(slots=True)
class _Entry:
    num_rows: int
    granules: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]
    ready: bool = False
    holders: set[Hashable] = field(default_factory=set)


class ArenaInvariantError(AssertionError):
    """The arena's own books disagree: a bug here, never a user's fault."""


class EmbeddingArena:
    """Accounting for `num_rows` rows of embedding storage, in granules of `granule` rows.

    Args:
        num_rows: rows of the storage tensor; the last granule may be shorter.
        granule: rows per allocation unit; an image wastes less than one granule.

    Raises:
        ValueError: a size is not positive.
    """

    def __init__(self, num_rows: int, granule: int = 16) -> None:
        if num_rows < 1 or granule < 1:
            raise ValueError(f"num_rows and granule must be positive, not {num_rows} and {granule}")
        self.num_rows = num_rows
        self.granule = granule
        self.epoch = 0
        self._free = list(range(-(-num_rows // granule)))
        self._free_rows = num_rows
        self._cached_rows = 0
        self._entries: dict[bytes, _Entry] = {}
        self._cached: OrderedDict[bytes, None] = OrderedDict()
        self._held: dict[Hashable, set[bytes]] = {}
        self._crashes: OrderedDict[bytes, int] = OrderedDict()
        self._queries = 0
        self._hits = 0
        self._encodes = 0
        self._evictions = 0

    # -- holders ---------------------------------------------------------------------------------

    def can_ever_fit(self, num_rows: int) -> bool:
        """Whether an image of `num_rows` rows fits an arena that holds nothing else."""
        return num_rows <= self.num_rows

    def acquire(self, key: bytes, num_rows: int, holder: Hashable) -> Acquired:
        """Make `holder` a holder of the image's rows; asking again changes nothing.

        Raises:
            ValueError: `num_rows` is not positive, exceeds the whole arena (ask `can_ever_fit` at
                admission), or differs from what the same key has: a key covers the image's plan.
        """
        entry = self._entries.get(key)
        if entry is None:
            if not 0 < num_rows <= self.num_rows:
                raise ValueError(
                    f"an image of {num_rows} rows cannot lie in an arena of {self.num_rows}; "
                    "raise embedding_rows or lower the image's resolution limit"
                )
            if self.is_quarantined(key):
                return Acquired.QUARANTINED
            if num_rows > self._free_rows + self._cached_rows:
                return Acquired.FULL
            entry = self._allocate(key, num_rows)
            outcome = Acquired.START
        elif entry.num_rows != num_rows:
            raise ValueError(
                f"key {key.hex()[:16]} has {entry.num_rows} rows here, {num_rows} were asked for"
            )
        else:
            outcome = Acquired.READY if entry.ready else Acquired.PENDING
        if holder not in entry.holders:
            self._hold(key, entry, holder)
            self._queries += 1
            self._hits += outcome is not Acquired.START
        return outcome

    def release(self, key: bytes, holder: Hashable) -> None:
        """`holder` needs the image's rows no longer. Unknown pairs are ignored."""
        entry = self._entries.get(key)
        if entry is None or holder not in entry.holders:
            return
        entry.holders.remove(holder)
        keys = self._held[holder]
        keys.remove(key)
        if not keys:
            del self._held[holder]
        if entry.ready and not entry.holders:
            self._to_cache(key, entry)

    def release_all(self, holder: Hashable) -> None:
        """Release every image that `holder` holds."""
        for key in tuple(self._held.get(holder, ())):
            self.release(key, holder)

    def holders(self, key: bytes) -> frozenset[Hashable]:
        entry = self._entries.get(key)
        return frozenset(entry.holders) if entry else frozenset()

    # -- the vision stage's replies --------------------------------------------------------------

    def mark_ready(self, key: bytes, epoch: int) -> bool:
        """Commit: the rows have been written. False when the reply is of another epoch, or late."""
        entry = self._in_flight(key, epoch)
        if entry is None:
            return False
        entry.ready = True
        self._encodes += 1
        self._crashes.pop(key, None)
        if not entry.holders:
            self._to_cache(key, entry)
        return True

    def mark_failed(self, key: bytes, epoch: int) -> frozenset[Hashable]:
        """Roll back: the image cannot be encoded. Returns the holders, which hold it no longer."""
        entry = self._in_flight(key, epoch)
        if entry is None:
            return frozenset()
        holders = frozenset(entry.holders)
        self._drop(key, entry)
        return holders

    def mark_cancelled(self, key: bytes, epoch: int) -> bool:
        """The job ended without having been tried (cancelled, or its bytes were gone).

        True when someone joined the flight in the meantime: the entry stays in flight and the
        caller submits the job again. Otherwise the rows are free.
        """
        entry = self._in_flight(key, epoch)
        if entry is None:
            return False
        if entry.holders:
            return True
        self._drop(key, entry)
        return False

    def new_epoch(self, suspects: Collection[bytes] | None = None) -> list[bytes]:
        """The vision stage was restarted. Returns the keys in flight that someone holds.

        The caller submits each again with the new `epoch`, except those that `is_quarantined`
        now names, which it fails with `mark_failed`.

        Args:
            suspects: the keys that were being worked on when the stage died; None suspects all
                that were in flight.
        """
        self.epoch += 1
        pending: list[bytes] = []
        for key, entry in list(self._entries.items()):
            if entry.ready:
                continue
            if suspects is None or key in suspects:
                self._crashes[key] = self._crashes.pop(key, 0) + 1
                while len(self._crashes) > MAX_SUSPECTS:
                    self._crashes.popitem(last=False)
            if entry.holders:
                pending.append(key)
            else:
                self._drop(key, entry)
        return pending

    # -- questions -------------------------------------------------------------------------------

    def is_ready(self, key: bytes) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.ready

    def is_quarantined(self, key: bytes) -> bool:
        return self._crashes.get(key, 0) >= CRASHES_TO_QUARANTINE

    def rows(self, key: bytes) -> tuple[tuple[int, int], ...]:
        """(first row, count) runs that take the image's rows in order. KeyError when absent."""
        return self._entries[key].runs

    def row_indices(self, key: bytes, start: int = 0, stop: int | None = None) -> list[int]:
        """Storage rows of the image's rows [start, stop), in order. KeyError when absent."""
        entry = self._entries[key]
        stop = entry.num_rows if stop is None else stop
        if not 0 <= start <= stop <= entry.num_rows:
            raise ValueError(f"rows [{start}, {stop}) are outside the image's {entry.num_rows}")
        indices: list[int] = []
        base = 0
        for first, count in entry.runs:
            low, high = max(start, base), min(stop, base + count)
            if low < high:
                indices.extend(range(first + low - base, first + high - base))
            base += count
        return indices

    def stats(self) -> ArenaStats:
        return ArenaStats(
            rows_total=self.num_rows,
            rows_used=self.num_rows - self._free_rows - self._cached_rows,
            rows_cached=self._cached_rows,
            queries=self._queries,
            hits=self._hits,
            encodes=self._encodes,
            evictions=self._evictions,
        )

    def check_invariants(self) -> None:
        """Raises ArenaInvariantError naming the first disagreement of the books."""

        def check(holds: bool, what: str) -> None:
            if not holds:
                raise ArenaInvariantError(what)

        owned = [g for e in self._entries.values() for g in e.granules]
        check(self._free == sorted(set(self._free)), "free granules are not a sorted set")
        check(
            sorted(owned + self._free) == list(range(-(-self.num_rows // self.granule))),
            "granules are lost, shared, or both free and owned",
        )
        check(self._free_rows == self._size(self._free), "count of free rows")
        for key, entry in self._entries.items():
            name = key.hex()[:16]
            check(sum(count for _, count in entry.runs) == entry.num_rows, f"rows of {name}")
            flat = [row for first, count in entry.runs for row in range(first, first + count)]
            check(len(set(flat)) == len(flat), f"{name} has a row twice")
            inside = {row // self.granule for row in flat}
            check(inside == set(entry.granules), f"{name} has rows outside its granules")
            check(max(flat) < self.num_rows, f"{name} has rows outside the storage")
            cached = entry.ready and not entry.holders
            check(cached == (key in self._cached), f"{name} is wrongly in or out of the cache")
            for holder in entry.holders:
                check(key in self._held.get(holder, ()), f"{name} and {holder!r} disagree")
        pairs = sum(len(keys) for keys in self._held.values())
        check(pairs == sum(len(e.holders) for e in self._entries.values()), "holder pairs")
        check(all(self._held.values()), "a holder of nothing is remembered")
        check(set(self._cached) <= set(self._entries), "a cached key has no entry")
        cached_rows = sum(self._size(self._entries[key].granules) for key in self._cached)
        check(self._cached_rows == cached_rows, "count of cached rows")
        check(len(self._crashes) <= MAX_SUSPECTS, "too many suspects are remembered")

    # -- allocation ------------------------------------------------------------------------------

    def _size(self, granules: Collection[int]) -> int:
        last = self.num_rows // self.granule
        short = self.granule - self.num_rows % self.granule
        return len(granules) * self.granule - (short if last in granules else 0)

    def _allocate(self, key: bytes, num_rows: int) -> _Entry:
        while self._free_rows < num_rows:
            oldest = next(iter(self._cached))
            self._drop(oldest, self._entries[oldest])
            self._evictions += 1
        granules = self._choose(num_rows)
        for granule in granules:
            del self._free[bisect_left(self._free, granule)]
        self._free_rows -= self._size(granules)
        entry = _Entry(num_rows, granules, self._runs(granules, num_rows))
        self._entries[key] = entry
        return entry

    def _choose(self, num_rows: int) -> tuple[int, ...]:
        """The first gap that holds all rows, so that a gather is a slice; else from the bottom."""
        start = 0
        for index, granule in enumerate(self._free):
            if granule != self._free[start] + index - start:
                start = index
            covered = min((granule + 1) * self.granule, self.num_rows)
            if covered - self._free[start] * self.granule >= num_rows:
                return tuple(self._free[start : index + 1])
        count = 0
        for index, granule in enumerate(self._free):
            count += min(self.granule, self.num_rows - granule * self.granule)
            if count >= num_rows:
                return tuple(self._free[: index + 1])
        raise ArenaInvariantError(f"{num_rows} rows were promised, {count} are free")

    def _runs(self, granules: tuple[int, ...], num_rows: int) -> tuple[tuple[int, int], ...]:
        runs: list[tuple[int, int]] = []
        left = num_rows
        for granule in granules:
            first = granule * self.granule
            count = min(self.granule, self.num_rows - first, left)
            left -= count
            if runs and sum(runs[-1]) == first:
                runs[-1] = (runs[-1][0], runs[-1][1] + count)
            else:
                runs.append((first, count))
        return tuple(runs)

    def _in_flight(self, key: bytes, epoch: int) -> _Entry | None:
        entry = self._entries.get(key)
        return entry if entry is not None and not entry.ready and epoch == self.epoch else None

    def _hold(self, key: bytes, entry: _Entry, holder: Hashable) -> None:
        if self._cached.pop(key, False) is None:
            self._cached_rows -= self._size(entry.granules)
        entry.holders.add(holder)
        self._held.setdefault(holder, set()).add(key)

    def _to_cache(self, key: bytes, entry: _Entry) -> None:
        self._cached[key] = None
        self._cached_rows += self._size(entry.granules)

    def _drop(self, key: bytes, entry: _Entry) -> None:
        for holder in tuple(entry.holders):
            keys = self._held[holder]
            keys.remove(key)
            if not keys:
                del self._held[holder]
        if self._cached.pop(key, False) is None:
            self._cached_rows -= self._size(entry.granules)
        del self._entries[key]
        self._free = sorted((*self._free, *entry.granules))
        self._free_rows += self._size(entry.granules)
