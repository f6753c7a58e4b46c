"""Weights under every naming style, and what a wrong checkpoint says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from tests.checkpoints import VISION_FAMILIES, checkpoint, hf_model
from tests.vision_encoder.tower_oracle import STATISTICS, sample
from vision_encoder.config import VisionConfig
from vision_encoder.packed_vit import PIXEL_CENTRE
from vision_encoder.tower import VisionTower, load_tower
from vision_encoder.tower_weights import TowerLoadError, fold_patch_embedding


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def _read(family: str, root: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    folder = checkpoint(family, root)
    config = json.loads((folder / "config.json").read_text())
    return config, load_file(folder / "model.safetensors")


def _load(config: dict[str, Any], tensors: dict[str, Tensor], **options: Any) -> VisionTower:
    return load_tower(config, STATISTICS, frozenset(tensors), tensors.__getitem__, **options)


def _hub_llava(name: str) -> str:
    """LLaVA on the hub wraps CLIP and SigLIP in an inner `vision_model`."""
    return name.replace("vision_tower.", "vision_tower.vision_model.")


def _image(config: dict[str, Any]) -> Any:
    if "image_size" in config["vision_config"]:
        edge = config["vision_config"]["image_size"]
    else:
        edge = 4 * config["vision_config"]["patch_size"]
    rows = {"llava": 16, "llava_onevision": 26}.get(config["model_type"], 4)
    return sample(config, [(edge, edge)], seed=5, num_rows=rows)


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_every_naming_style_gives_the_same_rows(family: str, root: Path) -> None:
    config, saved = _read(family, root)
    module = dict(hf_model(checkpoint(family, root)).state_dict())
    bare = {name.removeprefix("model."): tensor for name, tensor in module.items()}
    styles = [saved, module, bare]
    if family.startswith("llava"):
        styles += [{_hub_llava(name): t for name, t in style.items()} for style in (saved, module)]
    assert len({frozenset(style) for style in styles}) >= 2
    image = _image(config)
    rows = [_load(config, style).encode([image])[0] for style in styles]
    assert all(torch.equal(rows[0], other) for other in rows[1:])


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_each_missing_tensor_is_named(family: str, root: Path) -> None:
    """Every tensor that the tower reads is needed, and nothing else of the checkpoint is read."""
    config, tensors = _read(family, root)
    read: list[str] = []

    def get(name: str) -> Tensor:
        read.append(name)
        return tensors[name]

    load_tower(config, STATISTICS, frozenset(tensors), get)
    assert len(read) == len(set(read))
    assert not [name for name in read if "language_model" in name or "text_model" in name]
    for name in read:
        rest = frozenset(tensors) - {name}
        with pytest.raises(TowerLoadError, match="1 missing") as caught:
            load_tower(config, STATISTICS, rest, tensors.__getitem__)
        assert caught.value.missing == (name,)


def test_misshapen_tensors_are_all_listed(root: Path) -> None:
    config, tensors = _read("qwen2_5_vl", root)
    patch = "visual.patch_embed.proj.weight"
    other = "visual.blocks.1.attn.qkv.bias"
    broken = tensors | {patch: tensors[patch][:, :2], other: tensors[other][:5]}
    with pytest.raises(TowerLoadError) as caught:
        _load(config, broken)
    assert set(caught.value.mismatched) == {
        (patch, (32, 3, 2, 14, 14), (32, 2, 2, 14, 14)),
        (other, (96,), (5,)),
    }
    assert "(5,), expected (96,)" in str(caught.value)


def test_a_text_model_lacks_everything(root: Path) -> None:
    config, tensors = _read("smolvlm", root)
    text = {name: tensor for name, tensor in tensors.items() if "text_model" in name}
    with pytest.raises(TowerLoadError, match=r"model\.vision_model\.embeddings.*\.\.\.") as caught:
        _load(config, text)
    assert "model.connector.modality_projection.proj.weight" in caught.value.missing


def test_progress_ends_at_the_total(root: Path) -> None:
    config, tensors = _read("qwen3_vl", root)
    seen: list[tuple[int, int]] = []
    tower = _load(config, tensors, dtype=torch.float16, progress=lambda *at: seen.append(at))
    expected = sum(p.numel() * p.element_size() for p in tower.parameters())
    assert seen[-1] == (expected, expected)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_packing_keeps_one_copy_of_the_weights(root: Path) -> None:
    config, tensors = _read("smolvlm", root)
    tower = _load(config, tensors)
    matrices = [name for name, p in tower.named_parameters() if p.ndim == 2]
    if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        assert matrices == ["vit.positions"]
    assert not any(p.requires_grad for p in tower.parameters())


def test_later_layers_of_llava_are_not_read(root: Path) -> None:
    """Features come from the last but one state, so the last layer has nothing to do."""
    config, _ = _read("llava", root)
    assert config["vision_config"]["num_hidden_layers"] == 3
    assert VisionConfig.from_hf(config).vit.layers == 2


@pytest.mark.parametrize("frames", [None, 2, 3])
def test_folded_patch_embedding_equals_the_convolution(frames: int | None) -> None:
    generator = torch.Generator().manual_seed(1)
    shape = (8, 3, 4, 4) if frames is None else (8, 3, frames, 4, 4)
    kernel = torch.randn(shape, generator=generator)
    bias = torch.randn(8, generator=generator)
    pixels = torch.randint(0, 256, (5, 3, 4, 4), generator=generator, dtype=torch.uint8)
    mean = torch.tensor(STATISTICS.mean)[:, None, None]
    normal = (pixels * STATISTICS.rescale - mean) / torch.tensor(STATISTICS.std)[:, None, None]
    if frames is None:
        theirs = F.conv2d(normal, kernel, bias).flatten(1)
    else:
        still = normal[:, :, None].expand(-1, -1, frames, -1, -1)
        theirs = F.conv3d(still, kernel, bias).flatten(1)
    weight, offset = fold_patch_embedding(kernel, bias, STATISTICS)
    ours = F.linear(pixels.flatten(1).double() - PIXEL_CENTRE, weight, offset)
    assert (ours - theirs).abs().max() < 1e-4
    assert (fold_patch_embedding(kernel, None, STATISTICS)[1] + bias - offset).abs().max() < 1e-12
