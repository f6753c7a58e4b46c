"""A real server process on loopback: SDK, disconnects, signals, headers."""

from __future__ import annotations

import base64
import functools
import http.client
import io
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion
from PIL import Image

from api.app import create_app
from api.config import ServeConfig
from lm_engine.outputs import RequestError
from tests.api.fakes import FakeEngine, served

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
# Loading the certificates of an unused TLS context takes longer than most of these tests.
get, post, stream = (
    functools.partial(call, verify=False) for call in (httpx.get, httpx.post, httpx.stream)
)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def live(folders: Callable[[str], Path]) -> Callable[..., Any]:
    """`with live(engine, family=..., **settings) as address:`"""

    @contextmanager
    def run(engine: FakeEngine, family: str = "llama", **settings: Any) -> Iterator[str]:
        app = create_app(ServeConfig(model="tiny", **settings), engine, model_path=folders(family))
        with served(app) as address:
            until(lambda: get(f"{address}/health").status_code == 200)
            yield address

    return run


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def test_openai_sdk_chat_stream_image_and_errors(live: Callable[..., Any]) -> None:
    engine = FakeEngine(script="caf\u00e9 \U0001f336")
    data = io.BytesIO()
    Image.new("RGB", (80, 60)).save(data, "WEBP")
    url = "data:image/webp;base64," + base64.b64encode(data.getvalue()).decode()
    messages: Any = [
        {"role": "system", "content": "short"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "what?"},
                {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
            ],
        },
    ]
    with live(engine, "smolvlm", api_key="k") as address:
        with openai.OpenAI(base_url=f"{address}/v1", api_key="k", max_retries=0) as sdk:
            assert [model.id for model in sdk.models.list()] == ["tiny"]
            whole = sdk.chat.completions.create(model="tiny", messages=messages, logprobs=True)
            ChatCompletion.model_validate(whole.model_dump(), strict=True)
            assert whole.choices[0].message.content == engine.script
            assert whole.usage is not None
            parts = sdk.chat.completions.create(
                model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}
            )
            chunks = list(parts)
            joined = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            assert joined == engine.script
            assert chunks[-1].usage == whole.usage
            text = sdk.completions.create(model="tiny", prompt="once", max_tokens=3)
            assert text.choices[0].text == engine.script[:3]
            with pytest.raises(openai.BadRequestError) as bad:
                sdk.chat.completions.create(model="tiny", messages=messages, top_p=-1)
            assert bad.value.param == "top_p"
            with pytest.raises(openai.NotFoundError):
                sdk.chat.completions.create(model="other", messages=messages)
            engine.error, engine.error_after = RequestError("internal", "a stage died"), 2
            parts = sdk.chat.completions.create(model="tiny", messages=messages, stream=True)
            with pytest.raises(openai.APIError, match="a stage died"):
                list(parts)
        with (
            openai.OpenAI(base_url=f"{address}/v1", api_key="wrong", max_retries=0) as stranger,
            pytest.raises(openai.AuthenticationError),
        ):
            stranger.models.list()


