"""The reference against the definition, and every CPU path against the reference."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_offload.kv_cache import KVCache
from kv_offload.layout import KVLayout
from lm_engine.attention.base import AttentionBackend, AttentionBatch, SequenceSlice
from lm_engine.attention.cpu import CpuAttention
from lm_engine.attention.native import NativeAttention, NativeWriter
from lm_engine.attention.reference import ReferenceAttention
from lm_engine.attention.select import select
from lm_engine.native import library
from tests.lm_engine.attention.paged import Paged, make_paged, naive, offload

SCALE = 0.25

MakeBackend = Callable[..., AttentionBackend]


@pytest.fixture(scope="module", params=["torch", "native"])
def make_backend(request: pytest.FixtureRequest) -> MakeBackend:
    """A backend for the CPU; torch's takes the length of its splits, the native one has its own."""
    if request.param == "torch":
        return CpuAttention
    try:
        kernels = library.load()
    except library.NativeUnavailableError as error:
        pytest.skip(str(error))
    return lambda split_tokens=0: NativeAttention(kernels)


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
def test_the_cpu_path_is_the_reference(data: st.DataObject, make_backend: MakeBackend) -> None:
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
    assert_same(attend(make_backend(split), paged, window), want)


@pytest.mark.parametrize("chunk", [1, 2, 7, 31, 64, 150])
def test_any_chunking_gives_the_same_rows(chunk: int, make_backend: MakeBackend) -> None:
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
        out, lse = make_backend(32).attend(
            0, whole.q[start : start + rows], batch, whole.cache, window=None, scale=SCALE
        )
        outs.append(out)
        lses.append(lse)
    assert_same((torch.cat(outs), torch.cat(lses)), want)


@pytest.mark.parametrize("window", [None, 5, 200, 600, 1000])
def test_contexts_longer_than_the_kernels_tiles(
    window: int | None, make_backend: MakeBackend
) -> None:
    """Several tiles of 512 keys, some of them wholly masked for some rows."""
    paged = make_paged([(700, 1400), (1, 1300), (1, 700), (40, 1100)], block_size=16)
    want = attend(ReferenceAttention(), paged, window)
    assert_same(attend(make_backend(1024), paged, window), want)


@pytest.mark.parametrize("scatter", [0.0, 1.0])
@pytest.mark.parametrize("count", [2, 3, 16, 64])
def test_decode_batches_of_very_different_lengths(
    count: int, scatter: float, make_backend: MakeBackend
) -> None:
    choose = random.Random(count)
    lengths = [(1, choose.choice([1, 2, 63, 64, 65, 128, 300])) for _ in range(count)]
    paged = make_paged(lengths, scatter=scatter, num_heads=6, num_kv_heads=2)
    assert_same(attend(make_backend(), paged), naive(paged, None, SCALE))


def test_decode_batches_of_equal_lengths(make_backend: MakeBackend) -> None:
    paged = make_paged([(1, 100)] * 9)
    assert_same(attend(make_backend(), paged), naive(paged, None, SCALE))


def test_decode_rows_between_chunks_keep_their_places(make_backend: MakeBackend) -> None:
    paged = make_paged([(1, 40), (9, 33), (1, 7), (1, 50), (20, 20), (1, 1)], scatter=0.3)
    assert_same(attend(make_backend(), paged), naive(paged, None, SCALE))


def test_more_decode_rows_than_one_ragged_batch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm_engine.attention.cpu._MOST_RAGGED_ENTRIES", 300)
    monkeypatch.setattr("lm_engine.attention.cpu._LONGEST_RAGGED_KEYS", 90)
    paged = make_paged([(1, n) for n in (40, 10, 80, 100, 30, 30)])
    assert_same(attend(CpuAttention(), paged), naive(paged, None, SCALE))


