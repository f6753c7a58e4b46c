"""A step's budget while it is being given out.

Owns: Spending: what a step has taken on so far, and how much of a prompt it can still take on.
Does not own: limits (budget.py), or whose turn it is (scheduler.py; lm_engine/estimate.py, which
foretells what that will do). Imports no torch.

What is left is asked for anew with every chunk, at its own depth: tokens that a short prompt leaves
over would, behind 50,000 others, take ten times as long.
"""

from __future__ import annotations

from collections.abc import Iterable

from chunked_prefill.budget import Budget
from chunked_prefill.step_time import StepLoad

_FEWEST_TOKENS = 16
"""The first prompt advances by as much in any step: below it a step is mostly fixed cost, and the
prompt would never end."""


class Spending:
    """One step's. Prompts are named by whatever tells them apart."""

    def __init__(self, budget: Budget) -> None:
        self.load = StepLoad(0, 0, 0, 0.0)
        self._budget = budget
        self._floors: dict[int, int] = {}
        self._first = True

    def decode(self, context: int) -> None:
        """One more token behind `context` others."""
        load = self.load
        self.load = StepLoad(
            load.tokens + 1,
            load.sequences + 1,
            load.decode_context + context + 1,
            load.chunk_pairs,
        )

    def keep(self, prompts: Iterable[tuple[int, int, int]]) -> None:
        """Keeps a quarter of what is left for (name, depth, tokens that could be computed) of
        running prompts behind the first, who waited longest first, so that all of them advance."""
        behind = list(prompts)
        room = self._budget.max_num_batched_tokens - self.load.tokens
        if not behind or room < 2:
            return
        share, before = 1 / (4 * (len(behind) + 1)), self.load
        for name, depth, able in behind[: max(1, room // 4)]:
            floor = self._budget.chunk(before, depth, able, share=share, least=1)
            self._floors[name] = floor
            self._add(depth, floor, new=True)

    def most(self, name: int, depth: int, able: int) -> int:
        """Tokens that the prompt can get, of `able`."""
        floor = self._floors.get(name, 0)
        least = _FEWEST_TOKENS if self._first else 0
        return floor + self._budget.chunk(self.load, depth + floor, able - floor, least=least)

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
        )
