"""`return_evidence` against a real server: the openai SDK, images, streams, clients that leave."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.client import RawStream, chat_body, encoded, noise, openai_client, post, user
from tests.e2e.server import MODEL_NAME, Served

CHAT = "/v1/chat/completions"
DOCUMENT = "the thing in the rain: a tin ring, another one, then ten more and a cat. " * 12
QUESTION = "what is it?"


def comparable(evidence: dict[str, Any]) -> Any:
    """Without what depends on what caches hold; numbers to the precision that batches keep."""
    for choice in evidence["choices"]:
        choice["baseline"].pop("cached_tokens")
        for one in choice["intervals"]:
            for name in ("mass", "baseline_mass", "lift"):
                one[name] = None if one[name] is None else pytest.approx(one[name], abs=1e-5)
        for name in ("sink_mass", "answer_mass"):
            choice[name] = pytest.approx(choice[name], abs=1e-5)
    return evidence


def test_the_openai_sdk_gets_it(served: Served) -> None:
    picture = encoded(noise(7, (140, 84)), "png")
    messages: Any = user(DOCUMENT, picture, QUESTION)
    with openai_client(served) as client:
        answer = client.chat.completions.create(
            model=MODEL_NAME,
            messages=messages,
            max_tokens=6,
            temperature=0.0,
            extra_body={"return_evidence": {"interval": 32, "question": QUESTION}},
        )
    evidence = (answer.model_extra or {})["evidence"]
    (choice,) = evidence["choices"]
    assert answer.usage is not None
    assert choice["intervals"][-1]["end"] == answer.usage.prompt_tokens
    assert sum(one["mass"] for one in choice["intervals"]) == pytest.approx(1, abs=1e-4)
    shown = [one for one in choice["intervals"] if one["images"] == [0]]
    assert 0 < len(shown) < len(choice["intervals"])
    # All but the question is the same, is computed once, and is compared.
    baseline = choice["baseline"]
    assert baseline["cached_tokens"] >= baseline["common_tokens"] - 32
    assert (
        sum(one["lift"] is not None for one in choice["intervals"]) >= len(choice["intervals"]) - 3
    )
    served.rest()


def test_a_stream_ends_with_the_same(served: Served) -> None:
    body = chat_body(f"{DOCUMENT}\n\n{QUESTION}", return_evidence=True)
    status, _, whole = post(served, CHAT, body)
    assert status == 200
    stream = RawStream(served, body | {"stream_options": {"include_usage": True}})
    assert stream.open() == 200
    *chunks, done = stream.events()
    stream.close()
    assert done is None
    last: Any = chunks[-1]
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert comparable(last["evidence"]) == comparable(whole["evidence"])
    served.rest()


def test_a_client_that_leaves_leaves_nothing(served: Served) -> None:
    body = chat_body(f"{DOCUMENT}\n\n{QUESTION}", return_evidence=True, max_tokens=500)
    stream = RawStream(served, body)
    assert stream.open() == 200
    next(stream.events())
    stream.close()
    served.rest()


def test_layers_that_do_not_exist(served: Served) -> None:
    body = chat_body(QUESTION, return_evidence={"layers": [99]})
    status, _, answer = post(served, CHAT, body)
    assert (status, answer["error"]["param"]) == (400, "return_evidence.layers")
