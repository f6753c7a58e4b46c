"""A stage loaded from a tiny checkpoint's folder: its rows are the tower's, its refusals fixed."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from tests.checkpoints import checkpoint
from vision_encoder.config import VisionConfig
from vision_encoder.grid import planner, read_processor_files
from vision_encoder.link import EncodeJob
from vision_encoder.media import decode
from vision_encoder.plan import ImagePlan
from vision_encoder.preprocess import PatchedImage, patchify
from vision_encoder.stage import INTERNAL, VisionStage
from vision_encoder.stage_loading import load_stage
from vision_encoder.tower import load_tower


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint("qwen3_vl", tmp_path_factory.mktemp("stage"))


def load(folder: Path, storage: torch.Tensor) -> VisionStage[PatchedImage]:
    config = json.loads((folder / "config.json").read_text())
    with safe_open(folder / "model.safetensors", "pt") as weights:
        return load_stage(
            folder,
            config,
            frozenset(weights.keys()),
            weights.get_tensor,
            storage=storage,
            flop_budget=1e15,
        )


def storage_for(folder: Path, rows: int = 256) -> torch.Tensor:
    config = json.loads((folder / "config.json").read_text())
    return torch.full((rows, *VisionConfig.from_hf(config).row_shape), float("nan"))


def png(width: int, height: int, seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def plans_of(folder: Path, sizes: list[tuple[int, int]]) -> list[ImagePlan]:
    config = json.loads((folder / "config.json").read_text())
    return planner(config, read_processor_files(folder)).plan(sizes)


def test_rows_in_storage_are_those_of_the_tower(folder: Path) -> None:
    sizes = [(64, 96), (128, 64)]
    images = [png(*size, seed) for seed, size in enumerate(sizes)]
    plans = plans_of(folder, sizes)
    storage = storage_for(folder)
    vision = load(folder, storage)
    first = 0
    places = []
    for index, (data, plan) in enumerate(zip(images, plans, strict=True)):
        half = plan.num_rows // 2
        rows = ((first + 3, half), (first + 100, plan.num_rows - half))
        vision.submit(EncodeJob(data[-32:], 0, plan, rows, (0, index), data=data))
        places.append([r for begin, count in rows for r in range(begin, begin + count)])
        first += half
    results = []
    units = 0
    while vision.busy():
        results += vision.advance()
        units += 1
    assert [result.error for result in results] == [None, None]
    config = json.loads((folder / "config.json").read_text())
    assert units == 2 + VisionConfig.from_hf(config).vit.layers + 1

    pixels = planner(config, read_processor_files(folder)).pixels
    with safe_open(folder / "model.safetensors", "pt") as weights:
        names = frozenset(weights.keys())
        tower = load_tower(config, pixels.normalization, names, weights.get_tensor)
    for data, plan, place in zip(images, plans, places, strict=True):
        (expected,) = tower.encode([patchify(decode(data), plan, pixels)])
        assert (storage[place] - expected).abs().max() <= 1e-5
    untouched = sorted(set(range(len(storage))) - {row for place in places for row in place})
    assert storage[untouched].isnan().all()


def test_broken_bytes_get_a_fixed_text_and_other_bytes_are_our_fault(folder: Path) -> None:
    storage = storage_for(folder)
    vision = load(folder, storage)
    (plan,) = plans_of(folder, [(64, 96)])
    whole = png(64, 96, 0)
    rows = ((0, plan.num_rows),)
    vision.submit(EncodeJob(b"cut", 0, plan, rows, (0, 0), data=whole[:-64]))
    vision.submit(EncodeJob(b"other", 0, plan, rows, (0, 1), data=png(64, 64, 0)))
    results = {}
    while vision.busy():
        results.update({result.key: result for result in vision.poll()})
    assert results[b"cut"].error
    assert not results[b"cut"].internal
    assert "0x" not in results[b"cut"].error
    assert (results[b"other"].error, results[b"other"].internal) == (INTERNAL, True)
    assert storage.isnan().all()


def test_a_storage_of_another_model_is_refused_with_both_shapes(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"rows of \(1, 8\), this model's are \(\d"):
        load(folder, torch.zeros(16, 1, 8))
