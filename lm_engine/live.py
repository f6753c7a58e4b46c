"""One request while it is in the engine: its choices, their text, its timing.

Owns: what turns sampled tokens into RequestOutputs. Does not own: KV and order (scheduler), rows
(images.py), or the step (engine.py).
"""

from __future__ import annotations

import secrets
import time

import numpy as np
from tokenizers import Tokenizer

from chunked_prefill.request import Request
from chunked_prefill.sequence import Sequence
from lm_engine.evidence import Tally, Watch
from lm_engine.finish import TextState
from lm_engine.images import ImageWork
from lm_engine.outputs import (
    Evidence,
    RequestError,
    RequestOutput,
    SequenceDelta,
    Timing,
    TokenLogprob,
    Usage,
)
from lm_engine.sampler import History, Sampled, SamplingRow


class LiveRequest:
    """Mutable; owned by the engine from `add` to the event with `finished` set."""

    def __init__(self, request: Request, order: int, first_seq_id: int) -> None:
        self.request = request
        self.sequences = {0: Sequence(request, first_seq_id, order)}
        """Choices that still run, by index."""
        self.received_s = time.monotonic()
        self.first_token_s: float | None = None
        seed = request.sampling.seed
        self.seed = secrets.randbits(63) if seed is None else seed
        self.completion_tokens = 0
        self.cached_tokens = 0
        """Prompt tokens whose KV was there when the request began to be computed."""
        self._texts: dict[int, TextState] = {}
        self._histories: dict[int, History] = {}
        self._scheduled_s: float | None = None
        self._prompt_logprobs: dict[int, TokenLogprob] = {}
        self._deltas: list[SequenceDelta] = []
        self._prompt_done = False
        self._usage_told = False
        self.watch: Watch | None = None
        """What is recorded of its attention, if anything is."""
        self._tallies: dict[int, Tally] = {}

    def scheduled(self, sequence: Sequence) -> bool:
        """A chunk of the sequence is computed now; True for the request's first one. What the
        prefix cache had is settled then: KV found after a preemption was computed for this request.
        """
        if self._scheduled_s is not None:
            return False
        self._scheduled_s = time.monotonic()
        self.cached_tokens = sequence.num_cached_tokens
        return True

    # -- sampling -----------------------------------------------------------------------------

    def row(self, sequence: Sequence, eos_ids: frozenset[int]) -> SamplingRow:
        params = self.request.sampling
        banned: tuple[int, ...] = ()
        if sequence.num_output_tokens < params.min_tokens:
            banned = (*params.stop_token_ids, *(() if params.ignore_eos else eos_ids))
        history = self._histories.get(sequence.choice)
        if history is None:
            history = History(sequence.token_ids, self.request.num_prompt_tokens)
            self._histories[sequence.choice] = history
        return SamplingRow(
            params, self.seed, sequence.choice, self.request.token_ids, history, banned
        )

    def push(
        self, sequence: Sequence, sampled: Sampled, tokenizer: Tokenizer, eos: frozenset[int]
    ) -> bool:
        """Appends a sampled token to its choice; True when that ends the choice."""
        if self.first_token_s is None:
            self.first_token_s = time.monotonic()
        text = self._texts.get(sequence.choice)
        if text is None:
            text = self._texts[sequence.choice] = TextState(tokenizer, self.request.sampling)
        sequence.append(sampled.token_id)
        advance = text.push(sampled.token_id, eos)
        self.completion_tokens += 1
        self._deltas.append(
            SequenceDelta(
                index=sequence.choice,
                text=advance.text,
                token_ids=(sampled.token_id,),
                logprobs=None if sampled.logprob is None else (sampled.logprob,),
                finish_reason=advance.finish_reason,
                stop_reason=advance.stop_reason,
                evidence=None if advance.finish_reason is None else self._evidence(sequence.choice),
            )
        )
        if advance.finish_reason is None:
            return False
        del self.sequences[sequence.choice]
        self._histories.pop(sequence.choice, None)
        return True

    # -- evidence -----------------------------------------------------------------------------

    def saw(self, sequence: Sequence, masses: np.ndarray) -> None:
        """Attention of the row that the choice's next token is sampled from (Recorder.masses)."""
        assert self.watch is not None
        self._tallies.setdefault(sequence.choice, Tally(self.watch)).add(masses)

    def _evidence(self, choice: int) -> Evidence | None:
        tally = self._tallies.pop(choice, None)
        return None if tally is None else tally.evidence()

    # -- prompt log-probabilities -------------------------------------------------------------

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.request.sampling.prompt_logprobs is not None and not self._prompt_done

    def add_prompt_logprobs(self, first_target: int, found: list[TokenLogprob]) -> None:
        """Of prompt tokens from `first_target` on; the same again after a preemption."""
        for target, logprob in enumerate(found, start=first_target):
            self._prompt_logprobs[target] = logprob

    # -- events -------------------------------------------------------------------------------

    def step_output(self, images: ImageWork) -> RequestOutput | None:
        """What the step added, or None. The last one carries usage and timing."""
        deltas, self._deltas = tuple(self._deltas), []
        request = self.request
        if not deltas:
            main = self.sequences.get(0)
            if main is None or main.num_output_tokens > 0:
                return None
            progress = (main.num_computed_tokens, request.num_prompt_tokens)
            return RequestOutput(request.request_id, prompt_progress=progress)
        prompt_logprobs = None
        if self.wants_prompt_logprobs:
            self._prompt_done = True
            targets = range(request.num_prompt_tokens)
            prompt_logprobs = tuple(self._prompt_logprobs.get(t) for t in targets)
        finished = not self.sequences
        tell_usage = finished or not self._usage_told
        self._usage_told = True
        return RequestOutput(
            request.request_id,
            deltas=deltas,
            prompt_logprobs=prompt_logprobs,
            finished=finished,
            usage=self.usage() if tell_usage else None,
            timing=self.timing(images) if finished else None,
        )

    def failed(self, error: RequestError, images: ImageWork) -> RequestOutput:
        return RequestOutput(
            self.request.request_id,
            deltas=tuple(self._deltas),
            finished=True,
            usage=self.usage(),
            timing=self.timing(images),
            error=error,
        )

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.request.num_prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=self.cached_tokens,
            image_tokens=sum(span.length for span in self.request.image_spans),
        )

    def timing(self, images: ImageWork) -> Timing:
        now = time.monotonic()
        scheduled = now if self._scheduled_s is None else self._scheduled_s
        first = now if self.first_token_s is None else self.first_token_s
        return Timing(
            queue_s=scheduled - self.received_s,
            prefill_s=max(0.0, first - scheduled),
            decode_s=now - first,
            image_decode_s=images.image_decode_s,
            encode_s=images.encode_s,
            ahead_tokens=images.ahead_tokens,
        )
