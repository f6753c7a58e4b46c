"""Messages over sockets, without ever waiting.

Owns: Codec (messages to bytes and back: msgpack with a schema, no pickle), Wire (a stream socket
with buffers on both sides), Control (a packet socket that can pass descriptors).
Does not own: the messages (messages.py), or who talks to whom. Imports no torch; msgspec is
imported when the first Codec is made.

A frame on a stream is a 4-byte little-endian length, a 1-byte kind, and msgpack of that length.
"""

from __future__ import annotations

import os
import select
import socket
from collections import deque
from collections.abc import Iterable
from typing import Any, TypeVar

from lm_engine.process.messages import KINDS, Message

T = TypeVar("T")

MAX_FRAME_BYTES = 1 << 30
_HEADER_BYTES = 5
_READ_BYTES = 1 << 18
_READS_PER_CALL = 64
_PACKET_BYTES = 1 << 16
_MAX_DESCRIPTORS = 4
_SOCKET_BUFFER_BYTES = 1 << 20
"""Asked for; the kernel grants what its limits allow."""


class WireError(Exception):
    """A peer sent something that is no message of this release."""


class Codec:
    """Encodes and decodes messages. Cheap to use, not cheap to make: one per process."""

    def __init__(self) -> None:
        try:
            import msgspec.msgpack as msgpack
        except ImportError as missing:
            raise RuntimeError(
                "stages in processes of their own need the package msgspec: pip install msgspec, "
                "or use lm_engine.engine.Engine in this process"
            ) from missing
        self._msgpack = msgpack
        self._encoder = msgpack.Encoder()
        self._numbers: dict[type, int] = {kind: number for number, kind in enumerate(KINDS)}
        self._decoders: dict[type, Any] = {}

    def pack(self, value: object) -> bytes:
        """Msgpack of any of our values. Raises WireError when it holds something that msgpack
        cannot carry, such as a lone surrogate or an integer of more than 64 bits."""
        try:
            return self._encoder.encode(value)
        except (TypeError, ValueError, OverflowError) as fault:
            raise WireError(f"{type(value).__name__} cannot be encoded: {fault}") from fault

    def unpack(self, kind: type[T], body: bytes | memoryview) -> T:
        """The inverse of `pack`. Raises WireError when the bytes are no `kind`."""
        decoder = self._decoders.get(kind)
        if decoder is None:
            decoder = self._decoders[kind] = self._msgpack.Decoder(kind)
        try:
            value: T = decoder.decode(body)
        except ValueError as fault:
            raise WireError(f"{kind.__name__} cannot be decoded: {fault}") from fault
        return value

    def number(self, message: Message) -> int:
        return self._numbers[type(message)]

    def frame(self, message: Message) -> bytes:
        body = self.pack(message)
        return len(body).to_bytes(4, "little") + bytes((self.number(message),)) + body

    def unframe(self, number: int, body: bytes | memoryview) -> Message:
        if number >= len(KINDS):
            raise WireError(f"kind {number} is unknown")
        return self.unpack(KINDS[number], body)


