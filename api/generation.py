"""Running one generating request: events in, an answer or a stream out.

Owns: Run - the state of one request while its events arrive (choices, usage, timings, metrics) -
and the moment from which a stream may begin. Does not own: parsing (completions.py), the shapes
(answers.py), or sending (streaming.py).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from api.answers import AnswerShape, Choice, total_usage
from api.errors import ServerError, from_engine
from api.events import Event, EventFeed
from api.evidence import EvidenceReport
from api.metrics import Metrics
from lm_engine.client import MediaItem
from lm_engine.outputs import (
    Estimate,
    RequestOutput,
    SequenceDelta,
    Timing,
    TokenLogprob,
    Usage,
)

ESTIMATE_HEADER = "x-ttft-estimate-ms"


@dataclass(frozen=True, slots=True)
class Advance:
    """One delta, the choice it belongs to, and that choice as it was before."""

    index: int
    delta: SequenceDelta
    before: Choice


@dataclass
class Run:
    feed: EventFeed
    shape: AnswerShape
    metrics: Metrics
    n: int
    """Choices per prompt."""
    prompt_lengths: tuple[int, ...]
    """Tokens of each prompt, known before the first event."""
    image_tokens: int
    arrival_s: float
    """Monotonic seconds of the request's first byte."""
    received_s: float
    """And of its last."""
    has_media: bool = False
    evidence: EvidenceReport | None = None
    """Its baselines are added to the feed, behind the prompts."""
    media: tuple[MediaItem, ...] = ()
    _baselines: dict[int, int] = field(default_factory=dict)
    """The prompt whose baseline an event's `prompt` is."""
    choices: list[Choice] = field(default_factory=list)
    usages: dict[int, Usage] = field(default_factory=dict)
    cached_tokens: dict[int, int] = field(default_factory=dict)
    """By prompt, from its first token on."""
    timings: dict[int, Timing] = field(default_factory=dict)
    estimates: dict[int, Estimate] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[TokenLogprob | None, ...]] = field(default_factory=dict)
    first_token_s: float | None = None
    _last_token_s: float = 0.0
    _submitted_s: float = 0.0

    @property
    def prompts(self) -> int:
        return len(self.prompt_lengths)

    def __post_init__(self) -> None:
        self._submitted_s = time.monotonic()
        self.choices = [Choice() for _ in range(self.n * self.prompts)]

    async def until_valid(self, patience_s: float) -> None:
        """Returns once nothing can turn the request into a 4xx any more.

        That is the first event without an error, which tells what to expect; with images, the one
        that says that all of them were decoded, or a token. A text request has been checked in
        full before it was submitted, so after `patience_s` its stream may begin (and send
        keep-alive comments).
        Raises the ApiError that the engine's refusal amounts to.
        """
        while True:
            event = await self.feed.next(None if self.has_media else patience_s)
            if event is None:
                return
            if event.output.error is not None:
                raise from_engine(event.output.error)
            if event.output.estimate is not None:
                self.estimates[event.prompt] = event.output.estimate
                if self.has_media or len(self.estimates) < self.prompts:
                    continue
                return
            if not self.has_media or event.output.media_checked or event.output.deltas:
                self.feed.push_back(event)
                return

    def take(self, event: Event) -> list[Advance]:
        """Books an event. Raises ApiError when it carries a failure."""
        output = event.output
        if event.prompt in self._baselines:
            assert self.evidence is not None
            self.evidence.take_baseline(self._baselines[event.prompt], output)
            return []
        if output.error is not None:
            self._refuse_partial(output)
            raise from_engine(output.error)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs[event.prompt] = output.prompt_logprobs
        advances = []
        for delta in output.deltas:
            if delta.finish_reason in ("abort", "error"):
                raise ServerError("The engine ended this request early. Send it again.")
            index = event.prompt * self.n + delta.index
            choice = self.choices[index]
            before = Choice(text=choice.text[:1], text_length=choice.text_length)
            choice.add(delta)
            if self.evidence is not None and delta.evidence is not None:
                self.evidence.add(index, delta.evidence)
            advances.append(Advance(index, delta, before))
            if delta.finish_reason is not None:
                self.metrics.choice_ended(delta.finish_reason)
        if output.deltas:
            self._clock()
            self._compare(event.prompt)
        if output.usage is not None:
            self.cached_tokens[event.prompt] = output.usage.cached_tokens
        if output.finished:
            self.usages[event.prompt] = output.usage or Usage(0, 0)
            if output.timing is not None:
                self.timings[event.prompt] = output.timing
            if len(self.usages) == self.prompts:
                seconds = time.monotonic() - self.arrival_s
                self.metrics.ended(seconds, self.usage(), self.timings.values())
        return advances

    def _compare(self, prompt: int) -> None:
        """Asks the neutral question once the prompt's KV is there: before, it would compete for it
        with the answer's first token."""
        if self.evidence is not None:
            request = self.evidence.next_baseline(prompt)
            if request is not None:
                self._baselines[self.feed.add(request, self.media)] = prompt

    def _refuse_partial(self, output: RequestOutput) -> None:
        if output.error is not None and output.error.kind == "internal":
            self.metrics.choice_ended("error")

    def _clock(self) -> None:
        now = time.monotonic()
        if self.first_token_s is None:
            self.first_token_s = now - self.arrival_s
            self.metrics.first_token(self.first_token_s)
        else:
            self.metrics.token_gap(now - self._last_token_s)
        self._last_token_s = now

    async def collect(self) -> None:
        """Takes every event. Raises ApiError."""
        while not self.feed.done:
            event = await self.feed.next()
            if event is not None:
                self.take(event)

    def usage(self) -> Usage:
        """So far; final once the feed is done."""
        if len(self.usages) == self.prompts:
            return total_usage(list(self.usages.values()))
        tokens = sum(len(choice.token_ids) for choice in self.choices)
        cached = sum(self.cached_tokens.values())
        return Usage(sum(self.prompt_lengths), tokens, cached, self.image_tokens)

    def headers(self) -> dict[str, str]:
        """Of the answer: where its time went, or has gone so far, and of a stream when its first
        token is expected, counted from the last byte of the request."""
        found = {"server-timing": self.server_timing()}
        if self.estimates:
            expected_s = max(estimate.ttft_s for estimate in self.estimates.values())
            found[ESTIMATE_HEADER] = f"{expected_s * 1e3:.0f}"
        return found

    def server_timing(self) -> str:
        """The Server-Timing header: milliseconds, the longest over the prompts. Of a whole answer,
        receive, prepare, queue, prefill, decode and other add up to total."""
        now = time.monotonic()
        spans = {
            "total": now - self.arrival_s,
            "receive": self.received_s - self.arrival_s,
            "prepare": self._submitted_s - self.received_s,
        }
        if self.timings:
            longest = max(self.timings.values(), key=lambda t: t.queue_s + t.prefill_s + t.decode_s)
            engine = {
                name: getattr(longest, f"{name}_s") for name in ("queue", "prefill", "decode")
            }
            # What is left passed between the processes, and in making the answer.
            other = now - self._submitted_s - sum(engine.values())
            spans |= {**engine, "other": max(0.0, other)}
            for name in ("image_decode", "encode"):
                spans[name] = max(getattr(timing, f"{name}_s") for timing in self.timings.values())
        if self.first_token_s is not None:
            spans["ttft"] = self.first_token_s
        parts = [f"{name};dur={seconds * 1000:.2f}" for name, seconds in spans.items()]
        ahead = sum(timing.ahead_tokens for timing in self.timings.values())
        if ahead:
            parts.append(f'ahead;desc="{ahead} tokens"')
        return ", ".join(parts)
