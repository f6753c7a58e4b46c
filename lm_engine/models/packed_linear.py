"""Linears laid out for the CPU with torch's own kernels.

Owns: PackedLinear (weights in oneDNN's blocked order), PlainLinear (weights as they are, for a head
that shares them with the embedding), and `pack`, which puts them into a loaded decoder.
Does not own: reading weights (loader.py), quantised formats, other devices, or our own kernels
(native_layers.py), which come first where they can be compiled.

Which kernel is fastest depends on the number of rows M (measured with AVX2 and with AVX-512, by
benchmarks/kernels.py; ratios to F.linear, SmolLM2-135M's layers, 2 threads):

    M                           1      2      4      8      16     64     512
    oneDNN, packed weights      0.54   0.36   0.37   0.41   0.46   0.62   0.83
    oneDNN, plain weights       0.55   0.42   0.56   0.63   0.67   0.83   0.87
    W @ xᵀ by BLAS (M = 1: two
      equal columns)            0.42   0.22   0.44   0.68   0.71   0.72   -

BLAS reads a matrix once for two columns at the speed of memory, but its matrix-vector product is
far slower: a lone row is therefore sent as two. (bfloat16 has its matrix units behind oneDNN only.)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm_engine.models.decoder import Decoder
from lm_engine.models.linear import Linear, LinearBase

_PACK_FOR_ROWS = 16
"""oneDNN chooses a blocked order for this many rows. Every value from 4 on gives the same order,
which serves all row counts."""

_MOST_ROWS_FOR_BLAS = 4
"""Rows up to which W @ xᵀ is the fastest product on plain weights."""


class PackError(ValueError):
    """A decoder cannot be packed; the message says why and what to do instead."""


def _few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [M, in] Wᵀ + b for small M, as (W xᵀ)ᵀ."""
    rows = x.shape[0]
    columns = x.expand(2, -1).contiguous() if rows == 1 else x.contiguous()
    product = torch.mm(weight, columns.t())[:, :rows].t().contiguous()
    return product if bias is None else product.add_(bias)


def round_up_rows(rows: int) -> int:
    """The next number of rows that oneDNN is called with: every one up to 8, then multiples of 8,
    then eight per power of two (at most an eighth more work)."""
    step = 1 if rows <= 8 else max(8, 1 << ((rows - 1).bit_length() - 4))
    return -(-rows // step) * step


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [M, in] Wᵀ + b; `weight` is plain [out, in] or packed."""
    rows = x.shape[0]
    # oneDNN keeps the kernels that it generates for a number of rows for ever, about 0.5 MB per
    # matrix shape: prompts of all lengths would make a server grow without bound.
    if more := round_up_rows(rows) - rows:
        x = F.pad(x, (0, 0, 0, more))
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return product[:rows]


class PlainLinear(LinearBase):
    """y = x Wᵀ + b on an ordinary weight [out, in], which others may share."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """[M, in] -> [M, out]."""
        if x.shape[0] == 0:
            return x.new_empty(0, self.out_features)
        if x.shape[0] <= _MOST_ROWS_FOR_BLAS and x.dtype == torch.float32:
            return _few_rows(x, self.weight, self.bias)
        return _onednn(x, self.weight, self.bias)


class PackedLinear(LinearBase):
    """y = x Wᵀ + b on weights in oneDNN's order, which are opaque: there is no storage to save,
    move or index."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        weight = linear.weight.detach()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_FOR_ROWS)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """[M, in] -> [M, out]."""
        if x.shape[0] == 0:
            return x.new_empty(0, self.out_features)
        return _onednn(x, self._packed, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


def can_pack(decoder: Decoder) -> bool:
    """Whether `pack` applies: weights on the CPU, in a type that this CPU multiplies natively."""
    if decoder.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if decoder.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return decoder.dtype == torch.float32


def pack(decoder: Decoder) -> Decoder:
    """Replace every Linear of a loaded decoder, in place, by one laid out for this CPU.

    Each Linear's own weight is released as soon as it is packed (the peak is one matrix more), and
    a tied head goes on sharing the embedding's. Answers change by rounding only. Raises PackError
    where `can_pack` is false.
    """
    if not can_pack(decoder):
        raise PackError(
            f"cannot pack {decoder.dtype} weights on {decoder.device}; packing needs the CPU and "
            "float32, or bfloat16 if the CPU multiplies it natively. Leave the decoder as it is."
        )
    shared = decoder.embedding.weight
    for module in list(decoder.modules()):
        for name, child in list(module.named_children()):
            if not isinstance(child, Linear):
                continue
            if child.weight is shared:
                setattr(module, name, PlainLinear(child.weight, child.bias))
            else:
                setattr(module, name, PackedLinear(child))
    return decoder
