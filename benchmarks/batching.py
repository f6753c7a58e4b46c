"""What continuous batching and paged memory are worth on a trace of uneven lengths.

Owns: the trace, static batching as the thing to compare with, and the share of KV slots that hold
tokens under two ways of reserving them. Does not own: the engine, which is the same in all runs.

Static: a batch is admitted and the next one waits until all of it has finished, as
`generate(batch)` does. Continuous: everything is handed in at once and a seat is taken as soon as
it is free. Reserved: each running sequence owns as many slots as the longest context needs.
Paged: it owns the blocks that it has taken. Both are counted at every step of the continuous run.

python -m benchmarks.batching [--model FOLDER] [--requests 64] [--seats 16]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from benchmarks.chat import quantile
from chunked_prefill.request import Request, SamplingParams
from lm_engine.engine import Engine
from lm_engine.options import EngineOptions


@dataclass(frozen=True, slots=True)
class Job:
    prompt: tuple[int, ...]
    output_tokens: int


@dataclass(slots=True)
class Outcome:
    """One run over the trace."""

    seconds: float = 0.0
    steps: int = 0
    latencies_s: list[float] = field(default_factory=list)
    """From the trace's start to each request's last token: all arrive at the start."""
    running: list[int] = field(default_factory=list)
    held_tokens: list[int] = field(default_factory=list)
    block_slots: list[int] = field(default_factory=list)
    """Slots of the blocks in use."""


def lognormal_trace(
    number: int, vocab: int, prompt_mean: float, output_mean: float, longest: int, seed: int
) -> list[Job]:
    """Lengths with sigma 0.8 and 1.0 around the given medians, as chat traces show them; a prompt
    takes at most three quarters of the context."""
    rng = np.random.default_rng(seed)
    prompts = np.clip(rng.lognormal(np.log(prompt_mean), 0.8, number), 4, longest * 3 // 4)
    outputs = np.clip(rng.lognormal(np.log(output_mean), 1.0, number), 2, longest // 4)
    return [
        Job(tuple(int(t) for t in rng.integers(0, vocab, int(p))), int(o))
        for p, o in zip(prompts, outputs, strict=True)
    ]


def run(engine: Engine, jobs: list[Job], batch: int | None) -> Outcome:
    """`batch` is the size of static batches; None is continuous batching."""
    outcome = Outcome()
    size = batch or len(jobs)
    begin = time.perf_counter()
    for first in range(0, len(jobs), size):
        for place, job in enumerate(jobs[first : first + size], start=first):
            params = SamplingParams(job.output_tokens, temperature=0.0, ignore_eos=True)
            for refused in engine.add(Request(f"job-{place}", job.prompt, params)):
                raise RuntimeError(str(refused.error))
        while engine.has_work():
            finished = sum(output.finished for output in engine.step())
            outcome.latencies_s += [time.perf_counter() - begin] * finished
            outcome.steps += 1
            _observe(engine, outcome)
    outcome.seconds = time.perf_counter() - begin
    engine.check_invariants()
    return outcome


def _observe(engine: Engine, outcome: Outcome) -> None:
    running = engine.scheduler.running
    if running:
        outcome.running.append(len(running))
        outcome.held_tokens.append(sum(s.num_computed_tokens for s in running))
        blocks = engine.stats().kv_blocks_used
        outcome.block_slots.append(blocks * engine.scheduler.kv.block_size)


def batching_table(runs: dict[str, list[Outcome]], jobs: list[Job]) -> str:
    tokens = sum(job.output_tokens for job in jobs)
    lines = ["| batching | s | tokens/s out | steps | seats in use | mean latency s | p95 s |"]
    lines.append("|---" * 7 + "|")
    for name, outcomes in runs.items():
        seconds = statistics.median(o.seconds for o in outcomes)
        seats = statistics.fmean(outcomes[0].running)
        mean = statistics.median(statistics.fmean(o.latencies_s) for o in outcomes)
        p95 = statistics.median(quantile(o.latencies_s, 0.95) for o in outcomes)
        lines.append(
            f"| {name} | {seconds:.2f} | {tokens / seconds:.1f} | {outcomes[0].steps} | "
            f"{seats:.1f} | {mean:.2f} | {p95:.2f} |"
        )
    static, continuous = (statistics.median(o.seconds for o in runs[n]) for n in runs)
    lines.append(f"\ncontinuous / static throughput: {static / continuous:.2f}")
    return "\n".join(lines)


def memory_table(outcome: Outcome, jobs: list[Job], longest: int, pool_slots: int) -> str:
    """Means over the steps of one continuous run."""
    held = statistics.fmean(outcome.held_tokens)
    paged = statistics.fmean(outcome.block_slots)
    reserved = statistics.fmean(outcome.running) * longest
    exact = statistics.fmean(len(j.prompt) + j.output_tokens for j in jobs)
    rows = [
        (f"reserved: {longest} slots each", reserved, pool_slots / longest),
        ("paged: blocks as they fill", paged, pool_slots / exact),
    ]
    lines = [
        "| memory | slots owned (mean) | share that holds tokens | "
        f"requests that fit into {pool_slots} slots |",
        "|---|---|---|---|",
    ]
    for name, owned, fit in rows:
        lines.append(f"| {name} | {owned:.0f} | {held / owned:.1%} | {fit:.1f} |")
    lines.append(
        f"\ntokens held (mean): {held:.0f}; reserved / paged slots: {reserved / paged:.1f}"
    )
    return "\n".join(lines)


def _tiny(folder: Path) -> Path:
    from tests.checkpoints import checkpoint

    return checkpoint("llama", folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder or hub id; a tiny random Llama if absent")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--seats", type=int, default=16, help="batch size of both kinds")
    parser.add_argument("--prompt", type=float, default=128, help="median prompt, tokens")
    parser.add_argument("--output", type=float, default=48, help="median answer, tokens")
    parser.add_argument("--context", type=int, default=2048, help="longest context, tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as temporary:
        model = args.model or str(_tiny(Path(temporary)))
        engine = Engine.load(
            EngineOptions(
                model,
                prefix_caching=False,
                device="cpu",
                max_model_len=args.context,
                max_num_seqs=args.seats,
                vision_process=False,
            )
        )
    vocab = min(engine.info.vocab_size, engine.tokenizer.get_vocab_size())
    jobs = lognormal_trace(args.requests, vocab, args.prompt, args.output, args.context, args.seed)
    run(engine, jobs[: args.seats], None)
    runs: dict[str, list[Outcome]] = {f"static, batches of {args.seats}": [], "continuous": []}
    for _ in range(args.rounds):
        for name, batch in zip(runs, (args.seats, None), strict=True):
            runs[name].append(run(engine, jobs, batch))
    total = sum(len(job.prompt) for job in jobs), sum(job.output_tokens for job in jobs)
    print(
        f"{len(jobs)} requests, {total[0]} prompt and {total[1]} answer tokens (lognormal), "
        f"{args.seats} seats, context {args.context}, median of {args.rounds} rounds\n"
    )
    print(batching_table(runs, jobs), "\n")
    slots = engine.info.kv_capacity_tokens
    print(memory_table(runs["continuous"][0], jobs, args.context, slots))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
