"""How near the step-time model comes to steps that it was not made from.

Owns: the runs and their table. Does not own: calibration (lm_engine/calibration.py) or the formula
(chunked_prefill/step_time.py).

Each run calibrates a new engine, then times held-out mixed steps: a chunk of 1 to 1,024 tokens or
none, beside 0 to 16 decodes, all at depths of 0 to 8k, and images where the model sees. Steps are
repeated in new orders; what differs between equal steps is their spread, which no model foretells:
where its 95th percentile is large, other programs took the cores. `calibrated` is the model as it
was fitted, `serving` the same corrected by each step as it comes, as the server does it. The bounds
are for `serving`. A second table has `calibrated` against the median of equal steps, by kind, chunk
and number of decodes.

Run it on an idle machine, at usual priority: real-time priority does not help, for the kernel
gives everybody else 50 ms of each core's second, and a step that meets them takes so much longer.

python -m benchmarks.step_time --model FOLDER [--runs 5] [--threads 2] [--steps 40] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from chunked_prefill.calibration_file import CALIBRATION_S, Calibration, CalibrationProgress
from chunked_prefill.encode_time import EncodeTimes
from chunked_prefill.step_time import StepLoad, StepTimeModel
from chunked_prefill.step_time_estimator import StepTimeEstimator
from lm_engine.calibration import random_steps, spread_of
from lm_engine.calibration_images import Encodings
from lm_engine.calibration_steps import Chunks, Probe
from lm_engine.engine import Engine
from lm_engine.options import EngineOptions
from lm_engine.process.threads import ThreadShare

REPEATS = 3
CHUNK = 1024
DEPTH = 8192
IMAGES_S = 20.0
CHUNKS = (2, 3, 22, 43, 65, 129, 257, 513, CHUNK + 1)
DECODES = (0, 1, 2, 3, 5, 9, 13, 17)
"""Where ranges of the second table begin."""


@dataclass(frozen=True, slots=True)
class Errors:
    """predicted / measured - 1."""

    median: float
    p95: float
    bias: float
    """The median with its sign."""

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Errors:
        """(predicted, measured) seconds."""
        off = [predicted / measured - 1 for predicted, measured in pairs]
        sizes = sorted(abs(x) for x in off)
        return cls(median(sizes), sizes[round(0.95 * (len(sizes) - 1))], median(off))


@dataclass(frozen=True, slots=True)
class Timed:
    """A step that was run, and what was foretold of it."""

    chunks: Chunks
    seconds: float
    calibrated_s: float
    serving_s: float


@dataclass(frozen=True, slots=True)
class Run:
    seconds: float
    """That the calibration took."""
    model: StepTimeModel
    steps: list[Timed]
    spread: float
    """Of equal steps: the median, and the 95th percentile."""
    spread_p95: float
    calibrated: Errors
    serving: Errors
    images: Errors | None

    @property
    def held(self) -> bool:
        """Within the bounds that the spread leaves possible."""
        found = self.serving
        return (
            found.median <= max(0.05, 1.5 * self.spread)
            and found.p95 <= max(0.15, 3 * self.spread)
            and abs(found.bias) <= 0.03
        )


def engine_of(model: str, threads: int, kv_bytes: int) -> Engine:
    options = EngineOptions(
        model,
        threads=threads,
        max_num_batched_tokens=CHUNK,
        kv_memory_bytes=kv_bytes,
        prefix_caching=False,
    )
    ThreadShare(None, threads).settle()
    engine = Engine.load(options)
    engine.calibration_file = None  # a benchmark leaves nothing behind
    return engine


def calibrate(engine: Engine, seconds: float) -> Calibration:
    shown_s = -1.0
    for item in engine.calibrate(seconds):
        if isinstance(item, Calibration):
            print(file=sys.stderr)
            return item
        if isinstance(item, CalibrationProgress) and item.done_s - shown_s > 0.5:
            shown_s = item.done_s
            done = min(1.0, item.done_s / item.total_s)
            bar = "#" * int(30 * done)
            print(f"\rcalibrating [{bar:30}] {done:4.0%}", end="", file=sys.stderr, flush=True)
    raise AssertionError("a calibration ends with its result")


def held_out(engine: Engine, found: Calibration, seed: int, count: int) -> Run:
    steps = random_steps(engine, count, seed, DEPTH)
    probe, rng = Probe(engine), random.Random(seed)
    estimator = StepTimeEstimator(found.model, found.residuals)
    timed = []
    for _ in range(REPEATS):
        rng.shuffle(steps)
        for step in steps:
            load, took_s = StepLoad.of(step), probe.run(step)
            timed.append(
                Timed(step, took_s, found.model.predict_s(load), estimator.predict_s(load))
            )
            estimator.observe(load, took_s)
    times = equal_steps(timed).values()
    return Run(
        found.seconds,
        found.model,
        timed,
        spread_of(times),
        spread_of(times, 0.95),
        Errors.of([(step.calibrated_s, step.seconds) for step in timed]),
        Errors.of([(step.serving_s, step.seconds) for step in timed]),
        images(engine, found),
    )


def equal_steps(timed: Sequence[Timed]) -> dict[Chunks, list[float]]:
    times: dict[Chunks, list[float]] = {}
    for step in timed:
        times.setdefault(step.chunks, []).append(step.seconds)
    return times


def images(engine: Engine, found: Calibration) -> Errors | None:
    if engine.images is None or engine.plan_images is None or found.encode is None:
        return None
    encodings = Encodings(engine.images, engine.plan_images, time.perf_counter() + IMAGES_S)
    for _ in encodings.run():
        pass
    pace, pairs = EncodeTimes(found.encode), []
    for tiles, took_s in encodings.times:
        pairs.append((pace.seconds(tiles), took_s))
        pace.observe(tiles, took_s)
    return Errors.of(pairs) if pairs else None


def cells(found: Errors | None) -> str:
    if found is None:
        return " | | "
    return f"{found.median:.1%} | {found.p95:.1%} | {found.bias:+.1%}"


def table(runs: Sequence[Run]) -> str:
    lines = [
        "| run | calibrated in | spread of equal steps: median | p95 | calibrated: median | p95 "
        "| bias | serving: median | p95 | bias | images: median | p95 | bias | held |",
        "|" + "---|" * 14,
    ]
    for number, run in enumerate(runs, 1):
        lines.append(
            f"| {number} | {run.seconds:.0f} s | {run.spread:.1%} | {run.spread_p95:.1%} "
            f"| {cells(run.calibrated)} "
            f"| {cells(run.serving)} | {cells(run.images)} | {'yes' if run.held else 'no'} |"
        )
    return "\n".join(lines)


def groups_of(step: Chunks) -> Iterator[str]:
    """Kind, and ranges of the chunk's length and of the number of decodes."""
    yield StepLoad.of(step).kind
    longest = max(length for _, length in step)
    if longest > 1:
        yield _range_of(longest, CHUNKS, "chunk tokens")
    yield _range_of(sum(length == 1 for _, length in step), DECODES, "decodes")


