"""What fewer bits buy: memory, decode and prefill, and for which batches.

Owns: the comparison of number formats on one deployment. Does not own: how a format is computed
(lm_engine/quant), or its error, which is measured. Imports no torch.
"""

from __future__ import annotations

from dataclasses import replace

from chunked_prefill.planner.deployment import IN_WORDS, Deployment
from chunked_prefill.planner.devices import require
from chunked_prefill.planner.report import Column, Curve, Fact, Level, Line, Report, Table, Value
from chunked_prefill.planner.roofline import ridge_batch

FORMATS = (("bf16", "bf16"), ("bf16", "fp8"), ("fp8", "bf16"), ("fp8", "fp8"), ("w4a16", "bf16"))
"""Of weights and KV."""
FORMATS_LAST = ("w4a16", "fp8")
_MOST_BATCH = 1 << 20


def decode_speedup(
    base: Deployment, other: Deployment, batch: float, context: int, mfu: float = 1.0
) -> float:
    """Ratio of two step times (Deployment.step) at one batch and context.

    At most the ratio of bytes, 2 / 0.53 = 3.8 for w4a16 (AWQ, arXiv 2306.00978, and Marlin, arXiv
    2408.11743, which stays near it up to batches of 16 to 32) and 2 for fp8 (arXiv 2209.05433).
    """
    one, two = (d.step(batch, context, mfu=mfu).total_s for d in (base, other))
    return one / two


def prefill_speedup(base: Deployment, other: Deployment) -> float:
    """Ratio of dense rates: 2 for w8a8 where the device has fp8 units (H100 data sheet), 1 for
    weights that are widened to bf16 before they are multiplied, as w4a16's are; widening costs, so
    1 is the most."""
    return other.flops_per_s / base.flops_per_s


def last_batch(base: Deployment, other: Deployment, context: int, gain: float) -> int | None:
    """Largest batch at which `other` is at least `gain` times as fast as `base`; None when it is
    so at any batch, 0 at none. The gain falls with the batch where both share KV and rates."""

    def gains(batch: int) -> bool:
        return decode_speedup(base, other, batch, context) >= gain

    if gains(_MOST_BATCH):
        return None
    low, high = 0, _MOST_BATCH
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if gains(middle) else (low, middle)
    return low


def plan_quantize(deployment: Deployment, *, context: int = 4096, batch: int = 32) -> Report:
    """Formats against bf16 at one batch and context; `deployment`'s own formats do not matter.
    Raises PlanError."""
    deployment.check_context(context)
    require("batch", batch, 1, _MOST_BATCH)
    base = replace(deployment, weights="bf16", kv="bf16")
    rows: list[tuple[Value, ...]] = []
    for weights, kv in (*FORMATS, FORMATS_LAST):
        other = replace(deployment, weights=weights, kv=kv)
        rows.append(
            (
                weights,
                kv,
                other.weight_bytes,
                other.weight_bytes / base.weight_bytes,
                other.users(context),
                decode_speedup(base, other, 1, 1),
                decode_speedup(base, other, batch, context),
                prefill_speedup(base, other),
                ridge_batch(deployment.device, weights),
            )
        )
    columns = (
        *(Column("weights"), Column("KV"), Column("size", "bytes"), Column("of bf16", "share")),
        *(Column("users"), Column("decode at most", "times")),
        *(Column(f"at batch {batch}", "times"), Column("prefill at most", "times")),
        Column("ridge batch"),
    )
    four, eight = (replace(base, weights=name) for name in ("w4a16", "fp8"))
    step = base.step(batch, context)
    return Report(
        planner="quantize",
        title=f"Fewer bits: {base.shape.name} on {base.count} x {base.device.name}, "
        f"contexts of {context:,} tokens",
        formulas=(
            "decode step [s] = max(W / BW, 2 N B / F) + B ctx kv / BW",
            "decode at most = bytes of bf16 / bytes of the format, while reading weights binds",
            "prefill at most = dense rate of the format / rate of bf16",
        ),
        facts=(
            Fact("w4a16", 0.53, "", "bytes per weight, scales of groups of 128 included"),
            Fact("bf16 step", step.total_s, "s", f"at batch {batch:,}"),
            Fact("of it reading KV", step.kv_s / step.total_s, "share"),
        ),
        tables=(Table("Against bf16 weights and KV", columns, tuple(rows)),),
        binds=f"At batch {batch:,} of {context:,} tokens {IN_WORDS[step.binds]} is the most of a "
        + "bf16 step: "
        + {
            "weights": "weights of fewer bits are what helps.",
            "KV": "fp8 KV helps more than smaller weights.",
            "compute": "only a format with faster units helps.",
        }[step.binds],
        reverses=_turns(base, four, eight, context),
        curve=_curve(deployment, context),
    )


def _turns(base: Deployment, four: Deployment, eight: Deployment, context: int) -> tuple[str, ...]:
    turns = []
    nothing = last_batch(base, four, context, 1.005)
    if nothing is not None:
        turns.append(
            f"w4a16 weights decode no faster than bf16 above a batch of {nothing:,}; in prefill "
            "they never do."
        )
    worse = last_batch(eight, four, context, 1.0)
    if eight.flops_per_s > four.flops_per_s and worse is not None:
        turns.append(f"w4a16 decodes slower than fp8 above a batch of {worse:,}.")
    if eight.flops_per_s == base.flops_per_s:
        turns.append(
            f"{base.device.name} has no fp8 units: fp8 weights save bytes but multiply as bf16."
        )
    return tuple(turns)


def _curve(deployment: Deployment, context: int) -> Curve:
    base = replace(deployment, weights="bf16", kv="bf16")
    xs = tuple(2 ** (i / 4) for i in range(45))
    lines = []
    for weights, kv in (*FORMATS[1:], FORMATS_LAST):
        other = replace(deployment, weights=weights, kv=kv)
        ys = tuple(decode_speedup(base, other, x, context) for x in xs)
        lines.append(Line(f"{weights} weights, {kv} KV", xs, ys))
    return Curve(
        title=f"Decode speed of formats against bf16, contexts of {context:,} tokens\n"
        f"{base.shape.name} on {base.count} x {base.device.name}",
        x_label="batch [sequences]",
        y_label="times the speed of bf16",
        lines=tuple(lines),
        levels=(Level(1.0, "bf16"),),
        log_x=2,
    )
