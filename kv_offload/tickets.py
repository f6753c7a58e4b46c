"""What a copy between tiers is called, asked and answered.

Owns: directions, Completion, the errors, and the Protocols between Transfers, the engines that copy
and the parts that know where bytes lie. Does not own: any policy (transfer.py) or any copying.
Imports no torch.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Direction(enum.Enum):
    STORE = "store"
    """Device blocks to a host superblock."""
    LOAD = "load"
    """A host superblock to device blocks."""
    STREAM = "stream"
    """One layer of host superblocks to a staging buffer."""
    SAVE = "save"
    """A host superblock to disk."""
    FETCH = "fetch"
    """A file on disk to a host superblock."""

    @property
    def urgent(self) -> bool:
        """Whether a request waits for it; what only makes a copy for later steps aside."""
        return self not in (Direction.STORE, Direction.SAVE)


DEADLINE, CANCELLED, RESET, CLOSED = "deadline", "cancelled", "reset", "closed"
"""Causes of failure that Transfers itself gives; all others come from the engine or the work."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A ticket is closed, or will never be of use to its owner."""

    ticket: int
    direction: Direction
    cause: str | None
    """None: every byte arrived. Else why not; where it should have gone holds anything."""
    seconds: float
    """From the call to this answer."""

    @property
    def ok(self) -> bool:
        return self.cause is None


class TransferError(Exception):
    """A copy that the states of its blocks or superblocks forbid, or one that was waited for in
    vain."""


class CopyError(Exception):
    """Raised by a Work whose bytes did not arrive, or not whole; its text is the cause, a short
    one without numbers, because failures are counted by it."""


class Work(Protocol):
    """One copy, ready to be made."""

    @property
    def num_bytes(self) -> int: ...

    def run(self) -> None:
        """Make the copy in the calling thread; raises CopyError when it did not succeed."""
        ...


class CopyEngine(Protocol):
    """Makes copies, one after the other or several at once, while others compute."""

    @property
    def busy_seconds(self) -> float:
        """Time spent copying since construction; 0 where nobody measures it."""
        ...

    def fence(self) -> Any:
        """Stands for all compute issued so far. A copy started `after` it reads what that compute
        wrote, and does not write over what that compute still reads."""
        ...

    def start(self, ticket: int, work: Work, after: Any) -> None:
        """Begin a copy; never blocks."""
        ...

    def finished(self) -> list[tuple[int, str | None]]:
        """(ticket, cause) of each copy that ended since the last call; cause None when it
        succeeded. The engine touches no byte of it any more."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Return when `finished` has something to say, at the latest after `timeout_s`."""
        ...

    def order_compute_after(self, ticket: int) -> bool:
        """Make all compute issued from now on see what this copy brings, without waiting here.
        False: this engine cannot, so its caller has to wait for the end of the copy."""
        ...

    def close(self, timeout_s: float) -> None:
        """End what was started, as far as `timeout_s` allows, and take nothing new."""
        ...


class Copies(Protocol):
    """Where bytes lie: device blocks, and the slots of host superblocks."""

    def store(self, blocks: Sequence[int], slot: int) -> Work: ...

    def load(self, slot: int, first: int, blocks: Sequence[int]) -> Work:
        """Blocks `first`, `first` + 1, ... of the superblock into `blocks`."""
        ...

    def stream(self, slots: Sequence[int], layer: int, into: Any) -> Work: ...


class DiskCopies(Protocol):
    """Where full superblocks lie on disk, by the keys of disk_key.py."""

    @property
    def blocks(self) -> int:
        """Blocks of a full superblock."""
        ...

    def save(self, slot: int, key: bytes) -> Work: ...

    def fetch(self, key: bytes, slot: int) -> Work: ...

    def __contains__(self, key: object) -> bool:
        """Whether a fetch is worth trying."""
        ...

    def clear(self, mark: bytes) -> None:
        """Forgets all whose keys begin with `mark`."""
        ...

    def close(self) -> None:
        """Nothing is asked for any more."""
        ...


class BlockRefs(Protocol):
    """References on device blocks; BlockPool has them."""

    def ref_count(self, block: int) -> int: ...

    def share(self, blocks: Sequence[int]) -> None: ...

    def free(self, blocks: Sequence[int]) -> None:
        """`blocks` in the order of their tokens."""
        ...
