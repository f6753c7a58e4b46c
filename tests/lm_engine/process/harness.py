"""Starting, watching and ending stage processes in tests; every wait is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

from chunked_prefill.request import Request
from lm_engine.client import EngineStatus, MediaItem
from lm_engine.options import EngineOptions
from lm_engine.outputs import RequestOutput
from lm_engine.process.client import ProcessEngineClient, start
from lm_engine.process.messages import Supervision
from tests.lm_engine.process.fakes import FACTORIES

ROOT = str(Path(__file__).resolve().parents[3])
PATIENCE_S = 60.0


@contextlib.asynccontextmanager
async def running(
    model: str = "",
    *,
    supervision: Supervision | None = None,
    wait: bool = True,
    log_level: str = "info",
) -> AsyncIterator[ProcessEngineClient]:
    """A client of fake stages; afterwards all of its processes are gone."""
    client = start(
        EngineOptions(model),
        factories=FACTORIES,
        supervision=supervision,
        path=(ROOT,),
        log_level=log_level,
    )
    pids: set[int] = {client.supervisor_pid}
    try:
        if wait:
            await until(client, lambda status: status.phase == "ready")
        pids |= everyone(client)
        yield client
    finally:
        pids |= everyone(client)
        await asyncio.wait_for(client.close(drain_s=0.0), PATIENCE_S)
        await gone(pids)


async def until(client: ProcessEngineClient, true: Callable[[EngineStatus], bool]) -> EngineStatus:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        status = client.status()
        if true(status):
            return status
        await asyncio.sleep(0.005)
    raise AssertionError(f"never came true; last status: {client.status()}")


async def collect(
    client: ProcessEngineClient, request: Request, media: tuple[MediaItem, ...] = ()
) -> list[RequestOutput]:
    async with asyncio.timeout(PATIENCE_S):
        return [event async for event in client.submit(request, media)]


def texts(events: Iterable[RequestOutput]) -> str:
    return "".join(delta.text for event in events for delta in event.deltas)


def everyone(client: ProcessEngineClient) -> set[int]:
    """Processes of this client that are known to be running."""
    known = {client.supervisor_pid, client.status().pid, client.vision_pid}
    return {pid for pid in known if pid is not None and alive(pid)}


def alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


async def gone(pids: Iterable[int]) -> None:
    """Waits until none of the processes exists, not even as a zombie of ours."""
    end = time.monotonic() + PATIENCE_S
    left = set(pids)
    while left and time.monotonic() < end:
        left = {pid for pid in left if os.path.exists(f"/proc/{pid}")}
        await asyncio.sleep(0.01)
    assert not left, f"processes {left} are still there"
