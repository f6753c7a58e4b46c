"""The two generating routes, from a request's bytes to its response.

Owns: the order of checks (readiness, admission, body, model, images, context), what a request
holds while it runs, and the end of it all when a client leaves. Does not own: any single check.
"""

from __future__ import annotations

import asyncio
import functools
import math
import os
import uuid
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from api import chat
from api.admission import Ticket
from api.answers import AnswerShape, ChatShape, CompletionShape, prompt_logprobs_json
from api.body import Payload
from api.errors import BadRequestError, json_response
from api.events import EventFeed
from api.evidence import EvidenceReport
from api.generation import Run
from api.neutral import neutral_text, neutral_turns, options, wants_baseline
from api.prompt import Prompt, PromptBuilder
from api.sampling import (
    check_intervals,
    check_logprob_entries,
    check_token_ids,
    sampling_params,
)
from api.schemas import ChatRequest, CompletionRequest, Generation
from api.server import Model, Server
from api.streaming import EventStream, disconnected
from chunked_prefill.request import Request as EngineRequest
from lm_engine.client import MediaItem

T = TypeVar("T")

DEADLINE_HEADER = "x-ttft-deadline-ms"
TTFT_HEADER, TPOT_HEADER = "x-ttft-slo-ms", "x-tpot-slo-ms"
_LONGEST_MS = 86_400_000
INLINE_CHARS = 2000
"""Texts up to this length are tokenised on the event loop: it takes less than a thread's start."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is submitted: one entry per prompt."""

    prompts: tuple[Prompt, ...]
    media: tuple[MediaItem, ...] = ()
    baselines: tuple[Prompt | None, ...] = ()
    """With a neutral question, for each prompt; empty when none was asked for."""

    @property
    def prompt_tokens(self) -> int:
        """Of all that is computed, baselines included."""
        return sum(len(p.token_ids) for p in (*self.prompts, *self.baselines) if p is not None)


async def chat_completions(server: Server, request: Request) -> Response:
    model = server.ready_model()
    async with AsyncExitStack() as stack:
        body, payload = await _admitted(server, request, ChatRequest, stack)
        prepared = await _while_connected(
            request, prepare_chat(server, model, body, payload, request.state.ticket, stack)
        )
        shape = ChatShape(
            id=f"chatcmpl-{uuid.uuid4().hex}",
            model=server.model_name,
            with_logprobs=bool(body.logprobs),
            with_token_ids=bool(body.return_token_ids),
        )
        received_s = payload.received_s
        del payload  # the images are in files: their bytes must not be held a second time
        return await _respond(server, request, model, body, received_s, prepared, shape, stack)
    raise AssertionError("the stack swallows no exception")


async def completions(server: Server, request: Request) -> Response:
    model = server.ready_model()
    async with AsyncExitStack() as stack:
        body, payload = await _admitted(server, request, CompletionRequest, stack)
        prepared = await _while_connected(request, prepare_text(model, body))
        shape = CompletionShape(
            id=f"cmpl-{uuid.uuid4().hex}",
            model=server.model_name,
            with_logprobs=body.logprobs is not None,
            with_token_ids=bool(body.return_token_ids),
        )
        received_s = payload.received_s
        del payload
        return await _respond(server, request, model, body, received_s, prepared, shape, stack)
    raise AssertionError("the stack swallows no exception")


B = TypeVar("B", bound=Generation)


async def _admitted(
    server: Server, request: Request, schema: type[B], stack: AsyncExitStack
) -> tuple[B, Payload]:
    """Reserves before it reads."""
    request.state.ticket = reserve(server, request, stack)
    body, payload = await server.bodies.receive(request, schema)
    request.state.labels = body.labels()
    server.check_model_name(body.model)
    return body, payload


def reserve(server: Server, request: Request, stack: AsyncExitStack) -> Ticket:
    """Admits a request with the body that its headers declare, until `stack` ends. Raises
    OverloadedError or TooManyRequestsError."""
    most = server.config.max_body_bytes
    declared = request.headers.get("content-length", "")
    size = min(int(declared), most) if declared.isdecimal() else most
    ticket = server.admission.open(request.state.tenant, size)
    stack.callback(ticket.release)
    return ticket


