"""Policies compared in the simulator, and how fast it is: an 8B model on one H200.

Run: python -m benchmarks.simulator [--trace FILE] [--seconds 300] [--rate 6] [--long 0.003]
     [--policies 512 2048 8192 edf-512 deadline] [--linear] [--bias 0.7] [--shift 150]
     [--seed 0] [--runs 1] [--json FILE]

A number is a static token budget by arrival, `edf-N` the same by deadline, `deadline` what `serve`
does: by deadline, in milliseconds. All see the same requests. Steps take a roofline's time, of
which the scheduler has a model as a calibration gives it; with `--linear` it begins with one
without the knee between reading the weights and computing. With `--bias` it believes so many times
what it has learnt, for ever. `--shift` doubles the steps' time from that second on, as another user
of the device would. All `--runs` are equal but for their speed, of which the median is told.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from chunked_prefill.budget import Budget, TimeBudget, TokenBudget
from chunked_prefill.goodput import Promise, Report, goodput_over_time
from chunked_prefill.policy import Deadline, Fcfs, Policy, TtftPromise
from chunked_prefill.scheduler import Scheduler
from chunked_prefill.simulator import Outcome, Simulator, VirtualClock
from chunked_prefill.simulator_executor import ModelExecutor, shift
from chunked_prefill.simulator_pool import counting_kv
from chunked_prefill.step_time import StepLoad, StepTimeModel
from chunked_prefill.step_time_estimator import StepTimeEstimator
from chunked_prefill.trace import TraceRequest, read_trace
from chunked_prefill.workload import Changes, changed, synthesize

PARAMETERS, LAYERS, WIDTH, KV_BYTES = 8.03e9, 32, 4096, 131_072
FLOPS, BYTES_S = 0.6 * 989.5e12, 0.8 * 4.8e12
"""H200, dense bf16: 60 % of the arithmetic and 80 % of the memory's rate."""
READ_S = 2 * PARAMETERS / BYTES_S
TOKEN_S = 2 * PARAMETERS / FLOPS
CONTEXT_S = KV_BYTES / BYTES_S
PAIR_S = 4 * WIDTH * LAYERS / FLOPS
KV_TOKENS = 800_000
LAUNCH_S, SEQUENCE_S = 0.001, 1e-5
MOST_TOKENS = 8192
TTFT_S, TPOT_S, STRETCH = 1.0, 0.05, 5.0
PROMISE = Promise(TTFT_S, TPOT_S, isolated_factor=STRETCH)
LONG_TOKENS = 131_072


class BiasedEstimator(StepTimeEstimator):
    """Whatever it learns, it believes `bias` times that."""

    def __init__(self, prior: StepTimeModel, bias: float) -> None:
        self._bias = bias
        super().__init__(prior)

    @property
    def model(self) -> StepTimeModel:  # type: ignore[override]
        return self._believed

    @model.setter
    def model(self, learnt: StepTimeModel) -> None:
        self._believed = learnt.scaled(self._bias)


