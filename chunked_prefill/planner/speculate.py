"""Speculative decoding: what drafts gain, for which batch and context, and by which method.

Owns: the speed-up that knows of batches, and the plan that compares methods. Does not own: the
methods and what they yield (drafts.py), drafting or verifying (lm_engine). Imports no torch.
"""

from __future__ import annotations

from chunked_prefill.planner.deployment import IN_WORDS, Deployment
from chunked_prefill.planner.devices import require
from chunked_prefill.planner.drafts import Draft, DraftMethod
from chunked_prefill.planner.report import Column, Curve, Fact, Level, Line, Report, Table, Value

_MOST_BATCH = 1 << 16
_ON, _OFF = 1.05, 1.0
"""Switched on above one gain and off below another, so that a batch at the border does not make a
server change its mind each step (vLLM issue 49548)."""


def speedup(
    deployment: Deployment,
    draft: Draft,
    batch: float,
    context: int,
    *,
    mfu: float = 0.6,
    mbu: float = 0.8,
) -> float:
    """S(B) = E · t(1) / (t(q) + k · t(1)): tokens per second against decoding without drafts.

    E tokens per verification of q rows per sequence, k the draft's cost; t is Deployment.step. With
    t(q) = t(1) it is theorem 3.8 of Leviathan et al. 2022 (arXiv 2211.17192), E / (γc + 1), which
    holds while reading binds; that long contexts keep large batches bound by reading is MagicDec's
    finding (arXiv 2408.11049).
    """
    one = deployment.step(batch, context, 1, mfu, mbu).total_s
    many = deployment.step(batch, context, draft.verified, mfu, mbu).total_s
    return draft.accepted * one / (many + draft.cost * one)


def break_even(
    deployment: Deployment,
    draft: Draft,
    context: int,
    *,
    gain: float = 1.0,
    mfu: float = 0.6,
    mbu: float = 0.8,
) -> int | None:
    """Smallest batch from which on the speed-up is below `gain`; None: it never is."""

    def below(batch: int) -> bool:
        return speedup(deployment, draft, batch, context, mfu=mfu, mbu=mbu) < gain

    if not below(_MOST_BATCH):
        return None
    low, high = 0, _MOST_BATCH
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if below(middle) else (middle, high)
    return high


def plan_speculate(
    deployment: Deployment,
    methods: tuple[DraftMethod, ...],
    *,
    context: int = 1024,
    batch: int = 1,
    mfu: float = 0.6,
    mbu: float = 0.8,
) -> Report:
    """The methods at one context: tokens, costs, speed-ups, and the batches at which they stop
    paying. Raises PlanError."""
    deployment.check_context(context)
    deployment.check_fits()
    require("batch", batch, 1, _MOST_BATCH)
    require("mfu", mfu, 0.01, 1)
    require("mbu", mbu, 0.01, 1)
    rows: list[tuple[Value, ...]] = []
    gains: list[tuple[float, float, str]] = []
    for method in methods:
        draft = method.on(deployment.shape)
        first, here = (speedup(deployment, draft, b, context, mfu=mfu, mbu=mbu) for b in (1, batch))
        off, on = (
            break_even(deployment, draft, context, gain=gain, mfu=mfu, mbu=mbu)
            for gain in (_OFF, _ON)
        )
        per_cost = (method.accepted - 1) / draft.cost if draft.cost else None
        gains.append((here, first, method.name))
        rows.append(
            (
                *(method.name, method.accepted, method.passes, method.verified),
                *(draft.cost, per_cost, first),
                *([here] if batch > 1 else []),
                *(off, on),
            )
        )
    best, alone = max(gains), max(gains, key=lambda gain: gain[1])
    step = deployment.step(batch, context, 1, mfu, mbu)
    columns = (
        *(Column("method"), Column("tokens per step"), Column("passes"), Column("rows")),
        *(Column("draft cost", "steps"), Column("gained per cost"), Column("batch 1", "times")),
        *([Column(f"batch {batch}", "times")] if batch > 1 else []),
        *(Column("pays below"), Column("on below")),
    )
    return Report(
        planner="speculate",
        title=f"Speculation: {deployment.name}, contexts of {context:,} tokens",
        formulas=(
            "chain of γ drafts: E = (1 − α^(γ+1)) / (1 − α) tokens per verification",
            "tree: E = 1 + Σ_depth Π (1 − (1 − α)(1 − β)^(width − 1))",
            "S(B) = E t(1) / (t(q) + k t(1)), t(q) = max(W / BW, 2 N B q / F) + B ctx kv / BW",
        ),
        facts=(
            Fact("shares of F and BW", f"{mfu:g} and {mbu:g}", "", "mfu and mbu"),
            Fact("step without drafts", step.total_s, "s", f"at batch {batch:,}"),
        ),
        tables=(
            Table("", columns, tuple(rows)),
            Table(
                "Where the tokens per step come from",
                (Column("method"), Column("source")),
                tuple((m.name, m.source) for m in methods),
            ),
        ),
        binds=(
            f"At batch {batch:,} {IN_WORDS[step.binds]} is the most of a step without drafts"
            + (": rows beyond one cost operations." if step.binds == "compute" else ".")
            + f" Best there: {best[2]} ({best[0]:.2f} times); alone: {alone[2]}."
        ),
        reverses=_turns(rows, context),
        curve=_curve(deployment, methods, context, mfu, mbu),
    )


def _turns(rows: list[tuple[Value, ...]], context: int) -> tuple[str, ...]:
    words = []
    for row in rows:
        name, off, on = row[0], row[-2], row[-1]
        if off is None:
            words.append(f"{name} pays at any batch: reading {context:,} tokens of KV dominates.")
        elif off == 1:
            words.append(f"{name} never pays here: drafting costs more than it yields.")
        else:
            words.append(f"{name} costs from a batch of {off:,} on; switch it on below {on:,}.")
    return tuple(words)


def _curve(
    deployment: Deployment,
    methods: tuple[DraftMethod, ...],
    context: int,
    mfu: float,
    mbu: float,
) -> Curve:
    xs = tuple(2 ** (i / 6) for i in range(61))
    lines = []
    for method in methods:
        draft = method.on(deployment.shape)
        ys = (speedup(deployment, draft, x, context, mfu=mfu, mbu=mbu) for x in xs)
        lines.append(Line(method.name, xs, tuple(ys)))
    return Curve(
        title=f"Speed-up of speculation, contexts of {context:,} tokens\n{deployment.name}",
        x_label="batch [sequences]",
        y_label="times the speed without drafts",
        lines=tuple(lines),
        levels=(Level(_OFF, "no gain"),),
        log_x=2,
    )
