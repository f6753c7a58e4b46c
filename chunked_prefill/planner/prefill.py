"""Prefill: how long a prompt takes, and what a chunk costs at its depth.

Owns: the length at which attention costs as much as the weights, prompts that meet a TTFT, chunks
of equal time, and their plan. Does not own: the formula of prefill's time (kv.py), or what a
running engine measured (step_time.py). Imports no torch.
"""

from __future__ import annotations

import math

from chunked_prefill.planner.deployment import MOST, Deployment
from chunked_prefill.planner.devices import require
from chunked_prefill.planner.kv import prefill_seconds
from chunked_prefill.planner.report import Column, Curve, Fact, Level, Line, Report, Table
from chunked_prefill.planner.shapes import ModelShape

_DEPTHS = (0, 16_384, 32_768, 65_536, 131_072)
_LENGTHS = (512, 2048, 8192, 32_768, 131_072)


def equal_length(shape: ModelShape) -> float:
    """N / (L · d): tokens of a prompt whose attention, 2·L·d·S², costs as much as its weights,
    2·N·S (both of kv.prefill_seconds; Kaplan et al. 2020, arXiv 2001.08361, section 2.1)."""
    return shape.active_parameters / (shape.num_layers * shape.attention_width)


def doubling_depth(shape: ModelShape) -> float:
    """N / (2 · L · d): tokens before a short chunk at which it takes twice its time at depth 0: a
    row's attention over h keys, 4·L·d·h, equals its weights' 2·N."""
    return equal_length(shape) / 2


def chunk_of_equal_time(shape: ModelShape, chunk: int, depth: int) -> float:
    """Tokens of a chunk at `depth` that take as long as `chunk` tokens at depth 0.

    2·N·c + 4·L·d·c·(h + c/2), the operations of c rows over h keys before them and half of their
    own, solved for c: the same sums as kv.prefill_seconds, cut in two.
    """
    square = 2 * shape.num_layers * shape.attention_width
    weights = 2 * shape.active_parameters
    work = weights * chunk + square * chunk**2
    slope = weights + 2 * square * depth
    return float(2 * work / (slope + math.sqrt(slope**2 + 4 * square * work)))


def tokens_within(shape: ModelShape, seconds: float, flops_per_s: float) -> float:
    """The longest prompt whose prefill takes `seconds`: 2·N·S + 2·L·d·S² = t·F solved for S."""
    square = 2 * shape.num_layers * shape.attention_width
    weights, work = 2 * shape.active_parameters, seconds * flops_per_s
    return float(2 * work / (weights + math.sqrt(weights**2 + 4 * square * work)))


def plan_prefill(
    deployment: Deployment, *, ttft_s: float = 0.2, chunk: int = 2048, mfu: float | None = None
) -> Report:
    """Times by length, the longest prompt within `ttft_s`, and chunks that take as long as `chunk`
    tokens at depth 0. `mfu`: see Deployment.mfu. Raises PlanError."""
    shape = deployment.shape
    require("ttft", ttft_s, 1e-3, 1e5, "a promise in seconds")
    require("chunk", chunk, 1, MOST)
    deployment.check_fits()
    share = deployment.mfu(mfu)
    rate, longest = share * deployment.flops_per_s, shape.max_length or _LENGTHS[-1]
    within, equal = tokens_within(shape, ttft_s, rate), equal_length(shape)
    reading = deployment.weight_reads(1e9) / deployment.bandwidth
    lengths = (*(n for n in _LENGTHS if n < longest), longest)
    rows = []
    for tokens in lengths:
        linear = 2 * shape.active_parameters * tokens / rate
        total = prefill_seconds(shape, tokens, rate)
        rows.append((tokens, linear, total - linear, total, tokens / total))
    columns = (
        *(Column("prompt", "tokens"), Column("weights", "s"), Column("attention", "s")),
        *(Column("prefill", "s"), Column("rate", "tokens/s")),
    )
    depths = tuple(
        (depth, round(chunk_of_equal_time(shape, chunk, depth)))
        for depth in _DEPTHS
        if depth <= longest
    )
    few = reading * rate / (2 * shape.active_parameters)
    return Report(
        planner="prefill",
        title=f"Prefill: {deployment.name}",
        formulas=(
            "prefill [s] = (2 N S + 2 L d S²) / F",
            "both terms are equal at S = N / (L d)",
            "chunk c at depth h [flop] = 2 N c + 4 L d c (h + c/2)",
        ),
        facts=(
            Fact("parameters N", shape.active_parameters, "", "that a token is multiplied by"),
            Fact("rate F", rate, "flop/s", f"{share:g} (mfu) of the dense rate"),
            Fact(f"longest prompt within {ttft_s * 1e3:g} ms", round(within), "tokens"),
            Fact("attention equals weights at", equal, "tokens"),
            Fact("a chunk's time doubles at depth", doubling_depth(shape), "tokens"),
            Fact("shorter than this, reading weights binds", few, "tokens"),
        ),
        tables=(
            Table("", columns, tuple(rows)),
            Table(
                f"Chunks that take as long as {chunk:,} tokens at the start",
                (Column("depth", "tokens"), Column("chunk", "tokens")),
                depths,
            ),
        ),
        binds=(
            f"Compute. At {longest:,} tokens attention is "
            f"{longest / (longest + equal):.0%} of it; below {few:,.0f} tokens a step reads the "
            "weights longer than it multiplies."
        ),
        reverses=(
            f"Beyond {equal:,.0f} tokens attention costs more than the weights: fewer bits of "
            "weight stop helping, and twice the prompt takes more than three times as long.",
            f"From a depth of {doubling_depth(shape):,.0f} tokens equal chunks take twice as long "
            "and more: a fixed token budget no longer keeps a promise in milliseconds.",
        ),
        curve=_curve(deployment, rate, ttft_s, longest),
    )


def _curve(deployment: Deployment, rate: float, ttft_s: float, longest: int) -> Curve:
    shape = deployment.shape
    xs = tuple(256 * (longest / 256) ** (i / 60) for i in range(61))
    linear = tuple(2 * shape.active_parameters * x / rate for x in xs)
    square = tuple(2 * shape.num_layers * shape.attention_width * x * x / rate for x in xs)
    return Curve(
        title=f"Time of a prompt\n{deployment.name}",
        x_label="prompt [tokens]",
        y_label="prefill [s]",
        lines=(
            Line("prefill", xs, tuple(a + b for a, b in zip(linear, square, strict=True))),
            Line("weights", xs, linear),
            Line("attention", xs, square),
        ),
        levels=(Level(ttft_s, f"TTFT {ttft_s * 1e3:g} ms"),),
        log_x=2,
        log_y=True,
    )