def test_lod_01_a_client_that_leaves_frees_the_engine(live: Callable[..., Any]) -> None:
    engine = FakeEngine(script="x" * 2000, delay_s=0.005)
    rng = random.Random(1)
    with live(engine, prefix := "llama", max_queued_requests=100) as address:
        assert prefix
        port = int(address.rsplit(":", 1)[1])

        def leave(streamed: bool, wait_s: float) -> None:
            body = b'{"messages":[{"role":"user","content":"hi"}],"stream":%s}' % (
                b"true" if streamed else b"false"
            )
            head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            with socket.create_connection(("127.0.0.1", port)) as sock:
                sock.sendall(head.encode() + body)
                time.sleep(wait_s)

        threads = [
            threading.Thread(target=leave, args=(index % 3 > 0, rng.random() * 0.3))
            for index in range(60)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        until(lambda: engine.running == 0, 2.0)
        assert {seen.ended for seen in engine.seen} <= {"aborted"}
        assert len(engine.seen) >= 30
        engine.script = "done"
        assert post(address + CHAT, json=HI).status_code == 200
        metrics = get(f"{address}/metrics").text
        assert 'http_requests_in_flight{model_name="tiny"} 0.0' in metrics


def test_api_06_lines_arrive_one_by_one(live: Callable[..., Any]) -> None:
    engine = FakeEngine(script="abcdef", delay_s=0.05)
    with (
        live(engine) as address,
        stream("POST", address + CHAT, json={**HI, "stream": True}) as response,
    ):
        times = [time.monotonic() for line in response.iter_lines() if line]
    assert len(times) == 7
    assert times[-2] - times[0] > 0.2


def in_flight(address: str) -> int:
    found = re.search(r"http_requests_in_flight\{[^}]*\} (\d+)", get(f"{address}/metrics").text)
    assert found is not None
    return int(found[1])


SERVER = """
import sys
from pathlib import Path
from api import serve
from api.config import load
from tests.api.fakes import FakeEngine

engine = FakeEngine(hold=Path(sys.argv[3]))
flags = {"model": sys.argv[1], "port": "0", "drain_timeout_s": sys.argv[2]}
sys.exit(serve.run(load(flags).config, start=lambda config, model: engine))
"""


@contextmanager
def process(
    folder: Path, drain_s: float, hold: Path
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The server as its own process, as the command line starts it; yields its port. Its streams
    end once the file `hold` is gone."""
    (folder / "model.safetensors").touch()  # the scripted engine reads no weights
    child = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(folder), str(drain_s), str(hold)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert child.stderr is not None
    try:
        for line in child.stderr:
            if '"event": "ready"' in line:
                yield child, int(line.partition("127.0.0.1:")[2].partition('"')[0])
                return
        pytest.fail("the server did not start")
    finally:
        child.kill()
        child.wait()
        child.stderr.close()


def test_lod_07_sigterm_drains_and_a_second_one_ends(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    hold = tmp_path / "hold"
    for second_signal in (False, True):
        hold.touch()
        with process(folders("llama"), 600.0, hold) as (child, port):
            address = f"http://127.0.0.1:{port}"
            with stream("POST", address + CHAT, json={**HI, "stream": True}) as response:
                lines = response.iter_lines()
                next(lines)
                if second_signal:
                    with ThreadPoolExecutor(1) as pool:
                        whole = pool.submit(post, address + CHAT, json=HI, timeout=30)
                        until(lambda url=address: in_flight(url) == 2)
                        child.send_signal(signal.SIGTERM)
                        until(lambda url=address: get(f"{url}/health").status_code == 503)
                        child.send_signal(signal.SIGTERM)
                        assert child.wait(timeout=30) == 0
                        assert child.stderr is not None
                        log = child.stderr.read()
                        assert "Traceback" not in log
                        assert [json.loads(line)["event"] for line in log.splitlines()] == [
                            "draining",
                            "stopped",
                        ]
                        assert whole.result().status_code == 503
                    # Neither is left without an end.
                    last = [line for line in lines if line][-1]
                    assert "shut down" in last
                    return
                child.send_signal(signal.SIGTERM)
                until(lambda url=address + CHAT: post(url, json=HI).status_code == 503)
                assert get(f"{address}/health").json()["phase"] == "draining"
                hold.unlink()
                rest = [line for line in lines if line]
            assert rest[-1] == "data: [DONE]"
            assert child.wait(timeout=30) == 0


def test_lod_08_large_headers_are_refused(folders: Callable[[str], Path], tmp_path: Path) -> None:
    with process(folders("llama"), 0.0, tmp_path / "none") as (_, port):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/health", headers={"x": "a" * 20_000})
        assert connection.getresponse().status == 200
        connection.close()
        connection.request("GET", "/health", headers={"x": "a" * 64_000})
        assert connection.getresponse().status in (400, 431)
        connection.close()
        with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
            refused = b""
            try:
                sock.sendall(b"GET /health HTTP/1.1\r\nx: ")
                for _ in range(200):  # a header that never ends
                    sock.sendall(b"a" * 65536)
                refused = sock.recv(100)
            except (ConnectionError, BrokenPipeError):
                refused = b"closed"
            assert refused in (b"closed", b"") or b" 400 " in refused
        assert get(f"http://127.0.0.1:{port}/health").status_code == 200
