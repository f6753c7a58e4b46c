"""What a user asked for, frozen at admission.

Owns: Request, SamplingParams, EvidenceParams, ImageSpan - immutable values that later parts read.
Does not own: progress (sequence.py), tensors, pixels, text templates, or HTTP shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """An interval of a prompt whose embeddings come from one image instead of the token table.

    Opaque to the scheduler: it knows where the span lies and under which key its rows become
    ready, never what an image is. One image may own several spans (tiles separated by text
    tokens); `row_offset` says which rows of the image's encoding this span takes.
    """

    offset: int
    """Index of the span's first token in the prompt."""
    length: int
    """Tokens in the span; each takes one embedding row."""
    key: bytes
    """Content key of the image: equal keys mean equal rows."""
    row_offset: int = 0
    """First row, within the image's encoding, that this span takes."""

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class EvidenceParams:
    """What to report of where an answer's attention went (lm_engine/evidence.py)."""

    layers: tuple[int, ...] = ()
    """Layers whose attention is averaged; empty takes the default of the model."""
    interval: int = 64
    """Tokens per interval of the prompt; intervals begin at multiples of it."""
    sinks: int = 4
    """First tokens of the prompt that are counted apart: they draw attention whatever they say
    (Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023)."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when a sequence ends. Ranges are validated by the caller that
    knows the field's name (the API, or `Engine.generate`), with `check_sampling`."""

    max_tokens: int
    """Most tokens to generate, at least 1."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means all."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    """Same seed, same answer, whatever shares the batch. None draws one at admission."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    """Alternatives reported per generated token; None reports nothing, 0 the chosen one only."""
    prompt_logprobs: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    """Whether a matched stop string stays in the text."""
    min_tokens: int = 0
    ignore_eos: bool = False
    evidence: EvidenceParams | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5 or self.top_k == 1


@dataclass(frozen=True, slots=True)
class Request:
    """One admitted request. `token_ids` already has its final length: image spans are counted
    from headers before any pixel is decoded (DESIGN idea 2)."""

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    image_spans: tuple[ImageSpan, ...] = ()
    """Sorted by offset, disjoint."""
    positions: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None = None
    """M-RoPE (t, h, w) of each prompt token; None means 0, 1, 2, ... on one axis."""
    position_delta: int = 0
    """Generated token i of the sequence sits at position i + position_delta (all axes)."""
    tenant: str = ""
    priority: int = 0
    """Smaller runs first; ties by arrival."""
    ttft_s: float | None = None
    """Seconds from arrival to the first token that this request was promised; None takes the
    server's promise."""
    tpot_s: float | None = None
    """Seconds from one token of the answer to its next that this request was promised; None takes
    the server's promise, and a quarter of that is the least (budget.py)."""
    must_meet_ttft: bool = False
    """Refused on arrival if `ttft_s` cannot be met."""
    wants_estimate: bool = False
    """Whether to be told on arrival when its first token can be expected."""
    arrival_s: float = field(default=0.0, compare=False)
    """Monotonic seconds of the host's clock when the last byte of the body was read."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.token_ids)
