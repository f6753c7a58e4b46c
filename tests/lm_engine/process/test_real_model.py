"""Real engines and towers (tiny checkpoints) behind processes: the same answers, whatever dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lm_engine.options import EngineOptions
from lm_engine.process.client import ProcessEngineClient, start
from tests.lm_engine.harness import LOGPROB_TOLERANCE, Lab, Prompt, Result, greedy, picture, run
from tests.lm_engine.process.harness import PATIENCE_S, alive, everyone, gone, until

LENGTH = 8


def options(lab: Lab) -> EngineOptions:
    return EngineOptions(
        str(lab.folder),
        device="cpu",
        max_model_len=2048,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        embedding_rows=512,
        kv_memory_bytes=16 << 20,
    )


async def answer(client: ProcessEngineClient, name: str, prompt: Prompt) -> Result:
    result = Result()
    async with asyncio.timeout(PATIENCE_S):
        async for event in client.submit(prompt.request(name, greedy(LENGTH)), prompt.media):
            result.take(event)
    return result


def same(one: Result, other: Result) -> None:
    assert other.error is None
    assert one.tokens() == other.tokens()
    assert one.text() == other.text()
    assert one.usage is not None
    assert other.usage is not None
    # What is cached depends on who came before, and is gone with the stage.
    assert replace(one.usage, cached_tokens=0) == replace(other.usage, cached_tokens=0)
    for a, b in zip(one.logprobs(), other.logprobs(), strict=True):
        assert abs(a.logprob - b.logprob) <= LOGPROB_TOLERANCE


@pytest.mark.parametrize("family", ["smolvlm", pytest.param("qwen3_vl", marks=pytest.mark.slow)])
async def test_processes_answer_as_one_process_does_even_when_stages_die(
    family: str, lab: Callable[[str], Lab]
) -> None:
    built = lab(family)
    prompts = {
        "text": built.prompt("the thing in the rain"),
        "one": built.prompt("see ", picture(40, 60), " then"),
        "two": built.prompt(
            picture(40, 60), " and ", picture(90, 30, 1), picture(60, 60, 2), " go"
        ),
    }
    expected = run(built.engine(budget=64), {n: (p, greedy(LENGTH)) for n, p in prompts.items()})
    client = start(options(built))
    pids: set[int] = {client.supervisor_pid}
    try:
        status = await until(client, lambda s: s.phase in ("ready", "failed"))
        assert status.phase == "ready", status.detail
        assert status.model is not None
        assert status.model.embedding_rows == 512
        answers = await asyncio.gather(*(answer(client, n, p) for n, p in prompts.items()))
        for name, found in zip(prompts, answers, strict=True):
            same(expected[name], found)
        assert [found.media_checked for found in answers] == [0, 1, 1]

        stats = (
            await until(client, lambda s: s.stats is not None and not s.stats.num_running)
        ).stats
        assert stats is not None
        assert (stats.kv_blocks_used, stats.embedding_rows_used) == (0, 0)
        assert stats.images_encoded == 3

        pids |= everyone(client)
        vision = client.vision_pid
        assert vision is not None
        os.kill(vision, signal.SIGKILL)
        fresh = built.prompt(picture(50, 50, 7), " and ", picture(90, 30, 8))
        after = await answer(client, "after", fresh)
        same(run(built.engine(), {"after": (fresh, greedy(LENGTH))})["after"], after)
        assert client.vision_pid != vision

        pid = client.status().pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(client, lambda s: s.epoch == 1 and s.alive)
        same(expected["two"], await answer(client, "two", prompts["two"]))
    finally:
        pids |= everyone(client)
        await asyncio.wait_for(client.close(drain_s=0), PATIENCE_S)
    await gone(pids)


async def test_a_folder_without_a_model_is_reported_with_its_cause(tmp_path: Path) -> None:
    client = start(EngineOptions(str(tmp_path)))
    status = await until(client, lambda s: s.phase == "failed")
    assert str(tmp_path) in status.detail
    await client.close(drain_s=0)


@pytest.mark.slow
async def test_idle_processes_share_their_memory(lab: Callable[[str], Lab]) -> None:
    client = start(options(lab("smolvlm")))
    await until(client, lambda s: s.phase == "ready")
    sizes = {}
    names = {"supervisor": client.supervisor_pid, "language": client.status().pid}
    for name, pid in (names | {"vision": client.vision_pid}).items():
        assert pid is not None
        assert alive(pid)
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        lines = dict(line.split()[:2] for line in rollup.splitlines()[1:])
        sizes[name] = (int(lines["Pss:"]) / 1024, int(lines["Rss:"]) / 1024)
        print(f"\n{name}: PSS {sizes[name][0]:.0f} MiB, RSS {sizes[name][1]:.0f} MiB", end="")
    await client.close(drain_s=0)
    assert sum(pss for pss, _ in sizes.values()) < 0.75 * sum(rss for _, rss in sizes.values())
