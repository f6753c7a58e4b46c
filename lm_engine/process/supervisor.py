"""The process that forks the stages, watches them, and brings them back.

Owns: the order of starting, which socket goes to whom, death and restart, giving up, draining on
SIGTERM, and that no process is left behind. Does not own: what a stage does (children.py), or
requests: they pass it by.

It imports torch once, computes nothing and starts no thread, so that a fork is safe and the
children share its memory. Nothing of it outlives the API process, and no stage outlives it: the
kernel kills each with its parent.

    death of        what follows
    vision stage    a new one; the language stage gets its socket and submits again what was in
                    flight (new epoch of the arena)
    language stage  a new one and a new epoch; the API process sees the old socket close and fails
                    its requests; the vision stage forgets its jobs
    too many        phase "failed" with the cause; everything ends
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import mmap
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lm_engine.client import ModelInfo, Phase
from lm_engine.process import logs, signals
from lm_engine.process.board import Board
from lm_engine.process.children import (
    LOAD_FAILED_EXIT,
    Built,
    StageProcess,
    die_with_parent,
    enter,
    run_language,
    run_planner,
    run_vision,
)
from lm_engine.process.messages import (
    Channel,
    LoadFailed,
    NewLink,
    Plan,
    Planned,
    Progress,
    Ready,
    Report,
    Start,
    Stop,
)
from lm_engine.process.wire import Codec, Control, control_pair, stream_pair

logger = logging.getLogger(__name__)

_TICK_S = 0.25
_START_TIMEOUT_S = 30.0
_NAP_S = 2.0
"""A longer gap between two ticks means that this process itself was stopped or starved; then the
stages may have been as well, and their lateness says nothing."""
_AFTER_NAP_S = 5.0


@dataclass(slots=True)
class _Stage:
    name: str
    pid: int
    control: Control
    ready: bool = False
    stopped_at_s: float | None = None
    failure: str | None = None
    """Why it could not be built, in its own words."""
    killed_for: str | None = None
    """Why the supervisor killed it."""


class Supervisor:
    """One model's stages. `run` returns the exit status."""

    def __init__(
        self, client: Control, board: Board, codec: Codec, start: Start, log_level: str
    ) -> None:
        self._client = client
        self._board = board
        self._codec = codec
        self._start = start
        self._log_level = log_level
        self._limits = start.supervision
        self._stages: dict[str, _Stage] = {}
        self._plan: Plan | None = None
        self._region: mmap.mmap | None = None
        self._built: Built | None = None
        self._model: ModelInfo | None = None
        self._phase: Phase = "starting"
        self._epoch = 0
        self._restarts: deque[float] = deque()
        self._was_ready = False
        self._terms = 0
        self._drain_until_s: float | None = None
        self._exit: int | None = None
        self._tick_at_s = time.monotonic()
        self._lenient_until_s = 0.0
        self._wake, self._woken = os.pipe()

    # -- life ------------------------------------------------------------------------------------

    def run(self) -> int:
        self._listen_to_signals()
        self._report("starting", "importing")
        try:
            self._built = _import_factories(self._start)
        except Exception as cause:
            logger.debug("a factory cannot be imported", exc_info=True)
            self._fail(f"{type(cause).__name__}: {cause}")
            return 1
        # What is alive now stays alive; unfrozen, the children's collector would write into every
        # object's header and so copy the pages that they share with this process.
        gc.collect()
        gc.freeze()
        self._report("loading", "finding the model")
        self._fork("planner", run_planner)
        while self._exit is None:
            self._tick()
        self._end_stages(self._limits.term_grace_s if self._exit == 0 else 0.0)
        self._client.flush()
        return self._exit

    def _listen_to_signals(self) -> None:
        os.set_blocking(self._wake, False)
        os.set_blocking(self._woken, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_term)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        signals.release()

    def _on_term(self, *_: object) -> None:
        self._terms += 1

    def _tick(self) -> None:
        sources: list[int | Control] = [self._wake, self._client]
        sources += [s.control for s in self._stages.values() if not s.control.closed]
        select.select(sources, [], [], _TICK_S)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)
        now = time.monotonic()
        if now - self._tick_at_s > _NAP_S:
            self._lenient_until_s = now + _AFTER_NAP_S
        self._tick_at_s = now
        self._board["supervisor"].beat(20 * _TICK_S)
        self._client.flush()
        self._hear_client()
        for stage in list(self._stages.values()):
            self._hear_stage(stage)
        self._reap()
        self._watch(now)
        self._drain(now)

    # -- messages --------------------------------------------------------------------------------

    def _hear_client(self) -> None:
        for message, _ in self._client.receive():
            if isinstance(message, Stop):
                self._exit = 0
        if self._client.closed and self._exit is None:
            # The API process is gone: nobody is served by draining.
            self._exit = 1

    def _hear_stage(self, stage: _Stage) -> None:
        for message, _ in stage.control.receive():
            if isinstance(message, Planned):
                self._plan = message.plan
            elif isinstance(message, Progress):
                if self._phase == "loading":
                    self._report("loading", message.detail, message.done, message.total)
            elif isinstance(message, Ready):
                stage.ready = True
                self._model = message.model or self._model
                self._settle_phase()
            elif isinstance(message, LoadFailed):
                stage.failure = message.message

    def _settle_phase(self) -> None:
        """Ready when the language stage is, and the vision stage has been once."""
        language, vision = self._stages.get("language"), self._stages.get("vision")
        vision_ready = self._was_ready or vision is None or vision.ready
        if language is None or not language.ready or self._phase == "draining":
            return
        if vision_ready:
            self._was_ready = True
            self._report("ready")
        else:
            self._report("loading", "vision weights")

    def _report(
        self, phase: Phase, detail: str = "", done: float = 0.0, total: float = 0.0
    ) -> None:
        self._phase = phase
        language, vision = self._stages.get("language"), self._stages.get("vision")
        self._client.send(
            Report(
                phase,
                detail,
                done,
                total,
                epoch=self._epoch,
                pid=language.pid if language else None,
                vision_pid=vision.pid if vision else None,
                model=self._model,
            )
        )

    # -- forking ---------------------------------------------------------------------------------

    def _fork(self, name: str, main: Callable[..., None], *args: Any) -> None:
        ours, theirs = control_pair()
        slot = self._board[name]
        slot.clear()
        slot.beat(self._limits.load_bound_s)
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                keep = {theirs.fileno()}
                keep |= {arg.fileno() for arg in args if isinstance(arg, socket.socket)}
                enter(name, parent, self._limits, keep)
                logs.configure(self._log_level, name)
                assert self._built is not None
                child = StageProcess(name, self._board, theirs, self._start, self._built)
                status = child.run(lambda inside: main(inside, *args))
            finally:
                os._exit(status)
        theirs.close()
        for arg in args:
            if isinstance(arg, socket.socket):
                arg.close()
        self._stages[name] = _Stage(name, pid, Control(ours, self._codec))
        logger.debug("the %s stage starts as pid %d", name, pid)

    def _start_all(self, plan: Plan) -> None:
        if plan.has_vision:
            self._region = mmap.mmap(-1, max(plan.region_bytes, mmap.PAGESIZE))
            to_vision, to_language = stream_pair()
            self._fork("vision", run_vision, plan, to_language, self._region)
            self._start_language(plan, to_vision)
        else:
            self._start_language(plan, None)

    def _start_language(self, plan: Plan, link: socket.socket | None) -> None:
        ours, theirs = stream_pair()
        self._fork("language", run_language, plan, theirs, link, self._region)
        # In this order: with the channel first, the client would have a fresh heartbeat, a channel
        # and the last epoch's "ready" for a moment, and /health would lie.
        self._report("loading", "weights")
        self._client.send(Channel(self._epoch), ours)

    def _restart_language(self, plan: Plan) -> None:
        self._epoch += 1
        link = None
        if plan.has_vision:
            link, to_language = stream_pair()
            self._send_link("vision", to_language, ())
        self._start_language(plan, link)

    def _restart_vision(self, plan: Plan, suspects: tuple[bytes, ...]) -> None:
        to_vision, to_language = stream_pair()
        self._fork("vision", run_vision, plan, to_language, self._region)
        self._send_link("language", to_vision, suspects)
        self._report(self._phase)

    def _send_link(self, to: str, sock: socket.socket, suspects: tuple[bytes, ...]) -> None:
        stage = self._stages.get(to)
        if stage is None:
            sock.close()
        else:
            stage.control.send(NewLink(suspects), sock)

    # -- death -----------------------------------------------------------------------------------

    def _reap(self) -> None:
        for stage in list(self._stages.values()):
            pid, status = os.waitpid(stage.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if pid == 0:
                continue
            if os.WIFSTOPPED(status):
                stage.stopped_at_s = time.monotonic()
                self._board[stage.name].stopped = True
            elif os.WIFCONTINUED(status):
                stage.stopped_at_s = None
                self._board[stage.name].stopped = False
            else:
                self._hear_stage(stage)
                self._bury(stage)
                self._after_death(stage, os.waitstatus_to_exitcode(status))

    def _bury(self, stage: _Stage) -> None:
        stage.control.close()
        del self._stages[stage.name]
        self._board[stage.name].clear()

    def _after_death(self, stage: _Stage, code: int) -> None:
        if self._exit is not None:
            return
        if stage.failure is not None or code == LOAD_FAILED_EXIT:
            self._fail(stage.failure or f"the {stage.name} stage could not be built")
            return
        if stage.name == "planner" and code == 0 and self._plan is not None:
            self._start_all(self._plan)
            return
        cause = stage.killed_for or _how_it_ended(code)
        logger.error("the %s stage (pid %d) %s", stage.name, stage.pid, cause)
        now = time.monotonic()
        self._restarts.append(now)
        while self._restarts[0] < now - self._limits.restart_window_s:
            self._restarts.popleft()
        if len(self._restarts) > self._limits.max_restarts:
            self._fail(
                f"the {stage.name} stage {cause}; that was end number {len(self._restarts)} within "
                f"{self._limits.restart_window_s:.0f} s, so it is not restarted again"
            )
        elif stage.name == "planner" or self._plan is None:
            self._fork("planner", run_planner)
        elif stage.name == "language":
            self._restart_language(self._plan)
        else:
            # One that died while loading had no image in hand: the note is its predecessor's.
            self._restart_vision(self._plan, self._board.suspects() if stage.ready else ())

    def _watch(self, now: float) -> None:
        """Kills what is stopped or stuck; `_reap` then sees it dead."""
        for stage in self._stages.values():
            slot = self._board[stage.name]
            if stage.killed_for is not None:
                continue
            if stage.stopped_at_s is not None:
                if now - stage.stopped_at_s >= self._limits.stopped_grace_s:
                    self._kill(
                        stage, f"was stopped by a signal for {now - stage.stopped_at_s:.1f} s"
                    )
            elif slot.late and now >= self._lenient_until_s:
                late = f"{slot.age_s:.1f} s, beyond its bound of {slot.bound_s:.1f} s"
                self._kill(stage, f"showed no life for {late}")

    def _kill(self, stage: _Stage, why: str) -> None:
        stage.killed_for = why
        os.kill(stage.pid, signal.SIGKILL)

    def _fail(self, cause: str) -> None:
        self._report("failed", cause)
        self._exit = 1

    # -- ending ----------------------------------------------------------------------------------

    def _drain(self, now: float) -> None:
        """SIGTERM: the API process is told, lets its requests end, and answers with Stop. A second
        SIGTERM, or the time limit, ends everything at once."""
        if not self._terms or self._exit is not None:
            return
        if self._drain_until_s is None:
            self._drain_until_s = now + self._limits.drain_s
            self._report("draining")
        if self._terms > 1 or now > self._drain_until_s:
            self._exit = 0

    def _end_stages(self, grace_s: float) -> None:
        for stage in self._stages.values():
            if grace_s:
                stage.control.send(Stop())
        until = time.monotonic() + grace_s
        while self._stages:
            if time.monotonic() >= until:
                for stage in self._stages.values():
                    os.kill(stage.pid, signal.SIGKILL)
                until = float("inf")
            self._reap()
            if self._stages:
                select.select([self._wake], [], [], 0.02)
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 4096)


