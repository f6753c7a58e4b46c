"""Shapes from the files that models are published as.

Owns: the reading of a folder with a Hugging Face config.json, and the counting of its weight files.
Does not own: what a shape means (shapes.py). Imports no torch.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from chunked_prefill.planner.devices import PlanError
from chunked_prefill.planner.shapes import SHAPES, MLAShape, ModelShape, MoEShape

_BIASED = ("qwen2", "qwen2_vl", "qwen2_5_vl", "qwen2_moe", "qwen2_vl_text", "qwen2_5_vl_text")


def find_shape(model: str) -> ModelShape:
    """A named shape, or that of a folder with a config.json, or of the file itself.

    Raises PlanError when it is neither, or when a key is missing.
    """
    file = config_file(model)
    if file is None:
        return SHAPES[model.lower()]
    shape = read_shape(file.resolve().parent.name, read_config(file))
    return replace(shape, stored_parameters=_count_stored(file.parent))


def config_file(model: str) -> Path | None:
    """The config.json of a folder, or the file itself; None for a named shape. Raises PlanError
    when it is none of them."""
    if model.lower() in SHAPES:
        return None
    path = Path(model).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise PlanError(
            f"{model!r} is neither a folder with config.json nor a known shape. Known are: "
            f"{', '.join(SHAPES)}."
        )
    return file


def read_config(file: Path) -> dict[str, Any]:
    """A config.json. Raises PlanError when it is no JSON object."""
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise PlanError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise PlanError(f"{file} holds no JSON object; give a model's config.json")
    return config


def read_shape(name: str, config: Mapping[str, Any]) -> ModelShape:
    """The shape that a config.json states, or its text part. Raises PlanError for a missing key,
    and for one that is no number a model could have."""
    text: Mapping[str, Any] = config.get("text_config") or config
    try:
        return _shape(name, config, text)
    except (TypeError, ValueError, ZeroDivisionError, AttributeError, KeyError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(f"config.json of {name} states impossible sizes: {error}") from error


def _shape(name: str, config: Mapping[str, Any], text: Mapping[str, Any]) -> ModelShape:
    def number(*names: str) -> int:
        for key in names:
            if text.get(key) is not None:
                value = int(text[key])
                if value < 1:
                    raise PlanError(f"config.json of {name}: {key} is {value}; it must be positive")
                return value
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
        max_length=_max_length(text),
    )


def _max_length(text: Mapping[str, Any]) -> int | None:
    """max_position_embeddings, or what YaRN's factor makes of the length before it."""
    told = text.get("max_position_embeddings")
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    before = rope.get("original_max_position_embeddings")
    stretched = int(float(rope.get("factor") or 1) * int(before)) if before else 0
    return max(int(told or 0), stretched) or None


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
            tensors = (about for key, about in header.items() if key != "__metadata__")
            total += sum(math.prod(about["shape"]) for about in tensors)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, struct.error):
            return None
    return total or None
