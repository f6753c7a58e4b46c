"""The prefix cache as a client sees it: conversations, tenants, the reset, the metrics."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.e2e.client import chat_body, encoded, noise, user
from tests.e2e.conftest import Starter
from tests.e2e.server import MODEL_NAME, Served

PICTURE = encoded(noise(5, (120, 90)), "png")
SYSTEM = "You answer briefly, in letters, and never ask back. " * 4


@pytest.fixture(scope="module")
def two_tenants(serve: Starter, tmp_path_factory: pytest.TempPathFactory) -> Served:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("key-a tenant-a\nkey-b tenant-b\n")
    return serve("qwen2_5_vl", "--api-key-file", str(keys))


class Caller:
    def __init__(self, server: Served, key: str) -> None:
        self._url = server.url
        self._how: dict[str, Any] = {
            "headers": {"authorization": f"Bearer {key}"},
            "timeout": 120,
            "verify": False,
        }

    def text(self, path: str, body: dict[str, Any]) -> str:
        return httpx.post(self._url + path, json=body, **self._how).text

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = httpx.post(self._url + path, json=body, **self._how)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def cached(self, body: dict[str, Any]) -> int:
        usage = self.post("/v1/chat/completions", body)["usage"]
        tokens: int = usage["prompt_tokens_details"]["cached_tokens"]
        return tokens

    def metrics(self) -> str:
        return httpx.get(f"{self._url}/metrics", **self._how).text


@pytest.fixture
def a(two_tenants: Served) -> Caller:
    return Caller(two_tenants, "key-a")


@pytest.fixture
def b(two_tenants: Served) -> Caller:
    return Caller(two_tenants, "key-b")


def test_ten_turns_find_their_history(a: Caller) -> None:
    """The client sends text, and what the text of an answer is tokenised to is what was generated,
    as it nearly always is for real models. Here a bias keeps answers to letters of one token."""
    letters = a.post(
        "/tokenize", {"model": MODEL_NAME, "prompt": "xzq", "add_special_tokens": False}
    )
    bias = {str(token): 100.0 for token in letters["tokens"]}
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    history = 0
    for turn in range(10):
        messages += user("What is this? ", PICTURE) if turn == 0 else user(f"And {turn} of them?")
        body = {
            "model": MODEL_NAME,
            "messages": messages,
            "max_tokens": 24,
            "min_tokens": 24,
            "temperature": 0.8,
            "seed": turn,
            "logit_bias": bias,
        }
        answer = a.post("/v1/chat/completions", body)
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached >= 0.95 * history, f"turn {turn}: {cached} of {history}"
        assert (turn == 0) == (cached == 0)
        history = usage["total_tokens"]
        text = answer["choices"][0]["message"]["content"]
        assert len(text) == 24
        messages.append({"role": "assistant", "content": text})


def test_across_keys_nothing_is_found(a: Caller, b: Caller) -> None:
    bodies = [chat_body(SYSTEM, "first?"), chat_body("See ", PICTURE, " there?")]
    for body in bodies:
        first = a.cached(body)
        assert a.cached(body) > 30 > first
        b.post("/reset_prefix_cache", {})
        assert b.cached(body) == 0
    assert a.cached(chat_body(SYSTEM, "second?")) > 50
    before = a.cached(bodies[0])
    b.post("/reset_prefix_cache", {})
    assert a.cached(bodies[0]) == before, "another tenant's reset"
    a.post("/reset_prefix_cache", {})
    assert a.cached(bodies[0]) == 0


def test_a_stream_says_it_too(a: Caller) -> None:
    body = chat_body(SYSTEM, "streamed?", stream=True)
    a.cached({**body, "stream": False})
    for options in ({"include_usage": True}, {"continuous_usage_stats": True}):
        text = a.text("/v1/chat/completions", {**body, "stream_options": options})
        usages = [
            line.split('"cached_tokens":')[1].split(",")[0]
            for line in text.splitlines()
            if '"cached_tokens":' in line
        ]
        assert usages
        assert {int(found) > 50 for found in usages} == {True}
    completion = {"model": MODEL_NAME, "prompt": SYSTEM, "max_tokens": 2}
    a.post("/v1/completions", completion)
    usage = a.post("/v1/completions", completion)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


def test_metrics_say_where_prompts_came_from(a: Caller, two_tenants: Served) -> None:
    a.cached(chat_body(SYSTEM, "metrics?"))
    a.cached(chat_body(SYSTEM, "metrics?"))
    text = a.metrics()

    def value(name: str, labels: str = "") -> float:
        start = f"vllm:{name}{{model_name=" + f'"{MODEL_NAME}"{labels}}} '
        (line,) = [line for line in text.splitlines() if line.startswith(start)]
        return float(line.rpartition(" ")[2])

    device = value("kv_prompt_tokens_total", ',source="device"')
    computed = value("kv_prompt_tokens_total", ',source="computed"')
    assert value("prefix_cache_hits_total") == device > 0
    assert value("prefix_cache_queries_total") == device + computed
    assert value("kv_blocks_cached") > 0
    assert value("kv_evictions_total", ',reason="room",tier="device"') >= 0


@pytest.mark.slow
def test_the_cache_can_be_switched_off(serve: Starter) -> None:
    server = serve("qwen2_5_vl", "--no-enable-prefix-caching")
    caller = Caller(server, "unused")
    body = chat_body(SYSTEM, "off?")
    assert [caller.cached(body) for _ in range(2)] == [0, 0]


def test_a_reset_needs_a_key(two_tenants: Served) -> None:
    response = httpx.post(f"{two_tenants.url}/reset_prefix_cache", verify=False)
    assert response.status_code == 401