def _import_factories(start: Start) -> Built:
    sys.path.extend(entry for entry in start.path if entry not in sys.path)

    def find(dotted: str) -> Callable[..., Any]:
        module, _, name = dotted.partition(":")
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return found

    names = start.factories
    return Built(find(names.plan), find(names.language), find(names.vision))


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with status {code}"
    cause = f"was killed by {signal.Signals(-code).name}"
    if -code == signal.SIGKILL:
        cause += " (by someone, or by the kernel for lack of memory)"
    return cause


def receive_start(client: Control) -> Start | None:
    """The first message of the API process; None when it does not come."""
    until = time.monotonic() + _START_TIMEOUT_S
    while not client.closed and time.monotonic() < until:
        select.select([client], [], [], 1.0)
        for message, _ in client.receive():
            if isinstance(message, Start):
                return message
    return None


def main(control_fd: int, board_fd: int, parent: int, *, log_level: str) -> int:
    """The supervisor process; the descriptors are inherited from the API process."""
    die_with_parent(parent, "supervisor")
    logs.configure(log_level, "supervisor")
    codec = Codec()
    client = Control(socket.socket(fileno=control_fd), codec)
    os.set_inheritable(control_fd, False)
    board = Board(board_fd)
    os.close(board_fd)
    start = receive_start(client)
    return 1 if start is None else Supervisor(client, board, codec, start, log_level).run()
