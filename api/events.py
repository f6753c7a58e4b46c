"""The engine's events of one HTTP request.

Owns: EventFeed - one submission per prompt, merged, with time-outs that do not abort, an abort
when closed, and a way to end all with an error. Does not own: what an event looks like over HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from chunked_prefill.request import Request
from lm_engine.client import EngineClient, MediaItem
from lm_engine.outputs import RequestError, RequestOutput

LOST = RequestError("internal", "The engine lost this request. Send it again.")
SHUTDOWN = RequestError(
    "overloaded", "The server shut down before this request ended. Send it to another replica."
)


@dataclass(frozen=True, slots=True)
class Event:
    prompt: int
    """Which of the request's prompts, or of what was added behind them."""
    output: RequestOutput


class EventFeed:
    """`next` until `done`, then `close`, which also aborts whatever still runs."""

    def __init__(
        self,
        client: EngineClient,
        submissions: Sequence[tuple[Request, tuple[MediaItem, ...]]],
    ):
        self._client = client
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self._open = 0
        self._pushed_back: list[Event] = []
        self._ended: set[int] = set()
        self._pumps: list[asyncio.Task[None]] = []
        self._requests: list[Request] = []
        for request, media in submissions:
            self.add(request, media)

    def add(self, request: Request, media: tuple[MediaItem, ...]) -> int:
        """Submits one more, whose events are mixed with the others'; returns its `Event.prompt`."""
        index = len(self._requests)
        events = self._client.submit(request, media)
        self._open += 1
        self._requests.append(request)
        self._pumps.append(asyncio.create_task(self._pump(index, events, request)))
        return index

    @property
    def done(self) -> bool:
        return self._open == 0 and not self._pushed_back

    async def next(self, timeout_s: float | None = None) -> Event | None:
        """The next event, or None when none came in time; what runs goes on."""
        if self._pushed_back:
            return self._pushed_back.pop()
        try:
            # Not wait_for: before Python 3.12 it swallows a cancellation that meets an event.
            async with asyncio.timeout(timeout_s):
                event = await self._queue.get()
        except TimeoutError:
            return None
        if event.output.finished:
            self._open -= 1
        return event

    def push_back(self, event: Event) -> None:
        """The event is `next`'s next answer again, after a look at it."""
        self._pushed_back.append(event)

    def fail(self, error: RequestError) -> None:
        """Ends what still runs with an error event, at once."""
        for index, (pump, request) in enumerate(zip(self._pumps, self._requests, strict=True)):
            if not pump.done():
                pump.cancel()
                self._put_error(index, request, error)

    async def close(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    def _put_error(self, index: int, request: Request, error: RequestError) -> None:
        if index not in self._ended:
            self._ended.add(index)
            output = RequestOutput(request.request_id, finished=True, error=error)
            self._queue.put_nowait(Event(index, output))

    async def _pump(
        self, index: int, events: AsyncIterator[RequestOutput], request: Request
    ) -> None:
        try:
            async for output in events:
                if output.finished:
                    self._ended.add(index)
                self._queue.put_nowait(Event(index, output))
                if output.finished:
                    break
            self._put_error(index, request, LOST)
        except Exception:
            # Whatever went wrong in the transport, the client must hear that it is over.
            self._put_error(index, request, LOST)
        finally:
            # Closing the iterator is what aborts the request in the engine.
            close = getattr(events, "aclose", None)
            if close is not None:
                await close()
