"""The tower's rows against transformers' image features, family by family, fp32."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoints import VISION_FAMILIES, checkpoint, hf_model, randomise
from tests.vision_encoder.tower_oracle import SampleImage, hf_features, sample, tower_of
from vision_encoder.grid import planner, read_processor_files
from vision_encoder.patch_layout import LayoutError
from vision_encoder.plan import ImagePlan
from vision_encoder.tower import VisionTower

TOLERANCE = 1e-4
"""Largest absolute difference to transformers, whose features have a standard deviation near 1."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


class Case:
    """One family's checkpoint with both towers and a list of images of different sizes."""

    def __init__(self, family: str, root: Path) -> None:
        self.folder = checkpoint(family, root)
        self.config = json.loads((self.folder / "config.json").read_text())
        self.hf = hf_model(self.folder)
        self.tower = tower_of(self.folder, self.config)
        self.images = _IMAGES[family](self.config, self.folder)


def _idefics3_images(config: dict[str, Any], folder: Path) -> list[SampleImage]:
    edge = config["vision_config"]["image_size"]
    return [sample(config, [(edge, edge)] * n, seed=n, num_rows=4 * n) for n in (1, 5, 3)]


def _qwen_images(config: dict[str, Any], folder: Path) -> list[SampleImage]:
    unit = 2 * config["vision_config"]["patch_size"]
    # Cells (down, across): whole windows, ragged in one and in both directions, a single row.
    cells = [(4, 4), (3, 5), (1, 7), (6, 2), (5, 5), (4, 4)]
    return [
        sample(config, [(h * unit, w * unit)], seed=i, num_rows=h * w)
        for i, (h, w) in enumerate(cells)
    ]


def _llava_images(config: dict[str, Any], folder: Path) -> list[SampleImage]:
    edge = config["vision_config"]["image_size"]
    return [sample(config, [(edge, edge)], seed=i, num_rows=16) for i in range(3)]


def _onevision_images(config: dict[str, Any], folder: Path) -> list[SampleImage]:
    plans = planner(config, read_processor_files(folder))
    edge = config["vision_config"]["image_size"]

    def planned(seed: int, plan: ImagePlan) -> SampleImage:
        return sample(config, [(edge, edge)] * len(plan.tiles), seed, plan.num_rows, plan)

    # Wide; tall with columns cut away; beyond 9 tiles and so resampled; and two of one prompt.
    alone = [plans.plan([size])[0] for size in ((144, 72), (50, 144), (270, 280))]
    pair = plans.plan([(100, 60), (60, 100)])
    assert [plan.anyres is None for plan in (*alone, *pair)] == [False] * 3 + [True] * 2
    assert alone[1].anyres is not None
    assert alone[1].anyres.crop[3] < 5
    assert alone[2].anyres is not None
    assert alone[2].anyres.resample_to is not None
    return [planned(i, plan) for i, plan in enumerate((*alone[:2], *pair, alone[2]))]


_IMAGES: dict[str, Callable[[dict[str, Any], Path], list[SampleImage]]] = {
    "smolvlm": _idefics3_images,
    "idefics3": _idefics3_images,
    "qwen2_5_vl": _qwen_images,
    "qwen3_vl": _qwen_images,
    "llava": _llava_images,
    "llava_onevision": _onevision_images,
}


@pytest.fixture(scope="module", params=VISION_FAMILIES)
def case(request: pytest.FixtureRequest, root: Path) -> Case:
    return Case(request.param, root)


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    assert [o.shape for o in ours] == [t.shape for t in theirs]
    return max((o - t).abs().max().item() for o, t in zip(ours, theirs, strict=True))


def test_packed_rows_equal_transformers(case: Case) -> None:
    theirs = hf_features(case.hf, case.images)
    assert difference(case.tower.encode(case.images), theirs) < TOLERANCE


def test_rows_do_not_depend_on_company(case: Case) -> None:
    together = case.tower.encode(case.images)
    alone = [case.tower.encode([image])[0] for image in case.images]
    backwards = case.tower.encode(case.images[::-1])[::-1]
    assert difference(together, alone) < 1e-5
    assert difference(together, backwards) < 1e-5


def test_layers_in_quanta_equal_one_go(case: Case) -> None:
    state = case.tower.begin(case.images)
    while not case.tower.run_layers(state, 1):
        assert state.next_layer < case.tower.num_layers
    assert difference(case.tower.finish(state), case.tower.encode(case.images)) == 0.0


def test_rows_tell_images_apart(case: Case) -> None:
    """Guards the oracle: features that barely depend on pixels would pass everything else."""
    image = case.images[0]
    negative = replace(image, patches=255 - image.patches)
    ours = case.tower.encode([image, negative])
    assert difference(ours[:1], ours[1:]) > 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_fp32(case: Case, dtype: torch.dtype) -> None:
    half = tower_of(case.folder, case.config, dtype=dtype)
    exact = torch.cat([rows.flatten() for rows in case.tower.encode(case.images)])
    rounded = torch.cat([rows.flatten() for rows in half.encode(case.images)])
    assert rounded.dtype == dtype
    error = (rounded.float() - exact).norm() / exact.norm()
    assert error < (0.03 if dtype == torch.bfloat16 else 0.004)


