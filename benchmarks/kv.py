"""What holding KV beyond the device costs, in ratios to a run whose KV all lies on the device.

Run: python -m benchmarks.kv --model FOLDER [cold] [idle] [--rounds 3] [--threads 2]

cold    one prompt of 8,192 tokens with an eighth of its KV on the device, attended where it lies
        (`--cold-kv cpu`) and streamed through the ring: prefill, decode, bytes copied, stalls
idle    offload is configured and nobody needs it: time of decode steps in interleaved pairs, with
        the upper end of the ratio's 95 % interval, and the share of profiled time in its code

Contestants take turns, prompt by prompt and a few decode steps at a time, so that other load on
the machine falls on all of them; ratios are of medians. The copying thread is counted: `--threads`
is what compute may use, on a machine with as many cores.
"""

from __future__ import annotations

import argparse
import cProfile
import math
import pstats
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from chunked_prefill.request import Request, SamplingParams
from kv_offload.superblock import SUPERBLOCK_TOKENS
from kv_offload.tickets import Direction
from lm_engine.attention.native import NativeAttention
from lm_engine.engine import Engine
from lm_engine.options import ColdKV, EngineOptions

PROMPT, ANSWER, SHARE, CHUNK = 8192 - 64, 64, 8, 256
TURN = 4
"""Decode steps that a contestant makes before it is another's turn."""
STREAMS, SHORT, BRIEF, PAIRS = 8, 32, 16, 20
T_QUANTILE = 1.729
"""Of Student's t with 19 degrees of freedom, 95 % to one side."""
IDLE_BOUND = 1.03
TIER_FILES = (
    *(f"kv_offload/{name}.py" for name in ("transfer", "lanes", "holds", "copies", "copy_engine")),
    *(f"kv_offload/{name}.py" for name in ("cold_prefix", "host_cache", "host_pool", "recall")),
    *(f"kv_offload/{name}.py" for name in ("lower_tiers", "write_through", "host_memory")),
    *(f"lm_engine/{name}.py" for name in ("kv_tiers", "attention/staging", "attention/cold")),
)
BOUNDS = {"cpu": (1.05, 1.05), "stream": (1.15, 1.25)}
"""Largest ratios to resident that are promised: prefill, decode."""


@dataclass(slots=True)
class Contestant:
    name: str
    engine: Engine
    prefill_s: list[float] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def prefill(self, prompt: tuple[int, ...], name: str) -> None:
        """Until the first token is out."""
        sampling = SamplingParams(ANSWER, temperature=0.0, ignore_eos=True)
        self.tokens = []
        self.engine.add(Request(name, prompt, sampling))
        began = time.perf_counter()
        while not self._step():
            pass
        self.prefill_s.append(time.perf_counter() - began)

    def decode(self, steps: int) -> None:
        for _ in range(steps):
            if self.engine.has_work():
                began = time.perf_counter()
                self._step()
                self.decode_s.append(time.perf_counter() - began)

    def _step(self) -> bool:
        found = False
        for output in self.engine.step():
            if output.error is not None:
                raise RuntimeError(f"{self.name}: {output.error}")
            for delta in output.deltas:
                self.tokens += delta.token_ids
                found = True
        return found


def engine(
    model: str,
    *,
    device_tokens: int,
    host_tokens: int,
    cold_kv: ColdKV,
    caching: bool = False,
    longest: int = PROMPT + ANSWER,
) -> Engine:
    """Chunks follow from tokens alone, so that all contestants cut the prompt alike."""
    per_token = bytes_per_token(model)
    return Engine.load(
        EngineOptions(
            model,
            device="cpu",
            max_model_len=longest,
            max_num_batched_tokens=CHUNK,
            tpot_slo_s=0,
            kv_memory_bytes=device_tokens * per_token,
            host_kv_bytes=host_tokens * per_token or None,
            cold_kv=cold_kv,
            prefix_caching=caching,
            max_num_seqs=STREAMS,
        )
    )


def bytes_per_token(model: str) -> int:
    from lm_engine.models.checkpoint import open_checkpoint
    from lm_engine.models.config import DecoderConfig

    checkpoint = open_checkpoint(model)
    config = DecoderConfig.from_hf(checkpoint.config)
    checkpoint.close()
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4


def random_prompt(length: int, seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(1000, 40_000) for _ in range(length))


