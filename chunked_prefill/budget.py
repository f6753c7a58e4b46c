"""How much a step may compute, and how it is shared between decodes and prefills.

Owns: the Protocol Budget; TokenBudget, the hard cap of `--max-num-batched-tokens`; TimeBudget,
which fills at most so many milliseconds under the same cap when decodes are waiting for the step
to end. Does not own: who takes what is left in a step (spending.py, scheduler.py), or how long a
step takes (step_time.py). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf
from typing import Protocol

from chunked_prefill.share_control import ShareControl
from chunked_prefill.step_time import StepLoad
from chunked_prefill.step_time_estimator import StepTimeEstimator

_STRICTEST = 0.25
"""Of what everybody is promised, the least that a single request can have: its short steps are
everybody's, and a prompt would not advance in them."""
_STRICTEST_S = 0.05
"""The same where nobody else is promised anything."""


class Budget(Protocol):
    max_num_batched_tokens: int

    @property
    def estimator(self) -> StepTimeEstimator | None:
        """Who learns how long steps take, where somebody does."""
        ...

    @property
    def limit_s(self) -> float:
        """Seconds that the step which began last may plan for, were it alone on its cores; inf
        where nothing was promised."""
        ...

    def begin(self, promises: Collection[float | None]) -> None:
        """A step begins, with decodes that were promised these seconds per token; None is what
        everybody is promised. The strictest holds until the next step begins."""
        ...

    def beside(self, slowdown: float, seconds: float) -> None:
        """While the step that began runs, another stage makes it take `slowdown` times as long,
        and takes `seconds` of its time besides."""
        ...

    def decodes(self, count: int, prompts_wait: bool, step: int) -> int:
        """How many of `count` decodes are placed before any prompt; more may follow if prompts
        leave room."""
        ...

    def chunk(
        self, load: StepLoad, depth: int, wanted: int, *, share: float = 1.0, least: int = 0
    ) -> int:
        """Tokens of a chunk at `depth`, at most `wanted`, that a step of `load` may take on within
        `share` of what it has left, and `least` in any case as far as the token budget goes."""
        ...

    def observe(self, load: StepLoad, seconds: float) -> None:
        """The step that began last took this long. Nothing is learnt of steps' times from one that
        another stage has slowed down."""
        ...


class TokenBudget:
    """Decodes first, but where prefills want to run they keep an eighth of the budget, at least
    one token; with a budget of one token the two take turns. An `estimator` learns from the
    steps, for others to ask."""

    def __init__(
        self, max_num_batched_tokens: int, estimator: StepTimeEstimator | None = None
    ) -> None:
        if max_num_batched_tokens < 1:
            raise ValueError(
                f"max_num_batched_tokens must be at least 1, got {max_num_batched_tokens}"
            )
        self.max_num_batched_tokens = max_num_batched_tokens
        self.estimator = estimator
        self._alone = True

    @property
    def limit_s(self) -> float:
        """See Budget."""
        return inf

    def begin(self, promises: Collection[float | None]) -> None:
        """See Budget; tokens alone decide."""
        self._alone = True

    def beside(self, slowdown: float, seconds: float) -> None:
        """See Budget."""
        self._alone = slowdown == 1

    def decodes(self, count: int, prompts_wait: bool, step: int) -> int:
        """See Budget."""
        total = self.max_num_batched_tokens
        if not prompts_wait:
            return min(count, total)
        floor = max(1, total // 8) if total > 1 else step % 2
        return min(count, total - floor)

    def chunk(
        self, load: StepLoad, depth: int, wanted: int, *, share: float = 1.0, least: int = 0
    ) -> int:
        """See Budget."""
        room = self.max_num_batched_tokens - load.tokens
        return max(0, min(wanted, room, max(least, int(share * room))))

    def observe(self, load: StepLoad, seconds: float) -> None:
        """See Budget."""
        if self.estimator is not None and self._alone:
            self.estimator.observe(load, seconds)


class TimeBudget:
    """A TokenBudget whose chunks, while decodes run, also fit into a share of `promise_s`, each at
    the depth where it stands. Equal tokens are not equal in time: a chunk behind 4,000 tokens takes
    twice as long as at the start of a small model's prompt."""

    def __init__(
        self,
        max_num_batched_tokens: int,
        promise_s: float,
        estimator: StepTimeEstimator,
        control: ShareControl | None = None,
        quantum_s: float = inf,
    ) -> None:
        """`promise_s`: seconds from one token of an answer to its next; inf when only what single
        requests were promised counts. `quantum_s`: seconds of a step without decodes, which is what
        a prompt that comes meanwhile waits for."""
        if promise_s <= 0:
            raise ValueError(f"a promise of {promise_s} s per token cannot be kept")
        self.max_num_batched_tokens = max_num_batched_tokens
        self.promise_s = promise_s
        self.quantum_s = quantum_s
        self.estimator = estimator
        self.control = control or ShareControl()
        self._tokens = TokenBudget(max_num_batched_tokens)
        self._step_promise_s = promise_s
        self._slowdown, self._other_s = 1.0, 0.0

    @property
    def limit_s(self) -> float:
        """See Budget."""
        return self.control.share * self._step_promise_s / self.estimator.guard

    def begin(self, promises: Collection[float | None]) -> None:
        """See Budget."""
        strictest = _STRICTEST * self.promise_s if self.promise_s < inf else _STRICTEST_S
        own = [self.promise_s if p is None else max(p, strictest) for p in promises]
        self._step_promise_s = min(own, default=self.promise_s)
        self._slowdown, self._other_s = 1.0, 0.0

    def beside(self, slowdown: float, seconds: float) -> None:
        """See Budget."""
        self._slowdown, self._other_s = slowdown, seconds

    def decodes(self, count: int, prompts_wait: bool, step: int) -> int:
        """See Budget."""
        return self._tokens.decodes(count, prompts_wait, step)

    def chunk(
        self, load: StepLoad, depth: int, wanted: int, *, share: float = 1.0, least: int = 0
    ) -> int:
        """See Budget."""
        tokens = self._tokens.chunk(load, depth, wanted, share=share, least=least)
        limit_s = self.limit_s if load.decode_context else self.quantum_s
        if tokens <= least or limit_s == inf:
            return tokens
        limit_s = limit_s / self._slowdown - self._other_s
        model = self.estimator.model
        if share < 1.0:
            taken_s = model.predict_s(load)
            limit_s = taken_s + share * (limit_s - taken_s)
        return min(tokens, max(least, model.longest_chunk(depth, load, limit_s)))

    def observe(self, load: StepLoad, seconds: float) -> None:
        """See Budget."""
        if self._slowdown == 1:
            self.estimator.observe(load, seconds)
        if load.kind == "mixed" and self._step_promise_s != inf:
            self.control.observe((seconds + self._other_s) / self._step_promise_s)
