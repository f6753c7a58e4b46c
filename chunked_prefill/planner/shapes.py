"""Models by their sizes.

Owns: ModelShape, and a table of well-known shapes. Does not own: their reading from files
(model_files.py), whether this server has code for a model (lm_engine decides), or plans.
Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class MoEShape:
    """Expert layers: `experts` of width `width`, `active` of them per token, `shared` always."""

    experts: int
    active: int
    width: int
    shared: int = 0
    dense_layers: int = 0
    """First layers that have an ordinary MLP instead."""


@dataclass(frozen=True, slots=True)
class MLAShape:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): what a token keeps is one latent
    and one rotated key, whatever the number of heads."""

    latent: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_latent: int = 0
    """0: queries are not compressed."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only language model."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool = False
    qkv_bias: bool = False
    windows: tuple[int | None, ...] = ()
    """Sliding window per layer in tokens, None for all of the past; empty: None everywhere."""
    moe: MoEShape | None = None
    mla: MLAShape | None = None
    max_length: int | None = None
    """Tokens of context that the model was made for; None: not said."""
    stored_parameters: int | None = None
    """Elements of all weight files, a vision tower included, where they were counted."""

    @property
    def attention_parameters(self) -> int:
        """Of one layer: the projections of queries, keys, values and output."""
        heads, width = self.num_heads, self.hidden_size
        if self.mla is None:
            q, kv = heads * self.head_dim, self.num_kv_heads * self.head_dim
            return width * (2 * q + 2 * kv) + (q + 2 * kv) * self.qkv_bias
        mla = self.mla
        per_head = mla.nope_dim + mla.rope_dim
        query = width * heads * per_head
        if mla.query_latent:
            query = mla.query_latent * (width + 1 + heads * per_head)
        down = width * (mla.latent + mla.rope_dim) + mla.latent
        up = mla.latent * heads * (mla.nope_dim + mla.value_dim)
        return query + down + up + heads * mla.value_dim * width

    @property
    def layer_parameters(self) -> int:
        """Of one dense layer: attention and gated MLP, without norms."""
        return self.attention_parameters + 3 * self.hidden_size * self.intermediate_size

    @property
    def num_parameters(self) -> int:
        """Of all weights: as counted in the files, else of the language model by its sizes."""
        if self.stored_parameters is not None:
            return self.stored_parameters
        width = self.hidden_size
        attention = self.num_layers * (self.attention_parameters + 2 * width)
        dense = self.num_layers if self.moe is None else self.moe.dense_layers
        mlp = dense * 3 * width * self.intermediate_size
        if self.moe is not None:
            experts = (self.moe.experts + self.moe.shared) * 3 * width * self.moe.width
            router = width * self.moe.experts
            mlp += (self.num_layers - dense) * (experts + router)
        return attention + mlp + width + self.vocab_size * width * (1 if self.tied else 2)

    @property
    def expert_parameters(self) -> int:
        """Of all experts that are chosen among, in all layers; 0 without any."""
        if self.moe is None:
            return 0
        layers = self.num_layers - self.moe.dense_layers
        return layers * self.moe.experts * 3 * self.hidden_size * self.moe.width

    @property
    def active_parameters(self) -> int:
        """That one token is multiplied by: of experts only those chosen."""
        if self.moe is None:
            return self.num_parameters
        idle = self.moe.experts - self.moe.active
        return self.num_parameters - self.expert_parameters // self.moe.experts * idle

    @property
    def body_parameters(self) -> int:
        """That each token of a prompt is multiplied by: the layers, without embedding, head and
        vision tower."""
        width = self.hidden_size
        ends = width + self.vocab_size * width * (1 if self.tied else 2)
        return replace(self, stored_parameters=None).active_parameters - ends

    @property
    def attention_width(self) -> int:
        """Numbers that all query heads of a layer have together; the mean of those that are scored
        and those that are summed."""
        if self.mla is not None:
            mla = self.mla
            return self.num_heads * (mla.nope_dim + mla.rope_dim + mla.value_dim) // 2
        return self.num_heads * self.head_dim


def _llama(
    name: str, layers: int, hidden: int, inner: int, heads: int, kv: int, vocab: int, **more: Any
) -> ModelShape:
    return ModelShape(name, layers, hidden, inner, heads, kv, hidden // heads, vocab, **more)


def _qwen3(name: str, layers: int, hidden: int, inner: int, heads: int, **more: Any) -> ModelShape:
    return ModelShape(
        name, layers, hidden, inner, heads, 8, 128, 151_936, max_length=262_144, **more
    )


_QWEN_7B = _llama(
    "qwen2.5-vl-7b", 28, 3584, 18_944, 28, 4, 152_064, qkv_bias=True, max_length=128_000
)
_V3_MLA = MLAShape(latent=512, rope_dim=64, nope_dim=128, value_dim=128, query_latent=1536)
_V3 = ModelShape(
    "deepseek-v3", 61, 7168, 18432, 128, 128, 128, 129_280, mla=_V3_MLA, max_length=163_840
)
_128K = 131_072
_70B = _llama("llama-3.1-70b", 80, 8192, 28_672, 64, 8, 128_256, max_length=_128K)
SHAPES: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _llama("llama-2-7b", 32, 4096, 11_008, 32, 32, 32_000, max_length=4096),
        _llama("llama-3.1-8b", 32, 4096, 14_336, 32, 8, 128_256, max_length=_128K),
        _70B,
        replace(_70B, name="70b-mha", num_kv_heads=64),
        _llama("llama-3.1-405b", 126, 16_384, 53_248, 128, 8, 128_256, max_length=_128K),
        _llama("smollm2-135m", 30, 576, 1536, 9, 3, 49_152, tied=True, max_length=8192),
        replace(_QWEN_7B, name="qwen2-vl-7b", max_length=32_768),
        _QWEN_7B,
        _qwen3("qwen3-vl-2b", 28, 2048, 6144, 16, tied=True),
        _qwen3("qwen3-vl-8b", 36, 4096, 12_288, 32),
        replace(_V3, moe=MoEShape(256, 8, 2048, shared=1, dense_layers=3)),
    )
}
"""By name; the numbers are those of the config.json that each model was published with. 70b-mha is
what a 70B would be with as many KV heads as query heads."""
