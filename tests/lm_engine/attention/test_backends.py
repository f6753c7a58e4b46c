"""The reference against the definition, and every CPU path against the reference."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_engine.attention.base import AttentionBackend, AttentionBatch, SequenceSlice
from lm_engine.attention.cpu import CpuAttention
from lm_engine.attention.reference import ReferenceAttention
from lm_engine.attention.select import select
from tests.lm_engine.attention.paged import Paged, make_paged, naive

SCALE = 0.25


def attend(
    backend: AttentionBackend, paged: Paged, window: int | None = None, layer: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    return backend.attend(layer, paged.q, paged.batch, paged.cache, window=window, scale=SCALE)


def assert_same(
    got: tuple[torch.Tensor, torch.Tensor],
    want: tuple[torch.Tensor, torch.Tensor],
    tolerance: float = 1e-5,
) -> None:
    assert got[0].shape == want[0].shape
    assert got[0].is_contiguous()
    assert got[1].dtype == torch.float32
    torch.testing.assert_close(got[0].double(), want[0].double(), atol=tolerance, rtol=0)
    torch.testing.assert_close(got[1].double(), want[1].double(), atol=tolerance, rtol=0)


@pytest.mark.parametrize("split", [8, 2048])
@pytest.mark.parametrize("window", [None, 1, 3, 9, 40])
def test_the_reference_is_the_definition(window: int | None, split: int) -> None:
    paged = make_paged([(1, 1), (5, 5), (1, 23), (7, 30)], scatter=0.5)
    assert_same(attend(ReferenceAttention(split), paged, window), naive(paged, window, SCALE))


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_the_cpu_path_is_the_reference(data: st.DataObject) -> None:
    contexts = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=6))
    lengths = [
        (data.draw(st.one_of(st.just(1), st.integers(1, context))), context) for context in contexts
    ]
    window = data.draw(st.one_of(st.none(), st.integers(1, 100)))
    num_kv_heads = data.draw(st.sampled_from([1, 2, 3]))
    paged = make_paged(
        lengths,
        num_kv_heads=num_kv_heads,
        num_heads=num_kv_heads * data.draw(st.sampled_from([1, 3])),
        head_dim=data.draw(st.sampled_from([8, 20])),
        scatter=data.draw(st.sampled_from([0.0, 0.2, 1.0])),
        seed=data.draw(st.integers(0, 1000)),
    )
    split = data.draw(st.sampled_from([8, 13, 32, 2048]))
    want = attend(ReferenceAttention(), paged, window)
    assert_same(attend(CpuAttention(split), paged, window), want)


@pytest.mark.parametrize("chunk", [1, 2, 7, 31, 64, 150])
def test_any_chunking_gives_the_same_rows(chunk: int) -> None:
    """Rows of one 150-token prompt, computed chunk by chunk, across splits of 32."""
    whole = make_paged([(150, 150)], scatter=0.1, block_size=8)
    want = naive(whole, None, SCALE)
    (sequence,) = whole.batch.sequences
    outs, lses = [], []
    for start in range(0, 150, chunk):
        rows = min(chunk, 150 - start)
        batch = AttentionBatch(
            (SequenceSlice(0, rows, start + rows, sequence.runs),),
            whole.batch.slots[start : start + rows],
        )
        out, lse = CpuAttention(32).attend(
            0, whole.q[start : start + rows], batch, whole.cache, window=None, scale=SCALE
        )
        outs.append(out)
        lses.append(lse)
    assert_same((torch.cat(outs), torch.cat(lses)), want)


@pytest.mark.parametrize("window", [None, 5, 200, 600, 1000])
def test_contexts_longer_than_the_kernels_tiles(window: int | None) -> None:
    """Several tiles of 512 keys, some of them wholly masked for some rows."""
    paged = make_paged([(700, 1400), (1, 1300), (1, 700), (40, 1100)], block_size=16)
    want = attend(ReferenceAttention(), paged, window)
    assert_same(attend(CpuAttention(1024), paged, window), want)


@pytest.mark.parametrize("scatter", [0.0, 1.0])
@pytest.mark.parametrize("count", [2, 3, 16, 64])
def test_decode_batches_of_very_different_lengths(count: int, scatter: float) -> None:
    choose = random.Random(count)
    lengths = [(1, choose.choice([1, 2, 63, 64, 65, 128, 300])) for _ in range(count)]
    paged = make_paged(lengths, scatter=scatter, num_heads=6, num_kv_heads=2)
    assert_same(attend(CpuAttention(), paged), naive(paged, None, SCALE))


def test_decode_batches_of_equal_lengths() -> None:
    paged = make_paged([(1, 100)] * 9)
    assert_same(attend(CpuAttention(), paged), naive(paged, None, SCALE))


def test_decode_rows_between_chunks_keep_their_places() -> None:
    paged = make_paged([(1, 40), (9, 33), (1, 7), (1, 50), (20, 20), (1, 1)], scatter=0.3)
    assert_same(attend(CpuAttention(), paged), naive(paged, None, SCALE))


def test_more_decode_rows_than_one_ragged_batch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm_engine.attention.cpu._MOST_RAGGED_ENTRIES", 300)
    monkeypatch.setattr("lm_engine.attention.cpu._LONGEST_RAGGED_KEYS", 90)
    paged = make_paged([(1, n) for n in (40, 10, 80, 100, 30, 30)])
    assert_same(attend(CpuAttention(), paged), naive(paged, None, SCALE))


def test_layers_and_windows_of_one_batch_do_not_mix() -> None:
    paged = make_paged([(1, 60), (1, 9), (13, 50)], num_layers=3, scatter=0.2)
    backend = CpuAttention(16)
    for layer, window in [(0, None), (1, 4), (2, None), (1, None), (0, 4)]:
        assert_same(attend(backend, paged, window, layer), naive(paged, window, SCALE, layer), 3e-5)


def test_a_backend_forgets_the_batch_before() -> None:
    backend = CpuAttention()
    for seed in range(3):
        paged = make_paged([(1, 20 + seed), (1, 33), (5, 9)], seed=seed)
        assert_same(attend(backend, paged), naive(paged, None, SCALE))


def test_a_poisoned_row_spoils_neither_its_mates_nor_the_next_layer() -> None:
    paged = make_paged([(1, 30), (1, 40), (1, 50)], num_layers=2)
    backend = CpuAttention()
    paged.cache.keys[0][:, paged.batch.slots[1]] = float("nan")
    out, lse = attend(backend, paged)
    want = naive(paged, None, SCALE)
    assert out[1].isnan().all()
    assert_same((out[[0, 2]], lse[[0, 2]]), (want[0][[0, 2]], want[1][[0, 2]]))
    assert_same(attend(backend, paged, layer=1), naive(paged, None, SCALE, 1), 3e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_keeps_its_own_tolerance(dtype: str) -> None:
    paged = make_paged([(1, 60), (1, 9), (13, 50)], dtype=dtype, scatter=0.2)
    out, lse = attend(CpuAttention(16), paged)
    want, want_lse = naive(paged, None, SCALE)
    assert out.dtype == paged.cache.dtype
    # 8 (bfloat16) and 11 (float16) significant bits of outputs of order 1.
    tolerance = 4 * 2.0 ** (-8 if dtype == "bfloat16" else -11)
    torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=0)
    torch.testing.assert_close(lse.double(), want_lse, atol=tolerance, rtol=0)


@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
def test_queries_and_kv_may_differ_in_type(stored: str) -> None:
    paged = make_paged([(1, 60), (1, 9), (13, 50)], dtype=stored, scatter=0.2)
    exact = stored == "bfloat16"
    paged.q = paged.q.float() if exact else paged.q.bfloat16()
    out, lse = attend(CpuAttention(16), paged)
    want, want_lse = naive(paged, None, SCALE)
    assert out.dtype == paged.q.dtype
    tolerance = 1e-5 if exact else 4 * 2.0**-8
    torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=0)
    torch.testing.assert_close(lse.double(), want_lse, atol=tolerance, rtol=0)


def test_strided_queries_are_read_as_they_are() -> None:
    paged = make_paged([(1, 60), (1, 9), (13, 50)])
    want = attend(CpuAttention(16), paged)
    fused = torch.randn(paged.q.shape[0], 12, 16)
    fused[:, 2:6] = paged.q
    paged.q = fused[:, 2:6]
    assert_same(attend(CpuAttention(16), paged), want, 1e-6)


def test_inference_mode_is_no_different() -> None:
    with torch.inference_mode():
        paged = make_paged([(1, 60), (1, 9), (13, 50)])
        assert_same(attend(CpuAttention(16), paged), naive(paged, None, SCALE))


def test_the_cpu_gets_the_cpu_backend() -> None:
    backend = select("cpu", split_tokens=64)
    assert isinstance(backend, CpuAttention)
    assert backend.split_tokens == 64
    assert isinstance(select("meta"), ReferenceAttention)
