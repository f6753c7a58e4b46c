"""Many prompts at once, without a server: `Engine.generate`.

Owns: the loop that runs an idle engine until every prompt is answered, Completion and Choice, and
RequestFailedError. Does not own: chat templates and images' plans (a caller with images hands in
finished Requests), or anything about a single step (engine.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeGuard, cast

from chunked_prefill.request import Request, SamplingParams
from lm_engine.client import MediaItem
from lm_engine.outputs import (
    Evidence,
    FinishReason,
    RequestError,
    RequestOutput,
    SequenceDelta,
    Timing,
    TokenLogprob,
    Usage,
)

if TYPE_CHECKING:
    from lm_engine.engine import Engine

Prompt: TypeAlias = str | Sequence[int] | tuple[Request, tuple[MediaItem, ...]]
"""Text, token ids, or a finished request with its images."""

_IDLE_POLL_S = 0.0005
"""Between two looks at a vision stage in another process, when nothing else can be done."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a prompt's `n` answers."""

    text: str
    token_ids: tuple[int, ...]
    """The token that ended the answer included."""
    logprobs: tuple[TokenLogprob, ...] | None
    """One per token; None unless SamplingParams.logprobs asked."""
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    evidence: Evidence | None = None
    """Where its attention went, if SamplingParams.evidence asked."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The answers to one prompt; the properties are the first one's."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    usage: Usage
    timing: Timing
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        return self.choices[0].logprobs

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason


class RequestFailedError(Exception):
    """A prompt was refused or failed; `index` is its place and `error` says why, and in which
    field. All prompts are checked before the first is computed."""

    def __init__(self, index: int, error: RequestError) -> None:
        where = f" ({error.param})" if error.param else ""
        super().__init__(f"prompt {index}{where}: {error.message}")
        self.index = index
        self.error = error


def generate(
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    progress: bool = False,
) -> list[Completion]:
    """Answers every prompt, in their order; they share steps as online requests do.

    sampling: one for all prompts or one for each; None where every prompt is a Request that
        brings its own. A given one replaces a Request's.
    progress: shows a bar on standard error if that is a terminal.

    Raises RequestFailedError for the first prompt that fails, after the others were aborted;
    ValueError when `sampling` does not fit `prompts`; TypeError when `prompts` is a single string;
    RuntimeError when the engine already has requests, whose events would be lost here.
    """
    if engine.stats().num_running or engine.stats().num_waiting:
        raise RuntimeError("generate needs an idle engine; other requests are in flight")
    jobs = list(_requests(engine, prompts, sampling))
    answers = {request.request_id: _Answer(request) for request, _ in jobs}
    if len(answers) != len(jobs):
        raise ValueError("two requests have the same request_id; each needs its own")
    places = {request.request_id: index for index, (request, _) in enumerate(jobs)}
    try:
        for request, media in jobs:
            for output in engine.add(request, media):
                _check(output, places)
        with _bar(len(jobs), progress) as bar:
            _run(engine, answers, places, bar)
    except BaseException:
        for request_id in places:
            engine.abort(request_id)
        raise
    return [answers[request.request_id].completion() for request, _ in jobs]


def _run(
    engine: Engine, answers: dict[str, _Answer], places: dict[str, int], bar: _Bar | None
) -> None:
    tokens, started = 0, time.monotonic()
    left = len(answers)
    while left:
        outputs = engine.step()
        if not outputs:
            time.sleep(_IDLE_POLL_S)
        for output in outputs:
            _check(output, places)
            answers[output.request_id].take(output)
            tokens += sum(len(delta.token_ids) for delta in output.deltas)
            left -= output.finished
            if bar is not None and output.finished:
                speed = tokens / max(1e-9, time.monotonic() - started)
                bar.set_postfix_str(f"{speed:.1f} tokens/s", refresh=False)
                bar.update(1)


def _requests(
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams] | None,
) -> Iterator[tuple[Request, tuple[MediaItem, ...]]]:
    if isinstance(prompts, str):
        raise TypeError("prompts is a single string; pass a list of prompts")
    each: Sequence[SamplingParams | None]
    if sampling is None or isinstance(sampling, SamplingParams):
        each = [sampling] * len(prompts)
    else:
        each = sampling
    if len(each) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts but {len(each)} sampling parameters")
    for index, (prompt, params) in enumerate(zip(prompts, each, strict=True)):
        if _is_request(prompt):
            request, media = prompt
            yield request if params is None else replace(request, sampling=params), media
            continue
        if params is None:
            raise ValueError(f"prompt {index} needs sampling parameters")
        if isinstance(prompt, str):
            ids = tuple(engine.tokenizer.encode(prompt).ids)
        else:
            ids = tuple(int(token) for token in cast("Sequence[int]", prompt))
        yield Request(f"generate-{index}", ids, params), ()


def _is_request(prompt: Prompt) -> TypeGuard[tuple[Request, tuple[MediaItem, ...]]]:
    return isinstance(prompt, tuple) and bool(prompt) and isinstance(prompt[0], Request)


def _check(output: RequestOutput, places: dict[str, int]) -> None:
    if output.error is not None:
        raise RequestFailedError(places[output.request_id], output.error)


@dataclass(slots=True)
class _Answer:
    """What a request's events have said so far."""

    request: Request
    deltas: list[list[SequenceDelta]] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    usage: Usage | None = None
    timing: Timing | None = None

    def take(self, output: RequestOutput) -> None:
        for delta in output.deltas:
            while len(self.deltas) <= delta.index:
                self.deltas.append([])
            self.deltas[delta.index].append(delta)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.usage = output.usage or self.usage
        self.timing = output.timing or self.timing

    def completion(self) -> Completion:
        assert self.usage is not None
        assert self.timing is not None
        return Completion(
            self.request.request_id,
            self.request.token_ids,
            tuple(_choice(deltas) for deltas in self.deltas),
            self.usage,
            self.timing,
            self.prompt_logprobs,
        )


def _choice(deltas: list[SequenceDelta]) -> Choice:
    last = deltas[-1]
    assert last.finish_reason is not None
    logprobs = None
    if last.logprobs is not None:
        logprobs = tuple(entry for delta in deltas for entry in delta.logprobs or ())
    return Choice(
        "".join(delta.text for delta in deltas),
        tuple(token for delta in deltas for token in delta.token_ids),
        logprobs,
        last.finish_reason,
        last.stop_reason,
        last.evidence,
    )


class _Bar(Protocol):
    def update(self, n: int) -> object: ...

    def set_postfix_str(self, s: str, refresh: bool) -> object: ...


@contextmanager
def _bar(total: int, wanted: bool) -> Iterator[_Bar | None]:
    """`disable=None` shows nothing unless on a terminal."""
    if not wanted:
        yield None
        return
    from tqdm import tqdm  # type: ignore[import-untyped]

    with tqdm(total=total, unit="prompt", disable=None) as bar:
        yield bar