def test_no_images_give_no_rows(case: Case) -> None:
    assert case.tower.encode([]) == []


def test_foreign_plans_are_refused(case: Case) -> None:
    image = case.images[0]
    promised = replace(image.plan, num_rows=image.plan.num_rows + 1)
    with pytest.raises(LayoutError, match=f"promised {image.plan.num_rows + 1}"):
        case.tower.encode([replace(image, plan=promised)])
    with pytest.raises(LayoutError, match=r"torch\.uint8"):
        case.tower.encode([replace(image, patches=image.patches[1:])])
    with pytest.raises(LayoutError, match=r"torch\.uint8"):
        case.tower.encode([replace(image, patches=image.patches.float())])
    other = tuple(replace(tile, grid=(1, 1)) for tile in image.plan.tiles)
    with pytest.raises(LayoutError, match="plan's tiles"):
        case.tower.encode([replace(image, plan=replace(image.plan, tiles=other))])


def _shuffled(states: Tensor, grid: tuple[int, int], factor: int) -> Tensor:
    """Pixel shuffle written out: each cell's patches, row by row, side by side."""
    rows = []
    for r in range(0, grid[0], factor):
        for c in range(0, grid[1], factor):
            cell = [states[(r + i) * grid[1] + c + j] for i in range(factor) for j in range(factor)]
            rows.append(torch.cat(cell))
    return torch.stack(rows)


@pytest.mark.parametrize("grid", [(2, 4), (4, 2), (2, 2), (6, 8)])
def test_tiles_that_are_not_square(root: Path, grid: tuple[int, int]) -> None:
    """transformers' connector takes squares only, its ViT any grid: positions are bucketised."""
    case = Case("smolvlm", root)
    patch = case.config["vision_config"]["patch_size"]
    size = (grid[0] * patch, grid[1] * patch)
    image = sample(case.config, [size], seed=7, num_rows=grid[0] * grid[1] // 4)
    model = case.hf.model
    states = model.vision_model(image.pixels()[0][None]).last_hidden_state[0]
    theirs = model.connector.modality_projection(_shuffled(states, grid, 2))
    ours = case.tower.encode([case.images[1], image])[1]
    assert difference([ours[:, 0]], [theirs]) < TOLERANCE


def test_a_grid_that_does_not_divide_is_refused(root: Path) -> None:
    case = Case("smolvlm", root)
    image = sample(case.config, [(48, 64)], seed=1, num_rows=3)
    with pytest.raises(LayoutError, match="3 x 4 patches"):
        case.tower.encode([image])
    llava = Case("llava", root)
    with pytest.raises(LayoutError, match="learned for 4 x 4"):
        llava.tower.encode([sample(llava.config, [(56, 70)], seed=1, num_rows=20)])


def test_llava_with_siglip_and_several_feature_layers(root: Path) -> None:
    """Other flags of LLaVA: a SigLIP tower, concatenated layers, all states kept."""
    import transformers as tf

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    config = tf.LlavaConfig(
        vision_config=tf.SiglipVisionConfig(
            **sizes, num_hidden_layers=3, image_size=56, patch_size=14, vision_use_head=True
        ),
        text_config=tf.LlamaConfig(
            **sizes, num_hidden_layers=1, vocab_size=64, num_key_value_heads=2
        ),
        vision_feature_layer=[-1, 0, 2],
        vision_feature_select_strategy="full",
        projector_hidden_act="gelu_pytorch_tanh",
    )
    torch.manual_seed(3)
    model = tf.LlavaForConditionalGeneration(config).eval()
    folder = root / "llava_siglip"
    model.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    tower = tower_of(folder, saved)
    images = _llava_images(saved, folder)
    assert difference(tower.encode(images), hf_features(model, images)) < TOLERANCE


def test_llava_keeps_the_cls_state_when_asked(root: Path) -> None:
    case = Case("llava", root)
    config = case.config | {"vision_feature_select_strategy": "full"}
    case.hf.config.vision_feature_select_strategy = "full"
    tower: VisionTower = tower_of(case.folder, config)
    images = [replace(i, plan=replace(i.plan, num_rows=17)) for i in case.images]
    assert difference(tower.encode(images), hf_features(case.hf, images)) < TOLERANCE


def test_qwen2_vl_without_windows_or_gates(root: Path) -> None:
    import transformers as tf

    vision = {"depth": 3, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, "num_heads": 2}
    text = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    }
    model = tf.Qwen2VLForConditionalGeneration(
        tf.Qwen2VLConfig(vision_config=vision, text_config=text)
    ).eval()
    randomise(model, seed=4)
    folder = root / "qwen2_vl"
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    images = _qwen_images(config, folder)
    ours = tower_of(folder, config).encode(images)
    assert difference(ours, hf_features(model.requires_grad_(False), images)) < TOLERANCE
