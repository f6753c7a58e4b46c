"""Flags read from config.json, refusals, and the FLOPs of a plan."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.checkpoints import VISION_FAMILIES, checkpoint
from tests.vision_encoder.tower_oracle import sample, tower_of
from vision_encoder.config import FAMILIES, VisionConfig, VisionConfigError
from vision_encoder.patch_layout import Run, build_layout
from vision_encoder.plan import ImagePlan, Tile

_CLASSES = {
    "smolvlm": "SmolVLMConfig",
    "idefics3": "Idefics3Config",
    "qwen2_vl": "Qwen2VLConfig",
    "qwen2_5_vl": "Qwen2_5_VLConfig",
    "qwen3_vl": "Qwen3VLConfig",
    "llava": "LlavaConfig",
    "llava_onevision": "LlavaOnevisionConfig",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_keys_take_transformers_defaults(family: str) -> None:
    full = json.loads(getattr(tf, _CLASSES[family])().to_json_string(use_diff=False))
    assert VisionConfig.from_hf({"model_type": family}) == VisionConfig.from_hf(full)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("clip_vision_model", "CLIPVisionConfig"), ("siglip_vision_model", "SiglipVisionConfig")],
)
def test_absent_keys_of_llavas_vision_section(kind: str, name: str) -> None:
    full = getattr(tf, name)().to_dict()
    short = VisionConfig.from_hf({"model_type": "llava", "vision_config": {"model_type": kind}})
    assert short == VisionConfig.from_hf({"model_type": "llava", "vision_config": full})


def test_flags_of_the_released_models() -> None:
    """Values from the models' own config.json files on the hub."""
    qwen = VisionConfig.from_hf(
        {
            "model_type": "qwen2_5_vl",
            "vision_config": {
                "depth": 32,
                "hidden_act": "silu",
                "hidden_size": 1280,
                "intermediate_size": 3420,
                "num_heads": 16,
                "in_chans": 3,
                "out_hidden_size": 2048,
                "patch_size": 14,
                "spatial_merge_size": 2,
                "window_size": 112,
                "fullatt_block_indexes": [7, 15, 23, 31],
            },
        }
    )
    assert (qwen.vit.window, qwen.vit.head_dim, qwen.projector.inner) == (4, 80, 5120)
    assert [layer for layer in range(32) if not qwen.vit.windowed(layer)] == [7, 15, 23, 31]
    smol = VisionConfig.from_hf(
        {
            "model_type": "smolvlm",
            "scale_factor": 4,
            "text_config": {"hidden_size": 576, "model_type": "llama"},
            "vision_config": {
                "hidden_size": 768,
                "image_size": 512,
                "num_attention_heads": 12,
                "patch_size": 16,
            },
        }
    )
    assert (smol.vit.position_side, smol.projector.merge, smol.row_shape) == (32, 4, (1, 576))
    assert VisionConfig.from_hf({"model_type": "qwen3_vl"}).row_shape == (4, 3584)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"model_type": "llama"}, "model_type"),
        ({}, "model_type"),
        ({"model_type": "smolvlm", "vision_config": {"hidden_act": "relu6"}}, "hidden_act"),
        ({"model_type": "smolvlm", "vision_config": {"patch_size": [14, 16]}}, "patch_size"),
        ({"model_type": "smolvlm", "vision_config": {"num_attention_heads": 7}}, "vision_config"),
        ({"model_type": "smolvlm", "vision_config": [1]}, "vision_config"),
        ({"model_type": "smolvlm", "text_config": {"model_type": "x"}}, "text_config.hidden_size"),
        (
            {"model_type": "llava", "vision_config": {"model_type": "dinov2"}},
            "vision_config.model_type",
        ),
        ({"model_type": "llava", "vision_feature_layer": 25}, "vision_feature_layer"),
        (
            {"model_type": "llava", "vision_feature_select_strategy": "cls"},
            "vision_feature_select_strategy",
        ),
        (
            {"model_type": "llava_onevision", "vision_feature_select_strategy": "default"},
            "vision_feature_select_strategy",
        ),
        ({"model_type": "qwen2_5_vl", "vision_config": {"window_size": 14}}, "window_size"),
        ({"model_type": "qwen3_vl", "vision_config": {"depth": 20}}, "deepstack_visual_indexes"),
    ],
)
def test_unsupported_values_name_their_field(config: dict[str, Any], field: str) -> None:
    with pytest.raises(VisionConfigError) as caught:
        VisionConfig.from_hf(config)
    assert caught.value.field == field


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_flops_equal_those_that_torch_counts(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = checkpoint(family, tmp_path_factory.getbasetemp() / "towers")
    config = json.loads((folder / "config.json").read_text())
    # In half precision: torch's counter does not know the packed fp32 Linears.
    tower = tower_of(folder, config, dtype=torch.bfloat16)
    if family.startswith("qwen"):
        unit = 2 * config["vision_config"]["patch_size"]
        image = sample(config, [(5 * unit, 6 * unit)], 1, num_rows=30)
    else:
        edge = config["vision_config"]["image_size"]
        rows = {"llava": 16, "llava_onevision": 26}.get(family, 12)
        image = sample(config, [(edge, edge)] * (3 if rows == 12 else 1), 1, num_rows=rows)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        tower.encode([image])
    assert tower.config.flops(image.plan) == counter.get_total_flops()
    layers = (tower.config.layer_cost(image.plan, i).total for i in range(tower.num_layers))
    assert 0 < sum(layers) < tower.config.flops(image.plan)


def test_windows_make_large_images_cheaper() -> None:
    config = VisionConfig.from_hf({"model_type": "qwen2_5_vl"})

    def plan(side: int) -> ImagePlan:
        tile = Tile((side * 14,) * 2, 0, 0, side * 14, side * 14, (side, side))
        return ImagePlan("qwen2_5_vl", side * 14, side * 14, (tile,), (), side**2 // 4, side**2)

    small, large = (config.layer_cost(plan(side), 0) for side in (64, 128))
    assert large.attention_flops == 4 * small.attention_flops
    small, large = (config.layer_cost(plan(side), 7) for side in (64, 128))
    assert large.attention_flops == 16 * small.attention_flops


def test_equal_tiles_and_windows_form_runs() -> None:
    config = VisionConfig.from_hf({"model_type": "qwen2_5_vl"})
    # Windows of 4 x 4 cells, 64 patches: 5 x 9 cells are two whole ones, a column of 4 cells, a
    # row of 2 x 4 and a corner of 1; images are sorted by size.
    layout = build_layout(config, [[(10, 18)], [(8, 8)], [(8, 8)]])
    assert layout.tile_runs == (Run(0, 2, 64), Run(128, 1, 180))
    assert layout.window_runs == (
        Run(0, 4, 64),
        Run(256, 3, 16),
        Run(304, 1, 4),
    )
    assert layout.num_states == 308
    assert layout.tile_rows == ((45,), (16,), (16,))


def test_one_whole_tile_needs_no_permutation() -> None:
    config = VisionConfig.from_hf({"model_type": "llava"})
    layout = build_layout(config, [[(24, 24)]])
    assert layout.gather is None
    assert layout.rows is None
    assert layout.keep is not None
    assert layout.keep.tolist() == list(range(1, 577))


def test_config_imports_no_torch() -> None:
    code = "import sys, vision_encoder.config; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
