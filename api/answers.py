"""The shapes of answers, in OpenAI's terms.

Owns: chunks of a stream, whole answers, usage and log-probability objects of both generating
routes. Does not own: the order in which they are sent (streaming.py), or errors (errors.py).

A choice's text is what its deltas joined give, streamed or not: both forms are made here of the
same deltas.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from lm_engine.outputs import SequenceDelta, TokenLogprob, Usage

JSON = dict[str, Any]

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot hold."""


@dataclass
class Choice:
    """What has arrived for one choice."""

    text: list[str] = field(default_factory=list)
    text_length: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, delta: SequenceDelta) -> None:
        self.text.append(delta.text)
        self.text_length += len(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs or ())
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason


def total_usage(parts: list[Usage]) -> Usage:
    """The usage of a request with several prompts."""
    return Usage(
        prompt_tokens=sum(part.prompt_tokens for part in parts),
        completion_tokens=sum(part.completion_tokens for part in parts),
        cached_tokens=sum(part.cached_tokens for part in parts),
        image_tokens=sum(part.image_tokens for part in parts),
    )


def usage_json(usage: Usage) -> JSON:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "image_tokens": usage.image_tokens,
            "text_tokens": usage.prompt_tokens - usage.image_tokens,
        },
    }


def _finite(logprob: float) -> float:
    return logprob if logprob >= LOWEST_LOGPROB else LOWEST_LOGPROB


def _token(token: bytes) -> str:
    return token.decode("utf-8", "replace")


def prompt_logprobs_json(entries: tuple[TokenLogprob | None, ...]) -> list[JSON | None]:
    """vLLM's form: per prompt token, {id: {logprob, rank, decoded_token}}."""
    result: list[JSON | None] = []
    for entry in entries:
        if entry is None:
            result.append(None)
            continue
        ranked = {
            str(token_id): {"logprob": _finite(lp), "rank": rank, "decoded_token": _token(token)}
            for rank, (token_id, token, lp) in enumerate(entry.top, start=1)
        }
        ranked[str(entry.token_id)] = {
            "logprob": _finite(entry.logprob),
            "rank": entry.rank,
            "decoded_token": _token(entry.token),
        }
        result.append(ranked)
    return result


@dataclass(frozen=True)
class AnswerShape:
    """What one response's objects have in common. Subclasses know a route's form."""

    id: str
    model: str
    with_logprobs: bool
    with_token_ids: bool
    created: int = field(default_factory=lambda: int(time.time()))

    object = ""
    chunk_object = ""

    def _frame(self, kind: str, choices: list[JSON]) -> JSON:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def chunk(self, index: int, delta: SequenceDelta, before: Choice) -> JSON:
        """One event for one choice; `before` is the choice without this delta."""
        entry = self._chunk_choice(index, delta, before)
        if self.with_token_ids:
            entry["token_ids"] = list(delta.token_ids)
        if delta.stop_reason is not None:
            entry["stop_reason"] = delta.stop_reason
        return self._frame(self.chunk_object, [entry])

    def bare_chunk(self, **fields: Any) -> JSON:
        """An event without choices: usage, progress."""
        return {**self._frame(self.chunk_object, []), **fields}

    def whole(self, choices: list[Choice], usage: Usage) -> JSON:
        entries = []
        for index, choice in enumerate(choices):
            entry = self._whole_choice(index, choice)
            if self.with_token_ids:
                entry["token_ids"] = choice.token_ids
            if choice.stop_reason is not None:
                entry["stop_reason"] = choice.stop_reason
            entries.append(entry)
        return {**self._frame(self.object, entries), "usage": usage_json(usage)}

    def _chunk_choice(self, index: int, delta: SequenceDelta, before: Choice) -> JSON:
        raise NotImplementedError

    def _whole_choice(self, index: int, choice: Choice) -> JSON:
        raise NotImplementedError


@dataclass(frozen=True)
class ChatShape(AnswerShape):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _logprobs(self, entries: list[TokenLogprob]) -> JSON:
        def one(token: bytes, logprob: float) -> JSON:
            return {"token": _token(token), "logprob": _finite(logprob), "bytes": list(token)}

        content = [
            {
                **one(entry.token, entry.logprob),
                "top_logprobs": [one(token, lp) for _, token, lp in entry.top],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _chunk_choice(self, index: int, delta: SequenceDelta, before: Choice) -> JSON:
        body: JSON = {"content": delta.text}
        if not before.text:
            # The role comes with the first text: a chunk of its own before prefill ends would
            # make clients measure a false time to first token.
            body = {"role": "assistant", **body}
        entry: JSON = {"index": index, "delta": body, "finish_reason": delta.finish_reason}
        if self.with_logprobs:
            entry["logprobs"] = self._logprobs(list(delta.logprobs or ()))
        return entry

    def _whole_choice(self, index: int, choice: Choice) -> JSON:
        return {
            "index": index,
            "message": {
                "role": "assistant",
                "content": "".join(choice.text),
                "refusal": None,
            },
            "logprobs": self._logprobs(choice.logprobs) if self.with_logprobs else None,
            "finish_reason": choice.finish_reason,
        }


@dataclass(frozen=True)
class CompletionShape(AnswerShape):
    object = "text_completion"
    chunk_object = "text_completion"

    def _logprobs(self, entries: list[TokenLogprob], start: int) -> JSON:
        offsets = []
        for entry in entries:
            offsets.append(start)
            start += len(_token(entry.token))
        return {
            "text_offset": offsets,
            "tokens": [_token(entry.token) for entry in entries],
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": [
                {_token(token): _finite(lp) for _, token, lp in entry.top} for entry in entries
            ],
        }

    def _chunk_choice(self, index: int, delta: SequenceDelta, before: Choice) -> JSON:
        logprobs = None
        if self.with_logprobs:
            logprobs = self._logprobs(list(delta.logprobs or ()), before.text_length)
        return {
            "index": index,
            "text": delta.text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
        }

    def _whole_choice(self, index: int, choice: Choice) -> JSON:
        return {
            "index": index,
            "text": "".join(choice.text),
            "logprobs": self._logprobs(choice.logprobs, 0) if self.with_logprobs else None,
            "finish_reason": choice.finish_reason,
        }