def roofline_s(load: StepLoad) -> float:
    """Weights are read once or arithmetic binds; attention comes on top."""
    return (
        LAUNCH_S
        + SEQUENCE_S * load.sequences
        + max(READ_S, TOKEN_S * load.tokens)
        + CONTEXT_S * load.decode_context
        + PAIR_S * load.chunk_pairs
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, help="lengths of this trace instead of a workload")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--rate", type=float, default=6.0)
    parser.add_argument("--long", type=float, default=0.003, help="share of 128k prompts")
    parser.add_argument(
        "--policies", nargs="+", default=["512", "2048", "8192", "edf-512", "deadline"]
    )
    parser.add_argument("--linear", action="store_true", help="begin with a model without a knee")
    parser.add_argument("--bias", type=float, default=1.0, help="factor on all predictions")
    parser.add_argument("--shift", type=float, help="second from which steps take twice as long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=1, help="of each policy, for its speed")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [_measure(name, args) for name in args.policies]
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


def _requests(args: argparse.Namespace) -> list[TraceRequest]:
    long = (LONG_TOKENS, LONG_TOKENS)
    if args.trace is None:
        spec = f"chat:rate={args.rate},long={args.long}x{long[0]}-{long[1]},duration={args.seconds}"
        return list(synthesize(spec, args.seed))
    changes = Changes(
        duration_s=args.seconds,
        poisson_rate=args.rate,
        long_share=args.long,
        long_tokens=long,
        seed=args.seed,
    )
    return list(changed(itertools.cycle(read_trace(args.trace)), changes))


def simulate(
    policy: str,
    requests: Iterable[TraceRequest],
    *,
    linear: bool = False,
    bias: float = 1.0,
    factor: float | Callable[[float], float] = 1.0,
) -> Outcome:
    """The requests on an 8B and one H200, by one of the policies above. `factor`: see
    ModelExecutor."""
    knee = 0 if linear else round(READ_S / TOKEN_S)
    truth = StepTimeModel(
        READ_S + LAUNCH_S, SEQUENCE_S, TOKEN_S, CONTEXT_S, PAIR_S, knee_tokens=knee
    )
    estimator = StepTimeEstimator(truth) if bias == 1 else BiasedEstimator(truth, bias)
    budget: Budget = TimeBudget(MOST_TOKENS, TPOT_S, estimator)
    order: Policy = Deadline(TtftPromise(TTFT_S, STRETCH), lambda: estimator.model, MOST_TOKENS)
    if policy != "deadline":
        budget = TokenBudget(int(policy.removeprefix("edf-")), estimator)
        order = order if policy.startswith("edf-") else Fcfs()
    clock = VirtualClock()
    scheduler = Scheduler(counting_kv(KV_TOKENS // 16, 16), budget, 256, policy=order, clock=clock)
    simulator = Simulator(
        scheduler,
        clock,
        ModelExecutor(roofline_s, factor=factor),
        alone_s=lambda tokens: truth.prefill_s(0, tokens, MOST_TOKENS),
    )
    return simulator.run(requests)


def _measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    requests = _requests(args)
    factor = 1.0 if args.shift is None else shift((args.shift,), (1.0, 2.0))
    taken_s = []
    for _ in range(args.runs):
        start_s = time.process_time()
        outcome = simulate(name, requests, linear=args.linear, bias=args.bias, factor=factor)
        taken_s.append(time.process_time() - start_s)
    return _row(name, outcome, statistics.median(taken_s))


def _row(name: str, outcome: Outcome, cpu_s: float) -> dict[str, Any]:
    promise = PROMISE
    report = Report.of(outcome.times, promise)
    longs = [t.ttft_s for t in outcome.times if t.prompt_tokens >= LONG_TOKENS]
    row: dict[str, Any] = {
        "policy": name,
        **report.as_json(),
        "long_ttft_median_s": statistics.median(longs) if longs else None,
        "long_requests": len(longs),
        "late_ttft_parts": outcome.ttft_parts(promise),
        "goodput_over_time": [
            (start_s, kept.value)
            for start_s, kept, _ in goodput_over_time(outcome.times, promise, 10.0)
        ],
        "simulated_s": outcome.end_s,
        "cpu_s": cpu_s,
        "steps": outcome.steps,
    }
    kept = report.goodput
    print(
        f"{name:>9}  goodput {kept.value:6.1%} [{kept.low:.1%}, {kept.high:.1%}]  "
        f"TTFT p95 {report.ttft_s.p95:7.3f} s  TPOT p95 {report.tpot_s.p95 * 1e3:5.1f} ms  "
        f"gap p99 {report.max_gap_s.p99 * 1e3:6.1f}, worst {report.max_gap_s.max * 1e3:6.1f} ms  "
        f"long TTFT {row['long_ttft_median_s'] or 0:5.1f} s  |  {outcome.end_s / cpu_s:.0f} x real "
        f"time, {outcome.steps / cpu_s:.0f} steps/s, {report.requests / cpu_s:.0f} requests/s",
        flush=True,
    )
    return row


if __name__ == "__main__":
    main()
