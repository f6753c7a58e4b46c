"""What a served model withstands: clients that leave, too many of them, dead stages, SIGTERM."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.client import RawStream, chat_body, encoded, first_logprobs, noise, post
from tests.e2e.conftest import Starter
from tests.e2e.server import Served, alive, kill, until

PICTURE = encoded(noise(77, (60, 60)), "png")
SEATS = 4


@pytest.fixture(scope="module")
def small(serve: Starter) -> Served:
    """Room for `SEATS` running requests and as many waiting ones."""
    return serve(
        "qwen2_5_vl",
        *("--max-num-seqs", str(SEATS), "--max-queued-requests", str(SEATS)),
        *("--max-num-batched-tokens", "64"),
    )


def long_stream(server: Served, tokens: int = 1500, *parts: str | bytes) -> RawStream:
    """A stream that goes on until its limit."""
    body = chat_body(*(parts or ("Go on.",)), max_tokens=tokens, min_tokens=tokens, ignore_eos=True)
    return RawStream(server, body)


def opened(server: Served, count: int, tokens: int) -> list[RawStream]:
    """Streams whose status is 200, so that each of them is in the engine."""
    streams = [long_stream(server, tokens) for _ in range(count)]
    with ThreadPoolExecutor(count) as pool:
        assert list(pool.map(RawStream.open, streams)) == [200] * count
    return streams


@pytest.mark.parametrize(
    "streams", [60, pytest.param(300, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_lod_01_clients_that_leave_leave_nothing_behind(served: Served, streams: int) -> None:
    before = first_logprobs(served, "canary ", PICTURE)
    language = served.stage("language")
    rng = random.Random(streams)
    plans = [(rng.choice(["at once", "headers", "tokens"]), rng.randrange(12)) for _ in range(60)]

    def visit(index: int) -> None:
        how, tokens = plans[index % len(plans)]
        picture = encoded(noise(index, (90, 60)), "png")
        text = "word " * (5 + index % 200)
        stream = long_stream(served, 1000, text, *([picture] if index % 2 else []))
        if how != "at once":
            assert stream.open() == 200
        if how == "tokens":
            for _ in zip(range(tokens), stream.events(), strict=False):
                pass
        stream.close()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(visit, range(streams)))
    served.rest()
    assert served.stage("language") == language
    assert first_logprobs(served, "canary ", PICTURE) == pytest.approx(before, abs=1e-4)


def test_lod_01_unstreamed_clients_that_leave_leave_nothing_behind(served: Served) -> None:
    def visit(index: int) -> None:
        body = chat_body("word " * index, max_tokens=1000, ignore_eos=True)
        stream = RawStream(served, body, stream=False)
        if index % 2:
            time.sleep(0.01 * index)
        stream.close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(visit, range(24)))
    served.rest()


def test_lod_03_overflow_is_refused_and_the_accepted_finish(small: Served) -> None:
    count = 40
    gate = threading.Barrier(count)

    def visit(index: int) -> tuple[int, dict[str, str], dict[str, Any]]:
        body = chat_body(f"request {index}", max_tokens=60, ignore_eos=True)
        gate.wait(30)
        return post(small, "/v1/chat/completions", body)

    with ThreadPoolExecutor(count) as pool:
        answers = list(pool.map(visit, range(count)))
    statuses = Counter(status for status, _, _ in answers)
    assert set(statuses) <= {200, 429, 503}
    assert statuses[200] >= 2 * SEATS
    assert statuses[200] < count
    for status, headers, body in answers:
        if status == 200:
            assert body["usage"]["completion_tokens"] == 60
        else:
            assert int(headers["retry-after"]) >= 1
            assert body["error"]["code"]
    small.rest()


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP])
def test_lod_05_a_dead_language_stage_is_told_and_replaced(
    small: Served, sig: signal.Signals
) -> None:
    before = first_logprobs(small, "canary ", PICTURE)
    streams = opened(small, SEATS, 1500)
    language = until(lambda: small.stage("language"), "a language stage")
    kill(language, sig)
    until(lambda: small.health() == 503, "/health tells of it", within_s=5)
    for stream in streams:
        events = list(stream.events())
        # No [DONE]: the answer is not complete, and the last event says so.
        assert None not in events
        assert events[-1] is not None
        assert events[-1]["error"]["type"] == "server_error"
        stream.close()
    until(lambda: small.health() == 200, "the stage is back", within_s=30)
    assert until(lambda: small.stage("language"), "a new stage") != language
    assert not alive(language)
    assert first_logprobs(small, "canary ", PICTURE) == pytest.approx(before, abs=1e-4)
    small.rest()


def test_lod_05_a_dead_vision_stage_costs_nobody_an_answer(small: Served) -> None:
    pictures = [encoded(noise(500 + i, (200, 200)), "png") for i in range(4)]
    bodies = [chat_body(p, "?", max_tokens=4, logprobs=True) for p in pictures]
    vision = until(lambda: small.stage("vision"), "a vision stage")
    # Stopped, it holds all four jobs when it is killed.
    kill(vision, signal.SIGSTOP)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda body: post(small, "/v1/chat/completions", body), bodies))
    assert [status for status, _, _ in answers] == [200] * 4
    assert until(lambda: small.stage("vision"), "a new vision stage") != vision
    again = [post(small, "/v1/chat/completions", body)[2] for body in bodies]
    for (_, _, one), other in zip(answers, again, strict=True):
        assert _logprobs(one) == pytest.approx(_logprobs(other), abs=1e-4)


def test_lod_07_sigterm_lets_streams_finish_and_refuses_new_ones(serve: Starter) -> None:
    tokens = 150
    server = serve("qwen2_5_vl", "--max-num-seqs", "20")
    stages = list(server.family())
    running = opened(server, 20, tokens)
    queued = [long_stream(server, tokens) for _ in range(5)]
    until(lambda: server.metrics()["http_requests_in_flight"] == 25, "25 requests are in flight")
    server.terminate()
    until(lambda: server.health() == 503, "/health says that it drains")
    status, headers, body = post(server, "/v1/chat/completions", chat_body("late"))
    assert status == 503
    assert body["error"]["code"] in ("draining", "not_ready")
    assert int(headers["retry-after"]) >= 1

    def count(stream: RawStream) -> int:
        events = list(stream.events())
        stream.close()
        assert events[-1] is None, f"cut short: {events[-1]}"
        return sum(event is not None and bool(event["choices"]) for event in events)

    with ThreadPoolExecutor(25) as pool:
        assert list(pool.map(count, running + queued)) == [tokens] * 25
    assert server.wait(20) == 0
    until(lambda: not any(map(alive, stages)), "no stage is left behind")


def test_lod_07_a_second_sigterm_ends_at_once(serve: Starter) -> None:
    server = serve("qwen2_5_vl")
    stages = list(server.family())
    streams = opened(server, 4, 1900)
    server.terminate()
    until(lambda: server.health() == 503, "/health says that it drains")
    server.terminate()
    # Far less than the time that the streams would take, or the drain is allowed.
    server.wait(10)
    until(lambda: not any(map(alive, stages)), "no stage is left behind")
    assert "Traceback" not in server.log()
    for stream in streams:
        # None is left without an end: the last event says that the server went away.
        events = list(stream.events())
        assert events[-1] is not None
        assert events[-1]["error"]["code"] == "overloaded"
        stream.close()


def _logprobs(answer: dict[str, Any]) -> list[float]:
    return [one["logprob"] for one in answer["choices"][0]["logprobs"]["content"]]
