"""How long a step takes, learnt from the steps that were run.

Owns: StepLoad (what of a step its time depends on), StepTimeModel (a formula with non-negative
weights), its fit, and StepTimeEstimator (the weights in force, from a prior to what this engine
measures). Does not own: clocks (the caller measures), what is done with a prediction (budget.py),
or how long images take (encode_time.py). Imports no torch.

    t = t0 + t1 n_seq + a₀ min(T, K) + a (T - K)⁺ + b Σ_decode ctx
        + c Σ_chunk ⌈l/r⌉ r (h + l/2) + γ Σ_chunk h

T tokens in all, h a chunk's context before it, l its length: a constant, a price per sequence, the
linears, and attention, whose work for a decode grows with its context and for a chunk with the
pairs of rows and keys; a chunk also reads its context once. Kernels take a tile of r rows at a
time, and one that is not full takes as long. Only one or two rows go the way of decodes. Few rows
leave kernels of the linears waiting for memory (a₀ < a beside a large t0: max(W/BW, a T)) or half
empty (a₀ > a), hence the knee K.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, exp, log, sqrt

import numpy as np

from chunked_prefill.least_squares import non_negative_least_squares

_WINDOW = 48
"""Observations kept of each kind of step; the machine of a minute ago may be another one."""
_REFIT_EVERY, _SETTLED, _REFIT_RARELY = 8, 64, 64
"""Steps between two fits: at first, and from when on how many."""
_FAINT_WEIGHT, _PRIOR_WEIGHT, _CALIBRATED_WEIGHT = 0.1, 0.3, 1.5
"""Of the prior's rows against one observation: a coarse one decides what nothing was seen of, and
less than that in a calibration, which sees all; a measured one also decides what was seen at one
corner only."""
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
_SHORTEST_S = 1e-6
"""No step is shorter; weights that were fitted to hardly anything may say so."""
_OUTLIER = 4.0
"""Steps this many times over or under the prediction say nothing about the next (a stopped
process, a page fault storm) and would bend every weight."""
AS_DECODES = 2
"""Longest chunk that is attended as so many decodes."""
_TILE_ROWS = 16.0
"""Where nobody says how many there are."""
_KNEES = (0, 4, 8, 16, 32, 64, 128)
_ROUNDED = 1e-6
"""Of a tile whose rows are no whole number."""
_EITHER_SIDE = 0.15
"""Of the steps, that a knee needs below and well above it."""
_KNEE_GAIN = 0.97
"""Of the error without a knee, that one has to get below."""


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What of a step its time depends on."""

    tokens: int
    sequences: int
    decode_context: int
    """Tokens of context over all tokens of sequences that advance by one or two."""
    chunk_pairs: float
    """Σ l (h + l/2) over longer chunks."""
    chunk_context: int = 0
    """Σ h over longer chunks."""
    chunks: tuple[tuple[int, int], ...] = ()
    """(h, l) of longer chunks, as far as they are known: those here fill whole tiles, whereas what
    is only in the sums has the price of its own rows."""

    @classmethod
    def of(cls, chunks: Iterable[tuple[int, int]]) -> StepLoad:
        """`chunks` are (start, length): `length` tokens after a context of `start`."""
        tokens = sequences = decode_context = chunk_context = 0
        pairs, longer = 0.0, []
        for start, length in chunks:
            tokens += length
            sequences += 1
            if length == 1:
                decode_context += start + 1
            elif length <= AS_DECODES:
                decode_context += length * start + length * (length + 1) // 2
            else:
                pairs += length * (start + length / 2)
                chunk_context += start
                longer.append((start, length))
        return cls(tokens, sequences, decode_context, pairs, chunk_context, tuple(longer))

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
    """Per token past the knee."""
    decode_context_s: float
    pair_s: float
    chunk_context_s: float = 0.0
    few_token_s: float = 0.0
    """Per token up to the knee."""
    knee_tokens: int = 0
    tile_rows: float = 1.0
    """Of a chunk that attention computes at a time; one that is not full takes as long."""

    def predict_s(self, load: StepLoad) -> float:
        # Written out: a search over plans asks this a hundred thousand times.
        tokens, knee = load.tokens, self.knee_tokens
        few = tokens if tokens < knee else knee
        seconds = (
            self.constant_s
            + self.sequence_s * load.sequences
            + self.few_token_s * few
            + self.token_s * (tokens - few)
            + self.decode_context_s * load.decode_context
            + self.pair_s * load.chunk_pairs
            + self.chunk_context_s * load.chunk_context
        )
        if load.chunks:
            seconds += self.pair_s * self._empty_pairs(load)
        return seconds if seconds > _SHORTEST_S else _SHORTEST_S

    def prefill_s(self, start: int, end: int, chunk_tokens: int) -> float:
        """Tokens [start, end) of one sequence computed alone, in chunks of `chunk_tokens`."""
        full, last = divmod(max(0, end - start), chunk_tokens)
        if not full:
            return self._alone_s(start, last) if last else 0.0
        # A chunk's time grows in a straight line with its start.
        middle = start + chunk_tokens * (full - 1) / 2
        rest_s = self._alone_s(start + full * chunk_tokens, last) if last else 0.0
        return full * self._alone_s(middle, chunk_tokens) + rest_s

    def _alone_s(self, start: float, length: int) -> float:
        """A step of one chunk."""
        few = min(length, self.knee_tokens)
        linear_s = few * self.few_token_s + (length - few) * self.token_s
        if length <= AS_DECODES:
            attention_s = self.decode_context_s * length * (start + (length + 1) / 2)
        else:
            pairs = self._in_tiles(length) * (start + length / 2)
            attention_s = self.pair_s * pairs + self.chunk_context_s * start
        return self.constant_s + self.sequence_s + linear_s + attention_s

    def _in_tiles(self, length: int) -> float:
        """Rows of the tiles that a chunk takes."""
        return ceil(length / self.tile_rows - _ROUNDED) * self.tile_rows

    def _empty_pairs(self, load: StepLoad) -> float:
        """Pairs of keys with rows that tiles leave empty."""
        return sum((self._in_tiles(n) - n) * (start + n / 2) for start, n in load.chunks)

    def longest_chunk(self, depth: int, load: StepLoad, limit_s: float) -> int:
        """Most tokens of a further chunk at `depth` with which a step of `load` stays within
        `limit_s`; 0 if none does."""
        room = limit_s - self.predict_s(load) - self.sequence_s
        few = max(0, self.knee_tokens - load.tokens)
        tiled = room - self.chunk_context_s * depth
        # What would fit if every row had its own price ends in the last tile that may.
        most = self._longest(tiled, few, self.pair_s * depth, self.pair_s / 2)
        whole = int(most / self.tile_rows + _ROUNDED) * self.tile_rows
        pair_s = self.pair_s * (whole + self.tile_rows)
        begun = self._longest(tiled - pair_s * depth, few, pair_s / 2, 0.0)
        length = max(int(whole + _ROUNDED), min(begun, most))
        if length > AS_DECODES:
            return length
        for length in range(AS_DECODES, 0, -1):
            linear_s = min(length, few) * self.few_token_s + max(0, length - few) * self.token_s
            context = length * depth + length * (length + 1) // 2
            if linear_s + self.decode_context_s * context <= room:
                return length
        return 0

    def _longest(self, room_s: float, few: int, token_s: float, square_s: float) -> int:
        """Most l with token_s l + square_s l² and the linears, of which `few` are below the knee,
        within `room_s`."""
        if room_s <= 0:
            return 0
        most = 1 << 30
        slope = self.token_s + token_s
        if room_s < few * (self.few_token_s + token_s + square_s * few):
            most, slope = few, self.few_token_s + token_s
        else:
            # As if every token had the price of those past the knee.
            room_s += few * (self.token_s - self.few_token_s)
        if slope <= 0 and square_s <= 0:
            return most
        # The root without cancellation.
        return min(most, int(2 * room_s / (slope + sqrt(slope * slope + 4 * square_s * room_s))))

    def scaled(self, factor: float) -> StepTimeModel:
        """Every step takes `factor` times as long."""
        return self.weighted([factor * weight for weight in self.weights])

    @property
    def weights(self) -> tuple[float, ...]:
        """In the order of `features`."""
        return (
            self.constant_s,
            self.sequence_s,
            self.few_token_s,
            self.token_s,
            self.decode_context_s,
            self.pair_s,
            self.chunk_context_s,
        )

    def weighted(self, weights: Sequence[float]) -> StepTimeModel:
        """With other weights, in the order of `features`."""
        constant, sequence, few, token, context, pair, read = weights
        return StepTimeModel(
            constant, sequence, token, context, pair, read, few, self.knee_tokens, self.tile_rows
        )

    def features(self, load: StepLoad) -> tuple[float, ...]:
        """What the weights are multiplied with."""
        few = min(load.tokens, self.knee_tokens)
        return (
            1.0,
            load.sequences,
            few,
            load.tokens - few,
            load.decode_context,
            load.chunk_pairs + self._empty_pairs(load),
            load.chunk_context,
        )


