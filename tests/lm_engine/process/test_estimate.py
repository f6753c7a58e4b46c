"""Questions about the future, across processes and in the middle of a step."""

from __future__ import annotations

import asyncio
import time

from lm_engine.outputs import Estimate, RequestError
from tests.lm_engine.process.fakes import HANG, LAYERS, RAISE, REFUSE, request
from tests.lm_engine.process.harness import collect, running


async def test_a_question_is_answered_and_admits_nobody() -> None:
    async with running() as client:
        found = await client.estimate(request("a", prompt=range(9)))
        assert isinstance(found, Estimate)
        assert (found.prompt_tokens, found.waiting, found.ttft_s) == (10, 0, 1.5)
        assert (await collect(client, request("a")))[-1].finished  # the name is free


async def test_errors_of_a_question_are_answers() -> None:
    async with running() as client:
        refused = await client.estimate(request("a", command=REFUSE))
        assert isinstance(refused, RequestError)
        assert refused.kind == "never_fits"
        broken = await client.estimate(request("b", command=RAISE))
        assert isinstance(broken, RequestError)
        assert broken.kind == "internal"
        odd = await client.estimate(request("\ud800"))
        assert isinstance(odd, RequestError)
        assert odd.kind == "invalid"
        assert (await collect(client, request("c")))[-1].finished


async def test_many_questions_at_once_find_their_answers() -> None:
    async with running() as client:
        asked = [client.estimate(request(f"q{n}", prompt=range(n))) for n in range(50)]
        found = await asyncio.gather(*asked)
        assert [e.prompt_tokens for e in found if isinstance(e, Estimate)] == list(range(1, 51))


async def test_a_long_step_answers_between_its_layers() -> None:
    async with running() as client:
        slow = asyncio.create_task(collect(client, request("slow", command=LAYERS, max_tokens=3)))
        await asyncio.sleep(0.1)
        started = time.monotonic()
        found = await client.estimate(request("a"))
        took = time.monotonic() - started
        assert isinstance(found, Estimate)
        assert not slow.done()
        assert took < 0.9  # a step lasts 1 s and more
        # Whoever is submitted in the middle of the step is before those who ask later.
        other = asyncio.create_task(collect(client, request("other", max_tokens=1)))
        await asyncio.sleep(0.15)
        later = await client.estimate(request("b"))
        assert isinstance(later, Estimate)
        assert later.waiting == 2
        assert (await slow)[-1].finished
        assert (await other)[-1].finished


async def test_what_can_never_be_served_is_refused_within_a_step() -> None:
    async with running() as client:
        slow = asyncio.create_task(collect(client, request("slow", command=LAYERS, max_tokens=3)))
        await asyncio.sleep(0.1)
        for name in ("one", "two", "one"):
            (told,) = await collect(client, request(name, command=REFUSE))
            assert told.error is not None
            assert told.error.kind == "never_fits"
            stats = client.status().stats
            assert stats is None or stats.steps == 0, "the first step goes on"
        assert (await slow)[-1].finished


async def test_a_question_ends_when_the_stage_does() -> None:
    async with running() as client:
        stuck = asyncio.create_task(collect(client, request("hang", command=HANG)))
        await asyncio.sleep(0.2)
        asked = asyncio.create_task(client.estimate(request("a")))
        await asyncio.sleep(0.1)
        await client.close(drain_s=0.0)
        found = await asyncio.wait_for(asked, 20)
        assert isinstance(found, RequestError)
        assert (await stuck)[-1].error is not None
