"""The language stage's process: messages in, engine steps, events out.

Owns: the loop around an engine, its waiting, and its signs of life. Does not own: the engine, the
sockets' bytes (wire.py), or what happens when this process ends (supervisor.py).

Each turn drains all sockets, takes one step, and sends what it brought in one write. It waits
only when no step could help: nothing to do, everything waits for the vision stage, or the API
process does not read.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from chunked_prefill.calibration_file import Calibration, CalibrationProgress
from chunked_prefill.request import Request
from chunked_prefill.settings import SchedulingSettings
from kv_offload.kv_events import KVEvent
from lm_engine.client import EngineStats, MediaItem, ModelInfo
from lm_engine.outputs import Estimate, RequestError, RequestOutput
from lm_engine.process.board import Slot
from lm_engine.process.calibrating import CalibrationTurns
from lm_engine.process.link import RemoteVisionLink
from lm_engine.process.messages import (
    Abort,
    Ask,
    Calibrate,
    Configure,
    Configured,
    Foreseen,
    Message,
    NewLink,
    ResetPrefixCache,
    StepEvents,
    Stop,
    Submission,
    Submit,
    Supervision,
)
from lm_engine.process.threads import ThreadShare
from lm_engine.process.waiting import wait
from lm_engine.process.wire import Codec, Control, Wire, WireError
from lm_engine.reconfiguration import SchedulingState

logger = logging.getLogger(__name__)

IDLE_WAKE_S = 0.5
"""Longest sleep of an idle stage between two signs of life."""
_STATS_EVERY_S = 0.1
_STALLED_WAKE_S = 0.01
"""Between steps that bring nothing although nothing is awaited."""
_PATIENCE_S = 0.02
_MAX_UNSENT_BYTES = 8 << 20
"""Events that the API process has not read; no step is taken above this."""
_LOOK_EVERY_S = 0.01
"""Between two looks for questions in the middle of a step: a look costs a system call."""
_FAILED = RequestError("internal", "the engine failed while admitting this request")
_UNCHANGED = RequestError("internal", "the engine failed while changing its settings")
_BLIND = RequestError("internal", "the engine failed while looking ahead for this request")


class LanguageEngine(Protocol):
    """What the loop needs of an engine."""

    @property
    def info(self) -> ModelInfo: ...

    def add(self, request: Request, media: tuple[MediaItem, ...]) -> list[RequestOutput]: ...

    def estimate(
        self, request: Request, media: tuple[MediaItem, ...], arrived: Sequence[Request]
    ) -> Estimate | RequestError: ...

    def refusal(self, request: Request, media: tuple[MediaItem, ...]) -> RequestError | None: ...

    def between_layers(self, call: Callable[[], None] | None) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def reset_prefix_cache(self, tenant: str) -> None: ...

    def scheduling(self, change: SchedulingSettings | None) -> SchedulingState | RequestError: ...

    def calibrate(self, seconds: float) -> Iterator[CalibrationProgress | Calibration]: ...

    def take_kv_events(self) -> tuple[KVEvent, ...]: ...

    @property
    def num_requests(self) -> int: ...

    def has_work(self) -> bool: ...

    def step(self) -> list[RequestOutput]: ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...

    def vision_restarted(self, suspects: Iterable[bytes] | None) -> list[RequestOutput]: ...


class StepBound:
    """How long the next step may take before the process counts as stuck, seconds."""

    def __init__(self, limits: Supervision) -> None:
        self._limits = limits
        self._slowest_s = 0.0

    def observe(self, duration_s: float) -> None:
        self._slowest_s = max(self._slowest_s, duration_s)

    @property
    def bound_s(self) -> float:
        return max(self._limits.step_floor_s, self._limits.step_factor * self._slowest_s)


class LanguageLoop:
    """Runs until told to stop, or until the supervisor or the API process is gone."""

    def __init__(
        self,
        engine: LanguageEngine,
        *,
        codec: Codec,
        client: Wire,
        control: Control,
        link: RemoteVisionLink | None,
        slot: Slot,
        threads: ThreadShare,
        limits: Supervision,
    ) -> None:
        self._engine = engine
        self._codec = codec
        self._client = client
        self._control = control
        self._link = link
        self._slot = slot
        self._threads = threads
        self._limits = limits
        self._bound = StepBound(limits)
        self._outputs: list[RequestOutput] = []
        self._aborted: list[str] = []
        self._held: list[Message] = []
        """What came in the middle of a step and has to wait for its end."""
        self._looked_s = 0.0
        engine.between_layers(self._answer_questions)
        self._calibration = CalibrationTurns(engine, self._client.send)
        self._stats_at_s = 0.0
        self._stats_due = True
        self._stopping = False

    def run(self) -> None:
        try:
            self._serve()
        finally:
            self._engine.close()

    def _serve(self) -> None:
        wait_s = 0.0
        while not self._stopping:
            wait(
                (self._client, self._link),
                self._control,
                self._slot,
                wait_s,
                self._limits.idle_bound_s,
            )
            self._take_control()
            self._take_requests()
            wait_s = self._advance()
            self._send()
            if self._stats_due:
                wait_s = min(wait_s, _STATS_EVERY_S)
            if self._held:
                wait_s = 0.0

    # -- in --------------------------------------------------------------------------------------

    def _take_control(self) -> None:
        for message, attached in self._control.receive():
            if isinstance(message, Stop):
                self._stopping = True
            elif isinstance(message, NewLink) and attached is not None:
                self._vision_replaced(attached, message.suspects)
        if self._control.closed or self._client.closed:
            self._stopping = True

    def _vision_replaced(self, sock: socket.socket, suspects: tuple[bytes, ...]) -> None:
        if self._link is None:
            sock.close()
            return
        self._link.reconnect(sock)
        self._outputs += self._engine.vision_restarted(suspects)

    def _take_requests(self) -> None:
        self._client.flush()
        held, self._held = self._held, []
        for message in (*held, *self._client.receive(_PATIENCE_S)):
            if isinstance(message, Submit):
                self._outputs += self._add(message)
            elif isinstance(message, Ask):
                self._client.send(self._foresee(message))
                continue
            elif isinstance(message, Configure):
                self._client.send(self._configure(message))
                continue
            elif isinstance(message, Calibrate):
                self._calibration.start(message.seconds)
                continue
            elif isinstance(message, Abort):
                self._engine.abort(message.request_id)
                self._aborted.append(message.request_id)
            elif isinstance(message, ResetPrefixCache):
                self._engine.reset_prefix_cache(message.tenant)
            self._stats_due = True

    def _configure(self, message: Configure) -> Configured:
        try:
            found = self._engine.scheduling(message.settings)
        except Exception:
            logger.exception("the scheduling settings could not be changed")
            return Configured(error=_UNCHANGED)
        return Configured(error=found) if isinstance(found, RequestError) else Configured(found)

    def _add(self, message: Submit) -> list[RequestOutput]:
        try:
            submission = self._codec.unpack(Submission, message.body)
            return self._engine.add(submission.request, submission.media)
        except WireError as fault:
            logger.error("request %s: %s", message.request_id, fault)
        except Exception:
            logger.exception("request %s could not be admitted", message.request_id)
            self._engine.abort(message.request_id)
        return [RequestOutput(message.request_id, finished=True, error=_FAILED)]

    def _answer_questions(self) -> None:
        """In the middle of a step: takes the threads that there are, answers what can be answered,
        keeps the rest for later."""
        self._threads.settle()
        now = time.monotonic()
        if now - self._looked_s < _LOOK_EVERY_S:
            return
        self._looked_s = now
        for message in self._client.receive():
            if isinstance(message, Ask):
                self._client.send(self._foresee(message))
            elif not self._refuses(message):
                self._held.append(message)

    def _refuses(self, message: Message) -> bool:
        """Tells who sent what can never be served, without waiting for the end of the step."""
        if not isinstance(message, Submit):
            return False
        try:
            submission = self._codec.unpack(Submission, message.body)
            error = self._engine.refusal(submission.request, submission.media)
        except Exception:
            # It comes again, and is told, when the request is added.
            return False
        if error is None:
            return False
        told = RequestOutput(message.request_id, finished=True, error=error)
        self._client.send(StepEvents((told,)))
        return True

    def _foresee(self, message: Ask) -> Foreseen:
        try:
            # Who came in the middle of this step is before whoever asks.
            bodies = [held.body for held in self._held if isinstance(held, Submit)]
            arrived = [self._codec.unpack(Submission, body).request for body in bodies]
            submission = self._codec.unpack(Submission, message.body)
            found = self._engine.estimate(submission.request, submission.media, arrived)
        except WireError as fault:
            logger.error("question %s: %s", message.request_id, fault)
            return Foreseen(message.request_id, error=_BLIND)
        except Exception:
            logger.exception("question %s could not be answered", message.request_id)
            return Foreseen(message.request_id, error=_BLIND)
        if isinstance(found, RequestError):
            return Foreseen(message.request_id, error=found)
        return Foreseen(message.request_id, found)

    # -- a step ----------------------------------------------------------------------------------

    def _advance(self) -> float:
        """One step if there is work. Returns how long to wait for news before the next, seconds."""
        if self._link is not None:
            self._link.pump()
        if self._calibration.running:
            self._slot.beat(self._bound.bound_s)
            self._slot.busy = False  # the vision stage may be what is measured
            self._threads.settle()
            self._calibration.advance()
            return 0.0
        if not self._engine.has_work() or self._client.unsent_bytes > _MAX_UNSENT_BYTES:
            return 0.0 if self._outputs or self._aborted else IDLE_WAKE_S
        before = _work_done(self._engine.stats())
        self._slot.beat(self._bound.bound_s)
        self._slot.busy = True
        self._threads.settle()
        begin = time.monotonic()
        outputs = self._engine.step()
        self._bound.observe(time.monotonic() - begin)
        self._slot.beat(self._limits.idle_bound_s)
        self._stats_due = True
        self._outputs += outputs
        after = self._engine.stats()
        copying = after.tiers is not None and after.tiers.copies_awaited > 0
        if outputs or self._link is None or copying or _work_done(after) != before:
            # While copies are under way, the step has slept for them if nothing else could be done.
            return 0.0
        if self._link.has_results:
            return 0.0
        # Nothing could advance. A reply wakes this process at once; until then the vision stage
        # has the cores for itself.
        return IDLE_WAKE_S if self._link.busy() else _STALLED_WAKE_S

    # -- out -------------------------------------------------------------------------------------

    def _send(self) -> None:
        now = time.monotonic()
        due = self._stats_due and (
            now - self._stats_at_s >= _STATS_EVERY_S or not self._engine.has_work()
        )
        kv_events = self._engine.take_kv_events()
        if not (due or self._outputs or self._aborted or kv_events):
            return
        stats = self._engine.stats() if due else None
        if due:
            self._stats_at_s, self._stats_due = now, False
        outputs, aborted = tuple(self._outputs), tuple(self._aborted)
        self._client.send(StepEvents(outputs, aborted, stats, kv_events))
        self._outputs.clear()
        self._aborted.clear()


def _work_done(stats: EngineStats) -> float:
    """A number that changes with every pass that computed something."""
    histogram = stats.iteration_tokens
    return histogram.total if histogram is not None else float(stats.steps)
