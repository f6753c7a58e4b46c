"""Models by their sizes.

Owns: ModelShape, a table of well-known shapes, and their reading from a Hugging Face config.json.
Does not own: whether this server has code for a model (lm_engine decides), or plans.
Imports no torch.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from chunked_prefill.planner.devices import PlanError


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
    def active_parameters(self) -> int:
        """That one token is multiplied by: of experts only those chosen."""
        if self.moe is None:
            return self.num_parameters
        idle = self.moe.experts - self.moe.active
        layers = self.num_layers - self.moe.dense_layers
        return self.num_parameters - layers * idle * 3 * self.hidden_size * self.moe.width

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


_V3_MLA = MLAShape(latent=512, rope_dim=64, nope_dim=128, value_dim=128, query_latent=1536)
_V3 = ModelShape("deepseek-v3", 61, 7168, 18432, 128, 128, 128, 129_280, mla=_V3_MLA)
_70B = _llama("llama-3.1-70b", 80, 8192, 28_672, 64, 8, 128_256)
SHAPES: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _llama("llama-2-7b", 32, 4096, 11_008, 32, 32, 32_000),
        _llama("llama-3.1-8b", 32, 4096, 14_336, 32, 8, 128_256),
        _70B,
        replace(_70B, name="70b-mha", num_kv_heads=64),
        _llama("llama-3.1-405b", 126, 16_384, 53_248, 128, 8, 128_256),
        _llama("smollm2-135m", 30, 576, 1536, 9, 3, 49_152, tied=True),
        _llama("qwen2.5-vl-7b", 28, 3584, 18_944, 28, 4, 152_064, qkv_bias=True),
        replace(_V3, moe=MoEShape(256, 8, 2048, shared=1, dense_layers=3)),
    )
}
"""By name; the numbers are those of the config.json that each model was published with. 70b-mha is
what a 70B would be with as many KV heads as query heads."""

_BIASED = ("qwen2", "qwen2_vl", "qwen2_5_vl", "qwen2_moe", "qwen2_vl_text", "qwen2_5_vl_text")


def find_shape(model: str) -> ModelShape:
    """A named shape, or that of a folder with a config.json, or of the file itself.

    Raises PlanError when it is neither, or when a key is missing.
    """
    named = SHAPES.get(model.lower())
    if named is not None:
        return named
    path = Path(model).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise PlanError(
            f"{model!r} is neither a folder with config.json nor a known shape. Known are: "
            f"{', '.join(SHAPES)}."
        )
    try:
        config = json.loads(file.read_bytes())
    except ValueError as error:
        raise PlanError(f"{file} cannot be read as JSON: {error}") from error
    shape = read_shape(file.parent.name, config)
    return replace(shape, stored_parameters=_count_stored(file.parent))


def read_shape(name: str, config: Mapping[str, Any]) -> ModelShape:
    """The shape that a config.json states, or its text part. Raises PlanError for a missing key."""
    text: Mapping[str, Any] = config.get("text_config") or config

    def number(*names: str) -> int:
        for key in names:
            if text.get(key) is not None:
                return int(text[key])
        raise PlanError(f"config.json of {name} lacks {' or '.join(names)}")

    heads, hidden = number("num_attention_heads"), number("hidden_size")
    layers = number("num_hidden_layers")
    return ModelShape(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=number("intermediate_size"),
        num_heads=heads,
        num_kv_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=int(text.get("head_dim") or hidden // heads),
        vocab_size=number("vocab_size"),
        tied=bool(config.get("tie_word_embeddings") or text.get("tie_word_embeddings")),
        qkv_bias=bool(text.get("attention_bias")) or text.get("model_type") in _BIASED,
        windows=_windows(text, layers),
        moe=_moe(text),
        mla=_mla(text),
    )


def _windows(text: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    size, kinds = text.get("sliding_window"), text.get("layer_types")
    if not size or text.get("use_sliding_window") is False:
        return ()
    if kinds:
        sliding = [kind == "sliding_attention" for kind in kinds[:layers]]
    elif "use_sliding_window" in text:
        first = int(text.get("max_window_layers", layers))
        sliding = [index >= first for index in range(layers)]
    else:
        sliding = [True] * layers
    return tuple(int(size) if here else None for here in sliding)


def _moe(text: Mapping[str, Any]) -> MoEShape | None:
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    experts = next((int(text[key]) for key in names if text.get(key)), 0)
    if experts < 2:
        return None
    return MoEShape(
        experts,
        int(text.get("num_experts_per_tok") or 1),
        int(text.get("moe_intermediate_size") or text["intermediate_size"]),
        shared=int(text.get("n_shared_experts") or 0),
        dense_layers=int(text.get("first_k_dense_replace") or 0),
    )


def _mla(text: Mapping[str, Any]) -> MLAShape | None:
    if not text.get("kv_lora_rank"):
        return None
    return MLAShape(
        latent=int(text["kv_lora_rank"]),
        rope_dim=int(text["qk_rope_head_dim"]),
        nope_dim=int(text["qk_nope_head_dim"]),
        value_dim=int(text["v_head_dim"]),
        query_latent=int(text.get("q_lora_rank") or 0),
    )


def _count_stored(folder: Path) -> int | None:
    """Elements of the folder's safetensors files by their headers; None without any, or with one
    that cannot be read."""
    total = 0
    for file in folder.glob("*.safetensors"):
        try:
            with file.open("rb") as stream:
                (length,) = struct.unpack("<Q", stream.read(8))
                header = json.loads(stream.read(min(length, 100_000_000)))
        except (OSError, ValueError, struct.error):
            return None
        tensors = (about for key, about in header.items() if key != "__metadata__")
        total += sum(math.prod(about["shape"]) for about in tensors)
    return total or None
