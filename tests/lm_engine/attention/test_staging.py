"""Cold keys through the ring: the same bits, whatever the copies do."""

from __future__ import annotations

from ctypes import CDLL
from dataclasses import replace
from typing import Any

import pytest
import torch

from kv_offload.copy_manual import ManualCopyEngine
from kv_offload.tickets import Direction
from lm_engine.attention.base import AttentionBackend, AttentionBatch
from lm_engine.attention.cold import ColdWalk, Span, cold_pieces
from lm_engine.attention.cold_parts import StagedParts
from lm_engine.attention.cpu import CpuAttention
from lm_engine.attention.cpu_kernel import flash_cpu
from lm_engine.attention.native import NativeAttention
from lm_engine.attention.reference import ReferenceAttention
from lm_engine.native import library
from tests.lm_engine.attention.paged import Paged, make_paged, offload
from tests.lm_engine.attention.staged import HangingEngine, RandomEngine, Staged
from tests.lm_engine.attention.test_backends import COLD, SCALE, assert_same

LAYERS = 3
CHUNKS = [(40, 1100), (300, 1700), (64, 2900)]
FEW = [(1, 1400), (2, 600), (1, 2900), (1, 200)]
Answers = list[tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module")
def kernels() -> CDLL:
    try:
        return library.load()
    except library.NativeUnavailableError as error:
        pytest.skip(str(error))


def answers(
    backend: AttentionBackend, paged: Paged, batch: AttentionBatch | None = None
) -> Answers:
    batch = batch or paged.batch
    return [
        backend.attend(
            layer, paged.q, batch, paged.cache, window=paged.cache.layout.window(layer), scale=SCALE
        )
        for layer in range(LAYERS)
    ]


def make(lengths: list[tuple[int, int]], windows: tuple[int | None, ...] = (), **how: Any) -> Paged:
    return make_paged(
        lengths, block_size=16, scatter=0.1, num_layers=LAYERS, windows=windows, **how
    )


def assert_bits(got: Answers, want: Answers) -> None:
    for (out, lse), (want_out, want_lse) in zip(got, want, strict=True):
        assert torch.equal(out, want_out)
        assert torch.equal(lse, want_lse)


@pytest.mark.parametrize("windows", [(), (None, 700, 100), (1500, None, 1500)])
@pytest.mark.parametrize("superblocks", [1, 3, 9])
@pytest.mark.parametrize("lengths", [COLD, CHUNKS, FEW])
def test_streaming_changes_no_bit(
    kernels: CDLL,
    lengths: list[tuple[int, int]],
    superblocks: int,
    windows: tuple[int | None, ...],
) -> None:
    paged = make(lengths, windows, head_dim=16)
    want = answers(NativeAttention(kernels), paged)
    staged = Staged(offload(paged, 9), superblocks=superblocks)
    assert_bits(answers(NativeAttention(kernels, staged.ring), staged.paged, staged.batch), want)
    assert staged.ring.retries == 0
    assert staged.transfers.num_open == 0


@pytest.mark.parametrize("head_dim", [20, 64, 256])
def test_head_sizes_stream_as_well(kernels: CDLL, head_dim: int) -> None:
    paged = make([(1, 900), (40, 1100)], head_dim=head_dim)
    want = answers(NativeAttention(kernels), paged)
    staged = Staged(offload(paged, 3))
    assert_bits(answers(NativeAttention(kernels, staged.ring), staged.paged, staged.batch), want)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_stage_for_themselves(kernels: CDLL, threads: int) -> None:
    paged = make(FEW, num_heads=6, head_dim=64)
    want = answers(NativeAttention(kernels), paged)
    staged = Staged(offload(paged, 9))
    backend = NativeAttention(kernels, staged.ring)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_bits(answers(backend, staged.paged, staged.batch), want)
    finally:
        torch.set_num_threads(before)
    layer = staged.paged.cache.layout.bytes_per_token // LAYERS
    assert backend.bytes_staged == LAYERS * layer * sum(
        s.cold_tokens for s in staged.batch.sequences
    )
    assert staged.ring.bytes_staged == 0


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("failing", [0.0, 0.4])
def test_copies_may_end_in_any_order_or_fail(kernels: CDLL, seed: int, failing: float) -> None:
    paged = make(CHUNKS, (None, 700, 1500))
    want = answers(NativeAttention(kernels), paged)
    staged = Staged(offload(paged, 9), engine=RandomEngine(seed, failing), buffers=2 + seed % 3)
    backend = NativeAttention(kernels, staged.ring)
    for _ in range(2):
        assert_bits(answers(backend, staged.paged, replace(staged.batch)), want)
    assert (staged.ring.retries > 0) == (failing > 0)
    assert staged.transfers.num_open == 0
    staged.transfers.check_invariants()


def test_a_copy_that_hangs_is_made_again_and_may_end_late(kernels: CDLL) -> None:
    """KVO-5: every wait has a deadline, and nothing is reused while the copy may still write."""
    paged = make(CHUNKS)
    want = answers(NativeAttention(kernels), paged)

    def sleep(seconds: float) -> None:
        staged.now += seconds

    engine = HangingEngine(sleep)
    staged = Staged(offload(paged, 9), engine=engine)
    backend = NativeAttention(kernels, staged.ring)
    assert_bits(answers(backend, staged.paged, staged.batch), want)
    assert staged.now < 15, "only the first one is waited for"
    assert staged.transfers.failures[Direction.STREAM, "deadline"] == staged.buffers
    stuck = set(engine.under_way)
    assert stuck
    assert all(staged.transfers.is_open(ticket) for ticket in stuck)
    # They end in the middle of the next step, over buffers that nobody reads.
    for ticket in list(engine.under_way):
        engine.finish(ticket)
    assert_bits(answers(backend, staged.paged, replace(staged.batch)), want)
    staged.ring.check_invariants()


def test_a_broken_step_leaves_nothing_behind(kernels: CDLL) -> None:
    staged = Staged(offload(make(CHUNKS), 9), engine=ManualCopyEngine())
    walk = ColdWalk(staged.batch, staged.paged.cache.layout, staged.superblocks)
    staged.ring.take(walk, 0, None, 0)
    assert staged.transfers.num_open == 2
    staged.ring.reset()
    staged.ring.check_invariants()
    for ticket in (1, 2):
        assert staged.transfers.settled(ticket, 5.0)
    assert staged.transfers.num_open == 0
    assert staged.transfers.poll() == []
    assert_bits(
        answers(NativeAttention(kernels, staged.ring), staged.paged, staged.batch),
        answers(NativeAttention(kernels), staged.paged),
    )


@pytest.mark.parametrize("lengths", [[(40, 1100), (50, 1300)], [(1, 1100), (2, 1300)]])
def test_a_shared_beginning_is_copied_once(kernels: CDLL, lengths: list[tuple[int, int]]) -> None:
    staged = Staged(offload(make(lengths), 4), superblocks=3)
    first, second = staged.batch.sequences
    shared = replace(second, cold=first.cold, superblocks=first.superblocks)
    batch = AttentionBatch((first, shared), staged.batch.slots)
    want = answers(NativeAttention(kernels), staged.paged, replace(batch))
    backend = NativeAttention(kernels, staged.ring)
    assert_bits(answers(backend, staged.paged, batch), want)
    layer = staged.paged.cache.layout.bytes_per_token // LAYERS
    assert staged.ring.bytes_staged + backend.bytes_staged == LAYERS * layer * first.cold_tokens


@pytest.mark.parametrize("windows", [(), (None, 700, 100), (300, 1500, 1)])
@pytest.mark.parametrize("split", [256, 2048])
def test_torch_streams_too(split: int, windows: tuple[int | None, ...]) -> None:
    paged = make(COLD, windows)
    want = answers(ReferenceAttention(), paged)
    staged = Staged(offload(paged, 9))
    backend = CpuAttention(split, StagedParts(flash_cpu, staged.ring, split))
    for got, expected in zip(answers(backend, staged.paged, staged.batch), want, strict=True):
        assert_same(got, expected, 5e-5)
    assert staged.ring.bytes_staged > 0
    assert staged.transfers.num_open == 0


def test_pieces_are_in_order_of_position_and_even() -> None:
    staged = Staged(offload(make([(40, 1400), (5, 1900), (1, 100)]), 9))
    first, second, _ = staged.batch.sequences
    assert [len(s.cold) for s in staged.batch.sequences] == [5, 7, 0]
    pieces = cold_pieces(staged.batch, None, 5)
    assert [len(piece.slots) for piece in pieces] == [4, 4, 4]
    for index in (0, 1):
        spans = [span for piece in pieces for span in piece.spans if span.sequence == index]
        assert spans[0].start == 0
        assert [s.start for s in spans[1:]] == [s.end for s in spans[:-1]]
        assert spans[-1].end == staged.batch.sequences[index].cold_tokens
    assert sorted(slot for piece in pieces for slot in piece.slots) == sorted(
        (*first.cold, *second.cold)
    )
    for piece in pieces:
        assert [staged.host.slot(number) for number in piece.superblocks] == list(piece.slots)
        assert sorted(piece.places.values()) == [256 * i for i in range(len(piece.slots))]


def test_only_what_a_window_shows_is_staged() -> None:
    staged = Staged(offload(make([(40, 1400)]), 9))
    (piece,) = cold_pieces(staged.batch, 200, 9)
    assert piece.spans == (Span(0, 1024, 1280),)
    assert cold_pieces(staged.batch, 10, 9) == ()


def test_superblocks_without_numbers_are_refused() -> None:
    batch = offload(make([(40, 1400)]), 9).batch
    with pytest.raises(ValueError, match="has 5 cold slots, but 0 numbers"):
        cold_pieces(batch, None, 9)


def test_a_ring_of_one_buffer_is_refused() -> None:
    with pytest.raises(ValueError, match="ring of 1 buffers"):
        Staged(offload(make([(40, 1400)]), 9), buffers=1)


def test_the_ring_says_what_it_takes() -> None:
    staged = Staged(offload(make([(40, 1400)]), 9), superblocks=2, buffers=3)
    layer = staged.paged.cache.layout.bytes_per_token // LAYERS
    assert staged.ring.num_bytes == 4 * 2 * 256 * layer
