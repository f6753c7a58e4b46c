"""Tickets on their way through one engine.

Owns: Ticket, Lane: which tickets wait, which are being copied, and which goes next; and Rate: how
fast an engine copied so far.
Does not own: what a ticket holds (holds.py), deadlines or answers (transfer.py), or copying.
Imports no torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from kv_offload.holds import Hold
from kv_offload.tickets import CopyEngine, Direction, Work


@dataclass(slots=True, eq=False)
class Ticket:
    number: int
    direction: Direction
    work: Work
    after: Any
    """The engine's fence: of the call, or, of a load, of its start."""
    hold: Hold
    submitted: float
    deadline: float
    told: bool = False
    """The owner was told of a failure, or cancelled it, and does not wait any more."""
    joined: bool = False
    """Compute was ordered after it; the owner hears of a failure only."""


MEMORY_RATE, DISK_RATE = 4e9, 4e8
"""Guesses in bytes per second, until copies were made."""
_GUESS_S, _MEMORY_S = 0.01, 4.0
"""Copying time after which a guess, and a measurement, count half."""


class Rate:
    """Bytes per second of copying, the recent ones counting more."""

    def __init__(self, guess_bytes_per_s: float) -> None:
        self._bytes, self._seconds = guess_bytes_per_s * _GUESS_S, _GUESS_S
        self._busy_s = 0.0

    @property
    def bytes_per_s(self) -> float:
        return self._bytes / self._seconds

    def observe(self, num_bytes: int, busy_s: float) -> None:
        """The engine has been busy for `busy_s` in all, and copied so many bytes more."""
        took = busy_s - self._busy_s
        if took <= 0 or not num_bytes:
            # Time of copies whose end was not told yet counts with their bytes.
            return
        self._busy_s = busy_s
        keep = 0.5 ** (took / _MEMORY_S)
        self._bytes = keep * self._bytes + num_bytes
        self._seconds = keep * self._seconds + took


class Lane:
    """Urgent tickets first, each kind in the order of the calls.

    At most `most_copying` are handed to the engine at a time, because a device's full queue makes
    the caller wait (vLLM #29013: 2 µs became 180); at most `most_later` of these are copies that
    nobody waits for, so that an urgent one finds little before it.
    """

    def __init__(self, engine: CopyEngine, rate: Rate, most_copying: int, most_later: int) -> None:
        self.engine = engine
        self.rate = rate
        self._most_copying, self._most_later = most_copying, most_later
        self._urgent: deque[Ticket] = deque()
        self._later: deque[Ticket] = deque()
        self._copying: dict[int, Ticket] = {}
        self._later_copying = 0

    def copying(self) -> Collection[Ticket]:
        """Handed to the engine, and not ended."""
        return self._copying.values()

    def add(self, ticket: Ticket) -> None:
        self._queue_of(ticket).append(ticket)
        self.launch()

    def launch(self) -> None:
        """Start what may start."""
        while self._urgent and len(self._copying) < self._most_copying:
            self._start(self._urgent.popleft())
        while (
            self._later
            and len(self._copying) < self._most_copying
            and self._later_copying < self._most_later
        ):
            self._start(self._later.popleft())

    def start_now(self, ticket: Ticket) -> None:
        """Somebody sleeps until it ends: it passes all others."""
        if ticket.number not in self._copying:
            self._queue_of(ticket).remove(ticket)
            self._start(ticket)

    def withdraw(self, ticket: Ticket) -> bool:
        """Whether it had not begun, and never will."""
        if ticket.number in self._copying:
            return False
        self._queue_of(ticket).remove(ticket)
        return True

    def ended(self) -> Iterator[tuple[Ticket, str | None]]:
        """Tickets that the engine has done with, and why they failed if they did."""
        for number, cause in self.engine.finished():
            ticket = self._copying.pop(number)
            self._later_copying -= not ticket.direction.urgent
            yield ticket, cause

    def numbers(self) -> list[int]:
        return [*(t.number for t in (*self._urgent, *self._later)), *self._copying]

    def _queue_of(self, ticket: Ticket) -> deque[Ticket]:
        return self._urgent if ticket.direction.urgent else self._later

    def _start(self, ticket: Ticket) -> None:
        self._copying[ticket.number] = ticket
        self._later_copying += not ticket.direction.urgent
        self.engine.start(ticket.number, ticket.work, ticket.after)
