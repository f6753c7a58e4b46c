"""The decoder: hidden states in, hidden states out.

Owns: the mathematics of one decoder-only transformer, chosen by DecoderConfig's flags, over a flat
batch of T tokens of any number of sequences.
Does not own: requests, scheduling, KV and its layout, masks (all behind AttentionFn), which rows
become logits, sampling, or reading weights (loader.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm_engine.models.config import DecoderConfig
from lm_engine.models.linear import Linear
from lm_engine.models.rope import Rotation, inverse_frequencies, rotate, rotation

AttentionFn = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attention(layer, q [T, Hq, d], k [T, Hkv, d], v [T, Hkv, d]) -> [T, Hq, d].

It stores k and v and attends, with `config.scale` and the layer's window. q and k are rotated
already; all three may be strided views, valid only during the call.
"""


@dataclass(frozen=True, slots=True)
class Deepstack:
    """Further image embeddings for the first layers (Qwen3-VL)."""

    rows: Tensor
    """[M] int64, distinct: rows of the batch that hold image tokens."""
    values: Tensor
    """[num_deepstack, M, D]: added to those rows after layers 0..num_deepstack-1."""


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last dimension."""

    def __init__(
        self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.shape = (size,)
        self.eps = eps
        weight = torch.empty(size, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        floor = torch.tensor((size * eps) ** 0.5, dtype=torch.float32, device=device)
        self.floor: Tensor
        self.register_buffer("floor", floor, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and x.dtype == torch.float32:
            return self._by_length(x)
        return F.rms_norm(x, self.shape, self.weight, self.eps)

    def _by_length(self, x: Tensor) -> Tensor:
        """sqrt(mean(x²) + eps) = hypot(|x|, sqrt(n eps)) / sqrt(n), on the CPU in half of the time
        that F.rms_norm's seven passes take there (10 µs for one row of 576), as exactly."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = length.hypot_(self.floor).mul_(self.shape[0] ** -0.5)
        return torch.div(x, scale).mul_(self.weight)


class HeadNorm(nn.Module):
    """RMS norm of every head of q and k in one pass: each row of `weight` [heads, head_dim] is q's
    weight or k's."""

    def __init__(
        self,
        heads: int,
        head_dim: int,
        eps: float,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.shape = (head_dim,)
        self.eps = eps
        weight = torch.empty(heads, head_dim, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, qk: Tensor) -> Tensor:
        return F.rms_norm(qk, self.shape, None, self.eps).mul_(self.weight)


class DecoderLayer(nn.Module):
    """Attention and gated MLP, each pre-normed and added to the stream."""

    def __init__(
        self, config: DecoderConfig, index: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.index = index
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        self.rotated = config.rope_layers[index]
        self.rotate: Callable[[Tensor, Rotation], Tensor] = rotate
        self.activate = _ACTIVATIONS[config.activation]
        width, inner = config.hidden_size, config.intermediate_size
        q_rows = self.num_heads * self.head_dim
        qkv_rows = q_rows + 2 * self.num_kv_heads * self.head_dim

        def norm(size: int) -> RMSNorm:
            return RMSNorm(size, config.norm_eps, dtype=dtype, device=device)

        def linear(inputs: int, outputs: int, bias: bool) -> Linear:
            return Linear(inputs, outputs, bias=bias, dtype=dtype, device=device)

        self.attention_norm = norm(width)
        self.qkv = linear(width, qkv_rows, config.qkv_bias)
        self.head_norm: HeadNorm | None = None
        if config.qk_norm:
            heads = self.num_heads + self.num_kv_heads
            self.head_norm = HeadNorm(
                heads, self.head_dim, config.norm_eps, dtype=dtype, device=device
            )
        self.o = linear(q_rows, width, config.o_bias)
        self.mlp_norm = norm(width)
        self.gate_up = linear(width, 2 * inner, config.mlp_bias)
        self.down = linear(inner, width, config.mlp_bias)

    def forward(self, hidden: Tensor, by: Rotation, attention: AttentionFn) -> Tensor:
        """hidden [T, D] is changed in place and returned."""
        self.o.add_to(hidden, self._attend(self.attention_norm(hidden), by, attention))
        return self.down.add_to(hidden, self.gate_up.gated(self.mlp_norm(hidden), self.activate))

    def _attend(self, x: Tensor, by: Rotation, attention: AttentionFn) -> Tensor:
        rows = x.shape[0]
        qk_heads = self.num_heads + self.num_kv_heads
        heads = self.qkv(x).view(rows, qk_heads + self.num_kv_heads, self.head_dim)
        qk, v = heads[:, :qk_heads], heads[:, qk_heads:]
        if self.head_norm is not None:
            qk = self.head_norm(qk)
        if self.rotated:
            qk = self.rotate(qk, by)
        q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
        return attention(self.index, q, k, v).reshape(rows, -1)


class Decoder(nn.Module):
    """A decoder-only transformer over flat batches. Weights are allocated, not initialised.

    For inference only: no parameter asks for gradients, and layers work in place.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.config = config
        table = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        embedding = nn.Embedding(config.vocab_size, config.hidden_size, _weight=table)
        shared = embedding.weight.requires_grad_(False)
        self.embedding: nn.Module = embedding
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, dtype, device) for index in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, dtype=dtype, device=device)
        # A tied head is built on "meta", so that its own table never takes memory.
        home = "meta" if config.tied else device
        self.head = Linear(config.hidden_size, config.vocab_size, dtype=dtype, device=home)
        if config.tied:
            assert isinstance(shared, nn.Parameter)
            self.head.weight = shared
        frequencies = inverse_frequencies(config.rope, config.head_dim).to(device)
        self.frequencies: Tensor
        self.register_buffer("frequencies", frequencies, persistent=False)
        axes = None if config.rope.axes is None else torch.tensor(config.rope.axes, device=device)
        self.axes: Tensor | None
        self.register_buffer("axes", axes, persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        """Of hidden states."""
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    def fix_context(self, max_model_len: int) -> None:
        """Positions of all sequences stay below `max_model_len`; see RopeConfig.for_context."""
        self.config = self.config.for_context(max_model_len)
        frequencies = inverse_frequencies(self.config.rope, self.config.head_dim)
        self.frequencies = frequencies.to(self.frequencies.device)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] int64 -> [T, D], a new tensor that image embeddings may be written into."""
        embedded: Tensor = self.embedding(token_ids)
        return embedded

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        attention: AttentionFn,
        deepstack: Deepstack | None = None,
    ) -> Tensor:
        """[T, D] embeddings -> [T, D] after the final norm; `hidden` itself is left as it was.

        positions: [T] int64, or [3, T] for M-RoPE (t, h, w).
        """
        factor = self.config.rope.attention_factor
        by = rotation(positions, self.frequencies, self.axes, hidden.dtype, factor)
        stream = hidden.clone()
        for index, layer in enumerate(self.layers):
            stream = layer(stream, by, attention)
            if deepstack is not None and index < deepstack.values.shape[0]:
                stream.index_add_(0, deepstack.rows, deepstack.values[index].to(stream.dtype))
        normed: Tensor = self.norm(stream)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, D] rows of `forward` -> float32 [R, vocab_size]."""
        scores: Tensor = self.head(hidden)
        return scores.float()
