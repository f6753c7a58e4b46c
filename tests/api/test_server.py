"""Keys, admission, health, drain, metrics, clients that leave."""

from __future__ import annotations

import asyncio
import base64
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from api.admission import Admission, AdmissionLimits
from api.auth import KeyFileError, Keyring, read_keys
from api.errors import OverloadedError, TooManyRequestsError
from lm_engine.client import EngineStats, EngineStatus, Histogram
from tests.api.conftest import ClientFactory, events
from tests.api.fakes import FakeEngine

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


async def test_every_route_but_health_needs_a_key(client: ClientFactory) -> None:
    http = await client(FakeEngine(), api_key="s3cret")
    paths = [
        ("GET", path)
        for path in ("/", "/v1/models", "/v1/models/tiny", "/metrics", "/version", "/openapi.json")
    ]
    paths += [
        ("POST", path)
        for path in (CHAT, "/v1/completions", "/v1/render", "/tokenize", "/detokenize", "/none")
    ]
    for method, path in paths:
        for header in ({}, {"authorization": "Bearer wrong"}, {"authorization": "s3cret"}):
            response = await http.request(method, path, headers=header)
            assert response.status_code == 401, path
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"]
        assert "s3cret" not in response.text
    assert (await http.get("/health")).status_code == 200
    good = {"authorization": "Bearer s3cret"}
    assert (await http.get("/v1/models", headers=good)).status_code == 200
    basic = {"authorization": "Basic " + base64.b64encode(b"me:s3cret").decode()}
    assert (await http.get("/", headers=basic)).status_code == 200


