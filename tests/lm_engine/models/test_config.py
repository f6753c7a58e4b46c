"""DecoderConfig.from_hf against transformers' configuration classes."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import transformers as tf

from lm_engine.models.config import DecoderConfig, supported_model_types
from lm_engine.models.errors import UnsupportedModelError

CLASSES = {
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "smollm3": "SmolLM3Config",
    "phi3": "Phi3Config",
    "llava": "LlavaConfig",
    "llava_onevision": "LlavaOnevisionConfig",
    "smolvlm": "SmolVLMConfig",
    "idefics3": "Idefics3Config",
    "qwen2_vl": "Qwen2VLConfig",
    "qwen2_5_vl": "Qwen2_5_VLConfig",
    "qwen3_vl": "Qwen3VLConfig",
}
MROPE = {"mrope_section": [16, 24, 24]}
HUB_FILES: dict[str, dict[str, Any]] = {
    # Shapes of files on the hub: transformers 4's keys, and only what differs from its defaults.
    "llama 3.1": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "mistral 0.1": {"model_type": "mistral", "sliding_window": 4096, "rms_norm_eps": 1e-5},
    "mistral 0.3": {"model_type": "mistral", "sliding_window": None, "rope_theta": 1e6},
    "linear": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4.0}},
    "qwen2.5": {
        "model_type": "qwen2",
        "num_hidden_layers": 36,
        "sliding_window": 32768,
        "use_sliding_window": False,
        "max_window_layers": 36,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "qwen2 windowed": {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 20},
    "qwen3": {"model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 16},
    "smollm3": {"model_type": "smollm3", "no_rope_layer_interval": 3, "num_hidden_layers": 6},
    "phi-3.5": {
        "model_type": "phi3",
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "sliding_window": 262144,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 48,
            "long_factor": [1.0 + i for i in range(48)],
        },
    },
    "llava 1.5": {
        "model_type": "llava",
        "text_config": {"model_type": "llama", "rms_norm_eps": 1e-5, "vocab_size": 32064},
        "vision_config": {"model_type": "clip_vision_model"},
    },
    "onevision tied": {
        "model_type": "llava_onevision",
        "text_config": {"model_type": "qwen2", "hidden_size": 896, "tie_word_embeddings": True}
        | {"num_attention_heads": 14, "num_key_value_heads": 2},
    },
    "qwen2.5-vl flat": {
        "model_type": "qwen2_5_vl",
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "rope_scaling": {"type": "mrope", **MROPE},
        "tie_word_embeddings": True,
        "vision_config": {"model_type": "qwen2_5_vl"},
    },
    "qwen3-vl": {
        "model_type": "qwen3_vl",
        "text_config": {
            "model_type": "qwen3_vl_text",
            "hidden_size": 2048,
            "head_dim": 128,
            "rope_theta": 5000000,
            "rope_scaling": {
                "mrope_interleaved": True,
                "mrope_section": [24, 20, 20],
                "rope_type": "default",
            },
        },
        "vision_config": {"deepstack_visual_indexes": [5, 11, 17]},
    },
}


def check_against(config: DecoderConfig, whole: Any) -> None:
    text = whole.get_text_config()
    heads = text.num_attention_heads
    assert config.hidden_size == text.hidden_size
    assert config.intermediate_size == text.intermediate_size
    assert config.num_layers == text.num_hidden_layers
    assert config.num_heads == heads
    assert config.num_kv_heads == text.num_key_value_heads
    assert config.head_dim == (getattr(text, "head_dim", None) or text.hidden_size // heads)
    assert config.vocab_size == text.vocab_size
    assert config.norm_eps == text.rms_norm_eps
    assert config.max_positions == text.max_position_embeddings
    assert config.rope.theta == text.rope_parameters["rope_theta"]
    assert config.rope.kind == text.rope_parameters["rope_type"]
    if config.rope.kind != "longrope":
        assert config.rope.factor == text.rope_parameters.get("factor", 1.0)
    assert config.activation == text.hidden_act
    assert config.tied == whole.tie_word_embeddings
    kinds = getattr(text, "layer_types", None)
    windows: tuple[int | None, ...] = (None,) * config.num_layers
    if text.model_type in ("mistral", "phi3"):
        windows = (text.sliding_window,) * config.num_layers
    elif kinds is not None:
        windows = tuple(text.sliding_window if k == "sliding_attention" else None for k in kinds)
    assert config.windows == windows
    if text.model_type == "smollm3":
        assert config.rope_layers == tuple(bool(flag) for flag in text.no_rope_layers)


@pytest.mark.parametrize("model_type", CLASSES)
def test_missing_keys_mean_the_class_defaults(model_type: str) -> None:
    config = DecoderConfig.from_hf({"model_type": model_type})
    check_against(config, getattr(tf, CLASSES[model_type])())


@pytest.mark.parametrize("title", HUB_FILES)
def test_hub_files_mean_what_transformers_reads(title: str) -> None:
    raw = HUB_FILES[title]
    fields = {key: value for key, value in raw.items() if key != "model_type"}
    whole = getattr(tf, CLASSES[raw["model_type"]])(**json.loads(json.dumps(fields)))
    check_against(DecoderConfig.from_hf(raw), whole)


def test_every_supported_type_is_held_against_a_class() -> None:
    assert set(supported_model_types()) == set(CLASSES)


def test_axes_of_both_mrope_kinds() -> None:
    sectioned = DecoderConfig.from_hf(HUB_FILES["qwen2.5-vl flat"]).rope.axes
    assert sectioned == (0,) * 16 + (1,) * 24 + (2,) * 24
    interleaved = DecoderConfig.from_hf(HUB_FILES["qwen3-vl"]).rope.axes
    assert interleaved is not None
    assert interleaved[:60] == (0, 1, 2) * 20
    assert interleaved[60:] == (0,) * 4


def test_deepstack_depth_is_read_from_the_vision_part() -> None:
    assert DecoderConfig.from_hf(HUB_FILES["qwen3-vl"]).num_deepstack == 3
    assert DecoderConfig.from_hf({"model_type": "qwen2_5_vl"}).num_deepstack == 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "gpt2"}, "'gpt2'.*Supported are:.*llama.*qwen3_vl"),
        ({"rope_scaling": {"type": "ntk-alpha"}}, "'ntk-alpha'.*llama3, yarn, longrope"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"hidden_act": "relu"}, "'relu'.*silu"),
        (
            {
                "model_type": "qwen3_vl",
                "text_config": {"rope_scaling": {"mrope_section": [8, 8, 8]}},
            },
            r"\[8, 8, 8\].*64",
        ),
        (
            {
                "model_type": "qwen2",
                "use_sliding_window": True,
                "layer_types": ["chunked_attention"] * 32,
            },
            "chunked_attention",
        ),
    ],
)
def test_unsupported_parts_are_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModelError, match=says):
        DecoderConfig.from_hf({"model_type": "llama", **changes})


def test_reading_a_configuration_needs_no_torch() -> None:
    code = (
        "import sys; from lm_engine.models.config import DecoderConfig; "
        "DecoderConfig.from_hf({'model_type': 'llama'}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
