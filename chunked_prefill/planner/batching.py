"""Batching and memory: what static batches and reserved contexts waste.

Owns: the waste of waiting for the longest, of reserving the maximum, and of half-filled blocks, and
their plan. Does not own: batches or blocks (scheduler.py, kv_offload). Imports no torch.
"""

from __future__ import annotations

from chunked_prefill.planner.deployment import MOST, Deployment
from chunked_prefill.planner.devices import PlanError, require
from chunked_prefill.planner.kv import prefill_seconds
from chunked_prefill.planner.report import Column, Curve, Fact, Level, Line, Report, Table

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
RESERVED_USED = (0.204, 0.382)
"""Share of KV memory that holds tokens in systems that reserve contiguous contexts, from the
longest possible to the exact one (vLLM, arXiv 2309.06180, figure 2)."""
_MOST_BATCH = 1 << 20


def static_waste(batch: int) -> float:
    """E[max] / mean = Σ 1/i, i to B: rows times steps of a static batch over those that yield a
    token, for exponentially distributed lengths.

    A static batch runs until its longest answer ends; the largest of B exponential variables has
    the mean H_B (Rényi 1953, on order statistics). Orca (OSDI 2022) ends it by scheduling each
    iteration anew. Equal lengths waste nothing.
    """
    return sum(1 / i for i in range(1, batch + 1))


def block_waste(block: int, tokens: float) -> float:
    """(block − 1) / 2 / tokens: share of a sequence's KV that its last, half-filled block wastes,
    for lengths that end anywhere in a block (vLLM, arXiv 2309.06180, section 3.1)."""
    return (block - 1) / 2 / tokens


def reserved_use(prompt: float, output: float, reserved: float) -> float:
    """(p + o/2) / reserved: share of a reserved context that holds tokens, on average over the
    decoding, in which it grows from p to p + o."""
    return (prompt + output / 2) / reserved


def plan_batching(
    deployment: Deployment,
    *,
    prompt: int = 1155,
    output: int = 211,
    max_length: int | None = None,
    block: int = 16,
    batch: int = 32,
    mfu: float | None = None,
) -> Report:
    """Static against continuous batches, reserved against paged memory. The default lengths are the
    means of Azure's conversation trace (Splitwise, arXiv 2311.18677). Raises PlanError."""
    shape = deployment.shape
    require("prompt", prompt, 1, MOST)
    require("output", output, 1, MOST)
    require("block", block, 1, 4096, "tokens of a KV block")
    require("batch", batch, 1, _MOST_BATCH)
    tokens = deployment.check_context(prompt + output, "prompt + output")
    deployment.check_fits()
    reserved = max_length if max_length is not None else min(shape.max_length or 8192, 8192)
    longest = shape.max_length or MOST
    require("max_length", reserved, tokens, longest, "prompt and output must fit it")
    mean = prompt + output / 2
    paged, contiguous = (deployment.users(n) for n in (round(mean) or 1, reserved))
    if not paged:
        raise PlanError(f"{deployment.name}: not one context of {tokens:,} tokens fits")
    rows = []
    for size in sorted({*BATCHES, batch}):
        step = deployment.step(size, mean).total_s
        waste = static_waste(size)
        rows.append((size, waste, size / step / waste, size / step, output * waste * step))
    columns = (
        *(Column("batch"), Column("E[max] / mean", "times"), Column("static", "tokens/s")),
        *(Column("continuous", "tokens/s"), Column("static batch lasts", "s")),
    )
    share = deployment.mfu(mfu)
    stall = prefill_seconds(shape, prompt, share * deployment.flops_per_s)
    step = deployment.step(batch, mean).total_s
    used = reserved_use(prompt, output, reserved)
    return Report(
        planner="batching",
        title=f"Batching: {deployment.name}, {prompt:,} tokens in, {output:,} out",
        formulas=(
            "waste of a static batch = E[max] / mean = 1 + 1/2 + ... + 1/B (exponential lengths)",
            "reserved memory in use = (prompt + output / 2) / reserved length",
            "waste of blocks = (block − 1) / 2 / tokens",
        ),
        facts=(
            Fact("reserved length", reserved, "tokens"),
            Fact(
                "of it in use",
                used,
                "share",
                f"{RESERVED_USED[0]:.0%} to {RESERVED_USED[1]:.0%} in the systems that vLLM's "
                "authors measured",
            ),
            Fact(f"wasted by blocks of {block}", block_waste(block, tokens), "share"),
            Fact("sequences, reserved", contiguous),
            Fact("sequences, paged", paged, "", "at their mean length"),
            Fact("step", step, "s", f"{batch:,} sequences"),
            Fact("a whole prompt in one step", stall, "s", "stops every stream for that long"),
        ),
        tables=(Table("Tokens per second by batch", columns, tuple(rows)),),
        binds=(
            f"Memory's use: paging holds {paged:,} sequences where reserving {reserved:,} tokens "
            f"each holds {contiguous:,}."
            if paged > batch
            else f"Memory: {paged:,} sequences fit, fewer than the batch of {batch:,}."
        ),
        reverses=(
            "Equal lengths waste nothing: then a static batch is as fast as a continuous one.",
            f"A prompt that takes longer than a step ({step * 1e3:.1f} ms) stops the streams: "
            f"here {stall / step:,.1f} steps, so cut it into chunks.",
            f"Blocks waste a tenth below {(block - 1) / 2 / 0.1:,.0f} tokens per sequence.",
        ),
        curve=_curve(deployment, mean),
    )


def _curve(deployment: Deployment, mean: float) -> Curve:
    xs = (*(n for n in range(1, 17)), *range(20, 65, 4), *range(80, 257, 16))
    rates = tuple(x / deployment.step(x, mean).total_s for x in xs)
    static = tuple(r / static_waste(x) for r, x in zip(rates, xs, strict=True))
    most = deployment.users(round(mean) or 1)
    levels: tuple[Level, ...] = ()
    if most <= xs[-1]:
        levels = (Level(most / deployment.step(most, mean).total_s, f"{most:,} sequences fit"),)
    return Curve(
        title=f"Static and continuous batches, lengths exponential\n{deployment.name}",
        x_label="batch [sequences]",
        y_label="output [tokens/s]",
        lines=(Line("continuous", xs, rates), Line("static", xs, static)),
        levels=levels,
    )
