"""What a real server says of a first token that is still to come, and what a load on it shows."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

import pytest

from api.cli import main
from tests.e2e.client import RawStream, chat_body, encoded, noise, post
from tests.e2e.server import Served

TEXT = "A sentence that is long enough to fill several blocks of the cache. " * 3


def ask(server: Served, body: dict[str, Any]) -> dict[str, Any]:
    status, _, found = post(server, "/v1/estimate", body)
    assert status == 200, found
    return found


def test_an_estimate_counts_what_the_answer_counts(served: Served) -> None:
    picture = encoded(noise(77, (84, 56)), "png")
    body = chat_body(picture, TEXT, max_tokens=2)
    before = ask(served, body)
    _, headers, answer = post(served, "/v1/chat/completions", body)
    usage = answer["usage"]
    assert before["prompt_tokens"] == usage["prompt_tokens"]
    assert before["prompt_tokens_details"] == usage["prompt_tokens_details"]
    assert before["prompt_tokens_details"]["image_tokens"] > 0
    assert 0 < before["isolated_ttft_ms"] <= before["ttft_ms"]
    after = ask(served, body)
    # All but the last token, which is always computed.
    assert after["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
    timing = dict(p.split(";dur=") for p in headers["server-timing"].split(", ") if ";dur=" in p)
    parts = ("receive", "prepare", "queue", "prefill", "decode", "other")
    total = sum(float(timing[name]) for name in parts)
    assert total == pytest.approx(float(timing["total"]), abs=0.1)


def test_a_stream_tells_its_estimate_and_a_deadline_is_held(served: Served) -> None:
    body = chat_body(TEXT, max_tokens=2)
    stream = RawStream(served, body)
    assert stream.open() == 200
    assert float(stream.headers()["x-ttft-estimate-ms"]) >= 0
    assert list(stream.events())[-1] is None
    stream.close()
    for deadline, status in (("0.0001", 429), ("3600000", 200)):
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
        headers = {"Content-Type": "application/json", "x-ttft-deadline-ms": deadline}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        found = json.loads(answer.read())
        connection.close()
        assert answer.status == status, found
        if status == 429:
            assert int(answer.headers["retry-after"]) >= 1
            assert found["error"]["code"] == "ttft_deadline"


def test_a_load_on_a_real_server(served: Served, tmp_path: Path) -> None:
    rows = [
        {
            "arrival_s": n / 10,
            "prompt_tokens": 200 + n,
            "output_tokens": 3,
            "hash_ids": [n % 2],
            "block_tokens": 128,
        }
        for n in range(6)
    ]
    rows.append({"arrival_s": 1.0, "prompt_tokens": 90, "output_tokens": 2, "images": [[56, 56]]})
    trace, file = tmp_path / "t.jsonl", tmp_path / "out.json"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--url", served.url, "--trace", str(trace), "--output", str(file)])
    assert ended.value.code == 0
    found = json.loads(file.read_text())
    assert found["report"]["answered"] == 7
    assert found["lengths"]["prompt"] | {"worst": 0} == {
        "compared": 6,
        "wanted": 1215,
        "got": 1215,
        "exact": 6,
        "worst": 0,
    }
    assert found["lengths"]["output"]["exact"] == 7
    # Four of the six begin like one before them.
    assert found["prompt_token_sources"]["cached"] >= 4 * 96
