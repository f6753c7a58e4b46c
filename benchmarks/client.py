"""One streaming client for every server: token ids in, arrival times out.

Owns: Stream (what was sent, when each token arrived) and `complete`. Does not own: servers or
what is concluded from the times.

Only the standard library: the client must not be what differs between servers, and it must not
take a core from them. Arrival times are taken when a line of the event stream has been read.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Stream:
    """One request as its client saw it. Times are time.perf_counter() seconds."""

    prompt_tokens: int
    output_tokens: int
    """Asked for, with the end of text ignored."""
    sent_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)
    """One entry per event that carried text or a token."""
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0] - self.sent_s

    @property
    def end_s(self) -> float:
        return self.arrivals_s[-1]

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)]

    @property
    def tpot_s(self) -> float:
        return (self.end_s - self.arrivals_s[0]) / max(1, self.output_tokens - 1)


def complete(
    port: int, model: str, prompt: list[int], max_tokens: int, *, timeout_s: float = 600.0
) -> Stream:
    """Streams /v1/completions for exactly `max_tokens` tokens, greedily."""
    stream = Stream(len(prompt), max_tokens)
    body = json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
        }
    )
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        stream.sent_s = time.perf_counter()
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            stream.error = f"{response.status}: {response.read()[:300]!r}"
            return stream
        for line in response:
            now = time.perf_counter()
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                stream.error = str(event["error"])
            if event.get("choices"):
                choice = event["choices"][0]
                if choice.get("text") or choice.get("finish_reason") is None:
                    stream.arrivals_s.append(now)
    finally:
        connection.close()
    return stream


def complete_many(
    port: int, model: str, jobs: list[tuple[list[int], int]], *, stagger_s: float = 0.0
) -> list[Stream]:
    """All jobs at once (each `stagger_s` after the one before), one thread per stream."""
    results: list[Stream | None] = [None] * len(jobs)

    def run(index: int, prompt: list[int], max_tokens: int) -> None:
        results[index] = complete(port, model, prompt, max_tokens)

    threads = []
    for index, (prompt, max_tokens) in enumerate(jobs):
        thread = threading.Thread(target=run, args=(index, prompt, max_tokens))
        thread.start()
        threads.append(thread)
        time.sleep(stagger_s)
    for thread in threads:
        thread.join()
    return [r for r in results if r is not None]
