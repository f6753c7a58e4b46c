"""What is made of a trace, and traffic out of a few numbers.

Owns: the changes that a trace is replayed with (excerpt, scaled lengths, other arrivals, some long
prompts), and the grammar of `--workload`. Does not own: files (trace.py), or who serves it.
Imports no torch.

    workload  = phase *(";" phase)            one after another
    phase     = stream *("+" stream)          at the same time; as long as its longest stream
    stream    = kind [":" key "=" value *("," key "=" value)]
    kind      = "chat" | "documents" | "images"     what is assumed where a key is left out

    rate=4                 requests a second, Poisson
    duration=60            seconds of arrivals
    input=1155             prompt tokens: log-normal with this mean and the spread's sigma
    input=500-2000         uniform
    output=211             as input
    spread=1.0             sigma of the log-normal lengths; 0 makes every length its mean
    long=0.01x2048-4096    this share of the prompts is so long instead
    images=0.2x1-4         this share of the requests carries so many images
    size=448x448           pixels of an image; several are separated by "|" and drawn evenly
    shared=1024x8          every prompt begins with one of 8 beginnings of 1,024 tokens, which come
                           before the `input` tokens
    tenant=a  priority=1   as they stand

Everything is drawn from the seed, and what a request is does not change with the rate, so two rates
can be compared on the same requests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import exp, isfinite
from random import Random

from chunked_prefill.trace import TraceRequest

Range = tuple[int, int]


class WorkloadError(ValueError):
    """A value of a workload or of a change to a trace: which, what it is, what is expected."""


# -- changes to a trace -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Changes:
    """How a trace is replayed; the default is as it was recorded."""

    start_s: float = 0.0
    """Requests that arrive earlier in the recording are left out."""
    duration_s: float | None = None
    """Seconds of the replay; None is all."""
    lengths: float = 1.0
    """Factor on prompts and outputs, of which at least one token stays; images keep their size."""
    speed: float = 1.0
    """Factor on the recorded rate of arrivals."""
    poisson_rate: float | None = None
    """Requests a second of Poisson arrivals that take the place of the recorded ones."""
    long_share: float = 0.0
    """Share of the prompts that are replaced by long ones, after `lengths`."""
    long_tokens: Range = (2048, 4096)
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (
            ("start_s", self.start_s, "at least 0"),
            ("duration_s", self.duration_s, "above 0"),
            ("lengths", self.lengths, "above 0"),
            ("speed", self.speed, "above 0"),
            ("poisson_rate", self.poisson_rate, "above 0"),
        ):
            if value is None:
                continue
            if not isfinite(value) or value < 0 or (value == 0 and least == "above 0"):
                raise WorkloadError(f"{name} is {value:g}, expected {least}")
        if not 0 <= self.long_share <= 1:
            raise WorkloadError(f"long_share is {self.long_share:g}, expected 0 to 1")
        if not 1 <= self.long_tokens[0] <= self.long_tokens[1]:
            raise WorkloadError(f"long_tokens is {self.long_tokens}, expected (least, most)")


def changed(requests: Iterable[TraceRequest], changes: Changes) -> Iterator[TraceRequest]:
    """The requests as they are replayed: the first second of the replay is `start_s` of the
    recording. Reads no further than the replay lasts."""
    gaps = Random(f"{changes.seed} arrivals")
    longs = Random(f"{changes.seed} long prompts")
    clock_s = 0.0
    for request in requests:
        if request.arrival_s < changes.start_s:
            continue
        if changes.poisson_rate is None:
            arrival_s = (request.arrival_s - changes.start_s) / changes.speed
        else:
            clock_s += gaps.expovariate(1.0) / changes.poisson_rate
            arrival_s = clock_s
        if changes.duration_s is not None and arrival_s >= changes.duration_s:
            return
        request = scaled(request, changes.lengths)
        if longs.random() < changes.long_share:
            tokens = longs.randint(*changes.long_tokens)
            request = replace(request, prompt_tokens=tokens, hash_ids=(), token_ids=())
        yield replace(request, arrival_s=arrival_s)


def scaled(request: TraceRequest, lengths: float) -> TraceRequest:
    """Prompt, output and the blocks of shared tokens times `lengths`; known ids are cut, or
    forgotten where there are too few."""
    if lengths == 1.0:
        return request
    prompt = max(1, round(request.prompt_tokens * lengths))
    return replace(
        request,
        prompt_tokens=prompt,
        output_tokens=max(1, round(request.output_tokens * lengths)),
        block_tokens=max(1, round(request.block_tokens * lengths)),
        token_ids=request.token_ids[:prompt] if prompt <= len(request.token_ids) else (),
    )


# -- workloads ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stream:
    """Traffic of one kind; the fields are the keys of the grammar."""

    rate: float
    input: int | Range
    output: int | Range
    duration: float = 60.0
    spread: float = 1.0
    long: tuple[float, Range] = (0.0, (1, 1))
    images: tuple[float, Range] = (0.0, (1, 1))
    size: tuple[tuple[int, int], ...] = ((448, 448),)
    shared: tuple[int, int] | None = None
    tenant: str = ""
    priority: int = 0


KINDS = {
    "chat": Stream(rate=1.0, input=1155, output=211),
    "documents": Stream(rate=0.1, input=(8_000, 32_000), output=300),
    "images": Stream(rate=0.5, input=64, output=128, images=(1.0, (1, 4)), size=((1024, 1024),)),
}
"""chat: the means of the Azure conversation trace of 2023."""

Workload = tuple[tuple[Stream, ...], ...]
"""Phases of streams."""


def parse_workload(spec: str) -> Workload:
    """Raises WorkloadError, which names the part, what it is and what is expected."""
    return tuple(
        tuple(_stream(part.strip()) for part in phase.split("+")) for phase in spec.split(";")
    )


def synthesize(workload: Workload | str, seed: int = 0) -> Iterator[TraceRequest]:
    """The requests of a workload by arrival; the same for the same seed."""
    if isinstance(workload, str):
        workload = parse_workload(workload)
    start_s = 0.0
    for number, streams in enumerate(workload):
        drawn = [
            request
            for place, stream in enumerate(streams)
            for request in _draw(stream, start_s, f"{seed} {number} {place}")
        ]
        yield from sorted(drawn, key=lambda request: request.arrival_s)
        start_s += max(stream.duration for stream in streams)


def _draw(stream: Stream, start_s: float, seed: str) -> Iterator[TraceRequest]:
    gaps, shapes = Random(f"{seed} arrivals"), Random(f"{seed} requests")
    clock_s = 0.0
    while True:
        clock_s += gaps.expovariate(1.0) / stream.rate
        if clock_s >= stream.duration:
            return
        prompt = _length(stream.input, stream.spread, shapes)
        output = _length(stream.output, stream.spread, shapes)
        if shapes.random() < stream.long[0]:
            prompt = shapes.randint(*stream.long[1])
        images: tuple[tuple[int, int], ...] = ()
        if shapes.random() < stream.images[0]:
            count = shapes.randint(*stream.images[1])
            images = tuple(shapes.choice(stream.size) for _ in range(count))
        hash_ids: tuple[int, ...] = ()
        block = 512
        if stream.shared is not None:
            block, groups = stream.shared
            hash_ids = (shapes.randrange(groups),)
            prompt += block
        yield TraceRequest(
            start_s + clock_s,
            prompt,
            output,
            images=images,
            hash_ids=hash_ids,
            block_tokens=block,
            tenant=stream.tenant,
            priority=stream.priority,
        )


def _length(wanted: int | Range, spread: float, draws: Random) -> int:
    if isinstance(wanted, tuple):
        return draws.randint(*wanted)
    # E[exp(N(m, s))] = exp(m + s²/2).
    factor = exp(draws.gauss(0.0, 1.0) * spread - spread * spread / 2)
    return max(1, round(wanted * factor))


def _stream(text: str) -> Stream:
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise WorkloadError(f"a workload of kind {kind!r} is not known; choose {', '.join(KINDS)}")
    values: dict[str, object] = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        reader = _KEYS.get(key)
        if not equals or reader is None:
            raise WorkloadError(f"{text!r}: {item!r} is not key=value with one of {_names()}")
        if key in values:
            raise WorkloadError(f"{text!r}: {key} is given twice")
        try:
            values[key] = reader(value)
        except ValueError:
            raise WorkloadError(
                f"{text!r}: {key} is {value!r}, expected {_EXPECTED[key]}"
            ) from None
    return replace(KINDS[kind], **values)  # type: ignore[arg-type]


def _positive(text: str) -> float:
    value = float(text)
    if not (isfinite(value) and value > 0):
        raise ValueError
    return value


def _spread(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 3:
        raise ValueError
    return value


def _whole(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def _range(text: str) -> Range:
    low, dash, high = text.partition("-")
    found = (_whole(low), _whole(high if dash else low))
    if found[0] > found[1]:
        raise ValueError
    return found


def _mean_or_range(text: str) -> int | Range:
    return _range(text) if "-" in text else _whole(text)


def _share(text: str) -> tuple[float, Range]:
    share, cross, span = text.partition("x")
    value = float(share)
    if not cross or not 0 <= value <= 1:
        raise ValueError
    return value, _range(span)


def _pair(text: str) -> tuple[int, int]:
    if not re.fullmatch(r"\d+x\d+", text):
        raise ValueError
    first, second = text.split("x")
    return _whole(first), _whole(second)


def _sizes(text: str) -> tuple[tuple[int, int], ...]:
    return tuple(_pair(part) for part in text.split("|"))


_KEYS: dict[str, Callable[[str], object]] = {
    "rate": _positive,
    "duration": _positive,
    "input": _mean_or_range,
    "output": _mean_or_range,
    "spread": _spread,
    "long": _share,
    "images": _share,
    "size": _sizes,
    "shared": _pair,
    "tenant": str,
    "priority": int,
}
_EXPECTED = {
    "rate": "requests a second above 0",
    "duration": "seconds above 0",
    "input": "tokens, or least-most",
    "output": "tokens, or least-most",
    "spread": "a number between 0 and 3",
    "long": "SHARExLEAST-MOST like 0.01x2048-4096",
    "images": "SHARExLEAST-MOST like 0.2x1-4",
    "size": "WIDTHxHEIGHT, several separated by |",
    "shared": "TOKENSxGROUPS like 1024x8",
    "priority": "a whole number",
}


def _names() -> str:
    return ", ".join(_KEYS)
