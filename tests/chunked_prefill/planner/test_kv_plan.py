"""Published figures of KV and users, reproduced: integers exactly, ratios within 1 %."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chunked_prefill.planner.devices import DEVICES, PlanError, find_device, this_machine
from chunked_prefill.planner.kv import (
    CPU_BANDWIDTH,
    kv_bytes_per_token,
    plan_kv,
    prefill_seconds,
    room_for_kv,
    smallest_chunk,
    users,
    usual_contexts,
    visible_kv_bytes,
)
from chunked_prefill.planner.shapes import SHAPES
from chunked_prefill.planner.this_machine import measured
from kv_offload.layout import KVLayout

H100, H200 = DEVICES["h100"], DEVICES["h200"]
K128 = 131_072


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [
        ("70b-mha", 2_621_440),  # 2 · 80 · 64 · 128 · 2
        ("llama-3.1-70b", 327_680),  # Llama 3 paper, arXiv 2407.21783, table 3: 8 KV heads
        ("llama-3.1-405b", 516_096),  # the same; DeepSeek-V3's Insights, arXiv 2505.09343, table 1
        ("llama-2-7b", 524_288),  # Llama 2, arXiv 2307.09288: 32 layers, 32 heads of 128
        ("llama-3.1-8b", 131_072),
        ("deepseek-v3", 70_272),  # arXiv 2505.09343, table 1: 70.272 KB
        ("qwen2.5-vl-7b", 57_344),
    ],
)
def test_kv_bytes_per_token(name: str, bytes_per_token: int) -> None:
    assert kv_bytes_per_token(SHAPES[name], 2) == bytes_per_token


def test_our_own_layout_agrees() -> None:
    shape = SHAPES["smollm2-135m"]
    layout = KVLayout(shape.num_layers, shape.num_kv_heads, shape.head_dim)
    assert kv_bytes_per_token(shape, 4) == layout.bytes_per_token


def test_what_fewer_heads_and_latents_save() -> None:
    """70B with as many KV heads as heads : 8 KV heads : DeepSeek-V3's latents."""
    mha, gqa, mla = (
        kv_bytes_per_token(SHAPES[name], 2) for name in ("70b-mha", "llama-3.1-70b", "deepseek-v3")
    )
    assert mha / mla == pytest.approx(37.3, rel=0.01)
    assert mha / gqa == 8
    assert gqa / mla == pytest.approx(4.66, rel=0.01)


def test_a_context_of_128k() -> None:
    (context,) = plan_kv(SHAPES["llama-3.1-70b"], H100, 8, contexts=(K128,)).contexts
    assert context.kv_bytes / 1e9 == pytest.approx(42.95, rel=1e-4)


@pytest.mark.parametrize(
    ("weights", "kv", "at_128k", "at_8k"), [("bf16", "bf16", 9, 156), ("fp8", "fp8", 22, 364)]
)
def test_users_of_a_70b_on_eight_h100(weights: str, kv: str, at_128k: int, at_8k: int) -> None:
    plan = plan_kv(SHAPES["llama-3.1-70b"], H100, 8, weights=weights, kv=kv, contexts=(K128, 8192))
    assert [c.users for c in plan.contexts] == [at_128k, at_8k]
    assert plan.repeated == 1


def test_parallel_devices_repeat_what_cannot_be_shared_out() -> None:
    gqa, mla = SHAPES["llama-3.1-70b"], SHAPES["deepseek-v3"]
    assert kv_bytes_per_token(gqa, 2, 8) == 327_680 / 8
    assert kv_bytes_per_token(gqa, 2, 16) == 327_680 / 8
    assert kv_bytes_per_token(mla, 2, 8) == 70_272
    assert plan_kv(gqa, H100, 16).repeated == 2
    assert plan_kv(mla, H200, 8, weights="fp8").repeated == 8
    assert kv_bytes_per_token(SHAPES["qwen2.5-vl-7b"], 2, 3) == 57_344 / 2


@pytest.mark.parametrize(
    ("name", "bf16", "fp8"),
    [("llama-3.1-8b", 2065, 1036), ("llama-3.1-70b", 892, 446), ("qwen2.5-vl-7b", 1141, 571)],
)
def test_the_chunk_that_hides_copies(name: str, bf16: int, fp8: int) -> None:
    """500 TFLOP/s against 50 GB/s, 128k of cold KV."""
    for number_bytes, wanted in ((2, bf16), (1, fp8)):
        chunk = smallest_chunk(SHAPES[name], K128, number_bytes, 500e12, 50e9)
        assert chunk == pytest.approx(wanted, rel=0.001)


def test_the_chunk_has_a_limit_that_no_context_exceeds() -> None:
    """s · F / (2 · g · B), g query heads per KV head."""
    shape = SHAPES["llama-3.1-8b"]
    limit = 2 * 500e12 / (2 * 4 * 50e9)
    sizes = [smallest_chunk(shape, 2**n, 2, 500e12, 50e9) for n in range(13, 31)]
    assert sizes == sorted(sizes)
    assert sizes[-1] < limit
    assert sizes[-1] == pytest.approx(limit, rel=0.01)


