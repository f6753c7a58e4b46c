"""How long the server takes to refuse what it can never serve, while it computes a long prompt.

Owns: the long prompt that keeps the language stage in steps of a second, and the impossible
requests: a prompt beyond the context, and more choices of a context than the host tier holds.
Does not own: the server.

python -m benchmarks.refusals --model FOLDER [--threads 2]
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks import servers
from benchmarks.chat import Verdict, all_hold, quantile, table
from benchmarks.kv import bytes_per_token

CONTEXT, DEVICE, LONG, EACH = 8192, 2560, 7000, 10
LIMIT_S = 0.1


def ask(port: int, body: dict[str, Any]) -> tuple[int, float, str]:
    """(status, seconds to the whole answer, body)."""
    data = json.dumps({"model": "m", "temperature": 0, **body})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    begin = time.perf_counter()
    connection.request("POST", "/v1/completions", data, {"content-type": "application/json"})
    response = connection.getresponse()
    text = response.read().decode()
    return response.status, time.perf_counter() - begin, text


def ids(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(5, 300) for _ in range(count)]


def measure(port: int) -> list[Verdict]:
    impossible = {
        "a prompt of 131,072 tokens": {"prompt": ids(131_072, 1), "max_tokens": 1},
        "max_tokens beyond the context": {"prompt": ids(100, 2), "max_tokens": CONTEXT},
        "eight answers that the host cannot hold": {
            "prompt": ids(4000, 3),
            "max_tokens": 4000,
            "n": 8,
        },
    }
    found: dict[str, list[tuple[int, float, str]]] = {name: [] for name in impossible}
    done = threading.Event()

    def keep_busy() -> None:
        seed = 10
        while not done.is_set():
            seed += 1
            ask(port, {"prompt": ids(LONG, seed), "max_tokens": 1})

    thread = threading.Thread(target=keep_busy)
    thread.start()
    try:
        for _ in range(EACH):
            for name, body in impossible.items():
                time.sleep(random.random())
                found[name].append(ask(port, body))
    finally:
        done.set()
    thread.join()
    verdicts = []
    for name, answers in found.items():
        statuses = {status for status, _, _ in answers}
        seconds = [seconds for _, seconds, _ in answers]
        worst = max(seconds)
        verdicts.append(
            Verdict(
                name,
                f"{sorted(statuses)}, p50 {1e3 * quantile(seconds, 0.5):.0f}, "
                f"max {1e3 * worst:.0f} ms",
                f"400 in {1e3 * LIMIT_S:.0f} ms",
                statuses == {400} and worst < LIMIT_S,
            )
        )
        print(answers[0][2][:300])
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    per_token = bytes_per_token(args.model)
    server = servers.longlens(
        args.model,
        args.threads,
        *("--max-model-len", str(CONTEXT)),
        *("--kv-cache-memory-bytes", str(DEVICE * per_token)),
        *("--host-kv-gib", str(2 * CONTEXT * per_token / 2**30)),
    )
    with tempfile.TemporaryDirectory() as folder:
        server.start(Path(folder))
        try:
            verdicts = measure(server.port)
        finally:
            server.stop()
    print(table(verdicts))
    return 0 if all_hold(verdicts) else 1


if __name__ == "__main__":
    raise SystemExit(main())
