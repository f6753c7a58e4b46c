"""The merge: exact, indifferent to how keys are parted, and blind to parts without keys."""

from __future__ import annotations

import pytest
import torch

from lm_engine.attention.merge import merge, merge_into, merge_weights
from lm_engine.attention.reference import attend_dense


def parts_of(cuts: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(5, 4, 8, generator=generator)
    k = torch.randn(2, 40, 8, generator=generator) * 3
    v = torch.randn(2, 40, 8, generator=generator)
    outs, lses = [], []
    for start, end in zip([0, *cuts], [*cuts, 40], strict=True):
        visible = torch.ones(5, end - start, dtype=torch.bool)
        out, lse = attend_dense(q, k[:, start:end], v[:, start:end], visible, 0.5)
        outs.append(out)
        lses.append(lse)
    return outs, lses, q


@pytest.mark.parametrize("cuts", [[1], [20], [8, 16, 24, 32], list(range(1, 40))])
def test_parts_make_the_whole(cuts: list[int]) -> None:
    (want,), (want_lse,), _ = parts_of([])
    outs, lses, _ = parts_of(cuts)
    out, lse = merge(outs, lses)
    torch.testing.assert_close(out, want, atol=5e-6, rtol=0)
    torch.testing.assert_close(lse, want_lse, atol=5e-6, rtol=0)


def test_merging_in_steps_is_merging_at_once() -> None:
    outs, lses, _ = parts_of([8, 16, 24, 32])
    want, want_lse = merge(outs, lses)
    left, left_lse = merge(outs[:2], lses[:2])
    right, right_lse = merge(outs[2:], lses[2:])
    out, lse = merge([left, right], [left_lse, right_lse])
    torch.testing.assert_close(out, want, atol=5e-6, rtol=0)
    torch.testing.assert_close(lse, want_lse, atol=5e-6, rtol=0)

    running, running_lse = outs[0].clone(), lses[0].clone()
    for part, part_lse in zip(outs[1:], lses[1:], strict=True):
        merge_into(running, running_lse, part, part_lse)
    torch.testing.assert_close(running, want, atol=5e-6, rtol=0)
    torch.testing.assert_close(running_lse, want_lse, atol=5e-6, rtol=0)


def test_the_same_parts_in_the_same_order_are_bit_equal() -> None:
    outs, lses, _ = parts_of([3, 9, 30])
    first, second = merge(outs, lses), merge(outs, lses)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_a_part_without_keys_weighs_nothing_whatever_it_holds() -> None:
    outs, lses, _ = parts_of([20])
    want, want_lse = merge(outs, lses)
    empty = torch.full_like(outs[0], float("nan"))
    out, lse = merge([empty, *outs], [torch.full_like(lses[0], -torch.inf), *lses])
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)


def test_rows_that_see_nothing_are_zero() -> None:
    out = torch.randn(2, 3, 4)
    lse = torch.full((2, 3), -torch.inf)
    got, got_lse = merge([out, out], [lse, lse])
    assert torch.equal(got, torch.zeros(2, 3, 4))
    assert (got_lse == -torch.inf).all()
    weights, _ = merge_weights([lse, lse])
    assert torch.equal(weights, torch.zeros(2, 2, 3))

    blind, blind_lse = attend_dense(
        torch.randn(2, 3, 4),
        torch.randn(3, 5, 4),
        torch.randn(3, 5, 4),
        torch.zeros(2, 5, dtype=torch.bool),
        1.0,
    )
    assert torch.equal(blind, torch.zeros(2, 3, 4))
    assert (blind_lse == -torch.inf).all()


def test_merge_into_starts_from_nothing() -> None:
    outs, lses, _ = parts_of([20])
    out, lse = torch.zeros_like(outs[0]), torch.full_like(lses[0], -torch.inf)
    merge_into(out, lse, torch.zeros_like(out), lse.clone())
    assert (lse == -torch.inf).all()
    merge_into(out, lse, outs[0], lses[0])
    torch.testing.assert_close(out, outs[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(lse, lses[0], atol=1e-6, rtol=0)


def test_weights_are_the_share_of_each_part() -> None:
    _, lses, _ = parts_of([10, 20])
    weights, lse = merge_weights(lses)
    torch.testing.assert_close(weights.sum(0), torch.ones_like(lse), atol=1e-6, rtol=0)
    torch.testing.assert_close(weights[1], torch.exp(lses[1] - lse), atol=1e-5, rtol=0)


def test_extreme_scores_neither_overflow_nor_vanish() -> None:
    a, b = torch.ones(1, 1, 2), 2 * torch.ones(1, 1, 2)
    out, lse = merge([a, b], [torch.tensor([[1e4]]), torch.tensor([[-1e4]])])
    assert torch.equal(out, a)
    assert lse.item() == 1e4


def test_half_precision_parts_are_merged_in_float32() -> None:
    outs, lses, _ = parts_of([20])
    out, lse = merge([o.bfloat16() for o in outs], lses)
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    want = merge([o.bfloat16().float() for o in outs], lses)[0].bfloat16()
    assert torch.equal(out, want)
