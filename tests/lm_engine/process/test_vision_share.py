"""The vision process rests while the language stage wants all cores, and goes on afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
import time

from tests.lm_engine.process.fakes import ALONE, image, request
from tests.lm_engine.process.harness import PATIENCE_S, collect, running, texts, until


async def test_an_image_waits_while_the_language_stage_is_alone_and_no_longer() -> None:
    async with running("vision") as client:
        first = client.submit(request("text", command=ALONE, max_tokens=30))
        async with asyncio.timeout(PATIENCE_S):
            await anext(first)
        shown = asyncio.create_task(collect(client, request("shown", max_tokens=2), (image(b"x"),)))
        async with asyncio.timeout(PATIENCE_S):
            rest = [event async for event in first]
        assert rest[-1].finished
        assert not shown.done()
        assert texts(await shown).startswith("0 xxxx ")


async def test_it_takes_jobs_and_shows_life_while_it_rests() -> None:
    async with running("vision") as client:
        first = client.submit(request("text", command=ALONE, max_tokens=60))
        async with asyncio.timeout(PATIENCE_S):
            await anext(first)
        tasks = [
            asyncio.create_task(
                collect(client, request(f"r{i}", max_tokens=1), (image(b"%d" % i),))
            )
            for i in range(8)
        ]
        vision = client._board["vision"]
        until_s = time.monotonic() + 0.5
        while time.monotonic() < until_s:
            assert vision.age_s < 0.4
            assert not vision.busy
            await asyncio.sleep(0.02)
        await first.aclose()
        for i, task in enumerate(tasks):
            assert f"{i}{i}{i}{i}" in texts(await task)


async def test_a_language_stage_that_died_keeps_nobody_from_working() -> None:
    async with running("vision") as client:
        before = client.status()
        first = client.submit(request("text", command=ALONE, max_tokens=10**6))
        async with asyncio.timeout(PATIENCE_S):
            await anext(first)
        assert before.pid is not None
        os.kill(before.pid, signal.SIGKILL)
        await until(client, lambda s: s.phase == "ready" and s.pid != before.pid)
        events = await collect(client, request("shown", max_tokens=2), (image(b"y"),))
        assert texts(events).startswith("0 yyyy ")
