"""A scripted engine and the things around it, for tests of the API alone.

Owns: FakeEngine (an EngineClient without a model), a running server on loopback, and small
helpers. Does not own: model folders (checkpoints.py in tests/).

FakeEngine answers with `script` text (or an echo of the prompt's ids), one token per event, and
honours what the contract says: stop strings, max_tokens, n, log-probabilities, aborts, delays and
errors. It decides stop strings and finish reasons itself, as the real engine does.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from chunked_prefill.calibration_file import Calibration, CalibrationProgress
from chunked_prefill.request import Request
from chunked_prefill.settings import SchedulingSettings, SettingsError
from chunked_prefill.step_time import StepTimeModel
from lm_engine.client import EngineStats, EngineStatus, MediaItem, ModelInfo
from lm_engine.kv_log import KVEventLog
from lm_engine.outputs import (
    Estimate,
    FinishReason,
    RequestError,
    RequestOutput,
    SequenceDelta,
    Timing,
    TokenLogprob,
    Usage,
)
from lm_engine.reconfiguration import SchedulingState

MODEL = StepTimeModel(0.01, 0.0, 1e-4, 0.0, 0.0)
INFO = ModelInfo(
    name="tiny",
    max_model_len=2048,
    vocab_size=384,
    kv_capacity_tokens=4096,
    max_num_seqs=8,
    max_num_batched_tokens=256,
    embedding_rows=1024,
)


@dataclass
class Seen:
    """A submission as the engine got it."""

    request: Request
    media: tuple[MediaItem, ...]
    media_bytes: tuple[bytes, ...]
    ended: str = "running"


@dataclass
class FakeEngine:
    """`script`: the text each choice generates, one character per token."""

    script: str = "Hello, world. This is a test."
    delay_s: float = 0.0
    prefill_s: float = 0.0
    error: RequestError | None = None
    error_after: int | None = None
    """Tokens before `error`; None gives it at once."""
    crash_after: int | None = None
    """Tokens before the iterator itself breaks."""
    gate: asyncio.Event | None = None
    """When set, generation waits for it after the media check."""
    hold: Path | None = None
    """While this file exists, nothing follows the first token."""
    check_media: bool = True
    progress: int = 0
    """Prompt-progress events before the first token."""
    current: EngineStatus = field(
        default_factory=lambda: EngineStatus(
            "ready", alive=True, model=INFO, stats=EngineStats(num_running=0)
        )
    )
    seen: list[Seen] = field(default_factory=list)
    running: int = 0
    closed_after_s: float | None = None
    resets: list[str] = field(default_factory=list)
    """Tenants whose cache was reset."""
    foreseen: Estimate | RequestError = field(
        default_factory=lambda: Estimate(20, 16, 0, 0.25, 0.125, 0.0625, 2, 1, 300, True)
    )
    """What every question gets, and every request that wants to be told."""
    asked: list[Seen] = field(default_factory=list)
    kv_log: KVEventLog | None = None
    calibration: Calibration | None = None
    settings: SchedulingSettings = field(
        default_factory=lambda: SchedulingSettings(max_num_seqs=8, max_num_batched_tokens=256)
    )

    def status(self) -> EngineStatus:
        stats = replace(self.current.stats or EngineStats(), num_running=self.running)
        return replace(self.current, stats=stats)

    async def estimate(
        self, request: Request, media: tuple[MediaItem, ...]
    ) -> Estimate | RequestError:
        self.asked.append(Seen(request, media, ()))
        return self.foreseen

    async def scheduling(
        self, change: SchedulingSettings | None = None
    ) -> SchedulingState | RequestError:
        if change is not None:
            try:
                change.check(max_num_seqs=8, max_num_batched_tokens=256)
            except SettingsError as error:
                return RequestError("invalid", str(error), error.name)
            self.settings = change
        return SchedulingState(
            self.settings, 8, 256, 256, 16, True, MODEL, 1.0, 99, calibration=self.calibration
        )

    async def calibrate(
        self, seconds: float
    ) -> AsyncIterator[CalibrationProgress | Calibration | RequestError]:
        yield CalibrationProgress("steps", 0.5, seconds)
        if self.running:
            yield RequestError("overloaded", "requests run; calibrate an idle server")
            return
        self.calibration = Calibration(MODEL, (0.9, 1.0, 1.1), 0.01, 40, seconds)
        yield self.calibration

    def reset_prefix_cache(self, tenant: str) -> bool:
        self.resets.append(tenant)
        return True

    async def close(self, *, drain_s: float) -> None:
        self.closed_after_s = drain_s

    def submit(
        self, request: Request, media: tuple[MediaItem, ...]
    ) -> AsyncIterator[RequestOutput]:
        contents = tuple(Path(item.path).read_bytes() for item in media if item.path)
        seen = Seen(request, media, contents)
        self.seen.append(seen)
        return self._run(request, seen)

    async def _run(self, request: Request, seen: Seen) -> AsyncIterator[RequestOutput]:
        self.running += 1
        try:
            async for output in self._events(request, seen):
                if output.finished:
                    seen.ended = "error" if output.error else "finished"
                yield output
        finally:
            self.running -= 1
            if seen.ended == "running":
                seen.ended = "aborted"

    async def _events(self, request: Request, seen: Seen) -> AsyncIterator[RequestOutput]:
        rid = request.request_id
        if self.error is not None and self.error_after is None:
            yield RequestOutput(rid, finished=True, error=self.error)
            return
        if request.wants_estimate and isinstance(self.foreseen, Estimate):
            yield RequestOutput(rid, estimate=self.foreseen)
        if seen.media and self.check_media:
            yield RequestOutput(rid, media_checked=True)
        if self.gate is not None:
            await self.gate.wait()
        total = request.num_prompt_tokens
        for part in range(1, self.progress + 1):
            yield RequestOutput(rid, prompt_progress=(total * part // self.progress, total))
        if self.prefill_s:
            await asyncio.sleep(self.prefill_s)
        choices = [_Choice(index, self.script, request) for index in range(request.sampling.n)]
        produced = 0
        first = True
        while any(choice.finish is None for choice in choices):
            if self.error is not None and self.error_after == produced:
                yield RequestOutput(rid, finished=True, error=self.error)
                return
            if self.crash_after == produced:
                raise ConnectionError("socket /tmp/engine.sock broke at 0xdeadbeef")
            deltas = tuple(c.step() for c in choices if c.finish is None)
            produced += 1
            logprobs = None
            if first and request.sampling.prompt_logprobs is not None:
                logprobs = _prompt_logprobs(request)
            first = False
            done = all(choice.finish is not None for choice in choices)
            yield RequestOutput(
                rid,
                deltas=deltas,
                prompt_logprobs=logprobs,
                finished=done,
                usage=self._usage(request, choices) if done or produced == 1 else None,
                timing=Timing(0.001, 0.002, 0.003, 0.004, 0.005) if done else None,
            )
            await asyncio.sleep(self.delay_s)
            while self.hold is not None and self.hold.exists():
                await asyncio.sleep(0.02)

    @staticmethod
    def _usage(request: Request, choices: list[_Choice]) -> Usage:
        return Usage(
            prompt_tokens=request.num_prompt_tokens,
            completion_tokens=sum(choice.count for choice in choices),
            cached_tokens=min(16, request.num_prompt_tokens - 1),
            image_tokens=sum(span.length for span in request.image_spans),
        )


class _Choice:
    """One character per token; text that may begin a stop string is held back."""

    def __init__(self, index: int, script: str, request: Request):
        self.index = index
        self.params = request.sampling
        seed = self.params.seed or 0
        turn = (seed + index) % len(script) if self.params.temperature > 0 and index else 0
        self.script = script[turn:] + script[:turn]
        self.count = 0
        self.text = ""
        self.sent = 0
        self.finish: FinishReason | None = None

    def step(self) -> SequenceDelta:
        character = self.script[self.count % len(self.script)]
        self.count += 1
        self.text += character
        reason: FinishReason | None = None
        stop_reason: str | int | None = None
        cut = len(self.text)
        for stop in self.params.stop:
            at = self.text.find(stop)
            if at >= 0 and self.count >= self.params.min_tokens:
                reason, stop_reason = "stop", stop
                cut = at + (len(stop) if self.params.include_stop else 0)
        if reason is None and self.count == len(self.script) and not self.params.ignore_eos:
            reason = "stop"
        if reason is None and self.count == self.params.max_tokens:
            reason = "length"
        if reason is None:
            held = max((_overlap(self.text, stop) for stop in self.params.stop), default=0)
            cut = len(self.text) - held
        piece = self.text[self.sent : cut]
        self.sent = max(self.sent, cut)
        self.finish = reason
        return SequenceDelta(
            self.index,
            piece,
            (ord(character) % 256,),
            self._logprobs(character),
            reason,
            stop_reason,
        )

    def _logprobs(self, character: str) -> tuple[TokenLogprob, ...] | None:
        if self.params.logprobs is None:
            return None
        token = character.encode()
        top = tuple((rank, bytes([65 + rank]), -0.5 - rank) for rank in range(self.params.logprobs))
        return (TokenLogprob(ord(character) % 256, token, -0.25, 1, top),)


def _overlap(text: str, stop: str) -> int:
    return next((n for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n])), 0)


def _prompt_logprobs(request: Request) -> tuple[TokenLogprob | None, ...]:
    entries: list[TokenLogprob | None] = [None]
    for token_id in request.token_ids[1:]:
        entries.append(TokenLogprob(token_id, b"x", float("-inf"), 3, ((7, b"y", -0.1),)))
    return tuple(entries)


@contextlib.contextmanager
def served(app: FastAPI, **options: Any) -> Iterator[str]:
    """Runs the application under uvicorn on loopback; yields its address."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    config = uvicorn.Config(app, "127.0.0.1", port, log_level="error", ws="none", **options)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(timeout=5)
        server.force_exit = True  # streams that a failed test left open
        thread.join(timeout=5)
        assert not thread.is_alive()
