"""How near the step-time model comes to steps that it was not made from.

Owns: the runs and their table. Does not own: calibration (lm_engine/calibration.py) or the formula
(chunked_prefill/step_time.py).

Each run calibrates a new engine, then times held-out mixed steps: a chunk of 1 to 1,024 tokens or
none, beside 0 to 16 decodes, all at depths of 0 to 8k, and images where the model sees. Steps are
repeated in new orders; what differs between equal steps is their spread, which no model foretells.
`calibrated` is the model as it was fitted, `serving` the same corrected by each step as it comes,
as the server does it. The bounds are for `serving`.

python -m benchmarks.step_time --model FOLDER [--runs 5] [--threads 2] [--steps 40] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from chunked_prefill.calibration_file import CALIBRATION_S, Calibration, CalibrationProgress
from chunked_prefill.encode_time import EncodeTimes
from chunked_prefill.step_time import StepLoad, StepTimeEstimator
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
        return cls(median(sizes), sizes[int(0.95 * (len(sizes) - 1))], median(off))


@dataclass(frozen=True, slots=True)
class Run:
    seconds: float
    """That the calibration took."""
    spread: float
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
    times: dict[Chunks, list[float]] = {step: [] for step in steps}
    fitted: list[tuple[float, float]] = []
    served: list[tuple[float, float]] = []
    for _ in range(REPEATS):
        rng.shuffle(steps)
        for step in steps:
            load, took_s = StepLoad.of(step), probe.run(step)
            times[step].append(took_s)
            fitted.append((found.model.predict_s(load), took_s))
            served.append((estimator.model.predict_s(load), took_s))
            estimator.observe(load, took_s)
    return Run(
        found.seconds,
        spread_of(list(times.values())),
        Errors.of(fitted),
        Errors.of(served),
        images(engine, found),
    )


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
        "| run | calibrated in | spread of equal steps | calibrated: median | p95 | bias "
        "| serving: median | p95 | bias | images: median | p95 | bias | held |",
        "|" + "---|" * 13,
    ]
    for number, run in enumerate(runs, 1):
        lines.append(
            f"| {number} | {run.seconds:.0f} s | {run.spread:.1%} | {cells(run.calibrated)} "
            f"| {cells(run.serving)} | {cells(run.images)} | {'yes' if run.held else 'no'} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40, help="held-out steps of a run")
    parser.add_argument("--seconds", type=float, default=CALIBRATION_S, help="of a calibration")
    parser.add_argument("--kv-gb", type=float, default=3.0, help="KV pool; bounds the contexts")
    parser.add_argument("--json", type=Path, help="also write the runs here")
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
    print(f"\nheld in {sum(run.held for run in runs)} of {len(runs)} runs")
    if args.json:
        args.json.write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n")


if __name__ == "__main__":
    main()
