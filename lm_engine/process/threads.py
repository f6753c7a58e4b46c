"""How many torch threads a stage may use right now.

Owns: ThreadShare. Does not own: the flags it reads (board.py). Imports no torch itself.

Two stages that compute at once with all cores each would wait for one another inside every
parallel loop. So a stage that works alone takes all threads, and each takes its half while both
work. torch.set_num_threads costs well under a microsecond, so it is asked before every step and
every layer.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from lm_engine.process.board import Slot


class ThreadShare:
    """Settles this process's thread count from its neighbour's busy flag.

    Args:
        other: the neighbour's signs of life; None when there is no neighbour.
        alone: threads while the neighbour rests; None takes the cores that this process may use.
    """

    def __init__(self, other: Slot | None, alone: int | None) -> None:
        self._other = other
        self._alone = alone or len(os.sched_getaffinity(0))
        self._current = 0
        self._set = _set_num_threads()

    def settle(self) -> int:
        """Apply and return the number of threads for what comes next."""
        busy = self._other is not None and self._other.busy
        wanted = max(1, self._alone // 2) if busy else self._alone
        if wanted != self._current:
            self._set(wanted)
            self._current = wanted
        return wanted


def _set_num_threads() -> Callable[[int], object]:
    """torch's, where the stage uses torch at all."""
    torch = sys.modules.get("torch")
    return torch.set_num_threads if torch is not None else lambda threads: None
