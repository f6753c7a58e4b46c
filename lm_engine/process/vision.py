"""The vision stage's process: jobs in, units of work, replies out.

Owns: the loop around a VisionStage, its waiting, its signs of life, and the note of what it has in
hand. Does not own: the work (vision_encoder/stage.py), or what happens when this process ends.

New jobs are read between any two units of work, so that an image that is needed sooner goes first.
Between them it also rests for as long as the language stage wants all cores, and settles its number
of threads. A large picture may take many minutes on a CPU, but no unit of it does.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol

from lm_engine.process.board import Board
from lm_engine.process.language import IDLE_WAKE_S, StepBound
from lm_engine.process.messages import CancelJob, NewLink, Replies, Stop, Supervision
from lm_engine.process.threads import ThreadShare
from lm_engine.process.waiting import wait
from lm_engine.process.wire import Codec, Control, Wire
from vision_encoder.link import EncodeJob, EncodeResult

_PATIENCE_S = 0.02
_REST_WAKE_S = 0.004
"""Between two looks whether the language stage still wants all cores."""


class VisionWorker(Protocol):
    """What the loop needs of a vision stage; VisionStage is one."""

    def submit(self, job: EncodeJob) -> None: ...

    def cancel(self, key: bytes, epoch: int) -> None: ...

    def busy(self) -> bool: ...

    def advance(self) -> list[EncodeResult]: ...

    def in_hand(self) -> list[bytes]: ...

    def isolate(self, keys: Iterable[bytes]) -> None: ...

    def reset(self) -> None: ...


class VisionLoop:
    """Runs until told to stop, or until the supervisor is gone."""

    def __init__(
        self,
        worker: VisionWorker,
        *,
        codec: Codec,
        link: Wire,
        control: Control,
        board: Board,
        threads: ThreadShare,
        limits: Supervision,
    ) -> None:
        self._worker = worker
        self._codec = codec
        self._link = link
        self._control = control
        self._board = board
        self._slot = board["vision"]
        self._language = board["language"]
        self._threads = threads
        self._limits = limits
        self._bound = StepBound(limits)
        self._stopping = False
        worker.isolate(board.suspects())
        board.note_suspects(())

    def run(self) -> None:
        while not self._stopping:
            rest_s = IDLE_WAKE_S
            if self._worker.busy():
                rest_s = _REST_WAKE_S if self._language.alone else 0.0
            wait((self._link,), self._control, self._slot, rest_s, self._limits.idle_bound_s)
            self._take_control()
            self._take_jobs()
            if self._worker.busy() and not self._language.alone:
                self._work()

    def _take_control(self) -> None:
        for message, attached in self._control.receive():
            if isinstance(message, Stop):
                self._stopping = True
            elif isinstance(message, NewLink) and attached is not None:
                # The arena of a new language stage owns all rows from here on; nothing that the
                # former one asked for may be written any more.
                self._worker.reset()
                self._link.close()
                self._link = Wire(attached, self._codec)
        if self._control.closed:
            self._stopping = True

    def _take_jobs(self) -> None:
        self._link.flush()
        for message in self._link.receive(_PATIENCE_S):
            if isinstance(message, EncodeJob):
                self._worker.submit(message)
            elif isinstance(message, CancelJob):
                self._worker.cancel(message.key, message.epoch)

    def _work(self) -> None:
        self._slot.beat(self._bound.bound_s)
        self._slot.busy = True
        self._threads.settle()
        self._board.note_suspects(self._worker.in_hand())
        begin = time.monotonic()
        results = self._worker.advance()
        self._bound.observe(time.monotonic() - begin)
        self._board.note_suspects(())
        self._slot.beat(self._limits.idle_bound_s)
        if results:
            self._link.send(Replies(tuple(results)))
