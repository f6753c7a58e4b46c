"""Chat requests with images for the benchmarks that measure one server against a promise.

Owns: request bodies, pictures made of a seed, one blocking call with its times, and a table of
verdicts. Does not own: servers (servers.py), or the text client that peers are compared with
(client.py).
"""

from __future__ import annotations

import base64
import http.client
import io
import json
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

MODEL = "m"
"""The name under which servers.py serves."""
_TIMING = re.compile(r"(\w+);dur=([0-9.]+)")
_AHEAD = re.compile(r'ahead;desc="(\d+) tokens"')


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: dict[str, Any]
    headers: dict[str, str]
    """Names in lower case."""
    elapsed_s: float
    """From the last byte of the request to the last byte of the answer."""

    @property
    def timing_s(self) -> dict[str, float]:
        """The server's own breakdown."""
        found = _TIMING.findall(self.headers.get("server-timing", ""))
        return {name: float(milliseconds) / 1e3 for name, milliseconds in found}

    @property
    def ahead_tokens(self) -> int:
        """Prompt tokens computed before the last image was encoded."""
        match = _AHEAD.search(self.headers.get("server-timing", ""))
        return int(match[1]) if match else 0


def call(port: int, path: str, body: dict[str, Any] | bytes, *, timeout_s: float = 600.0) -> Answer:
    """POST of one body, already encoded where its making must not count."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        sent_s = time.perf_counter()
        response = connection.getresponse()
        raw = response.read()
        elapsed_s = time.perf_counter() - sent_s
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, json.loads(raw), headers, elapsed_s)
    finally:
        connection.close()


def chat(port: int, body: dict[str, Any] | bytes, *, timeout_s: float = 600.0) -> Answer:
    return call(port, "/v1/chat/completions", body, timeout_s=timeout_s)


def message(*parts: str | bytes) -> list[dict[str, Any]]:
    """One user message of texts and image files, in their order."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_uri(part)}}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


def data_uri(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def picture(seed: int, size: tuple[int, int]) -> Image.Image:
    """(width, height): smooth shapes with some noise, different for every seed."""
    width, height = size
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (5, 7, 3), dtype=np.uint8)
    smooth = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
    grain = rng.integers(-12, 13, (height, width, 3))
    return Image.fromarray(np.clip(np.asarray(smooth) + grain, 0, 255).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "jpeg", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@dataclass(frozen=True, slots=True)
class Verdict:
    """One promise: what was found, what was allowed, and whether it holds (None: for reading)."""

    what: str
    found: str
    allowed: str = ""
    holds: bool | None = None


def table(verdicts: Iterable[Verdict]) -> str:
    words = {True: "ok", False: "VIOLATED", None: ""}
    rows = [("what", "found", "allowed", "verdict")]
    rows += [(v.what, v.found, v.allowed, words[v.holds]) for v in verdicts]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def all_hold(verdicts: Iterable[Verdict]) -> bool:
    return all(verdict.holds is not False for verdict in verdicts)


def quantile(values: Sequence[float], q: float) -> float:
    """The value that a share `q` of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]
