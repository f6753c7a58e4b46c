"""One POST, answered by a stream: when its last byte went out, and when each event came in.

Owns: Address, Connections (keep-alive, one per stream in flight) and Exchange, the times and bytes
of one request. Does not own: what events mean (bench_stream.py), or when requests are sent
(bench_load.py).

This is HTTP/1.1 on asyncio and httptools rather than httpx because the client shares the machine
with the server that it measures: an event costs 20 µs here and 70 to 100 µs there, and times are
taken in the moment in which the socket was read.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools

_IDLE_S = 3.0
"""A connection that was idle for longer is not used again: servers close theirs after 5 s."""
_CONNECT_S = 10.0
_MOST_ERROR_BYTES = 1 << 16

OnData = Callable[[float, bytes], None]
"""Called with the time (time.perf_counter) at which a piece of the body was read, and the piece."""


class AddressError(ValueError):
    """--url is no address of a server."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is. `base` is the part of the path before /v1."""

    scheme: str
    host: str
    port: int
    base: str = ""

    @classmethod
    def parse(cls, url: str) -> Address:
        """`127.0.0.1:8000`, `http://host:8000/v1`, `https://host/prefix`. Raises AddressError."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            raise AddressError(f"--url {url}: the port is no number from 0 to 65535.") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise AddressError(f"--url {url} is no address; write http://127.0.0.1:8000.")
        base = parts.path.rstrip("/").removesuffix("/v1")
        return cls(
            parts.scheme, parts.hostname, port or (443 if parts.scheme == "https" else 80), base
        )

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.base}"


@dataclass(slots=True)
class Exchange:
    """One request and its answer. Times are time.perf_counter() seconds."""

    started_s: float = 0.0
    """When it was handed to a connection, before a new one is opened."""
    sent_s: float = 0.0
    """When the last byte of the body had gone to the kernel."""
    headers_s: float = 0.0
    ended_s: float = 0.0
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    """Names in lower case."""
    body: bytes = b""
    """Of an answer that is no 200, its beginning."""


class ExchangeError(Exception):
    """No complete answer came; `kind` says at which point it failed."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class _Connection(asyncio.Protocol):
    """One TCP connection with at most one request in flight."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.idle_since_s = 0.0
        self.reusable = False
        self._exchange: Exchange | None = None
        self._on_data: OnData | None = None
        self._done: asyncio.Future[None] | None = None
        self._parser: httptools.HttpResponseParser | None = None

    @property
    def closed(self) -> bool:
        return self.transport is None or self.transport.is_closing()

    def send(self, request: bytes, exchange: Exchange, on_data: OnData) -> asyncio.Future[None]:
        """The future ends with the answer, or with an ExchangeError."""
        assert self.transport is not None
        self._exchange, self._on_data = exchange, on_data
        self._parser = httptools.HttpResponseParser(self)
        self.reusable = False
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        if self.transport.get_write_buffer_size() == 0:
            exchange.sent_s = time.perf_counter()
        return self._done

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    # -- asyncio ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        # Writing is resumed when the buffer is empty, so that this tells when the body was sent.
        transport.set_write_buffer_limits(high=0)

    def resume_writing(self) -> None:
        if self._exchange is not None and not self._exchange.sent_s:
            self._exchange.sent_s = time.perf_counter()

    def data_received(self, data: bytes) -> None:
        if self._parser is None or self._exchange is None:
            self.close()  # nobody asked for this
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail("protocol", f"the answer is no HTTP/1.1 ({error})")
            self.close()

    def eof_received(self) -> None:
        # An answer without a length or chunks ends with its connection.
        if self._exchange is not None and self._exchange.status and not self._has_length():
            self.on_message_complete()

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        why = f" ({error})" if error else ""
        status = self._exchange.status if self._exchange else 0
        if status:
            self._fail("cut short", f"the connection was closed in the middle of the answer{why}")
        else:
            self._fail("closed", f"the connection was closed before any answer{why}")

    # -- httptools ----------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._exchange is not None:
            self._exchange.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._exchange is not None and self._parser is not None:
            self._exchange.status = self._parser.get_status_code()
            self._exchange.headers_s = time.perf_counter()

    def on_body(self, body: bytes) -> None:
        exchange = self._exchange
        if exchange is None or self._on_data is None:
            return
        if exchange.status == 200:
            self._on_data(time.perf_counter(), body)
        elif len(exchange.body) < _MOST_ERROR_BYTES:
            exchange.body += body

    def on_message_complete(self) -> None:
        exchange, done = self._exchange, self._done
        if exchange is None or done is None or self._parser is None or exchange.status < 200:
            return
        exchange.ended_s = time.perf_counter()
        # A server that answers before it has read the body does not want the rest of it.
        self.reusable = self._parser.should_keep_alive() and exchange.sent_s > 0
        if not exchange.sent_s:
            exchange.sent_s = exchange.headers_s
        self.idle_since_s = exchange.ended_s
        self._exchange = self._on_data = self._done = None
        if not done.done():
            done.set_result(None)

    def _has_length(self) -> bool:
        headers = self._exchange.headers if self._exchange else {}
        return "content-length" in headers or "transfer-encoding" in headers

    def _fail(self, kind: str, message: str) -> None:
        done, self._done = self._done, None
        if self._exchange is not None:
            self._exchange.ended_s = time.perf_counter()
        self._exchange = self._on_data = None
        if done is not None and not done.done():
            done.set_exception(ExchangeError(kind, message))


class Connections:
    """Sends requests to one server, each on a connection of its own while it lasts."""

    def __init__(self, address: Address, headers: dict[str, str] | None = None) -> None:
        self.address = address
        default = {"http": 80, "https": 443}[address.scheme]
        host = f"[{address.host}]" if ":" in address.host else address.host
        fixed = {
            "host": host if address.port == default else f"{host}:{address.port}",
            "content-type": "application/json",
            "accept": "text/event-stream, application/json",
            **(headers or {}),
        }
        self._head = "".join(f"{name}: {value}\r\n" for name, value in fixed.items())
        self._tls = ssl.create_default_context() if address.scheme == "https" else None
        self._idle: list[_Connection] = []

    async def post(
        self,
        path: str,
        body: bytes,
        exchange: Exchange,
        on_data: OnData,
        *,
        timeout_s: float,
        headers: dict[str, str] | None = None,
    ) -> None:
        """Fills `exchange`. Pieces of a 200's body go to `on_data`.

        Raises ExchangeError with the kind connect, timeout, closed, cut short or protocol.
        """
        own = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        head = (
            f"POST {self.address.base}{path} HTTP/1.1\r\n{self._head}{own}"
            f"content-length: {len(body)}\r\n\r\n"
        )
        request = head.encode("latin-1") + body
        exchange.started_s = time.perf_counter()
        try:
            async with asyncio.timeout(timeout_s):
                await self._exchange(request, exchange, on_data)
        except TimeoutError:
            exchange.ended_s = time.perf_counter()
            raise ExchangeError("timeout", f"no end of the answer within {timeout_s:g} s") from None

    async def _exchange(self, request: bytes, exchange: Exchange, on_data: OnData) -> None:
        kept = self._take_idle()
        if kept is not None:
            try:
                await self._use(kept, request, exchange, on_data)
                return
            except ExchangeError as error:
                if error.kind != "closed":
                    raise
                # The server closed it while it was idle, and has not seen the request.
                exchange.sent_s = 0.0
        await self._use(await self._open(), request, exchange, on_data)

    async def _use(
        self, connection: _Connection, request: bytes, exchange: Exchange, on_data: OnData
    ) -> None:
        try:
            await connection.send(request, exchange, on_data)
        finally:
            # Also when this is cancelled: the server notices that its client has left.
            if connection.reusable:
                self._idle.append(connection)
            else:
                connection.close()

    def _take_idle(self) -> _Connection | None:
        now = time.perf_counter()
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed and now - connection.idle_since_s < _IDLE_S:
                return connection
            connection.close()
        return None

    async def _open(self) -> _Connection:
        loop = asyncio.get_running_loop()
        address = self.address
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, connection = await loop.create_connection(
                    _Connection, address.host, address.port, ssl=self._tls
                )
        except TimeoutError:
            raise ExchangeError(
                "connect", f"{address} did not answer in {_CONNECT_S:g} s"
            ) from None
        except (OSError, ssl.SSLError) as error:
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            raise ExchangeError("connect", f"no connection to {address}: {reason}") from None
        return connection

    async def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)  # lets transports call connection_lost
