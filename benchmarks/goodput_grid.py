"""A tuner's choice against nine live points, on the traffic that it was tuned for.

Owns: the grid and the comparison. Does not own: the tuning (`longlens tune`, whose report this
reads), the server or its load (goodput_live.py).

The grid is what an operator would try by hand: three budgets per step around the promise, by three
numbers of seats. Points are fixed by the promise alone. All nine and the choice run the same
excerpt in turn, round by round; the order turns around in every second round.

python -m benchmarks.goodput_grid --report longlens-tune/tune.json [--rounds 1] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.goodput_live import heading, row, serving
from chunked_prefill.goodput import Promise, Report, RequestTimes
from chunked_prefill.settings import SchedulingSettings
from chunked_prefill.trace import read_trace

BOUND = 0.97
_FACTORS = (0.5, 1.0, 1.5)
"""Of the promised time per token: what a step with prompts may plan for."""
_SEATS = (8, 24, 64)
_CHOICE = "tune's choice"


def grid(ttft_s: float, tpot_s: float) -> dict[str, SchedulingSettings]:
    return {
        f"{factor:g} x TPOT, {seats} seats": SchedulingSettings(
            "deadline", ttft_s, tpot_s * factor, max_num_seqs=seats
        )
        for factor in _FACTORS
        for seats in _SEATS
    }


def choice(report: dict[str, Any]) -> SchedulingSettings:
    """Without the limit of images, which is no setting of the scheduler."""
    settings = dict(report["choice"]["settings"])
    settings.pop("image_resolution_limit", None)
    settings["step_share"] = tuple(settings["step_share"])
    return SchedulingSettings(**settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--report", type=Path, required=True, help="tune.json, in the folder of the tuning"
    )
    parser.add_argument("--model", help="instead of the report's")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = json.loads(args.report.read_text())
    if "choice" not in report:
        raise SystemExit(f"{args.report} has no choice: the promise was impossible")
    promise = Promise(**report["promise"])
    arms = grid(promise.ttft_s, promise.tpot_s) | {_CHOICE: choice(report)}
    requests = list(read_trace(args.report.with_name("traffic.jsonl")))
    print(f"{len(requests)} requests; promise {promise.ttft_s:g} s and {promise.tpot_s:g} s")
    width = max(map(len, arms))
    seen: dict[str, list[RequestTimes]] = {name: [] for name in arms}
    limit = report["choice"]["settings"].get("image_resolution_limit")
    flags = () if limit is None else ("--image-resolution-limit", str(limit))
    with serving(args.model or report["model"], args.threads, *flags, endpoint="chat") as live:
        live.calibrate()
        print(heading(width), flush=True)
        for number in range(args.rounds):
            for name in list(arms)[:: -1 if number % 2 else 1]:
                live.apply(arms[name])
                times = live.replay(requests)
                seen[name] += times
                print(row(name, width, Report.of(times, promise), times), flush=True)
    goodput = {name: Report.of(times, promise).goodput.value for name, times in seen.items()}
    best = max((name for name in arms if name != _CHOICE), key=lambda name: goodput[name])
    share = goodput[_CHOICE] / goodput[best] if goodput[best] else 1.0
    print(
        f"\n{_CHOICE} {goodput[_CHOICE]:.1%}, the best of nine {goodput[best]:.1%} ({best}): "
        f"{share:.1%} of it, bound {BOUND:.0%}: {'holds' if share >= BOUND else 'does not hold'}"
    )
    if args.json:
        found = {
            "goodput": goodput,
            "settings": {name: asdict(settings) for name, settings in arms.items()},
            "share_of_best": share,
        }
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