def test_layers_and_windows_of_one_batch_do_not_mix(make_backend: MakeBackend) -> None:
    paged = make_paged([(1, 60), (1, 9), (13, 50)], num_layers=3, scatter=0.2)
    backend = make_backend(16)
    for layer, window in [(0, None), (1, 4), (2, None), (1, None), (0, 4)]:
        assert_same(attend(backend, paged, window, layer), naive(paged, window, SCALE, layer), 3e-5)


def test_a_backend_forgets_the_batch_before(make_backend: MakeBackend) -> None:
    backend = make_backend()
    for seed in range(3):
        paged = make_paged([(1, 20 + seed), (1, 33), (5, 9)], seed=seed)
        assert_same(attend(backend, paged), naive(paged, None, SCALE))


def test_a_poisoned_row_spoils_neither_its_mates_nor_the_next_layer(
    make_backend: MakeBackend,
) -> None:
    paged = make_paged([(1, 30), (1, 40), (1, 50)], num_layers=2)
    backend = make_backend()
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


def test_strided_queries_are_read_as_they_are(make_backend: MakeBackend) -> None:
    paged = make_paged([(1, 60), (1, 9), (13, 50)])
    want = attend(make_backend(16), paged)
    fused = torch.randn(paged.q.shape[0], 12, 16)
    fused[:, 2:6] = paged.q
    paged.q = fused[:, 2:6]
    assert_same(attend(make_backend(16), paged), want, 1e-6)


def test_inference_mode_is_no_different(make_backend: MakeBackend) -> None:
    with torch.inference_mode():
        paged = make_paged([(1, 60), (1, 9), (13, 50)])
        assert_same(attend(make_backend(16), paged), naive(paged, None, SCALE))


COLD = [(1, 1400), (1, 600), (40, 1100), (300, 700), (1, 200), (3, 900)]


@pytest.mark.parametrize("window", [None, 100, 700])
@pytest.mark.parametrize("superblocks", [1, 9])
def test_cold_contexts_are_attended_where_they_lie(
    make_backend: MakeBackend, superblocks: int, window: int | None
) -> None:
    paged = make_paged(COLD, block_size=16, num_layers=2, scatter=0.1)
    want = attend(ReferenceAttention(), paged, window, layer=1)
    cold = offload(paged, superblocks)
    assert any(s.cold for s in cold.batch.sequences)
    assert_same(attend(make_backend(), cold, window, layer=1), want, 3e-5)
    assert_same(attend(ReferenceAttention(), cold, window, layer=1), want, 3e-5)


@pytest.fixture(scope="module")
def native() -> NativeAttention:
    try:
        return NativeAttention(library.load())
    except library.NativeUnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("query_len", [1, 2, 40])
