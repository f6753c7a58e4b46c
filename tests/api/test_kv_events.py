"""GET /v1/kv/events without a model: snapshots, changes, tenants, slow readers, and endings."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from api import kv_events
from api.app import create_app
from api.config import ConfigError, ServeConfig, load
from kv_offload.kv_events import KVEvent, Tier, root_name
from lm_engine.kv_log import KVEventLog
from tests.api.conftest import ClientFactory
from tests.api.fakes import FakeEngine

PATH = "/v1/kv/events"


def stored(number: int, tenant: str = "", tier: Tier = "device") -> KVEvent:
    return KVEvent("stored", tier, tenant, number.to_bytes(32, "big"), b"p" * 32, 16)


def evicted(number: int, tenant: str = "", tier: Tier = "device") -> KVEvent:
    return KVEvent("evicted", tier, tenant, number.to_bytes(32, "big"))


def block(event: KVEvent) -> dict[str, Any]:
    return {
        "tier": event.tier,
        "key": event.key.hex(),
        "parent": event.parent.hex(),
        "num_tokens": event.num_tokens,
    }


def parse(text: str) -> list[tuple[str | None, str, dict[str, Any]]]:
    """(id, event, data) of every event."""
    found = []
    for part in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in part.splitlines() if line[:1] != ":")
        if fields:
            found.append((fields.get("id"), fields["event"], json.loads(fields["data"])))
    return found


def test_the_setting() -> None:
    assert not ServeConfig().engine_options("m").kv_events
    assert load({"kv_events": True}).config.engine_options("m").kv_events
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        load({"kv_events": True, "enable_prefix_caching": False})


async def test_without_the_flag_there_is_nothing(client: ClientFactory) -> None:
    http = await client(FakeEngine())
    answer = await http.get(PATH)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "kv_events_off"
    assert "--kv-events" in answer.json()["error"]["message"]


async def test_a_snapshot_then_every_change(client: ClientFactory) -> None:
    log = KVEventLog()
    http = await client(FakeEngine(kv_log=log))
    log.publish([stored(1), stored(2, tier="host"), stored(3), evicted(1)])
    answer = asyncio.create_task(http.get(PATH))
    while not log.num_readers(""):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    log.publish([stored(4), evicted(3), KVEvent("cleared", "host", "")])
    log.end()
    response = await answer
    assert response.headers["content-type"].startswith("text/event-stream")
    first, *changes = parse(response.text)
    assert first == (
        f"{log.stream}-4",
        "snapshot",
        {
            "seq": 4,
            "part": 0,
            "last": True,
            "stream": log.stream,
            "model": "tiny",
            "tenant": "",
            "root": root_name("tiny", "").key.hex(),
            "block_size": 16,
            "superblock_tokens": 256,
            "blocks": [block(stored(3)), block(stored(2, tier="host"))],
        },
    )
    assert changes == [
        (f"{log.stream}-5", "stored", {"seq": 5, **block(stored(4))}),
        (f"{log.stream}-6", "evicted", {"seq": 6, "tier": "device", "key": stored(3).key.hex()}),
        (f"{log.stream}-7", "cleared", {"seq": 7, "tier": "host"}),
    ]
    assert log.num_readers("") == 0


async def test_a_large_snapshot_comes_in_parts(client: ClientFactory) -> None:
    log = KVEventLog()
    http = await client(FakeEngine(kv_log=log))
    log.publish(stored(number) for number in range(1100))
    log.end()
    parts = parse((await http.get(PATH)).text)
    assert [data["part"] for _, _, data in parts] == [0, 1, 2]
    assert [data["last"] for _, _, data in parts] == [False, False, True]
    assert [name is None for name, _, _ in parts] == [True, True, False]
    keys = [one["key"] for _, _, data in parts for one in data["blocks"]]
    assert keys == [stored(number).key.hex() for number in range(1100)]


async def test_who_comes_back_hears_what_it_missed(client: ClientFactory) -> None:
    log = KVEventLog(most_events=3)
    http = await client(FakeEngine(kv_log=log))
    log.publish(stored(number) for number in range(5))
    log.end()

    async def kinds(last_event_id: str) -> list[str]:
        answer = await http.get(PATH, headers={"last-event-id": last_event_id.encode("latin-1")})
        return [kind for _, kind, _ in parse(answer.text)]

    assert await kinds(f"{log.stream}-3") == ["stored", "stored"]
    assert await kinds(f"{log.stream}-5") == []
    for unknown in (
        f"{log.stream}-1",
        f"{log.stream}-6",
        "0123-4",
        "4",
        "",
        f"{log.stream}-²",
        "-",
    ):
        assert await kinds(unknown) == ["snapshot"], unknown


async def test_a_tenant_sees_its_own_blocks_only(client: ClientFactory, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one tenant-one\ntwo tenant-two\n")
    log = KVEventLog()
    http = await client(FakeEngine(kv_log=log), api_key_file=keys)
    assert (await http.get(PATH)).status_code == 401
    log.publish([stored(1, "tenant-one"), stored(2, "tenant-two"), stored(3, "tenant-two")])
    log.end()
    seen = {}
    for key, tenant in (("one", "tenant-one"), ("two", "tenant-two")):
        answer = await http.get(PATH, headers={"authorization": f"Bearer {key}"})
        ((_, _, data),) = parse(answer.text)
        assert data["tenant"] == tenant
        assert data["root"] == root_name("tiny", tenant).key.hex()
        seen[tenant] = (data["seq"], [one["key"] for one in data["blocks"]])
    assert seen == {
        "tenant-one": (1, [stored(1).key.hex()]),
        "tenant-two": (2, [stored(2).key.hex(), stored(3).key.hex()]),
    }


async def test_before_the_model_is_there_it_says_so(client: ClientFactory) -> None:
    engine = FakeEngine(kv_log=KVEventLog())
    http = await client(engine)
    engine.current = replace(engine.current, phase="loading")
    assert (await http.get(PATH)).status_code == 503


# -- connections that do not end by themselves --------------------------------------------------


class Connection:
    """One request to the application by hand: writes wait for `room`, and `leave` hangs up."""

    def __init__(self, app: FastAPI) -> None:
        self.room, self._left = asyncio.Event(), asyncio.Event()
        self.room.set()
        self.status, self.text, self.writes = 0, "", 0
        self._asked = False
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "GET",
            "path": PATH,
            "raw_path": PATH.encode(),
            "query_string": b"",
            "headers": [],
            "scheme": "http",
            "server": ("test", 80),
            "client": ("test", 1),
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))  # type: ignore[arg-type]

    async def _receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.status = message.get("status", self.status)
        if message.get("body"):
            self.writes += 1
            await self.room.wait()
            self.text += message["body"].decode()

    def leave(self) -> None:
        self._left.set()

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not true():
                await asyncio.sleep(0.005)


@pytest.fixture
async def app(folders: Callable[[str], Path]) -> AsyncIterator[FastAPI]:
    engine = FakeEngine(kv_log=KVEventLog(most_events=10))
    config = ServeConfig(model="tiny", keepalive_s=0.05)
    made = create_app(config, engine, model_path=folders("llama"))
    async with made.router.lifespan_context(made):
        while made.state.server.status().phase == "loading":
            await asyncio.sleep(0.005)
        yield made


@asynccontextmanager
async def connected(app: FastAPI) -> AsyncIterator[Connection]:
    connection = Connection(app)
    try:
        yield connection
    finally:
        connection.leave()
        await asyncio.wait_for(connection.task, 20)


async def test_a_slow_reader_is_not_waited_for_and_starts_over(app: FastAPI) -> None:
    log = app.state.server.client.kv_log
    async with connected(app) as slow, connected(app) as quick:
        await slow.until(lambda: "snapshot" in slow.text and "snapshot" in quick.text)
        slow.room.clear()
        log.publish([stored(1)])
        await quick.until(lambda: quick.text.count("event: stored") == 1 and slow.writes > 1)
        for number in range(2, 101):
            log.publish([stored(number)])
            await quick.until(lambda n=number: quick.text.count("event: stored") == n)  # type: ignore[misc]
        slow.room.set()
        await slow.until(lambda: slow.text.count("event: snapshot") == 2)
        last = [event for event in parse(slow.text) if event[1] == "snapshot"][-1]
        assert last[2]["seq"] == 100
        assert len(last[2]["blocks"]) == 100
        assert quick.text.count("event: snapshot") == 1
        assert [data["seq"] for _, kind, data in parse(quick.text)] == list(range(101))


async def test_silence_is_filled_with_comments(app: FastAPI) -> None:
    async with connected(app) as reader:
        await reader.until(lambda: reader.text.count(": keep-alive\n\n") >= 2)


async def test_readers_that_leave_are_forgotten_and_too_many_are_refused(app: FastAPI) -> None:
    log = app.state.server.client.kv_log
    many = [Connection(app) for _ in range(kv_events._MOST_READERS)]
    await many[0].until(lambda: log.num_readers("") == len(many))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as http:
        assert (await http.get(PATH)).status_code == 429
    for connection in many:
        connection.leave()
        await asyncio.wait_for(connection.task, 20)
    assert log.num_readers("") == 0
    async with connected(app) as again:
        await again.until(lambda: "snapshot" in again.text)


async def test_a_drain_ends_the_stream(app: FastAPI) -> None:
    reader = Connection(app)
    await reader.until(lambda: "snapshot" in reader.text)
    await app.state.server.drain(5)
    await asyncio.wait_for(reader.task, 20)
    assert reader.status == 200
