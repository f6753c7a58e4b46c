"""`longlens plan`: what a model needs of a device, before anything is started.

Owns: the verbs under `plan`, their flags, tables and JSON. Does not own: the arithmetic
(chunked_prefill/planner). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from json import dumps
from typing import Annotated

from cyclopts import App, Parameter

from chunked_prefill.planner.devices import PlanError, find_device
from chunked_prefill.planner.kv import ACHIEVED_FLOPS, CPU_BANDWIDTH, KVPlan, plan_kv
from chunked_prefill.planner.shapes import find_shape

plan_app = App(name="plan", help="Plans by arithmetic: what fits, and what binds.")


@plan_app.command
def kv(
    model: str,
    *,
    device: str = "H100",
    weights: str = "bf16",
    kv_dtype: str = "bf16",
    context: str = "8k,32k,128k",
    host_kv_gib: float = 0.0,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """KV bytes per token, users by context, and what host memory buys.

    Parameters
    ----------
    model
        A folder with config.json, or a known shape such as llama-3.1-70b.
    device
        H100, 8xH100 (one model on eight), H200, B200, A100, L4, RTX4090, or this (memory only).
    weights
        Format of the weights: bf16, fp8, w4a16, fp32.
    kv_dtype
        Format of the KV: bf16, fp8, fp32.
    context
        Lengths of context, separated by commas; 32k is 32768.
    host_kv_gib
        Host memory for KV, in GiB.
    json
        Print JSON for programs.
    """
    spec, count = find_device(device)
    plan = plan_kv(
        find_shape(model),
        spec,
        count,
        weights=weights,
        kv=kv_dtype,
        contexts=_lengths(context),
        host_bytes=host_kv_gib * 2**30,
    )
    print(dumps(asdict(plan), indent=1) if json else "\n".join(_kv_lines(plan)))
    return 0


def _lengths(text: str) -> tuple[int, ...]:
    from api.config import number

    try:
        return tuple(int(number(part)) for part in text.split(","))
    except ValueError as error:
        raise PlanError(f"--context {text!r} is no list of lengths such as 8k,131072") from error


def _kv_lines(plan: KVPlan) -> list[str]:
    copies = "" if plan.repeated == 1 else f", stored {plan.repeated:g} times"
    fits = f"{plan.room_bytes / 1e9:.1f} GB are left for KV"
    if plan.room_bytes <= 0:
        fits = f"the weights do not fit: {-plan.room_bytes / 1e9:.1f} GB are missing"
    largest = f"{plan.largest_context:,} tokens on the device"
    if plan.host_bytes:
        largest += f", {plan.largest_with_host:,} with {plan.host_bytes / 2**30:g} GiB of the host"
    rows = [
        ("context", "KV", "users", "with host", "copy", "cpu", "compute", "chunk"),
        *(
            (
                f"{c.tokens:,}",
                f"{c.kv_bytes / 1e9:.2f} GB",
                f"{c.users:,}",
                f"{c.users_with_host:,}",
                _seconds(c.copy_seconds),
                _seconds(c.cpu_seconds),
                _seconds(c.prefill_seconds),
                "-" if c.smallest_chunk is None else f"{c.smallest_chunk:,}",
            )
            for c in plan.contexts
        ),
    ]
    lines = [
        f"{plan.model} on {plan.count} x {plan.device}",
        f"weights        {plan.weight_bytes / 1e9:.1f} GB ({plan.parameters / 1e9:.2f}e9 numbers)",
        f"KV per token   {plan.kv_bytes_per_token:,.0f} bytes{copies}",
        f"room           {fits}",
        f"one request    at most {largest}",
        "",
        *_aligned(rows),
        "",
        "with host: contexts that device and host hold together.",
        "copy: a context's KV from the host, once to go on with it, or for each token decoded",
        "while it lies there.",
        f"cpu: such a token, its KV attended by a CPU at {CPU_BANDWIDTH / 1e9:g} GB/s.",
        f"compute: prefill instead, at {ACHIEVED_FLOPS:.0%} of the bf16 rate.",
        "chunk: tokens of a prefill step that hide the copies of a context which lies in the host.",
    ]
    seen = plan.contexts[-1].visible_bytes * plan.repeated
    if seen < plan.contexts[-1].kv_bytes:
        lines.append(f"Sliding windows let the last token see {seen / 1e9:.2f} GB of the largest.")
    return lines


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f} s" if value >= 10 else f"{value * 1e3:,.0f} ms"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
