"""One dense layer, small enough to be replaced.

Owns: LinearBase, what a decoder asks of a dense layer, and Linear, y = x Wᵀ + b over rows.
Quantised, packed and LoRA layers are other modules with the same calls; transforms put them in the
place of this one, so the decoder never asks which it has.
Does not own: how weights are read (loader.py) or laid out for a device (transforms).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LinearBase(nn.Module):
    """What a decoder asks of a dense layer; subclasses give the call itself, or more."""

    def add_to(self, stream: Tensor, x: Tensor) -> Tensor:
        """stream [R, out] += y(x), in place; returns it."""
        return stream.add_(self(x))

    def gated(self, x: Tensor, activate: Callable[[Tensor], Tensor]) -> Tensor:
        """activate(first half of y(x)) * second half: [R, in] -> [R, out / 2]."""
        gate, up = self(x).chunk(2, dim=-1)
        return activate(gate).mul_(up)


class Linear(LinearBase):
    """y[R, out] = x[R, in] Wᵀ + b. The weight [out, in] is allocated, not initialised."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias: nn.Parameter | None = None
        if bias:
            zeros = torch.empty(out_features, dtype=dtype, device=device)
            self.bias = nn.Parameter(zeros, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"
