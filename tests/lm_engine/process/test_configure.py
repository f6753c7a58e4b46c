"""Settings cross to the language stage and back, and nobody waits for a stage that is gone."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from chunked_prefill.settings import SchedulingSettings
from lm_engine.outputs import RequestError
from lm_engine.process.client import NOT_READY
from lm_engine.reconfiguration import SchedulingState
from tests.lm_engine.process.fakes import CRASH, HANG, SLOW, request
from tests.lm_engine.process.harness import PATIENCE_S, collect, running, texts, until

SETTINGS = SchedulingSettings("fcfs", 0.5, 0.05, (0.25, 0.75), 4, 128, 0.25)


async def test_a_change_is_answered_when_it_is_in_force_while_requests_go_on() -> None:
    async with running() as client:
        busy = asyncio.create_task(collect(client, request("busy", command=SLOW, max_tokens=40)))
        await asyncio.sleep(0.05)
        changed = await client.scheduling(SETTINGS)
        assert isinstance(changed, SchedulingState)
        assert changed.settings == SETTINGS
        asked = await client.scheduling()
        assert isinstance(asked, SchedulingState)
        assert asked.settings == SETTINGS
        assert texts(await busy).split() == [str(number) for number in range(40)]


async def test_changes_are_answered_in_order() -> None:
    async with running() as client:
        wanted = [replace(SETTINGS, max_num_seqs=seats) for seats in (1, 99, 3)]
        found = await asyncio.gather(*(client.scheduling(settings) for settings in wanted))
        assert isinstance(found[0], SchedulingState)
        assert found[0].settings.max_num_seqs == 1
        assert isinstance(found[1], RequestError)
        assert found[1].param == "max_num_seqs"
        assert isinstance(found[2], SchedulingState)
        assert found[2].settings.max_num_seqs == 3


async def test_whoever_waits_is_told_when_the_stage_dies() -> None:
    async with running() as client:
        dying = asyncio.create_task(collect(client, request("dying", command=CRASH)))
        found = await asyncio.wait_for(client.scheduling(SETTINGS), PATIENCE_S)
        assert isinstance(found, RequestError | SchedulingState)
        await dying
        await until(client, lambda status: status.phase == "ready" and status.epoch > 0)
        fresh = await client.scheduling()
        assert isinstance(fresh, SchedulingState)
        assert fresh.settings == SchedulingSettings(), "a new stage begins with its options"


async def test_a_stage_that_hangs_keeps_nobody_waiting_past_the_end() -> None:
    async with running() as client:
        stuck = asyncio.create_task(collect(client, request("stuck", command=HANG)))
        await asyncio.sleep(0.1)
        waiting = asyncio.create_task(client.scheduling(SETTINGS))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await client.close(drain_s=0.0)
        assert isinstance(await asyncio.wait_for(waiting, PATIENCE_S), RequestError)
        await stuck
        assert await client.scheduling() == NOT_READY
