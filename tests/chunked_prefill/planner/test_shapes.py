"""Shapes against published parameter counts and against transformers' models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from chunked_prefill.planner.devices import PlanError
from chunked_prefill.planner.model_files import find_shape, read_shape
from chunked_prefill.planner.shapes import SHAPES
from chunked_prefill.planner.vision_shapes import read_vision_shape
from tests.checkpoints import TEXT_FAMILIES, VISION_FAMILIES, checkpoint


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # Counted in the files on the hub.
        ("llama-2-7b", 6_738_415_616),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("smollm2-135m", 134_515_008),
        ("qwen2.5-vl-7b", 7_615_616_512),  # Qwen2.5-7B, without the tower
    ],
)
def test_published_counts(name: str, parameters: int) -> None:
    assert SHAPES[name].num_parameters == parameters
    assert SHAPES[name].active_parameters == parameters


def test_deepseek_v3() -> None:
    """671B, of which 37B are active (arXiv 2412.19437)."""
    shape = SHAPES["deepseek-v3"]
    assert shape.num_parameters == pytest.approx(671e9, rel=0.001)
    assert shape.active_parameters == pytest.approx(37e9, rel=0.02)


EXPERTS: dict[str, tuple[dict[str, Any], float, float]] = {
    "qwen3-30b-a3b": (
        {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48}
        | {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
        | {"vocab_size": 151_936, "num_experts": 128, "num_experts_per_tok": 8}
        | {"moe_intermediate_size": 768},
        30.5e9,
        3.3e9,
    ),
    "mixtral-8x7b": (
        {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32_000}
        | {"num_local_experts": 8, "num_experts_per_tok": 2},
        46.7e9,
        12.9e9,
    ),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts(name: str) -> None:
    config, total, active = EXPERTS[name]
    shape = read_shape(name, config)
    assert shape.num_parameters == pytest.approx(total, rel=0.01)
    assert shape.active_parameters == pytest.approx(active, rel=0.02)


def test_deepseek_v3_from_its_configuration() -> None:
    raw = tf.DeepseekV3Config().to_dict()
    shape = read_shape("deepseek-v3", raw)
    assert shape.mla == SHAPES["deepseek-v3"].mla
    assert shape.moe == SHAPES["deepseek-v3"].moe


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.mark.parametrize("name", [*TEXT_FAMILIES, "llama_tied", "qwen2_window", "smolvlm"])
def test_folders_are_counted_as_they_are(name: str, root: Path) -> None:
    folder = checkpoint(name, root)
    shape = find_shape(str(folder))
    config = json.loads((folder / "config.json").read_text())
    auto = tf.AutoModelForImageTextToText if "vision_config" in config else tf.AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(tf.AutoConfig.from_pretrained(folder))
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    text = model.config.get_text_config()
    assert shape.num_kv_heads == text.num_key_value_heads
    kinds = getattr(text, "layer_types", None)
    if name == "mistral":
        assert shape.windows == (16,) * 3
    elif kinds and "sliding_attention" in kinds:
        wanted = tuple(12 if kind == "sliding_attention" else None for kind in kinds)
        assert shape.windows == wanted
    else:
        assert shape.windows == ()


def test_a_configuration_alone_is_counted_by_its_sizes(root: Path, tmp_path: Path) -> None:
    folder = checkpoint("qwen2", root)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    for path in (tmp_path, tmp_path / "config.json"):
        shape = find_shape(str(path))
        assert shape.stored_parameters is None
        assert shape.num_parameters == find_shape(str(folder)).num_parameters


def test_what_is_no_model_is_said(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"neither a folder with config\.json nor a known shape"):
        find_shape(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(PlanError, match="cannot be read as JSON"):
        find_shape(str(tmp_path))
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    with pytest.raises(PlanError, match="lacks num_attention_heads"):
        find_shape(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(PlanError, match="holds no JSON object"):
        find_shape(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads is 0; it must be positive"),
        ({"hidden_size": "wide"}, "impossible sizes"),
        ({"num_hidden_layers": -2}, "num_hidden_layers is -2"),
        ({"text_config": [1]}, "impossible sizes"),
        ({"rope_scaling": "yarn"}, "impossible sizes"),
        ({"num_key_value_heads": [8]}, "impossible sizes"),
    ],
)
def test_impossible_sizes_are_said(change: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        read_shape("model", EXPERTS["mixtral-8x7b"][0] | change)


@pytest.mark.parametrize(
    ("change", "length"),
    [
        ({}, None),
        ({"max_position_embeddings": 32_768}, 32_768),
        # Qwen2.5's way to 128k, by its model card: YaRN over the length before it.
        (
            {
                "max_position_embeddings": 32_768,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32_768,
                },
            },
            131_072,
        ),
    ],
)
def test_a_models_own_length(change: dict[str, Any], length: int | None) -> None:
    shape = read_shape("model", EXPERTS["mixtral-8x7b"][0] | change)
    assert shape.max_length == length


@pytest.mark.parametrize("text", ['{"a": 1}', '{"a": {"dtype": "F32"}}', "[1]", '{"a": []}'])
def test_headers_that_are_none_are_not_counted(text: str, root: Path, tmp_path: Path) -> None:
    folder = checkpoint("llama", root)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    data = len(text).to_bytes(8, "little") + text.encode()
    (tmp_path / "model.safetensors").write_bytes(data)
    assert find_shape(str(tmp_path)).stored_parameters is None


def test_what_each_token_of_a_prompt_is_multiplied_by() -> None:
    """8.03e9 of Llama 3.1 8B less embedding and head, 128,256 x 4,096 each, and the last norm."""
    shape = SHAPES["llama-3.1-8b"]
    assert shape.body_parameters == 8_030_261_248 - 2 * 128_256 * 4096 - 4096
    v3 = SHAPES["deepseek-v3"]
    assert v3.active_parameters - v3.body_parameters == 2 * 129_280 * 7168 + 7168
    assert v3.expert_parameters == 58 * 256 * 3 * 7168 * 2048


def test_damaged_weights_are_not_counted(root: Path, tmp_path: Path) -> None:
    folder = checkpoint("llama", root)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"\x00\x01")
    assert find_shape(str(tmp_path)).stored_parameters is None


@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_towers_against_transformers(name: str, root: Path) -> None:
    """Numbers of all matrices that a patch, or a row after merging, is multiplied by."""
    folder = checkpoint(name, root)
    shape = read_vision_shape(name, json.loads((folder / "config.json").read_text()))
    with torch.device("meta"):
        model = tf.AutoModelForImageTextToText.from_config(tf.AutoConfig.from_pretrained(folder))
    tower = merger = 0
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Conv2d | torch.nn.Conv3d):
            if any(word in path for word in ("merger", "connector", "multi_modal_projector")):
                merger += module.weight.numel()
            elif "visual" in path or "vision" in path:
                tower += module.weight.numel()
    assert (shape.parameters, shape.merger_parameters) == (tower, merger)
