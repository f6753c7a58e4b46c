"""POST /v1/estimate, and what generating requests tell and hold of their first token."""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest
from PIL import Image

from lm_engine.client import EngineStatus
from lm_engine.outputs import RequestError
from tests.api.conftest import ClientFactory, events
from tests.api.fakes import FakeEngine

HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
LATE = RequestError("late", "expected after 900 ms", "x-ttft-deadline-ms", retry_after_s=2.2)


def picture(size: tuple[int, int]) -> dict[str, Any]:
    file = io.BytesIO()
    Image.new("RGB", size, (200, 10, 10)).save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


async def test_an_estimate_is_the_engines_and_nothing_runs(client: ClientFactory) -> None:
    engine = FakeEngine()
    http = await client(engine)
    answer = await http.post("/v1/estimate", json=HI | {"max_tokens": 7})
    assert answer.status_code == 200
    assert answer.json() == {
        "object": "estimate",
        "model": "tiny",
        "prompt_tokens": 20,
        "prompt_tokens_details": {"cached_tokens": 16, "image_tokens": 0, "text_tokens": 20},
        "ttft_ms": 250.0,
        "queue_ms": 125.0,
        "isolated_ttft_ms": 62.5,
        "load": {"requests_running": 2, "requests_waiting": 1, "prompt_tokens_ahead": 300},
        "calibrated": True,
    }
    assert engine.seen == []
    (asked,) = engine.asked
    assert asked.request.sampling.max_tokens == 7
    # What is asked for is what would be generated from.
    rendered = await http.post("/v1/render", json=HI)
    assert list(asked.request.token_ids) == rendered.json()["token_ids"]
    http.server.admission.check_invariants()  # type: ignore[attr-defined]
    assert http.server.admission.requests == 0  # type: ignore[attr-defined]


async def test_text_prompts_are_estimated_too(client: ClientFactory) -> None:
    engine = FakeEngine()
    http = await client(engine)
    for prompt, tokens in (([5, 6, 7], 3), ("a b", None)):
        answer = await http.post("/v1/estimate", json={"prompt": prompt})
        assert answer.status_code == 200
        assert tokens is None or len(engine.asked[-1].request.token_ids) == tokens


