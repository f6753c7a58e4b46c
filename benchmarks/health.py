"""How long /health takes to answer while many large pictures arrive at once.

Owns: the pictures (different 4K JPEGs of at most 4 MB), the burst and the probe. Does not own:
the server. The burst is sent by another process, so that the probe's clock measures the server and
not this client.

python -m benchmarks.health [--model FOLDER] [--images 32]
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import ImageChops

from benchmarks import servers
from benchmarks.chat import (
    MODEL,
    Verdict,
    all_hold,
    chat,
    encoded,
    message,
    picture,
    quantile,
    table,
)

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

SIZE = (3840, 2160)
MAX_BYTES = 4_000_000
PROBE_EVERY_S = 0.005
LIMIT_S = 0.020


def write_pictures(folder: Path, number: int) -> list[Path]:
    """Request bodies with one picture each."""
    base = picture(1, SIZE)
    quality = next(
        q for q in range(97, 10, -1) if len(encoded(base, "jpeg", quality=q)) <= 0.98 * MAX_BYTES
    )
    paths = []
    for index in range(number):
        # Moved a little further each time: other bytes, the same size.
        moved = ImageChops.offset(base, 8 * index, 0)
        data = encoded(moved, "jpeg", quality=quality)
        if len(data) > MAX_BYTES:
            raise RuntimeError(f"picture {index} has {len(data)} bytes")
        body = {
            "model": MODEL,
            "messages": message("What is this?", data),
            "max_tokens": 4,
            "temperature": 0.0,
        }
        path = folder / f"body-{index}.json"
        path.write_bytes(json.dumps(body).encode())
        paths.append(path)
    return paths


def burst(port: int, paths: list[Path], results: Queue[list[int]]) -> None:
    """All bodies at once, a thread each; puts the statuses."""
    bodies = [path.read_bytes() for path in paths]
    statuses = [0] * len(bodies)
    gate = threading.Barrier(len(bodies))

    def send(index: int) -> None:
        gate.wait()
        statuses[index] = chat(port, bodies[index]).status

    threads = [threading.Thread(target=send, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put(statuses)


class Probe:
    """GET /health again and again on one connection; waits are counted from the moment at which a
    request was due, so that one long answer is not hidden by the requests that it delayed."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self.waits_s: list[float] = []
        self.statuses: Counter[int] = Counter()

    def once(self, due_s: float) -> None:
        self._connection.request("GET", "/health")
        response = self._connection.getresponse()
        response.read()
        self.waits_s.append(time.perf_counter() - due_s)
        self.statuses[response.status] += 1

    def rounds(self, number: int) -> None:
        for _ in range(number):
            self.once(time.perf_counter())
            time.sleep(PROBE_EVERY_S)

    def during(self, process: multiprocessing.process.BaseProcess) -> None:
        due_s = time.perf_counter()
        while process.is_alive():
            self.once(due_s)
            due_s += PROBE_EVERY_S
            now_s = time.perf_counter()
            if now_s < due_s:
                time.sleep(due_s - now_s)
            # What was missed during a long answer is asked at once, late as it is.


def measure(port: int, paths: list[Path]) -> tuple[Probe, Probe, list[int], float]:
    """(probe at rest, probe during the burst, statuses of the burst, seconds of the burst)."""
    rest = Probe(port)
    rest.rounds(200)
    context = multiprocessing.get_context("spawn")
    results: Queue[list[int]] = context.Queue()
    process = context.Process(target=burst, args=(port, paths, results))
    process.start()
    begin = time.perf_counter()
    loaded = Probe(port)
    loaded.during(process)
    seconds = time.perf_counter() - begin
    process.join()
    return rest, loaded, results.get(timeout=5), seconds


def report(rest: Probe, loaded: Probe, statuses: list[int], seconds: float) -> list[Verdict]:
    def line(probe: Probe) -> str:
        p50, p99 = quantile(probe.waits_s, 0.5), quantile(probe.waits_s, 0.99)
        return (
            f"p50 {p50 * 1e3:.2f}, p99 {p99 * 1e3:.2f}, max {max(probe.waits_s) * 1e3:.2f} ms "
            f"({len(probe.waits_s)} probes)"
        )

    served = Counter(statuses)
    return [
        Verdict("/health at rest", line(rest)),
        Verdict(
            f"/health during {len(statuses)} pictures of 4K",
            line(loaded),
            f"p99 < {LIMIT_S * 1e3:.0f} ms",
            quantile(loaded.waits_s, 0.99) < LIMIT_S,
        ),
        Verdict(
            "answers of /health", str(dict(loaded.statuses)), "200", set(loaded.statuses) == {200}
        ),
        Verdict(
            "answers of the burst",
            f"{dict(served)} in {seconds:.1f} s",
            "200",
            set(served) == {200},
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        paths = write_pictures(folder, args.images)
        largest = max(path.stat().st_size for path in paths)
        print(f"{args.images} bodies of up to {largest / 1e6:.1f} MB (base64)")
        server = servers.longlens(args.model, args.threads)
        server.start(folder)
        try:
            verdicts = report(*measure(server.port, paths))
        finally:
            server.stop()
    print(table(verdicts))
    return 0 if all_hold(verdicts) else 1


if __name__ == "__main__":
    raise SystemExit(main())
