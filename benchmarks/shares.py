"""What text requests feel of other people's images: their p95 TTFT with and without them.

Owns: the two workloads and their ratio. Does not own: the server and its load (goodput_live.py).

Text arrives at the same rate, and is the same, in both arms; the other arm has so many four-image
requests on top that they are a fifth of all. The arms take turns, round by round. Steps are small
in both: a text that arrives while nobody decodes waits for the step under way, and with 512 tokens
in a step that is the whole prompt of four images (simulated ratio 1.23 to 1.33; with 128 tokens
1.12 to 1.14).

python -m benchmarks.shares [--model demo] [--rate 1] [--rounds 5] [--seconds 45] [--tokens 128]
    [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.goodput_live import Live, serving
from chunked_prefill.goodput import Floats, RequestTimes, bootstrap
from chunked_prefill.settings import SchedulingSettings
from chunked_prefill.workload import synthesize

BOUND = 1.15
SHARE = 0.2
"""Of all requests, those with images."""
TTFT_S, TPOT_S = 0.5, 0.2
_TEXT = "chat:rate={rate},duration={seconds},input=80,output=24,spread=0.6"
_IMAGES = "images:rate={rate},duration={seconds},input=40,output=24,images=1x4-4,size=448x448"


def workloads(rate: float, seconds: float) -> dict[str, str]:
    text = _TEXT.format(rate=rate, seconds=seconds)
    images = _IMAGES.format(rate=rate * SHARE / (1 - SHARE), seconds=seconds)
    return {"text only": text, "with images": f"{text}+{images}"}


def text_times(live: Live, workload: str, seed: int) -> tuple[list[RequestTimes], int]:
    """The text requests, by arrival, and how many others there were."""
    found = live.answered(list(synthesize(workload, seed)))
    text = [times for outcome, times in found if not outcome.request.images]
    return text, len(found) - len(text)


def _p95_ratio(pairs: Floats) -> float:
    return float(np.quantile(pairs[:, 1], 0.95) / np.quantile(pairs[:, 0], 0.95))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rate", type=float, default=1.0, help="text requests a second")
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128, help="of a step, at most")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    arms = workloads(args.rate, args.seconds)
    seen: dict[str, list[RequestTimes]] = {name: [] for name in arms}
    with serving(args.model, args.threads, endpoint="chat") as live:
        live.calibrate()
        live.apply(
            SchedulingSettings("deadline", TTFT_S, TPOT_S, max_num_batched_tokens=args.tokens)
        )
        for number in range(args.rounds):
            for name in list(arms)[:: -1 if number % 2 else 1]:
                text, others = text_times(live, arms[name], number)
                seen[name] += text
                print(f"round {number + 1}, {name:11}: {_row(text)}, {others} others", flush=True)
    print()
    for name, times in seen.items():
        print(f"{name:11}: {_row(times)}")
    pairs = np.array([[t.ttft_s for t in times] for times in seen.values()]).T
    ratio = bootstrap(pairs, _p95_ratio)
    print(
        f"p95 TTFT of text with images / without: {ratio.value:.2f} "
        f"[{ratio.low:.2f}, {ratio.high:.2f}], bound {BOUND}: "
        f"{'holds' if ratio.value <= BOUND else 'does not hold'}"
    )
    if args.json:
        found: dict[str, Any] = {
            "workloads": arms,
            "ratio": [ratio.value, ratio.low, ratio.high],
            "ttft_s": {name: [t.ttft_s for t in times] for name, times in seen.items()},
        }
        args.json.write_text(json.dumps(found, indent=1) + "\n")


def _row(times: list[RequestTimes]) -> str:
    p50, p95 = np.quantile([t.ttft_s for t in times], (0.5, 0.95)) * 1e3
    gap = float(np.quantile([t.max_gap_s for t in times], 0.99)) * 1e3
    return f"{len(times)} text requests, TTFT p50 {p50:.0f} ms, p95 {p95:.0f}, gap p99 {gap:.0f}"


if __name__ == "__main__":
    main()
