"""Cold keys beside a device: staged for it, or attended by the CPU, by what each costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kv_offload.host_memory import HostMemory
from kv_offload.layout import KVLayout
from kv_offload.superblock import SuperblockLayout
from lm_engine.attention.cold_costs import (
    ColdChoice,
    ColdLoad,
    ColdRates,
    hosted_s,
    least_hiding_chunk,
    measure_rates,
    staged_s,
)
from lm_engine.attention.cold_parts import HostParts, StagedParts
from lm_engine.attention.cpu_kernel import flash_cpu
from lm_engine.attention.reference import ReferenceAttention
from lm_engine.attention.torch_cuda import CudaAttention
from tests.lm_engine.attention.paged import Paged, make_paged, offload
from tests.lm_engine.attention.staged import Staged
from tests.lm_engine.attention.test_backends import COLD, SCALE, assert_same, attend

H100_LIKE = ColdRates(5e10, 2e11, 5e14, 2e12)
WINDOWS = [None, 1, 100, 300, 700]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_cpu_attends_what_the_device_does_not_hold(window: int | None, dtype: str) -> None:
    paged = make_paged(COLD, block_size=16, num_heads=6, scatter=0.1, dtype=dtype)
    want = attend(ReferenceAttention(), paged, window)
    backend = CudaAttention(256, ColdChoice(None, HostParts()), flash_cpu)
    out, lse = attend(backend, offload(paged, 9), window)
    assert out.dtype == paged.q.dtype
    tolerance = 3e-5 if dtype == "float32" else 4 * 2.0**-8
    assert_same((out.float(), lse), (want[0].float(), want[1]), tolerance)


@pytest.mark.parametrize("window", WINDOWS)
def test_the_device_attends_what_is_staged(window: int | None) -> None:
    paged = make_paged(COLD, block_size=16, num_heads=6, scatter=0.1)
    want = attend(ReferenceAttention(), paged, window)
    staged = Staged(offload(paged, 9))
    staged.paged.batch = staged.batch
    parts = StagedParts(flash_cpu, staged.ring, 256)
    assert_same(
        attend(CudaAttention(256, ColdChoice(parts, None), flash_cpu), staged.paged, window),
        want,
        3e-5,
    )
    assert staged.transfers.num_open == 0


def test_superblocks_of_token_order_are_attended_too() -> None:
    """Where the device's cache is token-major, so is the host's memory."""
    paged = offload(make_paged([(2, 1400)], block_size=16, num_heads=6), 9)
    host = paged.cache.host
    assert host is not None
    other = HostMemory(SuperblockLayout(host.layout.kv, head_major=False), host.num_superblocks)
    other.superblocks.copy_(host.superblocks.transpose(3, 4))
    found = []
    for memory in (host, other):
        parts, out = HostParts(), torch.zeros(paged.q.shape)
        lse = torch.full(out.shape[:2], -torch.inf)
        parts.begin_in(paged.q, paged.batch, memory)
        parts.add(0, paged.q, 400, SCALE, out, lse)
        found.append((out, lse))
    assert_same(found[1], found[0], 1e-6)
    assert found[0][1].isfinite().all()


def test_batches_without_cold_keys_choose_nothing() -> None:
    paged = make_paged([(3, 40)])
    choice = ColdChoice(None, HostParts())
    assert choice.of(paged.batch, 4, paged.cache) is None


def _cold(lengths: list[tuple[int, int]]) -> Paged:
    return offload(make_paged(lengths, block_size=16), 99)


def test_each_batch_goes_the_cheaper_way() -> None:
    staged = Staged(_cold([(1, 1400)]))
    both = StagedParts(flash_cpu, staged.ring, 2048), HostParts()
    measured = 0

    def measure() -> ColdRates:
        nonlocal measured
        measured += 1
        return replace(H100_LIKE, round_trip_s=0.0)

    choice = ColdChoice(*both, measure)
    lone, chunk = _cold([(1, 5000)]), _cold([(4000, 5000)])
    assert choice.of(lone.batch, 4, lone.cache) is both[1]
    assert choice.of(chunk.batch, 4, chunk.cache) is both[0]
    assert measured == 1, "rates are measured once, when they are needed"


def test_a_choice_needs_rates() -> None:
    staged = Staged(_cold([(1, 1400)]))
    with pytest.raises(ValueError, match="needs rates"):
        ColdChoice(StagedParts(flash_cpu, staged.ring, 2048), HostParts())


def test_a_shared_beginning_crosses_the_link_once() -> None:
    paged = _cold([(1, 1400), (1, 1500)])
    first, second = paged.batch.sequences
    alike = replace(paged.batch, sequences=(first, replace(second, cold=first.cold)))
    load = ColdLoad.of(alike, 4, paged.cache.layout)
    assert load.host_bytes == 2 * load.link_bytes
    assert load.link_bytes == first.cold_tokens * paged.cache.layout.bytes_per_token


def test_the_figures_of_the_plan_come_out() -> None:
    """Llama 3.1 8B at 128k: one token takes 344 ms over a link of 50 GB/s and 86 ms by a CPU that
    reads 200 GB/s; transfer hides from 2,500 rows on however long the context."""
    layout = KVLayout(32, 8, 128, dtype="bfloat16")
    tokens = 131_072
    load = ColdLoad(layout.bytes_per_token / 32 * tokens, layout.bytes_per_token / 32 * tokens, 0.0)
    rates = replace(H100_LIKE, round_trip_s=0.0)
    assert 32 * staged_s(load, rates) == pytest.approx(0.344, abs=1e-3)
    assert 32 * hosted_s(load, rates) == pytest.approx(0.086, abs=1e-3)
    chunk = least_hiding_chunk(rates, layout, 32)
    assert chunk == 2500
    linear_flops = 2.0 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    behind = [least_hiding_chunk(rates, layout, 32, n, linear_flops) for n in (8192, 131_072)]
    assert behind == [589, 2078], "the linears hide what a short beginning takes"
    flops = 4.0 * 32 * 128 * tokens
    assert staged_s(replace(load, flops=(chunk - 1) * flops), rates) == staged_s(load, rates)
    assert staged_s(replace(load, flops=(chunk + 1) * flops), rates) > staged_s(load, rates)


def test_rates_are_measured() -> None:
    paged = _cold([(1, 1400)])
    rates = measure_rates(paged.cache, 4, flash_cpu)
    for rate in (
        rates.link_bytes_per_s,
        rates.host_bytes_per_s,
        rates.device_flops_per_s,
        rates.host_flops_per_s,
    ):
        assert 1e6 < rate < 1e14
