"""Sending a trace when it says so, whatever the server does with it.

Owns: the open loop (a request is sent at its time, however many are unanswered), building bodies
ahead of it, what became of each request (Outcome), and how late the client itself was (Lateness).
Does not own: HTTP (bench_http.py), prompts (bench_words.py), or conclusions (bench_report.py).
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import orjson

from api.bench_http import Connections, Exchange, ExchangeError
from api.bench_stream import Answer, refusal
from api.bench_target import PATHS, Endpoint, Target
from api.bench_words import PromptMaker
from chunked_prefill.goodput import RequestTimes
from chunked_prefill.trace import TraceRequest

_AHEAD = 64
"""Bodies that lie ready: as many requests may arrive at one moment without being late for it."""
_LEAD_S = 0.5
_TICK_S = 0.02
_GIL_SLICE_S = 0.0005
"""How long the thread that builds bodies may keep the loop waiting for Python's lock."""


@dataclass(slots=True)
class Outcome:
    """One request of the trace and what became of it. Times are time.perf_counter() seconds."""

    number: int
    request: TraceRequest
    wanted_s: float
    """When it should have been sent."""
    text_tokens: int
    """What its prompt should take without images."""
    exchange: Exchange = field(default_factory=Exchange)
    answer: Answer = field(default_factory=Answer)
    error: str | None = None
    """connect, closed, timeout, cut short, protocol, stream error, no tokens, interrupted, or
    http and the status."""
    message: str = ""
    """What the server said of an error."""

    @property
    def late_s(self) -> float:
        """How much later than wanted it was handed to a connection."""
        return max(0.0, self.exchange.started_s - self.wanted_s)

    def times(self, origin_s: float) -> RequestTimes:
        """As the promises see it: TTFT counts from the last byte of the body."""
        answer = self.answer
        return RequestTimes(
            request_id=str(self.number),
            arrival_s=(self.exchange.sent_s or self.wanted_s) - origin_s,
            delivered_s=[at - origin_s for at in answer.arrivals_s],
            output_tokens=max(answer.completion_tokens, 1 if answer.arrivals_s else 0),
            prompt_tokens=answer.prompt_tokens or 0,
            cached_tokens=answer.detail("cached_tokens") or 0,
            image_tokens=answer.detail("image_tokens") or 0,
            error=self.error,
        )


_Ready = tuple[Outcome, bytes] | Exception
"""A request with its body, or why the next one could not be built."""


@dataclass(slots=True)
class Lateness:
    """Whether the client was in its own way."""

    ticks_s: list[float] = field(default_factory=list)
    """How much too late each timer of the event loop went off."""

    async def watch(self) -> None:
        while True:
            due = time.perf_counter() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self.ticks_s.append(max(0.0, time.perf_counter() - due))

    def quantile(self, share: float) -> float:
        return float(np.quantile(self.ticks_s, share)) if self.ticks_s else 0.0


@dataclass(slots=True)
class State:
    """What a progress bar shows. `run` keeps it up to date."""

    total: int
    span_s: float
    """Of the arrivals."""
    started_s: float = 0.0
    sent: int = 0
    ended: int = 0
    failed: int = 0
    tokens: int = 0
    outcomes: list[Outcome] = field(default_factory=list)
    """Of the requests sent so far."""
    lateness: Lateness = field(default_factory=Lateness)
    interrupted: bool = False


