"""Adapters: their size, what many at a time cost, and when merging one is better.

Owns: the parameters of low-rank adapters and their plan. Does not own: applying them
(lm_engine/lora). Imports no torch.
"""

from __future__ import annotations

from chunked_prefill.planner.deployment import IN_WORDS, MOST, Deployment
from chunked_prefill.planner.devices import PlanError, require
from chunked_prefill.planner.kv import bytes_of
from chunked_prefill.planner.report import Column, Curve, Fact, Level, Line, Report, Table
from chunked_prefill.planner.shapes import ModelShape

TARGETS = ("all", "attention", "qv")
_COUNTS = (1, 4, 8, 16, 32, 64, 128)


def adapted_linears(shape: ModelShape, targets: str = "all") -> tuple[tuple[int, int], ...]:
    """(d_in, d_out) of each adapted linear of one layer, those of experts and routers left out.

    `all`: attention and MLP, as QLoRA (arXiv 2305.14314, section 4) found necessary; `attention`;
    `qv`: queries and values, LoRA's own choice (arXiv 2106.09685, section 7.1). Raises PlanError.
    """
    if targets not in TARGETS:
        raise PlanError(f"targets is {targets!r}; it must be one of {', '.join(TARGETS)}")
    width, heads = shape.hidden_size, shape.num_heads
    mla = shape.mla
    if mla is not None:
        if targets == "qv":
            raise PlanError(f"{shape.name} has no value projection of its own; take attention")
        query, latent = heads * (mla.nope_dim + mla.rope_dim), mla.query_latent
        first = ((width, latent), (latent, query)) if latent else ((width, query),)
        up = (mla.latent, heads * (mla.nope_dim + mla.value_dim))
        down = (width, mla.latent + mla.rope_dim)
        attention = (*first, down, up, (heads * mla.value_dim, width))
    else:
        q, kv = heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        if targets == "qv":
            return ((width, q), (width, kv))
        attention = ((width, q), (width, kv), (width, kv), (q, width))
    if targets == "attention" or shape.moe is not None:
        return attention
    inner = shape.intermediate_size
    return (*attention, (width, inner), (width, inner), (inner, width))


def adapter_parameters(shape: ModelShape, rank: int, targets: str = "all") -> int:
    """L · r · Σ (d_in + d_out): A is r x d_in, B is d_out x r (Hu et al. 2021, arXiv 2106.09685,
    section 4.1)."""
    sides = sum(first + last for first, last in adapted_linears(shape, targets))
    return shape.num_layers * rank * sides


def added_reads(shape: ModelShape, rank: int, distinct: int, targets: str = "all") -> float:
    """Weights that `distinct` adapters in one step add to those of the model, as a share: each is
    read once per step, whoever uses it (Punica, arXiv 2310.18547, section 4; S-LoRA, arXiv
    2311.03285)."""
    return distinct * adapter_parameters(shape, rank, targets) / shape.num_parameters


def plan_lora(
    deployment: Deployment,
    *,
    rank: int = 16,
    targets: str = "all",
    distinct: int = 32,
    batch: int = 32,
    context: int = 1024,
) -> Report:
    """`distinct` adapters of one rank (bf16) in steps of `batch` sequences. Raises PlanError."""
    shape = deployment.shape
    require("rank", rank, 1, 4096)
    require("distinct", distinct, 1, MOST)
    require("batch", batch, 1, MOST, "sequences of a step")
    deployment.check_context(context)
    deployment.check_fits()
    numbers = adapter_parameters(shape, rank, targets)
    size = numbers * bytes_of("adapters", "bf16")
    step = deployment.step(batch, context)
    rows = []
    for count in sorted({*_COUNTS, distinct}):
        used = min(count, batch)
        reading = used * size / deployment.bandwidth
        total = max(step.weights_s + reading, step.compute_s) + step.kv_s
        kept = (deployment.room_bytes - count * size) / deployment.kv_bytes_per_token / context
        rows.append(
            (
                *(count, count * size, used * size / deployment.weight_bytes, total),
                *(total / step.total_s, max(0, int(kept))),
            )
        )
    columns = (
        *(Column("adapters"), Column("size", "bytes"), Column("added reads", "share")),
        *(Column("step", "s"), Column("slower", "times"), Column("users left")),
    )
    link = deployment.device.link_bytes_per_s
    doubled = deployment.weight_bytes / size
    worth = deployment.kv_bytes_per_token * context / size
    return Report(
        planner="lora",
        title=f"Adapters of rank {rank} ({targets}): {deployment.name}",
        formulas=(
            "parameters = L r Σ (d_in + d_out)",
            "step [s] = max((W + adapters of the step) / BW, 2 N B / F) + B ctx kv / BW",
        ),
        facts=(
            Fact("parameters of an adapter", numbers),
            Fact("size of an adapter", size, "bytes", "bf16"),
            Fact("of the model", numbers / shape.num_parameters, "share"),
            Fact(
                "reads added by all",
                distinct * size / deployment.weight_bytes,
                "share",
                f"{distinct:,} different ones in a step",
            ),
            Fact("load from the host", link and size / (link * deployment.count), "s"),
            Fact("as much memory as", size / deployment.kv_bytes_per_token, "tokens", "of KV"),
        ),
        tables=(
            Table(f"Steps of {batch:,} sequences, {context:,} tokens each", columns, tuple(rows)),
        ),
        binds=(
            "Reading adapters: a step reads each of its different ones once. Without them "
            f"{IN_WORDS[step.binds]} is the most of a step."
        ),
        reverses=(
            f"From {doubled:,.0f} different adapters in a step they are read longer than the "
            "model.",
            "One adapter for all requests: merge it into the weights, and it costs nothing.",
            f"Each adapter kept on the devices displaces {1 / worth:,.2f} "
            f"contexts of {context:,} tokens: keep rarely used ones in the host.",
        ),
        curve=_curve(deployment, rank, targets, batch, context),
    )


def _curve(deployment: Deployment, rank: int, targets: str, batch: int, context: int) -> Curve:
    step = deployment.step(batch, context)
    xs = tuple(float(x) for x in range(1, batch + 1)) if batch > 1 else (1.0, 2.0)
    lines = []
    for r in (8, rank, 64) if rank not in (8, 64) else (8, 16, 64):
        size = adapter_parameters(deployment.shape, r, targets) * bytes_of("adapters", "bf16")
        ys = tuple(
            (max(step.weights_s + x * size / deployment.bandwidth, step.compute_s) + step.kv_s)
            / step.total_s
            for x in xs
        )
        lines.append(Line(f"rank {r}", xs, ys))
    return Curve(
        title=f"Steps with different adapters, {batch:,} sequences of {context:,} tokens\n"
        f"{deployment.name}",
        x_label="different adapters in a step",
        y_label="step / step without adapters",
        lines=tuple(lines),
        levels=(Level(1.0, "merged, or none"),),
    )
