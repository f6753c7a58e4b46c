"""Random images as both sides see them, and transformers' features of them.

Owns: SampleImage (uint8 tiles with a plan), patches in each family's order, the oracle's calls.
Does not own: assertions. Bypasses processors on purpose: resizing is another module's business,
so tiles are drawn at random at the sizes the tower accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from vision_encoder.plan import ImagePlan, Normalization, Tile
from vision_encoder.tower import VisionTower, load_tower

# Tiny matrices on many threads only wait for each other.
torch.set_num_threads(1)

STATISTICS = Normalization(1 / 255, (0.48, 0.45, 0.40), (0.27, 0.26, 0.28))


@dataclass(frozen=True)
class SampleImage:
    """Satisfies tower.PatchedImage, and keeps the pixels for the oracle."""

    tiles: tuple[Tensor, ...]
    """uint8 [3, height, width] each."""
    patches: Tensor
    grids: tuple[tuple[int, int], ...]
    plan: ImagePlan

    def pixels(self) -> list[Tensor]:
        mean = torch.tensor(STATISTICS.mean)[:, None, None]
        std = torch.tensor(STATISTICS.std)[:, None, None]
        return [(tile * STATISTICS.rescale - mean) / std for tile in self.tiles]


def raster_patches(tile: Tensor, patch: int, merge: int = 1) -> Tensor:
    """[P, 3 * patch * patch], cells of merge x merge patches in raster order, patches within."""
    rows, columns = tile.shape[1] // patch, tile.shape[2] // patch
    tile = tile[:, : rows * patch, : columns * patch]
    split = tile.reshape(3, rows // merge, merge, patch, columns // merge, merge, patch)
    return split.permute(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, -1)


def sample(
    config: dict[str, Any],
    tile_sizes: Sequence[tuple[int, int]],
    seed: int,
    num_rows: int,
    plan: ImagePlan | None = None,
) -> SampleImage:
    """An image of random noise. `tile_sizes` are (height, width) in pixels; `plan` replaces the
    plan that says no more than the tiles."""
    generator = torch.Generator().manual_seed(seed)
    vision = config["vision_config"]
    patch = vision["patch_size"]
    qwen = config["model_type"].startswith("qwen")
    tiles, grids, plans, patches = [], [], [], []
    for height, width in tile_sizes:
        tile = torch.randint(0, 256, (3, height, width), generator=generator, dtype=torch.uint8)
        # A gradient as well, so that swapped rows and columns cannot look alike.
        tile[:, : height // 2] //= 2
        grid = (height // patch, width // patch)
        tiles.append(tile)
        grids.append(grid)
        patches.append(raster_patches(tile, patch, 2 if qwen else 1))
        plans.append(Tile((height, width), 0, 0, height, width, grid))
    plan = plan or ImagePlan(
        config["model_type"],
        tile_sizes[0][1],
        tile_sizes[0][0],
        tuple(plans),
        (num_rows,),
        num_rows,
        sum(h * w for h, w in grids),
    )
    return SampleImage(tuple(tiles), torch.cat(patches), tuple(grids), plan)


def tower_of(
    folder: Path,
    config: dict[str, Any],
    statistics: Normalization = STATISTICS,
    **options: Any,
) -> VisionTower:
    tensors = load_file(folder / "model.safetensors")
    return load_tower(config, statistics, frozenset(tensors), tensors.__getitem__, **options)


def hf_features(model: Any, images: Sequence[SampleImage]) -> list[Tensor]:
    """transformers' rows of each image, [rows, levels, D], all in one call."""
    family = model.config.model_type
    return _ORACLES[family](model, images)


def _idefics3(model: Any, images: Sequence[SampleImage]) -> list[Tensor]:
    most = max(len(image.tiles) for image in images)
    batch = []
    for image in images:
        pixels = image.pixels()
        padding = [torch.zeros_like(pixels[0])] * (most - len(pixels))
        batch.append(torch.stack(pixels + padding))
    out = model.model.get_image_features(torch.stack(batch), return_dict=True)
    return [rows[:, None] for rows in out.pooler_output]


def _qwen(model: Any, images: Sequence[SampleImage]) -> list[Tensor]:
    patch = model.config.vision_config.patch_size
    parts = []
    for image in images:
        flat = raster_patches(image.pixels()[0], patch, 2)
        # Two equal frames: [P, 3, T, patch, patch], as the processor repeats a still image.
        frames = flat.view(-1, 3, 1, patch, patch).expand(-1, -1, 2, -1, -1)
        parts.append(frames.reshape(len(flat), -1))
    grids = torch.tensor([(1, *image.grids[0]) for image in images])
    out = model.model.get_image_features(torch.cat(parts), grids, return_dict=True)
    deepstack = getattr(out, "deepstack_features", None) or []
    counts = [len(rows) for rows in out.pooler_output]
    levels = [torch.cat(tuple(level)) for level in (out.pooler_output, *deepstack)]
    return list(torch.split(torch.stack(levels, dim=1), counts))


def _llava(model: Any, images: Sequence[SampleImage]) -> list[Tensor]:
    pixels = torch.stack([image.pixels()[0] for image in images])
    out = model.model.get_image_features(pixels, return_dict=True)
    return [rows[:, None] for rows in out.pooler_output]


def _llava_onevision(model: Any, images: Sequence[SampleImage]) -> list[Tensor]:
    # An image of one tile stands for one of several in its prompt, which get no tiles; the
    # samples come as pairs of those, so that a group of two covers each pair.
    pixels = torch.cat([torch.stack(image.pixels()) for image in images])
    groups: list[int] = []
    while sum(groups) < len(images):
        groups.append(1 if len(images[sum(groups)].tiles) > 1 else 2)
    sizes = torch.tensor([(image.plan.height, image.plan.width) for image in images])
    out = model.model.get_image_features(
        pixels, sizes, batch_num_images=torch.tensor(groups), return_dict=True
    )
    return [rows[:, None] for rows in out.pooler_output]


_ORACLES: dict[str, Callable[[Any, Sequence[SampleImage]], list[Tensor]]] = {
    "smolvlm": _idefics3,
    "idefics3": _idefics3,
    "qwen2_vl": _qwen,
    "qwen2_5_vl": _qwen,
    "qwen3_vl": _qwen,
    "llava": _llava,
    "llava_onevision": _llava_onevision,
}
