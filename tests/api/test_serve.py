"""The way from the command line to a process: what it passes on, and signals that meet."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from api import serve
from api.config import ServeConfig
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
