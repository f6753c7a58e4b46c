"""From a validated request to SamplingParams.

Owns: defaults, and every range that depends on the served model (vocabulary, context, sequences).
Does not own: field types and fixed ranges (schemas.py), or sampling itself (lm_engine/sampler.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from api.errors import BadRequestError, ContextTooLongError
from api.evidence import evidence_params
from api.schemas import ChatRequest, CompletionRequest, Generation
from chunked_prefill.request import Request, SamplingParams
from lm_engine.admission import MAX_EVIDENCE
from lm_engine.client import ModelInfo

MAX_LOGPROB_ENTRIES = 4_000_000
"""Log-probabilities of one answer, all its prompts and alternatives together: what it may make the
server hold."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What the model's generation_config.json recommends for fields that a request leaves out."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def sampling_params(
    body: Generation, info: ModelInfo, defaults: SamplingDefaults, *, prompt_tokens: int
) -> SamplingParams:
    """Checks `body` against the model and settles every default.

    Raises BadRequestError naming the field, or ContextTooLongError with both sizes.
    """
    choices = body.n or 1
    if choices > info.max_num_seqs:
        raise BadRequestError(
            f"n is {choices}, but this server runs at most {info.max_num_seqs} sequences at a "
            f"time. Use n <= {info.max_num_seqs}.",
            param="n",
        )
    max_tokens = _max_tokens(body, info, prompt_tokens)
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise BadRequestError(
            f"min_tokens {min_tokens} exceeds max_tokens {max_tokens}.", param="min_tokens"
        )
    return SamplingParams(
        max_tokens=max_tokens,
        # Adding 0.0 turns -0.0 into 0.0.
        temperature=_or(body.temperature, defaults.temperature) + 0.0,
        top_p=_or(body.top_p, defaults.top_p),
        top_k=_top_k(body.top_k, defaults.top_k, info.vocab_size),
        min_p=_or(body.min_p, defaults.min_p),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=_or(body.repetition_penalty, defaults.repetition_penalty),
        seed=body.seed,
        logit_bias=_logit_bias(body.logit_bias, info.vocab_size),
        logprobs=_logprobs(body),
        prompt_logprobs=body.prompt_logprobs,
        n=choices,
        stop=tuple([body.stop] if isinstance(body.stop, str) else body.stop or ()),
        stop_token_ids=_token_ids(body.stop_token_ids or [], info.vocab_size, "stop_token_ids"),
        include_stop=bool(body.include_stop_str_in_output),
        min_tokens=min_tokens,
        ignore_eos=bool(body.ignore_eos),
        evidence=evidence_params(body.return_evidence, info.num_layers),
    )


def check_logprob_entries(requests: Iterable[Request]) -> None:
    """Raises BadRequestError when the prompts of one body ask for too many log-probabilities."""
    generated = prompt = 0
    for request in requests:
        params = request.sampling
        if params.logprobs is not None:
            generated += params.n * params.max_tokens * (params.logprobs + 1)
        if params.prompt_logprobs is not None:
            prompt += request.num_prompt_tokens * (params.prompt_logprobs + 1)
    if generated + prompt > MAX_LOGPROB_ENTRIES:
        raise BadRequestError(
            f"The answer could hold {generated + prompt} log-probabilities, tokens x (alternatives "
            f"+ 1); at most {MAX_LOGPROB_ENTRIES} are returned. Lower max_tokens, n, or the number "
            "of alternatives or prompts.",
            param="logprobs" if generated > prompt else "prompt_logprobs",
        )


def check_intervals(requests: Iterable[Request]) -> None:
    """Raises BadRequestError when the evidence of one answer, all its prompts and choices together,
    would have too many intervals."""
    intervals = sum(
        request.sampling.n * -(-request.num_prompt_tokens // params.interval)
        for request in requests
        if (params := request.sampling.evidence) is not None
    )
    if intervals > MAX_EVIDENCE:
        raise BadRequestError(
            f"The evidence would have {intervals} intervals over all choices; at most "
            f"{MAX_EVIDENCE} are returned. Ask for a larger interval or a smaller n.",
            param="return_evidence.interval",
        )


def check_token_ids(ids: list[int], vocab_size: int, param: str) -> None:
    """Raises BadRequestError naming the first id outside [0, vocab_size)."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        place, wrong = next((i, t) for i, t in enumerate(ids) if not 0 <= t < vocab_size)
        raise BadRequestError(
            f"Token id {wrong} is outside the vocabulary of {vocab_size} tokens.",
            param=f"{param}.{place}",
        )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _max_tokens(body: Generation, info: ModelInfo, prompt_tokens: int) -> int:
    asked = body.max_tokens
    name = "max_tokens"
    if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
        asked, name = body.max_completion_tokens, "max_completion_tokens"
    room = info.max_model_len - prompt_tokens
    if room < 1:
        raise ContextTooLongError(
            f"The prompt has {prompt_tokens} tokens; the maximum context of this model is "
            f"{info.max_model_len} tokens, completion included. Shorten the prompt.",
            param="messages" if isinstance(body, ChatRequest) else "prompt",
        )
    if asked is not None and asked > room:
        raise ContextTooLongError(
            f"The prompt has {prompt_tokens} tokens and {name} is {asked}, together "
            f"{prompt_tokens + asked}; the maximum context of this model is {info.max_model_len} "
            f"tokens. Use {name} <= {room} or a shorter prompt.",
            param=name,
        )
    if body.max_tokens is None and isinstance(body, CompletionRequest):
        return min(16, room)  # OpenAI's documented default of this route
    return room if asked is None else asked


def _logprobs(body: Generation) -> int | None:
    if isinstance(body, ChatRequest):
        return (body.top_logprobs or 0) if body.logprobs else None
    return body.logprobs if isinstance(body, CompletionRequest) else None


def _top_k(asked: int | None, default: int, vocab_size: int) -> int:
    value = default if asked is None else asked
    return 0 if value <= 0 or value >= vocab_size else value


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    entries: dict[int, float] = {}
    for key, value in (bias or {}).items():
        # isdecimal() alone would admit other scripts' digits.
        if not (key.isascii() and key.isdecimal() and len(key) < 20 and int(key) < vocab_size):
            raise BadRequestError(
                f"logit_bias keys are token ids from 0 to {vocab_size - 1}.", param="logit_bias"
            )
        if not -100 <= value <= 100:
            raise BadRequestError("logit_bias values lie between -100 and 100.", param="logit_bias")
        entries[int(key)] = float(value)
    return tuple(sorted(entries.items()))


def _token_ids(ids: list[int], vocab_size: int, param: str) -> tuple[int, ...]:
    check_token_ids(ids, vocab_size, param)
    return tuple(dict.fromkeys(ids))
