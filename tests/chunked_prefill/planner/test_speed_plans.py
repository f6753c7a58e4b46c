"""Published figures of steps, prompts, formats, experts and batches: integers exactly, ratios
within 1 %."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chunked_prefill.planner.batching import (
    RESERVED_USED,
    block_waste,
    plan_batching,
    reserved_use,
    static_waste,
)
from chunked_prefill.planner.deployment import Deployment
from chunked_prefill.planner.devices import DEVICES, PlanError
from chunked_prefill.planner.moe import batch_that_reads, distinct_experts, plan_moe
from chunked_prefill.planner.prefill import (
    chunk_of_equal_time,
    doubling_depth,
    equal_length,
    plan_prefill,
    tokens_within,
)
from chunked_prefill.planner.quantize import (
    decode_speedup,
    last_batch,
    plan_quantize,
    prefill_speedup,
)
from chunked_prefill.planner.roofline import knee_batch, plan_roofline, ridge_batch
from chunked_prefill.planner.shapes import SHAPES
from tests.chunked_prefill.planner.reports import check, rows, value

H100, H200, B200, A100 = (DEVICES[name] for name in ("h100", "h200", "b200", "a100"))
BIG = Deployment(SHAPES["llama-3.1-70b"], H100, 8)
K128 = 131_072
V3 = Deployment(SHAPES["deepseek-v3"], H200, 8, "fp8")


@pytest.mark.parametrize(
    ("name", "bf16", "w4a16"),
    [
        # Data sheets: 989.5 TFLOP/s and 3.35 TB/s; 4.8 TB/s; 2,250 and 8.0; 312 and 2.039.
        ("h100", 295, 78),
        ("h200", 206, 55),
        ("b200", 281, 75),
        ("a100", 153, None),
    ],
)
def test_ridge_batches(name: str, bf16: int, w4a16: int | None) -> None:
    device = DEVICES[name]
    assert round(ridge_batch(device, "bf16")) == bf16
    if w4a16 is not None:
        assert round(ridge_batch(device, "w4a16")) == w4a16
        assert round(ridge_batch(device, "fp8")) == bf16


@pytest.mark.parametrize(("batch", "milliseconds"), [(1, 5.3), (64, 8.5), (256, 18.1)])
def test_decode_steps_of_a_70b(batch: int, milliseconds: float) -> None:
    """(141.1 GB + B · 4,096 · 327,680) / 26.8 TB/s on eight H100."""
    step = BIG.step(batch, 4096)
    assert step.total_s * 1e3 == pytest.approx(milliseconds, rel=0.01)
    assert step.total_s == pytest.approx(
        (141_107_412_992 + batch * 4096 * 327_680) / (8 * 3.35e12), rel=1e-9
    )


def test_the_knee_is_where_a_step_doubles_and_half_the_limit_is_reached() -> None:
    knee = knee_batch(BIG, 4096)
    step, alone = BIG.step(knee, 4096).total_s, BIG.weight_bytes / BIG.bandwidth
    assert step == pytest.approx(2 * alone)
    limit = BIG.bandwidth / BIG.kv_reads(4096)
    assert knee / step == pytest.approx(limit / 2)


def test_roofline_plan() -> None:
    report = plan_roofline(BIG, context=4096)
    check(report)
    assert value(report, "batch that fits") == 312
    assert [row["batch"] for row in rows(report)] == [1, 8, 32, 64, 128, 256, 312]
    assert rows(report)[-1]["binds"] == "KV"
    assert "reading KV is the most" in report.binds
    few = plan_roofline(replace(BIG, count=3), context=8192)
    assert "Memory's size binds first" in few.binds
    # Short contexts: compute binds before KV does, so the knee is the ridge.
    assert value(plan_roofline(BIG, context=1024), "knee batch") == pytest.approx(295, rel=0.01)
    halved = plan_roofline(BIG, context=4096, mbu=0.5)
    assert value(halved, "ridge batch") == pytest.approx(295 / 2, rel=0.01)


def test_both_parts_of_a_prefill_are_equal() -> None:
    """70.55e9 / (80 · 8,192)."""
    assert equal_length(BIG.shape) == pytest.approx(107_700, rel=0.01)


@pytest.mark.parametrize(("name", "depth"), [("llama-3.1-70b", 54_000), ("llama-3.1-8b", 31_000)])
def test_the_depth_at_which_chunks_double(name: str, depth: int) -> None:
    shape = SHAPES[name]
    assert doubling_depth(shape) == pytest.approx(depth, rel=0.015)
    # A short chunk there is half as long for the same time.
    assert chunk_of_equal_time(shape, 64, round(doubling_depth(shape))) == pytest.approx(
        32, rel=0.01
    )


def test_chunks_of_equal_time() -> None:
    """2,048 tokens of a 70B at depths of 0, 16k, 32k, 64k and 128k."""
    depths = (0, 16_384, 32_768, 65_536, 131_072)
    chunks = [round(chunk_of_equal_time(BIG.shape, 2048, depth)) for depth in depths]
    assert chunks == [2048, 1582, 1288, 937, 607]


def test_the_longest_prompt_within_a_promise() -> None:
    """200 ms on eight H100 at 40 %: 4,315 tokens."""
    assert round(tokens_within(BIG.shape, 0.2, 0.4 * BIG.flops_per_s)) == 4315
    report = plan_prefill(BIG, ttft_s=0.2)
    check(report)
    assert value(report, "longest prompt within 200 ms") == 4315
    times = {row["prompt"]: row["prefill"] for row in rows(report)}
    assert times[131_072] == pytest.approx(13.0, rel=0.01)
    assert [row["chunk"] for row in rows(report, 1)] == [2048, 1582, 1288, 937, 607]
    short = plan_prefill(Deployment(SHAPES["llama-2-7b"], H100))
    assert [row["prompt"] for row in rows(short)] == [512, 2048, 4096]


def test_measured_rates_need_no_factor() -> None:
    device = replace(H100, measured=True)
    assert Deployment(BIG.shape, device, 8).mfu(None) == 1
    assert BIG.mfu(None) == 0.4
    assert BIG.mfu(0.55) == 0.55


def test_smaller_weights() -> None:
    """w4a16: 0.27 of the bytes, decode at most 3.8 times as fast, prefill at most as fast. fp8
    w8a8: half, twice, twice."""
    base = replace(BIG, weights="bf16")
    four, eight = replace(base, weights="w4a16"), replace(base, weights="fp8")
    assert round(four.weight_bytes / base.weight_bytes, 2) == 0.27
    assert round(decode_speedup(base, four, 1, 0), 1) == 3.8
    assert prefill_speedup(base, four) == 1
    assert eight.weight_bytes / base.weight_bytes == 0.5
    assert decode_speedup(base, eight, 1, 0) == 2
    assert prefill_speedup(base, eight) == 2
    a100 = Deployment(BIG.shape, A100, 8)
    assert prefill_speedup(a100, replace(a100, weights="fp8")) == 1


def test_smaller_weights_stop_helping_at_the_ridge() -> None:
    base = replace(BIG, weights="bf16")
    four = replace(base, weights="w4a16")
    end = last_batch(base, four, 1, 1.001)
    assert end == pytest.approx(ridge_batch(H100, "bf16"), rel=0.01)
    assert decode_speedup(base, four, 200, 0) < 2
    assert last_batch(base, replace(base, kv="fp8"), 4096, 1.0) is None
    assert last_batch(base, base, 4096, 1.1) == 0


def test_fp8_kv_halves_its_part_and_doubles_users() -> None:
    base, small = replace(BIG, kv="bf16"), replace(BIG, kv="fp8")
    assert base.step(32, 4096).kv_s == 2 * small.step(32, 4096).kv_s
    assert small.users(131_072) == pytest.approx(2 * base.users(131_072), abs=1)


def test_quantize_plan() -> None:
    report = plan_quantize(BIG, batch=32)
    check(report)
    table = {(row["weights"], row["KV"]): row for row in rows(report)}
    assert table["fp8", "fp8"]["users"] == 729
    assert table["w4a16", "bf16"]["of bf16"] == pytest.approx(0.265)
    assert any("slower than fp8 above a batch of 147" in turn for turn in report.reverses)
    assert any("no fp8 units" in turn for turn in plan_quantize(replace(BIG, device=A100)).reverses)


@pytest.mark.parametrize(
    ("tokens", "experts"), [(1, 8), (8, 57.4), (16, 102), (32, 163), (64, 222), (128, 252)]
)
def test_distinct_experts(tokens: int, experts: float) -> None:
    """DeepSeek-V3 (arXiv 2412.19437): 8 of 256, taken uniformly."""
    assert distinct_experts(256, 8, tokens) == pytest.approx(experts, rel=0.005)


def test_bytes_that_experts_make_a_step_read() -> None:
    """In fp8: 37.5 GB for one token, 660 GB for 128."""
    assert V3.weight_reads(1) / 1e9 == pytest.approx(37.5, rel=0.01)
    assert V3.weight_reads(128) / 1e9 == pytest.approx(660, rel=0.01)
    assert V3.weight_reads(1) == V3.shape.active_parameters
    assert V3.weight_reads(1e6) == pytest.approx(V3.weight_bytes)


def test_moe_plan() -> None:
    report = plan_moe(V3)
    check(report)
    assert rows(report)[0]["weights read"] == pytest.approx(37.5e9, rel=0.01)
    assert value(report, "ridge batch of experts") == pytest.approx(206 * 32, rel=0.01)
    assert distinct_experts(256, 8, batch_that_reads(0.9, 256, 8)) == pytest.approx(0.9 * 256)
    with pytest.raises(PlanError, match="has no experts"):
        plan_moe(BIG)


@pytest.mark.parametrize(("batch", "waste"), [(8, 2.72), (32, 4.06), (128, 5.43)])
def test_waste_of_static_batches(batch: int, waste: float) -> None:
    """The harmonic number: the mean of the largest of B exponential lengths."""
    assert round(static_waste(batch), 2) == waste


def test_memory_that_holds_nothing() -> None:
    """20 to 38 % in use where contexts are reserved (vLLM, arXiv 2309.06180, figure 2); blocks of
    16 waste 0.55 % of Azure's mean conversation (1,155 + 211 tokens)."""
    assert [round(100 * share) for share in RESERVED_USED] == [20, 38]
    assert block_waste(16, 1155 + 211) == pytest.approx(0.0055, rel=0.01)
    assert block_waste(1, 100) == 0
    assert reserved_use(1000, 500, 2500) == 0.5


