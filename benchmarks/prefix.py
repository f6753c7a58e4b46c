"""What a shared beginning costs: eight prompts at once, 2,000 tokens in common, 48 their own.

Run: python -m benchmarks.prefix --model FOLDER [--rounds 5] [--threads 2]

Owns: the waves and their table. Does not own: other servers on the same work (peers.py, workload
prefix).

cold    nothing is known: the beginning is computed once, seven prompts wait for it
device  the beginning lies in the device's prefix cache
host    it was driven out of there by other prompts and comes back from the host tier

The bound for a warm wave is its own arithmetic: the forward passes that compute the suffixes over
KV that lies where it is attended. "TTFT / passes" is the median time to a first token over the
time of the passes up to it: what finding, sharing, copying and sampling add.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from chunked_prefill.request import Request, SamplingParams
from lm_engine.engine import Engine
from lm_engine.options import EngineOptions

PREFIX, SUFFIX, MATES, ANSWER = 2000, 48, 8, 16
DEVICE_TOKENS = 6144


@dataclass(frozen=True, slots=True)
class Wave:
    ttft_s: float
    """Median over the requests."""
    passes: float
    """Median of a request's TTFT over the forward passes until its first token."""
    cached: float
    """Share of prompt tokens that were found."""
    computed: int
    """Prompt tokens that were computed."""


class Timed:
    """An engine whose forward passes are timed."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.forward_s = 0.0
        self._forward = engine.runner.forward
        engine.runner.forward = self._timed  # type: ignore[method-assign]

    def _timed(self, *args: object, **kwargs: object) -> torch.Tensor:
        began = time.perf_counter()
        logits: torch.Tensor = self._forward(*args, **kwargs)  # type: ignore[arg-type]
        self.forward_s += time.perf_counter() - began
        return logits

    def wave(self, name: str, prompts: Iterable[tuple[int, ...]]) -> Wave:
        """Serves the prompts together, to their ends."""
        before = self.engine.stats()
        sampling = SamplingParams(ANSWER, temperature=0.0, ignore_eos=True)
        began, self.forward_s = time.perf_counter(), 0.0
        names = []
        for number, prompt in enumerate(prompts):
            names.append(f"{name}/{number}")
            self.engine.add(Request(names[-1], prompt, sampling))
        first: dict[str, tuple[float, float]] = {}
        while self.engine.has_work():
            for output in self.engine.step():
                if output.error is not None:
                    raise RuntimeError(output.error.message)
                if output.deltas and output.request_id not in first:
                    now = time.perf_counter() - began
                    first[output.request_id] = (now, now / self.forward_s)
        after = self.engine.stats()
        computed = after.prompt_tokens_uncached - before.prompt_tokens_uncached
        cached = after.prompt_tokens_cached - before.prompt_tokens_cached
        return Wave(
            statistics.median(at for at, _ in first.values()),
            statistics.median(ratio for _, ratio in first.values()),
            cached / (cached + computed),
            computed,
        )


def tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(1000, 40_000) for _ in range(count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    probe = Engine.load(EngineOptions(args.model, max_model_len=512, max_num_seqs=1))
    token_bytes = probe.runner.cache.layout.bytes_per_token
    del probe
    engine = Timed(
        Engine.load(
            EngineOptions(
                args.model,
                max_model_len=4096,
                kv_memory_bytes=DEVICE_TOKENS * token_bytes,
                host_kv_bytes=4 * DEVICE_TOKENS * token_bytes,
                tpot_slo_s=0,
            )
        )
    )
    rng = random.Random(0)
    found: dict[str, list[Wave]] = {"cold": [], "device": [], "host": []}
    for number in range(args.rounds):
        prefix = tokens(rng, PREFIX)

        def prompts(prefix: tuple[int, ...] = prefix) -> list[tuple[int, ...]]:
            return [prefix + tokens(rng, SUFFIX) for _ in range(MATES)]

        found["cold"].append(engine.wave(f"{number}/cold", prompts()))
        found["device"].append(engine.wave(f"{number}/device", prompts()))
        for other in range(3):
            engine.wave(f"{number}/other{other}", [tokens(rng, 2500)])
        found["host"].append(engine.wave(f"{number}/host", prompts()))
    print(f"\n{args.threads} threads, median of {args.rounds}\n")
    print("| wave | median TTFT s | TTFT / passes | prompt tokens found | computed |")
    print("|---|---|---|---|---|")
    for name, waves in found.items():
        middle = [
            statistics.median(getattr(w, field) for w in waves)
            for field in ("ttft_s", "passes", "cached", "computed")
        ]
        print(
            f"| {name} | {middle[0]:.3f} | {middle[1]:.3f} | {middle[2]:.1%} | {middle[3]:,.0f} |"
        )


if __name__ == "__main__":
    main()
