"""Killed, stopped, stuck and failing processes: explicit errors, restarts, nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from lm_engine.options import EngineOptions
from lm_engine.process.client import start
from lm_engine.process.messages import Factories, Supervision
from tests.lm_engine.process.fakes import CRASH, FACTORIES, HANG, SLOW, image, request
from tests.lm_engine.process.harness import (
    PATIENCE_S,
    ROOT,
    alive,
    collect,
    everyone,
    gone,
    running,
    texts,
    until,
)


async def test_lod_05_killing_the_language_stage_fails_its_requests_and_brings_it_back() -> None:
    async with running("vision") as client:
        before = client.status()
        vision = client.vision_pid
        tasks = [
            asyncio.create_task(collect(client, request(f"r{i}", command=SLOW, max_tokens=10**6)))
            for i in range(4)
        ]
        await until(client, lambda s: s.stats is not None and s.stats.num_running == 4)
        assert before.pid is not None
        os.kill(before.pid, signal.SIGKILL)
        for events in await asyncio.gather(*tasks):
            assert events[-1].error is not None
            assert events[-1].error.kind == "internal"
            assert sum(event.finished for event in events) == 1
        assert not client.status().alive
        after = await until(client, lambda s: s.phase == "ready" and s.epoch == 1)
        assert after.pid != before.pid
        assert client.vision_pid == vision
        events = await collect(client, request("again", max_tokens=1), (image(b"Ant"),))
        assert texts(events) == "0 AAAA "


async def test_killing_the_vision_stage_costs_no_request() -> None:
    async with running("vision") as client:
        first, language = client.vision_pid, client.status().pid
        task = asyncio.create_task(
            collect(client, request("a", max_tokens=1), (image(b"slow"), image(b"Bee")))
        )
        await until(client, lambda s: s.stats is not None and s.stats.embedding_rows_used == 8)
        assert first is not None
        os.kill(first, signal.SIGKILL)
        assert texts(await task) == "0 ssss BBBB "
        assert client.vision_pid != first
        assert (client.status().pid, client.status().epoch) == (language, 0)


async def test_an_image_that_kills_the_vision_stage_is_given_up_after_two_tries() -> None:
    async with running("vision") as client:
        good = asyncio.create_task(
            collect(client, request("good", max_tokens=1), (image(b"slow"), image(b"Bee")))
        )
        (bad,) = await collect(client, request("bad"), (image(b"crash"),))
        assert bad.error is not None
        assert bad.error.message == "quarantined"
        assert texts(await good) == "0 ssss BBBB "
        assert client.status().epoch == 0


@pytest.mark.parametrize("stage", ["language", "vision"])
async def test_lod_05_a_stopped_stage_is_replaced(stage: str) -> None:
    limits = Supervision(stopped_grace_s=0.3)
    async with running("vision", supervision=limits) as client:
        status = client.status()
        pid = status.pid if stage == "language" else client.vision_pid
        task = asyncio.create_task(
            collect(client, request("a", command=SLOW, max_tokens=100), (image(b"slow"),))
        )
        await until(client, lambda s: s.stats is not None and s.stats.embedding_rows_used > 0)
        assert pid is not None
        begin = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        if stage == "language":
            await until(client, lambda s: not s.alive)
            assert time.monotonic() - begin < 5
            await until(client, lambda s: s.epoch == 1 and s.alive)
            assert (await task)[-1].error is not None
        else:
            await until(client, lambda s: client.vision_pid not in (pid, None))
            assert texts(await task).startswith("0 ssss 1 2 ")
        assert not alive(pid)
        assert texts(await collect(client, request("b", max_tokens=1))) == "0 "


async def test_a_stage_that_is_continued_in_time_is_left_alone() -> None:
    limits = Supervision(stopped_grace_s=30.0)
    async with running(supervision=limits) as client:
        pid = client.status().pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await until(client, lambda s: not s.alive)
        os.kill(pid, signal.SIGCONT)
        await until(client, lambda s: s.alive)
        assert texts(await collect(client, request("a", max_tokens=2))) == "0 1 "
        assert client.status().pid == pid


async def test_a_step_beyond_its_bound_is_ended() -> None:
    limits = Supervision(step_floor_s=0.5)
    async with running(supervision=limits) as client:
        (event,) = await collect(client, request("a", command=HANG))
        assert event.error is not None
        assert event.error.kind == "internal"
        await until(client, lambda s: s.epoch == 1 and s.alive)
        assert texts(await collect(client, request("b", max_tokens=1))) == "0 "


async def test_a_stage_that_keeps_dying_is_given_up_with_its_cause() -> None:
    limits = Supervision(max_restarts=2)
    async with running(supervision=limits) as client:
        pids = everyone(client)
        for attempt in range(3):
            await until(client, lambda s, n=attempt: s.phase == "ready" and s.epoch == n)  # type: ignore[misc]
            pids |= everyone(client)
            (event,) = await collect(client, request(f"r{attempt}", command=CRASH))
            assert event.error is not None
        status = await until(client, lambda s: s.phase == "failed")
        assert "language stage was killed by SIGKILL" in status.detail
        assert "end number 3 within 300 s" in status.detail
        assert not status.alive
        await gone(pids)
        (event,) = await collect(client, request("late"))
        assert event.error is not None


@pytest.mark.parametrize(
    ("model", "cause"),
    [
        ("missing", "the folder x has no config.json; name a folder that has"),
        ("load-fault", "RuntimeError: tensor x is odd"),
        ("vision load-fault", "RuntimeError: tensor x is odd"),
    ],
)
async def test_a_model_that_cannot_be_loaded_is_reported_once(model: str, cause: str) -> None:
    async with running(model, wait=False) as client:
        status = await until(client, lambda s: s.phase == "failed")
        assert status.detail == cause
        assert status.epoch == 0


async def test_a_stage_that_dies_while_loading_is_tried_again_and_then_given_up() -> None:
    async with running("load-crash", supervision=Supervision(max_restarts=1), wait=False) as client:
        status = await until(client, lambda s: s.phase == "failed")
        assert status.epoch == 1
        assert "was killed by SIGKILL" in status.detail


async def test_a_factory_that_does_not_exist_is_a_failure_with_its_name() -> None:
    client = start(EngineOptions("x"), factories=Factories(plan="no_such_module:plan"))
    status = await until(client, lambda s: s.phase == "failed")
    assert "no_such_module" in status.detail
    await asyncio.wait_for(client.close(drain_s=0), PATIENCE_S)


async def test_killing_the_supervisor_ends_everything_with_an_error() -> None:
    async with running("vision") as client:
        pids = everyone(client)
        task = asyncio.create_task(collect(client, request("a", command=SLOW, max_tokens=10**6)))
        await until(client, lambda s: s.stats is not None and s.stats.num_running == 1)
        os.kill(client.supervisor_pid, signal.SIGKILL)
        assert (await task)[-1].error is not None
        status = await until(client, lambda s: s.phase == "failed")
        assert "supervisor" in status.detail
        await gone(pids)


async def test_a_stopped_supervisor_does_not_stop_service_or_the_end() -> None:
    async with running("vision", supervision=Supervision(term_grace_s=0.2)) as client:
        pids = everyone(client)
        os.kill(client.supervisor_pid, signal.SIGSTOP)
        assert texts(await collect(client, request("a", max_tokens=3))) == "0 1 2 "
        await asyncio.wait_for(client.close(drain_s=0), PATIENCE_S)
        await gone(pids)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_nothing_outlives_the_api_process(how: signal.Signals) -> None:
    code = (
        "import asyncio\n"
        "from tests.lm_engine.process.harness import running, everyone\n"
        "async def main():\n"
        "    async with running('vision') as client:\n"
        "        print(*everyone(client), flush=True)\n"
        "        await asyncio.sleep(1000)\n"
        "asyncio.run(main())\n"
    )
    api = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert api.stdout is not None
        line = await asyncio.to_thread(api.stdout.readline)
        pids = {int(word) for word in line.split()}
        assert len(pids) == 3
        api.send_signal(how)
        await gone(pids)
    finally:
        api.kill()
        api.wait()
        assert api.stdout is not None
        api.stdout.close()


async def test_lod_07_sigterm_to_the_supervisor_drains() -> None:
    async with running("vision") as client:
        pids = everyone(client)
        task = asyncio.create_task(collect(client, request("a", command=SLOW, max_tokens=30)))
        await until(client, lambda s: s.stats is not None and s.stats.num_running == 1)
        os.kill(client.supervisor_pid, signal.SIGTERM)
        await until(client, lambda s: s.phase == "draining")
        (late,) = await collect(client, request("b"))
        assert late.error is not None
        assert late.error.kind == "overloaded"
        assert texts(await task) == "".join(f"{i} " for i in range(30))
        await gone(pids)
        assert client._process.returncode == 0


async def test_lod_07_a_second_sigterm_ends_at_once() -> None:
    async with running() as client:
        pids = everyone(client)
        task = asyncio.create_task(collect(client, request("a", command=SLOW, max_tokens=10**6)))
        await until(client, lambda s: s.stats is not None and s.stats.num_running == 1)
        os.kill(client.supervisor_pid, signal.SIGTERM)
        await until(client, lambda s: s.phase == "draining")
        os.kill(client.supervisor_pid, signal.SIGTERM)
        await gone(pids)
        assert (await task)[-1].error is not None


async def test_signals_to_the_whole_group_do_not_cut_requests() -> None:
    async with running("vision") as client:
        task = asyncio.create_task(collect(client, request("a", command=SLOW, max_tokens=20)))
        await until(client, lambda s: s.stats is not None and s.stats.num_running == 1)
        for pid in everyone(client) - {client.supervisor_pid}:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        os.kill(client.supervisor_pid, signal.SIGINT)
        assert texts(await task) == "".join(f"{i} " for i in range(20))
        assert client.status().epoch == 0


async def test_signals_on_the_way_up_are_answered_later(capfd: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C reaches every process of the terminal; the supervisor may be anywhere in its start."""
    async with running(wait=False) as client:
        for _ in range(60):
            if client.status().phase != "starting":
                break
            os.kill(client.supervisor_pid, signal.SIGINT)
            await asyncio.sleep(0.005)
        await until(client, lambda s: s.phase == "ready")
    for delay_s in (0.0, 0.05, 0.2):
        client = start(EngineOptions("slow-load"), factories=FACTORIES, path=(ROOT,))
        await asyncio.sleep(delay_s)
        os.kill(client.supervisor_pid, signal.SIGTERM)
        begin = time.monotonic()
        await asyncio.wait_for(client.close(drain_s=0.0), PATIENCE_S)
        assert client._process.returncode in (0, -signal.SIGKILL)
        assert time.monotonic() - begin < 20
        await gone([client.supervisor_pid])
    assert "Traceback" not in capfd.readouterr().err


async def test_an_end_while_importing_does_not_wait_for_it() -> None:
    """Importing torch takes seconds, in which no message is read."""
    limits = Supervision(term_grace_s=600.0)
    factories = Factories(plan="tests.lm_engine.process.slow_import:plan")
    client = start(
        EngineOptions(""), factories=factories, supervision=limits, path=(ROOT,), log_level="error"
    )
    await until(client, lambda s: s.detail == "importing")
    await asyncio.wait_for(client.close(drain_s=0.0), PATIENCE_S)
    await gone([client.supervisor_pid])


async def test_both_stages_killed_at_once_come_back() -> None:
    async with running("vision") as client:
        pid, vision = client.status().pid, client.vision_pid
        assert pid is not None
        assert vision is not None
        for victim in (vision, pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        await until(client, lambda s: s.epoch == 1 and s.alive)
        await until(client, lambda s: client.vision_pid not in (vision, None))
        events = await collect(client, request("a", max_tokens=1), (image(b"Ant"),))
        assert texts(events) == "0 AAAA "
