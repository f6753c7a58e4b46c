"""Decoding against the roofline: what a batch costs, and where more of it stops paying.

Owns: the ridge batch, the knee of throughput against latency, and their plan. Does not own: the
time of a step (deployment.py), or prefill (prefill.py). Imports no torch.
"""

from __future__ import annotations

from chunked_prefill.planner.deployment import IN_WORDS, MOST, Deployment
from chunked_prefill.planner.devices import DeviceSpec, PlanError, require
from chunked_prefill.planner.kv import bytes_of
from chunked_prefill.planner.report import Column, Curve, Fact, Line, Mark, Report, Table

BATCHES = (1, 8, 32, 64, 128, 256, 512, 1024)


def ridge_batch(device: DeviceSpec, weights: str) -> float:
    """F · b_w / (2 · BW): rows of a step at which multiplying takes as long as reading weights.

    A weight of b_w bytes is read once and used for two operations per row: the ridge point of the
    roofline (Williams et al. 2009, CACM 52(4)) in rows, as in Pope et al. 2022, arXiv 2211.05102,
    section 2.1. Below it a further row is free, above it it costs its operations.
    """
    flops, bandwidth = device.flops_per_s(weights), device.bandwidth_bytes_per_s
    if flops is None or bandwidth is None:
        raise PlanError(f"device {device.name!r} has no known rates; name one that has")
    return flops * bytes_of("weights", weights) / (2 * bandwidth)


def knee_batch(deployment: Deployment, context: int) -> float:
    """W / (ctx · kv): the batch at which reading KV takes as long as reading weights.

    A step of B sequences takes W + B · ctx · kv, so it yields B / (W + B · ctx · kv) tokens per
    byte, a hyperbola with the limit 1 / (ctx · kv): at this batch half of the limit is reached and
    the step has doubled. Derived from the decode costs of Pope et al. 2022, arXiv 2211.05102,
    section 2.
    """
    return deployment.weight_bytes / deployment.kv_reads(context)


def plan_roofline(
    deployment: Deployment, *, context: int = 4096, mfu: float = 1.0, mbu: float = 1.0
) -> Report:
    """Steps by batch for one context. `mfu` and `mbu` are shares of the device's rates; 1 gives the
    bound that no program passes. Raises PlanError."""
    deployment.check_context(context)
    deployment.check_fits()
    require("mfu", mfu, 0.01, 1)
    require("mbu", mbu, 0.01, 1)
    ridge = ridge_batch(deployment.device, deployment.weights) * mbu / mfu
    knee, most = min(ridge, knee_batch(deployment, context)), deployment.users(context)
    if most < 1:
        raise PlanError(
            f"{deployment.name}: not one context of {context:,} tokens fits beside the weights; "
            "take more devices, smaller formats or a shorter context"
        )
    batches = sorted({*(b for b in BATCHES if b < most), most})
    rows = []
    for batch in batches:
        step = deployment.step(batch, context, mfu=mfu, mbu=mbu)
        rate = batch / step.total_s
        rows.append(
            (
                *(batch, step.total_s, rate, rate / deployment.count),
                *(step.weights_s, step.compute_s, step.kv_s, step.binds),
            )
        )
    columns = (
        *(Column("batch"), Column("step", "s"), Column("output", "tokens/s")),
        *(Column("per device", "tokens/s"), Column("weights", "s"), Column("compute", "s")),
        *(Column("KV", "s"), Column("binds")),
    )
    at_most = deployment.step(most, context, mfu=mfu, mbu=mbu)
    return Report(
        planner="roofline",
        title=f"Decode steps: {deployment.name}, contexts of {context:,} tokens",
        formulas=(
            "step [s] = max(W / BW, 2 N B / F) + B ctx kv / BW",
            "ridge batch = F b_w / (2 BW)      rows at which compute equals reading weights",
            "knee batch = W / (ctx kv)         sequences at which KV equals weights",
        ),
        facts=(
            Fact("weights W", deployment.weight_bytes, "bytes"),
            Fact("KV per token", deployment.kv_bytes_per_token, "bytes"),
            Fact(
                "rate F", mfu * deployment.flops_per_s, "flop/s", f"{mfu:g} (mfu) of the dense rate"
            ),
            Fact("bandwidth BW", mbu * deployment.bandwidth, "bytes/s", f"{mbu:g} (mbu) of all"),
            Fact("ridge batch", ridge),
            Fact("knee batch", knee, "", "at most the ridge batch"),
            Fact("batch that fits", most),
        ),
        tables=(Table("", columns, tuple(rows)),),
        binds=_binding(at_most.binds, most, context, ridge),
        reverses=(
            f"Above {ridge:,.0f} rows in a step further rows cost compute: speculation and weights "
            "of fewer bits stop paying there.",
            f"Above the knee of {knee:,.0f} sequences latency grows faster than throughput"
            + (
                ": most time goes to KV of "
                f"{context:,} tokens, so fp8 KV helps more than smaller weights."
                if knee < ridge
                else ", for multiplying binds."
            ),
        ),
        curve=_knees(deployment, context, mfu, mbu),
    )


def _binding(part: str, most: int, context: int, ridge: float) -> str:
    if most < ridge and part != "compute":
        return (
            f"Memory's size binds first: {most:,} contexts of {context:,} tokens fit, fewer than "
            f"the {ridge:,.0f} rows that would fill the multipliers; {IN_WORDS[part]} is the most "
            "of such a step."
        )
    return f"At the largest batch that fits ({most:,}) {IN_WORDS[part]} is the most of a step."


def _knees(deployment: Deployment, context: int, mfu: float, mbu: float) -> Curve:
    """Throughput over latency while the batch grows, for shorter and longer contexts."""
    longest = deployment.shape.max_length or int(MOST)
    ridge = ridge_batch(deployment.device, deployment.weights) * mbu / mfu
    lines, marks = [], []
    for tokens in sorted({max(1, context // 4), context, min(longest, context * 4)}):
        most = deployment.users(tokens)
        if most < 2:
            continue
        batches = sorted({max(1, round(most ** (i / 60))) for i in range(61)})
        steps = [deployment.step(b, tokens, mfu=mfu, mbu=mbu).total_s for b in batches]
        rates = [b / s for b, s in zip(batches, steps, strict=True)]
        name = f"{tokens:,} tokens (up to {most:,} sequences)"
        lines.append(Line(name, tuple(1e3 * s for s in steps), tuple(rates)))
        knee = min(knee_batch(deployment, tokens), ridge)
        if knee <= most:
            step = deployment.step(knee, tokens, mfu=mfu, mbu=mbu).total_s
            marks.append(Mark(1e3 * step, knee / step, f"knee at batch {knee:,.0f}"))
    return Curve(
        title=f"Throughput and latency of decoding\n{deployment.name}",
        x_label="time per output token [ms]",
        y_label="output [tokens/s], all devices",
        lines=tuple(lines),
        marks=tuple(marks),
        log_y=True,
    )
