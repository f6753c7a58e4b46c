"""`longlens bench`: a trace against a running server.

Owns: the verb, its flags and how they are read. Does not own: the work (bench_run.py).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter, Token

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m)")
_UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0}
_LONG = re.compile(r"(0?\.\d+|0|1(?:\.0+)?)x(\d+)(?:-(\d+))?")


def reader(read: Callable[[str], Any]) -> Parameter:
    """Reads one value; what it raises is told with the name of the flag."""

    def convert(_: Any, tokens: Sequence[Token]) -> Any:
        return read(tokens[0].value.strip())

    return Parameter(converter=convert, n_tokens=1, negative="", show_default=False)


class Duration(float):
    """Seconds. The class gives the flag's value its name in the help, as those below do."""


class Factor(float):
    """A number above 0."""


class LongPrompts(tuple[float, int, int]):
    """The share of long prompts, and their least and most tokens."""


def seconds(text: str) -> Duration:
    """`200ms` -> 0.2, `45s`, `10m`; a bare number is refused, since any unit is plausible."""
    match = _DURATION.fullmatch(text.lower())
    if text == "0":
        return Duration(0)
    if match is None:
        raise ValueError(f"{text!r} is no duration; write 200ms, 45s or 10m")
    return Duration(float(match[1]) * _UNITS_S[match[2]])


def factor(text: str) -> Factor:
    """`1/16` -> 0.0625."""
    try:
        value = float(Fraction(text))
    except (ValueError, ZeroDivisionError):
        value = 0.0
    if value <= 0:
        raise ValueError(f"{text!r} is no factor above 0; write 1/16 or 0.5")
    return Factor(value)


def long_prompts(text: str) -> LongPrompts:
    """`0.01x2048-4096`."""
    match = _LONG.fullmatch(text)
    if match is None or not 1 <= int(match[2]) <= int(match[3] or match[2]):
        raise ValueError(f"{text!r} is not SHARExLEAST-MOST, such as 0.01x2048-4096")
    return LongPrompts((float(match[1]), int(match[2]), int(match[3] or match[2])))


Seconds = Annotated[Duration, reader(seconds)]
_UNCHANGED, _BEGINNING = Factor(1), Duration(0)
_NO_PROMISE, _PATIENCE = Duration(inf), Duration(600)
Switch = Annotated[bool, Parameter(negative="")]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class BenchFlags:
    """What is measured, and how.

    Parameters
    ----------
    url
        The server's address.
    trace
        Azure CSV, Mooncake JSONL or own JSONL.
    workload
        Made-up traffic, such as chat:rate=2,input=300,output=60,images=0.2x1-4.
    rate
        Requests a second, Poisson, in place of the recorded times.
    speed
        Factor on the recorded rate.
    scale_lengths
        Factor on prompt and output tokens, such as 1/16.
    long
        Share of prompts to replace by long ones, such as 0.01x2048-4096.
    start
        Where in the recording to begin, such as 60s.
    duration
        How much of it to replay, such as 45s.
    requests
        At most so many requests.
    seed
        Decides arrivals and lengths.
    ttft_slo
        Promised time to first token, such as 500ms.
    tpot_slo
        Promised time per output token.
    endpoint
        /v1/chat/completions or /v1/completions.
    model
        Name of the model, where the server has several.
    api_key
        Key of the server.
    natural_end
        Let answers end by themselves instead of at the trace's length.
    same_texts
        The same words in every run, so that a repeated run finds them cached.
    timeout
        Longest wait for one answer [10m].
    output
        Write everything, each request included, to this JSON file.
    plot
        Draw it to FILE.png or FILE.html.
    json
        Print JSON instead of tables.
    """

    url: str = "http://127.0.0.1:8000"
    trace: Path | None = None
    workload: str | None = None
    rate: float | None = None
    speed: float = 1.0
    scale_lengths: Annotated[Factor, reader(factor)] = _UNCHANGED
    long: Annotated[LongPrompts | None, reader(long_prompts)] = None
    start: Seconds = _BEGINNING
    duration: Seconds | None = None
    requests: int | None = None
    seed: int = 0
    ttft_slo: Seconds = _NO_PROMISE
    tpot_slo: Seconds = _NO_PROMISE
    endpoint: Literal["chat", "completions"] = "chat"
    model: str | None = None
    api_key: str | None = None
    natural_end: Switch = False
    same_texts: Switch = False
    timeout: Seconds = _PATIENCE
    output: Path | None = None
    plot: Path | None = None
    json: Switch = False

    def settings(self) -> dict[str, Any]:
        """For the report's file: what decides the load, and nothing secret."""
        hidden = ("api_key", "output", "plot", "json", "url")
        values = {name: getattr(self, name) for name in self.__slots__ if name not in hidden}
        plain = {n: str(v) if isinstance(v, Path) else v for n, v in values.items()}
        return {n: None if v == inf else v for n, v in plain.items()}


def bench(flags: BenchFlags | None = None) -> int:
    """Replay a trace against an OpenAI-compatible server; report latencies and kept promises.

    Requests are sent at their times, whether or not earlier ones were answered. Works with
    longlens, vLLM, llama-server and others.
    """
    from api.bench_run import USER_ERRORS, run

    try:
        return run(flags or BenchFlags())
    except USER_ERRORS as error:
        print(f"longlens: {error}", file=sys.stderr)
        return 1
