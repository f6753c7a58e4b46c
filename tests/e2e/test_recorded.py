"""`serve --record FILE`: a real server under load, and every decision of it again without it."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from chunked_prefill.record_replay import main, read_recording, replay
from tests.e2e.client import chat_body, encoded, noise, post
from tests.e2e.conftest import Starter
from tests.e2e.server import until

pytestmark = pytest.mark.slow


def test_a_live_servers_decisions_come_out_again(
    serve: Starter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    limits = ("--max-num-seqs", "4", "--max-num-batched-tokens", "64")
    promises = ("--tpot-slo", "10ms", "--ttft-slo", "100ms")
    server = serve("qwen2_5_vl", "--record", str(path), *limits, *promises)

    def ask(number: int) -> int:
        parts: list[str | bytes] = [f"rain and wind of {number % 5}, " * (1 + number % 9)]
        if number % 4 == 0:
            parts.append(encoded(noise(number, (96, 64)), "PNG"))
        body = chat_body(*parts, max_tokens=5 + number, ignore_eos=True)
        status, _, answer = post(server, "/v1/chat/completions", body)
        assert status == 200, answer
        return status

    with ThreadPoolExecutor(6) as clients:
        assert set(clients.map(ask, range(24))) == {200}
    server.rest()
    stage = server.stage("language")
    assert stage is not None
    os.kill(stage, signal.SIGKILL)
    done = replay(path)
    assert [str(difference) for difference in done.differences] == []
    assert done.decisions > 100
    calls = [line["do"] for _, line in read_recording(path)]
    assert calls.count("add") == 24
    assert "look_up_images" in calls

    def restarted() -> bool:
        return server.health() == 200 and server.stage("language") not in (None, stage)

    until(restarted, "the language stage is back", within_s=90)
    assert ask(0) == 200
    assert main([str(path.with_name("run.2.jsonl"))]) == 0
    assert capsys.readouterr().out.startswith("100 % of ")
