"""Planner, patches and tower together against transformers' processor and model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.checkpoints import VISION_FAMILIES, checkpoint, hf_model, hf_processor
from tests.vision_encoder.tower_oracle import tower_of
from vision_encoder.grid import planner, read_processor_files
from vision_encoder.preprocess import patchify

SIZES = ((100, 130), (60, 200), (64, 64))
"""(height, width) of pictures that share a prompt and a pass."""


def _picture(size: tuple[int, int], seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Noise at several scales, so that resizing leaves something to see."""
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (size[0] // 16 + 1, size[1] // 16 + 1, 3))
    coarse = coarse.repeat(16, 0).repeat(16, 1)[: size[0], : size[1]]
    fine = generator.integers(0, 256, (*size, 3))
    return ((3 * coarse + fine) // 4).astype(np.uint8)


def _theirs(folder: Path, pictures: Sequence[np.ndarray[Any, np.dtype[np.uint8]]]) -> list[Tensor]:
    """transformers' rows of all pictures of one prompt."""
    processor, model = hf_processor(folder).image_processor, hf_model(folder)
    images: Any = [Image.fromarray(picture) for picture in pictures]
    if folder.name in ("smolvlm", "idefics3"):
        # One prompt per picture, so that features come back per picture.
        images = [[image] for image in images]
    elif folder.name == "llava_onevision":
        # One prompt for all: whether an image is cut into tiles depends on its company.
        images = [images]
    inputs = processor(images=images, return_tensors="pt")
    out = model.model.get_image_features(**inputs, return_dict=True)
    levels = [out.pooler_output, *(getattr(out, "deepstack_features", None) or [])]
    return [torch.stack(image, dim=1) for image in zip(*levels, strict=True)]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_pictures_give_transformers_rows(
    family: str, count: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = checkpoint(family, tmp_path_factory.getbasetemp() / "towers")
    config = json.loads((folder / "config.json").read_text())
    pictures = [_picture(size, seed) for seed, size in enumerate(SIZES[:count])]
    plans = planner(config, read_processor_files(folder))
    tower = tower_of(folder, config, statistics=plans.pixels.normalization)
    sizes = [(picture.shape[1], picture.shape[0]) for picture in pictures]
    patched = [
        patchify(picture, plan, plans.pixels)
        for picture, plan in zip(pictures, plans.plan(sizes), strict=True)
    ]
    ours, theirs = tower.encode(patched), _theirs(folder, pictures)
    assert [rows.shape for rows in ours] == [rows.shape for rows in theirs]
    for mine, reference in zip(ours, theirs, strict=True):
        assert (mine - reference).abs().max() < 1e-4
