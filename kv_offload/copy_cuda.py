"""Copies in a device's own queues, ordered by events.

Owns: CudaCopyEngine, and Streams, the few calls of torch.cuda that it needs. Does not own: what a
copy is (copies.py), order, limits and deadlines (transfer.py).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from kv_offload.tickets import Work

logger = logging.getLogger(__name__)

_POLL_S = 0.0002
"""Between two looks at the queues while somebody waits; a superblock of an 8B takes 0.7 ms."""


class DeviceWork(Work, Protocol):
    """A Work that can be issued to the current queue of the device."""

    def enqueue(self) -> None: ...

    @property
    def to_host(self) -> bool: ...


class Streams(Protocol):
    """What torch.cuda gives; a test has its own."""

    def new(self) -> Any:
        """A queue for copies."""
        ...

    def current(self) -> Any:
        """The queue that compute is issued to."""
        ...

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Issue to this queue meanwhile."""
        ...

    def event(self, stream: Any) -> Any:
        """Everything issued to this queue so far, as an event with `query()`."""
        ...

    def order(self, stream: Any, event: Any) -> None:
        """What is issued to this queue from now on runs after the event."""
        ...

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two events that have passed."""
        ...


class TorchStreams:
    """Streams of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def use(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event: torch.cuda.Event = torch.cuda.Event(  # type: ignore[no-untyped-call]
            enable_timing=True
        )
        event.record(stream)
        return event

    def order(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1e3


class CudaCopyEngine:
    """CopyEngine of two queues, one per direction, so that both ways of the link are used.

    The fence is an event on the queue of compute, and compute is ordered after a copy by the copy's
    own event: nobody waits on the CPU. Copies of one direction end in order.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.busy_seconds = 0.0
        self._queues = {to_host: streams.new() for to_host in (True, False)}
        self._under_way: dict[bool, deque[tuple[int, DeviceWork, Any, Any]]] = {
            to_host: deque() for to_host in self._queues
        }
        self._ended: list[tuple[int, str | None]] = []

    def fence(self) -> Any:
        return self._streams.event(self._streams.current())

    def start(self, ticket: int, work: Any, after: Any) -> None:
        queue = self._queues[work.to_host]
        try:
            self._streams.order(queue, after)
            begin = self._streams.event(queue)
            with self._streams.use(queue):
                work.enqueue()
            event = self._streams.event(queue)
        except RuntimeError as error:
            self._ended.append((ticket, _cause(error)))
            return
        # The works keep the host's memory alive until their events have passed.
        self._under_way[work.to_host].append((ticket, work, begin, event))

    def finished(self) -> list[tuple[int, str | None]]:
        for under_way in self._under_way.values():
            while under_way:
                ticket, _, begin, event = under_way[0]
                try:
                    if not event.query():
                        break
                    self.busy_seconds += self._streams.seconds(begin, event)
                    cause = None
                except RuntimeError as error:
                    cause = _cause(error)
                under_way.popleft()
                self._ended.append((ticket, cause))
        ended, self._ended = self._ended, []
        return ended

    def wait(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while not self._ended and any(self._under_way.values()) and time.monotonic() < until:
            self._ended = self.finished()
            if not self._ended:
                time.sleep(_POLL_S)

    def order_compute_after(self, ticket: int) -> bool:
        for under_way in self._under_way.values():
            for number, _, _, event in under_way:
                if number == ticket:
                    self._streams.order(self._streams.current(), event)
                    return True
        return False

    def close(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        ended: list[tuple[int, str | None]] = []
        while any(self._under_way.values()) and time.monotonic() < until:
            ended += self.finished()
            time.sleep(_POLL_S)
        self._ended = ended + self._ended


def _cause(error: RuntimeError) -> str:
    logger.error("a copy failed on the device: %s", error)
    return type(error).__name__
