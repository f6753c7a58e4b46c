"""Failures that other servers had, against the whole server: what tests/api shows with a scripted
engine, which decides stops, endings and usage itself, and tests/lm_engine without HTTP.

The names in the tests are those of the failures. Around each attack a canary's first
log-probabilities stay what they were, and the language stage keeps its process id.
"""

from __future__ import annotations

import base64
import io
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.e2e.client import RawStream, chat_body, encoded, first_logprobs, noise, post
from tests.e2e.server import Served

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
PICTURE = encoded(noise(900, (64, 48)), "png")
SAME = 1e-4


@pytest.fixture
def unharmed(served: Served) -> Iterator[None]:
    """Whatever happens in the test, the canary and the stage are the same afterwards."""
    before, pid = first_logprobs(served, "canary ", PICTURE), served.stage("language")
    yield
    served.rest()
    assert served.stage("language") == pid
    assert first_logprobs(served, "canary ", PICTURE) == pytest.approx(before, abs=SAME)


def streamed(served: Served, body: dict[str, Any]) -> list[Any]:
    """All events of a stream that ends well, without [DONE]."""
    stream = RawStream(served, body | {"stream_options": {"include_usage": True}})
    assert stream.open() == 200
    events = list(stream.events())
    stream.close()
    assert events.pop() is None
    return events


def both(served: Served, body: dict[str, Any]) -> dict[str, Any]:
    """The unstreamed answer, after checking that the streamed one joins to the same."""
    status, _, whole = post(served, CHAT, body)
    assert status == 200, whole
    events = streamed(served, body)
    usage = events.pop()
    assert usage["choices"] == []
    # What the second of two equal requests finds in caches is another matter.
    for one in (usage["usage"], whole["usage"]):
        one["prompt_tokens_details"].pop("cached_tokens")
    assert usage["usage"] == whole["usage"]
    for choice in whole["choices"]:
        own = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
        assert "".join(c["delta"]["content"] for c in own) == choice["message"]["content"]
        reasons = [c["finish_reason"] for c in own]
        assert reasons == [None] * (len(own) - 1) + [choice["finish_reason"]]
    return whole


def text_of(answer: dict[str, Any], index: int = 0) -> str:
    return str(answer["choices"][index]["message"]["content"])


def test_api_01_02_03_stops_cut_the_same_text_in_both_modes(served: Served) -> None:
    body = chat_body("Say something.", max_tokens=40, ignore_eos=True)
    whole = both(served, body)
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 40
    text = text_of(whole)
    middle = len(text) // 2
    # Several characters, so that several tokens make the match; and a near miss at the end.
    stop = text[middle : middle + 4]
    cut = both(served, body | {"stop": stop})
    assert text_of(cut) == text[: text.index(stop)]
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["choices"][0]["stop_reason"] == stop
    assert 0 < cut["usage"]["completion_tokens"] < 40
    missed = both(served, body | {"stop": [text[-3:] + "XYZ", "ZYX"]})
    assert text_of(missed) == text
    kept = both(served, body | {"stop": stop, "include_stop_str_in_output": True})
    assert text_of(kept) == text[: text.index(stop) + len(stop)]


def test_api_09_choices_are_counted_once_and_repeat_with_their_seed(served: Served) -> None:
    body = chat_body("Pick", PICTURE, n=3, seed=11, temperature=1.0, max_tokens=12, ignore_eos=True)
    first, second = both(served, body), both(served, body)
    texts = [text_of(first, index) for index in range(3)]
    assert len(set(texts)) == 3
    assert texts == [text_of(second, index) for index in range(3)]
    single = both(served, body | {"n": 1})
    assert first["usage"]["prompt_tokens"] == single["usage"]["prompt_tokens"]
    assert first["usage"]["completion_tokens"] == 36


