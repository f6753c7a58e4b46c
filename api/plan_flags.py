"""Flags that the verbs of `longlens plan` share, and their values.

Owns: Target, Shown, and the reading of lengths, durations, image sizes and lists. Does not own: the
verbs (plan_cli.py, plan_speed.py, plan_scale.py), or what a planner accepts. Imports no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from pydantic import TypeAdapter, ValidationError

from api.config import Seconds, number
from chunked_prefill.planner.deployment import Deployment
from chunked_prefill.planner.devices import PlanError, find_device
from chunked_prefill.planner.model_files import find_shape

_DEVICE = "H100, 8xH100 (one model on eight), H200, B200, A100, L4, RTX4090, or this (measured)"
_SECONDS: TypeAdapter[float] = TypeAdapter(Seconds)


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Target:
    device: Annotated[str, Parameter(help=_DEVICE)] = "H100"
    weights: Annotated[str, Parameter(help="Format of the weights: bf16, fp8, w4a16, fp32")] = (
        "bf16"
    )
    kv_dtype: Annotated[str, Parameter(help="Format of the KV: bf16, fp8, fp32")] = "bf16"

    def deploy(self, model: str) -> Deployment:
        """The model on the device; this machine's rates are measured now. Raises PlanError."""
        spec, count = find_device(self.device)
        if spec.bandwidth_bytes_per_s is None:
            from chunked_prefill.planner.this_machine import measured

            spec = measured(spec)
        return Deployment(find_shape(model), spec, count, self.weights, self.kv_dtype)


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Shown:
    json: Annotated[bool, Parameter(negative="", help="Print JSON for programs")] = False
    plot: Annotated[
        Path | None, Parameter(help="Draw the curve into FILE.png, or a page FILE.html")
    ] = None


def whole(flag: str, text: str) -> int:
    """`32k` -> 32768. Raises PlanError."""
    try:
        return int(number(text))
    except (ValueError, OverflowError) as error:
        raise PlanError(f"--{flag} {text!r} is no whole number such as 4096 or 32k") from error


def lengths(flag: str, text: str) -> tuple[int, ...]:
    """`8k,131072`, each once. Raises PlanError."""
    try:
        return tuple(dict.fromkeys(int(number(part)) for part in text.split(",")))
    except (ValueError, OverflowError) as error:
        raise PlanError(f"--{flag} {text!r} is no list of lengths such as 8k,131072") from error


def seconds(flag: str, text: str) -> float:
    """`200ms` -> 0.2. Raises PlanError for a number without its unit."""
    try:
        return _SECONDS.validate_python(text)
    except ValidationError as error:
        said = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise PlanError(f"--{flag}: {said}") from error


def sizes(flag: str, text: str) -> tuple[tuple[int, int], ...]:
    """`1024x1024,1920x1080` as (width, height). Raises PlanError."""
    found = [re.fullmatch(r"\s*(\d{1,6})\s*[x×]\s*(\d{1,6})\s*", part) for part in text.split(",")]
    pairs = tuple((int(m[1]), int(m[2])) for m in found if m)
    if len(pairs) < len(found) or not all(w and h for w, h in pairs):
        raise PlanError(f"--{flag} {text!r} is no list of sizes such as 1024x1024,1920x1080")
    return pairs


def named_numbers(flag: str, text: str) -> dict[str, float]:
    """`ngram=1.9,eagle=3.2`; empty for an empty text. Raises PlanError."""
    pairs: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            pairs[name.strip()] = float(value)
        except ValueError as error:
            raise PlanError(f"--{flag} {text!r} is no list such as ngram=1.9,eagle=3.2") from error
    return pairs
