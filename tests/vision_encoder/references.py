"""transformers' image processors with the settings of real checkpoints, as oracles.

Owns: `reference(name)`: a model configuration, the processor's files as longlens reads them, and
the reference processor made from the same files; sizes that sit on rounding boundaries.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf
from transformers.models.smolvlm.image_processing_smolvlm import SmolVLMImageProcessor

from vision_encoder.grid import planner
from vision_encoder.plan import ImagePlanner


@dataclass(frozen=True)
class Reference:
    config: dict[str, Any]
    files: dict[str, Any]
    """What read_processor_files would give."""
    images: Any
    """The reference image processor."""
    step: int
    """Pixels at which plans change: tile edge or merged patch."""

    @property
    def planner(self) -> ImagePlanner:
        return planner(self.config, self.files)


def _idefics(image_class: Any, family: str, tile: int, longest: int, patch: int, scale: int) -> Any:
    vision = {"image_size": tile, "patch_size": patch}
    config = {"model_type": family, "vision_config": vision, "scale_factor": scale}
    images = image_class(size={"longest_edge": longest}, max_image_size={"longest_edge": tile})
    rows = (tile // patch // scale) ** 2
    return Reference(
        config, {"image_processor": images.to_dict(), "image_seq_len": rows}, images, tile
    )


def _qwen(family: str, patch: int, low: int, high: int, half: bool) -> Reference:
    config = {"model_type": family, "vision_config": {"patch_size": patch}}
    statistics = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3} if half else {}
    images = tf.Qwen2VLImageProcessor(
        size={"shortest_edge": low, "longest_edge": high}, patch_size=patch, **statistics
    )
    return Reference(config, images.to_dict(), images, 2 * patch)


def _llava(edge: int, **changes: Any) -> Reference:
    vision = {"model_type": "clip_vision_model", "image_size": edge, "patch_size": 14}
    kind = changes.pop("kind", tf.CLIPImageProcessor)
    images = kind(
        **{"size": {"shortest_edge": edge}, "crop_size": {"height": edge, "width": edge}} | changes
    )
    return Reference(
        {"model_type": "llava", "vision_config": vision}, images.to_dict(), images, edge
    )


def _onevision(tile: int, grid: int) -> Reference:
    pinpoints = [[tile * i, tile * j] for i in range(1, grid + 1) for j in range(1, grid + 1)]
    config = {
        "model_type": "llava_onevision",
        "vision_config": {"image_size": tile, "patch_size": 14},
        "image_grid_pinpoints": pinpoints,
    }
    images = tf.LlavaOnevisionImageProcessor(
        size={"height": tile, "width": tile}, image_grid_pinpoints=pinpoints
    )
    files = {"image_processor": images.to_dict(), "num_image_tokens": (tile // 14) ** 2}
    return Reference(config, files, images, tile)


_BUILDERS = {
    "smolvlm": lambda: _idefics(SmolVLMImageProcessor, "smolvlm", 512, 2048, 16, 4),
    "smolvlm_384": lambda: _idefics(SmolVLMImageProcessor, "smolvlm", 384, 1536, 14, 3),
    "smolvlm_tiny": lambda: _idefics(SmolVLMImageProcessor, "smolvlm", 64, 256, 16, 2),
    "idefics3": lambda: _idefics(tf.Idefics3ImageProcessor, "idefics3", 364, 1456, 14, 2),
    "qwen2_vl": lambda: _qwen("qwen2_vl", 14, 3136, 12845056, half=False),
    "qwen2_5_vl": lambda: _qwen("qwen2_5_vl", 14, 3136, 401408, half=False),
    "qwen3_vl": lambda: _qwen("qwen3_vl", 16, 65536, 1048576, half=True),
    "llava": lambda: _llava(336),
    "llava_padded": lambda: _llava(112, kind=tf.LlavaImageProcessor, do_pad=True),
    "llava_wide_crop": lambda: _llava(112, size={"shortest_edge": 80}),
    "llava_onevision": lambda: _onevision(384, 6),
    "llava_onevision_tiny": lambda: _onevision(72, 4),
}
NAMES = tuple(_BUILDERS)


@functools.cache
def reference(name: str) -> Reference:
    return _BUILDERS[name]()


def boundary_sizes(step: int, count: int, seed: int, most: int = 4000) -> list[tuple[int, int]]:
    """(width, height) pairs, most of them within two pixels of where a plan changes: multiples of
    the step and of its half, equal edges, near-equal edges, exact ratios; the rest anywhere."""
    draw = random.Random(seed)

    def near(center: float) -> int:
        return max(1, round(center) + draw.randint(-2, 2))

    def edge() -> int:
        kind = draw.random()
        if kind < 0.5:
            return near(step * draw.randint(1, max(1, most // step)) / draw.choice((1, 1, 2)))
        if kind < 0.7:
            return draw.randint(1, 2 * step)
        return draw.randint(1, most)

    sizes = [(1, 1), (2, 2), (27, 257), (257, 27), (1, 200), (200, 1)]
    while len(sizes) < count:
        width = edge()
        kind = draw.random()
        height = edge()
        if kind < 0.2:
            height = near(width)
        elif kind < 0.4:
            height = near(width * draw.choice((1 / 2, 2, 1 / 3, 3, 3 / 4, 4 / 3, 9 / 16, 16 / 9)))
        if max(width, height) <= 200 * min(width, height):
            sizes.append((width, height))
    return sizes


def ghost(width: int, height: int) -> torch.Tensor:
    """A picture without pixels: the reference's own shape arithmetic runs on it in no time."""
    return torch.empty(3, height, width, dtype=torch.uint8, device="meta")