def _features(loads: Sequence[StepLoad], form: StepTimeModel) -> np.ndarray:
    """[n, 7]."""
    return np.array([form.features(load) for load in loads], dtype=np.float64)


def fit(loads: Sequence[StepLoad], seconds: Sequence[float], prior: StepTimeModel) -> StepTimeModel:
    """The model nearest to what was measured, by relative error: non-negative least squares for
    every knee that has steps on both sides. `prior` knows the tiles, which noise would hide, and
    decides, at the pace of what was measured, what no step says."""
    took = np.asarray(seconds)
    pace = float(np.median([s / prior.predict_s(x) for x, s in zip(loads, seconds, strict=True)]))
    priced = np.array([pace * prior.predict_s(load) for load in _TYPICAL])
    best: StepTimeModel | None = None
    least = np.inf
    for knee in _KNEES:
        past = sum(load.tokens > 2 * knee for load in loads)
        if knee and min(past, len(loads) - past) < _EITHER_SIDE * len(loads):
            continue
        form = replace(prior, knee_tokens=knee)
        rows = _features(loads, form) / took[:, None]
        known = _features(_TYPICAL, form) / priced[:, None]
        weights, error = _robust(rows, known)
        if error < least * (_KNEE_GAIN if best is not None else 1.0):
            best, least = form.weighted(weights), error
    assert best is not None, "a model without a knee can always be fitted"
    return best


