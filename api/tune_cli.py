"""`longlens tune`: settings that keep a promise on given traffic.

Owns: the verb and its flags. Does not own: the work (tune_run.py), or how a flag of `bench` is read
(bench_cli.py).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from api.bench_cli import (
    BenchFlags,
    Duration,
    Factor,
    LongPrompts,
    Seconds,
    factor,
    long_prompts,
    reader,
)

_UNCHANGED, _BEGINNING, _EXCERPT = Factor(1), Duration(0), Duration(45)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class TuneFlags:
    """What is promised, on which traffic, and where.

    Parameters
    ----------
    ttft_p95
        Promised time to first token at the 95th percentile, such as 200ms.
    tpot_p95
        Promised time per output token at the 95th percentile, such as 50ms.
    trace
        Azure CSV, Mooncake JSONL or own JSONL.
    workload
        Made-up traffic, such as chat:rate=2,input=300,output=60,images=0.2x1-4.
    url
        A running server, started with --allow-tuning; without it one is started here.
    config
        YAML file of the server's other settings; they are taken over into the result.
    out
        Folder for the results.
    rate
        Requests a second, Poisson, in place of the recorded times.
    speed
        Factor on the recorded rate.
    scale_lengths
        Factor on prompt and output tokens, such as 1/16.
    long
        Share of prompts to replace by long ones, such as 0.01x2048-4096.
    start
        Where in the recording to begin, such as 60s.
    duration
        How much of it is replayed for each verification [45s].
    seed
        Decides arrivals, lengths and the search.
    api_key
        Key of the server.
    """

    ttft_p95: Seconds
    tpot_p95: Seconds
    trace: Path | None = None
    workload: str | None = None
    url: str | None = None
    config: Path | None = None
    out: Path = Path("longlens-tune")
    rate: float | None = None
    speed: float = 1.0
    scale_lengths: Annotated[Factor, reader(factor)] = _UNCHANGED
    long: Annotated[LongPrompts | None, reader(long_prompts)] = None
    start: Seconds = _BEGINNING
    duration: Seconds = _EXCERPT
    seed: int = 0
    api_key: str | None = None

    def traffic(self, replication: int = 0) -> BenchFlags:
        """The excerpt that is verified, or another one of the same traffic: what follows it in a
        recording, another draw of a workload."""
        return BenchFlags(
            trace=self.trace,
            workload=self.workload,
            rate=self.rate,
            speed=self.speed,
            scale_lengths=self.scale_lengths,
            long=self.long,
            start=Duration(self.start + replication * self.duration * self.speed)
            if self.trace is not None
            else self.start,
            duration=self.duration,
            seed=self.seed + replication,
            ttft_slo=self.ttft_p95,
            tpot_slo=self.tpot_p95,
            api_key=self.api_key,
        )


def tune(model: str = "demo", /, flags: TuneFlags | None = None) -> int:
    """Find the settings of MODEL's server that keep a promise on given traffic.

    Calibrates the server, simulates many settings with the server's own scheduler, verifies the
    best three on the running server, and writes a configuration for `longlens serve --config`, a
    report and a plot. Exits with 3 where the promise cannot be kept.
    """
    from api.tune_run import USER_ERRORS, run

    if flags is None:
        print("longlens: --ttft-p95 and --tpot-p95 are needed", file=sys.stderr)
        return 1
    try:
        return run(model, flags)
    except USER_ERRORS as error:
        print(f"longlens: {error}", file=sys.stderr)
        return 1
