"""What the prefix cache holds, as it changes: GET /v1/kv/events.

Owns: the route, its server-sent events, and how many readers a tenant may have. Does not own:
numbers and snapshots (lm_engine/kv_log.py), or what a block is called (kv_offload/kv_events.py).

The first event is a snapshot, in as many parts as it needs, unless `Last-Event-ID` names an event
behind which everything is still known. A snapshot says "forget what you knew": it comes again when
the reader was too slow. Everybody sees the blocks of the own tenant only, and numbers of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.errors import NotFoundError, TooManyRequestsError
from api.server import Server
from api.streaming import COMMENT, disconnected
from kv_offload.kv_events import KVEvent, root_name
from kv_offload.superblock import SUPERBLOCK_TOKENS
from lm_engine.kv_log import KVEventLog, KVReader, KVSnapshot, Numbered

_MOST_READERS = 16
_AT_ONCE = 512
"""Events, or blocks of a snapshot, in one write."""


def kv_events(server: Server, request: Request) -> Response:
    log = server.client.kv_log
    if log is None:
        raise NotFoundError(
            "This server does not publish what its prefix cache holds. Start it with --kv-events.",
            code="kv_events_off",
        )
    server.ready_model()
    tenant = request.state.tenant
    if log.num_readers(tenant) >= _MOST_READERS:
        raise TooManyRequestsError(
            f"{_MOST_READERS} readers of this API key are connected; close one of them.",
            retry_after_s=5,
        )
    about = {
        "stream": log.stream,
        "model": server.model_name,
        "tenant": tenant,
        "root": root_name(server.model_name, tenant).key.hex(),
        "block_size": server.config.block_size,
        "superblock_tokens": SUPERBLOCK_TOKENS,
    }
    after = _number(log, request.headers.get("last-event-id", ""))
    return KVEventStream(log, tenant, after, about, server.config.keepalive_s)


def _number(log: KVEventLog, last_event_id: str) -> int | None:
    """None for a reader that starts, or comes from another stream."""
    stream, _, number = last_event_id.rpartition("-")
    known = stream == log.stream and number.isascii() and number.isdigit() and len(number) < 20
    return int(number) if known else None


class KVEventStream(Response):
    """Goes on until the reader leaves or the server ends."""

    def __init__(
        self,
        log: KVEventLog,
        tenant: str,
        after: int | None,
        about: dict[str, Any],
        keepalive_s: float,
    ) -> None:
        super().__init__(
            media_type="text/event-stream",
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
        )
        del self.headers["content-length"]
        self._log, self._tenant, self._after = log, tenant, after
        self._about = about
        self._keepalive_s = keepalive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reader = self._log.reader(self._tenant, self._after)
        sender = asyncio.create_task(self._send(reader, send))
        watcher = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait({sender, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reader.close()
            watcher.cancel()
            sender.cancel()
            results = await asyncio.gather(sender, watcher, return_exceptions=True)
        if isinstance(results[0], Exception):
            raise results[0]

    async def _send(self, reader: KVReader, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        while not reader.ended:
            try:
                # Not wait_for: before Python 3.12 it swallows a cancellation that meets an event.
                async with asyncio.timeout(self._keepalive_s):
                    await reader.news.wait()
            except TimeoutError:
                await _write(send, COMMENT)
                continue
            taken = reader.take(_AT_ONCE)
            if isinstance(taken, KVSnapshot):
                for part in self._snapshot(taken):
                    await _write(send, part)
            elif taken:
                await _write(send, b"".join(map(self._change, taken)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _snapshot(self, snapshot: KVSnapshot) -> Iterator[bytes]:
        """Only the last part has an id: whoever heard less starts over."""
        blocks = snapshot.blocks
        for start in range(0, max(1, len(blocks)), _AT_ONCE):
            last = start + _AT_ONCE >= len(blocks)
            body = {
                "seq": snapshot.number,
                "part": start // _AT_ONCE,
                "last": last,
                **self._about,
                "blocks": [_block(event) for event in blocks[start : start + _AT_ONCE]],
            }
            yield self._event("snapshot", body, snapshot.number if last else None)

    def _change(self, numbered: Numbered) -> bytes:
        event = numbered.event
        body: dict[str, Any] = {"seq": numbered.number}
        if event.kind == "stored":
            body |= _block(event)
        elif event.kind == "evicted":
            body |= {"tier": event.tier, "key": event.key.hex()}
        else:
            body |= {"tier": event.tier}
        return self._event(event.kind, body, numbered.number)

    def _event(self, kind: str, body: dict[str, Any], number: int | None) -> bytes:
        name = b"" if number is None else f"id: {self._log.stream}-{number}\n".encode()
        return name + f"event: {kind}\n".encode() + b"data: " + orjson.dumps(body) + b"\n\n"


def _block(event: KVEvent) -> dict[str, Any]:
    return {
        "tier": event.tier,
        "key": event.key.hex(),
        "parent": event.parent.hex(),
        "num_tokens": event.num_tokens,
    }


async def _write(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
