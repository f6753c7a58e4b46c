"""Routes about tokens, which compute nothing on the model.

Owns: /tokenize, /detokenize and /v1/render. Does not own: the rendering (prompt.py) or the order
of checks of a generating request, which /v1/render shares (completions.py).
"""

from __future__ import annotations

import asyncio
import functools
from contextlib import AsyncExitStack
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from api.completions import prepare_chat, reserve
from api.errors import json_response
from api.prompt import Prompt
from api.sampling import check_token_ids
from api.schemas import ChatRequest, DetokenizeRequest, TokenizeRequest
from api.server import Server
from api.tokenizer import TextTokenizer


async def tokenize(server: Server, request: Request) -> Response:
    model = server.ready_model()
    async with AsyncExitStack() as stack:
        ticket = reserve(server, request, stack)
        body, payload = await server.bodies.receive(request, TokenizeRequest)
        server.check_model_name(body.model)
        if body.messages is None:
            work = functools.partial(
                model.frontend.prompts.text,
                body.prompt or "",
                add_special_tokens=body.add_special_tokens,
                max_tokens=model.info.max_model_len,
            )
            prompt = await asyncio.to_thread(work)
        else:
            as_chat = ChatRequest(
                messages=body.messages,
                add_generation_prompt=body.add_generation_prompt,
                chat_template_kwargs=body.chat_template_kwargs,
                mm_processor_kwargs=body.mm_processor_kwargs,
            )
            prepared = await prepare_chat(server, model, as_chat, payload, ticket, stack)
            prompt = prepared.prompts[0]
    tokenizer = model.frontend.tokenizer
    strings = (
        [tokenizer.token_text(i) for i in prompt.token_ids] if body.return_token_strs else None
    )
    return json_response(
        {
            "count": len(prompt.token_ids),
            "max_model_len": model.info.max_model_len,
            "tokens": list(prompt.token_ids),
            "token_strs": strings,
        }
    )


async def detokenize(server: Server, request: Request) -> Response:
    model = server.ready_model()
    async with AsyncExitStack() as stack:
        reserve(server, request, stack)
        body, _ = await server.bodies.receive(request, DetokenizeRequest)
        server.check_model_name(body.model)
        check_token_ids(body.tokens, model.info.vocab_size, "tokens")
        text = await asyncio.to_thread(model.frontend.tokenizer.decode, body.tokens)
    return json_response({"prompt": text})


async def render(server: Server, request: Request) -> Response:
    """A chat request as the model would get it: ids, pieces, image spans."""
    model = server.ready_model()
    async with AsyncExitStack() as stack:
        ticket = reserve(server, request, stack)
        body, payload = await server.bodies.receive(request, ChatRequest)
        server.check_model_name(body.model)
        prepared = await prepare_chat(server, model, body, payload, ticket, stack)
        prompt = prepared.prompts[0]
        keys = {item.key: place for place, item in reversed(list(enumerate(prepared.media)))}
        answer = {
            "model": server.model_name,
            "token_ids": list(prompt.token_ids),
            "num_tokens": len(prompt.token_ids),
            "text": prompt.text,
            "pieces": _pieces(prompt, model.frontend.tokenizer),
            "spans": [
                {
                    "offset": span.offset,
                    "length": span.length,
                    "row_offset": span.row_offset,
                    "image": keys[span.key],
                    "key": span.key.hex(),
                }
                for span in prompt.spans
            ],
            "images": [_image(item.param, item.plan) for item in prepared.media],
            "position_delta": prompt.position_delta,
        }
    return json_response(answer)


def _image(param: str, plan: Any) -> dict[str, Any]:
    return {
        "param": param,
        "width": plan.width,
        "height": plan.height,
        "tokens": plan.num_rows,
        "tiles": len(plan.tiles),
        "patches": plan.num_patches,
    }


def _pieces(prompt: Prompt, tokenizer: TextTokenizer) -> list[dict[str, Any]]:
    """Alternating runs of text and of image rows, in prompt order."""
    pieces: list[dict[str, Any]] = []
    at = 0

    def text_until(end: int) -> None:
        ids = list(prompt.token_ids[at:end])
        if ids:
            pieces.append({"type": "text", "text": tokenizer.decode(ids), "token_ids": ids})

    for span in prompt.spans:
        text_until(span.offset)
        pieces.append({"type": "image", "offset": span.offset, "num_tokens": span.length})
        at = span.end
    text_until(len(prompt.token_ids))
    return pieces
