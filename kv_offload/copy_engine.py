"""Copies made by a thread beside the one that computes.

Owns: ThreadCopyEngine, for copies between memories of the CPU and for disk. Does not own: what a
copy is (a Work runs itself; copies.py, disk_tier.py), order, limits and deadlines (transfer.py).
Imports no torch.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
import weakref
from typing import Any

from kv_offload.tickets import CopyError, Work

logger = logging.getLogger(__name__)

_Job = tuple[int, Work]
_End = tuple[int, str | None, float]
"""Ticket, cause of failure, seconds."""


class ThreadCopyEngine:
    """CopyEngine of one thread, which begins with the first copy and makes one after the other.

    A Work must release the interpreter's lock for the length of its copies, as numpy's and the
    operating system's do; the thread then computes nothing and only moves bytes.

    It needs no fence: compute on the CPU has ended when the call that issued it returned.
    """

    def __init__(self, name: str = "longlens-copy") -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[_End] = queue.SimpleQueue()
        self._seen: list[_End] = []
        self._thread: threading.Thread | None = None
        self._closed = False
        self.busy_seconds = 0.0
        """Time spent in the copies that `finished` told of: the thread takes a core for so long."""
        # The thread knows the queues only, and ends with whoever forgets to close.
        weakref.finalize(self, self._jobs.put, None)

    def fence(self) -> None:
        return None

    def start(self, ticket: int, work: Work, after: Any) -> None:
        """See CopyEngine.start. Raises RuntimeError after `close`."""
        if self._closed:
            raise RuntimeError("this copy engine was closed")
        if self._thread is None:
            queues = (self._jobs, self._ended)
            self._thread = threading.Thread(
                target=_serve, args=queues, name=self._name, daemon=True
            )
            self._thread.start()
        self._jobs.put((ticket, work))

    def finished(self) -> list[tuple[int, str | None]]:
        with contextlib.suppress(queue.Empty):
            while True:
                self._seen.append(self._ended.get_nowait())
        seen, self._seen = self._seen, []
        self.busy_seconds += sum(seconds for _, _, seconds in seen)
        return [(ticket, cause) for ticket, cause, _ in seen]

    def wait(self, timeout_s: float) -> None:
        if self._seen or self._thread is None:
            return
        with contextlib.suppress(queue.Empty):
            self._seen.append(self._ended.get(timeout=max(timeout_s, 1e-6)))

    def order_compute_after(self, ticket: int) -> bool:
        return False

    def close(self, timeout_s: float) -> None:
        self._closed = True
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                logger.warning("a copy did not end within %.1f s; its thread is left", timeout_s)


def _serve(jobs: queue.SimpleQueue[_Job | None], ended: queue.SimpleQueue[_End]) -> None:
    while (job := jobs.get()) is not None:
        ticket, work = job
        began = time.perf_counter()
        cause = _run(work)
        seconds = time.perf_counter() - began
        # The work names memory that may be freed once the end is known.
        del job, work
        ended.put((ticket, cause, seconds))


def _run(work: Work) -> str | None:
    try:
        work.run()
    except CopyError as failure:
        return str(failure)
    except Exception as error:
        logger.exception("a copy failed")
        return type(error).__name__
    return None
