"""The simulator against a running server: the same requests, what users saw and what was foretold.

Owns: the three workloads, the way from what was sent to what is simulated, and the verdicts. Does
not own: the server and its load (goodput_live.py), its calibration (api/tune_calibration.py), the
simulator (chunked_prefill/simulator_server.py), or recordings (chunked_prefill/record_replay.py).

The server is calibrated before any workload, and is never asked again. What is simulated is
what it was sent: the lengths that it counted, at the times at which bodies were complete, with the
beginning that all prompts share by the chat template. The simulator knows nothing else of the run.
Everything that the scheduler was told is recorded, and decided again in the end.

python -m benchmarks.validate [--model demo] [--rounds 3] [--seconds 45] [--workloads chat documents
    images] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from api.bench_http import Address
from api.bench_load import Outcome
from api.model_folder import resolve_model
from api.tune_calibration import delays
from api.tune_images import PlannedImages, find_planner
from api.tune_server import Control
from benchmarks.goodput_live import Live, serving
from chunked_prefill.calibration_file import Calibration
from chunked_prefill.encode_time import EncodeTimeModel
from chunked_prefill.goodput import Promise, Report, RequestTimes
from chunked_prefill.record_replay import replay
from chunked_prefill.settings import SchedulingSettings
from chunked_prefill.simulator_vision import VisionStage
from chunked_prefill.trace import TraceRequest
from chunked_prefill.tuner_evaluation import Served
from chunked_prefill.workload import synthesize

WORKLOADS = {
    "chat": "chat:rate=1.5,duration={s},input=90,output=24,spread=0.8",
    "documents": "documents:rate=0.1,duration={s},input=1000-2500,output=32"
    "+chat:rate=0.6,duration={s},input=90,output=24",
    "images": "images:rate=0.5,duration={s},input=60,output=24,images=1x1-4,size=448x448"
    "+chat:rate=0.5,duration={s},input=90,output=24",
}
SETTINGS = SchedulingSettings("deadline", 1.0, 0.2)
PROMISE = Promise(1.0, 0.2, isolated_factor=3.0)
GOODPUT_POINTS, LATENCY = 5.0, 0.15
_KV_BYTES = 1 << 30
_SEEDS = 5
"""Simulations of each run, which differ in the residuals of their steps."""
_PROBES = "chat:rate=1.5,duration=20,input=120,output=24"
"""Some of it tells what requests take outside of steps."""


@dataclass(frozen=True, slots=True)
class Figures:
    goodput: float
    ttft_p95_s: float
    tpot_p95_s: float

    @classmethod
    def of(cls, times: Sequence[RequestTimes]) -> Figures:
        report = Report.of(times, PROMISE)
        return cls(report.goodput.value, report.ttft_s.p95, report.tpot_s.p95)


@dataclass(frozen=True, slots=True)
class Comparison:
    workload: str
    requests: int
    live: Figures
    simulated: Figures

    def holds(self) -> bool:
        return (
            abs(self._points) <= GOODPUT_POINTS
            and abs(self._ttft) <= LATENCY
            and abs(self._tpot) <= LATENCY
        )

    @property
    def _points(self) -> float:
        return 100 * (self.simulated.goodput - self.live.goodput)

    @property
    def _ttft(self) -> float:
        return self.simulated.ttft_p95_s / self.live.ttft_p95_s - 1

    @property
    def _tpot(self) -> float:
        return self.simulated.tpot_p95_s / self.live.tpot_p95_s - 1

    def __str__(self) -> str:
        live, simulated = self.live, self.simulated
        return (
            f"| {self.workload} | {self.requests} "
            f"| {live.goodput:.1%} / {simulated.goodput:.1%} ({self._points:+.1f}) "
            f"| {live.ttft_p95_s * 1e3:.0f} / {simulated.ttft_p95_s * 1e3:.0f} ({self._ttft:+.0%}) "
            f"| {live.tpot_p95_s * 1e3:.0f} / {simulated.tpot_p95_s * 1e3:.0f} ({self._tpot:+.0%}) "
            f"| {'yes' if self.holds() else 'no'} |"
        )


def sent(found: Sequence[tuple[Outcome, RequestTimes]], head: int) -> list[TraceRequest]:
    """What the server got of it, by arrival. `head`: tokens with which every prompt begins."""
    requests = [
        TraceRequest(
            times.arrival_s,
            times.prompt_tokens - times.image_tokens,
            max(1, times.output_tokens),
            images=outcome.request.images,
            hash_ids=(0,) if head else (),
            block_tokens=max(1, head),
        )
        for outcome, times in found
    ]
    return sorted(requests, key=lambda request: request.arrival_s)


class Validation:
    """A server, and its simulation."""

    def __init__(self, live: Live, folder: Path, calibration: Calibration) -> None:
        self._live = live
        state = live.apply(SETTINGS)
        # The second of two prompts finds what they share, which is the template's beginning.
        apart = [TraceRequest(at, 100, 2) for at in (0.0, 5.0)]
        self._head = live.replay(apart)[1].cached_tokens
        requests = list(synthesize(_PROBES, 99))
        with Control(Address.parse(live.url), None) as control:
            pictures = find_planner(folder)
            encode = calibration.encode or EncodeTimeModel()
            images = None if pictures is None else partial(PlannedImages, pictures, encode)
            self.served = Served(
                calibration.model,
                state.kv_blocks,
                state.block_size,
                state.prefix_caching,
                calibration.residuals,
                images=images,
                vision=lambda: VisionStage(own_process=state.own_process, slowdown=state.slowdown),
            )
            outside = delays(control, live, self.served, requests, _silent)
            self.served = replace(self.served, delays=outside)
        print(f"outside of steps: {outside}", flush=True)

    def compare(self, name: str, spec: str, rounds: int) -> Comparison:
        live: list[RequestTimes] = []
        simulated: list[RequestTimes] = []
        for seed in range(rounds):
            found = self._live.answered(list(synthesize(spec, seed)))
            found.sort(key=lambda pair: pair[1].arrival_s)
            requests = sent(found, self._head)
            foretold = [self._simulate(requests, number) for number in range(_SEEDS)]
            times = [
                replace(times, isolated_s=alone.isolated_s)
                for (_, times), alone in zip(found, foretold[0], strict=True)
            ]
            live += times
            simulated += [t for run in foretold for t in run]
            print(f"{name}, round {seed + 1}: live {Figures.of(times)}", flush=True)
            print(f"{name}, round {seed + 1}: simulated {Figures.of(foretold[0])}", flush=True)
        return Comparison(name, len(live), Figures.of(live), Figures.of(simulated))

    def _simulate(self, requests: list[TraceRequest], seed: int) -> list[RequestTimes]:
        """In the order of `requests`."""
        outcome = self.served.simulate(requests, SETTINGS, seed=seed)
        return sorted(outcome.times, key=lambda times: int(times.request_id))


def _silent(done: float, total: float, what: str) -> None:
    """Nobody watches."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="one that sees, for the images")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), metavar="NAME")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    recording = Path(tempfile.mkdtemp(prefix="longlens-validate-")) / "recording.jsonl"
    flags = ("--record", str(recording), "--kv-cache-memory-bytes", str(_KV_BYTES))
    comparisons = []
    with serving(args.model, args.threads, *flags, endpoint="chat") as live:
        validation = Validation(live, resolve_model(args.model), live.calibrate())
        for name in args.workloads:
            spec = WORKLOADS[name].format(s=args.seconds)
            comparisons.append(validation.compare(name, spec, args.rounds))
    print(
        "\n| workload | requests | goodput, live / simulated (points) | TTFT p95 ms | TPOT p95 ms "
        f"| within {GOODPUT_POINTS:g} points and {LATENCY:.0%} |\n|---|---|---|---|---|---|"
    )
    for comparison in comparisons:
        print(comparison)
    again = replay(recording)
    equal = again.decisions - len(again.differences)
    print(f"\ndecisions that came out again: {equal:,} of {again.decisions:,}")
    for difference in again.differences:
        print(difference)
    if args.json:
        found: dict[str, Any] = {
            "comparisons": [_json(comparison) for comparison in comparisons],
            "decisions": again.decisions,
            "different_decisions": len(again.differences),
        }
        args.json.write_text(json.dumps(found, indent=1) + "\n")


def _json(comparison: Comparison) -> dict[str, Any]:
    return {**asdict(comparison), "holds": comparison.holds()}


if __name__ == "__main__":
    main()
