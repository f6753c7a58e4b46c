"""How long this engine's steps and images take, measured while nobody is served.

Owns: `calibrate` - which steps are run, in which order, for how long - and what follows from their
times. Does not own: one step (calibration_steps.py), images
(calibration_images.py), the formulas (chunked_prefill/step_time.py,
encode_time.py), or where the result is kept (calibration_cache.py).

Steps are mixed as the scheduler mixes them: sums of parts measured one by one are off by half and
more. Every shape is run once, the cheap ones first, then all again in new orders for as long as
there is time, so that a change of the machine's speed meets all shapes alike. A chunk that would
take too much of the time is halved until it does not.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from chunked_prefill import step_time
from chunked_prefill.calibration_file import Calibration, CalibrationError, CalibrationProgress
from chunked_prefill.encode_time import EncodeTimeModel
from chunked_prefill.step_time import StepLoad, StepTimeModel
from lm_engine.attention.native import NativeAttention
from lm_engine.attention.native_plan import LANES
from lm_engine.calibration_images import Encodings
from lm_engine.calibration_steps import Chunks, Probe

if TYPE_CHECKING:
    from lm_engine.engine import Engine

_REPEATS = 5
_MOST_SHARE = 0.03
"""Of the time, for one run of one shape."""
_IMAGES_SHARE = 0.2
_DEEPEST, _LONGEST, _WIDEST = 8192, 1024, 16
_FEWEST_SHAPES = 12
_QUANTILES = 41
_MOST_OFF = 0.25
"""Median residual of a calibration that is believed."""


def calibrate(engine: Engine, seconds: float) -> Iterator[CalibrationProgress | Calibration]:
    """Measures for about `seconds`; a step or an image is computed before each item, the last of
    which is the result. It is in force and kept for later starts by then. Closing the iterator
    early leaves everything as it was. Raises CalibrationError while there is work, or when there is
    no free KV to measure with."""
    if engine.num_requests or engine.has_work():
        raise CalibrationError("requests are being served; calibrate when there are none")
    began_s = time.perf_counter()
    encode = None
    if engine.images is not None and engine.plan_images is not None:
        images = Encodings(engine.images, engine.plan_images, began_s + _IMAGES_SHARE * seconds)
        for detail in images.run():
            yield CalibrationProgress(detail, time.perf_counter() - began_s, seconds)
        encode = images.fit()
    probe = Probe(engine)
    shapes = [s for s in dict.fromkeys(_shapes(engine, probe)) if probe.fits(s)]
    if len(shapes) < _FEWEST_SHAPES:
        raise CalibrationError(
            f"{probe.free_tokens} tokens of free KV are too few to measure with; reset the prefix "
            "cache or raise --kv-cache-memory-bytes"
        )
    rounds = _Rounds(probe, shapes, engine, began_s + seconds)
    try:
        for detail in rounds.run():
            yield CalibrationProgress(detail, time.perf_counter() - began_s, seconds)
    finally:
        probe.give_memory_back()
    result = _result(rounds.times, time.perf_counter() - began_s, encode, rounds.prior)
    engine.scheduler.calibrated(result.model, result.residuals)
    if engine.images is not None and encode is not None:
        engine.images.pace.calibrated(encode)
    engine.calibration = result
    if engine.calibration_file is not None:
        engine.calibration_file.save(result)
    yield result


class _Rounds:
    """All shapes again and again until the time is over."""

    def __init__(
        self, probe: Probe, shapes: Sequence[Chunks], engine: Engine, until_s: float
    ) -> None:
        self._probe = probe
        self._shapes = shapes
        self._until_s = until_s
        self._most_s = _MOST_SHARE * (until_s - time.perf_counter())
        estimator = engine.scheduler.budget.estimator
        if estimator is None:
            raise CalibrationError("this engine does not learn how long its steps take")
        self.prior = replace(estimator.model, tile_rows=_tile_rows(engine, estimator.model))
        self.times: dict[Chunks, list[float]] = {}

    def run(self) -> Iterator[str]:
        """A word about each step that was run."""
        order = sorted(self._shapes, key=lambda s: self.prior.predict_s(StepLoad.of(s)))
        for shape in order[:3]:
            self._probe.run(shape)  # what is allocated or compiled at first use
            yield "first steps"
        for number, shape in enumerate(order):
            cut = self._cut(shape)
            if cut not in self.times and self._left_s() > self._expected_s(cut):
                self._measure(cut)
                yield f"shape {number + 1} of {len(order)}"
        rng = random.Random(0)
        for again in range(1, _REPEATS):
            todo = list(self.times)
            rng.shuffle(todo)
            for shape in todo:
                if self._left_s() > median(self.times[shape]):
                    self._measure(shape)
                    yield f"again, {again} of {_REPEATS - 1}"

    def _measure(self, shape: Chunks) -> None:
        self.times.setdefault(shape, []).append(self._probe.run(shape))

    def _left_s(self) -> float:
        return self._until_s - time.perf_counter()

    def _expected_s(self, shape: Chunks) -> float:
        """What the prior says, at the pace of the last shapes."""
        last = list(self.times.items())[-8:]
        paces = [t[0] / self.prior.predict_s(StepLoad.of(s)) for s, t in last]
        return (median(paces) if paces else 1.0) * self.prior.predict_s(StepLoad.of(shape))

    def _cut(self, shape: Chunks) -> Chunks:
        while self._expected_s(shape) > self._most_s:
            longest = max(range(len(shape)), key=lambda i: shape[i][1])
            start, length = shape[longest]
            if length < 4:
                return shape
            shape = (*shape[:longest], (start, length // 2), *shape[longest + 1 :])
        return shape


def _tile_rows(engine: Engine, prior: StepTimeModel) -> float:
    """Rows of a chunk that one task of attention takes. Of SmolLM2-135M, where three heads share
    keys, a chunk of 3 to 20 tokens behind 6,500 takes 80 to 95 ms with two threads, one of 23
    takes 151."""
    if not isinstance(engine.runner.attention, NativeAttention):
        return prior.tile_rows
    config = engine.runner.decoder.config
    return LANES * config.num_kv_heads / config.num_heads


def _shapes(engine: Engine, probe: Probe) -> Iterator[Chunks]:
    """Decodes alone, chunks alone, and both."""
    longest = min(_LONGEST, engine.info.max_num_batched_tokens)
    free = min(probe.free_tokens, engine.info.max_model_len)
    deepest = max(1, min(_DEEPEST, free - longest))
    widest = min(_WIDEST, engine.info.max_num_seqs)
    for count in sorted({1, 2, 4, 8, widest}):
        if count <= widest:
            for part in (0.01, 0.12, 0.5, 1.0):
                yield ((max(1, int(part * deepest)), 1),) * count
    lengths = [n for n in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if n <= longest]
    for number, length in enumerate(lengths):
        yield ((0, length),)
        yield ((deepest if number % 2 else deepest // 3, length),)
    rng = random.Random(1)
    for number in range(20):
        count = min(widest, 1 + number * 3 % _WIDEST)
        decodes = tuple((int(deepest ** rng.uniform(0.4, 1.0)), 1) for _ in range(count))
        length = lengths[number % len(lengths)] if lengths else 2
        yield (*decodes, (int(rng.random() * deepest), max(2, length - length // 5)))


def random_steps(engine: Engine, count: int, seed: int, deepest: int = _DEEPEST) -> list[Chunks]:
    """Mixed steps that are none of those of a calibration, as far as they fit now: up to 16 decodes
    beside a chunk of 1 to 1,024 tokens, or without one, all at 0 to `deepest` tokens."""
    probe, rng, found = Probe(engine), random.Random(f"held out {seed}"), list[Chunks]()
    longest = min(_LONGEST, engine.info.max_num_batched_tokens)
    deepest = min(deepest, engine.info.max_model_len - longest)
    while len(found) < count:
        decodes = tuple(
            (int(rng.random() * deepest), 1)
            for _ in range(rng.randint(0, min(_WIDEST, engine.info.max_num_seqs - 1)))
        )
        length = round(longest ** rng.random())
        room = longest - len(decodes)
        chunk = ((int(rng.random() * deepest), min(length, room)),) if rng.random() < 0.8 else ()
        if (decodes or chunk) and probe.fits((*decodes, *chunk)):
            found.append((*decodes, *chunk))
    return found


def spread_of(times: Iterable[Sequence[float]], quantile: float = 0.5) -> float:
    """That quantile of |time / median of the same step - 1| over steps that were run more than
    once."""
    off = [abs(t / median(same) - 1) for same in times if len(same) > 1 for t in same]
    return float(np.quantile(off, quantile)) if off else 0.0


def _result(
    times: dict[Chunks, list[float]],
    seconds: float,
    encode: EncodeTimeModel | None,
    prior: StepTimeModel,
) -> Calibration:
    loads = [StepLoad.of(shape) for shape, same in times.items() for _ in same]
    measured = [t for same in times.values() for t in same]
    if len(times) < _FEWEST_SHAPES:
        raise CalibrationError(
            f"only {len(times)} steps could be run in {seconds:.0f} s; allow more time"
        )
    model = step_time.fit(loads, measured, prior)
    ratios = [t / model.predict_s(load) for load, t in zip(loads, measured, strict=True)]
    off = median(abs(ratio - 1) for ratio in ratios)
    if off > _MOST_OFF:
        raise CalibrationError(
            f"half of the steps took {off:.0%} more or less than any model says, since other "
            "programs use this machine; calibrate again when it is quiet"
        )
    quantiles = np.quantile(ratios, np.linspace(0, 1, _QUANTILES))
    return Calibration(
        model,
        tuple(float(q) for q in quantiles),
        spread_of(times.values()),
        len(measured),
        seconds,
        encode,
    )