class Load:
    """One replay of a trace against one server."""

    def __init__(
        self,
        target: Target,
        maker: PromptMaker,
        *,
        endpoint: Endpoint,
        full_length: bool = True,
        timeout_s: float = 600.0,
    ) -> None:
        self.target = target
        self._maker = maker
        self._endpoint: Endpoint = endpoint
        self._full_length = full_length
        self._timeout_s = timeout_s
        self._connections = Connections(target.address, target.headers)

    async def run(
        self, requests: Sequence[TraceRequest], on_change: Callable[[State], None]
    ) -> State:
        """Sends all of them at their times and waits for their ends. When this task is cancelled,
        what runs is aborted and what is known is returned. `on_change` is called at each sending
        and each end."""
        state = State(len(requests), requests[-1].arrival_s if requests else 0.0)
        ready: asyncio.Queue[_Ready] = asyncio.Queue(_AHEAD)
        watcher = asyncio.create_task(state.lateness.watch())
        running: set[asyncio.Task[None]] = set()
        before = sys.getswitchinterval()
        sys.setswitchinterval(_GIL_SLICE_S)
        with ThreadPoolExecutor(1, thread_name_prefix="prompts") as pool:
            builder = asyncio.create_task(self._build_all(requests, ready, pool))
            try:
                await self._send_all(state, ready, builder, running, on_change)
                while running:
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                state.interrupted = True
            finally:
                sys.setswitchinterval(before)
                tasks = [builder, watcher, *running]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await self._connections.close()
        return state

    async def _build_all(
        self,
        requests: Sequence[TraceRequest],
        ready: asyncio.Queue[_Ready],
        pool: ThreadPoolExecutor,
    ) -> None:
        loop = asyncio.get_running_loop()
        try:
            for number, request in enumerate(requests):
                await ready.put(await loop.run_in_executor(pool, self._build, number, request))
        except Exception as error:
            # Whoever waits for the next body has to hear of it.
            await ready.put(error)

    def _build(self, number: int, request: TraceRequest) -> tuple[Outcome, bytes]:
        made = self._maker.make(request, number)
        body = self.target.body(
            self._endpoint, made.content, request.output_tokens, full_length=self._full_length
        )
        return Outcome(number, request, 0.0, made.text_tokens), orjson.dumps(body)

    async def _send_all(
        self,
        state: State,
        ready: asyncio.Queue[_Ready],
        builder: asyncio.Task[None],
        running: set[asyncio.Task[None]],
        on_change: Callable[[State], None],
    ) -> None:
        # The first bodies are built before the clock starts.
        while not builder.done() and not ready.full():
            await asyncio.sleep(_TICK_S)
        state.started_s = time.perf_counter() + (_LEAD_S if state.total else 0.0)
        for _ in range(state.total):
            item = await ready.get()
            if isinstance(item, Exception):
                raise item
            outcome, body = item
            outcome.wanted_s = state.started_s + outcome.request.arrival_s
            await asyncio.sleep(max(0.0, outcome.wanted_s - time.perf_counter()))
            state.outcomes.append(outcome)
            state.sent += 1
            task = asyncio.create_task(self._one(state, outcome, body, on_change))
            running.add(task)
            task.add_done_callback(running.discard)
            on_change(state)

    async def _one(
        self, state: State, outcome: Outcome, body: bytes, on_change: Callable[[State], None]
    ) -> None:
        outcome.error = "interrupted"
        try:
            await self._connections.post(
                PATHS[self._endpoint],
                body,
                outcome.exchange,
                outcome.answer.on_data,
                timeout_s=self._timeout_s,
            )
            outcome.error, outcome.message = _verdict(outcome)
        except ExchangeError as error:
            outcome.error, outcome.message = error.kind, str(error)
        state.ended += 1
        state.failed += outcome.error is not None
        state.tokens += outcome.answer.completion_tokens
        on_change(state)


def _verdict(outcome: Outcome) -> tuple[str | None, str]:
    """Why a complete answer is none, and what was said of it."""
    exchange, answer = outcome.exchange, outcome.answer
    if exchange.status != 200:
        return f"http {exchange.status}", refusal(exchange)
    if answer.error is not None:
        return "stream error", answer.error
    if not answer.arrivals_s:
        return "no tokens", "the stream carried no token"
    if not answer.done and answer.finish_reason is None:
        return "cut short", "the stream ended without a reason to finish"
    return None, ""
