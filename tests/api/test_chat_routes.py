"""The generating routes against a scripted engine: shapes, streams, errors."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest
import structlog.testing

from lm_engine.outputs import RequestError, RequestOutput
from tests.api import openai_schema
from tests.api.conftest import ClientFactory, events
from tests.api.fakes import INFO, FakeEngine

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
KEYS = {"id", "object", "created", "model", "choices"}

needs_schema = pytest.mark.skipif(
    not openai_schema.DESCRIPTION.exists(), reason="needs OpenAI's API description"
)


def text_of(chunks: list[Any], index: int = 0) -> str:
    pieces = [c for chunk in chunks if chunk != "[DONE]" for c in chunk["choices"]]
    return "".join(
        c.get("text", c.get("delta", {}).get("content", "")) for c in pieces if c["index"] == index
    )


async def stream(http: Any, path: str, body: dict[str, Any]) -> list[Any]:
    response = await http.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response.text)


async def test_api_06_every_chunk_is_complete(client: ClientFactory) -> None:
    http = await client(FakeEngine())
    chunks = await stream(http, CHAT, {**HI, "n": 2, "temperature": 1})
    assert chunks.pop() == "[DONE]"
    assert all(set(chunk) == KEYS for chunk in chunks)
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert all(set(choice) == {"index", "delta", "finish_reason"} for choice in choices)
    for index in (0, 1):
        own = [choice for choice in choices if choice["index"] == index]
        assert [choice["delta"].get("role") for choice in own].count("assistant") == 1
        assert own[0]["delta"]["role"] == "assistant"
        assert [choice["finish_reason"] for choice in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"stop": "world"},
        {"stop": ["is a", "XYZ"]},
        {"stop": "test.XYZ"},
        {"max_tokens": 7, "stop": "o, wXYZ"},
        {"stop": "world", "include_stop_str_in_output": True},
        {"n": 3, "seed": 5, "temperature": 0.7},
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_api_01_02_03_11_streamed_equals_whole(
    client: ClientFactory, path: str, extra: dict[str, Any]
) -> None:
    http = await client(FakeEngine())
    base = HI if path == CHAT else {"prompt": "hi", "max_tokens": 100}
    body = {**base, **extra}
    whole = (await http.post(path, json=body)).json()
    chunks = await stream(http, path, {**body, "stream_options": {"include_usage": True}})
    assert chunks.pop() == "[DONE]"
    last = chunks.pop()
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)
    for choice in whole["choices"]:
        index = choice["index"]
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert text_of(chunks, index) == text
        reasons = [
            c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["index"] == index
        ]
        assert reasons[-1] == choice["finish_reason"]


async def test_ctx_05_finish_reasons(client: ClientFactory) -> None:
    http = await client(FakeEngine(script="abcdef"))

    async def reason(**extra: Any) -> tuple[str, str]:
        whole = (await http.post(CHAT, json={**HI, **extra})).json()["choices"][0]
        chunks = await stream(http, CHAT, {**HI, **extra})
        assert chunks[-2]["choices"][0]["finish_reason"] == whole["finish_reason"]
        return whole["finish_reason"], whole["message"]["content"]

    assert await reason(max_tokens=5) == ("length", "abcde")
    assert await reason(max_tokens=50, ignore_eos=True) == ("length", ("abcdef" * 9)[:50])
    assert await reason(stop="cd") == ("stop", "ab")
    assert await reason(max_tokens=6) == ("stop", "abcdef")


async def test_api_09_choices_are_counted_once(client: ClientFactory) -> None:
    http = await client(FakeEngine())
    body = {**HI, "n": 3, "seed": 3, "temperature": 0.9}
    first = (await http.post(CHAT, json=body)).json()
    second = (await http.post(CHAT, json=body)).json()
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2]
    texts = [choice["message"]["content"] for choice in first["choices"]]
    assert len(set(texts)) == 3
    assert texts == [choice["message"]["content"] for choice in second["choices"]]
    single = (await http.post(CHAT, json=HI)).json()
    assert first["usage"]["prompt_tokens"] == single["usage"]["prompt_tokens"]
    details = first["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] <= first["usage"]["prompt_tokens"]


USER: dict[str, Any] = {"role": "user", "content": "hi"}
TEXT_PART = {"type": "text", "text": "a"}
BAD: list[tuple[dict[str, Any], str | None]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages.0.colour"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    ({"messages": [USER, {"role": "function", "content": "x"}]}, "messages.1.role"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": [{}]}]}, "messages.1.tool_calls"),
    (
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}]},
        "messages.1.tool_calls",
    ),
    (
        {"messages": [USER, {"role": "assistant", "content": None, "refusal": "no"}]},
        "messages.1.refusal",
    ),
    ({"messages": [USER, {"role": "assistant"}]}, "messages.1.content"),
    ({"messages": [{"role": "system", "content": None}]}, "messages.0.content"),
    ({"messages": [{**USER, "content": [TEXT_PART, {"type": "x"}]}]}, "messages.0.content.1.type"),
    (
        {"messages": [{**USER, "content": [{"type": "input_audio"}]}]},
        "messages.0.content.0.type",
    ),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
    ({"nonsense": 1}, "nonsense"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"response_format": {"type": "json_object"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.type"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"echo": True}, "echo"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": 3}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**63}, "top_k"),
    ({"seed": 2**63}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 2**64}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": 100}, "n"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logit_bias": {"384": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {str(2**40): 1}}, "logit_bias"),
    ({"logit_bias": {"abc": 1}}, "logit_bias"),
    ({"logit_bias": {"٣": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 1e9}}, "logit_bias"),
    ({"stop_token_ids": [384]}, "stop_token_ids.0"),
    ({"stop_token_ids": [5, -1], "min_tokens": 5}, "stop_token_ids.1"),
    ({"stop": ""}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": ["x", "y" * 257]}, "stop"),
    ({"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
    ({"max_tokens": 2048}, "max_tokens"),
    ({"max_completion_tokens": 2048}, "max_completion_tokens"),
    ({"chat_template_kwargs": {"documents": []}}, "chat_template_kwargs.documents"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": False, "return_progress": True}, "return_progress"),
    ({"mm_processor_kwargs": {"min_pixels": 9, "max_pixels": 4}}, "mm_processor_kwargs"),
    ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
    ({"metadata": {"a": "x" * 513}}, "metadata.a"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"user": "x" * 1025}, "user"),
    ({"store": True}, "store"),
]


@pytest.mark.parametrize(("extra", "param"), BAD, ids=[json.dumps(b)[:60] for b, _ in BAD])
async def test_api_04_api_08_smp_05_smp_06_refusals_are_equal_in_both_modes(
    client: ClientFactory, extra: dict[str, Any], param: str | None
) -> None:
    engine = FakeEngine()
    http = await client(engine)
    answers = []
    for streamed in (False, True):
        response = await http.post(CHAT, json={**HI, "stream": streamed, **extra})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param, error
        answers.append(error)
    assert answers[0] == answers[1]
    assert engine.seen == []
    assert (await http.post(CHAT, json=HI)).status_code == 200
    http.server.admission.check_invariants()
    assert http.server.admission.requests == 0


async def test_unknown_roles_are_told_all_roles(client: ClientFactory) -> None:
    http = await client(FakeEngine())
    response = await http.post(CHAT, json={"messages": [USER, {**USER, "role": "king"}]})
    message = response.json()["error"]["message"]
    assert all(role in message for role in ("system", "developer", "user", "assistant"))
    both = await http.post("/tokenize", json={"messages": [{**USER, "role": "king"}]})
    assert both.json()["error"]["param"] == "messages.0.role"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", **HI}, "messages"),
        ({"prompt": "a", "chat_template_kwargs": {}}, "chat_template_kwargs"),
        ({"prompt": "a", "mm_processor_kwargs": {}}, "mm_processor_kwargs"),
        ({**HI, "add_special_tokens": True}, "add_special_tokens"),
    ],
)
async def test_cross_field_refusals_name_a_field(
    client: ClientFactory, body: dict[str, Any], param: str
) -> None:
    http = await client(FakeEngine())
    response = await http.post("/tokenize", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_an_assistant_turn_without_content_is_an_empty_one(client: ClientFactory) -> None:
    http = await client(FakeEngine())
    vacuous = {"tool_calls": [], "refusal": None, "function_call": None}
    texts = []
    for content in (None, ""):
        answer = {"role": "assistant", "content": content, **vacuous}
        body = {"messages": [USER, answer, USER]}
        rendered = await http.post("/v1/render", json=body)
        assert rendered.status_code == 200, rendered.text
        texts.append(rendered.json()["text"])
    assert texts[0] == texts[1]
    assert "None" not in texts[0]


async def test_labels_are_logged_and_change_nothing(client: ClientFactory) -> None:
    engine = FakeEngine()
    http = await client(engine)
    labels = {
        "user": "u-1\x1b[2J",
        "safety_identifier": "s-1",
        "metadata": {"ticket": "42"},
        "prompt_cache_key": "k-1",
    }
    with structlog.testing.capture_logs() as lines:
        plain = await http.post(CHAT, json={**HI, "seed": 1})
        labelled = await http.post(CHAT, json={**HI, "seed": 1, **labels})
        text = await http.post(TEXT, json={"prompt": "x", "user": "u-2"})
        refused = await http.post(CHAT, json={**HI, **labels, "n": 100})
    assert plain.json()["choices"] == labelled.json()["choices"]
    assert [seen.request.sampling for seen in engine.seen[:2]] == [
        engine.seen[0].request.sampling
    ] * 2
    found = [line for line in lines if line["event"] == "request"]
    assert [line["log_level"] for line in found] == ["debug", "info", "info", "info"]
    assert not labels.keys() & found[0].keys()
    for line, response in ((found[1], labelled), (found[3], refused)):
        assert {name: line[name] for name in labels} == {**labels, "user": "u-1\ufffd[2J"}
        assert line["request_id"] == response.headers["x-request-id"]
        assert line["status"] == response.status_code
    assert found[2]["user"] == "u-2"
    assert text.status_code == 200


@pytest.mark.parametrize(
    "raw",
    [
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": Infinity}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b"[]",
        b"",
        b"null",
        b"{",
        b"[" * 5000,
        b'{"messages": [' + b"{}," * 150_000 + b"{}]}",
    ],
)
async def test_smp_04_broken_json_is_a_400(client: ClientFactory, raw: bytes) -> None:
    http = await client(FakeEngine())
    response = await http.post(CHAT, content=raw)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("extra", "field", "value"),
    [
        ({"temperature": 1e-40}, "temperature", 1e-40),
        ({"temperature": -0.0}, "temperature", 0.0),
        ({"top_k": 10**9}, "top_k", 0),
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 1}, "top_k", 1),
        ({"top_p": 1e-9}, "top_p", 1e-9),
        ({"logit_bias": {"7": -100, "3": 1.5}}, "logit_bias", ((3, 1.5), (7, -100.0))),
        ({"stop_token_ids": [4, 4, 2]}, "stop_token_ids", (4, 2)),
        ({"stop": "a"}, "stop", ("a",)),
        ({"max_completion_tokens": 9}, "max_tokens", 9),
        ({"logprobs": True}, "logprobs", 0),
        ({"logprobs": True, "top_logprobs": 5}, "logprobs", 5),
        ({"tools": [], "tool_choice": "none", "user": "me", "store": False}, "n", 1),
        ({"response_format": {"type": "text"}}, "n", 1),
    ],
)
async def test_smp_04_fields_reach_the_engine(
    client: ClientFactory, extra: dict[str, Any], field: str, value: Any
) -> None:
    engine = FakeEngine()
    http = await client(engine)
    response = await http.post(CHAT, json={**HI, **extra})
    assert response.status_code == 200, response.text
    assert getattr(engine.seen[0].request.sampling, field) == value
    if field == "temperature":
        assert engine.seen[0].request.sampling.greedy


async def test_ctx_03_too_long_prompts_are_refused_with_both_sizes(client: ClientFactory) -> None:
    engine = FakeEngine()
    http = await client(engine)
    long = {"messages": [{"role": "user", "content": "a" * 2 * INFO.max_model_len}]}
    for streamed in (False, True):
        response = await http.post(CHAT, json={**long, "stream": streamed})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert str(INFO.max_model_len) in error["message"]
    response = await http.post(TEXT, json={"prompt": [5] * INFO.max_model_len})
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert engine.seen == []
    # One token less leaves room for one.
    response = await http.post(TEXT, json={"prompt": [5] * (INFO.max_model_len - 1)})
    assert response.status_code == 200
    assert engine.seen[0].request.sampling.max_tokens == 1


async def test_default_max_tokens_is_what_remains(client: ClientFactory) -> None:
    engine = FakeEngine()
    http = await client(engine)
    await http.post(CHAT, json=HI)
    request = engine.seen[0].request
    assert request.num_prompt_tokens + request.sampling.max_tokens == INFO.max_model_len
    assert request.arrival_s > 0


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], [[5], []], ["a", ""]])
async def test_api_08_empty_prompts_are_400(client: ClientFactory, prompt: Any) -> None:
    http = await client(FakeEngine())
    for streamed in (False, True):
        response = await http.post(TEXT, json={"prompt": prompt, "stream": streamed})
        assert response.status_code == 400
        assert response.json()["error"]["param"].startswith("prompt")
    ok = await http.post(CHAT, json={"messages": [{"role": "system", "content": "be kind"}]})
    assert ok.status_code == 200
    ok = await http.post(CHAT, json={"messages": [{"role": "user", "content": ""}]})
    assert ok.status_code == 200


@pytest.mark.parametrize("prompt", [[[384]], [-1], [2**40], [1, "a"], ["a", 1], 5, [[1.5]]])
async def test_smp_06_bad_prompt_ids_are_400(client: ClientFactory, prompt: Any) -> None:
    engine = FakeEngine()
    http = await client(engine)
    response = await http.post(TEXT, json={"prompt": prompt})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("prompt")
    assert engine.seen == []


async def test_several_prompts_are_choices_in_order(client: ClientFactory) -> None:
    engine = FakeEngine(script="abc")
    http = await client(engine)
    body = {"prompt": ["one", "three"], "n": 2, "max_tokens": 5}
    whole = (await http.post(TEXT, json=body)).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert whole["usage"]["prompt_tokens"] == sum(len(s.request.token_ids) for s in engine.seen)
    assert whole["usage"]["completion_tokens"] == 12
    chunks = await stream(http, TEXT, body)
    assert {c["index"] for chunk in chunks[:-1] for c in chunk["choices"]} == {0, 1, 2, 3}


async def test_tok_03_three_ways_to_the_same_tokens(client: ClientFactory) -> None:
    engine = FakeEngine()
    http = await client(engine)
    usage = (await http.post(CHAT, json=HI)).json()["usage"]
    rendered = (await http.post("/v1/render", json=HI)).json()
    await http.post(TEXT, json={"prompt": rendered["text"]})
    await http.post(TEXT, json={"prompt": rendered["token_ids"]})
    tokens = [seen.request.token_ids for seen in engine.seen]
    assert tokens[0] == tokens[1] == tokens[2]
    assert usage["prompt_tokens"] == rendered["num_tokens"] == len(tokens[0])


async def test_logprobs_shapes(client: ClientFactory) -> None:
    http = await client(FakeEngine(script="\u00e9a"))
    body = {**HI, "logprobs": True, "top_logprobs": 2}
    whole = (await http.post(CHAT, json=body)).json()["choices"][0]["logprobs"]
    assert whole["refusal"] is None
    assert [entry["token"] for entry in whole["content"]] == ["\u00e9", "a"]
    assert whole["content"][0]["bytes"] == [0xC3, 0xA9]
    assert [top["logprob"] for top in whole["content"][0]["top_logprobs"]] == [-0.5, -1.5]
    chunks = await stream(http, CHAT, body)
    pieces = [c for chunk in chunks[:-1] for c in chunk["choices"][0]["logprobs"]["content"]]
    assert pieces == whole["content"]

    text = {"prompt": "x", "logprobs": 1}
    whole = (await http.post(TEXT, json=text)).json()["choices"][0]["logprobs"]
    assert whole["tokens"] == ["\u00e9", "a"]
    assert whole["text_offset"] == [0, 1]
    assert whole["top_logprobs"] == [{"A": -0.5}, {"A": -0.5}]
    chunks = await stream(http, TEXT, text)
    offsets = [o for c in chunks[:-1] for o in c["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == [0, 1]


async def test_prompt_logprobs_and_token_ids(client: ClientFactory) -> None:
    http = await client(FakeEngine(script="ab"))
    body = {"prompt": [5, 6], "prompt_logprobs": 1, "return_token_ids": True}
    answer = (await http.post(TEXT, json=body)).json()
    assert answer["prompt_logprobs"][0] is None
    entry = answer["prompt_logprobs"][1]["6"]
    assert entry == {"logprob": -9999.0, "rank": 3, "decoded_token": "x"}  # -inf is not JSON
    assert answer["prompt_logprobs"][1]["7"]["rank"] == 1
    assert answer["prompt_token_ids"] == [[5, 6]]
    assert answer["choices"][0]["token_ids"] == [97, 98]


async def test_engine_refusals_become_the_same_400(client: ClientFactory) -> None:
    kinds = {"invalid": 400, "never_fits": 400, "media": 400, "overloaded": 503, "internal": 500}
    for kind, status in kinds.items():
        engine = FakeEngine(error=RequestError(kind, "a reason", "messages.0"))  # type: ignore[arg-type]
        http = await client(engine)
        answers = [
            await http.post(CHAT, json={**HI, "stream": streamed}) for streamed in (False, True)
        ]
        assert [answer.status_code for answer in answers] == [status, status]
        assert answers[0].json() == answers[1].json()
        assert answers[0].json()["error"]["message"] == "a reason"


async def test_late_faults_end_the_stream_with_an_error(client: ClientFactory) -> None:
    engine = FakeEngine(error=RequestError("internal", "a stage died"), error_after=3)
    http = await client(engine)
    chunks = await stream(http, CHAT, HI)
    assert text_of(chunks[:-1]) == "Hel"
    assert chunks[-1]["error"]["message"] == "a stage died"
    assert (await http.post(CHAT, json=HI)).status_code == 500


async def test_a_broken_transport_is_an_explicit_error_without_internals(
    client: ClientFactory,
) -> None:
    http = await client(FakeEngine(crash_after=2))
    chunks = await stream(http, CHAT, HI)
    assert "lost this request" in chunks[-1]["error"]["message"]
    assert "/tmp" not in json.dumps(chunks)
    whole = await http.post(CHAT, json=HI)
    assert whole.status_code == 500
    assert "0xdead" not in whole.text


async def test_nothing_is_sent_before_prefill_ends_but_comments(client: ClientFactory) -> None:
    http = await client(FakeEngine(prefill_s=0.6), keepalive_s=0.05)
    response = await http.post(CHAT, json={**HI, "stream": True})
    before, _, _ = response.text.partition("data: ")
    assert before.count(": keep-alive") >= 2
    assert before.replace(": keep-alive\n\n", "") == ""


async def test_progress_is_opt_in(client: ClientFactory) -> None:
    http = await client(FakeEngine(progress=2))
    plain = await stream(http, CHAT, HI)
    assert "prompt_progress" not in json.dumps(plain)
    chunks = await stream(http, CHAT, {**HI, "return_progress": True})
    progress = [c["prompt_progress"] for c in chunks[:-1] if "prompt_progress" in c]
    total = progress[0]["total"]
    assert [p["processed"] for p in progress] == [total // 2, total]
    assert all(c["choices"] == [] for c in chunks[:-1] if "prompt_progress" in c)


@pytest.mark.parametrize("known", [(), (0.5,), (0.25, 0.25, 0.75, 0.5)])
async def test_progress_only_grows_and_ends_with_the_whole_prompt(
    client: ClientFactory, known: tuple[float, ...]
) -> None:
    """The engine's own last report is of the chunk before the last, and a preempted request starts
    again from nothing."""

    class Reporting(FakeEngine):
        async def _events(self, request: Any, seen: Any) -> Any:
            total = request.num_prompt_tokens
            for share in known:
                done = (int(total * share), total)
                yield RequestOutput(request.request_id, prompt_progress=done)
            async for output in super()._events(request, seen):
                yield output

    http = await client(Reporting(script="ab"))
    body = {"prompt": [[5] * 8, [6] * 4], "return_progress": True}
    chunks = await stream(http, TEXT, body)
    events = [
        ("read", c["prompt_progress"]["processed"], c["prompt_progress"]["total"])
        if "prompt_progress" in c
        else ("text", c["choices"][0]["index"])
        for c in chunks[:-1]
    ]
    for index, total in enumerate((8, 4)):
        done = [event[1] for event in events if event[0] == "read" and event[2] == total]
        reported = [int(total * share) for share in (*known, 1.0)]
        assert done == sorted(set(itertools.accumulate(reported, max)))
        assert events.index(("read", total, total)) < events.index(("text", index))


async def test_continuous_usage(client: ClientFactory) -> None:
    http = await client(FakeEngine(script="abc"))
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    chunks = await stream(http, CHAT, {**HI, **options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks[:-1]]
    assert counts == [1, 2, 3, 3]


async def test_headers(client: ClientFactory) -> None:
    http = await client(FakeEngine())
    response = await http.post(CHAT, json=HI, headers={"x-request-id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    for span in ("total", "ttft", "queue", "prefill", "decode", "encode", "image_decode"):
        assert f"{span};dur=" in response.headers["server-timing"]
    response = await http.post(CHAT, json=HI, headers={"x-request-id": "bad id\u00e9".encode()})
    assert len(response.headers["x-request-id"]) == 32


async def test_model_names(client: ClientFactory) -> None:
    http = await client(FakeEngine(), served_model_name="mine")
    assert (await http.post(CHAT, json={**HI, "model": "mine"})).json()["model"] == "mine"
    response = await http.post(CHAT, json={**HI, "model": "other"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert (await http.get("/v1/models")).json()["data"][0]["id"] == "mine"
    assert (await http.get("/v1/models/mine")).status_code == 200
    assert (await http.get("/v1/models/other")).status_code == 404


async def test_unknown_paths_and_methods_have_the_error_shape(client: ClientFactory) -> None:
    http = await client(FakeEngine())
    for response, status in (
        (await http.get("/v1/nothing"), 404),
        (await http.get(CHAT), 405),
    ):
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_api_11_many_streams_at_once_lose_nothing(client: ClientFactory) -> None:
    engine = FakeEngine(script="".join(chr(33 + i % 90) for i in range(64)))
    http = await client(engine, max_queued_requests=1000)
    whole = (await http.post(CHAT, json=HI)).json()["choices"][0]["message"]["content"]
    streams = await asyncio.gather(*(stream(http, CHAT, HI) for _ in range(100)))
    assert {text_of(chunks[:-1]) for chunks in streams} == {whole}


async def test_tokenize_and_detokenize(client: ClientFactory) -> None:
    http = await client(FakeEngine())
    answer = (
        await http.post("/tokenize", json={"prompt": "the cat", "return_token_strs": True})
    ).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == INFO.max_model_len
    back = (await http.post("/detokenize", json={"tokens": answer["tokens"]})).json()
    assert back == {"prompt": "the cat"}
    chat = (await http.post("/tokenize", json=HI)).json()
    assert chat["tokens"] == (await http.post("/v1/render", json=HI)).json()["token_ids"]
    without_effect: list[dict[str, Any]] = [
        {"prompt": "a", "chat_template_kwargs": {"enable_thinking": False}},
        {"prompt": "a", "mm_processor_kwargs": {"max_pixels": 9}},
        {**HI, "add_special_tokens": True},
    ]
    for body in ({}, {"prompt": "a", **HI}, {"prompt": "a", "what": 1}, *without_effect):
        assert (await http.post("/tokenize", json=body)).status_code == 400
    for tokens in ([384], [-1], ["a"], None):
        response = await http.post("/detokenize", json={"tokens": tokens})
        assert response.status_code == 400


async def test_text_is_kept_exactly_even_with_nul(client: ClientFactory) -> None:
    engine = FakeEngine()
    http = await client(engine)
    odd = "a\u0000b\ufffd\u202e \U0001f336"
    body = {"messages": [{"role": "user", "content": odd}]}
    assert odd in (await http.post("/v1/render", json=body)).json()["text"]


@needs_schema
@pytest.mark.parametrize("extra", [{}, {"n": 2}, {"logprobs": True, "top_logprobs": 2}])
async def test_answers_fit_the_openai_description(
    client: ClientFactory, extra: dict[str, Any]
) -> None:
    http = await client(FakeEngine())
    whole = (await http.post(CHAT, json={**HI, **extra})).json()
    assert openai_schema.faults(whole, "CreateChatCompletionResponse") == []
    usage = {"stream_options": {"include_usage": True}}
    for chunk in (await stream(http, CHAT, {**HI, **extra, **usage}))[:-1]:
        # The description's prose promises null until the last chunk, its types forbid it.
        chunk = {key: value for key, value in chunk.items() if value is not None}
        assert openai_schema.faults(chunk, "CreateChatCompletionStreamResponse") == []
    text = {"prompt": "x", "n": extra.get("n", 1), "logprobs": 2 if "logprobs" in extra else None}
    whole = (await http.post(TEXT, json=text)).json()
    assert openai_schema.faults(whole, "CreateCompletionResponse") == []
    assert openai_schema.faults((await http.get("/v1/models")).json(), "ListModelsResponse") == []


async def test_log_probabilities_are_bounded_over_all_prompts(client: ClientFactory) -> None:
    http = await client(FakeEngine())
    one = {"prompt": "x", "n": 8, "max_tokens": 1000, "logprobs": 20}
    assert (await http.post(TEXT, json=one)).status_code == 200
    response = await http.post(TEXT, json={**one, "prompt": ["x"] * 64})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "logprobs"
