"""What is refused before any compute, and why.

Owns: the checks of a Request against the model and this engine's sizes. Does not own: HTTP fields
and their types (api/schemas.py), queues, or waiting. Imports no torch.

The API checks most of this before a request reaches the engine; the engine checks again, because
an id outside the vocabulary would write into another sequence's memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from chunked_prefill.request import Request, SamplingParams
from lm_engine.client import MediaItem, ModelInfo
from lm_engine.outputs import RequestError

MAX_LOGPROBS = 20
MAX_CHOICES = 128
MIN_INTERVAL, MAX_INTERVAL = 16, 65_536
"""Tokens of an evidence interval."""
MAX_SINKS = 1024
MAX_EVIDENCE = 16_384
"""Intervals of one answer's evidence, all choices together."""


def check(request: Request, media: Iterable[MediaItem], info: ModelInfo) -> RequestError | None:
    """The first reason to refuse the request, in the user's terms, or None."""
    return (
        _check_prompt(request, info)
        or check_sampling(request.sampling, info.vocab_size, info.max_num_seqs)
        or _check_evidence(request, info)
        or _check_images(request, {item.key: item for item in media}, info)
    )


def _check_prompt(request: Request, info: ModelInfo) -> RequestError | None:
    prompt = request.num_prompt_tokens
    if prompt == 0:
        return _invalid("prompt", "the prompt is empty; at least one token is needed")
    low, high = min(request.token_ids), max(request.token_ids)
    if low < 0 or high >= info.vocab_size:
        worst = low if low < 0 else high
        return _invalid(
            "prompt", f"token id {worst} is outside the vocabulary of {info.vocab_size} ids"
        )
    wanted = prompt + request.sampling.max_tokens
    if wanted > info.max_model_len:
        return _invalid(
            "max_tokens",
            f"this model's maximum context length is {info.max_model_len} tokens; the prompt has "
            f"{prompt} and max_tokens asks for {request.sampling.max_tokens}",
        )
    return None


def check_sampling(
    params: SamplingParams, vocab_size: int, max_num_seqs: int
) -> RequestError | None:
    """Ranges, and ids against the vocabulary. NaN is outside every range."""
    ranges: tuple[tuple[str, float, float, float], ...] = (
        ("max_tokens", params.max_tokens, 1, math.inf),
        ("temperature", params.temperature, 0.0, 100.0),
        ("top_p", params.top_p, 0.0, 1.0),
        ("top_k", params.top_k, 0, math.inf),
        ("min_p", params.min_p, 0.0, 1.0),
        ("presence_penalty", params.presence_penalty, -2.0, 2.0),
        ("frequency_penalty", params.frequency_penalty, -2.0, 2.0),
        ("repetition_penalty", params.repetition_penalty, 1e-6, 100.0),
        ("logprobs", params.logprobs or 0, 0, MAX_LOGPROBS),
        ("prompt_logprobs", params.prompt_logprobs or 0, 0, MAX_LOGPROBS),
        ("n", params.n, 1, min(MAX_CHOICES, max_num_seqs)),
        ("min_tokens", params.min_tokens, 0, params.max_tokens),
    )
    for name, value, low, high in ranges:
        if not low <= value <= high:
            upper = f" and {high:g}" if high != math.inf else ""
            bound = f"between {low:g}{upper}" if upper else f"at least {low:g}"
            return _invalid(name, f"{name} must be {bound}, got {value:g}")
    for token_id, bias in params.logit_bias:
        if not 0 <= token_id < vocab_size:
            return _invalid("logit_bias", _outside("logit_bias", token_id, vocab_size))
        if not -100.0 <= bias <= 100.0:
            return _invalid("logit_bias", f"a bias must be between -100 and 100, got {bias:g}")
    for token_id in params.stop_token_ids:
        if not 0 <= token_id < vocab_size:
            return _invalid("stop_token_ids", _outside("stop_token_ids", token_id, vocab_size))
    if any(not stop for stop in params.stop):
        return _invalid("stop", "a stop string must not be empty")
    return None


def _check_evidence(request: Request, info: ModelInfo) -> RequestError | None:
    asked = request.sampling.evidence
    if asked is None:
        return None
    if not MIN_INTERVAL <= asked.interval <= MAX_INTERVAL:
        return _invalid(
            "return_evidence.interval",
            f"interval must be between {MIN_INTERVAL} and {MAX_INTERVAL}, got {asked.interval}",
        )
    if not 0 <= asked.sinks <= MAX_SINKS:
        return _invalid(
            "return_evidence.sinks", f"sinks must be between 0 and {MAX_SINKS}, got {asked.sinks}"
        )
    for layer in asked.layers:
        if not 0 <= layer < info.num_layers:
            return _invalid(
                "return_evidence.layers",
                f"layer {layer} does not exist; this model has layers 0 to {info.num_layers - 1}",
            )
    intervals = -(-request.num_prompt_tokens // asked.interval) * request.sampling.n
    if intervals > MAX_EVIDENCE:
        return _invalid(
            "return_evidence.interval",
            f"the evidence would have {intervals} intervals over all choices, at most "
            f"{MAX_EVIDENCE} are reported; ask for a larger interval or a smaller n",
        )
    return None


def _check_images(
    request: Request, media: dict[bytes, MediaItem], info: ModelInfo
) -> RequestError | None:
    end = 0
    for span in request.image_spans:
        item = media.get(span.key)
        if item is None:
            return RequestError("internal", "an image span has no image")
        inside = span.row_offset >= 0 and span.row_offset + span.length <= item.plan.num_rows
        if span.length < 1 or span.offset < end or span.end > len(request.token_ids) or not inside:
            return RequestError("internal", "an image span does not match its image")
        end = span.end
    for item in media.values():
        if item.plan.num_rows > info.embedding_rows:
            return RequestError(
                "never_fits",
                f"the image takes {item.plan.num_rows} embedding rows, this server holds "
                f"{info.embedding_rows}; send a smaller image or lower max_pixels",
                item.param,
            )
    return None


def _outside(name: str, token_id: int, vocab_size: int) -> str:
    return f"{name}: token id {token_id} is outside the vocabulary of {vocab_size} ids"


def _invalid(param: str, message: str) -> RequestError:
    return RequestError("invalid", message, param)
