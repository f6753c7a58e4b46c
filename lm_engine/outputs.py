"""What the engine says about a request: deltas, usage, timing, failure.

Owns: the values that cross from the language stage to whoever asked (in-process caller or
API process). Does not own: HTTP shapes (api/) or how they travel (process/).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability (natural log, before temperature and penalties) of one token and of the
    most likely alternatives, best first."""

    token_id: int
    token: bytes
    """The token's own bytes; may be part of a UTF-8 character."""
    logprob: float
    rank: int
    """1 is the most likely token of the vocabulary."""
    top: tuple[tuple[int, bytes, float], ...] = ()
    """(token id, bytes, log-probability) of the alternatives that were asked for."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Where a request's time went, seconds. Spans do not overlap except `encode_s`, which runs
    beside prefill."""

    queue_s: float = 0.0
    """From the engine's receipt to the first scheduled chunk."""
    prefill_s: float = 0.0
    """From the first scheduled chunk to the first token."""
    decode_s: float = 0.0
    """From the first token to the last."""
    image_decode_s: float = 0.0
    """Pixels: bytes to patches, summed over this request's images; 0 for cached images."""
    encode_s: float = 0.0
    """Vision tower, this request's share; 0 for cached images."""
    ahead_tokens: int = 0
    """Prompt tokens that had their KV when the last of the request's images became ready: what
    running both stages at once has gained; 0 when all images were cached."""


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Prompt tokens whose KV was not computed for this request."""
    image_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Evidence:
    """Where one choice's attention went, mean over heads, `layers` and the `rows` that its tokens
    were sampled from. sink_mass + answer_mass + sum(masses) = 1."""

    layers: tuple[int, ...]
    interval: int
    """Tokens per interval: masses[i] is of prompt tokens [i * interval, (i + 1) * interval)."""
    sink_tokens: int
    """First tokens of the prompt, whose mass counts in no interval."""
    prompt_tokens: int
    rows: int
    sink_mass: float
    answer_mass: float
    """On tokens of the answer itself."""
    masses: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a request can expect if nobody else comes (lm_engine/estimate.py). Seconds count from
    the request's arrival, or from the question where there is none."""

    prompt_tokens: int
    cached_tokens: int
    """Of the prompt, those whose KV need not be computed."""
    image_tokens: int
    ttft_s: float
    queue_s: float
    """Until its first token of the prompt is computed."""
    isolated_s: float
    """Seconds of computing to the first token on an idle server, with what the cache has now."""
    running: int
    waiting: int
    ahead_tokens: int
    """Tokens of other prompts that go before the last of this one."""
    calibrated: bool
    """False while the server has hardly seen how long its steps take."""


@dataclass(frozen=True, slots=True)
class SequenceDelta:
    """What one step added to one choice. Concatenated `text` equals the unstreamed text."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the choice, if one did."""
    evidence: Evidence | None = None
    """With the choice's last delta, if SamplingParams.evidence asked."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One event of a request: some of its choices advanced, or its media were checked.

    The last event of a request has `finished` set and carries usage and timing; after a failure
    it carries `error` as well. The one with its first tokens carries the usage so far.
    """

    request_id: str
    deltas: tuple[SequenceDelta, ...] = ()
    estimate: Estimate | None = None
    """The request's first event, if Request.wants_estimate asked for it."""
    media_checked: bool = False
    """Set once, when every image of the request has been decoded without fault."""
    prompt_progress: tuple[int, int] | None = None
    """(prompt tokens processed, prompt tokens in all), while prefilling."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """Once, with the first token: one entry per prompt token, None for the first."""
    finished: bool = False
    usage: Usage | None = None
    timing: Timing | None = None
    error: RequestError | None = None


@dataclass(frozen=True, slots=True)
class RequestError:
    """Why a request failed. `kind` decides the HTTP status; `message` is for the user and
    contains no internals."""

    kind: Literal["invalid", "never_fits", "media", "overloaded", "late", "internal"]
    message: str
    param: str | None = None
    """The field at fault, in the user's terms, such as "messages.0.content.1"."""
    retry_after_s: float | None = None
    """When it may be worth to try again, of a "late" one."""
