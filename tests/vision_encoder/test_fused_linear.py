"""Packed products equal plain ones for every number of rows, with few kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from vision_encoder.config import Activation
from vision_encoder.fused_linear import ROW_COUNTS, FusedLinear, row_counts


@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh", "silu", "quick_gelu"])
def test_every_number_of_rows(activation: Activation | None) -> None:
    linear = FusedLinear(24, 40, activation=activation)
    assert linear.weight is not None
    assert linear.bias is not None
    torch.nn.init.normal_(linear.weight)
    torch.nn.init.normal_(linear.bias)
    inputs = [torch.randn(rows, 24) for rows in (0, 1, 15, 16, 17, 300, 1024, 1025, 2500)]
    want = [linear(x) for x in inputs]
    plain = F.linear(inputs[4], linear.weight, linear.bias)
    if activation is None:
        torch.testing.assert_close(want[4], plain)
    linear.pack()
    for x, expected in zip(inputs, want, strict=True):
        torch.testing.assert_close(linear(x), expected, atol=1e-5, rtol=1e-5)


def test_pictures_of_all_sizes_need_few_kernels() -> None:
    for rows in range(1, 5000):
        counts = row_counts(rows)
        assert set(counts) <= set(ROW_COUNTS)
        assert sum(counts[:-1]) < rows <= sum(counts)
        if rows >= 128:
            assert sum(counts) <= rows + rows // 8