@pytest.mark.parametrize(
    ("name", "copied", "cpu"), [("llama-3.1-8b", 344, 86), ("qwen2.5-vl-7b", 150, 38)]
)
def test_a_token_of_a_context_in_the_host(name: str, copied: int, cpu: int) -> None:
    shape = replace(SHAPES[name], max_length=K128)
    (context,) = plan_kv(shape, H100, contexts=(K128,)).contexts
    assert CPU_BANDWIDTH == 200e9
    assert H100.link_bytes_per_s == 50e9
    assert context.copy_seconds is not None
    assert context.cpu_seconds is not None
    assert context.copy_seconds * 1e3 == pytest.approx(copied, rel=0.01)
    assert context.cpu_seconds * 1e3 == pytest.approx(cpu, rel=0.015)


def test_prefill_of_a_70b() -> None:
    """8 H100 at 40 %: 4,000 tokens in 185 ms, 128k in 13.0 s; 4,315 tokens in 200 ms."""
    shape, flops = SHAPES["llama-3.1-70b"], 0.4 * 8 * 989.5e12
    assert prefill_seconds(shape, 4000, flops) == pytest.approx(0.185, rel=0.01)
    assert prefill_seconds(shape, 4315, flops) == pytest.approx(0.200, rel=0.01)
    assert prefill_seconds(shape, K128, flops) == pytest.approx(13.0, rel=0.01)


def test_host_memory_holds_further_contexts() -> None:
    shape = SHAPES["llama-3.1-8b"]
    plan = plan_kv(shape, DEVICES["rtx4090"], host_bytes=64 * 2**30, contexts=(8192, K128))
    small, large = plan.contexts
    assert (small.users, large.users) == (3, 0)
    assert small.users_with_host == 3 + 64 * 2**30 // (8192 * 131_072)
    assert large.users_with_host == 4
    assert plan.largest_context == int(plan.room_bytes // 131_072)
    assert plan.largest_with_host == plan.largest_context + 64 * 2**30 // 131_072


def test_weights_that_do_not_fit_leave_no_room() -> None:
    shape = SHAPES["llama-3.1-405b"]
    assert room_for_kv(shape, H100, 1, 2) < 0
    plan = plan_kv(shape, H100, host_bytes=1e12)
    assert plan.room_bytes < 0
    assert (plan.largest_context, plan.contexts[0].users) == (0, 0)
    assert users(-5.0, 1.0) == 0


def test_sliding_windows_are_told_but_not_counted() -> None:
    """This server keeps what slid out of a window, so its users are those of the whole."""
    shape = replace(SHAPES["llama-3.1-8b"], windows=(4096, None) * 16)
    assert visible_kv_bytes(shape, K128, 2) == 131_072 / 2 * (4096 + K128)
    assert visible_kv_bytes(shape, 100, 2) == 131_072 * 100
    (context,) = plan_kv(shape, H200, contexts=(K128,)).contexts
    assert context.kv_bytes == 131_072 * K128
    assert context.visible_bytes == 131_072 / 2 * (4096 + K128)


@pytest.mark.parametrize(
    ("name", "count", "memory"),
    [("H100", 1, 80e9), ("8xh200", 8, 141e9), ("2 x RTX 4090", 2, 24e9), ("rtx-4090", 1, 24e9)],
)
def test_devices_by_name(name: str, count: int, memory: float) -> None:
    spec, found = find_device(name)
    assert (spec.memory_bytes, found) == (memory, count)


def test_this_machine_has_memory_and_no_rates() -> None:
    spec, _ = find_device("this")
    assert spec == this_machine()
    assert spec.memory_bytes > 1e8
    (context,) = plan_kv(SHAPES["smollm2-135m"], spec, contexts=(100,)).contexts
    assert context.users > 0
    assert (context.copy_seconds, context.prefill_seconds, context.smallest_chunk) == (None,) * 3


def test_nonsense_is_refused() -> None:
    for name in ("H1000", "", "0xH100", "5000xH100", "99999999xH100"):
        with pytest.raises(PlanError, match="device"):
            find_device(name)
    shape = SHAPES["llama-3.1-8b"]
    with pytest.raises(PlanError, match=r"kv 'fp3' has no known size.*fp8"):
        plan_kv(shape, H100, kv="fp3")
    with pytest.raises(PlanError, match=r"context is 0; it must be from 1 to 131,072"):
        plan_kv(shape, H100, contexts=(0,))
    with pytest.raises(PlanError, match="context lists no length"):
        plan_kv(shape, H100, contexts=())
    with pytest.raises(PlanError, match=r"host_bytes is -1; it must be from 0"):
        plan_kv(shape, H100, host_bytes=-1.0)
    with pytest.raises(PlanError, match="devices is 0"):
        plan_kv(shape, H100, 0)


def test_no_row_goes_beyond_a_models_own_length() -> None:
    small = SHAPES["smollm2-135m"]
    assert [c.tokens for c in plan_kv(small, H100).contexts] == [8192]
    assert usual_contexts(replace(small, max_length=40_000)) == (8192, 32_768, 40_000)
    assert usual_contexts(replace(small, max_length=None)) == (8192, 32_768, K128)
    assert usual_contexts(SHAPES["deepseek-v3"]) == (8192, 32_768, K128)
    with pytest.raises(PlanError, match=r"context is 8,193; .* 8,192: smollm2-135m goes no fur"):
        plan_kv(small, H100, contexts=(100, 8193))


def test_this_machine_is_measured() -> None:
    spec, _ = find_device("this")
    rates = measured(spec)
    assert rates.measured
    assert rates.memory_bytes == spec.memory_bytes
    # Between a slow core in use by others and the largest servers.
    assert 1e8 < (rates.bandwidth_bytes_per_s or 0) < 2e12
    assert 1e8 < (rates.bf16_flops_per_s or 0) < 1e14
