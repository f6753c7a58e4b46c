"""The progress of one sample of a request.

Owns: token ids so far and the counters num_tokens >= num_ready_tokens, num_computed_tokens and
num_cached_tokens. There are no phases: prefill, decode and resumption after a preemption are the
same question, how far num_computed_tokens lags behind num_tokens (DESIGN idea 1).
Does not own: blocks (kv_manager.py), text or sampling state (lm_engine). Imports no torch.

    0 ........ cached ........ computed ........ ready ........ num_tokens
    |  KV was found  |  KV written  |  may be computed  | waits for an image |
"""

from __future__ import annotations

from chunked_prefill.request import Request
from kv_offload.radix_cache import image_id


class Sequence:
    """Mutable; one owner, the language stage's loop."""

    __slots__ = (
        "cache_ids",
        "choice",
        "deadline_s",
        "encode_s",
        "last_step",
        "loading",
        "max_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_ready_tokens",
        "order",
        "rank",
        "request",
        "seq_id",
        "token_ids",
        "width",
    )

    def __init__(self, request: Request, seq_id: int, order: int, choice: int = 0) -> None:
        self.request = request
        self.order = order
        """The request's place by arrival; all its samples share it."""
        self.seq_id = seq_id
        """Unique in the engine's life; the owner id of the KV manager."""
        self.choice = choice
        """Which of the request's `n` samples this is."""
        self.rank = (request.priority, order, choice)
        """Smaller is served first: priority, then arrival, then choice."""
        self.num_prompt_tokens = request.num_prompt_tokens
        self.max_tokens = self.num_prompt_tokens + request.sampling.max_tokens
        """The longest this sequence can become."""
        self.token_ids: list[int] = list(request.token_ids)
        self.cache_ids = _cache_ids(request, self.token_ids)
        """`token_ids` with image tokens told apart by what they show: equal beginnings of two
        sequences have equal KV. The same list for a request without images."""
        self.num_ready_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.loading = False
        """Whether the KV that was found for it is still on its way to the device. Until then the
        counters say what will be there, and nothing is computed."""
        self.width = request.sampling.n if choice == 0 else 1
        """Seats among the running sequences: those that it will fork into count from the start."""
        self.deadline_s = float("inf")
        """When its first token is due, on the scheduler's clock (policy.py)."""
        self.encode_s = 0.0
        """Seconds of the vision stage for its images that were not there on arrival, alone; set
        before it is added to a scheduler."""
        self.last_step = -1
        """Number of the last step in which this sequence advanced."""

    def fork(self, seq_id: int, choice: int) -> Sequence:
        """Another sample of the same request, at the same place."""
        child = Sequence(self.request, seq_id, self.order, choice)
        child.token_ids = list(self.token_ids)
        images = self.cache_ids is not self.token_ids
        child.cache_ids = list(self.cache_ids) if images else child.token_ids
        child.num_ready_tokens = self.num_ready_tokens
        child.num_computed_tokens = self.num_computed_tokens
        child.num_cached_tokens = self.num_cached_tokens
        self.width -= 1
        return child

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def remaining(self) -> int:
        """Tokens without KV; 1 for a sequence that decodes."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def decodes(self) -> bool:
        """Whether one token is left to compute, and may be now. Asked of every running sequence in
        every step."""
        known = len(self.token_ids)
        return (
            self.num_computed_tokens == known - 1
            and self.num_ready_tokens >= known
            and not self.loading
        )

    @property
    def advanceable(self) -> int:
        """Tokens that may be computed now."""
        if self.loading:
            return 0
        return min(self.num_ready_tokens, len(self.token_ids)) - self.num_computed_tokens

    @property
    def awaits_image(self) -> bool:
        return self.num_ready_tokens < len(self.token_ids)

    @property
    def encode_left_s(self) -> float:
        """Of `encode_s`, what is left: images take it in proportion to their tokens."""
        ready = self.num_ready_tokens
        if not self.encode_s or ready >= len(self.token_ids):
            return 0.0
        spans = self.request.image_spans
        left = sum(span.length for span in spans if span.end > ready)
        return self.encode_s * left / sum(span.length for span in spans)

    def append(self, token_id: int) -> None:
        """A sampled token; it needs no image, so it is ready if all before it is."""
        if self.num_ready_tokens == len(self.token_ids):
            self.num_ready_tokens += 1
        self.token_ids.append(token_id)
        if self.cache_ids is not self.token_ids:
            self.cache_ids.append(token_id)

    def found(self, num_tokens: int) -> None:
        """There is KV of so many of its first tokens: in the cache, of a sequence that waits, or
        brought to the device, of one that was loading. The counters say so before anything is held,
        so that rows of images that lie before are not asked for."""
        if num_tokens < self.num_computed_tokens and self.request.image_spans:
            # Rows of what was found before are not there; who provides them has to look again.
            self.num_ready_tokens = num_tokens
        self.num_computed_tokens = self.num_cached_tokens = num_tokens

    def advance(self, length: int, step: int) -> None:
        """Commit: the KV of the next `length` tokens is valid."""
        end = self.num_computed_tokens + length
        if length < 1 or end > min(self.num_ready_tokens, len(self.token_ids)) or self.loading:
            raise AssertionError(f"advance by {length}, {self.advanceable} possible")
        self.num_computed_tokens = end
        self.last_step = step

    def rewind(self) -> None:
        """All KV is gone from the device (preemption)."""
        self.loading = False
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions += 1

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.request_id}#{self.choice}, "
            f"{self.num_computed_tokens}/{self.num_ready_tokens}/{self.num_tokens})"
        )


def _cache_ids(request: Request, token_ids: list[int]) -> list[int]:
    if not request.image_spans:
        return token_ids
    ids = list(token_ids)
    for span in request.image_spans:
        base = image_id(span.key, span.row_offset)
        ids[span.offset : span.end] = range(base, base + span.length)
    return ids
