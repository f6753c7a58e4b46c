"""Settings, route and metrics of the prefix cache, without a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from api.config import ConfigError, ServeConfig, load
from lm_engine.client import EngineStats, TierStats
from tests.api.conftest import ClientFactory, events
from tests.api.fakes import FakeEngine

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}


def test_it_is_on_unless_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ServeConfig().engine_options("m").prefix_caching
    assert not load({"enable_prefix_caching": False}).config.engine_options("m").prefix_caching
    monkeypatch.setenv("LONGLENS_ENABLE_PREFIX_CACHING", "false")
    assert not load({}).config.engine_options("m").prefix_caching


def test_a_disk_tier_needs_a_host_tier(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--disk-kv-path needs host memory.*--host-kv-gib 1"):
        load({"disk_kv_path": tmp_path})
    options = load({"disk_kv_path": tmp_path, "host_kv_gib": 2, "disk_kv_gib": 3}).config
    assert options.engine_options("m").disk_kv_path == str(tmp_path)
    assert options.engine_options("m").disk_kv_bytes == 3 * 2**30


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"disk_kv_gib": 3}, "--disk-kv-gib bounds the folder of --disk-kv-path: name that"),
        ({"cold_kv": "stream"}, "--cold-kv stream says how .* add --host-kv-gib 1 or more"),
        ({"cold_kv": "cpu"}, "--cold-kv cpu says how"),
        ({"disk_kv_path": "", "host_kv_gib": 1}, "--disk-kv-path is '' .*an empty name is no"),
    ],
)
def test_no_setting_of_a_tier_is_ignored_in_silence(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(given)


def test_a_default_may_be_written_out() -> None:
    assert load({"cold_kv": "auto"}).config.cold_kv == "auto"


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
        prompt_tokens_from_host=16,
        prompt_tokens_from_disk=4,
        prompt_tokens_uncached=12,
        kv_blocks_total=20,
        kv_blocks_used=5,
        prefix_cache_queries=40,
        kv_blocks_cached=7,
        kv_evictions=5,
        kv_cleared=2,
        tiers=TierStats(
            host_superblocks=9,
            host_used=2,
            host_cached=3,
            host_evictions=8,
            disk_superblocks=50,
            disk_cached=40,
            disk_broken=1,
            oldest_copy_age_s=1.5,
            stalled_s=0.25,
            bytes_copied=(("load", 1000),),
            failures=(("fetch", "broken", 1),),
        ),
    )
    engine.current = replace(engine.current, stats=stats)
    text = (await (await client(engine)).get("/metrics")).text
    for line in (
        'vllm:kv_prompt_tokens_total{model_name="tiny",source="device"} 10.0',
        'vllm:kv_prompt_tokens_total{model_name="tiny",source="host"} 16.0',
        'vllm:kv_prompt_tokens_total{model_name="tiny",source="disk"} 4.0',
        'vllm:kv_prompt_tokens_total{model_name="tiny",source="computed"} 12.0',
        'vllm:prefix_cache_queries_total{model_name="tiny"} 40.0',
        'vllm:prefix_cache_hits_total{model_name="tiny"} 30.0',
        'vllm:kv_blocks_cached{model_name="tiny"} 7.0',
        'vllm:kv_blocks{model_name="tiny",state="free",tier="device"} 8.0',
        'vllm:kv_blocks{model_name="tiny",state="used",tier="host"} 2.0',
        'vllm:kv_blocks{model_name="tiny",state="free",tier="host"} 4.0',
        'vllm:kv_blocks{model_name="tiny",state="free",tier="disk"} 10.0',
        'vllm:kv_transfer_bytes_total{dir="load",model_name="tiny"} 1000.0',
        'vllm:kv_transfer_failures_total{cause="broken",dir="fetch",model_name="tiny"} 1.0',
        'vllm:kv_copy_stall_seconds_total{model_name="tiny",phase="load"} 0.25',
        'vllm:kv_oldest_job_age_seconds{model_name="tiny"} 1.5',
        'vllm:kv_evictions_total{model_name="tiny",reason="room",tier="host"} 8.0',
        'vllm:kv_evictions_total{model_name="tiny",reason="broken",tier="disk"} 1.0',
        'vllm:kv_evictions_total{model_name="tiny",reason="room",tier="device"} 5.0',
        'vllm:kv_evictions_total{model_name="tiny",reason="reset",tier="device"} 2.0',
    ):
        assert line in text, line
