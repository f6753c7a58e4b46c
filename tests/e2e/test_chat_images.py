"""The main job through a real client: images over HTTP in, streamed answers out."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageOps

from tests.checkpoints import checkpoint, hf_processor
from tests.e2e.client import (
    chat_body,
    encoded,
    first_logprobs,
    hf_count,
    noise,
    openai_client,
    post,
    scene,
    user,
)
from tests.e2e.conftest import Starter
from tests.e2e.server import MODEL_NAME, Served

SAME = 1e-4
"""Largest |Δ log-probability| between two ways of computing the same thing in fp32."""


@pytest.fixture(scope="module")
def processor(served: Served, models: Path) -> Any:
    return hf_processor(checkpoint("qwen2_5_vl", models))


def close(a: dict[tuple[int, ...], float], b: dict[tuple[int, ...], float]) -> bool:
    """Both name the same tokens, but for the last, which may be tied, within SAME."""
    shared = a.keys() & b.keys()
    return len(shared) >= len(a) - 1 and all(abs(a[k] - b[k]) <= SAME for k in shared)


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
def test_the_openai_client_streams_and_collects_the_same_answer(
    served: Served, processor: Any, kind: str
) -> None:
    image = scene(3, (150, 110))
    request: dict[str, Any] = {
        "model": MODEL_NAME,
        "messages": user("What is in ", encoded(image, kind), " this picture?"),
        "max_completion_tokens": 24,
        "temperature": 0,
    }
    with openai_client(served) as client:
        whole = client.chat.completions.create(**request)
        chunks = list(
            client.chat.completions.create(
                **request, stream=True, stream_options={"include_usage": True}
            )
        )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert text
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert [r for r in reasons if r] == [whole.choices[0].finish_reason]
    assert reasons[-1]
    assert chunks[-1].choices == []
    assert whole.usage is not None
    last = chunks[-1].usage
    assert last is not None
    assert last.total_tokens == whole.usage.total_tokens
    assert last.prompt_tokens == whole.usage.prompt_tokens
    assert last.prompt_tokens_details is not None
    assert last.prompt_tokens_details.cached_tokens == last.prompt_tokens - 1
    asked: list[str | Image.Image] = ["What is in ", image, " this picture?"]
    assert whole.usage.prompt_tokens == hf_count(processor, asked)
    assert 1 <= whole.usage.completion_tokens <= 24


def test_a_repeated_image_is_neither_decoded_nor_encoded(served: Served) -> None:
    picture = encoded(scene(4, (200, 160)), "png")
    body = chat_body("Again: ", picture, max_tokens=1)
    _, first, cold = post(served, "/v1/chat/completions", body)
    encodes = served.metrics()["images_encoded_total"]
    _, second, warm = post(served, "/v1/chat/completions", body)
    assert "encode;dur=0.00" not in first["server-timing"]
    assert "encode;dur=0.00" in second["server-timing"]
    assert "image_decode;dur=0.00" in second["server-timing"]
    assert served.metrics()["images_encoded_total"] == encodes
    assert warm["choices"] == cold["choices"]
    assert warm["usage"]["prompt_tokens"] == cold["usage"]["prompt_tokens"]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_img_01_orientation_is_applied(served: Served, orientation: int) -> None:
    picture = Image.new("RGB", (64, 32), "red")
    picture.paste("blue", (32, 0, 64, 32))
    # Without it a flip from top to bottom would change nothing.
    picture.paste("yellow", (0, 0, 16, 16))
    exif = Image.Exif()
    exif[0x0112] = orientation
    photo = encoded(picture, "jpeg", exif=exif)
    with Image.open(_file(photo)) as stored:
        upright = ImageOps.exif_transpose(stored).convert("RGB")
    question = ("Where is red?",)
    turned = first_logprobs(served, photo, *question)
    assert close(turned, first_logprobs(served, encoded(upright, "png"), *question))
    if orientation != 1:
        flat = first_logprobs(served, encoded(picture, "jpeg"), *question)
        assert not close(turned, flat)
    ask = chat_body(photo, *question, max_tokens=1)
    straight = chat_body(encoded(upright, "png"), *question, max_tokens=1)
    _, _, one = post(served, "/v1/chat/completions", ask)
    _, _, other = post(served, "/v1/chat/completions", straight)
    assert one["usage"] == other["usage"]


def test_img_15_parts_keep_their_order(served: Served) -> None:
    small, large = encoded(noise(1, (60, 60)), "png"), encoded(noise(2, (170, 60)), "png")
    orders: list[tuple[str | bytes, ...]] = [
        ("one", small, "two", large, "six"),
        ("one", large, "two", small, "six"),
        (small, "one", large, "two", "six"),
        ("one", "two", small, large, "six"),
    ]
    prompts, lengths = [], []
    for parts in orders:
        status, _, rendered = post(served, "/v1/render", chat_body(*parts))
        assert status == 200
        shown = [p["num_tokens"] if p["type"] == "image" else p["text"] for p in rendered["pieces"]]
        sizes = {small: 4, large: 12}
        wanted: list[str | int] = [sizes[p] if isinstance(p, bytes) else p for p in parts]
        order = [p for p in shown if isinstance(p, int)]
        assert order == [p for p in wanted if isinstance(p, int)]
        text = "".join(f"[{p}]" if isinstance(p, int) else p for p in shown)
        places = [text.index(w if isinstance(w, str) else f"[{w}]") for w in wanted]
        assert places == sorted(places)
        prompts.append(tuple(rendered["token_ids"]))
        lengths.append(rendered["num_tokens"])
    assert len(set(prompts)) == len(orders)
    answers = [first_logprobs(served, *parts) for parts in orders]
    for i, one in enumerate(answers):
        assert not any(close(one, other) for other in answers[i + 1 :])
    # The fourth joins two texts, where a tokenizer may merge tokens; here none does.
    assert len(set(lengths)) == 1


@pytest.mark.parametrize(
    "pictures", [60, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_img_11_no_picture_is_served_with_another_ones_rows(served: Served, pictures: int) -> None:
    """Each picture is asked about cold, warm, and as another file with the same pixels, whose key
    is unrelated: a key that collides for one of the files does not collide for the other."""
    drawn = [noise(10_000 + seed, (8, 8)) for seed in range(pictures)]
    files = [encoded(image, "png") for image in drawn]
    twins = [encoded(image, "png", comment=f"twin {i}") for i, image in enumerate(drawn)]
    assert not set(files) & set(twins)

    def ask(data: bytes) -> dict[tuple[int, ...], float]:
        return first_logprobs(served, "Which?", data)

    before = served.metrics()["images_encoded_total"]
    with ThreadPoolExecutor(4) as pool:
        cold = list(pool.map(ask, files))
        encoded_cold = served.metrics()["images_encoded_total"] - before
        warm = list(pool.map(ask, files[:60]))
        encoded_warm = served.metrics()["images_encoded_total"] - before - encoded_cold
        twin = list(pool.map(ask, twins))
    assert encoded_cold == pictures
    assert encoded_warm == 0 or pictures > 60
    assert all(map(close, cold, twin))
    assert all(close(a, b) for a, b in zip(cold, warm, strict=False))
    distinct = {tuple(sorted(a.items())) for a in cold}
    assert len(distinct) > 0.99 * pictures


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["smolvlm", "qwen2_5_vl", "qwen3_vl"])
def test_usage_equals_the_processors_count_for_200_pictures(
    serve: Starter, models: Path, family: str
) -> None:
    """Pictures of many sizes, shapes, encodings and orientations, one to three in a request."""
    server = serve(family)
    processor = hf_processor(checkpoint(family, models))
    kinds = ("jpeg", "png", "webp")
    requests: list[list[bytes]] = []
    shown = 0
    while shown < 200:
        count = 1 + len(requests) % 3
        images = []
        for _ in range(count):
            # Sizes from thumbnails to phone photos, landscape and portrait by turns.
            edge = 24 + (shown * 37) % 1200
            other = max(16, edge * (3 + shown % 5) // 7)
            size = (edge, other) if shown % 2 else (other, edge)
            exif = Image.Exif()
            exif[0x0112] = 1 + shown % 8
            images.append(encoded(scene(shown, size), kinds[shown % 3], exif=exif))
            shown += 1
        requests.append(images)
    for parts in requests:
        _, _, answer = post(server, "/v1/chat/completions", chat_body("See ", *parts, max_tokens=1))
        upright = [_upright(data) for data in parts]
        assert answer["usage"]["prompt_tokens"] == hf_count(processor, ["See ", *upright])


def _upright(data: bytes) -> Image.Image:
    with Image.open(_file(data)) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


def _file(data: bytes) -> io.BytesIO:
    return io.BytesIO(data)
