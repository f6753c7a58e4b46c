"""A fleet: how many servers a stream of requests takes, prefill and decode apart.

Owns: servers for prefill and for decode, and their plan. Does not own: routing, or how requests
arrive. Imports no torch.
"""

from __future__ import annotations

import math

from chunked_prefill.planner.deployment import MOST, Deployment
from chunked_prefill.planner.devices import PlanError, require
from chunked_prefill.planner.report import Column, Curve, Fact, Line, Report, Table

_HITS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9)
KV_FILL = 0.9
"""Of the contexts that fit a server: the rest is for what grows, and for the cache."""
_MBU = 0.8


def prefill_servers(
    deployment: Deployment, rate: float, prompt: int, hit: float, mfu: float
) -> float:
    """λ · S · (1 − hit) · 2N / (MFU · F): servers that compute prompts, without attention's part.

    2 operations per weight and token (Kaplan et al. 2020, arXiv 2001.08361, section 2.1), which is
    also how utilisation is counted (PaLM, arXiv 2204.02311, appendix B, without attention).
    """
    work = 2 * deployment.shape.active_parameters * rate * prompt * (1 - hit)
    return work / (mfu * deployment.flops_per_s)


def attention_share(deployment: Deployment, prompt: int) -> float:
    """L · d · S / N: what attention adds to prefill's operations (kv.prefill_seconds)."""
    shape = deployment.shape
    return shape.num_layers * shape.attention_width * prompt / shape.active_parameters


def decode_batch(
    deployment: Deployment, context: int, tpot_s: float, mfu: float
) -> tuple[int, str]:
    """Sequences that one server decodes, and what limits them: `memory` (0.9 of the contexts that
    fit) or `tpot` (steps of Deployment.step within the promise, at 0.8 of the bandwidth)."""
    fit = int(KV_FILL * deployment.users(context))
    if fit < 1 or deployment.step(fit, context, 1, mfu, _MBU).total_s <= tpot_s:
        return fit, "memory"
    low, high = 0, fit
    while high - low > 1:
        middle = (low + high) // 2
        fast = deployment.step(middle, context, 1, mfu, _MBU).total_s <= tpot_s
        low, high = (middle, high) if fast else (low, middle)
    return low, "tpot"


