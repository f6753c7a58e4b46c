"""What a request can expect: POST /v1/estimate.

Owns: the route's body and answer. Does not own: the estimate (lm_engine/estimate.py), the rendering
that it shares with generating requests and their headers about it (completions.py, generation.py).

Nothing is computed, fetched images are read as far as their headers, and the language stage answers
in the middle of a step.
"""

from __future__ import annotations

import uuid
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Discriminator, RootModel, Tag
from starlette.requests import Request
from starlette.responses import Response

from api.completions import engine_requests, prepare_chat, prepare_text, promises_of, reserve
from api.errors import BadRequestError, from_engine, json_response
from api.schemas import ChatRequest, CompletionRequest
from api.server import Server
from lm_engine.outputs import Estimate, RequestError


def _route_of(value: Any) -> str:
    return "@chat" if isinstance(value, dict) and "messages" in value else "@text"


class EstimateRequest(
    RootModel[
        Annotated[
            Annotated[ChatRequest, Tag("@chat")] | Annotated[CompletionRequest, Tag("@text")],
            Discriminator(_route_of),
        ]
    ]
):
    """The body of either generating route, as it would be sent there."""


async def estimate(server: Server, request: Request) -> Response:
    model = server.ready_model()
    async with AsyncExitStack() as stack:
        ticket = reserve(server, request, stack)
        parsed, payload = await server.bodies.receive(request, EstimateRequest)
        body = parsed.root
        server.check_model_name(body.model)
        if isinstance(body, ChatRequest):
            prepared = await prepare_chat(server, model, body, payload, ticket, stack)
        else:
            prepared = await prepare_text(model, body)
        if len(prepared.prompts) != 1:
            raise BadRequestError(
                f"{len(prepared.prompts)} prompts were sent; ask for one at a time.", param="prompt"
            )
        (asked,) = engine_requests(
            model,
            body,
            prepared.prompts,
            name=f"estimate-{uuid.uuid4().hex}",
            tenant=request.state.tenant,
            received_s=payload.received_s,
        )
        asked = replace(asked, **promises_of(request))
        found = await server.client.estimate(asked, prepared.media)
    if isinstance(found, RequestError):
        raise from_engine(found)
    return json_response({"object": "estimate", "model": server.model_name, **_json(found)})


def _json(found: Estimate) -> dict[str, Any]:
    return {
        "prompt_tokens": found.prompt_tokens,
        "prompt_tokens_details": {
            "cached_tokens": found.cached_tokens,
            "image_tokens": found.image_tokens,
            "text_tokens": found.prompt_tokens - found.image_tokens,
        },
        "ttft_ms": _ms(found.ttft_s),
        "queue_ms": _ms(found.queue_s),
        "isolated_ttft_ms": _ms(found.isolated_s),
        "load": {
            "requests_running": found.running,
            "requests_waiting": found.waiting,
            "prompt_tokens_ahead": found.ahead_tokens,
        },
        "calibrated": found.calibrated,
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)
