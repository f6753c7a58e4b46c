"""A router's view of a real server: it computes the names of blocks, and hears where they are."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.e2e.client import chat_body, encoded, noise
from tests.e2e.conftest import Starter
from tests.e2e.server import MODEL_NAME, Served, until
from tests.kv_offload.test_kv_events import router_chain, router_root

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def told(serve: Starter, tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("told")
    keys = folder / "keys"
    keys.write_text("key-a tenant-a\nkey-b tenant-b\n")
    tiers = ("--host-kv-gib", "0.05", "--disk-kv-path", str(folder / "disk"))
    return serve("qwen2_5_vl", "--kv-events", "--api-key-file", str(keys), *tiers)


def how(key: str) -> dict[str, Any]:
    return {
        "headers": {"authorization": f"Bearer {key}"},
        "timeout": httpx.Timeout(120),
        "verify": False,
    }


class Router:
    """Applies the events of one key on a thread of its own."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, str], tuple[str, int]] = {}
        self.about: dict[str, Any] = {}
        self.kinds: list[str] = []
        self.seq = 0

    def follow(self, lines: Iterator[str]) -> None:
        kind = ""
        for line in lines:
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            elif line.startswith("data: "):
                self._apply(kind, json.loads(line.removeprefix("data: ")))

    def _apply(self, kind: str, data: dict[str, Any]) -> None:
        assert kind == "snapshot" or data["seq"] == self.seq + 1
        if kind == "snapshot":
            if data["part"] == 0:
                self.held = {}
            self.about = data
        for block in data.get("blocks", [data] if kind == "stored" else []):
            self.held[block["tier"], block["key"]] = (block["parent"], block["num_tokens"])
        if kind == "evicted":
            del self.held[data["tier"], data["key"]]
        if kind == "cleared":
            self.held = {key: value for key, value in self.held.items() if key[0] != data["tier"]}
        self.seq = data["seq"]
        self.kinds.append(kind)

    def has(self, tier: str, ids: list[str], size: int) -> bool:
        """Whether a tier holds all whole blocks of a prompt."""
        root = bytes.fromhex(self.about["root"])
        chain = router_chain(root, ids[: len(ids) // size * size], size)
        want = {(tier, key.hex()): (parent.hex(), count) for key, parent, count in chain}
        return bool(want) and want.items() <= self.held.items()


@contextmanager
def listening(server: Served, key: str) -> Iterator[Router]:
    router = Router()
    with httpx.stream("GET", f"{server.url}/v1/kv/events", **how(key)) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()

        def follow() -> None:
            try:
                router.follow(lines)
            except httpx.TransportError:
                router.kinds.append("closed")

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        until(lambda: router.kinds, "a snapshot")
        yield router


def test_a_router_finds_its_prompts_on_every_tier(told: Served) -> None:
    with listening(told, "key-a") as a, listening(told, "key-b") as b:
        assert a.about["root"] == router_root(MODEL_NAME, "tenant-a").hex()
        assert b.about["root"] == router_root(MODEL_NAME, "tenant-b").hex()
        size, large = a.about["block_size"], a.about["superblock_tokens"]
        body = chat_body("long ago, " * 80, encoded(noise(5, (120, 90)), "png"))
        shown = httpx.post(f"{told.url}/v1/render", json=body, **how("key-a")).json()
        ids = [f"{one:x}" for one in shown["token_ids"]]
        for span in shown["spans"]:
            for at in range(span["length"]):
                ids[span["offset"] + at] = f"1{span['key']}{span['row_offset'] + at:08x}"
        assert len(ids) > large
        answer = httpx.post(f"{told.url}/v1/chat/completions", json=body, **how("key-a"))
        assert answer.status_code == 200, answer.text
        until(lambda: a.has("device", ids, size), "it is on the device")
        until(lambda: a.has("host", ids, large), "it is on the host")
        until(lambda: a.has("disk", ids, large), "it is on disk")
        assert b.kinds == ["snapshot"], "nothing of another tenant is told"

        # A language stage that dies loses all but what is on disk, and nobody hangs up.
        stage = told.stage("language")
        assert stage is not None
        os.kill(stage, signal.SIGKILL)
        until(lambda: a.kinds.count("cleared") == 3, "all is lost")
        until(lambda: a.has("disk", ids, large), "the disk is told again", within_s=90)
        assert {tier for tier, _ in a.held} == {"disk"}

        with listening(told, "key-a") as late:
            assert late.held == a.held
        until(lambda: told.health() == 200, "it serves again", within_s=90)
        assert httpx.post(f"{told.url}/reset_prefix_cache", **how("key-a")).status_code == 200
        until(lambda: not a.held, "the reset is told")
        assert b.kinds == ["snapshot"]
