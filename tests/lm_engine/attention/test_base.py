"""What a batch may look like, and how contexts are cut."""

from __future__ import annotations

import pytest
import torch

from lm_engine.attention.base import (
    AttentionBatch,
    Piece,
    SequenceSlice,
    Stretch,
    pieces,
    stretches,
)
from lm_engine.attention.dense import plan_rows
from tests.lm_engine.attention.paged import make_paged


def test_stretches_join_neighbours_and_keep_gaps() -> None:
    table = SequenceSlice(0, 1, 16, ((5, 2), (7, 1), (2, 1)))
    assert stretches(table, 4, 0, 16) == (Stretch(20, 12), Stretch(8, 4))
    assert stretches(table, 4, 3, 13) == (Stretch(23, 9), Stretch(8, 1))
    assert stretches(table, 4, 12, 14) == (Stretch(8, 2),)


def test_a_cold_beginning_comes_before_the_block_table() -> None:
    table = SequenceSlice(0, 1, 600, ((5, 22),), cold=(3, 1))
    assert stretches(table, 4, 0, 600) == (Stretch(0, 256, 3), Stretch(0, 256, 1), Stretch(20, 88))
    assert stretches(table, 4, 250, 300) == (Stretch(250, 6, 3), Stretch(0, 44, 1))
    assert stretches(table, 4, 512, 514) == (Stretch(20, 2),)
    with pytest.raises(ValueError, match="covers 600 tokens of a context of 601; it lacks 1 block"):
        stretches(table, 4, 0, 601)


def test_a_block_table_that_is_too_short_says_what_it_lacks() -> None:
    with pytest.raises(ValueError, match=r"covers 8 tokens of a context of 17; it lacks 3 blocks"):
        stretches(SequenceSlice(0, 1, 17, ((5, 2),)), 4, 0, 17)


def test_pieces_begin_at_multiples_of_the_split() -> None:
    sequence = SequenceSlice(0, 1, 70, ((0, 5), (9, 5)))
    assert list(pieces(sequence, 8, 32, 5, 70)) == [
        Piece(5, 27, (Stretch(5, 27),)),
        Piece(32, 32, (Stretch(32, 8), Stretch(72, 24))),
        Piece(64, 6, (Stretch(96, 6),)),
    ]


def test_rows_must_be_the_last_of_their_context() -> None:
    with pytest.raises(ValueError, match="query_len is 5 with context_len 4"):
        SequenceSlice(0, 5, 4, ((0, 1),))
    with pytest.raises(ValueError, match="query_len is 0"):
        SequenceSlice(0, 0, 4, ((0, 1),))


def test_slices_must_cover_the_rows_in_order() -> None:
    one, two = SequenceSlice(0, 2, 4, ((0, 1),)), SequenceSlice(2, 1, 4, ((1, 1),))
    AttentionBatch((one, two), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="starts at row 2 where row 0 is next"):
        AttentionBatch((two, one), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="cover 3 rows but there are 4 slots"):
        AttentionBatch((one, two), torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize(
    ("query_len", "context", "window", "expected"),
    [
        # (rows, keys, causal, masked) of each part
        (1, 100, None, [(1, 64, False, False), (1, 36, False, False)]),
        (1, 100, 20, [(1, 20, False, False)]),
        (10, 10, None, [(10, 10, True, False)]),
        (10, 100, None, [(10, 10, True, False), (10, 64, False, False), (10, 26, False, False)]),
        # Positions 90..99 with window 20: 71..79 are seen by some, 80..89 by all.
        (10, 100, 20, [(10, 10, True, False), (10, 10, False, False), (9, 9, False, True)]),
        # A window shorter than the chunk masks the diagonal too.
        (10, 100, 4, [(10, 10, False, True), (3, 3, False, True)]),
    ],
)
def test_a_chunk_meets_only_keys_that_some_row_sees(
    query_len: int,
    context: int,
    window: int | None,
    expected: list[tuple[int, int, bool, bool]],
) -> None:
    paged = make_paged([(query_len, context)])
    (group,) = plan_rows(paged.batch.sequences[0], paged.cache, 64, window)
    assert [
        (part.num_rows, sum(s.length for s in part.stretches), part.causal, part.mask is not None)
        for part in group.parts
    ] == expected


def test_a_long_chunk_under_a_window_is_cut_into_rows() -> None:
    paged = make_paged([(1000, 1200)], block_size=16)
    groups = list(plan_rows(paged.batch.sequences[0], paged.cache, 2048, 200))
    assert [group.num_rows for group in groups] == [200] * 5
    masked = sum(p.num_rows * sum(s.length for s in p.stretches) for g in groups for p in g.parts)
    assert masked <= 2 * 1000 * 200