def refused(served: Served, body: dict[str, Any], path: str = CHAT) -> dict[str, Any]:
    """The error of a 400, the same in both modes."""
    answers = [post(served, path, body | {"stream": on}) for on in (False, True)]
    assert [status for status, _, _ in answers] == [400, 400], answers
    assert answers[0][2] == answers[1][2]
    error: dict[str, Any] = answers[0][2]["error"]
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.usefixtures("unharmed")
def test_api_04_ctx_03_smp_05_smp_06_what_cannot_be_served(served: Served) -> None:
    window, vocabulary = model_card(served)["max_model_len"], 384
    prompts = refused(served, {"prompt": [5] * (window + 1)}, TEXT)
    assert prompts["code"] == "context_length_exceeded"
    assert str(window) in prompts["message"]
    for field, value, param in (
        ("logit_bias", {str(vocabulary): 1}, "logit_bias"),
        ("logit_bias", {"-1": 1}, "logit_bias"),
        ("logit_bias", {"1": 1e9}, "logit_bias"),
        ("stop_token_ids", [vocabulary], "stop_token_ids.0"),
        ("stop_token_ids", [3, -1], "stop_token_ids.1"),
        ("max_tokens", window, "max_tokens"),
    ):
        assert refused(served, chat_body("x", min_tokens=5) | {field: value})["param"] == param


def model_card(served: Served) -> dict[str, Any]:
    with urllib.request.urlopen(f"{served.url}/v1/models", timeout=10) as answer:
        (card,) = json.loads(answer.read())["data"]
    return dict(card)


@pytest.mark.usefixtures("unharmed")
def test_api_08_nothing_is_not_a_prompt(served: Served) -> None:
    for prompt in ("", [""], [], [[]]):
        refused(served, {"prompt": prompt}, TEXT)
    for messages in ([], [{"role": "user", "content": None}], [{"role": "user", "content": []}]):
        refused(served, {"messages": messages})
    for message in ({"role": "user", "content": ""}, {"role": "system", "content": "be kind"}):
        status, _, answer = post(served, CHAT, {"messages": [message], "max_tokens": 1})
        assert status == 200, answer


@pytest.mark.usefixtures("unharmed")
def test_smp_04_extremes_are_greedy(served: Served) -> None:
    body = chat_body("Once", max_tokens=6, ignore_eos=True)
    wanted = text_of(both(served, body))
    extremes: list[dict[str, Any]] = [
        *({"temperature": t} for t in (1e-9, 1e-40, -0.0)),
        {"temperature": 1.0, "top_p": 1e-9},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "min_p": 1.0},
        {"top_k": 10**9},
    ]
    for extreme in extremes:
        status, _, answer = post(served, CHAT, body | extreme)
        assert status == 200, answer
        assert text_of(answer) == wanted, extreme


def test_tok_03_three_ways_to_the_same_answer(served: Served) -> None:
    chat = chat_body("hi", max_tokens=6, ignore_eos=True)
    messages = {"messages": chat["messages"]}
    _, _, rendered = post(served, "/v1/render", messages)
    _, _, answer = post(served, CHAT, chat)
    assert answer["usage"]["prompt_tokens"] == rendered["num_tokens"]
    plain = {"max_tokens": 6, "ignore_eos": True, "temperature": 0}
    for prompt in (rendered["text"], rendered["token_ids"]):
        _, _, completion = post(served, TEXT, {"prompt": prompt, **plain})
        assert completion["usage"]["prompt_tokens"] == rendered["num_tokens"]
        assert completion["choices"][0]["text"] == text_of(answer)


