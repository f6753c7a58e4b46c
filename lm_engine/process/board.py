"""Signs of life in shared memory, readable without asking anybody.

Owns: Board, one page of memory shared by the API process, the supervisor and the stages, with a
Slot for each process: when it last showed life, within which time it promised to do so again,
whether it is computing, whether it is stopped, whether it wants all cores; and the images that the
vision stage has in hand. Does not own: what is done about a process that is late (supervisor.py).
Imports no torch.

Times are seconds of the host's monotonic clock, which all processes share. Each field is an
aligned 8-byte number with one writer at a time, so a reader sees an old or a new value, never a
mixture.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence

ROLES = ("supervisor", "language", "vision", "planner")
_FIELDS = 5
_BEAT, _BOUND, _BUSY, _STOPPED, _ALONE = range(_FIELDS)
_SUSPECTS_AT = 1024
_KEY_BYTES = 32
MAX_SUSPECTS = 64
"""Keys that fit into the note of what is in hand."""


class Slot:
    """One process's signs of life."""

    def __init__(self, cells: memoryview[float]) -> None:
        self._cells = cells

    def beat(self, bound_s: float) -> None:
        """Alive now, and again within `bound_s` seconds: the expected bound of what comes next."""
        # The longer of both bounds holds in between, so that no reader sees a false lapse.
        self._cells[_BOUND] = max(bound_s, self._cells[_BOUND])
        self._cells[_BEAT] = time.monotonic()
        self._cells[_BOUND] = bound_s

    @property
    def age_s(self) -> float:
        return max(0.0, time.monotonic() - float(self._cells[_BEAT]))

    @property
    def bound_s(self) -> float:
        return float(self._cells[_BOUND])

    @property
    def late(self) -> bool:
        return self.age_s > self.bound_s

    @property
    def busy(self) -> bool:
        """Whether the process is computing: its neighbour then leaves it a core."""
        return bool(self._cells[_BUSY])

    @busy.setter
    def busy(self, value: bool) -> None:
        self._cells[_BUSY] = float(value)

    @property
    def alone(self) -> bool:
        """Whether the process asks its neighbour to rest between two units of work."""
        return bool(self._cells[_ALONE])

    @alone.setter
    def alone(self, value: bool) -> None:
        self._cells[_ALONE] = float(value)

    @property
    def stopped(self) -> bool:
        """Whether the supervisor saw the process stopped by a signal."""
        return bool(self._cells[_STOPPED])

    @stopped.setter
    def stopped(self, value: bool) -> None:
        self._cells[_STOPPED] = float(value)

    def clear(self) -> None:
        for field in range(_FIELDS):
            self._cells[field] = 0.0


class Board:
    """The shared page. Every process that maps the same descriptor sees the same board."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, mmap.PAGESIZE)
        cells = memoryview(self._map)[: len(ROLES) * _FIELDS * 8].cast("d")
        slots = [Slot(cells[i * _FIELDS : (i + 1) * _FIELDS]) for i in range(len(ROLES))]
        self._slots = dict(zip(ROLES, slots, strict=True))

    @staticmethod
    def create() -> int:
        """A descriptor of new, zeroed, nameless memory for a board."""
        fd = os.memfd_create("longlens-board", os.MFD_CLOEXEC)
        os.ftruncate(fd, mmap.PAGESIZE)
        return fd

    def __getitem__(self, role: str) -> Slot:
        return self._slots[role]

    def note_suspects(self, keys: Sequence[bytes]) -> None:
        """The vision stage is about to work on these images, and on no others. Keys that are not
        32 bytes long, or too many, are left out: then nobody in particular is suspected."""
        known = [key for key in keys if len(key) == _KEY_BYTES]
        count = len(known) if len(known) == len(keys) <= MAX_SUSPECTS else 0
        self._map[_SUSPECTS_AT] = 0
        end = _SUSPECTS_AT + 1 + count * _KEY_BYTES
        self._map[_SUSPECTS_AT + 1 : end] = b"".join(known[:count])
        self._map[_SUSPECTS_AT] = count

    def suspects(self) -> tuple[bytes, ...]:
        """What `note_suspects` noted last."""
        count = self._map[_SUSPECTS_AT]
        at = _SUSPECTS_AT + 1
        return tuple(
            self._map[at + i * _KEY_BYTES : at + (i + 1) * _KEY_BYTES] for i in range(count)
        )
