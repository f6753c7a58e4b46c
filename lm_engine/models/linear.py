"""One dense layer, small enough to be replaced.

Owns: Linear, y = x Wᵀ + b over rows. Quantised, packed and LoRA layers are other modules with the
same call; transforms put them in a decoder's place of this one, so the decoder never asks which
it has.
Does not own: how weights are read (loader.py) or laid out for a device (transforms).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
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
