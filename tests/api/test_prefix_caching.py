"""Settings, route and metrics of the prefix cache, without a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from api.config import ServeConfig, load
from lm_engine.client import EngineStats
from tests.api.conftest import ClientFactory, events
from tests.api.fakes import FakeEngine

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}


def test_it_is_on_unless_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ServeConfig().engine_options("m").prefix_caching
    assert not load({"enable_prefix_caching": False}).config.engine_options("m").prefix_caching
    monkeypatch.setenv("LONGLENS_ENABLE_PREFIX_CACHING", "false")
    assert not load({}).config.engine_options("m").prefix_caching


async def test_a_reset_is_of_the_callers_tenant(client: ClientFactory, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one tenant-one\ntwo tenant-two\n")
    engine = FakeEngine()
    http = await client(engine, api_key_file=keys)
    assert (await http.post("/reset_prefix_cache")).status_code == 401
    assert engine.resets == []
    headers = {"authorization": "Bearer two"}
    assert (await http.post("/reset_prefix_cache", headers=headers)).status_code == 200
    assert engine.resets == ["tenant-two"]
    engine.current = replace(engine.current, phase="loading")
    assert (await http.post("/reset_prefix_cache", headers=headers)).status_code == 503


async def test_usage_while_streaming_knows_what_was_cached(client: ClientFactory) -> None:
    http = await client(FakeEngine())
    options = {"continuous_usage_stats": True, "include_usage": True}
    response = await http.post(CHAT, json={**HI, "stream": True, "stream_options": options})
    usages = [e["usage"] for e in events(response.text) if e != "[DONE]" and e.get("usage")]
    cached = {usage["prompt_tokens_details"]["cached_tokens"] for usage in usages}
    assert len(usages) > 3
    assert len(cached) == 1
    assert cached != {0}


async def test_the_engines_counts_are_metrics(client: ClientFactory) -> None:
    engine = FakeEngine()
    stats = EngineStats(
        prompt_tokens_cached=30,
        prompt_tokens_uncached=12,
        prefix_cache_queries=40,
        kv_blocks_cached=7,
        kv_evictions=5,
        kv_cleared=2,
    )
    engine.current = replace(engine.current, stats=stats)
    text = (await (await client(engine)).get("/metrics")).text
    for line in (
        'vllm:kv_prompt_tokens_total{model_name="tiny",source="device"} 30.0',
        'vllm:kv_prompt_tokens_total{model_name="tiny",source="computed"} 12.0',
        'vllm:prefix_cache_queries_total{model_name="tiny"} 40.0',
        'vllm:prefix_cache_hits_total{model_name="tiny"} 30.0',
        'vllm:kv_blocks_cached{model_name="tiny"} 7.0',
        'vllm:kv_evictions_total{model_name="tiny",reason="room",tier="device"} 5.0',
        'vllm:kv_evictions_total{model_name="tiny",reason="reset",tier="device"} 2.0',
    ):
        assert line in text, line
