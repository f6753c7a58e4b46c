"""`longlens plan`: what a model needs of a device, before anything is started.

Owns: the list of verbs, and `kv` with its table. Does not own: the other verbs (plan_speed.py,
plan_scale.py), how reports are shown (plan_show.py), or the arithmetic (chunked_prefill/planner).
Imports no torch.
"""

from __future__ import annotations

from dataclasses import asdict
from json import dumps
from typing import Annotated

from cyclopts import App, Parameter

from api import plan_scale, plan_speed
from api.plan_flags import Target, lengths
from api.plan_show import aligned, seconds
from chunked_prefill.planner.devices import PlanError, find_device
from chunked_prefill.planner.kv import ACHIEVED_FLOPS, CPU_BANDWIDTH, KVPlan, plan_kv
from chunked_prefill.planner.model_files import find_shape

plan_app = App(name="plan", help="Plans by arithmetic: what fits, what binds, where it turns.")
_TARGET = Target()
_MOST_HOST_GIB = 1 << 20


@plan_app.command
def kv(
    model: str,
    *,
    context: str | None = None,
    host_kv_gib: float = 0.0,
    target: Target = _TARGET,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """KV bytes per token, users by context, and what host memory buys.

    Parameters
    ----------
    model
        A folder with config.json, or a known shape such as llama-3.1-70b.
    context
        Lengths of context, separated by commas; 8k,32k,128k as far as the model goes.
    host_kv_gib
        Host memory for KV, in GiB.
    json
        Print JSON for programs.
    """
    if not 0 <= host_kv_gib <= _MOST_HOST_GIB:
        raise PlanError(
            f"--host-kv-gib is {host_kv_gib:g}; give GiB of host memory from 0 (none) to "
            f"{_MOST_HOST_GIB:,}"
        )
    spec, count = find_device(target.device)
    plan = plan_kv(
        find_shape(model),
        spec,
        count,
        weights=target.weights,
        kv=target.kv_dtype,
        contexts=None if context is None else lengths("context", context),
        host_bytes=host_kv_gib * 2**30,
    )
    print(dumps(asdict(plan), indent=1) if json else "\n".join(_kv_lines(plan)))
    return 0


for _verb in (
    *(plan_speed.roofline, plan_speed.prefill, plan_scale.users, plan_speed.speculate),
    *(plan_speed.quantize, plan_scale.disaggregate, plan_scale.lora, plan_speed.moe),
    *(plan_scale.images, plan_scale.fleet, plan_speed.batching),
):
    plan_app.command(_verb)


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
                seconds(c.copy_seconds),
                seconds(c.cpu_seconds),
                seconds(c.prefill_seconds),
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
        *([f"the model      {plan.model_length:,} tokens"] if plan.model_length else []),
        "",
        *aligned(rows),
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
