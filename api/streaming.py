"""Server-sent events.

Owns: EventStream, the response that sends a run as it advances: chunks, usage, progress, comments
in silence, an error as the last event, an abort when the client leaves. Does not own: what a chunk
looks like (answers.py), or whether the request is valid (decided before this begins).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.answers import usage_json
from api.errors import ApiError, from_engine
from api.events import SHUTDOWN, Event
from api.generation import Run
from api.schemas import StreamOptions

_DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"


def sse(body: Any) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


async def disconnected(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Owns `cleanup` from its creation on, and closes it however the response ends. What cancels
    it is the end of the server: the client is told so."""

    def __init__(
        self,
        run: Run,
        cleanup: AsyncExitStack,
        *,
        options: StreamOptions | None,
        progress: bool,
        keepalive_s: float,
        headers: dict[str, str],
    ):
        super().__init__(
            media_type="text/event-stream",
            # The second one keeps nginx from collecting the stream.
            headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers},
        )
        # Response sets the length of its empty body.
        del self.headers["content-length"]
        self._run = run
        self._cleanup = cleanup
        self._options = options or StreamOptions()
        self._progress = progress
        self._begun = False
        self._read: dict[int, int] = {}
        """Prompt tokens last reported, by prompt."""
        self._keepalive_s = keepalive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        shut_down = False
        async with self._cleanup:
            sender = asyncio.create_task(self._send(send))
            watcher = asyncio.create_task(disconnected(receive))
            try:
                await asyncio.wait({sender, watcher}, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                shut_down = True
                if not self._begun:
                    raise
            finally:
                watcher.cancel()
                sender.cancel()
                results = await asyncio.gather(sender, watcher, return_exceptions=True)
        if isinstance(results[0], Exception):
            raise results[0]
        if shut_down:
            await self._write(send, sse(from_engine(SHUTDOWN).body()))
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        self._begun = True
        try:
            while not self._run.feed.done:
                event = await self._run.feed.next(self._keepalive_s)
                body = COMMENT if event is None else b"".join(map(sse, self._chunks(event)))
                if body:
                    await self._write(send, body)
            await self._write(send, b"".join(self._tail()))
        except ApiError as error:
            await self._write(send, sse(error.body()))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    @staticmethod
    async def _write(send: Send, body: bytes) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": True})

    def _chunks(self, event: Event) -> Iterator[dict[str, Any]]:
        run = self._run
        if self._progress and event.prompt < run.prompts:
            yield from self._progress_chunk(event)
        for advance in run.take(event):
            chunk = run.shape.chunk(advance.index, advance.delta, advance.before)
            if self._options.continuous_usage_stats:
                chunk["usage"] = usage_json(run.usage())
            elif self._options.include_usage:
                chunk["usage"] = None
            yield chunk

    def _progress_chunk(self, event: Event) -> Iterator[dict[str, Any]]:
        """How much of a prompt has been read; all of it no later than its first token."""
        total = self._run.prompt_lengths[event.prompt]
        progress = event.output.prompt_progress
        processed = total if event.output.deltas else 0 if progress is None else progress[0]
        if processed > self._read.get(event.prompt, 0):
            self._read[event.prompt] = processed
            elapsed = time.monotonic() - self._run.arrival_s
            yield self._run.shape.bare_chunk(
                prompt_progress={
                    "processed": processed,
                    "total": total,
                    "time_ms": round(elapsed * 1000),
                }
            )

    def _tail(self) -> Iterator[bytes]:
        fields: dict[str, Any] = {}
        if self._run.evidence is not None:
            fields["evidence"] = self._run.evidence.json()
        if self._options.include_usage:
            fields["usage"] = usage_json(self._run.usage())
        if fields:
            yield sse(self._run.shape.bare_chunk(**fields))
        yield _DONE
