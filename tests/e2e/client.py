"""Requests and pictures for a served model.

Owns: message parts, an openai client, one streamed request on a bare connection that can be left at
any point, and pictures made of a seed. Does not own: servers (server.py) or assertions.
"""

from __future__ import annotations

import base64
import http.client
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from openai import OpenAI
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tests.e2e.server import MODEL_NAME, Served

Part = str | bytes
"""A text, or the bytes of an image file."""

_KINDS = {b"\x89PNG": "png", b"\xff\xd8": "jpeg", b"RIFF": "webp"}


@contextmanager
def openai_client(server: Served) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=120
    ) as client:
        yield client


def data_uri(data: bytes) -> str:
    kind = next((name for magic, name in _KINDS.items() if data.startswith(magic)), "png")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def user(*parts: Part) -> list[dict[str, Any]]:
    """One user message of texts and images, in their order."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_uri(part)}}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


def chat_body(*parts: Part, **fields: Any) -> dict[str, Any]:
    """A greedy request; `fields` replace or add."""
    body = {"model": MODEL_NAME, "messages": user(*parts), "max_tokens": 8, "temperature": 0.0}
    return body | fields


def post(
    server: Served, path: str, body: dict[str, Any]
) -> tuple[int, dict[str, str], dict[str, Any]]:
    """(status, headers in lower case, JSON body)."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return response.status, headers, json.loads(response.read())
    finally:
        connection.close()


def first_logprobs(server: Served, *parts: Part, top: int = 8) -> dict[tuple[int, ...], float]:
    """Log-probabilities of the most likely first tokens, by the token's bytes."""
    status, _, answer = post(
        server,
        "/v1/chat/completions",
        chat_body(*parts, max_tokens=1, logprobs=True, top_logprobs=top),
    )
    assert status == 200, answer
    (entry,) = answer["choices"][0]["logprobs"]["content"]
    return {tuple(one["bytes"]): one["logprob"] for one in entry["top_logprobs"]}


class RawStream:
    """A chat request on a connection of its own. `close` leaves it wherever it is."""

    def __init__(self, server: Served, body: dict[str, Any], *, stream: bool = True) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
        self._connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps(body | {"stream": stream}),
            {"Content-Type": "application/json"},
        )
        self._response: http.client.HTTPResponse | None = None

    def open(self) -> int:
        """Waits for the status."""
        if self._response is None:
            self._response = self._connection.getresponse()
        return self._response.status

    def headers(self) -> dict[str, str]:
        assert self._response is not None
        return {name.lower(): value for name, value in self._response.getheaders()}

    def events(self) -> Iterator[dict[str, Any] | None]:
        """Parsed events; None stands for [DONE]. Ends early when the server ends the stream."""
        self.open()
        assert self._response is not None
        for line in self._response:
            if line.startswith(b"data: "):
                payload = line[6:].strip()
                yield None if payload == b"[DONE]" else json.loads(payload)

    def close(self) -> None:
        if self._response is not None:
            self._response.close()
        self._connection.close()


def encoded(image: Image.Image, kind: str, comment: str = "", **options: Any) -> bytes:
    """An image file; a PNG's `comment` changes the file but no pixel."""
    file = io.BytesIO()
    if comment:
        info = PngInfo()
        info.add_text("Comment", comment)
        options["pnginfo"] = info
    image.save(file, kind, **options)
    return file.getvalue()


def noise(seed: int, size: tuple[int, int]) -> Image.Image:
    """(width, height) of independent pixels: any two seeds give clearly different pictures."""
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def scene(seed: int, size: tuple[int, int]) -> Image.Image:
    """A picture with the statistics of a photograph: detail that falls off with frequency
    (amplitude about 1 / f, as in natural scenes), correlated colours, light from one side."""
    width, height = size
    rng = np.random.default_rng(seed)
    layers = [_clouds(rng, width, height) for _ in range(2)]
    tint = rng.uniform(0.4, 1.0, (2, 3))
    light = np.linspace(rng.uniform(-0.4, 0.0), rng.uniform(0.0, 0.4), width)[None, :, None]
    mixed = sum(layer[..., None] * colour for layer, colour in zip(layers, tint, strict=True))
    pixels = 128 + 55 * (mixed + light) + rng.normal(0, 3, (height, width, 3))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def _clouds(rng: np.random.Generator, width: int, height: int) -> Any:
    fy, fx = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None, :]
    spectrum = rng.normal(size=(height, fx.size)) + 1j * rng.normal(size=(height, fx.size))
    field = np.fft.irfft2(spectrum / np.maximum(np.hypot(fx, fy), 1 / 512), s=(height, width))
    return (field - field.mean()) / max(float(field.std()), 1e-9)


def hf_count(processor: Any, parts: Sequence[str | Image.Image]) -> int:
    """Prompt tokens of one user message by transformers' own template and processor."""
    content = [
        {"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in parts
    ]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True
    )
    images = [p for p in parts if not isinstance(p, str)]
    ids = processor(text=[text], images=[images])["input_ids"]
    return len(ids[0])
