"""`return_evidence` over HTTP, with a scripted engine: shapes, the neutral question, refusals."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image

from api.errors import BadRequestError
from api.evidence import BASELINE_TOKENS
from api.neutral import NEUTRAL_QUESTION, neutral_text, neutral_turns
from api.prompt import Turn
from api.schemas import EvidenceOptions
from chunked_prefill.request import Request
from lm_engine.client import EngineStatus
from lm_engine.outputs import Evidence, RequestError, RequestOutput
from tests.api.conftest import ClientFactory, events
from tests.api.fakes import INFO, FakeEngine, Seen

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
DOCUMENT = "The cat sat on a mat in the rain. " * 12
QUESTION = "Where was it?"
MESSAGES = [{"role": "user", "content": f"{DOCUMENT}\n\n{QUESTION}"}]
ASK = {"messages": MESSAGES, "return_evidence": True, "max_tokens": 9}


def _masses(request: Request) -> Evidence:
    """A neutral question sees all intervals alike, the other one the later ones more."""
    asked = request.sampling.evidence
    assert asked is not None
    count = -(-request.num_prompt_tokens // asked.interval)
    even = request.request_id.endswith("-baseline")
    weights = [1.0 if even else 1.0 + i for i in range(count)]
    masses = tuple(0.5 * weight / sum(weights) for weight in weights)
    return Evidence(
        asked.layers or (1,), asked.interval, 4, request.num_prompt_tokens, 7, 0.3, 0.2, masses
    )


class Witness(FakeEngine):
    """Gives evidence when asked; `baseline_error` is how baselines end."""

    baseline_error: RequestError | None = None

    def __init__(self, **settings: Any) -> None:
        model = replace(INFO, num_layers=4)
        super().__init__(current=EngineStatus("ready", alive=True, model=model), **settings)

    async def _events(self, request: Request, seen: Seen) -> AsyncIterator[RequestOutput]:
        if self.baseline_error is not None and request.request_id.endswith("-baseline"):
            yield RequestOutput(request.request_id, finished=True, error=self.baseline_error)
            return
        async for output in super()._events(request, seen):
            if request.sampling.evidence is not None:
                deltas = [
                    d if d.finish_reason is None else replace(d, evidence=_masses(request))
                    for d in output.deltas
                ]
                output = replace(output, deltas=tuple(deltas))
            yield output


# -- the answer -----------------------------------------------------------------------------------


async def test_an_answer_says_where_it_looked(client: ClientFactory) -> None:
    engine = Witness()
    http = await client(engine)
    answer = (await http.post(CHAT, json=ASK)).json()
    evidence = answer["evidence"]
    assert evidence["settings"] == {
        "layers": [1],
        "interval": 64,
        "sinks": 4,
        "neutral_question": NEUTRAL_QUESTION,
    }
    (choice,) = evidence["choices"]
    assert (choice["index"], choice["tokens"]) == (0, 7)
    assert (choice["sink_mass"], choice["answer_mass"]) == (0.3, 0.2)

    asked, neutral = (seen.request for seen in engine.seen)
    intervals = choice["intervals"]
    ends = [0, *(one["end"] for one in intervals)]
    assert [one["start"] for one in intervals] == ends[:-1] == list(range(0, ends[-2] + 1, 64))
    assert ends[-1] == asked.num_prompt_tokens == answer["usage"]["prompt_tokens"]
    rendered = (await http.post("/v1/render", json={"messages": MESSAGES})).json()["text"]
    assert "".join(one["text"] for one in intervals) == rendered
    assert sum(one["mass"] for one in intervals) == pytest.approx(1, abs=1e-4)

    common = next(
        i for i, (a, b) in enumerate(zip(*map(_ids, engine.seen), strict=False)) if a != b
    )
    assert choice["baseline"] == {
        "tokens": 7,
        "prompt_tokens": neutral.num_prompt_tokens,
        "cached_tokens": 16,
        "common_tokens": common,
    }
    compared = [one for one in intervals if one["lift"] is not None]
    assert compared == [one for one in intervals if one["end"] <= common]
    assert len(compared) >= 4
    for one in compared:
        assert one["lift"] == pytest.approx(one["mass"] - one["baseline_mass"], abs=2e-6)
    assert intervals[-1]["baseline_mass"] is None


def _ids(seen: Seen) -> tuple[int, ...]:
    return seen.request.token_ids


async def test_the_neutral_question_is_short_and_not_billed(client: ClientFactory) -> None:
    engine = Witness()
    http = await client(engine)
    plain = (await http.post(CHAT, json={**ASK, "return_evidence": False})).json()
    answer = (await http.post(CHAT, json={**ASK, "n": 2, "temperature": 0})).json()
    _, asked, neutral = (seen.request for seen in engine.seen)
    assert (asked.sampling.max_tokens, neutral.sampling.max_tokens) == (9, BASELINE_TOKENS)
    assert (neutral.sampling.n, neutral.sampling.temperature) == (1, 0.0)
    assert neutral.sampling.evidence == asked.sampling.evidence
    assert answer["usage"]["completion_tokens"] == 2 * plain["usage"]["completion_tokens"]
    assert answer["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    assert "evidence" not in plain


async def test_the_neutral_question_waits_for_the_answer_to_begin(client: ClientFactory) -> None:
    """Asked at once, it would compete with the answer for the first token."""
    engine = Witness(gate=asyncio.Event())
    http = await client(engine)
    answer = asyncio.create_task(http.post(CHAT, json=ASK))
    while not engine.seen:
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)
    assert len(engine.seen) == 1
    assert engine.gate is not None
    engine.gate.set()
    assert (await answer).json()["evidence"]["choices"][0]["baseline"] is not None
    assert len(engine.seen) == 2


@pytest.mark.parametrize("usage", [True, False])
async def test_a_stream_ends_with_it(client: ClientFactory, usage: bool) -> None:
    http = await client(Witness(progress=2))
    whole = (await http.post(CHAT, json=ASK)).json()
    body = {**ASK, "stream": True, "return_progress": True}
    if usage:
        body["stream_options"] = {"include_usage": True}
    chunks = events((await http.post(CHAT, json=body)).text)
    assert chunks.pop() == "[DONE]"
    last = chunks.pop()
    assert last["choices"] == []
    assert last["evidence"] == whole["evidence"]
    assert ("usage" in last) == usage
    assert not any("evidence" in chunk for chunk in chunks)
    read = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert [one["processed"] for one in read][-1] == whole["usage"]["prompt_tokens"]
    text = "".join(c["delta"]["content"] for chunk in chunks for c in chunk["choices"])
    assert text == whole["choices"][0]["message"]["content"]


async def test_every_choice_of_every_prompt(client: ClientFactory) -> None:
    engine = Witness()
    http = await client(engine)
    body = {
        "prompt": [f"{DOCUMENT}\n{QUESTION}", f"{DOCUMENT[34:]}\nb"],
        "n": 2,
        "return_evidence": True,
    }
    evidence = (await http.post(TEXT, json=body)).json()["evidence"]
    assert [choice["index"] for choice in evidence["choices"]] == [0, 1, 2, 3]
    sizes = [choice["intervals"][-1]["end"] for choice in evidence["choices"]]
    lengths = [seen.request.num_prompt_tokens for seen in engine.seen]
    assert sizes == [lengths[0], lengths[0], lengths[1], lengths[1]]
    assert [choice["baseline"]["prompt_tokens"] for choice in evidence["choices"][::2]] == lengths[
        2:
    ]


async def test_settings_are_passed_on(client: ClientFactory) -> None:
    engine = Witness()
    http = await client(engine)
    asked = {"layers": [3, 0, 3], "interval": 32, "sinks": 0, "baseline": False}
    answer = (await http.post(CHAT, json={**ASK, "return_evidence": asked})).json()
    assert answer["evidence"]["settings"] == {
        "layers": [0, 3],
        "interval": 32,
        "sinks": 0,
        "neutral_question": None,
    }
    (choice,) = answer["evidence"]["choices"]
    assert choice["baseline"] is None
    assert all(one["lift"] is None for one in choice["intervals"])
    assert len(engine.seen) == 1


async def test_ids_have_no_question_to_replace(client: ClientFactory) -> None:
    engine = Witness()
    http = await client(engine)
    ids = list(range(40, 140))
    body = {"prompt": ids, "return_evidence": True}
    (choice,) = (await http.post(TEXT, json=body)).json()["evidence"]["choices"]
    assert choice["baseline"] is None
    assert [(one["start"], one["end"]) for one in choice["intervals"]] == [(0, 64), (64, 100)]
    assert len(engine.seen) == 1
    refused = await http.post(TEXT, json={**body, "return_evidence": {"baseline": True}})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "return_evidence.baseline"
    assert len(engine.seen) == 1


async def test_a_question_that_is_all_there_is_has_no_baseline(client: ClientFactory) -> None:
    engine = Witness()
    http = await client(engine)
    body = {"prompt": f"{DOCUMENT} {QUESTION}", "max_tokens": 4, "return_evidence": True}
    (choice,) = (await http.post(TEXT, json=body)).json()["evidence"]["choices"]
    assert choice["baseline"] is None
    assert "return_evidence.question" in choice["note"]
    assert {one["lift"] for one in choice["intervals"]} == {None}
    assert len(engine.seen) == 1, "nothing is asked that nothing can be compared with"

    refused = await http.post(TEXT, json={**body, "return_evidence": {"baseline": True}})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "return_evidence.baseline"
    assert "return_evidence.question" in refused.json()["error"]["message"]

    named = {**body, "return_evidence": {"question": QUESTION}}
    (choice,) = (await http.post(TEXT, json=named)).json()["evidence"]["choices"]
    assert choice["baseline"]["common_tokens"] >= 64
    assert "note" not in choice
    assert choice["intervals"][0]["lift"] is not None


async def test_a_neutral_question_without_room_is_left_out(client: ClientFactory) -> None:
    engine = Witness()
    http = await client(engine)
    body = {"prompt": "zq" * 1020 + "\n\n?", "max_tokens": 1, "return_evidence": True}
    answer = await http.post(TEXT, json=body)
    assert answer.status_code == 200
    (choice,) = answer.json()["evidence"]["choices"]
    assert choice["baseline"] is None
    assert len(engine.seen) == 1


async def test_images_are_named(client: ClientFactory) -> None:
    engine = Witness()
    http = await client(engine, family="qwen2_5_vl")
    images = [_picture(size) for size in ((140, 84), (84, 84))]
    content = [images[0], {"type": "text", "text": DOCUMENT}, images[1], images[0]]
    content.append({"type": "text", "text": QUESTION})
    body = {**ASK, "messages": [{"role": "user", "content": content}]}
    body["return_evidence"] = {"interval": 16}
    evidence = (await http.post(CHAT, json=body)).json()["evidence"]
    asked, neutral = (seen.request for seen in engine.seen)
    assert len(asked.image_spans) == 3
    assert neutral.image_spans == asked.image_spans
    for number, span in enumerate(asked.image_spans):
        met = [
            one
            for one in evidence["choices"][0]["intervals"]
            if one["start"] < span.end and span.offset < one["end"]
        ]
        assert met == [
            one for one in evidence["choices"][0]["intervals"] if number in one["images"]
        ]
        assert all(f"[image {number}]" in one["text"] for one in met)
    assert all("image_pad" not in one["text"] for one in evidence["choices"][0]["intervals"])


def _picture(size: tuple[int, int]) -> dict[str, Any]:
    file = io.BytesIO()
    Image.new("RGB", size, (200, 30, 30)).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


# -- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failed_baseline_costs_only_the_baseline(
    client: ClientFactory, stream: bool
) -> None:
    engine = Witness()
    engine.baseline_error = RequestError("overloaded", "no room")
    http = await client(engine)
    answer = await http.post(CHAT, json={**ASK, "stream": stream})
    assert answer.status_code == 200
    evidence = (events(answer.text)[-2] if stream else answer.json())["evidence"]
    (choice,) = evidence["choices"]
    assert choice["baseline"] is None
    assert choice["intervals"][0]["lift"] is None
    assert choice["intervals"][0]["mass"] > 0


async def test_a_failed_answer_ends_the_baseline(client: ClientFactory) -> None:
    engine = Witness(error=RequestError("internal", "broken"), error_after=2, delay_s=0.01)
    http = await client(engine)
    answer = await http.post(CHAT, json=ASK)
    assert answer.status_code == 500
    assert engine.running == 0


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ("yes", "return_evidence"),
        (1, "return_evidence"),
        ({"interval": 8}, "return_evidence.interval"),
        ({"interval": 64.5}, "return_evidence.interval"),
        ({"sinks": -1}, "return_evidence.sinks"),
        ({"layers": []}, "return_evidence.layers"),
        ({"layers": [4]}, "return_evidence.layers"),
        ({"layers": [-1, 2]}, "return_evidence.layers"),
        ({"heads": [1]}, "return_evidence.heads"),
        ({"question": ""}, "return_evidence.question"),
        ({"question": "Who?"}, "return_evidence.question"),
        ({"question": QUESTION, "baseline": False}, "return_evidence.question"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_settings_are_refused_before_any_work(
    client: ClientFactory, asked: Any, param: str, stream: bool
) -> None:
    engine = Witness()
    http = await client(engine)
    answer = await http.post(CHAT, json={**ASK, "return_evidence": asked, "stream": stream})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert engine.seen == []


async def test_too_many_intervals_are_refused(client: ClientFactory) -> None:
    engine = Witness()
    http = await client(engine)
    body = {"prompt": ["zq" * 900] * 60, "n": 8, "return_evidence": {"interval": 16}}
    answer = await http.post(TEXT, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "return_evidence.interval"
    assert engine.seen == []


# -- where the question stands --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("doc\n\nmore\n\nwho?", f"doc\n\nmore\n\n{NEUTRAL_QUESTION}"),
        ("doc\nmore\n\nwho\nand why?\n", f"doc\nmore\n\n{NEUTRAL_QUESTION}"),
        ("doc\nmore\nwho?", f"doc\nmore\n{NEUTRAL_QUESTION}"),
        ("who?", NEUTRAL_QUESTION),
        ("", NEUTRAL_QUESTION),
        ("\n\nwho?\n\n", f"\n\n{NEUTRAL_QUESTION}"),
    ],
)
def test_the_question_is_the_last_paragraph(text: str, expected: str) -> None:
    assert neutral_text(text, EvidenceOptions(), "prompt") == expected


def test_the_question_may_be_named() -> None:
    chosen = EvidenceOptions(question="who?")
    assert neutral_text("who? doc\n\nwho? it", chosen, "prompt") == (
        f"who? doc\n\n{NEUTRAL_QUESTION} it"
    )
    with pytest.raises(BadRequestError, match="does not occur in prompt"):
        neutral_text("why?", chosen, "prompt")


def test_only_the_last_user_message_changes() -> None:
    turns = (
        Turn("system", "be brief"),
        Turn("user", "doc\n\nfirst?"),
        Turn("assistant", "yes"),
        Turn("user", ("see", 0, "doc\n\nwho?", 1, " "), "ann"),
        Turn("assistant", "well"),
    )
    changed = ("see", 0, f"doc\n\n{NEUTRAL_QUESTION}", 1, " ")
    want = (*turns[:3], Turn("user", changed, "ann"), turns[4])
    assert neutral_turns(turns, True) == want
    named = ("NEUTRAL", 0, "doc\n\nwho?", 1, " ")
    got = neutral_turns(turns, EvidenceOptions(question="see"))
    assert got is not None
    assert got[3].content == tuple(p if p != "NEUTRAL" else NEUTRAL_QUESTION for p in named)
    assert neutral_turns(turns[:1], True) is None
    assert neutral_turns(turns, False) is None
    assert neutral_turns(turns, EvidenceOptions(baseline=False)) is None
    (picture,) = neutral_turns((Turn("user", (0,)),), True) or ()
    assert picture.content == (0, NEUTRAL_QUESTION)
