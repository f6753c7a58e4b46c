"""A step's budget while it is being given out.

Owns: Spending: what a step has taken on so far, and how much of a prompt it can still take on.
Does not own: limits (budget.py), or whose turn it is (scheduler.py; lm_engine/estimate.py, which
foretells what that will do). Imports no torch.

What is left is asked for anew with every chunk, at its own depth: tokens that a short prompt leaves
over would, behind 50,000 others, take ten times as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from chunked_prefill.budget import Budget
from chunked_prefill.step_time import StepLoad

_FEWEST_TOKENS = 16
"""The first prompt advances by as much in any step: below it a step is mostly fixed cost, and the
prompt would never end."""
_KEPT_SHARE = 0.25
"""Of what is left, for running prompts behind the first."""


@dataclass(frozen=True, slots=True)
class Pass:
    """What a prompt brings to the device in each step that it advances in (Scheduler.cold_chunk).
    Such a step lasts as long as that takes, however few tokens it computes."""

    least: int
    """Tokens whose compute takes as long."""
    missed: int
    """Steps since the prompt advanced, this one counted."""


class Spending:
    """One step's. Prompts are named by whatever tells them apart; `passes` are those of prompts
    that bring something to the device, which then get as many tokens as make it worthwhile, or
    none in this step."""

    def __init__(self, budget: Budget, passes: Mapping[int, Pass] | None = None) -> None:
        self.load = StepLoad(0, 0, 0, 0.0)
        self._budget = budget
        self._passes = passes or {}
        self._floors: dict[int, int] = {}
        self._first = True

    def decode(self, context: int) -> None:
        """One more token behind `context` others."""
        self.decodes(1, context + 1)

    def decodes(self, count: int, context: int) -> None:
        """One more token of each of `count` sequences, which then have a context of `context`
        tokens together."""
        load = self.load
        self.load = StepLoad(
            load.tokens + count,
            load.sequences + count,
            load.decode_context + context,
            load.chunk_pairs,
            load.chunk_context,
        )

    def keep(self, prompts: Iterable[tuple[int, int, int]]) -> None:
        """Keeps a quarter of what is left for (name, depth, tokens that could be computed) of
        running prompts behind the first, who waited longest first, so that all of them advance.
        One with a pass collects its part over the steps until it is worth the pass, and then may
        take the whole step: once in as many as its part is small."""
        behind = list(prompts)
        room = self._budget.max_num_batched_tokens - self.load.tokens
        if not behind or room < 2:
            return
        even, before, passing = _KEPT_SHARE / (len(behind) + 1), self.load, False
        chosen = behind[: max(1, room // 4)]
        # Passes last: one may take all that the others leave.
        for name, depth, able in sorted(chosen, key=lambda prompt: prompt[0] in self._passes):
            cold = self._passes.get(name)
            if cold is None:
                floor = self._budget.chunk(before, depth, able, share=even, least=1)
            else:
                share = min(1.0, even * cold.missed)
                floor = self._budget.chunk(before, depth, able, share=share, least=1)
                if passing or (floor < min(able, cold.least) and share < 1.0):
                    continue
                floor = self._budget.chunk(self.load, depth, able, share=share, least=cold.least)
                passing = True
            self._floors[name] = floor
            self._add(depth, floor, new=True)

    def most(self, name: int, depth: int, able: int) -> int:
        """Tokens that the prompt can get, of `able`."""
        floor, cold = self._floors.get(name, 0), self._passes.get(name)
        worth = 0 if cold is None else cold.least
        least = max(_FEWEST_TOKENS, worth) if self._first else 0
        more = self._budget.chunk(self.load, depth + floor, able - floor, least=least)
        return floor + more if self._first or floor or more >= min(able, worth) else 0

    def spend(self, name: int, depth: int, length: int) -> None:
        """The prompt got so many."""
        floor = self._floors.pop(name, 0)
        self._first = False
        if length > floor:
            self._add(depth + floor, length - floor, new=not floor)

    @property
    def spent(self) -> bool:
        """Whether there is nothing left even for a prompt's beginning."""
        return self._budget.chunk(self.load, 0, 1) == 0 and not self._first

    def _add(self, depth: int, length: int, *, new: bool) -> None:
        load = self.load
        self.load = StepLoad(
            load.tokens + length,
            load.sequences + new,
            load.decode_context,
            load.chunk_pairs + length * (depth + length / 2),
            load.chunk_context + depth * new,
        )
