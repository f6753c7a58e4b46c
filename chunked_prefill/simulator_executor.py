"""How long a simulated step takes.

Owns: the Protocol Executor, and two of them: ModelExecutor (a step-time model, its residuals, and
how far it may be wrong) and GivenExecutor (times that were recorded). Does not own: what is in a
step (scheduler.py), or the model's weights (step_time.py). Imports no torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Protocol

from chunked_prefill.step_time import StepLoad

Predict = Callable[[StepLoad], float]
"""Seconds of a step: a StepTimeModel's `predict_s`."""


class Executor(Protocol):
    def execute(self, load: StepLoad, now_s: float) -> float:
        """Seconds from the step's start, at `now_s`, to its tokens."""
        ...


class ModelExecutor:
    """What the model says, times a residual drawn from its quantiles.

    `residuals`: measured / predicted at evenly spaced quantiles from the least to the largest,
    ascending; a draw lies between two of them. Empty draws nothing. `factor`: how many times
    longer than the model says steps really take, e.g. 1.3 for a predictor that is too low, or a
    function of the time at which the step starts.
    """

    def __init__(
        self,
        predict: Predict,
        residuals: Sequence[float] = (),
        *,
        factor: float | Callable[[float], float] = 1.0,
        seed: int = 0,
    ) -> None:
        if any(r <= 0 for r in residuals) or list(residuals) != sorted(residuals):
            raise ValueError(f"residuals must be positive and ascending, got {list(residuals)}")
        self._predict = predict
        self._residuals = tuple(residuals)
        self._factor = factor if callable(factor) else None
        self._constant = 1.0 if callable(factor) else factor
        self._draws = Random(f"{seed} residuals")

    def execute(self, load: StepLoad, now_s: float) -> float:
        seconds = self._predict(load) * self._constant
        if self._factor is not None:
            seconds *= self._factor(now_s)
        if self._residuals:
            place = self._draws.random() * (len(self._residuals) - 1)
            index = int(place)
            low = self._residuals[index]
            high = self._residuals[min(index + 1, len(self._residuals) - 1)]
            seconds *= low + (high - low) * (place - index)
        return seconds


class GivenExecutor:
    """The seconds of each step, in order. Raises ValueError when there are more steps."""

    def __init__(self, seconds: Iterable[float]) -> None:
        self._seconds = iter(seconds)
        self._count = 0

    def execute(self, load: StepLoad, now_s: float) -> float:
        given = next(self._seconds, None)
        if given is None:
            raise ValueError(f"{self._count} steps were given a time, and there are more")
        self._count += 1
        return given


def shift(at_s: Sequence[float], factors: Sequence[float]) -> Callable[[float], float]:
    """A `factor` that changes at given moments: factors[i] from at_s[i - 1] on; there is one more
    factor than there are moments."""
    if len(factors) != len(at_s) + 1 or list(at_s) != sorted(at_s):
        raise ValueError(f"{len(at_s)} ascending moments need one more factor, got {factors}")
    return lambda now_s: factors[bisect_right(at_s, now_s)]