async def test_images_are_counted_from_their_headers(client: ClientFactory) -> None:
    engine = FakeEngine()
    http = await client(engine, "qwen2_5_vl")
    whole = picture((280, 280))
    kind, _, data = whole["image_url"]["url"].partition(",")
    cut = f"{kind},{data[: len(data) // 2 // 4 * 4]}"
    broken = {"type": "image_url", "image_url": {"url": cut}}
    for part in (whole, broken):
        body = {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}]}
        answer = await http.post("/v1/estimate", json=body)
        # Of the second only the beginning is there: pixels are nobody's business here.
        assert answer.status_code == 200, answer.text
        (item,) = engine.asked[-1].media
        assert (item.plan.width, item.plan.height) == (280, 280)
        rows = sum(span.length for span in engine.asked[-1].request.image_spans)
        assert rows == item.plan.num_rows > 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"messages": []}, "messages"),
        ({"prompt": "a", "nonsense": 1}, "nonsense"),
        (HI | {"nonsense": 1}, "nonsense"),
        ({}, "prompt"),
        (HI | {"max_tokens": 0}, "max_tokens"),
        (HI | {"model": "other"}, "model"),
    ],
)
async def test_wrong_bodies_are_told_as_on_generating_routes(
    client: ClientFactory, body: dict[str, Any], param: str
) -> None:
    engine = FakeEngine()
    http = await client(engine)
    answer = await http.post("/v1/estimate", json=body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param
    assert engine.asked == []


@pytest.mark.parametrize(
    ("kind", "status"), [("never_fits", 400), ("overloaded", 503), ("internal", 500)]
)
async def test_why_there_is_none(client: ClientFactory, kind: Any, status: int) -> None:
    http = await client(FakeEngine(foreseen=RequestError(kind, "because", "max_tokens")))
    answer = await http.post("/v1/estimate", json=HI)
    assert answer.status_code == status
    assert answer.json()["error"]["message"] == "because"


async def test_a_server_that_loads_has_no_estimates(client: ClientFactory) -> None:
    http = await client(FakeEngine(current=EngineStatus("loading")))
    assert (await http.post("/v1/estimate", json=HI)).status_code == 503


# -- headers of generating routes ---------------------------------------------------------------


async def test_a_stream_begins_with_what_to_expect(client: ClientFactory) -> None:
    engine = FakeEngine(script="abc", prefill_s=0.2)
    http = await client(engine)
    async with http.stream("POST", "/v1/chat/completions", json=HI | {"stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["x-ttft-estimate-ms"] == "250"
        text = (await answer.aread()).decode()
    found = events(text)
    assert found[-1] == "[DONE]"
    assert "".join(e["choices"][0]["delta"]["content"] for e in found[:-1]) == "abc"
    assert engine.seen[0].request.wants_estimate
    assert not engine.seen[0].request.must_meet_ttft


async def test_of_several_prompts_the_latest_counts(client: ClientFactory) -> None:
    http = await client(FakeEngine(script="a"))
    body = {"prompt": ["a", "b", "c"], "stream": True}
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.headers["x-ttft-estimate-ms"] == "250"
        await answer.aread()


async def test_an_image_that_is_broken_is_still_a_400(client: ClientFactory) -> None:
    """The estimate comes before the pixels are looked at, and must not begin the stream."""
    error = RequestError("media", "broken", "messages.0.content.0")
    http = await client(FakeEngine(error=error, error_after=0, check_media=False), "qwen2_5_vl")
    content = [picture((56, 56)), {"type": "text", "text": "?"}]
    body = {"messages": [{"role": "user", "content": content}], "stream": True}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "broken"


async def test_an_unstreamed_answer_needs_no_estimate(client: ClientFactory) -> None:
    engine = FakeEngine(script="a")
    http = await client(engine)
    answer = await http.post("/v1/chat/completions", json=HI)
    assert "x-ttft-estimate-ms" not in answer.headers
    assert not engine.seen[0].request.wants_estimate


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", HI), ("/v1/completions", {"prompt": "a"})]
)
async def test_a_deadline_that_cannot_be_met_is_a_429(
    client: ClientFactory, path: str, body: dict[str, Any], stream: bool
) -> None:
    engine = FakeEngine(error=LATE)
    http = await client(engine)
    headers = {"x-ttft-deadline-ms": "750.5"}
    answer = await http.post(path, json=body | {"stream": stream}, headers=headers)
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "3"
    error = answer.json()["error"]
    assert error["code"] == "ttft_deadline"
    assert error["param"] == "x-ttft-deadline-ms"
    request = engine.seen[0].request
    assert request.must_meet_ttft
    assert request.ttft_s == pytest.approx(0.7505)


@pytest.mark.parametrize("given", ["soon", "0", "-1", "nan", "inf", "1e12", ""])
async def test_a_deadline_is_a_number_of_milliseconds(client: ClientFactory, given: str) -> None:
    engine = FakeEngine()
    http = await client(engine)
    headers = {"x-ttft-deadline-ms": given}
    answer = await http.post("/v1/chat/completions", json=HI, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-ttft-deadline-ms"
    assert engine.seen == []


# -- server-timing ------------------------------------------------------------------------------


def spans(header: str) -> dict[str, float]:
    parts = (part.split(";dur=") for part in header.split(", ") if ";dur=" in part)
    return {name: float(value) for name, value in parts}


async def test_every_millisecond_is_accounted_for(client: ClientFactory) -> None:
    """Case: 59 s to respond, 34 s logged (vLLM #20264)."""
    http = await client(FakeEngine(script="abc", prefill_s=0.05, delay_s=0.01))
    answer = await http.post("/v1/chat/completions", json=HI)
    found = spans(answer.headers["server-timing"])
    parts = ("receive", "prepare", "queue", "prefill", "decode", "other")
    assert sum(found[name] for name in parts) == pytest.approx(found["total"], abs=0.05)
    assert found["total"] >= 60
    # The scripted engine reports 1, 2 and 3 ms; the rest is nobody's else.
    assert (found["queue"], found["prefill"], found["decode"]) == (1, 2, 3)


async def test_a_stream_tells_what_passed_before_it(client: ClientFactory) -> None:
    http = await client(FakeEngine(script="a"))
    async with http.stream("POST", "/v1/chat/completions", json=HI | {"stream": True}) as answer:
        found = spans(answer.headers["server-timing"])
        await answer.aread()
    assert {"total", "receive", "prepare"} <= set(found)
    assert found["receive"] + found["prepare"] <= found["total"] + 0.02
