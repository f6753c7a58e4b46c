"""How many tokens a step may compute, and how they are shared between decodes and prefills.

Owns: TokenBudget, the hard cap of `--max-num-batched-tokens`. Does not own: which sequence takes
which share (scheduler.py), or time: a budget in milliseconds is another class with the same
`split`. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    total_tokens: int
    decode_tokens: int
    """Decodes placed before any prefill; more may follow if prefills leave room."""


class TokenBudget:
    """Decodes first, but where prefills want to run they keep an eighth of the budget, at least
    one token; with a budget of one token the two take turns."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        if max_num_batched_tokens < 1:
            raise ValueError(
                f"max_num_batched_tokens must be at least 1, got {max_num_batched_tokens}"
            )
        self.max_num_batched_tokens = max_num_batched_tokens

    def split(self, num_decodes: int, prefill_wanted: bool, step: int) -> Share:
        total = self.max_num_batched_tokens
        if not prefill_wanted:
            return Share(total, min(num_decodes, total))
        floor = max(1, total // 8) if total > 1 else step % 2
        return Share(total, min(num_decodes, total - floor))
