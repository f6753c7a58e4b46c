"""How much a step may compute, and how it is shared between decodes and prefills.

Owns: the Protocol Budget; TokenBudget, the hard cap of `--max-num-batched-tokens`; TimeBudget,
which fills at most so many milliseconds under the same cap when decodes are waiting for the step
to end. Does not own: which sequence takes which share (scheduler.py), or how long a step takes
(step_time.py). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from chunked_prefill.step_time import StepLoad, StepTimeEstimator


@dataclass(frozen=True, slots=True)
class Share:
    total_tokens: int
    decode_tokens: int
    """Decodes placed before any prefill; more may follow if prefills leave room."""


class Budget(Protocol):
    max_num_batched_tokens: int

    def split(self, decode_contexts: Sequence[int], prefill_depth: int | None, step: int) -> Share:
        """`decode_contexts`: tokens before each decode that could run; `prefill_depth`: those
        before the chunk of the first prefill that could, None if there is none."""
        ...

    def observe(self, load: StepLoad, seconds: float) -> None:
        """A step took this long."""
        ...


class TokenBudget:
    """Decodes first, but where prefills want to run they keep an eighth of the budget, at least
    one token; with a budget of one token the two take turns."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        if max_num_batched_tokens < 1:
            raise ValueError(
                f"max_num_batched_tokens must be at least 1, got {max_num_batched_tokens}"
            )
        self.max_num_batched_tokens = max_num_batched_tokens

    def split(self, decode_contexts: Sequence[int], prefill_depth: int | None, step: int) -> Share:
        total, decodes = self.max_num_batched_tokens, len(decode_contexts)
        if prefill_depth is None:
            return Share(total, min(decodes, total))
        floor = max(1, total // 8) if total > 1 else step % 2
        return Share(total, min(decodes, total - floor))

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Tokens cost what they cost."""


_FEWEST_CHUNK_TOKENS = 16
"""A prefill advances by as much in any step: below it a step is mostly fixed cost, and the prompt
would never end."""


class TimeBudget:
    """A TokenBudget whose prefill share shrinks, while decodes run, to what fits into `target_s`
    at the depth where the prefill stands. Equal tokens are not equal in time: a chunk behind 4,000
    tokens takes twice as long as at the start of a small model's prompt."""

    def __init__(
        self, max_num_batched_tokens: int, target_s: float, estimator: StepTimeEstimator
    ) -> None:
        if target_s <= 0:
            raise ValueError(f"the target of a step must be positive, got {target_s} s")
        self.max_num_batched_tokens = max_num_batched_tokens
        self.target_s = target_s
        self.estimator = estimator
        self._tokens = TokenBudget(max_num_batched_tokens)

    def split(self, decode_contexts: Sequence[int], prefill_depth: int | None, step: int) -> Share:
        share = self._tokens.split(decode_contexts, prefill_depth, step)
        if prefill_depth is None or not share.decode_tokens:
            return share
        load = StepLoad.of((c, 1) for c in decode_contexts[: share.decode_tokens])
        limit_s = self.target_s / self.estimator.guard
        solved = self.estimator.model.longest_chunk(prefill_depth, load, limit_s)
        chunk = max(_FEWEST_CHUNK_TOKENS, solved)
        return Share(min(share.total_tokens, share.decode_tokens + chunk), share.decode_tokens)

    def observe(self, load: StepLoad, seconds: float) -> None:
        self.estimator.observe(load, seconds)
