"""The step-time model in force, learnt from the steps that were run.

Owns: StepTimeEstimator, from a prior to what this engine measures: when it is fitted anew, its bias
in between, and the guard on its predictions; RatioCounts, for the metrics. Does not own: the
formula (step_time.py), clocks (the caller measures), or what is done with a prediction (budget.py).
Imports no torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from math import exp, log

import numpy as np

from chunked_prefill.least_squares import non_negative_least_squares
from chunked_prefill.step_time import SHORTEST_S, TYPICAL, StepLoad, StepTimeModel, features_of

_WINDOW = 48
"""Observations kept of each kind of step; the machine of a minute ago may be another one."""
_REFIT_EVERY, _SETTLED, _REFIT_RARELY = 8, 64, 64
"""Steps between two fits: at first, and from when on how many."""
_PRIOR_WEIGHT, _CALIBRATED_WEIGHT = 0.3, 1.5
"""Of the prior's rows against one observation: a coarse one decides what nothing was seen of, a
measured one also what was seen at one corner only."""
_GUARD_QUANTILE = 0.9
_GUARD_WINDOW = 64
_NEW = 1 / 16
"""Weight of the last step in the bias."""
_BIAS_STEPS = 32
"""Steps that the bias is worked out from anew after a fit."""
_BIAS_MIDDLE = 5
"""Steps of which the middle one counts: what stops one step in ten for a moment, as other programs
do, is no property of the next."""
_BIASED = 0.03
"""A bias as large as this is worth a fit."""
_OUTLIER = 4.0
"""Steps this many times over or under the prediction say nothing about the next (a stopped
process, a page fault storm) and would bend every weight."""


class StepTimeEstimator:
    """The model in force, and the observations it comes from.

    Every observation moves a bias, an exponential average of measured over predicted; a fit of all
    weights follows now and then. Decodes alone and steps with chunks have a bias each: where no
    weights describe the machine, the many decodes would correct what the chunks are planned with.
    The model in force has the bias of steps with chunks in it, and the guard is theirs.
    """

    def __init__(self, prior: StepTimeModel, residuals: Sequence[float] = ()) -> None:
        """`residuals`: measured over predicted, where `prior` was measured: then it also knows its
        proportions."""
        self.model = prior
        self.num_observed = 0
        self.predicted_s = self.measured_s = 0.0
        """Sums over all observations, each predicted before it was made."""
        self.ratios = RatioCounts()
        self._start(prior, residuals)

    def _start(self, prior: StepTimeModel, residuals: Sequence[float]) -> None:
        self._surprises = 0
        """Outliers in a row."""
        self._prior = prior
        self.residuals = tuple(residuals)
        """Of the calibration; empty without one."""
        self._trusted = bool(residuals)
        self._seen: dict[str, _Window] = {}
        self._typical = features_of(TYPICAL, prior)
        self._priced = self._typical @ np.array(prior.weights)
        """What the prior says of the typical loads."""
        self._ratios: deque[float] = deque(residuals, maxlen=_GUARD_WINDOW)
        """Of the last steps, at first of the calibration."""
        self._guard: float | None = None
        """Known until the next step is observed."""
        self._fitted = prior
        self._decodes, self._chunks = _Bias(), _Bias()
        self._since_fit, self._wait = 0, _REFIT_EVERY
        """Steps since the last fit, and how many there are at least before a bias asks for one: a
        machine that no weights describe would be fitted for ever."""

    @property
    def guard(self) -> float:
        """Factor on predictions under which nine steps in ten stay; at least 1."""
        if self._guard is None:
            ordered = sorted(self._ratios)
            enough = len(ordered) >= _REFIT_EVERY
            high = ordered[int(_GUARD_QUANTILE * (len(ordered) - 1))] if enough else 1.0
            self._guard = max(1.0, high)
        return self._guard

    @property
    def bias(self) -> float:
        """Measured over what the last fit predicts, over the last steps with chunks; in `model`
        already."""
        return exp(self._chunks.log)

    def predict_s(self, load: StepLoad) -> float:
        """With the bias of its kind."""
        seconds = self.model.predict_s(load)
        if load.chunk_pairs or not self._known:
            return seconds
        return seconds * exp(self._decodes.log - self._chunks.log)

    @property
    def _known(self) -> bool:
        """Whether enough was seen to tell what is usual."""
        return self._trusted or self.num_observed >= 2 * _REFIT_EVERY

    def calibrated(self, model: StepTimeModel, residuals: Sequence[float]) -> None:
        """`model` was measured on this machine just now: what was learnt before is forgotten."""
        self.model = model
        self.num_observed = 0
        self._start(model, residuals)

    def observe(self, load: StepLoad, seconds: float) -> None:
        """A step of `load` took `seconds` > 0."""
        self._guard = None
        seconds = max(seconds, SHORTEST_S)
        predicted_s = self.predict_s(load)
        ratio = seconds / predicted_s
        self.predicted_s += predicted_s
        self.measured_s += seconds
        self.ratios.add(ratio)
        known = self._known
        if known and not 1 / _OUTLIER < ratio < _OUTLIER:
            self._surprises += 1
            if self._surprises < _REFIT_EVERY:
                return
            # Not a hiccup: the machine has changed, and what it was says nothing any more.
            self._seen.clear()
            self._ratios.clear()
            self._decodes, self._chunks = _Bias(), _Bias()
            self._trusted = False
            self._wait = _REFIT_EVERY
            self.num_observed = 0
        elif known and load.chunk_pairs:
            self._ratios.append(ratio)
        self._surprises = 0
        self.num_observed += 1
        self._since_fit += 1
        kind = load.kind
        if kind not in self._seen:
            self._seen[kind] = _Window()
        self._seen[kind].add(self._prior.features(load), seconds)
        bias = self._chunks if load.chunk_pairs else self._decodes
        bias.observe(load, seconds, self._fitted)
        if self._fit_is_due():
            self._refit()
        elif known:
            self.model = self._fitted.scaled(self.bias)

    def _fit_is_due(self) -> bool:
        if self.num_observed < _REFIT_EVERY:
            return not self._trusted
        if self.num_observed <= _SETTLED:
            return self._since_fit >= _REFIT_EVERY
        biased = max(abs(self._decodes.log), abs(self._chunks.log)) >= _BIASED
        if self._since_fit >= (self._wait if biased else _REFIT_RARELY):
            self._wait = min(2 * self._wait, _REFIT_RARELY) if biased else _REFIT_EVERY
            return True
        return False

    def _refit(self) -> None:
        """Non-negative least squares on relative error, with rows of the prior's own predictions
        for typical loads. The prior is scaled to what was seen: of an unknown machine it knows the
        proportions better than the speed."""
        features = np.concatenate([window.features for window in self._seen.values()])
        seconds = np.concatenate([window.seconds for window in self._seen.values()])
        prior = features @ np.array(self._prior.weights)
        scale = float(np.median(seconds / np.maximum(prior, SHORTEST_S)))
        weight = _CALIBRATED_WEIGHT if self._trusted else _PRIOR_WEIGHT
        rows = np.concatenate(
            (
                features / seconds[:, None],
                weight * self._typical / (scale * self._priced)[:, None],
            )
        )
        wanted = np.concatenate((np.ones(len(seconds)), np.full(len(TYPICAL), weight)))
        weights = non_negative_least_squares(rows, wanted)
        self._fitted = self._prior.weighted(weights)
        self._since_fit = 0
        # The fit is a mean of a minute; the bias is that of the last steps.
        self._decodes.restart(self._fitted)
        self._chunks.restart(self._fitted)
        self.model = self._fitted.scaled(self.bias) if self._known else self._fitted


class _Bias:
    """Logarithm of measured over fitted, of one kind of step: an exponential average of what the
    middle one of the last few said."""

    def __init__(self) -> None:
        self.log = 0.0
        self._last: deque[tuple[StepLoad, float]] = deque(maxlen=_BIAS_STEPS)
        self._off: deque[float] = deque(maxlen=_BIAS_MIDDLE)

    def observe(self, load: StepLoad, seconds: float, fitted: StepTimeModel) -> None:
        self._last.append((load, seconds))
        self._follow(log(seconds / fitted.predict_s(load)))

    def restart(self, fitted: StepTimeModel) -> None:
        """From the last steps, by another fit."""
        self.log = 0.0
        self._off.clear()
        for load, seconds in self._last:
            self._follow(log(seconds / fitted.predict_s(load)))

    def _follow(self, off: float) -> None:
        self._off.append(off)
        self.log += (sorted(self._off)[len(self._off) // 2] - self.log) * _NEW


class RatioCounts:
    """How often measured over predicted fell at or under each of `BOUNDS`; the last count has no
    upper bound."""

    BOUNDS = (0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5, 2.0, 4.0)

    def __init__(self) -> None:
        self.counts = [0] * (len(self.BOUNDS) + 1)
        self.total = 0.0

    def add(self, ratio: float) -> None:
        self.counts[bisect_left(self.BOUNDS, ratio)] += 1
        self.total += ratio


class _Window:
    """The last `_WINDOW` observations of one kind."""

    def __init__(self) -> None:
        self._features = np.empty((_WINDOW, 7))
        self._seconds = np.empty(_WINDOW)
        self._count = 0

    def add(self, features: Sequence[float], seconds: float) -> None:
        place = self._count % _WINDOW
        self._features[place] = features
        self._seconds[place] = seconds
        self._count += 1

    @property
    def features(self) -> np.ndarray:
        """[n, 7], in no order."""
        return self._features[: self._count]

    @property
    def seconds(self) -> np.ndarray:
        return self._seconds[: self._count]