def cold(options: argparse.Namespace) -> None:
    whole = PROMPT + ANSWER
    small = whole // SHARE // SUPERBLOCK_TOKENS * SUPERBLOCK_TOKENS
    build = {
        "resident": (whole, 0, "auto"),
        "cpu": (small, whole, "cpu"),
        "stream": (small, whole, "stream"),
    }
    contestants = [
        Contestant(
            name,
            engine(options.model, device_tokens=device, host_tokens=host, cold_kv=cold_kv),  # type: ignore[arg-type]
        )
        for name, (device, host, cold_kv) in build.items()
    ]
    for contestant in contestants[1:]:
        # The same weights in the same pages: huge pages run out, late comers are slower.
        contestant.engine.runner.decoder = contestants[0].engine.runner.decoder
    print(f"{PROMPT} tokens, chunks of {CHUNK}, {small} of {whole} tokens' KV on the device")
    for index in range(options.rounds):
        for contestant in contestants:
            contestant.prefill(random_prompt(PROMPT, index), f"{contestant.name}{index}")
        while any(c.engine.has_work() for c in contestants):
            for contestant in contestants:
                contestant.decode(TURN)
        answers = {tuple(c.tokens) for c in contestants}
        if len(answers) != 1:
            raise RuntimeError("the contestants gave different answers")
        _table(contestants)


def _table(contestants: list[Contestant]) -> None:
    first, *others = contestants
    prefill, decode = statistics.median(first.prefill_s), statistics.median(first.decode_s)
    print(f"{first.name:<10} prefill {prefill:7.2f} s   decode {1e3 * decode:7.2f} ms")
    for one in others:
        ratios = (
            statistics.median(one.prefill_s) / prefill,
            statistics.median(one.decode_s) / decode,
        )
        bounds = BOUNDS[one.name]
        said = "  ".join(
            f"{name} x{ratio:.3f} (at most {bound})"
            for name, ratio, bound in zip(("prefill", "decode"), ratios, bounds, strict=True)
        )
        print(f"{one.name:<10} {said}{_copied(one.engine)}", flush=True)


def _copied(engine: Engine) -> str:
    ring = engine.runner.ring
    if ring is None:
        return ""
    attention = engine.runner.attention
    own = attention.bytes_staged if isinstance(attention, NativeAttention) else 0
    copied = ring.transfers.bytes_copied[Direction.STREAM] - own
    return (
        f"\n{'':<10} copied: {copied / 1e9:.1f} GB through a ring of {ring.num_bytes / 1e6:.1f} MB "
        f"({ring.transfers.stalled_seconds:.2f} s stalled, "
        f"{ring.retries} again), {own / 1e9:.1f} GB by the threads that attended them"
    )


def idle(options: argparse.Namespace) -> None:
    """Eight short answers at once, which fill no superblock: nothing is stored, loaded or cold."""
    tokens = STREAMS * (SHORT + BRIEF) + 4 * CHUNK
    without, configured = (
        engine(
            options.model,
            device_tokens=tokens,
            host_tokens=host,
            cold_kv="stream",
            caching=True,
            longest=tokens,
        )
        for host in (0, PROMPT)
    )
    configured.runner.decoder = without.runner.decoder
    ratios = []
    for pair in range(PAIRS + 1):
        seconds = _short_answers((without, configured), pair)
        ratios.append(math.log(seconds[1] / seconds[0]))
    # The first one warms up.
    ratios = ratios[1:]
    mean, error = statistics.mean(ratios), statistics.stdev(ratios) / math.sqrt(PAIRS)
    print(
        f"idle       x{math.exp(mean):.4f} of {PAIRS} pairs, 95 % at most "
        f"x{math.exp(mean + T_QUANTILE * error):.4f} (at most {IDLE_BOUND})"
    )
    profile = cProfile.Profile()
    profile.runcall(_short_answers, (configured,), PAIRS + 1)
    share = _share_of(profile)
    print(f"           {100 * share:.2f} % of profiled time is its own (at most 1 %)")


def _short_answers(engines: Sequence[Engine], seed: int) -> list[float]:
    """Seconds of one batch on each engine; they take turns step by step, and in who is first."""
    sampling = SamplingParams(BRIEF, temperature=0.0, ignore_eos=True)
    for one in engines:
        for index in range(STREAMS):
            prompt = random_prompt(SHORT, seed * STREAMS + index)
            one.add(Request(f"{seed}.{index}", prompt, sampling))
    seconds = [0.0] * len(engines)
    order, turn = list(enumerate(engines)), seed
    while any(one.has_work() for one in engines):
        for index, one in order if turn % 2 else reversed(order):
            began = time.perf_counter()
            one.step()
            seconds[index] += time.perf_counter() - began
        turn += 1
    return seconds


def _share_of(profile: cProfile.Profile) -> float:
    """Time in functions that only engines with tiers have, without what they call elsewhere."""
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    inside = sum(own for (file, *_), (_, _, own, *_) in stats.items() if file.endswith(TIER_FILES))
    return float(inside / sum(own for _, _, own, *_ in stats.values()))


def main() -> None:
    rows: dict[str, Callable[[argparse.Namespace], None]] = {"cold": cold, "idle": idle}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("rows", nargs="*", choices=[*rows, []], default=list(rows))
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for row in options.rows or list(rows):
        rows[row](options)


if __name__ == "__main__":
    main()
