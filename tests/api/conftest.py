"""Model folders and clients that the API's tests share."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.app import create_app
from api.config import ServeConfig
from tests import checkpoints
from tests.api.fakes import FakeEngine, served
from tests.api.folders import text_folder, vision_folder

ClientFactory = Callable[..., Awaitable[httpx.AsyncClient]]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`folders("qwen2_5_vl")`: tokenizer, template and configuration of a family, no weights."""
    root = tmp_path_factory.mktemp("folders")

    def make(family: str) -> Path:
        folder = root / family
        if not folder.exists():
            vision = family in checkpoints.VISION_FAMILIES
            (vision_folder if vision else text_folder)(family, folder)
        return folder

    return make


@pytest.fixture
async def client(folders: Callable[[str], Path]) -> AsyncIterator[ClientFactory]:
    """`await client(engine, family=..., **settings)`: a client of an application in this loop."""
    async with AsyncExitStack() as stack:

        async def make(
            engine: FakeEngine, family: str = "llama", fetcher: Any = None, **settings: Any
        ) -> httpx.AsyncClient:
            config = ServeConfig(model="tiny", **settings)
            app = create_app(config, engine, model_path=folders(family), fetcher=fetcher)
            await stack.enter_async_context(app.router.lifespan_context(app))
            transport = httpx.ASGITransport(app)
            http = httpx.AsyncClient(transport=transport, base_url="http://test", timeout=30)
            http.server = app.state.server  # type: ignore[attr-defined]
            await stack.enter_async_context(http)
            while app.state.server.status().phase == "loading" and engine.status().alive:
                await asyncio.sleep(0.005)
            return http

        yield make


def events(text: str) -> list[Any]:
    """The data of a server-sent event stream, "[DONE]" included."""
    found = []
    for line in text.splitlines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
    return found


@pytest.fixture
def live(folders: Callable[[str], Path]) -> Callable[..., Any]:
    """`with live(engine, family=..., **settings) as address:` our application on loopback."""

    @contextmanager
    def run(engine: FakeEngine, family: str = "llama", **settings: Any) -> Iterator[str]:
        app = create_app(ServeConfig(model="tiny", **settings), engine, model_path=folders(family))
        with served(app) as address:
            deadline = time.monotonic() + 20
            while app.state.server.status().phase != "ready" and time.monotonic() < deadline:
                time.sleep(0.01)
            yield address

    return run
