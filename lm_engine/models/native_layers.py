"""A decoder's layers on the kernels of native/, for float32 on the CPU.

Owns: the modules that stand in for Linear and RMSNorm, and `nativize`, which puts them into a
loaded decoder. Does not own: the kernels (native/*.cpp), reading weights (loader.py), or other
types and devices (packed_linear.py, or the decoder as it is).

There is one copy of every weight, in the kernels' order; the packed order serves a lone row at the
speed of memory and a chunk at that of the arithmetic units.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lm_engine.models.decoder import Decoder, DecoderLayer, RMSNorm
from lm_engine.models.linear import Linear, LinearBase
from lm_engine.models.rope import Rotation


class NativeKernels:
    """The library's functions on tensors. Every tensor is float32 on the CPU, and its last
    dimension is dense."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, long, integer = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
        self._linear = library.longlens_linear
        self._linear.argtypes = (
            *(pointer, long, long, long, pointer, long, pointer, pointer, long),
            *(integer, integer),
        )
        self._gated = library.longlens_gated
        self._gated.argtypes = (
            *(pointer, long, long, long, pointer, long, pointer, pointer),
            integer,
        )
        self._embed = library.longlens_embed
        self._embed.argtypes = (pointer, long, long, pointer, pointer, integer)
        self._rms_norm = library.longlens_rms_norm
        self._rms_norm.argtypes = (pointer, long, long, pointer, ctypes.c_float, pointer, integer)
        self._rotate = library.longlens_rotate
        self._rotate.argtypes = (pointer, *(long,) * 5, pointer, pointer, integer)
        self._pack = library.longlens_pack
        self._pack.argtypes = (pointer, long, long, pointer)
        library.longlens_panel.restype = long
        self.panel: int = library.longlens_panel()
        """Outputs of a panel."""

    def pack(self, weight: Tensor) -> Tensor:
        """[out, in] -> [panels, in, panel], zeros beyond `out`."""
        outputs, inputs = weight.shape
        packed = torch.empty(-(-outputs // self.panel), inputs, self.panel)
        # Named, so that it lives until the kernel has read it.
        dense = weight.contiguous()
        self._pack(dense.data_ptr(), inputs, outputs, packed.data_ptr())
        return packed

    def linear(
        self, x: Tensor, packed: Tensor, bias: Tensor | None, y: Tensor, *, add: bool
    ) -> None:
        """y [M, out] = (y, if `add`) + x [M, in] Wᵀ + bias."""
        self._linear(
            x.data_ptr(),
            x.stride(0),
            x.shape[0],
            x.shape[1],
            packed.data_ptr(),
            y.shape[1],
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            y.stride(0),
            add,
            torch.get_num_threads(),
        )

    def gated(self, x: Tensor, packed: Tensor, bias: Tensor | None, y: Tensor) -> None:
        """y [M, inner] = silu(x Gᵀ + g) * (x Uᵀ + u); panels of G and U stand in turn."""
        self._gated(
            x.data_ptr(),
            x.stride(0),
            x.shape[0],
            x.shape[1],
            packed.data_ptr(),
            y.shape[1],
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            torch.get_num_threads(),
        )

    def embed(self, ids: Tensor, packed: Tensor, y: Tensor) -> None:
        """y [M, in] = rows `ids` (int64 [M], dense, in range) of a packed weight."""
        self._embed(
            ids.data_ptr(),
            ids.shape[0],
            packed.shape[1],
            packed.data_ptr(),
            y.data_ptr(),
            torch.get_num_threads(),
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, y: Tensor) -> None:
        """y = x / sqrt(mean(x²) + eps) * weight by rows [M, D]."""
        self._rms_norm(
            x.data_ptr(),
            x.shape[0],
            x.shape[1],
            weight.data_ptr(),
            eps,
            y.data_ptr(),
            torch.get_num_threads(),
        )

    def rotate(self, heads: Tensor, by: Rotation) -> Tensor:
        """rope.rotate, in place: heads [M, H, d], dense but for the distance of rows."""
        cos, sin = by
        assert heads.stride(2) == 1
        assert heads.stride(1) == heads.shape[2]
        assert cos.is_contiguous()
        assert sin.is_contiguous()
        self._rotate(
            heads.data_ptr(),
            heads.stride(0),
            *heads.shape,
            cos.shape[-1],
            cos.data_ptr(),
            sin.data_ptr(),
            torch.get_num_threads(),
        )
        return heads


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class NativeLinear(LinearBase):
    """y = x Wᵀ + b on packed weights."""

    def __init__(self, linear: Linear, kernels: NativeKernels) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.kernels = kernels
        self.packed = kernels.pack(linear.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        """[M, in] -> [M, out]."""
        y = torch.empty(x.shape[0], self.out_features)
        self.kernels.linear(_dense(x), self.packed, self.bias, y, add=False)
        return y

    def add_to(self, stream: Tensor, x: Tensor) -> Tensor:
        """See LinearBase.add_to."""
        self.kernels.linear(_dense(x), self.packed, self.bias, stream, add=True)
        return stream

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


class NativeGated(nn.Module):
    """The first half of an MLP gated by SiLU: gate and up in one pass, only their product leaves
    the core's cache."""

    def __init__(self, linear: Linear, kernels: NativeKernels) -> None:
        super().__init__()
        self.in_features, self.inner = linear.in_features, linear.out_features // 2
        self._kernels = kernels
        gate, up = linear.weight.detach().chunk(2)
        self._packed = torch.stack((kernels.pack(gate), kernels.pack(up)), dim=1)
        self._bias: Tensor | None = None
        if linear.bias is not None:
            halves = [kernels.pack(part[:, None]) for part in linear.bias.detach().chunk(2)]
            self._bias = torch.stack(halves, dim=1).flatten()

    def gated(self, x: Tensor, activate: Callable[[Tensor], Tensor]) -> Tensor:
        """See LinearBase.gated; the activation is SiLU (`nativize` saw to it)."""
        y = torch.empty(x.shape[0], self.inner)
        self._kernels.gated(_dense(x), self._packed, self._bias, y)
        return y

    def extra_repr(self) -> str:
        return f"{self.in_features}, 2 x {self.inner}, bias={self._bias is not None}"


class NativeEmbedding(nn.Module):
    """Rows of the packed weight of a head that is tied to it."""

    def __init__(self, head: NativeLinear) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = head.out_features, head.in_features
        self._packed, self._kernels = head.packed, head.kernels

    def forward(self, ids: Tensor) -> Tensor:
        """[M] int64 -> [M, D]. Raises IndexError where an id is none of the table's."""
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.num_embeddings:
            raise IndexError(
                f"token ids reach from {ids.min()} to {ids.max()}; the table has "
                f"{self.num_embeddings} rows"
            )
        y = torch.empty(ids.shape[0], self.embedding_dim)
        self._kernels.embed(ids.contiguous(), self._packed, y)
        return y


class NativeRMSNorm(nn.Module):
    """See RMSNorm."""

    def __init__(self, norm: RMSNorm, kernels: NativeKernels) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps
        self._kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        self._kernels.rms_norm(x, self.weight, self.eps, y)
        return y


def can_nativize(decoder: Decoder) -> bool:
    """Whether `nativize` applies: float32 weights on the CPU."""
    return decoder.device.type == "cpu" and decoder.dtype == torch.float32


def nativize(decoder: Decoder, library: ctypes.CDLL) -> Decoder:
    """Replace every Linear and RMSNorm of a loaded decoder, in place, by native ones.

    Each weight is released as soon as it is packed (the peak is one matrix more); a tied head and
    its embedding go on sharing one. Answers change by rounding only.
    """
    if not can_nativize(decoder):
        weight = decoder.embedding.weight
        raise ValueError(
            f"native layers take float32 on the CPU, not {weight.dtype} {weight.device}"
        )
    kernels = NativeKernels(library)
    tied = decoder.head.weight is decoder.embedding.weight
    silu = decoder.config.activation == "silu"
    for module in list(decoder.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, RMSNorm):
                setattr(module, name, NativeRMSNorm(child, kernels))
            elif not isinstance(child, Linear):
                continue
            elif name == "gate_up" and silu:
                setattr(module, name, NativeGated(child, kernels))
            else:
                setattr(module, name, NativeLinear(child, kernels))
    for layer in decoder.layers:
        assert isinstance(layer, DecoderLayer)
        layer.rotate = kernels.rotate
    if tied:
        assert isinstance(decoder.head, NativeLinear)
        decoder.embedding = NativeEmbedding(decoder.head)
    return decoder