def test_where_keys_lie_changes_no_bit(native: NativeAttention, query_len: int) -> None:
    together, apart = (
        make_paged([(query_len, 1500)], scatter=scatter, num_heads=6, head_dim=64)
        for scatter in (0.0, 1.0)
    )
    for one, other in zip(attend(native, together), attend(native, apart), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("superblocks", [1, 9])
def test_the_tier_changes_no_bit(native: NativeAttention, superblocks: int) -> None:
    paged = make_paged(COLD, block_size=16, head_dim=20, scatter=0.1)
    for one, other in zip(
        attend(native, paged), attend(native, offload(paged, superblocks)), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("query_len", [1, 70])
def test_the_number_of_threads_changes_no_bit(native: NativeAttention, query_len: int) -> None:
    paged = make_paged([(query_len, 3000), (1, 700)], num_heads=6, head_dim=64, block_size=16)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = attend(native, paged)
        torch.set_num_threads(3)
        for one, other in zip(alone, attend(native, paged), strict=True):
            assert torch.equal(one, other)
    finally:
        torch.set_num_threads(before)


def test_neither_chunks_nor_mates_change_a_bit(native: NativeAttention) -> None:
    """Rows of chunks that fill more than the few lanes of the other path."""
    whole = make_paged([(150, 150)], scatter=0.1, block_size=8, num_heads=6)
    want, want_lse = attend(native, whole)
    (sequence,) = whole.batch.sequences
    for start, rows in ((0, 150), (0, 64), (64, 86), (100, 7), (140, 10)):
        slices = (SequenceSlice(0, rows, start + rows, sequence.runs),) * 1
        batch = AttentionBatch(slices, whole.batch.slots[start : start + rows])
        part = whole.q[start : start + rows]
        out, lse = native.attend(0, part, batch, whole.cache, window=None, scale=SCALE)
        assert torch.equal(out, want[start : start + rows])
        assert torch.equal(lse, want_lse[start : start + rows])


@pytest.mark.parametrize("window", [None, 2200])
@pytest.mark.parametrize("rows", [300, 209, 100, 50, 20, 4])
def test_no_chunk_changes_a_bit_behind_thousands_of_keys(
    native: NativeAttention, rows: int, window: int | None
) -> None:
    """The last rows of a chunk of 465, in smaller ones: fewer tasks than cores would like, and
    more than one range of keys."""
    whole = make_paged([(465, 5001)], num_heads=9, num_kv_heads=3, head_dim=64, block_size=16)
    want, want_lse = attend(native, whole, window)
    (sequence,) = whole.batch.sequences
    slices = (SequenceSlice(0, rows, sequence.context_len, sequence.runs),)
    batch = AttentionBatch(slices, whole.batch.slots[-rows:])
    out, lse = native.attend(0, whole.q[-rows:], batch, whole.cache, window=window, scale=SCALE)
    assert torch.equal(out, want[-rows:])
    assert torch.equal(lse, want_lse[-rows:])


@pytest.mark.parametrize("head_dim", [8, 20, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("query_len", [1, 30])
def test_every_head_size(native: NativeAttention, head_dim: int, query_len: int) -> None:
    paged = make_paged([(query_len, 600), (1, 5)], head_dim=head_dim, scatter=0.1)
    assert_same(attend(native, paged), naive(paged, None, SCALE), 3e-5)


@pytest.mark.parametrize("window", [None, 2500, 10])
def test_contexts_cut_along_their_keys(native: NativeAttention, window: int | None) -> None:
    paged = make_paged([(1, 5000), (20, 4500), (3, 2049)], block_size=16, head_dim=16)
    assert_same(attend(native, paged, window), attend(ReferenceAttention(), paged, window))


def test_scores_far_from_zero_keep_their_softmax(native: NativeAttention) -> None:
    paged = make_paged([(1, 300), (40, 300)], head_dim=16)
    paged.q *= 300
    got, want = attend(native, paged), naive(paged, None, SCALE)
    torch.testing.assert_close(got[0].double(), want[0], atol=1e-3, rtol=0)
    torch.testing.assert_close(got[1].double(), want[1], atol=0, rtol=1e-5)


def test_the_cpu_gets_the_kernels_that_fit(native: NativeAttention) -> None:
    kernels = library.load()
    assert isinstance(select("cpu", head_dim=64, library=kernels), NativeAttention)
    assert isinstance(select("cpu", dtype=torch.bfloat16, library=kernels), CpuAttention)
    assert isinstance(select("cpu", head_dim=512, library=kernels), CpuAttention)
    assert isinstance(select("meta"), ReferenceAttention)
    plain = select("cpu", head_dim=64, split_tokens=64)
    assert isinstance(plain, CpuAttention)
    assert plain.split_tokens == 64


def test_rows_are_stored_as_torch_stores_them(native: NativeAttention) -> None:
    layout = KVLayout(2, 3, 20, 4)
    ours = KVCache(layout, 60, "cpu", NativeWriter(library.load()))
    theirs = KVCache(layout, 60, "cpu")
    for cache in (ours, theirs):
        cache.storage.zero_()
    for rows in (1, 5, 150):
        slots = torch.randperm(240)[:rows]
        fused = torch.randn(rows, 9, 20)
        for cache in (ours, theirs):
            cache.write(1, slots, fused[:, 3:6], fused[:, 6:])
    assert torch.equal(ours.storage, theirs.storage)
