"""The client over real processes with fake stages: streams, aborts, sizes, draining."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lm_engine.client import EngineClient, EngineStatus
from tests.lm_engine.process.fakes import RAISE, REFUSE, SLOW, image, request
from tests.lm_engine.process.harness import alive, collect, everyone, running, texts, until


async def test_a_request_goes_round_in_order() -> None:
    async with running() as client:
        typed: EngineClient = client
        events = [event async for event in typed.submit(request("a", max_tokens=50), ())]
        assert texts(events) == "".join(f"{i} " for i in range(50))
        assert [event.finished for event in events] == [False] * 49 + [True]
        assert events[-1].usage is not None
        assert events[-1].usage.completion_tokens == 50
        status = client.status()
        assert (status.phase, status.alive, status.epoch) == ("ready", True, 0)
        assert status.model is not None
        assert status.model.name == "fake"
        assert status.heartbeat_age_s < 5


async def test_stats_follow_within_a_moment() -> None:
    async with running() as client:
        await collect(client, request("a", max_tokens=7))

        def seen(status: EngineStatus) -> bool:
            stats = status.stats
            return stats is not None and stats.generation_tokens == 7 and stats.num_running == 0

        await until(client, seen)


async def test_a_reset_of_the_prefix_cache_reaches_the_engine() -> None:
    async with running() as client:
        assert client.reset_prefix_cache("tenant")
        await collect(client, request("a", max_tokens=1))
        await until(client, lambda s: s.stats is not None and s.stats.kv_cleared == 1)
    assert not client.reset_prefix_cache("tenant"), "nobody is there to be told"


async def test_a_thousand_requests_lose_and_reorder_nothing(
    record_property: pytest.RecordProperty,
) -> None:
    async with running() as client:
        begin = time.perf_counter()
        all_events = await asyncio.gather(
            *(collect(client, request(f"r{i}", max_tokens=1 + i % 7)) for i in range(1000))
        )
        elapsed = time.perf_counter() - begin
        for i, events in enumerate(all_events):
            assert texts(events) == "".join(f"{k} " for k in range(1 + i % 7))
            assert [event.finished for event in events].count(True) == 1
        record_property("requests_per_s", 1000 / elapsed)
        print(f"\n1,000 requests: {1000 / elapsed:,.0f} per second")


async def test_lod_01_leaving_a_stream_aborts_the_request_and_frees_its_name() -> None:
    async with running() as client:
        for _ in range(3):
            stream = client.submit(request("a", command=SLOW, max_tokens=100_000))
            assert not (await anext(stream)).finished
            await stream.aclose()
            await until(client, lambda _: not client._aborting)
        task = asyncio.create_task(collect(client, request("b", command=SLOW, max_tokens=10**6)))
        await until(client, lambda s: s.stats is not None and s.stats.num_running == 1)
        task.cancel()
        await until(client, lambda s: s.stats is not None and s.stats.num_running == 0)
        assert texts(await collect(client, request("a", max_tokens=2))) == "0 1 "


async def test_the_same_name_cannot_run_twice() -> None:
    async with running() as client:
        stream = client.submit(request("a", command=SLOW, max_tokens=100_000))
        await anext(stream)
        (event,) = await collect(client, request("a"))
        assert event.error is not None
        assert (event.error.kind, event.error.param) == ("invalid", "request_id")
        assert not (await anext(stream)).finished
        await stream.aclose()


async def test_a_refusal_is_an_event() -> None:
    async with running() as client:
        (event,) = await collect(client, request("a", command=REFUSE))
        assert event.finished
        assert event.error is not None
        assert event.error.kind == "never_fits"


async def test_requests_that_cannot_be_carried_or_admitted_harm_nobody() -> None:
    async with running() as client:
        pid = client.status().pid
        sampling = request("x").sampling
        surrogate = replace(request("a"), sampling=replace(sampling, stop=("\ud800",)))
        huge = replace(request("b"), sampling=replace(sampling, seed=1 << 70))
        odd = replace(request("c"), token_ids=(1.5,))  # type: ignore[arg-type]
        bug = request("d", command=RAISE)
        kinds = []
        for bad in (surrogate, huge, odd, bug):
            (event,) = await collect(client, bad)
            assert event.finished
            assert event.error is not None
            kinds.append(event.error.kind)
        assert kinds == ["invalid", "invalid", "internal", "internal"]
        assert texts(await collect(client, request("e", max_tokens=1))) == "0 "
        assert client.status().pid == pid


async def test_long_prompts_and_large_images_travel() -> None:
    async with running("vision") as client:
        ids = range(131_072)
        positions = (tuple(ids), tuple(ids), tuple(ids))
        long = replace(request("a", prompt=ids, max_tokens=1), positions=positions)
        (event,) = await collect(client, long)
        assert event.usage is not None
        assert event.usage.prompt_tokens == 131_073
        big = [image(bytes([65 + i]) * (4 << 20), rows=2) for i in range(4)]
        events = await asyncio.gather(
            *(collect(client, request(f"i{i}"), (item,)) for i, item in enumerate(big))
        )
        for i, found in enumerate(events):
            assert texts(found).startswith(f"0 {chr(65 + i) * 2} 1 ")


async def test_rows_written_by_the_vision_process_are_read_by_the_language_process(
    tmp_path: Path,
) -> None:
    async with running("vision") as client:
        spool = tmp_path / "spool"
        spool.write_bytes(b"Zebra")
        media = (image(b"Ant"), image(b"Bee", rows=3), image(b"Zebra", path=str(spool)))
        events = await collect(client, request("a", max_tokens=1), media)
        assert texts(events) == "0 AAAA BBB ZZZZ "
        (broken,) = await collect(client, request("b"), (image(b"broken"),))
        assert broken.error is not None
        assert broken.error.message == "image is truncated"


async def test_lod_07_closing_lets_streams_finish_and_leaves_no_process() -> None:
    async with running("vision") as client:
        pids = everyone(client)
        assert len(pids) == 3
        task = asyncio.create_task(collect(client, request("a", command=SLOW, max_tokens=20)))
        endless = asyncio.create_task(collect(client, request("b", command=SLOW, max_tokens=10**6)))
        await until(client, lambda s: s.stats is not None and s.stats.num_running == 2)
        closing = asyncio.create_task(client.close(drain_s=2.0))
        await asyncio.sleep(0.05)
        assert client.status().phase == "draining"
        (late,) = await collect(client, request("c"))
        assert late.error is not None
        assert late.error.kind == "overloaded"
        await asyncio.wait_for(closing, 20)
        assert texts(await task) == "".join(f"{i} " for i in range(20))
        last = (await endless)[-1]
        assert last.error is not None
        assert last.error.message == "the server is shutting down"
        assert not [pid for pid in pids if alive(pid)]
        assert client._process.returncode == 0
        await client.close(drain_s=0)


async def test_a_request_before_the_model_is_ready_is_told_so() -> None:
    async with running("slow-load", wait=False) as client:
        (event,) = await collect(client, request("a"))
        assert event.error is not None
        assert event.error.kind == "overloaded"
        seen: list[EngineStatus] = []

        def loading(status: EngineStatus) -> bool:
            seen.append(status)
            return status.phase == "ready"

        await until(client, loading)
        weights = [s for s in seen if s.phase == "loading" and s.detail == "weights"]
        assert {s.total for s in weights if s.done} == {4.0}
        assert any(s.eta_s is not None and s.eta_s > 0 for s in weights)
        assert not any(s.alive for s in seen if s.phase != "ready")


def test_the_api_process_imports_no_torch() -> None:
    code = "import lm_engine.process.client, sys; sys.exit('torch' in sys.modules)"
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60)
    assert done.returncode == 0


async def test_the_loop_stays_free_while_much_is_submitted() -> None:
    async with running() as client:
        gaps: list[float] = []

        async def ticker() -> None:
            while True:
                before = time.perf_counter()
                await asyncio.sleep(0.001)
                gaps.append(time.perf_counter() - before)

        ticking = asyncio.create_task(ticker())
        prompt = range(100_000)
        await asyncio.gather(
            *(collect(client, request(f"r{i}", prompt=prompt, max_tokens=1)) for i in range(20))
        )
        ticking.cancel()
        assert client._wire is not None
        assert client._wire.unsent_bytes == 0
        print(f"\nlongest gap of the loop: {max(gaps) * 1e3:.0f} ms")


def test_uvloop_serves_as_well() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def main() -> str:
        async with running("vision") as client:
            media = (image(b"Ant" * (1 << 20)),)
            return texts(await collect(client, request("a", max_tokens=2), media))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(main()) == "0 AAAA 1 "
