"""The supported decoder families, as a table.

Owns: what each Hugging Face class fixes in code and which defaults its configuration class fills
in, and where a vision-language configuration keeps its text part.
Does not own: reading a configuration (config.py). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """What the code of one Hugging Face class fixes, beyond the keys of its configuration."""

    defaults: Json
    theta: float = 10_000.0
    window: Literal["never", "always", "by_layer", "by_rope"] = "never"
    """Which layers `sliding_window` applies to."""
    reads_head_dim: bool = True
    reads_bias: bool = False
    reads_mlp_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    mrope: Literal["none", "sectioned", "interleaved"] = "none"
    mrope_section: tuple[int, int, int] = (16, 24, 24)
    deepstack: bool = False
    partial_rope: bool = False
    """Whether the class rotates only `partial_rotary_factor` of each head."""
    yarn_is_longrope: bool = False
    """Whether "yarn" in its files means longrope."""
    fused: bool = False
    """Whether q, k and v are one tensor, and gate and up another."""


def _defaults(
    vocab: int, hidden: int, inner: int, layers: int, heads: int, kv: int | None, positions: int
) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **({} if kv is None else {"num_key_value_heads": kv}),
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
    }


_QWEN = {
    **_defaults(151_936, 4096, 22_016, 32, 32, 32, 32_768),
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_QWEN2_VL = {
    **_defaults(152_064, 8192, 29_568, 80, 64, 8, 32_768),
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "max_window_layers": 80,
}

# The defaults are those of transformers' configuration classes: hub files often hold only the
# keys that differ from them.
FAMILIES: dict[str, Family] = {
    "llama": Family(
        _defaults(32_000, 4096, 11_008, 32, 32, None, 2048), reads_bias=True, reads_mlp_bias=True
    ),
    "mistral": Family(
        {**_defaults(32_000, 4096, 14_336, 32, 32, 8, 131_072), "sliding_window": 4096},
        window="always",
    ),
    "qwen2": Family(_QWEN, qkv_bias=True, window="by_layer"),
    "qwen3": Family({**_QWEN, "head_dim": 128}, qk_norm=True, reads_bias=True, window="by_layer"),
    "smollm3": Family(
        {
            **_defaults(128_256, 2048, 11_008, 36, 16, 4, 32_768),
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
        },
        theta=2_000_000.0,
        reads_bias=True,
        reads_mlp_bias=True,
        window="by_rope",
    ),
    "phi3": Family(
        {
            **_defaults(32_064, 3072, 8192, 32, 32, None, 4096),
            "rms_norm_eps": 1e-5,
            "original_max_position_embeddings": 4096,
        },
        window="always",
        partial_rope=True,
        yarn_is_longrope=True,
        fused=True,
    ),
    "qwen2_vl_text": Family(
        _QWEN2_VL,
        theta=1_000_000.0,
        qkv_bias=True,
        reads_head_dim=False,
        window="by_layer",
        mrope="sectioned",
    ),
    "qwen2_5_vl_text": Family(
        _QWEN2_VL,
        theta=1_000_000.0,
        qkv_bias=True,
        reads_head_dim=False,
        window="by_layer",
        mrope="sectioned",
    ),
    "qwen3_vl_text": Family(
        {**_defaults(151_936, 4096, 22_016, 32, 32, 32, 128_000), "head_dim": 128},
        theta=500_000.0,
        qk_norm=True,
        reads_bias=True,
        mrope="interleaved",
        mrope_section=(24, 20, 20),
        deepstack=True,
    ),
}

TEXT_OF = {
    "smolvlm": "llama",
    "idefics3": "llama",
    "llava": "llama",
    "llava_onevision": "qwen2",
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
}
"""Vision-language model_type -> model_type of its text part when the file does not say."""

ABSENT_TEXT: dict[str, Json] = {
    "smolvlm": {"rms_norm_eps": 1e-5},
    "idefics3": {"rms_norm_eps": 1e-5},
}
"""The text part of a file that has none, where that is not all defaults."""
