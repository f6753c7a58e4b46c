"""`longlens serve`: one process from the command line to a drained end.

Owns: the order of starting (settings, port, model, engine, HTTP), what is said meanwhile, signals,
and exit codes. Does not own: any route, or the engine's own processes (lm_engine/process).
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import structlog
import uvicorn
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from api.app import create_app, version
from api.config import ConfigError, ServeConfig
from api.model_folder import resolve_model
from api.server import Server
from lm_engine.client import EngineClient, EngineStatus

ClientStarter = Callable[[ServeConfig, Path], EngineClient]

MAX_HEADER_BYTES = 32 * 2**10
_RECEIVE_BYTES = 512 * 2**10
"""More than one read of a socket returns: past it, headers without an end are an attack."""
_GIL_SLICE_S = 0.0005
"""How long a working thread may keep the event loop waiting for Python's lock."""

log = structlog.get_logger("longlens")


class HeaderLimitError(Exception):
    """Raised inside the parser, which answers 400 and closes the connection."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with a bound on headers, which httptools does not have."""

    _header_bytes = 0
    _in_headers = True

    def on_message_begin(self) -> None:
        self._header_bytes = 0
        self._in_headers = True
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._header_bytes = 0
        super().on_headers_complete()

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > MAX_HEADER_BYTES:
            raise HeaderLimitError

    def data_received(self, data: bytes) -> None:
        if self._in_headers:
            self._header_bytes += 0 if len(data) < MAX_HEADER_BYTES else len(data) // 2
        if self._in_headers and self._header_bytes > _RECEIVE_BYTES:
            self.send_400_response("Request headers are too large.")
            return
        super().data_received(data)


class DrainingServer(uvicorn.Server):
    """The first SIGTERM or SIGINT drains, the second ends at once.

    uvicorn's own handler closes the listening socket on the first one; then new requests would
    meet a closed port instead of a 503 that tells them to go elsewhere.
    """

    def __init__(self, config: uvicorn.Config, server: Server, drain_s: float):
        super().__init__(config)
        self._server = server
        self._drain_s = drain_s
        self._asked_to_end = False
        self._event_loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._event_loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # First of all, because the next signal may come in the middle of this.
        again, self._asked_to_end = self._asked_to_end, True
        if again or self._event_loop is None:
            self.force_exit = self.should_exit = True
            return
        self._drain = self._event_loop.create_task(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        log.info("draining", running=self._server.admission.requests, seconds=self._drain_s)
        await self._server.drain(self._drain_s)
        self.should_exit = True


def configure_logging(level: str) -> None:
    """Readable lines on a terminal, JSON lines otherwise; on stderr."""
    terminal = sys.stderr.isatty()
    renderer: Any = (
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        if terminal
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S" if terminal else "iso"),
            *([] if terminal else [structlog.processors.format_exc_info]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises ConfigError with a port that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except (OSError, OverflowError) as error:
        sock.close()
        reason = getattr(error, "strerror", None) or str(error)
        free = _free_port(host)
        hint = f" Use --port {free}." if free else " Use --host 127.0.0.1 or 0.0.0.0."
        raise ConfigError(f"Cannot listen on {host}:{port}: {reason}.{hint}") from error
    return sock


def _free_port(host: str) -> int | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return None
        return int(probe.getsockname()[1])


def start_processes(config: ServeConfig, model: Path) -> EngineClient:
    """The engine in processes of its own; call it inside the event loop."""
    from lm_engine.process.client import start
    from lm_engine.process.messages import Supervision

    limits = Supervision(drain_s=config.drain_timeout_s)
    options = config.engine_options(str(model))
    return start(options, supervision=limits, log_level=config.log_level)


def run(config: ServeConfig, *, start: ClientStarter = start_processes) -> int:
    """Serves until a signal. Returns the exit code; raises ConfigError or ModelFolderError before
    anything was started."""
    configure_logging(config.log_level)
    sock = listen(config.host, config.port)
    try:
        model = resolve_model(config.model, _report_assembly())
        sys.setswitchinterval(_GIL_SLICE_S)
        return uvicorn_run(_serve(config, model, sock, start))
    finally:
        sock.close()


def uvicorn_run(main: Any) -> int:
    """asyncio.run with uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return int(asyncio.run(main))
    return int(uvloop.run(main))


def _report_assembly() -> Callable[[str, float], None]:
    started = time.monotonic()
    said: list[str] = []

    def report(what: str, share: float) -> None:
        if what not in said:
            said.append(what)
            seconds = round(time.monotonic() - started, 1)
            log.info(what, done=f"{share:.0%}", seconds=seconds)

    return report


async def _serve(
    config: ServeConfig, model: Path, sock: socket.socket, start: ClientStarter
) -> int:
    client = start(config, model)
    code = 0
    try:
        app = create_app(config, client, model_path=model)
        http = uvicorn.Config(
            app,
            http=BoundedHttpProtocol,
            ws="none",
            lifespan="on",
            log_level="warning",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=75,
            backlog=4096,
        )
        server = DrainingServer(http, app.state.server, config.drain_timeout_s)
        host, port = sock.getsockname()[:2]
        log.info("starting", model=config.public_name, version=version(), pid=os.getpid())
        watcher = asyncio.create_task(_watch(app.state.server, server, f"http://{host}:{port}"))
        await server.serve([sock])
        watcher.cancel()
        outcome = (await asyncio.gather(watcher, return_exceptions=True))[0]
        code = outcome if isinstance(outcome, int) else 0
    finally:
        await client.close(drain_s=0.0)
    log.info("stopped", code=code)
    return code


class Bar:
    """What a start measures or loads, as a bar on a terminal; nothing elsewhere."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def show(self, status: EngineStatus) -> None:
        """A bar while the engine says how much there is to do."""
        if status.total <= 0 or status.phase not in ("starting", "loading"):
            self.close()
        elif sys.stderr.isatty():
            if self._progress is None:
                columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
                self._progress = Progress(
                    *columns, console=Console(stderr=True), transient=True, auto_refresh=False
                )
                self._progress.start()
                self._task = self._progress.add_task("")
            self._progress.update(
                self._task,
                description=status.detail,
                completed=status.done,
                total=status.total,
                refresh=True,
            )

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


async def _watch(server: Server, http: DrainingServer, address: str) -> int:
    """Reports the way to readiness; ends the server, with code 1, when the engine has failed."""
    bar = Bar()
    try:
        return await _report(server, http, address, bar)
    finally:
        bar.close()


async def _report(server: Server, http: DrainingServer, address: str, bar: Bar) -> int:
    said = None
    ready = False
    started = time.monotonic()
    while True:
        status = server.status()
        bar.show(status)
        if status.phase == "failed":
            log.error(status.detail or "the engine failed")
            http.should_exit = True
            return 1
        if not ready and status.phase == "ready" and status.model is not None:
            ready = True
            gc.collect()
            gc.freeze()  # what exists now lives as long as the server
            log.info(
                "ready",
                url=address,
                seconds=round(time.monotonic() - started, 1),
                context=status.model.max_model_len,
                kv_tokens=status.model.kv_capacity_tokens,
                dtype=status.model.dtype,
                device=status.model.device,
            )
        current = (status.phase, status.detail)
        if not ready and current != said:
            said = current
            eta = None if status.eta_s is None else round(status.eta_s, 1)
            log.info(status.detail or status.phase, phase=status.phase, eta_s=eta)
        await asyncio.sleep(0.1 if not ready else 1.0)
