"""GET and POST /v1/scheduling, and the calibration behind it."""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest
from PIL import Image

from tests.api.conftest import ClientFactory, events
from tests.api.fakes import FakeEngine

PATH = "/v1/scheduling"


@pytest.mark.parametrize(("method", "path"), [("GET", PATH), ("POST", PATH)])
async def test_nobody_tunes_what_the_operator_has_fixed(
    client: ClientFactory, method: str, path: str
) -> None:
    http = await client(FakeEngine())
    for asked in (path, f"{PATH}/calibrate") if method == "POST" else (path,):
        answer = await http.request(method, asked, json={} if method == "POST" else None)
        assert answer.status_code == 403
        assert "--allow-tuning" in answer.json()["error"]["message"]
        assert answer.json()["error"]["type"] == "permission_error"


async def test_a_key_is_needed_as_anywhere(client: ClientFactory) -> None:
    http = await client(FakeEngine(), api_key="s", allow_tuning=True)
    assert (await http.get(PATH)).status_code == 401
    assert (await http.get(PATH, headers={"authorization": "Bearer s"})).status_code == 200


async def test_what_is_given_changes_and_the_rest_stays(client: ClientFactory) -> None:
    engine = FakeEngine()
    http = await client(engine, allow_tuning=True)
    before = (await http.get(PATH)).json()
    assert before["settings"]["policy"] == "deadline"
    assert before["limits"] == {"max_num_seqs": 8, "max_num_batched_tokens": 256}
    assert before["kv"] == {"blocks": 256, "block_size": 16, "prefix_caching": True}
    assert before["calibration"] is None
    change = {"policy": "fcfs", "step_share": [0.25, 0.5], "max_num_seqs": 4, "ttft_slo_s": 2.5}
    after = (await http.post(PATH, json=change)).json()
    assert after["settings"] == {**before["settings"], **change}
    assert engine.settings.step_share == (0.25, 0.5)
    assert (await http.get(PATH)).json() == after
    again = (await http.post(PATH, json={"ttft_slo_s": None})).json()
    assert again["settings"] == {**before["settings"], **change, "ttft_slo_s": None}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_num_seqs": 9}, "max_num_seqs"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": None}, "max_num_seqs"),
        ({"step_share": None}, "step_share"),
        ({"step_share": [0.9, 0.1]}, "step_share"),
        ({"tpot_slo_s": -1}, "tpot_slo_s"),
        ({"policy": "lifo"}, "policy"),
        ({"seats": 3}, "seats"),
        ({"image_resolution_limit": 0, "policy": "fcfs"}, "image_resolution_limit"),
    ],
)
async def test_nonsense_is_a_400_that_names_it_and_changes_nothing(
    client: ClientFactory, change: dict[str, Any], param: str
) -> None:
    http = await client(FakeEngine(), allow_tuning=True)
    before = (await http.get(PATH)).json()
    answer = await http.post(PATH, json=change)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert (await http.get(PATH)).json() == before


async def test_a_calibration_is_a_stream_with_a_result(client: ClientFactory) -> None:
    engine = FakeEngine()
    http = await client(engine, allow_tuning=True)
    answer = await http.post(f"{PATH}/calibrate", json={"seconds": 2})
    progress, result = events(answer.text)
    assert progress["progress"]["total_s"] == 2
    assert result["calibration"]["steps"] == 40
    assert (await http.get(PATH)).json()["calibration"] == result["calibration"]
    engine.running = 1
    refused = events((await http.post(f"{PATH}/calibrate", json={})).text)[-1]
    assert "idle" in refused["error"]["message"]
    assert (await http.post(f"{PATH}/calibrate", json={"seconds": 0})).status_code == 400


async def test_a_lower_resolution_takes_fewer_tokens_at_once(client: ClientFactory) -> None:
    file = io.BytesIO()
    Image.new("RGB", (640, 640), (9, 99, 199)).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    engine = FakeEngine()
    http = await client(engine, family="qwen2_5_vl", allow_tuning=True)

    async def tokens(**more: Any) -> int:
        part = {"type": "image_url", "image_url": {"url": url}, **more}
        body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
        answer = await http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return sum(span.length for span in engine.seen[-1].request.image_spans)

    full = await tokens()
    assert (await http.post(PATH, json={"image_resolution_limit": 12_544})).status_code == 200
    limited = await tokens()
    assert limited < full / 2
    assert await tokens(max_pixels=40_000) == limited, "a request may not ask for more"
    assert await tokens(min_pixels=40_000) == limited
    assert await tokens(max_pixels=6_272) < limited, "but for less"
    await http.post(PATH, json={"image_resolution_limit": 1})
    assert await tokens() > 0, "a limit below the model's least is its least"
    await http.post(PATH, json={"image_resolution_limit": None})
    assert await tokens() == full


@pytest.mark.parametrize("family", ["smolvlm", "llava", "llava_onevision", "qwen3_vl", "idefics3"])
async def test_every_family_can_do_with_a_low_limit(client: ClientFactory, family: str) -> None:
    file = io.BytesIO()
    Image.new("RGB", (300, 200)).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    http = await client(FakeEngine(), family=family, image_resolution_limit=1)
    content = [{"type": "image_url", "image_url": {"url": url}}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