class Wire:
    """One end of a stream socket. No method waits, except `receive` for the patience given.

    `closed` is set when the peer is gone; what is sent after that is dropped.
    """

    def __init__(self, sock: socket.socket, codec: Codec) -> None:
        sock.setblocking(False)
        self.closed = False
        self._sock = sock
        self._codec = codec
        self._incoming = bytearray()
        self._outgoing: deque[memoryview] = deque()
        self._outgoing_bytes = 0

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def unsent_bytes(self) -> int:
        return self._outgoing_bytes

    def send(self, *messages: Message) -> None:
        """Queue messages in one piece and write what the socket takes now."""
        self.send_frames(b"".join([self._codec.frame(message) for message in messages]))

    def send_frames(self, frames: bytes) -> None:
        if self.closed or not frames:
            return
        self._outgoing.append(memoryview(frames))
        self._outgoing_bytes += len(frames)
        self.flush()

    def flush(self) -> None:
        """Write as much of what is queued as the socket takes now."""
        while self._outgoing and not self.closed:
            piece = self._outgoing[0]
            try:
                written = self._sock.send(piece)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._peer_gone()
                return
            self._outgoing_bytes -= written
            if written == len(piece):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = piece[written:]

    def receive(self, patience_s: float = 0.0) -> list[Message]:
        """Messages that have arrived, a few megabytes of them at most.

        Args:
            patience_s: how long to wait for each further piece of a message that has begun to
                arrive. Its sender is writing at this moment, while a caller that looks only
                between steps would get one socket buffer per step.
        """
        messages: list[Message] = []
        for _ in range(_READS_PER_CALL):
            if not self._read(patience_s if self._incoming else 0.0):
                break
            messages += self._take_frames()
        return messages

    def _read(self, patience_s: float) -> bool:
        if self.closed:
            return False
        if patience_s:
            select.select([self._sock], [], [], patience_s)
        try:
            data = self._sock.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        if not data:
            self._peer_gone()
            return False
        self._incoming += data
        return True

    def _take_frames(self) -> Iterable[Message]:
        messages: list[Message] = []
        at = 0
        with memoryview(self._incoming) as view:
            while len(view) - at >= _HEADER_BYTES:
                length = int.from_bytes(view[at : at + 4], "little")
                if length > MAX_FRAME_BYTES:
                    raise WireError(f"a frame of {length} bytes exceeds {MAX_FRAME_BYTES}")
                end = at + _HEADER_BYTES + length
                if end > len(view):
                    break
                with view[at + _HEADER_BYTES : end] as body:
                    messages.append(self._codec.unframe(view[at + 4], body))
                at = end
        if at:
            del self._incoming[:at]
        return messages

    def _peer_gone(self) -> None:
        self.closed = True
        self._outgoing.clear()
        self._outgoing_bytes = 0

    def close(self) -> None:
        self._peer_gone()
        self._sock.close()


class Control:
    """One end of a packet socket: a message is a packet and may carry one descriptor."""

    def __init__(self, sock: socket.socket, codec: Codec) -> None:
        sock.setblocking(False)
        self.closed = False
        self._sock = sock
        self._codec = codec
        self._waiting: deque[tuple[bytes, socket.socket | None]] = deque()

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: Message, attached: socket.socket | None = None) -> None:
        """Send, or queue when the peer is slow. `attached` is given away: this end closes it."""
        if self.closed:
            if attached is not None:
                attached.close()
            return
        packet = bytes((self._codec.number(message),)) + self._codec.pack(message)
        self._waiting.append((packet, attached))
        self.flush()

    def flush(self) -> None:
        while self._waiting and not self.closed:
            packet, attached = self._waiting[0]
            fds = [attached.fileno()] if attached is not None else []
            try:
                if fds:
                    socket.send_fds(self._sock, [packet], fds)
                else:
                    self._sock.send(packet)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._peer_gone()
                return
            self._waiting.popleft()
            if attached is not None:
                attached.close()

    def receive(self) -> list[tuple[Message, socket.socket | None]]:
        """Messages that have arrived, each with the socket that came along."""
        arrived: list[tuple[Message, socket.socket | None]] = []
        while not self.closed:
            try:
                packet, fds, _, _ = socket.recv_fds(self._sock, _PACKET_BYTES, _MAX_DESCRIPTORS)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                packet, fds = b"", []
            if not packet:
                self._peer_gone()
                break
            for fd in fds:
                os.set_inheritable(fd, False)
            message = self._codec.unframe(packet[0], packet[1:])
            arrived.append((message, socket.socket(fileno=fds[0]) if fds else None))
        return arrived

    def _peer_gone(self) -> None:
        self.closed = True
        for _, attached in self._waiting:
            if attached is not None:
                attached.close()
        self._waiting.clear()

    def close(self) -> None:
        self._peer_gone()
        self._sock.close()


def stream_pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a new nameless stream socket with generous buffers."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in pair:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)
    return pair


def control_pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a new nameless packet socket."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