async def prepare_chat(
    server: Server,
    model: Model,
    body: ChatRequest,
    payload: Payload,
    ticket: Ticket,
    stack: AsyncExitStack,
) -> Prepared:
    prompts = model.frontend.prompts
    conversation = chat.read_messages(body.messages, body.mm_processor_kwargs)
    chat.check_images(conversation, prompts, most=server.config.limit_mm_per_prompt)
    neutral = neutral_turns(conversation.turns, body.return_evidence)
    media = await server.media.load(conversation.sources, payload.attachments, ticket.add_media)
    stack.callback(media.close)
    work = functools.partial(
        chat.build,
        conversation,
        media,
        prompts,
        model.info,
        scope=(server.model_name.encode(), ticket.tenant.encode()),
        add_generation_prompt=body.add_generation_prompt,
        arguments=chat.template_arguments(body.chat_template_kwargs),
        neutral=neutral,
    )
    small = not media.spooled and len(payload.json) <= INLINE_CHARS
    # Hashing images takes turns with decoding them; tokenising long texts must wait for neither.
    pool = server.pool if media.spooled else None
    built = work() if small else await asyncio.get_running_loop().run_in_executor(pool, work)
    _check_not_empty(built.prompt.token_ids, "messages")
    return Prepared((built.prompt,), built.media, (built.baseline,))


async def prepare_text(model: Model, body: CompletionRequest) -> Prepared:
    given, chosen = body.prompt, options(body.return_evidence)
    texts = [given] if isinstance(given, str) else [p for p in given if isinstance(p, str)]
    prompts: list[Prompt] = []
    baselines: list[Prompt] = []
    if texts:
        neutral = [neutral_text(text, chosen, "prompt") for text in texts]
        every = texts + [text for text in neutral if text is not None]
        work = functools.partial(_tokenise, model, body, every)
        small = sum(map(len, every)) <= INLINE_CHARS
        found = work() if small else await asyncio.to_thread(work)
        prompts, baselines = found[: len(texts)], found[len(texts) :]
    elif isinstance(given, list):
        lists: list[Any] = given if given and isinstance(given[0], list) else [given]
        for place, ids in enumerate(lists):
            name = "prompt" if lists[0] is given else f"prompt.{place}"
            check_token_ids(ids, model.info.vocab_size, name)
            prompts.append(Prompt(tuple(ids)))
    for place, prompt in enumerate(prompts):
        _check_not_empty(prompt.token_ids, "prompt" if len(prompts) == 1 else f"prompt.{place}")
    if not prompts:
        _check_not_empty((), "prompt")
    return Prepared(tuple(prompts), baselines=tuple(baselines))


def _tokenise(model: Model, body: CompletionRequest, texts: list[str]) -> list[Prompt]:
    builder: PromptBuilder = model.frontend.prompts
    return [
        builder.text(
            text,
            add_special_tokens=body.add_special_tokens,
            max_tokens=model.info.max_model_len,
        )
        for text in texts
    ]


def _check_not_empty(ids: tuple[int, ...], param: str) -> None:
    if not ids:
        raise BadRequestError("The prompt is empty; it needs at least one token.", param=param)


async def _respond(
    server: Server,
    request: Request,
    model: Model,
    body: Generation,
    received_s: float,
    prepared: Prepared,
    shape: AnswerShape,
    stack: AsyncExitStack,
) -> Response:
    requests = engine_requests(
        model,
        body,
        prepared.prompts,
        name=shape.id,
        tenant=request.state.tenant,
        received_s=received_s,
    )
    promises = promises_of(request)
    check_logprob_entries(requests)
    check_intervals(requests)
    evidence = await _evidence(model, body, prepared, requests)
    ticket = request.state.ticket
    ticket.add_tokens(prepared.prompt_tokens)
    # The body has been spooled or tokenised; from here on only the images count, which are no
    # more than the body and what was fetched.
    ticket.resize_media(_media_bytes(prepared))
    if evidence is not None:
        evidence.plan_baselines(requests)
    requests = [replace(one, wants_estimate=bool(body.stream), **promises) for one in requests]
    feed = EventFeed(server.client, [(one, prepared.media) for one in requests])
    stack.push_async_callback(feed.close)
    stack.callback(server.follow(feed))
    run = Run(
        feed=feed,
        shape=shape,
        metrics=server.metrics,
        n=body.n or 1,
        prompt_lengths=tuple(len(prompt.token_ids) for prompt in prepared.prompts),
        image_tokens=sum(prompt.image_tokens for prompt in prepared.prompts),
        arrival_s=request.state.arrival_s,
        received_s=received_s,
        has_media=bool(prepared.media),
        evidence=evidence,
        media=prepared.media,
    )
    headers = _headers(prepared)
    if body.stream:
        await _while_connected(request, run.until_valid(server.config.keepalive_s))
        return EventStream(
            run,
            stack.pop_all(),
            options=body.stream_options,
            progress=bool(body.return_progress),
            keepalive_s=server.config.keepalive_s,
            headers=headers | run.headers(),
        )
    await _while_connected(request, run.collect())
    answer = shape.whole(run.choices, run.usage())
    if body.prompt_logprobs is not None:
        per_prompt = [
            prompt_logprobs_json(run.prompt_logprobs.get(i, ())) for i in range(run.prompts)
        ]
        answer["prompt_logprobs"] = per_prompt[0] if len(per_prompt) == 1 else per_prompt
    if body.return_token_ids:
        answer["prompt_token_ids"] = [list(prompt.token_ids) for prompt in prepared.prompts]
    if evidence is not None:
        answer["evidence"] = evidence.json()
    return json_response(answer, headers=headers | run.headers())


