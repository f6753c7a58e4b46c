"""Shapes against published parameter counts and against transformers' models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from chunked_prefill.planner.devices import PlanError
from chunked_prefill.planner.shapes import SHAPES, find_shape, read_shape
from tests.checkpoints import TEXT_FAMILIES, checkpoint


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


def test_damaged_weights_are_not_counted(root: Path, tmp_path: Path) -> None:
    folder = checkpoint("llama", root)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"\x00\x01")
    assert find_shape(str(tmp_path)).stored_parameters is None
