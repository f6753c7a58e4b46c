"""The server that is measured: what it is, what it takes, and how it counts tokens.

Owns: Target and how it is found out, the fields that each kind of server understands beyond
OpenAI's, counting the tokens of a prompt, and the counters that it publishes. Does not own: the
measured requests (bench_http.py), or what prompts are made of (bench_words.py).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from api.bench_http import Address
from api.bench_words import Count

_AT_ONCE = 8

Endpoint = Literal["chat", "completions"]
PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}

_OWNERS = {"longlens": "longlens", "vllm": "vllm", "llamacpp": "llama.cpp", "sglang": "sglang"}
"""`owned_by` of a model card: the server's own word for what it is."""
_FULL_LENGTH: dict[str, dict[str, Any]] = {
    kind: {"ignore_eos": True} for kind in ("longlens", "vllm", "llama.cpp", "sglang")
}
"""Makes an answer as long as was asked for. Others are only sent OpenAI's fields."""
_ALWAYS: dict[str, dict[str, Any]] = {"longlens": {"return_token_ids": True}}
"""A token whose text is held back, half of a character say, is seen by its id."""


class TargetError(Exception):
    """The server cannot be measured; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Target:
    address: Address
    model: str
    kind: str
    """longlens, vllm, llama.cpp, sglang, or unknown."""
    max_model_len: int | None
    headers: dict[str, str]

    def body(
        self,
        endpoint: Endpoint,
        content: Any,
        max_tokens: int,
        *,
        stream: bool = True,
        full_length: bool = True,
    ) -> dict[str, Any]:
        """A request of `content` (text or content parts) for `max_tokens` greedy tokens."""
        prompt: dict[str, Any] = {"prompt": content}
        if endpoint == "chat":
            prompt = {"messages": [{"role": "user", "content": content}]}
        body = {"model": self.model, **prompt, "max_tokens": max_tokens, "temperature": 0.0}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if full_length:
            body |= _FULL_LENGTH.get(self.kind, {})
        return body | _ALWAYS.get(self.kind, {})

    @property
    def keeps_lengths(self) -> bool:
        """Whether the server can be told to go on to the wanted length."""
        return self.kind in _FULL_LENGTH


class TargetClient:
    """The few requests beside the measured ones. Use as an asynchronous context."""

    def __init__(self, address: Address, api_key: str | None, timeout_s: float) -> None:
        self.address = address
        self.headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._http = httpx.AsyncClient(
            base_url=str(address),
            headers=self.headers,
            timeout=timeout_s,
            verify=address.scheme == "https",  # loading certificates takes a while
            trust_env=False,
        )

    async def __aenter__(self) -> TargetClient:
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *details: Any) -> None:
        await self._http.__aexit__(*details)

    async def find(self, model: str | None) -> Target:
        """Raises TargetError when nobody answers, or not as an OpenAI-compatible server."""
        answer = await self._ask("GET", "/v1/models")
        cards = answer.get("data")
        if not isinstance(cards, list) or not cards or not isinstance(cards[0], dict):
            raise TargetError(f"{self.address}/v1/models lists no model; is it ready?")
        names = [str(card.get("id")) for card in cards if isinstance(card, dict)]
        if model is not None and model not in names:
            raise TargetError(f"--model {model}: the server has {', '.join(names)}.")
        card = cards[names.index(model) if model is not None else 0]
        length = card.get("max_model_len")
        return Target(
            self.address,
            str(card.get("id")),
            _OWNERS.get(str(card.get("owned_by")).lower(), "unknown"),
            length if isinstance(length, int) else None,
            self.headers,
        )

    async def counter(self, target: Target, endpoint: Endpoint) -> tuple[Count, str]:
        """How many tokens a prompt has here, and the way in which that is told: by a tokenizing
        route where there is one, else by the usage of a request for one token. Raises TargetError.
        """
        ways: list[tuple[str, Callable[[str], Awaitable[int]]]] = []
        if target.kind in ("longlens", "vllm"):
            ways.append(("/tokenize", lambda text: self._tokenize(target, endpoint, text)))
        if target.kind == "llama.cpp":
            ways.append(("/tokenize", lambda text: self._llama_tokenize(endpoint, text)))
        ways.append(("usage", lambda text: self._usage(target, endpoint, text)))
        fault: TargetError | None = None
        for name, count in ways:
            try:
                await count("Text: a test")
            except TargetError as error:
                fault = error
                continue
            return count, name
        raise TargetError(f"The server's tokens cannot be counted: {fault}")

    async def reset_prefix_cache(self, target: Target) -> bool:
        if target.kind != "longlens":
            return False
        await self._ask("POST", "/reset_prefix_cache", {})
        return True

    async def counters(self) -> dict[str, float]:
        """The server's own counters, `name{labels}` without the model's name to value; none where
        it has no /metrics."""
        try:
            answer = await self._http.get("/metrics")
        except httpx.HTTPError:
            return {}
        return parse_counters(answer.text) if answer.status_code == 200 else {}

    # -- counting -----------------------------------------------------------------------------

    async def _tokenize(self, target: Target, endpoint: Endpoint, text: str) -> int:
        prompt: dict[str, Any] = {"prompt": text}
        if endpoint == "chat":
            prompt = {"messages": [{"role": "user", "content": text}]}
        answer = await self._ask("POST", "/tokenize", {"model": target.model, **prompt})
        return _whole(answer.get("count"), "/tokenize", "count")

    async def _llama_tokenize(self, endpoint: Endpoint, text: str) -> int:
        if endpoint == "chat":
            messages = {"messages": [{"role": "user", "content": text}]}
            text = str((await self._ask("POST", "/apply-template", messages)).get("prompt"))
        fields = {"content": text, "add_special": True, "parse_special": True}
        answer = await self._ask("POST", "/tokenize", fields)
        tokens = answer.get("tokens")
        return len(tokens) if isinstance(tokens, list) else _whole(None, "/tokenize", "tokens")

    async def _usage(self, target: Target, endpoint: Endpoint, text: str) -> int:
        body = target.body(endpoint, text, 1, stream=False, full_length=False)
        answer = await self._ask("POST", PATHS[endpoint], body)
        usage = answer.get("usage")
        found = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        return _whole(found, PATHS[endpoint], "usage.prompt_tokens")

    async def _ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        try:
            async with self._turns:
                answer = await self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise TargetError(
                f"No answer from {self.address} ({type(error).__name__}). Is a server running "
                "there? Start one by `longlens serve`, or give another address by --url."
            ) from error
        try:
            found = answer.json()
        except ValueError:
            found = {}
        if answer.status_code in (401, 403):
            raise TargetError(f"{self.address} wants a key ({answer.status_code}); use --api-key.")
        if answer.status_code == 503:
            raise TargetError(f"{self.address} is not ready (503). Wait until /health says so.")
        if answer.status_code != 200:
            raise TargetError(f"{path} answered {answer.status_code}: {_message(found)}")
        return found if isinstance(found, dict) else {}


def _message(found: Any) -> str:
    error = found.get("error", found) if isinstance(found, dict) else found
    return str(error.get("message", error) if isinstance(error, dict) else error)[:300]


def _whole(value: Any, path: str, name: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise TargetError(f"{path} answered without {name}")


_SAMPLE = re.compile(r"^(\w[\w:]*)(?:\{([^}]*)\})? ([-+0-9.eE]+)$", re.MULTILINE)
_MODEL_LABEL = re.compile(r'(?:model_name|engine)="[^"]*",?')


def parse_counters(text: str) -> dict[str, float]:
    """`*_total` samples of Prometheus text, without prefixes like vllm: and the model's label."""
    found: dict[str, float] = {}
    for name, labels, value in _SAMPLE.findall(text):
        if name.endswith("_total"):
            plain = name.rpartition(":")[2]
            rest = _MODEL_LABEL.sub("", labels).strip(",")
            key = f"{plain}{{{rest}}}" if rest else plain
            found[key] = found.get(key, 0.0) + float(value)
    return found
