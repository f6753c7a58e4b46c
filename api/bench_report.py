"""What a load showed: figures, tables, JSON.

Owns: Summary and its forms as text and JSON. Does not own: percentiles and goodput
(chunked_prefill/goodput.py), the load (bench_load.py), or pictures (bench_plots.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from api.bench_load import Outcome, State
from api.bench_target import Target
from chunked_prefill.goodput import Distribution, Promise, Report, RequestTimes, request_json

LATE_S = 0.01
"""A client that is later than this in one request of a hundred says so: its figures are then
partly its own."""
NAME_WIDTH = 14
"""Of the first column of `Summary.lines`."""
_MISSES = {
    "failed": "failed",
    "ttft": "first token late",
    "tpot": "tokens slow",
    "both": "first token late and tokens slow",
}


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens that were asked for against those that the server counted, over answered requests."""

    compared: int
    """Requests with both numbers."""
    wanted: int
    got: int
    exact: int
    """Requests in which they are equal."""
    worst: int
    """Largest difference, with its sign; 0 if none."""

    @classmethod
    def of(cls, pairs: Sequence[tuple[int, int]]) -> Lengths:
        """`pairs` of (wanted, got)."""
        differences = [got - wanted for wanted, got in pairs]
        return cls(
            len(pairs),
            sum(wanted for wanted, _ in pairs),
            sum(got for _, got in pairs),
            differences.count(0),
            max(differences, key=abs, default=0),
        )

    def __str__(self) -> str:
        if not self.compared:
            return "not reported by the server"
        share = f"{self.exact / self.compared:.1%} of {self.compared:,} requests as wanted"
        worst = "" if not self.worst else f", worst {self.worst:+d} tokens"
        return f"{self.wanted:,} wanted, {self.got:,} got; {share}{worst}"


@dataclass(frozen=True, slots=True)
class ClientTimes:
    """How late the client itself was, in seconds."""

    send: Distribution
    """From the time at which a request should have been sent to its sending."""
    ticks_p99_s: float
    ticks_max_s: float
    """By which timers of its event loop were late."""

    @property
    def slow(self) -> bool:
        return self.send.p99 > LATE_S or self.ticks_p99_s > LATE_S


