"""`longlens chat`: a conversation with a server, in a terminal.

Owns: the loop of questions, images put into them, and the streamed answers. Does not own: the
server; it speaks HTTP only, so any OpenAI-compatible one will do.
"""

from __future__ import annotations

import base64
import json
import mimetypes
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

HELP = "/image FILE adds an image, /clear starts over, /quit ends"


class ChatError(Exception):
    """The server refused or cannot be reached; the message says why."""


@dataclass
class Conversation:
    url: str
    api_key: str | None = None
    model: str | None = None
    max_tokens: int | None = None
    timeout_s: float = 600.0
    messages: list[dict[str, Any]] = field(default_factory=list)
    pending: list[dict[str, Any]] = field(default_factory=list)
    """Image parts that go into the next question."""

    def add_image(self, path: Path) -> None:
        try:
            data = path.expanduser().read_bytes()
        except OSError as error:
            raise ChatError(f"{path} cannot be read: {error.strerror}.") from error
        kind = mimetypes.guess_type(path.name)[0] or "image/png"
        uri = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        self.pending.append({"type": "image_url", "image_url": {"url": uri}})

    def ask(self, question: str) -> Iterator[str]:
        """Yields the answer's text as it arrives, and keeps both in the conversation."""
        content: Any = question
        if self.pending:
            content = [*self.pending, {"type": "text", "text": question}]
        messages = [*self.messages, {"role": "user", "content": content}]
        body: dict[str, Any] = {
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.model is not None:
            body["model"] = self.model
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        started = time.monotonic()
        answer: list[str] = []
        first_s: float | None = None
        usage: dict[str, Any] = {}
        for event in self._events(body):
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                text = choice["delta"].get("content") or ""
                if text and first_s is None:
                    first_s = time.monotonic() - started
                answer.append(text)
                yield text
        self.messages = [*messages, {"role": "assistant", "content": "".join(answer)}]
        self.pending = []
        self.last = Statistics(first_s or 0.0, time.monotonic() - started, usage)

    def _events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        headers = {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}
        base = self.url if "://" in self.url else f"http://{self.url}"
        address = f"{base.rstrip('/').removesuffix('/v1')}/v1/chat/completions"
        try:
            with httpx.stream(
                "POST",
                address,
                json=body,
                headers=headers,
                timeout=self.timeout_s,
                verify=address.startswith("https:"),  # loading certificates takes a while
            ) as response:
                if response.status_code != 200:
                    response.read()
                    raise ChatError(_reason(response))
                for line in response.iter_lines():
                    data = line.removeprefix("data: ")
                    if data == line or data == "[DONE]":
                        continue
                    event = json.loads(data)
                    if "error" in event:
                        raise ChatError(event["error"]["message"])
                    yield event
        except httpx.HTTPError as error:
            raise ChatError(
                f"No answer from {self.url} ({type(error).__name__}). Is `longlens serve` running "
                "there? Give another address by --url."
            ) from error


@dataclass(frozen=True, slots=True)
class Statistics:
    first_token_s: float
    total_s: float
    usage: dict[str, Any]

    def __str__(self) -> str:
        tokens = self.usage.get("completion_tokens", 0)
        details = self.usage.get("prompt_tokens_details") or {}
        rate = (tokens - 1) / max(1e-9, self.total_s - self.first_token_s) if tokens > 1 else 0.0
        return (
            f"first token {self.first_token_s:.2f} s, {tokens} tokens at {rate:.1f}/s, prompt "
            f"{self.usage.get('prompt_tokens', 0)} ({details.get('image_tokens', 0)} of images)"
        )


def _reason(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"The server answered {response.status_code}."


def run(conversation: Conversation, console: Console, question: str | None) -> int:
    """One question, or a loop until /quit. Returns the exit code."""
    if question is not None:
        return _answer(conversation, console, question)
    console.print(f"[dim]{conversation.url}  {HELP}[/dim]")
    while True:
        try:
            line = console.input("[bold]> [/bold]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return 0
        command, _, argument = line.partition(" ")
        if command in ("/quit", "/exit"):
            return 0
        if command == "/clear":
            conversation.messages, conversation.pending = [], []
        elif command == "/image":
            try:
                conversation.add_image(Path(argument.strip()))
            except ChatError as error:
                console.print(f"[red]{error}[/red]")
        elif command.startswith("/"):
            console.print(HELP)
        elif line:
            _answer(conversation, console, line)


def _answer(conversation: Conversation, console: Console, question: str) -> int:
    try:
        for text in conversation.ask(question):
            console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
    except ChatError as error:
        console.print(f"[red]{error}[/red]")
        return 1
    except KeyboardInterrupt:
        console.print("\n[dim]stopped[/dim]")
        return 130
    console.print(f"\n[dim]{conversation.last}[/dim]")
    return 0
