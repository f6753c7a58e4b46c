"""Recorded traffic: when requests come, how long they are, what they share.

Owns: TraceRequest, the readers of three formats (Azure CSV, Mooncake JSONL, our own JSONL), the
writer of ours, and TraceError, which names the file, the line and the fault. Does not own: what is
made of a trace (workload.py), prompts in words (api), or who serves it. Imports no torch.

Readers are generators: a file of any length is read a line at a time, in its order of arrival, and
the first arrival is at 0 s.

Our own format is one JSON object a line:

    {"arrival_s": 0.25, "prompt_tokens": 1155, "output_tokens": 211, "images": [[448, 448]],
     "hash_ids": [7, 9, 12], "block_tokens": 512, "tenant": "a", "priority": 0}

with `token_ids` in place of `prompt_tokens` when the ids themselves are known; all but arrival,
prompt and output may be left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

TraceFormat = Literal["azure", "mooncake", "own"]

MOONCAKE_BLOCK_TOKENS = 512
_MOST_TOKENS = 1 << 24
_LATEST = 1e15
"""Seconds, or milliseconds; floats are exact to a millisecond below it."""
_MOST_PIXELS = 1 << 20
"""Of an image's edge. What says more than any of these is damaged."""


class TraceError(ValueError):
    """A trace that cannot be used: which file, which line, what is wrong with it."""

    def __init__(self, path: Path | str, line: int, fault: str) -> None:
        super().__init__(f"{path}, line {line}: {fault}")
        self.path = str(path)
        self.line = line
        self.fault = fault


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace, without its words."""

    arrival_s: float
    """Seconds since the start of the trace."""
    prompt_tokens: int
    """Tokens of the prompt without those of its images, at least 1."""
    output_tokens: int
    """At least 1."""
    images: tuple[tuple[int, int], ...] = ()
    """(width, height) in pixels; their tokens are what the model makes of these."""
    hash_ids: tuple[int, ...] = ()
    """Ids of the prompt's blocks of `block_tokens` tokens, from its start: two requests whose ids
    begin alike begin with the same tokens. Tokens beyond them are the request's own."""
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    token_ids: tuple[int, ...] = ()
    """The prompt itself, where it is known; `prompt_tokens` of them."""
    tenant: str = ""
    priority: int = 0
    """As in Request: smaller runs first."""

    def prompt_ids(self, number: int) -> tuple[int, ...]:
        """Token ids that are equal exactly where prompts of the trace are. Block `h` takes the ids
        [h b, (h + 1) b); the own tokens of request `number` (its place in the trace)
        are negative. No vocabulary has them: for accounting, not for models."""
        if self.token_ids:
            return self.token_ids
        first = -1 - (number << 32)
        if not self.hash_ids:
            return tuple(range(first, first - self.prompt_tokens, -1))
        size = self.block_tokens
        ids: list[int] = []
        for block in self.hash_ids[: -(-self.prompt_tokens // size)]:
            ids += range(block * size, (block + 1) * size)
        del ids[self.prompt_tokens :]
        ids += range(first, first - (self.prompt_tokens - len(ids)), -1)
        return tuple(ids)


# -- reading ------------------------------------------------------------------------------------


def read_trace(path: Path | str, form: TraceFormat | None = None) -> Iterator[TraceRequest]:
    """The requests of a file, in its order. The format is told from the first line if not given.

    Raises TraceError at the first line that is malformed, or earlier than the one before it, and
    OSError when the file cannot be read; both when the line is reached.
    """
    path = Path(path)
    number = 0
    start: float | None = None
    last = 0.0
    parse: _Parse | None = None
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if not line:
                    continue
                if parse is None:
                    parse = _PARSERS[form or _format_of(line)]
                    if parse is _azure:
                        _check_azure_header(line)
                        continue
                request = parse(line)
            except UnicodeDecodeError as error:
                raise TraceError(path, number, f"it is not UTF-8 ({error.reason})") from None
            except _FaultError as fault:
                raise TraceError(path, number, str(fault)) from None
            if start is None:
                start = last = request.arrival_s
            if request.arrival_s < last:
                fault_text = (
                    f"it arrives {last - request.arrival_s:g} s before the line before it; sort "
                    "the trace by arrival"
                )
                raise TraceError(path, number, fault_text)
            last = request.arrival_s
            yield _moved(request, request.arrival_s - start)
    if start is None:
        raise TraceError(path, number + 1, "the trace has no requests")


def write_trace(path: Path | str, requests: Iterable[TraceRequest]) -> int:
    """Writes our own format and returns how many requests there were."""
    count = 0
    with Path(path).open("w", encoding="utf-8") as file:
        for request in requests:
            file.write(json.dumps(_as_json(request), separators=(",", ":")) + "\n")
            count += 1
    return count


class _FaultError(ValueError):
    """What is wrong with a line; becomes a TraceError with its place."""


_Parse = Callable[[str], TraceRequest]


def _format_of(first_line: str) -> TraceFormat:
    if not first_line.startswith("{"):
        return "azure"
    return "mooncake" if "timestamp" in json_object(first_line) else "own"


# -- Azure --------------------------------------------------------------------------------------

_AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def _check_azure_header(line: str) -> None:
    if line != _AZURE_HEADER:
        raise _FaultError(f"the header is {_shown(line)}, expected {_AZURE_HEADER} (or JSON lines)")


def _azure(line: str) -> TraceRequest:
    """Azure Public Dataset, LLM inference traces of 2023 and 2024."""
    fields = line.split(",")
    if len(fields) != 3:
        raise _FaultError(f"it has {len(fields)} fields, expected 3: {_AZURE_HEADER}")
    try:
        when = datetime.fromisoformat(fields[0])
    except ValueError:
        raise _FaultError(
            f"TIMESTAMP is {_shown(fields[0])}, expected a date and time like "
            "2023-11-16 18:15:46.6805900"
        ) from None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return TraceRequest(
        when.timestamp(),
        _count("ContextTokens", _integer("ContextTokens", fields[1])),
        _count("GeneratedTokens", _integer("GeneratedTokens", fields[2])),
    )


def _integer(name: str, text: str) -> int:
    # int() would take 1_000 and other scripts' digits, too.
    if not re.fullmatch(r" *-?[0-9]{1,20} *", text):
        raise _FaultError(f"{name} is {_shown(text)}, expected a whole number")
    return int(text)


# -- JSON lines ---------------------------------------------------------------------------------


def _mooncake(line: str) -> TraceRequest:
    """Mooncake's open traces: arrival in milliseconds, ids of blocks of 512 tokens."""
    row = json_object(line)
    _check_keys(row, ("timestamp", "input_length", "output_length"), ("hash_ids", "type"))
    tokens = _count("input_length", row["input_length"])
    ids = _ints("hash_ids", row.get("hash_ids", []))
    need = -(-tokens // MOONCAKE_BLOCK_TOKENS)
    if ids and len(ids) != need:
        raise _FaultError(
            f"hash_ids has {len(ids)} ids, but {tokens} tokens are {need} blocks of "
            f"{MOONCAKE_BLOCK_TOKENS}"
        )
    return TraceRequest(
        _number("timestamp", row["timestamp"]) / 1000,
        tokens,
        _count("output_length", row["output_length"]),
        hash_ids=ids,
    )


_OWN_OPTIONAL = (
    *("prompt_tokens", "token_ids", "images", "hash_ids", "block_tokens"),
    *("tenant", "priority"),
)


def _own(line: str) -> TraceRequest:
    row = json_object(line)
    _check_keys(row, ("arrival_s", "output_tokens"), _OWN_OPTIONAL)
    token_ids = _ints("token_ids", row.get("token_ids", []))
    if "prompt_tokens" not in row and not token_ids:
        raise _FaultError("prompt_tokens is missing (or token_ids)")
    tokens = _count("prompt_tokens", row.get("prompt_tokens", len(token_ids)))
    if token_ids and tokens != len(token_ids):
        raise _FaultError(f"prompt_tokens is {tokens}, but there are {len(token_ids)} token_ids")
    tenant, priority = row.get("tenant", ""), row.get("priority", 0)
    if not isinstance(tenant, str):
        raise _FaultError(f"tenant is {_shown(tenant)}, expected a string")
    if not _is_int(priority):
        raise _FaultError(f"priority is {_shown(priority)}, expected a whole number")
    return TraceRequest(
        _number("arrival_s", row["arrival_s"]),
        tokens,
        _count("output_tokens", row["output_tokens"]),
        images=_sizes(row.get("images", [])),
        hash_ids=_ints("hash_ids", row.get("hash_ids", [])),
        block_tokens=_count("block_tokens", row.get("block_tokens", MOONCAKE_BLOCK_TOKENS)),
        token_ids=token_ids,
        tenant=tenant,
        priority=priority,
    )


_PARSERS: dict[TraceFormat, _Parse] = {"azure": _azure, "mooncake": _mooncake, "own": _own}


def _as_json(request: TraceRequest) -> dict[str, Any]:
    row: dict[str, Any] = {"arrival_s": round(request.arrival_s, 6)}
    if request.token_ids:
        row["token_ids"] = request.token_ids
    else:
        row["prompt_tokens"] = request.prompt_tokens
    row["output_tokens"] = request.output_tokens
    if request.images:
        row["images"] = request.images
    if request.hash_ids:
        row["hash_ids"] = request.hash_ids
        row["block_tokens"] = request.block_tokens
    if request.tenant:
        row["tenant"] = request.tenant
    if request.priority:
        row["priority"] = request.priority
    return row


def json_object(line: str) -> dict[str, Any]:
    """Raises ValueError that says what is wrong with the line."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise _FaultError(f"it is not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        # A number of thousands of digits, thousands of brackets.
        raise _FaultError(f"it is JSON that nobody reads: {error}") from None
    if not isinstance(row, dict):
        raise _FaultError(f"it is {_shown(row)}, expected a JSON object")
    return row


def _check_keys(row: dict[str, Any], needed: tuple[str, ...], more: tuple[str, ...]) -> None:
    for name in needed:
        if name not in row:
            raise _FaultError(f"{name} is missing")
    for name in row:
        if name not in needed and name not in more:
            raise _FaultError(
                f"{_shown(name)} is not known; expected {', '.join((*needed, *more))}"
            )


def _number(name: str, value: Any) -> float:
    # NaN is in no order, so it is no number here either.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LATEST:
        raise _FaultError(f"{name} is {_shown(value)}, expected a number up to {_LATEST:g}")
    if value < 0:
        raise _FaultError(f"{name} is {value:g}, expected 0 or more")
    return float(value)


def _count(name: str, value: Any) -> int:
    if not _is_int(value):
        raise _FaultError(f"{name} is {_shown(value)}, expected a whole number")
    if not 1 <= value < _MOST_TOKENS:
        raise _FaultError(f"{name} is {value}, expected at least 1 and less than {_MOST_TOKENS}")
    return int(value)


def _ints(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(_is_int(item) and item >= 0 for item in value):
        raise _FaultError(f"{name} is {_shown(value)}, expected a list of whole numbers from 0 on")
    return tuple(value)


def _sizes(value: Any) -> tuple[tuple[int, int], ...]:
    sizes: list[tuple[int, int]] = []
    for item in value if isinstance(value, list) else [value]:
        if not (
            isinstance(item, list)
            and len(item) == 2
            and all(_is_int(side) and 1 <= side < _MOST_PIXELS for side in item)
        ):
            raise _FaultError(
                f"images has {_shown(item)}, expected [width, height] in pixels, each at least 1 "
                f"and less than {_MOST_PIXELS}"
            )
        sizes.append((item[0], item[1]))
    return tuple(sizes)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _moved(request: TraceRequest, arrival_s: float) -> TraceRequest:
    # dataclasses.replace costs more than the rest of reading a line.
    return TraceRequest(
        arrival_s,
        request.prompt_tokens,
        request.output_tokens,
        request.images,
        request.hash_ids,
        request.block_tokens,
        request.token_ids,
        request.tenant,
        request.priority,
    )
