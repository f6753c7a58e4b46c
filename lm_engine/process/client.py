"""The API process's side: an EngineClient over supervised stage processes.

Owns: starting the supervisor, the streams of requests in flight, what their owners are told when a
stage dies or ends, and the state of the whole as one EngineStatus. Does not own: the processes
(supervisor.py) or HTTP. Imports no torch; asyncio or uvloop, one loop, no threads.

A stream always comes to an end: with its last event, with an error event when the language stage
died or the server ends, or because its consumer left, which aborts the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from chunked_prefill.calibration_file import Calibration, CalibrationProgress
from chunked_prefill.request import Request
from chunked_prefill.settings import SchedulingSettings
from lm_engine.client import EngineStats, EngineStatus, MediaItem
from lm_engine.kv_log import KVEventLog
from lm_engine.options import EngineOptions
from lm_engine.outputs import Estimate, RequestError, RequestOutput
from lm_engine.process.board import Board
from lm_engine.process.messages import (
    Abort,
    Ask,
    Calibrate,
    Calibrated,
    Channel,
    Configure,
    Configured,
    Factories,
    Foreseen,
    Report,
    ResetPrefixCache,
    Start,
    StepEvents,
    Stop,
    Submission,
    Submit,
    Supervision,
)
from lm_engine.process.signals import held
from lm_engine.process.wire import Codec, Control, Wire, WireError, control_pair
from lm_engine.reconfiguration import SchedulingState

_MAX_UNSENT_BYTES = 1 << 20
"""Request bytes waiting for the language stage above which submitters wait."""
_LARGE_BYTES = 1 << 16


CalibrationNews = CalibrationProgress | Calibration | RequestError

RESTARTING = RequestError(
    "internal", "the model's process stopped while it served this request; please send it again"
)
SHUTTING_DOWN = RequestError("overloaded", "the server is shutting down")
OUT_OF_RANGE = RequestError("invalid", "the request holds a value that is out of range")
NOT_READY = RequestError("overloaded", "the model is not ready yet; please try again shortly")


@dataclass(slots=True)
class _Stream:
    """Events of one request that its consumer has not taken yet."""

    events: deque[RequestOutput] = field(default_factory=deque)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def push(self, output: RequestOutput) -> None:
        self.events.append(output)
        self.news.set()


class ProcessEngineClient:
    """EngineClient of stages in processes of their own. Make one with `start`."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        control: Control,
        board: Board,
        codec: Codec,
        limits: Supervision,
        kv_log: KVEventLog | None = None,
    ) -> None:
        self.kv_log = kv_log
        """What the prefix cache holds, for as long as there are stages."""
        self._loop = asyncio.get_running_loop()
        self._process = process
        self._board = board
        self._codec = codec
        self._limits = limits
        self._control = control
        self._wire: Wire | None = None
        self._writing = False
        self._encoding = asyncio.Lock()
        self._room = asyncio.Event()
        self._room.set()
        self._report = Report("starting")
        self._since_s = time.monotonic()
        self._stats: EngineStats | None = None
        self._streams: dict[str, _Stream] = {}
        self._aborting: set[str] = set()
        self._questions: dict[str, asyncio.Future[Estimate | RequestError]] = {}
        self._configuring: deque[asyncio.Future[SchedulingState | RequestError]] = deque()
        """Who waits for a Configured, in order."""
        self._calibrating: asyncio.Queue[CalibrationNews] | None = None
        """To whoever asked for a calibration."""
        self._all_done = asyncio.Event()
        self._all_done.set()
        self._draining = False
        self._closing: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()
        self._pidfd = os.pidfd_open(process.pid)
        self._loop.add_reader(self._pidfd, self._on_supervisor_end)
        self._loop.add_reader(self._control.fileno(), self._on_control)

    # -- EngineClient ----------------------------------------------------------------------------

    def status(self) -> EngineStatus:
        report, slot = self._report, self._board["language"]
        phase = "draining" if self._draining and report.phase != "failed" else report.phase
        serving = phase in ("ready", "draining") and self._wire is not None
        elapsed_s = time.monotonic() - self._since_s
        known = report.total > 0 and report.done > 0
        return EngineStatus(
            phase=phase,
            detail=report.detail,
            done=report.done,
            total=report.total,
            eta_s=elapsed_s * (report.total - report.done) / report.done if known else None,
            heartbeat_age_s=slot.age_s if report.pid is not None else 0.0,
            alive=serving and not slot.stopped and not slot.late,
            pid=report.pid,
            epoch=report.epoch,
            model=report.model,
            stats=self._stats,
        )

    @property
    def supervisor_pid(self) -> int:
        return self._process.pid

    @property
    def vision_pid(self) -> int | None:
        return self._report.vision_pid

    async def submit(
        self, request: Request, media: tuple[MediaItem, ...] = ()
    ) -> AsyncIterator[RequestOutput]:
        """Events of the request until the one with `finished` set; closing early aborts it."""
        name = request.request_id
        refusal = self._refusal(name)
        if refusal is not None:
            yield RequestOutput(name, finished=True, error=refusal)
            return
        stream = self._streams[name] = _Stream()
        self._all_done.clear()
        finished = False
        try:
            await self._hand_over(request, media, stream)
            while not finished:
                await stream.news.wait()
                while stream.events and not finished:
                    output = stream.events.popleft()
                    finished = output.finished
                    yield output
                if not stream.events:
                    stream.news.clear()
        finally:
            if self._streams.get(name) is stream:
                del self._streams[name]
                if not finished:
                    self._abort(name)
            if not self._streams:
                self._all_done.set()

    async def estimate(
        self, request: Request, media: tuple[MediaItem, ...] = ()
    ) -> Estimate | RequestError:
        """What the request could expect if it were submitted now, or why nobody knows."""
        name = request.request_id
        refusal = self._refusal(name)
        if refusal is not None:
            return refusal
        if name in self._questions:
            return RequestError("invalid", "a question with this id is open", "request_id")
        try:
            frames = self._codec.frame(Ask(name, self._codec.pack(Submission(request, media))))
        except WireError:
            return OUT_OF_RANGE
        answer: asyncio.Future[Estimate | RequestError] = self._loop.create_future()
        self._questions[name] = answer
        try:
            self._send(frames)
            return await answer
        finally:
            self._questions.pop(name, None)

    async def scheduling(
        self, change: SchedulingSettings | None = None
    ) -> SchedulingState | RequestError:
        """What is scheduled by, after the `change` if there is one. A language stage that is
        started anew begins with the options again."""
        if self._report.phase != "ready" or self._wire is None or self._wire.closed:
            return NOT_READY
        answer: asyncio.Future[SchedulingState | RequestError] = self._loop.create_future()
        self._configuring.append(answer)
        self._send(self._codec.frame(Configure(change)))
        return await answer

    async def calibrate(
        self, seconds: float
    ) -> AsyncIterator[CalibrationProgress | Calibration | RequestError]:
        """How far it is, now and then; last its result, or why there is none."""
        if self._report.phase != "ready" or self._wire is None or self._wire.closed:
            yield NOT_READY
            return
        if self._calibrating is not None:
            yield RequestError("overloaded", "a calibration is under way")
            return
        news = self._calibrating = asyncio.Queue[CalibrationNews]()
        try:
            self._send(self._codec.frame(Calibrate(seconds)))
            item: CalibrationNews = CalibrationProgress("", 0.0, seconds)
            while isinstance(item, CalibrationProgress):
                item = await news.get()
                yield item
        finally:
            self._calibrating = None

    def reset_prefix_cache(self, tenant: str) -> bool:
        """Travels behind what was submitted before and ahead of what is submitted after."""
        if self._report.phase != "ready" or self._wire is None or self._wire.closed:
            return False
        self._send(self._codec.frame(ResetPrefixCache(tenant)))
        return True

    async def close(self, *, drain_s: float) -> None:
        """Refuses new requests, lets running ones finish for up to `drain_s` seconds, answers the
        rest with an error, and ends all processes. May be called again, and from several tasks."""
        if self._closing is None:
            self._closing = self._loop.create_task(self._close(drain_s))
        await asyncio.shield(self._closing)

    # -- requests --------------------------------------------------------------------------------

    def _refusal(self, name: str) -> RequestError | None:
        if self._draining:
            return SHUTTING_DOWN
        if name in self._streams or name in self._aborting:
            return RequestError("invalid", "a request with this id is running", "request_id")
        if self._report.phase != "ready" or self._wire is None or self._wire.closed:
            return NOT_READY
        return None

    async def _hand_over(
        self, request: Request, media: tuple[MediaItem, ...], stream: _Stream
    ) -> None:
        name = request.request_id
        async with self._encoding:
            try:
                frames = self._codec.frame(
                    Submit(name, self._codec.pack(Submission(request, media)))
                )
            except WireError:
                stream.push(RequestOutput(name, finished=True, error=OUT_OF_RANGE))
                return
            if len(frames) > _LARGE_BYTES:
                # A prompt of 100,000 ids takes milliseconds to encode: one per turn of the loop.
                await asyncio.sleep(0)
        await self._room.wait()
        if not stream.events:
            # Otherwise the stage ended in the meantime, and its successor knows nothing of it.
            self._send(frames)

    def _abort(self, name: str) -> None:
        if self._wire is not None and not self._wire.closed:
            self._aborting.add(name)
            self._send(self._codec.frame(Abort(name)))

    def _fail_all(self, error: RequestError) -> None:
        """Every request in flight ends with an explicit error."""
        for name, stream in self._streams.items():
            stream.push(RequestOutput(name, finished=True, error=error))
        for question in self._questions.values():
            if not question.done():
                question.set_result(error)
        self._configured(error, len(self._configuring))
        if self._calibrating is not None:
            self._calibrating.put_nowait(error)

    def _configured(self, found: SchedulingState | RequestError | None, count: int = 1) -> None:
        assert found is not None
        for _ in range(count):
            answer = self._configuring.popleft()
            if not answer.done():
                answer.set_result(found)

    # -- the language stage's socket -------------------------------------------------------------

    def _send(self, frames: bytes) -> None:
        """Writes what the socket takes; the rest follows when it can, and submitters wait."""
        if self._wire is None:
            return
        self._wire.send_frames(frames)
        self._watch_writing()

    def _watch_writing(self) -> None:
        wire = self._wire
        if wire is None:
            return
        if wire.unsent_bytes and not self._writing:
            self._writing = True
            self._loop.add_writer(wire.fileno(), self._on_writable)
        elif not wire.unsent_bytes and self._writing:
            self._writing = False
            self._loop.remove_writer(wire.fileno())
        if wire.unsent_bytes > _MAX_UNSENT_BYTES:
            self._room.clear()
        else:
            self._room.set()

    def _on_writable(self) -> None:
        if self._wire is not None:
            self._wire.flush()
            self._watch_writing()

    def _on_events(self) -> None:
        wire = self._wire
        if wire is None:
            return
        for message in wire.receive():
            if isinstance(message, StepEvents):
                self._take(message)
            elif isinstance(message, Foreseen):
                self._answer(message)
            elif isinstance(message, Configured):
                self._configured(message.state or message.error)
            elif isinstance(message, Calibrated) and self._calibrating is not None:
                news = message.result or message.error or message.progress
                assert news is not None
                self._calibrating.put_nowait(news)
        if wire.closed:
            self._drop_wire()
            self._fail_all(RESTARTING)

    def _answer(self, found: Foreseen) -> None:
        question = self._questions.get(found.request_id)
        if question is not None and not question.done():
            result = found.estimate or found.error
            assert result is not None
            question.set_result(result)

    def _take(self, events: StepEvents) -> None:
        for output in events.outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.push(output)
        self._aborting.difference_update(events.aborted)
        if events.stats is not None:
            self._stats = events.stats
        if events.kv_events and self.kv_log is not None:
            self.kv_log.publish(events.kv_events)

    def _use_wire(self, sock: socket.socket) -> None:
        self._drop_wire()
        self._wire = Wire(sock, self._codec)
        self._loop.add_reader(self._wire.fileno(), self._on_events)

    def _drop_wire(self) -> None:
        """The language stage of this epoch is gone, and with it everything it knew."""
        if self._wire is None:
            return
        self._loop.remove_reader(self._wire.fileno())
        if self._writing:
            self._loop.remove_writer(self._wire.fileno())
            self._writing = False
        self._wire.close()
        self._wire = None
        self._aborting.clear()
        self._stats = None
        if self.kv_log is not None:
            self.kv_log.clear()
        self._room.set()

    # -- the supervisor --------------------------------------------------------------------------

    def _on_control(self) -> None:
        for message, attached in self._control.receive():
            if isinstance(message, Report):
                self._take_report(message)
            elif isinstance(message, Channel) and attached is not None:
                if self._wire is not None:
                    self._fail_all(RESTARTING)
                self._use_wire(attached)
        if self._control.closed:
            self._loop.remove_reader(self._control.fileno())
            self._supervisor_gone()

    def _take_report(self, report: Report) -> None:
        if (report.phase, report.detail) != (self._report.phase, self._report.detail):
            self._since_s = time.monotonic()
        self._report = report
        if report.phase == "draining" and self._closing is None:
            self._closing = self._loop.create_task(self._close(self._limits.drain_s))

    def _supervisor_gone(self) -> None:
        if self._report.phase != "failed":
            detail = "stopped" if self._draining else "the supervisor process ended unexpectedly"
            self._report = replace(self._report, phase="failed", detail=detail)
        self._report = replace(self._report, pid=None, vision_pid=None)
        self._drop_wire()
        self._fail_all(SHUTTING_DOWN if self._draining else RESTARTING)
        if self.kv_log is not None:
            self.kv_log.end()

    def _on_supervisor_end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._process.wait()
        self._ended.set()

    async def _close(self, drain_s: float) -> None:
        self._draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_done.wait(), drain_s)
        self._fail_all(SHUTTING_DOWN)
        self._control.send(Stop())
        if self._report.phase == "starting":
            # It imports, and reads nothing until that is done; there is no stage to end yet.
            self._process.kill()
        try:
            await asyncio.wait_for(self._ended.wait(), 1.0 + 2 * self._limits.term_grace_s)
        except TimeoutError:
            # Its death takes the stages along, even when it is itself stopped or stuck.
            os.kill(self._process.pid, signal.SIGKILL)
            await self._ended.wait()
        if not self._control.closed:
            self._loop.remove_reader(self._control.fileno())
            self._supervisor_gone()
        self._control.close()