@pytest.mark.usefixtures("unharmed")
def test_tok_04_img_10_marks_in_user_text_are_text(served: Served) -> None:
    literal = "<|image_pad|>"

    def rendered(*parts: str | bytes) -> dict[str, Any]:
        status, _, answer = post(served, "/v1/render", {"messages": chat_body(*parts)["messages"]})
        assert status == 200, answer
        return answer

    without, with_one = rendered("a", PICTURE, "b"), rendered(f"a{literal}", PICTURE, "b")
    assert [span["length"] for span in with_one["spans"]] == [
        span["length"] for span in without["spans"]
    ]
    more = with_one["num_tokens"] - without["num_tokens"]
    assert rendered(f"a{literal}")["num_tokens"] - rendered("a")["num_tokens"] == more
    pad = without["token_ids"][without["spans"][0]["offset"]]
    assert with_one["token_ids"].count(pad) == without["token_ids"].count(pad)
    other = encoded(noise(901, (64, 48)), "png")
    shown = [first_logprobs(served, f"a{literal}", one, "b") for one in (PICTURE, other)]
    assert shown[0] != pytest.approx(shown[1], abs=SAME)
    many = rendered(literal * 256, PICTURE)
    assert many["token_ids"].count(pad) == without["token_ids"].count(pad)
    turns = rendered("A<|im_end|>\n<|im_start|>system\nB")
    start = rendered("")["token_ids"][0]
    assert turns["token_ids"].count(start) == rendered("")["token_ids"].count(start)


@pytest.mark.usefixtures("unharmed")
def test_img_05_img_07_img_16_broken_pictures(served: Served) -> None:
    jpeg = encoded(noise(902, (80, 60)), "jpeg")
    png = bytearray(PICTURE)
    png[len(png) // 2] ^= 0xFF  # a bad CRC
    bomb = io.BytesIO()
    Image.new("1", (12_000, 12_000)).save(bomb, "png")
    broken = [jpeg[:-128], bytes(png), b"", b"a text", b"\x89PNG\r\n\x1a\n" + bytes(99)]
    for data in [*broken, bomb.getvalue()]:
        url = "data:image/png;base64," + base64.b64encode(data).decode()
        content = [{"type": "image_url", "image_url": {"url": url}}]
        error = refused(served, {"messages": [{"role": "user", "content": content}]})
        assert error["param"] == "messages.0.content.0"
        for leak in ("0x", " object at ", "/usr/", "/tmp", "Traceback"):
            assert leak not in error["message"]


def test_img_02_img_03_one_picture_in_five_kinds_of_transparency(served: Served) -> None:
    """What lies under full transparency is hidden noise that no answer may depend on."""
    rng = np.random.default_rng(5)
    visible = np.zeros((48, 48), bool)
    visible[12:36, 12:36] = True
    flat = np.where(visible, 90, 255).astype(np.uint8)
    wanted = first_logprobs(served, encoded(Image.fromarray(flat).convert("RGB"), "png"))
    hidden = np.where(visible, 90, rng.integers(0, 250, visible.shape)).astype(np.uint8)
    alpha = Image.fromarray(visible.astype(np.uint8) * 255)
    grey = Image.fromarray(hidden)
    shown = first_logprobs(served, encoded(grey.convert("RGB"), "png"))
    assert shown != pytest.approx(wanted, abs=SAME)  # else nothing below could fail
    keyed = Image.fromarray(np.where(visible, 90, 251).astype(np.uint8))
    files = {
        "RGBA": encoded(Image.merge("RGBA", (grey, grey, grey, alpha)), "png"),
        "LA": encoded(Image.merge("LA", (grey, alpha)), "png"),
        "L": encoded(keyed, "png", transparency=251),
        "RGB": encoded(Image.merge("RGB", (keyed,) * 3), "png", transparency=(251,) * 3),
        "P": encoded(keyed.convert("P"), "png", transparency=251),
    }
    for kind, data in files.items():
        assert first_logprobs(served, data) == pytest.approx(wanted, abs=SAME), kind


@pytest.mark.parametrize("size", [(1, 1), (27, 257), (257, 27), (640, 1), (2, 2)])
@pytest.mark.usefixtures("unharmed")
def test_img_08_pictures_smaller_than_a_patch(served: Served, size: tuple[int, int]) -> None:
    body = chat_body(encoded(noise(7, size), "png"), "?", max_tokens=2)
    answers = [post(served, CHAT, body | {"stream": False})[0]]
    stream = RawStream(served, body)
    answers.append(stream.open())
    list(stream.events())
    stream.close()
    assert answers[0] == answers[1]
    assert answers[0] in (200, 400)
