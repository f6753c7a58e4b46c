"""Reading a request's body: bounded, and parsed without holding up the event loop.

Owns: the byte count while the body arrives, and JSON parsing. Long data URIs are cut out before
the parser sees them (`Payload.attachments`), because a JSON parser holds Python's lock for as
long as it copies a string. Does not own: who may send how much (admission.py), or schemas.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from api.errors import BadRequestError, BodyTooLargeError, from_validation

Model = TypeVar("Model", bound=BaseModel)

SMALL_BODY_BYTES = 64 * 2**10
"""Below this, parsing costs less than handing the work to a thread."""
MIN_ATTACHMENT_BYTES = 32 * 2**10
MAX_JSON_BYTES = 16 * 2**20
"""Of a body without its long data URIs: parsing holds Python's lock from end to end."""
MAX_JSON_CONTAINERS = 100_000
"""Objects and lists in one body: a bound on what parsing allocates. Braces inside of texts count
as well, so it is far above what a prompt of code holds."""


@dataclass(frozen=True, slots=True)
class Payload:
    """A body as received, its long data URIs replaced by references."""

    json: bytes
    attachments: dict[str, memoryview]
    """Reference -> the data URI's bytes."""
    received_s: float
    """Monotonic seconds when the last byte was read."""


class Pacer:
    """Lets one body chunk at a time through, a turn of the event loop each.

    uvicorn reads a connection again only when its last chunk was taken, so with many uploads at
    once the loop does a fraction of a millisecond of them per turn instead of all of them. A turn
    is taken when a chunk has arrived: a slow client holds nobody up.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def turn(self) -> None:
        async with self._turn:
            await asyncio.sleep(0)


async def read_body(request: Request, limit_bytes: int, pacer: Pacer) -> bytearray:
    """The whole body. Raises BodyTooLargeError as soon as the declared or the real size passes
    the limit, and ClientDisconnect when the client leaves."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit_bytes:
        raise _too_large(int(declared), limit_bytes)
    body = bytearray()
    async for chunk in request.stream():
        if len(body) + len(chunk) > limit_bytes:
            raise _too_large(len(body) + len(chunk), limit_bytes)
        body += chunk
        if len(body) > SMALL_BODY_BYTES:
            await pacer.turn()
    return body


def _too_large(size: int, limit_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"The request body has at least {size} bytes; this server takes {limit_bytes}. Send "
        "smaller or fewer images, or raise --max-body-bytes."
    )


def detach(body: bytearray) -> Payload:
    """Replaces each long `"url": "data:..."` by a reference that no client can guess.

    A quote that follows a backslash is part of some text, and the search for a closing quote
    stops at the first one; a value with any escape in it is left to the parser.
    """
    received_s = time.monotonic()
    view = memoryview(body)
    nonce = secrets.token_hex(16)
    kept: list[memoryview | bytes] = []
    attachments: dict[str, memoryview] = {}
    copied = at = 0
    while (at := body.find(b'"data:', at)) >= 0:
        end = body.find(b'"', at + 1)
        if end < 0:
            break
        long = end - at >= MIN_ATTACHMENT_BYTES
        if long and _is_url_value(body, at) and body.find(b"\\", at, end) < 0:
            reference = f"attached:{nonce}:{len(attachments)}"
            attachments[reference] = view[at + 1 : end]
            kept += [view[copied : at + 1], reference.encode()]
            copied = end
        at = end + 1
    kept.append(view[copied:])
    return Payload(b"".join(kept), attachments, received_s)


def _is_url_value(body: bytearray, quote: int) -> bool:
    before = bytes(body[max(0, quote - 64) : quote]).rstrip()
    return before.endswith(b":") and before[:-1].rstrip().endswith(b'"url"')


def parse(payload: Payload, model: type[Model]) -> Model:
    """Raises BadRequestError for anything that is not the JSON that `model` describes."""
    text = payload.json
    if len(text) > MAX_JSON_BYTES:
        raise BodyTooLargeError(
            f"The request has {len(text)} bytes beside its images; at most {MAX_JSON_BYTES} are "
            "read. Shorten the text."
        )
    if text.count(b"{") + text.count(b"[") > MAX_JSON_CONTAINERS:
        raise BadRequestError(
            f"The request body holds more than {MAX_JSON_CONTAINERS} JSON objects and lists."
        )
    try:
        data = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadRequestError(
            f"The request body is not valid JSON (line {error.lineno}, column {error.colno}).",
            code="invalid_json",
        ) from None
    if not isinstance(data, dict):
        raise BadRequestError("The request body must be a JSON object.", code="invalid_json")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise from_validation(error) from None


class BodyReader:
    """Reads and validates bodies of one server; large ones are parsed in `pool`."""

    def __init__(self, limit_bytes: int, pool: Executor):
        self.limit_bytes = limit_bytes
        self._pool = pool
        self._pacer = Pacer()

    async def receive(self, request: Request, model: type[Model]) -> tuple[Model, Payload]:
        """Raises BodyTooLargeError, BadRequestError, or ClientDisconnect."""
        body = await read_body(request, self.limit_bytes, self._pacer)
        if len(body) <= SMALL_BODY_BYTES:
            payload = detach(body)
            return parse(payload, model), payload
        loop = asyncio.get_running_loop()
        payload = await loop.run_in_executor(self._pool, detach, body)
        return await loop.run_in_executor(self._pool, parse, payload, model), payload
