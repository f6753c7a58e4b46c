"""How long a step takes, by a formula.

Owns: StepLoad (what of a step its time depends on), StepTimeModel (a formula with non-negative
weights), its fit to a calibration, and the model before one. Does not own: the weights in force
while steps are run (step_time_estimator.py), what is done with a prediction (budget.py), or how
long images take (encode_time.py). Imports no torch.

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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, sqrt

import numpy as np

from chunked_prefill.least_squares import non_negative_least_squares

_FAINT_WEIGHT = 0.1
"""Of the prior's rows against one observation of a calibration, which sees all."""
SHORTEST_S = 1e-6
"""No step is shorter; weights that were fitted to hardly anything may say so."""
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
        return seconds if seconds > SHORTEST_S else SHORTEST_S

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


def features_of(loads: Sequence[StepLoad], form: StepTimeModel) -> np.ndarray:
    """[n, 7]."""
    return np.array([form.features(load) for load in loads], dtype=np.float64)


def fit(loads: Sequence[StepLoad], seconds: Sequence[float], prior: StepTimeModel) -> StepTimeModel:
    """The model nearest to what was measured, by relative error: non-negative least squares for
    every knee that has steps on both sides. `prior` knows the tiles, which noise would hide, and
    decides, at the pace of what was measured, what no step says."""
    took = np.asarray(seconds)
    pace = float(np.median([s / prior.predict_s(x) for x, s in zip(loads, seconds, strict=True)]))
    priced = np.array([pace * prior.predict_s(load) for load in TYPICAL])
    best: StepTimeModel | None = None
    least = np.inf
    for knee in _KNEES:
        past = sum(load.tokens > 2 * knee for load in loads)
        if knee and min(past, len(loads) - past) < _EITHER_SIDE * len(loads):
            continue
        form = replace(prior, knee_tokens=knee)
        rows = features_of(loads, form) / took[:, None]
        known = features_of(TYPICAL, form) / priced[:, None]
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


TYPICAL = (
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
