"""Signals that meet a process on its way up.

Owns: holding them back from before the process exists until it can answer them. On its way it would
die of them, with a traceback, and take the server along. Does not own: what they mean
(supervisor.py).
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

_HELD = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def held() -> Iterator[None]:
    """A process that is started meanwhile inherits the block, and lifts it with `release`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def release() -> None:
    """What came in the meantime is delivered now, to the handlers that are installed now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD)
