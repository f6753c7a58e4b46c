"""What open copies keep from being reused or read.

Owns: Holds, the references that tickets have on device blocks and host superblocks, and which of
these are being read, written or filled. Does not own: tickets (transfer.py) or the pools.
Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from kv_offload.host_pool import HostPool
from kv_offload.tickets import BlockRefs, TransferError


@dataclass(frozen=True, slots=True)
class Hold:
    """What one copy touches."""

    reads: tuple[int, ...] = ()
    """Device blocks."""
    writes: tuple[int, ...] = ()
    """Device blocks."""
    superblocks: tuple[int, ...] = ()
    filled: int = 0
    """Blocks that the one superblock holds once the copy succeeded; 0 when it fills none."""


class Holds:
    """References taken and given back hold by hold."""

    def __init__(self, blocks: BlockRefs, host: HostPool) -> None:
        self._blocks, self._host = blocks, host
        self._reading: Counter[int] = Counter()
        self._writing: set[int] = set()
        self._filling: set[int] = set()

    def take(self, hold: Hold) -> None:
        self._blocks.share([*hold.reads, *hold.writes])
        self._host.share(hold.superblocks)
        self._reading.update(hold.reads)
        self._writing.update(hold.writes)
        if hold.filled:
            self._filling.update(hold.superblocks)

    def give_back(self, hold: Hold) -> None:
        self._reading.subtract(hold.reads)
        self._writing.difference_update(hold.writes)
        if hold.filled:
            self._filling.difference_update(hold.superblocks)
        self._blocks.free([*hold.reads, *hold.writes])
        self._host.free(hold.superblocks)

    def is_being_written(self, block: int) -> bool:
        return block in self._writing

    def must_be_readable(self, blocks: Iterable[int]) -> None:
        unready = sorted(self._writing.intersection(blocks))
        if unready:
            raise TransferError(f"blocks {unready} are still being loaded; store them afterwards")

    def must_be_unused(self, blocks: Iterable[int]) -> None:
        busy = sorted(b for b in blocks if b in self._writing or self._reading[b])
        if busy:
            raise TransferError(f"blocks {busy} are used by a copy that has not ended")

    def must_be_empty(self, superblock: int) -> None:
        if superblock in self._filling or self._host.filled(superblock):
            raise TransferError(f"superblock {superblock} is filled, or being filled; reserve one")

    def check_invariants(self, holds: list[Hold]) -> None:
        """`holds` are those of all open tickets."""
        reading = Counter(block for hold in holds for block in hold.reads)
        writes = [block for hold in holds for block in hold.writes]
        if +self._reading != reading or self._writing != set(writes):
            raise AssertionError("the sets of blocks in use do not match the open tickets")
        if len(set(writes)) != len(writes) or set(writes) & set(reading):
            raise AssertionError("a block is written by one ticket and used by another")
        for block, count in (reading + Counter(writes)).items():
            if self._blocks.ref_count(block) < count:
                raise AssertionError(f"block {block} lost the reference of a ticket")
        filling = [s for hold in holds if hold.filled for s in hold.superblocks]
        if sorted(filling) != sorted(self._filling):
            raise AssertionError(f"superblocks {filling} are being filled, noted {self._filling}")
        held = Counter(s for hold in holds for s in hold.superblocks)
        for superblock, count in held.items():
            if self._host.ref_count(superblock) < count:
                raise AssertionError(f"superblock {superblock} lost the reference of a ticket")
            if superblock in self._filling and self._host.filled(superblock):
                raise AssertionError(f"superblock {superblock} may be read while it is filled")
