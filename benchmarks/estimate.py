"""How near the TTFT estimate comes, on an idle server and beside four requests, and how soon.

Owns: the trials and their table. Does not own: the server (servers.py), or the streaming client
(api/bench_http.py). In each trial nobody arrives between the measured request and its first token,
which is what an estimate presumes.

A trial beside four sends those at once, waits up to a second, asks /v1/estimate, and sends the
request itself: so some trials find prompts that are being read, others answers that are written.

python -m benchmarks.estimate --model FOLDER [--threads 2] [--trials 50] [--images 0.2]
python -m benchmarks.estimate --url http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from api.bench_http import Address, Connections, Exchange
from api.bench_stream import Answer, refusal
from api.bench_target import PATHS, Target, TargetClient
from api.bench_words import PromptMaker, learn
from benchmarks import servers
from chunked_prefill.goodput import wilson
from chunked_prefill.trace import TraceRequest

NEAR = 0.2
WANTED_SHARE = 0.9
LONGEST_ANSWER_S = 0.05
WARM_UP = 12
SHORTEST = 16
SIZES = ((224, 224), (320, 240), (512, 384))


@dataclass(frozen=True, slots=True)
class Trial:
    beside: int
    """Requests in flight."""
    prompt_tokens: int
    images: int
    told_s: float
    """By the stream's header; infinite when the stream began without one, because a step took
    longer than the server keeps a client waiting."""
    asked_s: float
    """By /v1/estimate, just before."""
    actual_s: float
    answered_s: float
    """Seconds that /v1/estimate took."""

    @property
    def error(self) -> float:
        return self.told_s / self.actual_s - 1


class Prober:
    def __init__(
        self, target: Target, maker: PromptMaker, longest: int, images: float, rng: random.Random
    ) -> None:
        self._target = target
        self._maker = maker
        self._longest = longest
        self._images = images
        self._rng = rng
        self._numbers = iter(range(1 << 30))
        self._connections = Connections(target.address, target.headers)

    def request(self, output: int) -> tuple[TraceRequest, bytes]:
        """Lengths are spread evenly over their logarithm."""
        rng = self._rng
        tokens = round(SHORTEST * (self._longest / SHORTEST) ** rng.random())
        images = (rng.choice(SIZES),) if rng.random() < self._images else ()
        wanted = TraceRequest(0.0, tokens, output, images=images)
        made = self._maker.make(wanted, next(self._numbers))
        return wanted, json.dumps(self._target.body("chat", made.content, output)).encode()

    async def send(self, body: bytes) -> tuple[Exchange, Answer]:
        exchange, answer = Exchange(), Answer()
        path = PATHS["chat"]
        await self._connections.post(path, body, exchange, answer.on_data, timeout_s=600)
        if exchange.status != 200 or not answer.arrivals_s:
            raise RuntimeError(f"{exchange.status}: {refusal(exchange) or answer.error}")
        return exchange, answer

    async def ask(self, body: bytes) -> tuple[float, float]:
        """(estimate, time to the answer) in seconds."""
        exchange, pieces = Exchange(), list[bytes]()
        await self._connections.post(
            "/v1/estimate",
            body,
            exchange,
            lambda now, piece: pieces.append(piece),
            timeout_s=60,
        )
        if exchange.status != 200:
            raise RuntimeError(f"/v1/estimate: {exchange.status}: {refusal(exchange)}")
        return json.loads(b"".join(pieces))["ttft_ms"] / 1e3, exchange.ended_s - exchange.sent_s

    async def trial(self, beside: int) -> Trial:
        rng = self._rng
        others = [
            asyncio.create_task(self.send(self.request(rng.randint(16, 64))[1]))
            for _ in range(beside)
        ]
        if others:
            await asyncio.sleep(rng.random())
        wanted, body = self.request(4)
        asked_s, answered_s = await self.ask(body)
        exchange, answer = await self.send(body)
        await asyncio.gather(*others)
        return Trial(
            beside,
            answer.prompt_tokens or wanted.prompt_tokens,
            len(wanted.images),
            float(exchange.headers.get("x-ttft-estimate-ms", "inf")) / 1e3,
            asked_s,
            answer.arrivals_s[0] - exchange.sent_s,
            answered_s,
        )


async def measure(args: argparse.Namespace, url: str) -> list[Trial]:
    address = Address.parse(url)
    async with TargetClient(address, args.api_key, 600.0) as client:
        target = await client.find(None)
        if target.kind != "longlens":
            raise SystemExit(f"{url} is {target.kind}, which has no estimates")
        count, _ = await client.counter(target, "chat")
        maker = PromptMaker(await learn(count), f"{args.seed} {time.time()}")
    prober = Prober(target, maker, args.longest, args.images, random.Random(args.seed))
    for number in range(WARM_UP):
        await prober.trial(beside=number % 3)
    trials = []
    for number in range(args.trials):
        for beside in (0, 4):
            trials.append(await prober.trial(beside))
        if (number + 1) % 5 == 0:
            print(f"{number + 1}/{args.trials}: {share(trials).value:.0%} near so far", flush=True)
    return trials


def share(trials: list[Trial]) -> Any:
    return wilson(sum(abs(t.error) <= NEAR for t in trials), len(trials))


def row(name: str, trials: list[Trial]) -> str:
    if not trials:
        return f"| {name} | 0 | | | | | |"
    found = share(trials)
    errors = sorted(abs(t.error) for t in trials)
    answers = sorted(t.answered_s for t in trials)
    verdict = "yes" if found.value >= WANTED_SHARE and answers[-1] <= LONGEST_ANSWER_S else "no"
    return (
        f"| {name} | {len(trials)} | {found.value:.1%} ({found.low:.1%} to {found.high:.1%}) "
        f"| {statistics.median(errors):.1%} | {statistics.median(t.error for t in trials):+.1%} "
        f"| {statistics.median(answers) * 1e3:.1f} / {answers[-1] * 1e3:.1f} ms | {verdict} |"
    )


def table(trials: list[Trial]) -> str:
    lines = [
        f"| server | trials | within {NEAR:.0%} | median error | bias | answered, median / worst "
        f"| >= {WANTED_SHARE:.0%} and <= {LONGEST_ANSWER_S * 1e3:.0f} ms |",
        "|---|---|---|---|---|---|---|",
        row("idle", [t for t in trials if not t.beside]),
        row("beside 4", [t for t in trials if t.beside]),
    ]
    if any(t.images for t in trials):
        lines.append(row("with images", [t for t in trials if t.images]))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--model", help="folder of the model to serve")
    where.add_argument("--url", help="a longlens server that runs")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trials", type=int, default=50, help="of each kind")
    parser.add_argument("--longest", type=int, default=2000, help="tokens of a prompt")
    parser.add_argument("--images", type=float, default=0.0, help="share of requests with one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--api-key")
    parser.add_argument("--json", type=Path, help="also write every trial here")
    args = parser.parse_args()
    if args.url:
        trials = asyncio.run(measure(args, args.url))
    else:
        server = servers.longlens(args.model, args.threads)
        server.start(Path(tempfile.mkdtemp(prefix="estimate-")))
        try:
            trials = asyncio.run(measure(args, f"http://127.0.0.1:{server.port}"))
        finally:
            server.stop()
    print(f"\n{table(trials)}")
    if args.json:
        args.json.write_text(json.dumps([asdict(t) for t in trials], indent=1) + "\n")


if __name__ == "__main__":
    main()
