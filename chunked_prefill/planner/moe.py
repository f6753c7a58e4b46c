"""Mixtures of experts: what a batch reads, and when they stop being cheap.

Owns: the expected number of distinct experts and the plan. Does not own: a step's time
(deployment.py uses the same expectation), or routing. Imports no torch.
"""

from __future__ import annotations

import math

from chunked_prefill.planner.deployment import Deployment
from chunked_prefill.planner.devices import PlanError
from chunked_prefill.planner.report import Column, Curve, Fact, Level, Line, Report, Table
from chunked_prefill.planner.roofline import ridge_batch

BATCHES = (1, 8, 16, 32, 64, 128, 256, 512, 1024)


def distinct_experts(experts: int, active: int, tokens: float) -> float:
    """E · (1 − (1 − k/E)^B): experts of a layer that B tokens choose, each k of E uniformly.

    The expected occupancy of E cells, of which each token takes k different ones; k of E per token
    as in DeepSeek-V3 (arXiv 2412.19437, section 2.1.2). Routing that prefers some experts reads
    fewer.
    """
    return float(experts * (1 - (1 - active / experts) ** tokens))


def batch_that_reads(share: float, experts: int, active: int) -> float:
    """Tokens of a step that read `share` of all experts: distinct_experts solved for B."""
    return math.log(1 - share) / math.log(1 - active / experts)


def plan_moe(deployment: Deployment, *, context: int = 4096) -> Report:
    """Experts and bytes by batch. Raises PlanError for a model without experts."""
    shape, moe = deployment.shape, deployment.shape.moe
    if moe is None:
        raise PlanError(f"{shape.name} has no experts; `plan roofline` plans dense models")
    deployment.check_context(context)
    deployment.check_fits()
    most_read = deployment.weight_bytes
    rows = []
    for batch in BATCHES:
        reads, step = deployment.weight_reads(batch), deployment.step(batch, context)
        seen = distinct_experts(moe.experts, moe.active, batch)
        rows.append(
            (
                *(batch, seen, batch * moe.active / seen, reads, reads / batch),
                *(reads / most_read, step.total_s, step.binds),
            )
        )
    columns = (
        *(Column("batch"), Column("experts read"), Column("tokens each")),
        *(Column("weights read", "bytes"), Column("per token", "bytes"), Column("of all", "share")),
        *(Column("step", "s"), Column("binds")),
    )
    nine_tenths = batch_that_reads(0.9, moe.experts, moe.active)
    dense_ridge = ridge_batch(deployment.device, deployment.weights)
    ridge = dense_ridge * moe.experts / moe.active
    hidden = 2 * (shape.num_layers - moe.dense_layers) * moe.active * shape.hidden_size * 2
    return Report(
        planner="moe",
        title=f"Experts: {deployment.name}",
        formulas=(
            "experts read = E (1 − (1 − k/E)^B)      of each layer, routing taken as uniform",
            "weights read [bytes] = W_dense + W_experts (1 − (1 − k/E)^B)",
            "ridge batch of experts = ridge batch · E / k",
        ),
        facts=(
            Fact("experts E", moe.experts, "", f"k = {moe.active} per token, {moe.shared} shared"),
            Fact("parameters", shape.num_parameters),
            Fact("of one token", shape.active_parameters, "", "that it is multiplied by"),
            Fact("90 % of experts are read from batch", nine_tenths),
            Fact("ridge batch of experts", ridge, "", f"a dense model's is {dense_ridge:,.0f}"),
            Fact("exchanged per token", hidden, "bytes", "to experts on other devices and back"),
        ),
        tables=(Table("", columns, tuple(rows)),),
        binds=(
            f"Reading weights, up to a batch of {ridge:,.0f}: experts get k/E of the rows, so "
            f"they need {moe.experts / moe.active:g} times a dense model's batch to fill the "
            "multipliers."
        ),
        reverses=(
            f"One token reads {deployment.weight_reads(1) / 1e9:,.1f} GB, as a dense model of "
            f"{shape.active_parameters / 1e9:,.0f}e9 parameters; from a batch of "
            f"{nine_tenths:,.0f} on a step reads as one of {shape.num_parameters / 1e9:,.0f}e9.",
            f"Speculation verifies several tokens, which read further experts: below a batch of "
            f"{nine_tenths:,.0f} verification is not free, as it is in a dense model.",
        ),
        curve=_curve(deployment),
    )


def _curve(deployment: Deployment) -> Curve:
    xs = tuple(2 ** (i / 4) for i in range(45))
    reads = tuple(deployment.weight_reads(x) / 1e9 for x in xs)
    return Curve(
        title=f"Weights read per step\n{deployment.name}",
        x_label="batch [tokens]",
        y_label="weights read [GB]",
        lines=(
            Line("per step", xs, reads),
            Line("per token", xs, tuple(r / x for r, x in zip(reads, xs, strict=True))),
        ),
        levels=(Level(deployment.weight_bytes / 1e9, "all weights"),),
        log_x=2,
        log_y=True,
    )
