"""Prefill and decode on different devices: what the handoff of KV costs against what it saves.

Owns: the transfer's share of a prefill, the links at which splitting stops paying, and the plan.
Does not own: handing KV over (kv_offload). Imports no torch.
"""

from __future__ import annotations

from chunked_prefill.planner.deployment import MOST, Deployment
from chunked_prefill.planner.devices import PlanError, require
from chunked_prefill.planner.kv import bytes_of, kv_bytes_per_token, prefill_seconds
from chunked_prefill.planner.report import Column, Curve, Fact, Level, Line, Mark, Report, Table
from chunked_prefill.planner.shapes import ModelShape

_LINKS = (10.0, 25.0, 50.0, 100.0, 200.0, 400.0, 800.0)
_HITS = (0.0, 0.5, 0.9)
_CHEAP = 0.1
"""A transfer that is this share of the prefill disappears behind it, layer by layer."""


def transfer_bytes(shape: ModelShape, tokens: int, number_bytes: float) -> float:
    """KV that goes from the prefill to the decode devices: ctx · kv, all of the context, cached or
    not (DistServe, arXiv 2401.09670, section 3.3: 1.13 GB for 512 tokens of OPT-66B)."""
    return tokens * kv_bytes_per_token(shape, number_bytes)


def transfer_share(
    shape: ModelShape, number_bytes: float, flops_per_s: float, link_bytes_per_s: float
) -> float:
    """kv · F / (2 · N · BW): seconds of sending a token's KV over those of computing it.

    Rates are those of the same devices, so of one GPU and its link, or of a node and the node's.
    Without attention's part of the prefill, which makes it smaller for long prompts. Splitwise
    (arXiv 2311.18677, section 4) and DistServe (arXiv 2401.09670) measure this overhead.
    """
    kv = kv_bytes_per_token(shape, number_bytes)
    return kv * flops_per_s / (2 * shape.active_parameters * link_bytes_per_s)


def prefill_duty(step_s: float, tpot_s: float) -> float:
    """1 − t / τ: share of a step that chunked prefill may take when decodes alone take t and the
    promise is τ (Sarathi-Serve, arXiv 2403.02310, section 4.2: what a decode leaves of the budget).
    """
    return max(0.0, 1 - step_s / tpot_s)


