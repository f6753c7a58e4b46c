"""How long a step takes, learnt from the steps that were run.

Owns: StepLoad (what of a step its time depends on), StepTimeModel (a formula with non-negative
weights), and StepTimeEstimator (the weights, from a coarse prior to what this engine measured).
Does not own: clocks (the caller measures), or what is done with a prediction (budget.py).
Imports no torch.

    t = t0 + t1 n_seq + a T + b Σ_decode ctx + c Σ_chunk l (h + l/2)

T tokens in all, h a chunk's context before it, l its length: a constant, a price per sequence, the
linears, and attention, whose work for a decode grows with its context and for a chunk with the
pairs of rows and keys.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

_WINDOW = 48
"""Observations kept of each kind of step; the machine of a minute ago may be another one."""
_REFIT_EVERY = 8
_PRIOR_WEIGHT = 0.3
"""Of the prior's rows against one observation: enough to decide what nothing was seen of."""
_GUARD_QUANTILE = 0.9
_GUARD_WINDOW = 64
_SHORTEST_S = 1e-6
"""No step is shorter; weights that were fitted to hardly anything may say so."""
_OUTLIER = 4.0
"""Steps this many times over or under the prediction say nothing about the next (a stopped
process, a page fault storm) and would bend every weight."""


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What of a step its time depends on."""

    tokens: int
    sequences: int
    decode_context: int
    """Tokens of context over all sequences that advance by one token."""
    chunk_pairs: float
    """Σ l (h + l/2) over longer chunks."""

    @classmethod
    def of(cls, chunks: Iterable[tuple[int, int]]) -> StepLoad:
        """`chunks` are (start, length): `length` tokens after a context of `start`."""
        tokens = sequences = decode_context = 0
        pairs = 0.0
        for start, length in chunks:
            tokens += length
            sequences += 1
            if length == 1:
                decode_context += start + 1
            else:
                pairs += length * (start + length / 2)
        return cls(tokens, sequences, decode_context, pairs)

    @property
    def kind(self) -> str:
        if self.chunk_pairs == 0:
            return "decode"
        return "prefill" if self.decode_context == 0 else "mixed"


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """Weights of the formula, in seconds per unit; none is negative."""

    constant_s: float
    sequence_s: float
    token_s: float
    decode_context_s: float
    pair_s: float

    def predict_s(self, load: StepLoad) -> float:
        # Written out: a search over plans asks this a hundred thousand times.
        return max(
            _SHORTEST_S,
            self.constant_s
            + self.sequence_s * load.sequences
            + self.token_s * load.tokens
            + self.decode_context_s * load.decode_context
            + self.pair_s * load.chunk_pairs,
        )

    def prefill_s(self, start: int, end: int, chunk_tokens: int) -> float:
        """Tokens [start, end) of one sequence computed alone, in chunks of `chunk_tokens`."""
        tokens = max(0, end - start)
        steps = -(-tokens // chunk_tokens)
        # The pairs of all chunks add up to those of one.
        pairs = tokens * (start + tokens / 2)
        fixed = steps * (self.constant_s + self.sequence_s)
        return fixed + tokens * self.token_s + pairs * self.pair_s

    def longest_chunk(self, depth: int, load: StepLoad, limit_s: float) -> int:
        """Most tokens of a further chunk at `depth` with which a step of `load` stays within
        `limit_s`; 0 if none does."""
        room = limit_s - self.predict_s(load) - self.sequence_s
        if room <= 0:
            return 0
        # pair_s l²/2 + (token_s + pair_s depth) l = room, solved without cancellation.
        slope = self.token_s + self.pair_s * depth
        if slope <= 0 and self.pair_s <= 0:
            return 1 << 30
        root = float(np.sqrt(slope * slope + 2 * self.pair_s * room))
        return int(2 * room / (slope + root))


def _feature_row(load: StepLoad) -> tuple[float, ...]:
    return (1.0, load.sequences, load.tokens, load.decode_context, load.chunk_pairs)


def _features(loads: Sequence[StepLoad]) -> np.ndarray:
    return np.array([_feature_row(load) for load in loads], dtype=np.float64)


def _weights(model: StepTimeModel) -> tuple[float, ...]:
    """In the order of the features."""
    return (
        model.constant_s,
        model.sequence_s,
        model.token_s,
        model.decode_context_s,
        model.pair_s,
    )


class StepTimeEstimator:
    """The model in force, and the observations it comes from."""

    def __init__(self, prior: StepTimeModel) -> None:
        self.model = prior
        self.num_observed = 0
        self._surprises = 0
        """Outliers in a row."""
        self._prior = prior
        self._seen: dict[str, _Window] = {}
        self._typical = _features(_TYPICAL)
        self._priced = self._typical @ np.array(_weights(prior))
        """What the prior says of the typical loads."""
        self._ratios: deque[float] = deque(maxlen=_GUARD_WINDOW)
        self._guard: float | None = None
        """Known until the next step is observed."""

    @property
    def guard(self) -> float:
        """Factor on predictions under which nine steps in ten stay; at least 1."""
        if self._guard is None:
            enough = len(self._ratios) >= _REFIT_EVERY
            high = float(np.quantile(self._ratios, _GUARD_QUANTILE)) if enough else 1.0
            self._guard = max(1.0, high)
        return self._guard

    def observe(self, load: StepLoad, seconds: float) -> None:
        """A step of `load` took `seconds` > 0."""
        self._guard = None
        seconds = max(seconds, _SHORTEST_S)
        ratio = seconds / self.model.predict_s(load)
        if self.num_observed >= 2 * _REFIT_EVERY:
            if not 1 / _OUTLIER < ratio < _OUTLIER:
                self._surprises += 1
                if self._surprises < _REFIT_EVERY:
                    return
                # Not a hiccup: the machine has changed, and what it was says nothing any more.
                self._seen.clear()
                self._ratios.clear()
                self.num_observed = 0
            else:
                self._ratios.append(ratio)
        self._surprises = 0
        self.num_observed += 1
        self._seen.setdefault(load.kind, _Window()).add(load, seconds)
        if self.num_observed % _REFIT_EVERY == 0 or self.num_observed < _REFIT_EVERY:
            self._refit()

    def _refit(self) -> None:
        """Non-negative least squares on relative error, with rows of the prior's own predictions
        for loads around those seen. The prior is scaled to what was seen first: of an unknown
        machine it knows the proportions better than the speed."""
        features = np.concatenate([window.features for window in self._seen.values()])
        seconds = np.concatenate([window.seconds for window in self._seen.values()])
        prior = features @ np.array(_weights(self._prior))
        scale = float(np.median(seconds / np.maximum(prior, _SHORTEST_S)))
        rows = np.concatenate(
            (
                features / seconds[:, None],
                _PRIOR_WEIGHT * self._typical / (scale * self._priced)[:, None],
            )
        )
        wanted = np.concatenate((np.ones(len(seconds)), np.full(len(_TYPICAL), _PRIOR_WEIGHT)))
        self.model = StepTimeModel(*non_negative_least_squares(rows, wanted))


class _Window:
    """The last `_WINDOW` observations of one kind."""

    def __init__(self) -> None:
        self._features = np.empty((_WINDOW, 5))
        self._seconds = np.empty(_WINDOW)
        self._count = 0

    def add(self, load: StepLoad, seconds: float) -> None:
        place = self._count % _WINDOW
        self._features[place] = _feature_row(load)
        self._seconds[place] = seconds
        self._count += 1

    @property
    def features(self) -> np.ndarray:
        """[n, 5], in no order."""
        return self._features[: self._count]

    @property
    def seconds(self) -> np.ndarray:
        return self._seconds[: self._count]


_TYPICAL = (
    StepLoad.of([(512, 1)]),
    StepLoad.of([(512, 1)] * 16),
    StepLoad.of([(8192, 1)] * 4),
    StepLoad.of([(0, 64)]),
    StepLoad.of([(0, 512)]),
    StepLoad.of([(8192, 256)]),
)
"""Loads at which the prior has a say."""


def non_negative_least_squares(rows: np.ndarray, wanted: np.ndarray) -> list[float]:
    """x >= 0 that minimises |rows x - wanted|², by Lawson and Hanson's active set ("Solving Least
    Squares Problems", 1974, chapter 23). rows: [n, k] with k small."""
    scale = np.linalg.norm(rows, axis=0)
    scale[scale == 0] = 1.0
    # k is small, n is not: everything is said by the products of columns.
    a = rows / scale
    products, wished = a.T @ a, a.T @ wanted
    size = len(scale)
    x = np.zeros(size)
    free = np.zeros(size, dtype=bool)
    for _ in range(6 * size):
        gradient = wished - products @ x
        gradient[free] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= 1e-10:
            break
        free[best] = True
        while True:
            trial = np.zeros(size)
            trial[free] = np.linalg.lstsq(products[np.ix_(free, free)], wished[free], rcond=None)[0]
            if (trial[free] > 0).all():
                x = trial
                break
            falling = free & (trial <= 0)
            step = float(np.min(x[falling] / (x[falling] - trial[falling])))
            x = x + step * (trial - x)
            free &= x > 1e-12
            x[~free] = 0.0
    return [float(v) for v in x / scale]


def prior_model(
    *, linear_flops_per_token: float, attention_flops_per_pair: float, flops_per_s: float
) -> StepTimeModel:
    """A coarse model from a decoder's arithmetic alone: 2 FLOPs per weight and token, and
    4 d n_heads n_layers per pair of row and key (two products). A decode is priced by its bytes
    elsewhere; here its row costs as much as 12 of a chunk, the usual distance of memory from
    arithmetic."""
    token_s = linear_flops_per_token / flops_per_s
    pair_s = attention_flops_per_pair / flops_per_s
    return StepTimeModel(12 * token_s, token_s / 4, token_s, 4 * pair_s, pair_s)