def _robust(rows: np.ndarray, known: np.ndarray) -> tuple[list[float], float]:
    """Weights of `rows` that should make 1, as those of the prior should; and their mean error."""
    weight, faint = np.ones(len(rows)), np.full(len(known), _FAINT_WEIGHT)
    for _ in range(4):
        weights = non_negative_least_squares(
            np.concatenate((rows * weight[:, None], known * faint[:, None])),
            np.concatenate((weight, faint)),
        )
        missed = np.abs(rows @ np.array(weights) - 1)
        # Huber's weights: squares near the middle, distances far out.
        usual = max(1.5 * float(np.median(missed)), 1e-6)
        weight = np.sqrt(np.minimum(1.0, usual / np.maximum(missed, 1e-12)))
    return weights, float(np.mean(missed))


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
        self._typical = _features(_TYPICAL, prior)
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
        seconds = max(seconds, _SHORTEST_S)
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
        scale = float(np.median(seconds / np.maximum(prior, _SHORTEST_S)))
        weight = _CALIBRATED_WEIGHT if self._trusted else _PRIOR_WEIGHT
        rows = np.concatenate(
            (
                features / seconds[:, None],
                weight * self._typical / (scale * self._priced)[:, None],
            )
        )
        wanted = np.concatenate((np.ones(len(seconds)), np.full(len(_TYPICAL), weight)))
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


_TYPICAL = (
    StepLoad.of([(512, 1)]),
    StepLoad.of([(512, 1)] * 16),
    StepLoad.of([(8192, 1)] * 4),
    StepLoad.of([(0, 64)]),
    StepLoad.of([(0, 512)]),
    StepLoad.of([(8192, 256)]),
    StepLoad.of([(0, 8)]),
    StepLoad.of([(4096, 32)]),
    StepLoad.of([*[(512, 1)] * 8, (2048, 256)]),
)
"""Loads at which the prior has a say."""


def prior_model(
    *,
    linear_flops_per_token: float,
    attention_flops_per_pair: float,
    flops_per_s: float,
    tile_rows: float = _TILE_ROWS,
) -> StepTimeModel:
    """A coarse model from a decoder's arithmetic alone: 2 FLOPs per weight and token, and
    4 d n_heads n_layers per pair of row and key (two products). A decode is priced by its bytes
    elsewhere; here its row costs as much as 12 of a chunk, the usual distance of memory from
    arithmetic."""
    token_s = linear_flops_per_token / flops_per_s
    pair_s = attention_flops_per_pair / flops_per_s
    return StepTimeModel(
        12 * token_s, token_s / 4, token_s, 4 * pair_s, pair_s, tile_rows=tile_rows
    )