def _range_of(value: int, bounds: Sequence[int], unit: str) -> str:
    above = bisect_right(bounds, value)
    low, high = bounds[above - 1], bounds[above] - 1
    return f"{low} {unit}" if low == high else f"{low} to {high} {unit}"


def groups_table(runs: Sequence[Run]) -> str:
    """By groups of steps of all runs: how far `calibrated` is from the median of equal steps."""
    found: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        for step, same in equal_steps(run.steps).items():
            pair = (run.model.predict_s(StepLoad.of(step)), median(same))
            for group in groups_of(step):
                found.setdefault(group, []).append(pair)
    lines = ["| steps with | how many | median | p95 | bias |", "|" + "---|" * 5]
    # By unit, then by number.
    for group in sorted(found, key=lambda name: (name.split()[-1], name.split()[0].zfill(8))):
        lines.append(f"| {group} | {len(found[group])} | {cells(Errors.of(found[group]))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40, help="held-out steps of a run")
    parser.add_argument("--seconds", type=float, default=CALIBRATION_S, help="of a calibration")
    parser.add_argument("--kv-gb", type=float, default=3.0, help="KV pool; bounds the contexts")
    parser.add_argument("--json", type=Path, help="also write the runs and every step here")
    args = parser.parse_args()
    runs: list[Run] = []
    for seed in range(args.runs):
        engine = engine_of(args.model, args.threads, int(args.kv_gb * 1e9))
        try:
            found = calibrate(engine, args.seconds)
            if seed == 0:
                print(f"{replace(found, residuals=())}", file=sys.stderr)
            runs.append(held_out(engine, found, seed, args.steps))
        finally:
            engine.close()
        del engine
        gc.collect()
        print(f"\n{table(runs)}", flush=True)
    print(f"\n{groups_table(runs)}")
    print(f"\nheld in {sum(run.held for run in runs)} of {len(runs)} runs")
    if args.json:
        args.json.write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n")


if __name__ == "__main__":
    main()