def test_batching_plan() -> None:
    report = plan_batching(Deployment(SHAPES["llama-3.1-8b"], H100))
    check(report)
    assert value(report, "wasted by blocks of 16") == pytest.approx(0.0055, rel=0.01)
    assert value(report, "of it in use") == pytest.approx((1155 + 105.5) / 8192)
    by_batch = {row["batch"]: row for row in rows(report)}
    assert by_batch[1]["static"] == by_batch[1]["continuous"]
    assert by_batch[32]["continuous"] / by_batch[32]["static"] == pytest.approx(4.06, rel=0.01)
    room = value(report, "sequences, paged") * (1155 + 105)
    assert room == pytest.approx(value(report, "sequences, reserved") * 8192, rel=0.03)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (lambda: plan_roofline(replace(BIG, count=1)), r"do not fit 1 x H100.*take 3 or more"),
        (lambda: plan_roofline(replace(BIG, shape=SHAPES["70b-mha"]), context=K128 * 2), "goes no"),
        (
            lambda: plan_roofline(replace(BIG, shape=SHAPES["70b-mha"], count=4), context=K128),
            "not one context of 131,072 tokens fits",
        ),
        (lambda: plan_roofline(BIG, mfu=1.5), "mfu is 1.5; it must be from 0.01 to 1"),
        (lambda: plan_roofline(BIG, context=131_073), r"context is 131,073.*goes no further"),
        (lambda: plan_prefill(BIG, ttft_s=0), "ttft is 0"),
        (lambda: plan_prefill(BIG, chunk=0), "chunk is 0"),
        (lambda: plan_prefill(BIG, mfu=float("nan")), "mfu is nan"),
        (lambda: plan_quantize(BIG, batch=0), "batch is 0"),
        (lambda: plan_batching(BIG, max_length=100), "max_length is 100; it must be from 1,366"),
        (lambda: plan_batching(BIG, prompt=131_000), r"prompt \+ output is 131,211"),
        (lambda: replace(BIG, weights="q2"), "weights 'q2' has no known size"),
        (lambda: replace(BIG, count=0), "devices is 0"),
    ],
)
def test_nonsense_is_refused(plan: object, says: str) -> None:
    assert callable(plan)
    with pytest.raises(PlanError, match=says):
        plan()


def test_devices_without_rates_are_refused() -> None:
    bare = replace(H100, bandwidth_bytes_per_s=None, bf16_flops_per_s=None, fp8_flops_per_s=None)
    with pytest.raises(PlanError, match="has no known rate"):
        plan_roofline(Deployment(SHAPES["llama-3.1-8b"], bare))
    with pytest.raises(PlanError, match="has no known rate"):
        plan_prefill(Deployment(SHAPES["llama-3.1-8b"], bare))


def test_sliding_windows_shorten_reads() -> None:
    shape = replace(SHAPES["llama-3.1-8b"], windows=(4096, None) * 16)
    whole, slid = Deployment(SHAPES["llama-3.1-8b"], H100), Deployment(shape, H100)
    assert slid.kv_reads(8192) == whole.kv_reads(8192) * (4096 + 8192) / 2 / 8192
    assert whole.kv_reads(0) == 0
    assert Deployment(SHAPES["llama-3.1-8b"], H100, 16).kv_reads(100) == 2 * whole.kv_reads(100)
