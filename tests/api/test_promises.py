"""What a request may ask of its own first token, of those after it, and of its rank."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.conftest import ClientFactory
from tests.api.fakes import FakeEngine

HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
ROUTES = [("/v1/chat/completions", HI), ("/v1/completions", {"prompt": "a"})]


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_headers_and_priority_reach_the_engine(
    client: ClientFactory, path: str, body: dict[str, Any]
) -> None:
    engine = FakeEngine()
    http = await client(engine)
    headers = {"x-ttft-slo-ms": "750.5", "x-tpot-slo-ms": "40"}
    assert (await http.post(path, json=body | {"priority": 7}, headers=headers)).status_code == 200
    request = engine.seen[0].request
    assert request.ttft_s == pytest.approx(0.7505)
    assert request.tpot_s == pytest.approx(0.04)
    assert request.priority == 7
    assert not request.must_meet_ttft
    assert (await http.post(path, json=body)).status_code == 200
    plain = engine.seen[1].request
    assert (plain.ttft_s, plain.tpot_s, plain.priority) == (None, None, 0)


async def test_an_estimate_is_of_a_request_with_the_same_promises(client: ClientFactory) -> None:
    engine = FakeEngine()
    http = await client(engine)
    answer = await http.post("/v1/estimate", json=HI, headers={"x-ttft-slo-ms": "90"})
    assert answer.status_code == 200
    assert engine.asked[0].request.ttft_s == pytest.approx(0.09)


@pytest.mark.parametrize("given", ["soon", "0", "-1", "nan", "inf", "1e12", ""])
@pytest.mark.parametrize("header", ["x-ttft-slo-ms", "x-tpot-slo-ms"])
async def test_promises_are_numbers_of_milliseconds(
    client: ClientFactory, header: str, given: str
) -> None:
    engine = FakeEngine()
    http = await client(engine)
    for path, body in (*ROUTES, ("/v1/estimate", HI)):
        answer = await http.post(path, json=body, headers={header: given})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == header
    assert engine.seen == engine.asked == []


async def test_a_promise_and_a_deadline_contradict_each_other(client: ClientFactory) -> None:
    engine = FakeEngine()
    http = await client(engine)
    headers = {"x-ttft-slo-ms": "100", "x-ttft-deadline-ms": "200"}
    answer = await http.post("/v1/chat/completions", json=HI, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-ttft-slo-ms"


@pytest.mark.parametrize("priority", [-1, 101, "high", 1.5])
async def test_nobody_gets_before_the_others(client: ClientFactory, priority: Any) -> None:
    engine = FakeEngine()
    http = await client(engine)
    answer = await http.post("/v1/chat/completions", json=HI | {"priority": priority})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "priority"
    assert engine.seen == []