def plan_disaggregate(
    deployment: Deployment,
    *,
    link_gbit: float = 400.0,
    prompt: int = 4096,
    output: int = 256,
    batch: int = 32,
    tpot_s: float = 0.05,
    mfu: float | None = None,
) -> Report:
    """The handoff of one prompt over `link_gbit` per device, against chunked prefill on the devices
    that decode `batch` sequences within `tpot_s`. Raises PlanError."""
    shape, number = deployment.shape, bytes_of("kv", deployment.kv)
    require("link_gbit", link_gbit, 0.1, 1e5, "Gbit/s of each device")
    deployment.check_context(prompt, "prompt")
    deployment.check_fits()
    require("output", output, 1, MOST)
    require("batch", batch, 1, MOST)
    require("tpot", tpot_s, 1e-4, 1e3, "a promise in seconds")
    share = deployment.mfu(mfu)
    rate = share * deployment.flops_per_s
    link = link_gbit / 8 * 1e9 * deployment.count
    sent = transfer_bytes(shape, prompt, number)
    compute, transfer = prefill_seconds(shape, prompt, rate), sent / link
    step = deployment.step(batch, prompt + output / 2).total_s
    if step >= tpot_s:
        raise PlanError(
            f"tpot is {tpot_s * 1e3:g} ms, but a step of {batch} sequences takes "
            f"{step * 1e3:.1f} ms without any prefill; promise more, or lower the batch"
        )
    duty = prefill_duty(step, tpot_s)
    together = compute / duty
    spare = together - compute
    even_gbit = sent / spare / deployment.count * 8 / 1e9
    whole = kv_bytes_per_token(shape, number) * rate / (2 * shape.active_parameters)
    equal_gbit = whole / deployment.count * 8 / 1e9
    rows = tuple(
        (
            gbit,
            sent / (gbit / 8 * 1e9 * deployment.count),
            *(
                transfer_share(shape, number, rate, gbit / 8 * 1e9 * deployment.count) / (1 - hit)
                for hit in _HITS
            ),
        )
        for gbit in sorted({*_LINKS, link_gbit})
    )
    columns = (
        *(Column("link per device, Gbit/s"), Column("transfer", "s")),
        *(Column(f"of prefill, {hit:.0%} cached", "share") for hit in _HITS),
    )
    decode = output * step / batch
    return Report(
        planner="disaggregate",
        title=f"Prefill apart from decode: {deployment.name}",
        formulas=(
            "transfer / prefill = kv F / (2 N BW_link)      of the tokens that were computed",
            "together: TTFT = prefill / (1 − t_decode / TPOT)      chunks take what decodes leave",
            "apart:    TTFT = prefill + transfer",
        ),
        facts=(
            Fact(f"KV of {prompt:,} tokens", sent, "bytes"),
            Fact("prefill", compute, "s", f"at {share:g} (mfu) of the dense rate"),
            Fact("transfer", transfer, "s", f"at {link_gbit:g} Gbit/s per device"),
            Fact("transfer / prefill", transfer_share(shape, number, rate, link), "share"),
            Fact("decode step", step, "s", f"{batch:,} sequences"),
            Fact("TTFT together", together, "s", f"prefill gets {duty:.0%} of each step"),
            Fact("TTFT apart", compute + transfer, "s"),
            Fact("break-even link", even_gbit, "", "Gbit/s per device: TTFT apart = together"),
            Fact("transfer equals prefill at", equal_gbit, "", "Gbit/s per device"),
            Fact("prefill devices per decode device", compute / decode, "", "to keep both busy"),
        ),
        tables=(Table("", columns, rows),),
        binds=_binding(compute, transfer, together),
        reverses=(
            f"Below {even_gbit:,.1f} Gbit/s per device TTFT is better together, with chunks of "
            "what decodes leave.",
            f"Below {equal_gbit:,.1f} Gbit/s sending a token's KV takes longer than computing it: "
            "do not split.",
            "Cached beginnings are sent but not computed: at 90 % hits a transfer weighs ten times "
            "as much, unless the decode devices keep the cache.",
        ),
        curve=_curve(deployment, rate, link_gbit, even_gbit),
    )


def _binding(compute: float, transfer: float, together: float) -> str:
    if transfer > compute:
        return "The link: sending the KV takes longer than computing it."
    if compute + transfer > together:
        return (
            "Compute, and decodes leave enough of it: together is faster by "
            f"{1e3 * (compute + transfer - together):,.1f} ms of TTFT."
        )
    words = "disappears behind it layer by layer" if transfer < _CHEAP * compute else "is seen"
    return (
        f"Compute: prefill takes {1e3 * compute:,.0f} ms, the transfer {words}. Apart saves "
        f"{1e3 * (together - compute - transfer):,.1f} ms of TTFT."
    )


def _curve(deployment: Deployment, rate: float, link_gbit: float, even_gbit: float) -> Curve:
    shape, number = deployment.shape, bytes_of("kv", deployment.kv)
    xs = tuple(1000 ** (i / 60) for i in range(61))

    def share(gbit: float) -> float:
        return transfer_share(shape, number, rate, gbit / 8 * 1e9 * deployment.count)

    marks = [Mark(link_gbit, share(link_gbit), f"{link_gbit:g} Gbit/s: {share(link_gbit):.1%}")]
    if xs[0] <= even_gbit <= xs[-1]:
        marks.append(Mark(even_gbit, share(even_gbit), f"TTFT even at {even_gbit:,.1f} Gbit/s"))
    lines = tuple(
        Line(f"{hit:.0%} of the prompt cached", xs, tuple(share(x) / (1 - hit) for x in xs))
        for hit in _HITS
    )
    return Curve(
        title=f"Sending KV against computing it\n{deployment.name}",
        x_label="link per device [Gbit/s]",
        y_label="transfer / prefill",
        lines=lines,
        marks=tuple(marks),
        levels=(Level(1.0, "as long as the prefill"), Level(_CHEAP, "hidden behind it")),
        log_x=10,
        log_y=True,
    )