def engine_requests(
    model: Model,
    body: Generation,
    prompts: Sequence[Prompt],
    *,
    name: str,
    tenant: str,
    received_s: float,
) -> list[EngineRequest]:
    """What the engine is asked for: one request per prompt, named NAME-0, NAME-1, ..."""
    return [
        EngineRequest(
            request_id=f"{name}-{place}",
            token_ids=prompt.token_ids,
            sampling=sampling_params(
                body, model.info, model.frontend.defaults, prompt_tokens=len(prompt.token_ids)
            ),
            image_spans=prompt.spans,
            positions=prompt.positions,
            position_delta=prompt.position_delta,
            tenant=tenant,
            priority=body.priority or 0,
            arrival_s=received_s,
        )
        for place, prompt in enumerate(prompts)
    ]


def promises_of(request: Request) -> dict[str, Any]:
    """What the client's headers ask for, as fields of an engine's request: x-ttft-slo-ms and
    x-tpot-slo-ms stand in for the server's promises, with x-ttft-deadline-ms a request that would
    be late is refused. Raises BadRequestError."""
    fields: dict[str, Any] = {}
    deadline_s, ttft_s = seconds_of(request, DEADLINE_HEADER), seconds_of(request, TTFT_HEADER)
    if deadline_s is not None and ttft_s is not None:
        raise BadRequestError(
            f"{TTFT_HEADER} and {DEADLINE_HEADER} both say when the first token is due; send one.",
            param=TTFT_HEADER,
        )
    if deadline_s is not None:
        fields |= {"ttft_s": deadline_s, "must_meet_ttft": True}
    if ttft_s is not None:
        fields["ttft_s"] = ttft_s
    if (tpot_s := seconds_of(request, TPOT_HEADER)) is not None:
        fields["tpot_s"] = tpot_s
    return fields


def seconds_of(request: Request, header: str) -> float | None:
    """A header that is a number of milliseconds. Raises BadRequestError."""
    given = request.headers.get(header)
    if given is None:
        return None
    try:
        milliseconds = float(given)
    except ValueError:
        milliseconds = math.nan
    if not 0 < milliseconds <= _LONGEST_MS:
        raise BadRequestError(
            f"{header} must be milliseconds above 0 and at most {_LONGEST_MS}.", param=header
        )
    return milliseconds / 1e3


async def _evidence(
    model: Model, body: Generation, prepared: Prepared, requests: list[EngineRequest]
) -> EvidenceReport | None:
    params = requests[0].sampling.evidence
    if params is None:
        return None
    work = functools.partial(
        EvidenceReport.of,
        params,
        body.n or 1,
        prepared.prompts,
        prepared.baselines,
        model.frontend.tokenizer,
        max_model_len=model.info.max_model_len,
        required=wants_baseline(body.return_evidence),
    )
    return work() if prepared.prompt_tokens <= INLINE_CHARS else await asyncio.to_thread(work)


def _media_bytes(prepared: Prepared) -> int:
    return sum(os.stat(item.path).st_size for item in prepared.media if item.path is not None)


def _headers(prepared: Prepared) -> dict[str, str]:
    if not prepared.media:
        return {}
    return {"x-image-tokens": ",".join(str(item.plan.num_rows) for item in prepared.media)}


async def _while_connected(request: Request, work: Awaitable[T]) -> T:
    """Runs `work`, cancelled when the client leaves. Raises ClientDisconnect then."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.create_task(disconnected(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        watcher.cancel()
        task.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
