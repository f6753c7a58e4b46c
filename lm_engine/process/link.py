"""The language stage's VisionLink to a vision stage in another process.

Owns: RemoteVisionLink - jobs out, replies in, which of them are outstanding, and what happens when
the other side is replaced. Does not own: rows (embedding_arena.py) or restarts (supervisor.py).
"""

from __future__ import annotations

import socket

from lm_engine.process.board import Slot
from lm_engine.process.messages import CancelJob, Replies
from lm_engine.process.wire import Codec, Wire
from vision_encoder.link import EncodeJob, EncodeResult


class RemoteVisionLink:
    """VisionLink over a socket.

    What is sent while the vision stage is dead is dropped: after `reconnect` the caller submits
    everything that is in flight again, under a new epoch of the arena.
    """

    def __init__(self, sock: socket.socket, codec: Codec, slot: Slot) -> None:
        """`slot`: of the language stage's own signs of life."""
        self._codec = codec
        self._slot = slot
        self._wire = Wire(sock, codec)
        self._outstanding: set[tuple[bytes, int]] = set()
        self._results: list[EncodeResult] = []

    def submit(self, job: EncodeJob) -> None:
        self._outstanding.add((job.key, job.epoch))
        self._wire.send(job)

    def cancel(self, key: bytes, epoch: int) -> None:
        self._wire.send(CancelJob(key, epoch))

    def allow(self, seconds: float) -> None:
        """The other process may compute or not; how long is for its own units of work to say."""
        self._slot.alone = seconds <= 0

    def poll(self) -> list[EncodeResult]:
        self.pump()
        results, self._results = self._results, []
        return results

    def busy(self) -> bool:
        return bool(self._outstanding or self._results)

    # -- for the loop that waits on the socket ---------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._wire.closed

    @property
    def unsent_bytes(self) -> int:
        return self._wire.unsent_bytes

    @property
    def has_results(self) -> bool:
        return bool(self._results)

    def fileno(self) -> int:
        return self._wire.fileno()

    def pump(self) -> None:
        """Writes what is queued and reads what has come, without waiting."""
        self._wire.flush()
        for message in self._wire.receive():
            if isinstance(message, Replies):
                for result in message.results:
                    self._outstanding.discard((result.key, result.epoch))
                    self._results.append(result)

    def reconnect(self, sock: socket.socket) -> None:
        """A new vision stage is at the other end of `sock`; the old one's replies are void."""
        self._wire.close()
        self._wire = Wire(sock, self._codec)
        self._outstanding.clear()
        self._results.clear()