@dataclass(frozen=True, slots=True)
class Summary:
    target: Target
    settings: dict[str, Any]
    """What was asked for, for the file."""
    counted_by: str
    report: Report
    times: tuple[RequestTimes, ...]
    outcomes: tuple[Outcome, ...]
    prompt: Lengths
    """Of requests without images: what stands around these in a prompt is the model's own."""
    output: Lengths
    sources: dict[str, int] | None
    """Prompt tokens of answered requests by where they came from; None where the server does not
    say."""
    counters: dict[str, float]
    """What the server's own counters grew by."""
    client: ClientTimes
    messages: dict[str, str]
    """By kind of error, what was said first."""
    interrupted: bool

    @classmethod
    def of(
        cls,
        state: State,
        target: Target,
        promise: Promise,
        *,
        settings: dict[str, Any],
        counted_by: str,
        before: dict[str, float],
        after: dict[str, float],
    ) -> Summary:
        outcomes = tuple(state.outcomes)
        times = tuple(outcome.times(state.started_s) for outcome in outcomes)
        answered = [outcome for outcome in outcomes if outcome.error is None]
        messages: dict[str, str] = {}
        for outcome in outcomes:
            if outcome.error is not None:
                messages.setdefault(outcome.error, outcome.message)
        ticks = state.lateness
        return cls(
            target,
            settings,
            counted_by,
            Report.of(times, promise),
            times,
            outcomes,
            Lengths.of(list(_prompt_pairs(answered))),
            Lengths.of([(o.request.output_tokens, o.answer.completion_tokens) for o in answered]),
            _sources(answered),
            {key: value - before.get(key, 0.0) for key, value in after.items()},
            ClientTimes(
                Distribution.of([outcome.late_s for outcome in outcomes]),
                ticks.quantile(0.99),
                ticks.quantile(1.0),
            ),
            messages,
            state.interrupted,
        )

    # -- forms --------------------------------------------------------------------------------

    def as_json(self) -> dict[str, Any]:
        promise = self.report.promise
        requests = []
        for outcome, times in zip(self.outcomes, self.times, strict=True):
            row = request_json(times, promise)
            row["wanted_prompt_tokens"] = outcome.text_tokens
            row["wanted_output_tokens"] = outcome.request.output_tokens
            row["images"] = list(outcome.request.images)
            row["late_s"] = outcome.late_s
            row["finish_reason"] = outcome.answer.finish_reason
            row["message"] = outcome.message or None
            requests.append(row)
        return {
            "server": {
                "url": str(self.target.address),
                "model": self.target.model,
                "kind": self.target.kind,
                "max_model_len": self.target.max_model_len,
            },
            "settings": self.settings,
            "report": self.report.as_json(),
            "prompt_token_sources": self.sources,
            "lengths": {
                "counted_by": self.counted_by,
                "prompt": asdict(self.prompt),
                "output": asdict(self.output),
            },
            "client": {**asdict(self.client), "slow": self.client.slow},
            "server_counters": {name: value for name, value in self.counters.items() if value},
            "error_messages": self.messages,
            "interrupted": self.interrupted,
            "requests": requests,
        }

    def latency_rows(self) -> list[tuple[str, ...]]:
        """A table with its head; milliseconds."""
        report = self.report
        rows: list[tuple[str, ...]] = [("ms", "p50", "p90", "p95", "p99", "max", "mean")]
        for name, found in (
            ("TTFT", report.ttft_s),
            ("TPOT", report.tpot_s),
            ("ITL", report.itl_s),
            ("max gap", report.max_gap_s),
            ("E2E", report.e2e_s),
        ):
            values = (found.p50, found.p90, found.p95, found.p99, found.max, found.mean)
            rows.append((name, *("-" if v != v else milliseconds(v) for v in values)))
        return rows

    def lines(self) -> list[str]:
        """What stands around the table of latencies, most important first."""
        report = self.report
        good = report.goodput
        lines = [
            f"requests      {report.requests:,} sent, {report.answered:,} answered in "
            f"{report.duration_s:.1f} s",
        ]
        if report.errors:
            lines += [
                f"errors        {count:,} x {kind}: {self.messages.get(kind, '')}"[:160]
                for kind, count in report.errors.items()
            ]
        if report.duration_s:
            lines.append(
                f"throughput    {report.answered / report.duration_s:.2f} requests/s, "
                f"{report.prompt_tokens / report.duration_s:,.0f} prompt and "
                f"{report.output_tokens / report.duration_s:,.0f} output tokens/s"
            )
        lines.append(
            f"goodput       {good.value:.1%} kept {_promise(report.promise)} "
            f"(95 % interval {good.low:.1%} to {good.high:.1%})"
        )
        if report.missed:
            missed = ", ".join(f"{_MISSES[k]} {n:,}" for k, n in report.missed.items())
            lines.append(f"missed        {missed}")
        lines.append(f"prompts       {self._source_line()}")
        lines.append(f"text prompts  {self.prompt} (counted by {self.counted_by})")
        lines.append(f"output        {self.output}{self._output_note()}")
        lines += self._client_lines()
        return lines

    def _source_line(self) -> str:
        if self.sources is None:
            return f"{self.report.prompt_tokens:,} tokens; the server does not say how many cached"
        total = max(1, sum(self.sources.values()))
        parts = (f"{name} {n:,} ({n / total:.1%})" for name, n in self.sources.items())
        images = self.report.image_tokens
        also = f"; {images:,} of all are of images" if images else ""
        return f"{', '.join(parts)} tokens{also}"

    def _output_note(self) -> str:
        if self.output.exact == self.output.compared or self.target.keeps_lengths:
            return ""
        return "; this server cannot be told to go on past an end of text"

    def _client_lines(self) -> Iterator[str]:
        client = self.client
        if not client.send.count:
            return
        yield (
            f"client        sent {milliseconds(client.send.p99)} ms late at p99, "
            f"{milliseconds(client.send.max)} at most; its loop "
            f"{milliseconds(client.ticks_p99_s)} and {milliseconds(client.ticks_max_s)}"
        )
        if client.slow:
            yield (
                f"warning       the client was late by more than {LATE_S * 1e3:.0f} ms: run it on "
                "another machine, or ask for less"
            )


def _prompt_pairs(answered: Sequence[Outcome]) -> Iterator[tuple[int, int]]:
    for outcome in answered:
        got = outcome.answer.prompt_tokens
        if got is not None and not outcome.request.images:
            yield outcome.text_tokens, got


def _sources(answered: Sequence[Outcome]) -> dict[str, int] | None:
    known = [o.answer for o in answered if o.answer.detail("cached_tokens") is not None]
    if not known:
        return None
    total = sum(answer.prompt_tokens or 0 for answer in known)
    cached = sum(answer.detail("cached_tokens") or 0 for answer in known)
    return {"cached": cached, "computed": total - cached}


def _promise(promise: Promise) -> str:
    parts = [
        f"{name} <= {milliseconds(limit)} ms"
        for name, limit in (("TTFT", promise.ttft_s), ("TPOT", promise.tpot_s))
        if np.isfinite(limit)
    ]
    return " and ".join(parts) or "no promise (answered at all; see --ttft-slo, --tpot-slo)"


def milliseconds(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"
