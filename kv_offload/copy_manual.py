"""Copies that end when, and as, a test says.

Owns: ManualCopyEngine. Does not own: any copying; a Work runs itself in the caller's thread.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kv_offload.tickets import CopyError, Work


class ManualCopyEngine:
    """CopyEngine whose copies stall until told otherwise, in any order.

    `under_way` are the tickets handed over and not ended. What is not ended is a stall.
    """

    def __init__(self) -> None:
        self.under_way: dict[int, Work] = {}
        self.closed = False
        self.busy_seconds = 0.0
        self._ended: list[tuple[int, str | None]] = []

    def fence(self) -> None:
        return None

    def start(self, ticket: int, work: Work, after: Any) -> None:
        self.under_way[ticket] = work

    def finish(self, ticket: int) -> None:
        """Make the copy and report its end."""
        self._end(ticket, self.under_way[ticket].run)

    def fail(
        self, ticket: int, cause: str = "fault", *, after: Callable[[], None] | None = None
    ) -> None:
        """Report a failure; `after` may spoil before what the copy would have written."""
        if after is not None:
            after()
        del self.under_way[ticket]
        self._ended.append((ticket, cause))

    def finished(self) -> list[tuple[int, str | None]]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, timeout_s: float) -> None:
        """Finishes the oldest copy, so that whoever waits goes on."""
        if not self._ended and self.under_way:
            self.finish(next(iter(self.under_way)))

    def order_compute_after(self, ticket: int) -> bool:
        return False

    def close(self, timeout_s: float) -> None:
        self.closed = True
        for ticket in list(self.under_way):
            self.finish(ticket)

    def _end(self, ticket: int, run: Callable[[], None]) -> None:
        del self.under_way[ticket]
        try:
            run()
        except CopyError as failure:
            self._ended.append((ticket, str(failure)))
        else:
            self._ended.append((ticket, None))
