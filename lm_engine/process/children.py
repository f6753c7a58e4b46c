"""What a forked stage does from its first moment to its last.

Owns: entering a child (signals, priority, descriptors, dying with the parent), building a stage
with progress and errors reported, and running its loop. Does not own: the loops (language.py,
vision.py), or when stages are forked (supervisor.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lm_engine.models.errors import LoadError
from lm_engine.process.board import Board
from lm_engine.process.calibrating import calibrate_before_serving
from lm_engine.process.language import LanguageLoop
from lm_engine.process.link import RemoteVisionLink
from lm_engine.process.messages import (
    LoadFailed,
    Plan,
    Planned,
    Progress,
    Ready,
    Start,
    Supervision,
)
from lm_engine.process.threads import ThreadShare
from lm_engine.process.vision import VisionLoop
from lm_engine.process.wire import Codec, Control, Wire

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PROGRESS_EVERY_S = 0.05
LOAD_FAILED_EXIT = 78
"""Exit status of a stage that could not be built (EX_CONFIG)."""


@dataclass(frozen=True, slots=True)
class Built:
    """The imported factories."""

    plan: Callable[..., Plan]
    language: Callable[..., Any]
    vision: Callable[..., Any]


def die_with_parent(parent: int, name: str) -> None:
    """The kernel kills this process when its parent ends, however it ends; also names it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    libc.prctl(_PR_SET_NAME, f"ll-{name}".encode()[:15], 0, 0, 0)
    if os.getppid() != parent:
        # It ended between the fork and the call above.
        os._exit(1)


def enter(name: str, parent: int, limits: Supervision, keep: set[int]) -> None:
    """First steps of a forked child; `keep` are the descriptors that it goes on using."""
    die_with_parent(parent, name)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # A terminal's Ctrl-C and a container's SIGTERM reach the whole group, but running requests
    # are drained first: only the supervisor says when a stage ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(limits.niceness)
    for fd in [int(entry) for entry in os.listdir("/proc/self/fd")]:
        if fd > 2 and fd not in keep:
            with contextlib.suppress(OSError):
                os.close(fd)


class Reporter:
    """Progress of loading, to the supervisor and as a sign of life; at most 20 per second."""

    def __init__(self, control: Control, beat: Callable[[], None]) -> None:
        self._control = control
        self._beat = beat
        self._last = ("", 0.0)

    def __call__(self, detail: str, done: float, total: float) -> None:
        self._beat()
        now = time.monotonic()
        if detail == self._last[0] and now - self._last[1] < _PROGRESS_EVERY_S and done < total:
            return
        self._last = (detail, now)
        self._control.send(Progress(detail, done, total))


class StageProcess:
    """The inside of one child. `run` returns its exit status."""

    def __init__(
        self, name: str, board: Board, control: socket.socket, start: Start, built: Built
    ) -> None:
        self.name = name
        self.codec = Codec()
        self.board = board
        self.control = Control(control, self.codec)
        self.start = start
        self.built = built
        limits = start.supervision
        slot = board[name]
        self.report = Reporter(self.control, lambda: slot.beat(limits.load_bound_s))

    def run(self, main: Callable[[StageProcess], None]) -> int:
        try:
            main(self)
        except BuildError as failure:
            self.control.send(LoadFailed(str(failure)))
            return LOAD_FAILED_EXIT
        except Exception:
            logger.exception("the %s stage failed", self.name)
            return 1
        finally:
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
        return 0

    def build(self, factory: Callable[..., Any], *args: object) -> Any:
        """Calls a factory. Raises BuildError with what the operator should read."""
        try:
            return factory(args[0], self.report, *args[1:])
        except MemoryError as cause:
            raise BuildError("there is not enough memory for the model") from cause
        except (LoadError, ValueError) as cause:
            raise BuildError(str(cause)) from cause
        except Exception as cause:
            logger.exception("the %s stage could not be built", self.name)
            raise BuildError(f"{type(cause).__name__}: {cause}") from cause

    def threads(self, neighbour: str | None, alone: int | None) -> ThreadShare:
        return ThreadShare(self.board[neighbour] if neighbour else None, alone)


class BuildError(Exception):
    """A stage cannot be built; trying again would not help."""


def run_planner(child: StageProcess) -> None:
    plan = child.build(child.built.plan, child.start.options)
    child.control.send(Planned(plan))


def run_language(
    child: StageProcess,
    plan: Plan,
    client: socket.socket,
    link: socket.socket | None,
    region: mmap.mmap | None,
) -> None:
    slot = child.board["language"]
    remote = RemoteVisionLink(link, child.codec, slot) if link is not None else None
    threads = child.threads("vision" if remote else None, plan.options.threads)
    threads.settle()
    engine = child.build(child.built.language, plan, remote, region)
    if plan.options.calibrate and engine.calibration is None:
        calibrate_before_serving(engine, child.report, threads.settle)
    child.control.send(Ready(engine.info))
    LanguageLoop(
        engine,
        codec=child.codec,
        client=Wire(client, child.codec),
        control=child.control,
        link=remote,
        slot=slot,
        threads=threads,
        limits=child.start.supervision,
    ).run()


def run_vision(
    child: StageProcess, plan: Plan, link: socket.socket, region: mmap.mmap | None
) -> None:
    threads = child.threads("language", plan.options.threads)
    threads.settle()
    worker = child.build(child.built.vision, plan, region)
    child.control.send(Ready())
    VisionLoop(
        worker,
        codec=child.codec,
        link=Wire(link, child.codec),
        control=child.control,
        board=child.board,
        threads=threads,
        limits=child.start.supervision,
    ).run()
