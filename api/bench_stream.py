"""What a stream of server-sent events said, and when.

Owns: EventReader (bytes to events) and Answer (events to arrival times of tokens, usage, errors) of
/v1/chat/completions and /v1/completions. Does not own: sockets (bench_http.py).

A token has arrived with the first event that carries text, token ids or a reason to end. Events
that only name a role, report progress or keep the line alive are none: some servers send them
before the prompt was read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from api.bench_http import Exchange


class EventReader:
    """Splits a body into the data of its events, as the HTML standard does, comments left out."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Data lines of the events that `piece` completes."""
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


@dataclass(slots=True)
class Answer:
    """What has arrived of one streamed answer."""

    arrivals_s: list[float] = field(default_factory=list)
    """Of events with tokens; time.perf_counter() seconds."""
    texts: int = 0
    """Events with text: the count of tokens where the server reports no usage."""
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    done: bool = False
    """Whether the stream said that it was complete."""
    error: str | None = None
    _reader: EventReader = field(default_factory=EventReader)

    def on_data(self, now_s: float, piece: bytes) -> None:
        for data in self._reader.feed(piece):
            if data == b"[DONE]":
                self.done = True
                continue
            try:
                event = orjson.loads(data)
            except orjson.JSONDecodeError:
                self.error = self.error or f"an event is not JSON: {data[:80]!r}"
                continue
            self._take(now_s, event if isinstance(event, dict) else {})

    def _take(self, now_s: float, event: dict[str, Any]) -> None:
        if (error := event.get("error")) is not None:
            message = error.get("message") if isinstance(error, dict) else error
            self.error = self.error or str(message)
            return
        if isinstance(event.get("usage"), dict):
            self.usage = event["usage"]
        carries = False
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or choice
            text = delta.get("content") or delta.get("text") or delta.get("reasoning_content")
            carries |= bool(text) or bool(choice.get("token_ids"))
            self.texts += bool(text)
            if choice.get("finish_reason") is not None:
                self.finish_reason = str(choice["finish_reason"])
                # An end without text adds no token, unless nothing had text before.
                carries |= not self.arrivals_s
        if carries:
            self.arrivals_s.append(now_s)

    # -- what usage says ----------------------------------------------------------------------

    @property
    def completion_tokens(self) -> int:
        told = _count(self.usage.get("completion_tokens"))
        return self.texts if told is None else told

    @property
    def prompt_tokens(self) -> int | None:
        return _count(self.usage.get("prompt_tokens"))

    def detail(self, name: str) -> int | None:
        """Of usage.prompt_tokens_details, `cached_tokens` say; None where the server is silent."""
        details = self.usage.get("prompt_tokens_details")
        return _count(details.get(name)) if isinstance(details, dict) else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def refusal(exchange: Exchange) -> str:
    """What the body of an error says, in one line."""
    try:
        found = orjson.loads(exchange.body)
        error = found.get("error", found)
        message = error.get("message") if isinstance(error, dict) else error
        return str(message or found)
    except (orjson.JSONDecodeError, AttributeError):
        return exchange.body[:200].decode("utf-8", "replace").strip()