def start(
    options: EngineOptions,
    *,
    factories: Factories | None = None,
    supervision: Supervision | None = None,
    path: tuple[str, ...] = (),
    log_level: str = "info",
) -> ProcessEngineClient:
    """Starts the supervisor and returns at once; `status()` tells how far loading is.

    Call it on the event loop's thread, which must outlive the client: the kernel ends all stages
    when that thread ends, however it ends.

    Args:
        factories: what the stages are built from; the default serves `options.model`.
        path: folders added to the supervisor's module search path, for factories from elsewhere.
        log_level: debug, info, warning or error, of the supervisor and of the stages.

    Raises RuntimeError off Linux, without msgspec, or outside a running event loop.
    """
    if sys.platform != "linux":
        raise RuntimeError(
            "stages in processes of their own need Linux; use lm_engine.engine.Engine directly"
        )
    asyncio.get_running_loop()
    codec = Codec()
    limits = supervision or Supervision()
    ours, theirs = control_pair()
    board_fd = Board.create()
    try:
        with held():
            process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "lm_engine.process"),
                    *(str(theirs.fileno()), str(board_fd), str(os.getpid()), log_level),
                ],
                pass_fds=(theirs.fileno(), board_fd),
                stdin=subprocess.DEVNULL,
                env=_environment(str(Path(__file__).resolve().parents[2])),
            )
        board = Board(board_fd)
    finally:
        theirs.close()
        os.close(board_fd)
    control = Control(ours, codec)
    control.send(Start(options, factories or Factories(), limits, path))
    kv_log = KVEventLog() if options.kv_events else None
    return ProcessEngineClient(process, control, board, codec, limits, kv_log)


def _environment(root: str) -> dict[str, str]:
    """The API process's, with our folders importable and no threads started by numpy's import,
    which would make the supervisor's forks unsafe.

    glibc's malloc asks for huge pages where the kernel grants them on request: a decode step reads
    every weight once, and with pages of 4 KiB it took 1.1 to 1.6 times as long, and unsteadily.
    An operator's own GLIBC_TUNABLES stay as they are; other C libraries ignore the variable.
    """
    known = os.environ.get("PYTHONPATH")
    return {
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        **os.environ,
        "PYTHONPATH": root if not known else os.pathsep.join((root, known)),
        "OPENBLAS_NUM_THREADS": "1",
    }