def test_key_files(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# comment\n\nk1 alice\nk2\tbob\n")
    keys = read_keys(file)
    assert keys == {"k1": "alice", "k2": "bob"}
    ring = Keyring(keys)
    assert ring.tenant("Bearer k2") == "bob"
    assert ring.tenant("bearer k1") == "alice"
    assert ring.tenant("Bearer k3") is None
    assert Keyring({}).tenant("") == ""
    for text in ("k1", "k1 a b", "k1 a\nk1 b", "", "# only"):
        file.write_text(text)
        with pytest.raises(KeyFileError):
            read_keys(file)
    with pytest.raises(KeyFileError):
        read_keys(tmp_path / "missing")


async def test_health_while_loading_failed_frozen_and_ready(client: ClientFactory) -> None:
    engine = FakeEngine()
    ready = engine.current
    http = await client(engine)
    assert (await http.get("/health")).status_code == 200
    engine.current = EngineStatus("loading", "weights", done=3.0, total=12.0, eta_s=9.2)
    response = await http.get("/health")
    assert response.status_code == 503
    body = response.json()
    assert (body["phase"], body["done"], body["total"], body["eta_s"]) == ("loading", 3, 12, 9.2)
    refused = await http.post(CHAT, json=HI)
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "9"
    engine.current = replace(ready, alive=False, heartbeat_age_s=7.0)
    response = await http.get("/health")
    assert response.status_code == 503
    assert "7.0 s" in response.json()["detail"]
    assert (await http.post(CHAT, json=HI)).status_code == 503
    engine.current = ready
    assert (await http.post(CHAT, json=HI)).status_code == 200


async def test_lod_03_a_full_server_refuses_before_it_reads(client: ClientFactory) -> None:
    gate = asyncio.Event()
    engine = FakeEngine(gate=gate)
    http = await client(engine, max_num_seqs=4, max_queued_requests=4)
    tasks = [asyncio.create_task(http.post(CHAT, json=HI)) for _ in range(200)]
    while sum(task.done() for task in tasks) < 192:
        await asyncio.sleep(0.001)
    refused = [task.result() for task in tasks if task.done()]
    assert {response.status_code for response in refused} == {503}
    assert all(response.headers["retry-after"] for response in refused)
    while engine.running < 8:
        await asyncio.sleep(0.001)
    assert len(engine.seen) == 8
    gate.set()
    finished = [await task for task in tasks]
    assert sum(response.status_code == 200 for response in finished) == 8
    http.server.admission.check_invariants()
    assert http.server.admission.requests == 0


async def test_one_caller_cannot_take_all(client: ClientFactory, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("k1 alice\nk2 bob\n")
    gate = asyncio.Event()
    http = await client(FakeEngine(gate=gate), api_key_file=keys, max_tenant_requests=2)
    alice, bob = ({"authorization": f"Bearer {key}"} for key in ("k1", "k2"))
    running = [asyncio.create_task(http.post(CHAT, json=HI, headers=alice)) for _ in range(2)]
    await asyncio.sleep(0.05)
    response = await http.post(CHAT, json=HI, headers=alice)
    assert response.status_code == 429
    assert response.headers["retry-after"]
    other = asyncio.create_task(http.post(CHAT, json=HI, headers=bob))
    await asyncio.sleep(0.05)
    gate.set()
    assert (await other).status_code == 200
    assert [(await task).status_code for task in running] == [200, 200]


def test_admission_bounds_and_invariants() -> None:
    admission = Admission(AdmissionLimits(3, 100, 1000, 2))
    first = admission.open("a", 900)
    first.add_tokens(500)  # alone, so it fits whatever it is
    with pytest.raises(OverloadedError):
        admission.open("b", 200)
    second = admission.open("b", 50)
    with pytest.raises(OverloadedError):
        second.add_tokens(1)
    admission.check_invariants()
    third = admission.open("a", 0)
    with pytest.raises(OverloadedError):  # three are in flight
        admission.open("c", 0)
    third.release()
    third.release()
    fourth = admission.open("a", 0)
    with pytest.raises((TooManyRequestsError, OverloadedError)):
        admission.open("a", 0)
    for ticket in (first, second, fourth):
        ticket.release()
    admission.check_invariants()
    assert (admission.requests, admission.tokens, admission.media_bytes) == (0, 0, 0)


async def test_lod_08_bodies_over_the_limit_are_413(client: ClientFactory) -> None:
    engine = FakeEngine()
    http = await client(engine, max_body_bytes=100_000)
    big = {"messages": [{"role": "user", "content": "x" * 200_000}]}
    response = await http.post(CHAT, json=big)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"

    async def endless() -> Any:
        for _ in range(100):
            yield b"x" * 10_000

    response = await http.post(CHAT, content=endless())
    assert response.status_code == 413
    many = {"messages": [{"role": "user", "content": "x"}] * 5000}
    http = await client(engine)
    response = await http.post(CHAT, json=many)
    assert response.status_code == 400
    assert "4096" in response.json()["error"]["message"]
    response = await http.post(CHAT, json={"messages": [{"role": "user", "content": "x" * 10**7}]})
    assert response.json()["error"]["code"] == "context_length_exceeded"
    for size in (17, 27, 100):
        text = {"messages": [{"role": "user", "content": "x" * (size * 2**20)}]}
        response = await http.post(CHAT, json=text)
        assert response.status_code == 413
        assert "beside its images" in response.json()["error"]["message"]
    assert engine.seen == []


async def test_lod_07_drain_lets_streams_finish_and_refuses_new_ones(
    client: ClientFactory,
) -> None:
    engine = FakeEngine(delay_s=0.01)
    http = await client(engine)
    streams = [asyncio.create_task(http.post(CHAT, json={**HI, "stream": True})) for _ in range(5)]
    while engine.running < 5:
        await asyncio.sleep(0.005)
    draining = asyncio.create_task(http.server.drain(10.0))
    await asyncio.sleep(0)
    response = await http.post(CHAT, json=HI)
    assert response.status_code == 503
    assert response.headers["retry-after"]
    assert (await http.get("/health")).json()["phase"] == "draining"
    for task in streams:
        assert events((await task).text)[-1] == "[DONE]"
    await draining


async def test_lod_07_a_drain_out_of_time_ends_streams_with_an_error(
    client: ClientFactory,
) -> None:
    engine = FakeEngine(script="x" * 1000, delay_s=0.01)
    http = await client(engine)
    running = asyncio.create_task(http.post(CHAT, json={**HI, "stream": True}))
    while engine.running < 1:
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)
    await http.server.drain(0.05)
    found = events((await running).text)
    assert "shut down" in found[-1]["error"]["message"]
    assert engine.running == 0
    assert http.server.admission.requests == 0


async def test_metrics_have_vllms_names(client: ClientFactory) -> None:
    engine = FakeEngine()
    stats = EngineStats(
        num_waiting=2,
        kv_blocks_total=10,
        kv_blocks_used=5,
        preemptions=3,
        iteration_tokens=Histogram((8.0, 64.0), (1, 2, 3), 700.0),
        step_ratio=Histogram((0.9, 1.1), (1, 4, 2), 7.25),
        predicted_s=1.5,
        measured_s=1.75,
    )
    engine.current = replace(engine.current, stats=stats)
    http = await client(engine)
    await http.post(CHAT, json={**HI, "n": 2})
    text = (await http.get("/metrics")).text
    for name in (
        "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_count",
        "e2e_request_latency_seconds_count",
        "request_queue_time_seconds_sum",
        "request_prefill_time_seconds_sum",
        "request_decode_time_seconds_sum",
        "request_prompt_tokens_count",
        "request_generation_tokens_count",
        "num_requests_running",
        "prompt_tokens_total",
        "generation_tokens_total",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
    ):
        assert f'vllm:{name}{{model_name="tiny"}}' in text, name
    assert 'vllm:kv_cache_usage_perc{model_name="tiny"} 0.5' in text
    assert 'vllm:num_requests_waiting{model_name="tiny"} 2.0' in text
    assert 'vllm:num_preemptions_total{model_name="tiny"} 3.0' in text
    assert 'iteration_tokens_total_bucket{le="64.0",model_name="tiny"} 3.0' in text
    assert 'iteration_tokens_total_bucket{le="+Inf",model_name="tiny"} 6.0' in text
    assert 'vllm:step_time_ratio_bucket{le="1.1",model_name="tiny"} 5.0' in text
    assert 'vllm:step_time_ratio_sum{model_name="tiny"} 7.25' in text
    assert 'vllm:step_seconds_predicted_total{model_name="tiny"} 1.5' in text
    assert 'vllm:step_seconds_measured_total{model_name="tiny"} 1.75' in text
    assert 'finished_reason="stop",model_name="tiny"} 2.0' in text
    http = await client(FakeEngine(), metrics_prefix="longlens_")
    assert "longlens_num_requests_running" in (await http.get("/metrics")).text


async def test_media_bytes_are_held_until_the_end(client: ClientFactory) -> None:
    gate = asyncio.Event()
    http = await client(FakeEngine(gate=gate), family="qwen2_5_vl")
    data = io.BytesIO()
    Image.effect_noise((200, 200), 90).save(data, "PNG")
    url = "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
    part = {"type": "image_url", "image_url": {"url": url}}
    body = {"messages": [{"role": "user", "content": [part]}]}
    running = asyncio.create_task(http.post(CHAT, json=body))
    admission = http.server.admission
    while admission.media_bytes != len(data.getvalue()):
        await asyncio.sleep(0.005)
    assert admission.tokens > 0
    gate.set()
    assert (await running).status_code == 200
    assert admission.media_bytes == 0


async def test_the_page_needs_no_network(client: ClientFactory) -> None:
    http = await client(FakeEngine())
    response = await http.get("/")
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    without_namespaces = response.text.replace("http://www.w3.org/2000/svg", "")
    without_namespaces = without_namespaces.replace("http%3A//www.w3.org/2000/svg", "")
    assert "http://" not in without_namespaces
    assert "https://" not in without_namespaces
    assert "<script src" not in response.text


async def test_openapi_declares_errors(client: ClientFactory) -> None:
    http = await client(FakeEngine())
    described = (await http.get("/openapi.json")).json()
    operation = described["paths"][CHAT]["post"]
    assert {"400", "401", "413", "429", "503"} <= set(operation["responses"])
    assert (
        "messages"
        in operation["requestBody"]["content"]["application/json"]["schema"]["properties"]
    )