def plan_fleet(
    deployment: Deployment,
    *,
    rate: float = 100.0,
    prompt: int = 2000,
    output: int = 300,
    hit: float = 0.0,
    tpot_s: float = 0.05,
    utilisation: float = 0.7,
    mfu: float | None = None,
) -> Report:
    """Servers, each one `deployment`, for `rate` requests per second. Raises PlanError."""
    require("rate", rate, 1e-3, 1e7, "requests per second")
    require("prompt", prompt, 1, MOST)
    require("output", output, 1, MOST)
    require("hit", hit, 0, 0.99, "share of prompt tokens found in the cache")
    require("tpot", tpot_s, 1e-4, 1e3, "a promise in seconds")
    require("utilisation", utilisation, 0.05, 1, "share of the servers' rates that is planned for")
    context = deployment.check_context(prompt + output, "prompt + output")
    deployment.check_fits()
    share = deployment.mfu(mfu)
    batch, limit = decode_batch(deployment, context, tpot_s, share)
    if batch < 1:
        raise PlanError(_no_decoder(deployment, context, tpot_s, limit))
    per_server = batch / tpot_s
    decode, extra = rate * output / per_server, attention_share(deployment, prompt)
    rows = []
    for at in sorted({*_HITS, hit}):
        prefill = prefill_servers(deployment, rate, prompt, at, share)
        rows.append(
            (
                *(at, prefill, decode, math.ceil((prefill + decode) / utilisation)),
                math.ceil((prefill * (1 + extra) + decode) / utilisation),
            )
        )
    columns = (
        *(Column("cached", "share"), Column("prefill servers"), Column("decode servers")),
        *(Column("all, at that utilisation"), Column("with attention's part")),
    )
    here = prefill_servers(deployment, rate, prompt, hit, share)
    none = prefill_servers(deployment, rate, prompt, 0, share)
    even = 1 - decode / none
    step = deployment.step(batch, context, 1, share, _MBU).total_s
    return Report(
        planner="fleet",
        title=f"Fleet: {rate:,g} requests/s of {prompt:,} tokens in, {output:,} out, "
        f"servers of {deployment.name}",
        formulas=(
            "prefill servers = rate · prompt · (1 − hit) · 2 N / (mfu F)",
            "decode servers = rate · output · TPOT / batch",
            "batch = the smaller of 0.9 · contexts that fit, and what a step within TPOT allows",
            "all = (prefill + decode) / utilisation",
        ),
        facts=(
            Fact(
                "prefill rate of a server",
                share * deployment.flops_per_s / (2 * deployment.shape.active_parameters),
                "tokens/s",
                f"at {share:g} (mfu)",
            ),
            Fact("decode batch of a server", batch, "", f"limited by {limit}"),
            Fact("its step", step, "s", f"paced at the promise of {tpot_s * 1e3:g} ms"),
            Fact("decode rate of a server", per_server, "tokens/s"),
            Fact("attention adds to prefill", extra, "share"),
            Fact(
                "servers",
                math.ceil((here + decode) / utilisation),
                "",
                f"at {hit:.0%} hits and {utilisation:g} utilisation",
            ),
        ),
        tables=(Table("By share of prompt tokens found in the cache", columns, tuple(rows)),),
        binds=(
            f"Prefill's compute: {here / (here + decode):.0%} of the servers."
            if here > decode
            else f"Decode: {decode / (here + decode):.0%} of the servers, their batch limited by "
            + ("memory for KV." if limit == "memory" else "the TPOT promise.")
        ),
        reverses=_turns(even, limit, extra),
        curve=_curve(deployment, rate, prompt, decode, utilisation, share),
    )


def _no_decoder(deployment: Deployment, context: int, tpot_s: float, limit: str) -> str:
    if limit == "memory":
        return (
            f"{deployment.name}: no two contexts of {context:,} tokens fit one server; take more "
            "devices per server or smaller formats"
        )
    step = deployment.step(1, context, 1, 1.0, _MBU).total_s
    return (
        f"tpot is {tpot_s * 1e3:g} ms, but one sequence takes {step * 1e3:.1f} ms per token; "
        "promise more, or take more devices per server"
    )


def _turns(even: float, limit: str, extra: float) -> tuple[str, ...]:
    first = (
        f"Above {even:.0%} hits decode takes more servers than prefill."
        if 0 < even < 1
        else "Decode takes more servers than prefill at any hit rate."
    )
    second = (
        "Memory limits the decode batch: smaller KV, or devices with more memory, save servers; "
        "faster ones do not."
        if limit == "memory"
        else "The promise limits the decode batch: more memory would not be used."
    )
    third = f"Attention adds {extra:.1%} to prefill here, and as much as the weights at "
    return first, second, f"{third}{1 / extra:,.0f} times these prompts."


def _curve(
    deployment: Deployment,
    rate: float,
    prompt: int,
    decode: float,
    utilisation: float,
    mfu: float,
) -> Curve:
    xs = tuple(i / 50 for i in range(50))
    prefill = tuple(prefill_servers(deployment, rate, prompt, x, mfu) / utilisation for x in xs)
    decoding = decode / utilisation
    return Curve(
        title=f"Servers by hit rate, {rate:,g} requests/s\n{deployment.name}",
        x_label="prompt tokens found in the cache [share]",
        y_label="servers",
        lines=(
            Line("all", xs, tuple(p + decoding for p in prefill)),
            Line("prefill", xs, prefill),
            Line("decode", xs, tuple(decoding for _ in xs)),
        ),
    )
