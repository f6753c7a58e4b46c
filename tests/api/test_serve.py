"""The way from the command line to a process: what it passes on, and signals that meet."""

from __future__ import annotations

import asyncio
import io
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from api import serve
from api.config import ServeConfig
from lm_engine.client import EngineStatus
from lm_engine.process import client


def test_the_stages_get_the_log_level_and_the_drain_time(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(client, "start", lambda options, **rest: given.update(rest))
    config = ServeConfig(model="m", log_level="error", drain_timeout_s=7)
    serve.start_processes(config, Path("/models/m"))
    assert given["log_level"] == "error"
    assert given["supervision"].drain_s == 7


async def test_a_signal_in_the_middle_of_the_first_ones_handler_is_the_second() -> None:
    http = uvicorn.Config(lambda: None)
    drained = asyncio.Event()

    class Server(serve.DrainingServer):
        async def _drain_and_exit(self) -> None:
            drained.set()

    server = Server(http, None, 1.0)  # type: ignore[arg-type]
    loop = asyncio.get_running_loop()

    class Interrupted:
        """The event loop, into whose first call the second signal comes."""

        def create_task(self, work: Any) -> Any:
            server.handle_exit(signal.SIGTERM, None)
            return loop.create_task(work)

    server._event_loop = Interrupted()  # type: ignore[assignment]
    server.handle_exit(signal.SIGTERM, None)
    assert server.force_exit
    await drained.wait()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


LOADING = EngineStatus("loading", "measuring step times", 9.0, 45.0)


def test_a_terminal_sees_a_bar_until_the_engine_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    bar = serve.Bar()
    bar.show(EngineStatus("loading", "finding the model"))
    assert not screen.getvalue()
    bar.show(LOADING)
    bar.show(replace(LOADING, done=30.0))
    assert "measuring step times" in screen.getvalue()
    bar.show(EngineStatus("ready"))
    bar.close()
    bar.show(EngineStatus("ready"))
    assert screen.getvalue().count("measuring step times") <= 3


def test_a_log_file_gets_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr("sys.stderr", file)
    serve.Bar().show(LOADING)
    assert not file.getvalue()
