"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: one tile of the picture's own shape.

Owns: the arithmetic from (width, height) to the patch grid and the merged grid.
Does not own: M-RoPE positions (mrope.py), pixels (preprocess.py), the choice of a family
(grid.py). Imports no torch.

Both edges are rounded to a multiple of patch_size * merge_size; if the area leaves
[min, max] pixels, the picture is scaled into it. The prompt holds one token per merged block;
the marks around them are in the chat template.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vision_encoder.plan import ImagePlan, PixelConfig, PlanError, ResolutionLimit, Step, Tile
from vision_encoder.planning import (
    PlansEachAlone,
    check_aspect,
    check_limit,
    fingerprint,
    unsatisfiable,
)
from vision_encoder.processor_config import (
    BICUBIC,
    CLIP_STATISTICS,
    ProcessorConfig,
    ProcessorConfigError,
    square,
)

_DEFAULT_MIN_PIXELS = 56 * 56
_DEFAULT_MAX_PIXELS = 28 * 28 * 1280
_DEFAULT_PATCH = {"qwen2_vl": 14, "qwen2_5_vl": 14, "qwen3_vl": 16}


class QwenPlanner(PlansEachAlone):
    """Plans for `qwen2_vl`, `qwen2_5_vl` and `qwen3_vl` checkpoints; see plan.ImagePlanner."""

    placeholder = "<|image_pad|>"
    image_token = "<|image_pad|>"

    def __init__(self, family: str, config: Mapping[str, Any], processor: ProcessorConfig) -> None:
        self.family = family
        vision = config.get("vision_config") or {}
        patch = square(vision.get("patch_size", _DEFAULT_PATCH[family]), "vision_config.patch_size")
        merge = square(vision.get("spatial_merge_size", 2), "vision_config.spatial_merge_size")
        for key, model in (("patch_size", patch), ("merge_size", merge)):
            told = processor.image.get(key, model)
            if told != model:
                raise ProcessorConfigError(
                    f"the image processor's {key} is {told}, the vision model's is {model}; "
                    "the files come from different checkpoints"
                )
        self.pixels: PixelConfig = processor.pixels(CLIP_STATISTICS, BICUBIC, patch, merge)
        self._factor = patch * merge
        self._resizes = processor.flag("do_resize", True)
        self.min_pixels = _bound(processor, "min_pixels", "shortest_edge", _DEFAULT_MIN_PIXELS)
        self.max_pixels = _bound(processor, "max_pixels", "longest_edge", _DEFAULT_MAX_PIXELS)

    @property
    def floor_pixels(self) -> int:
        return self._factor**2

    def _plan_one(self, index: int, width: int, height: int, limit: ResolutionLimit) -> ImagePlan:
        size = self._fit(index, width, height, limit)
        patch, merge = self.pixels.patch_size, self.pixels.merge_size
        grid = (size[0] // patch, size[1] // patch)
        merged = (1, grid[0] // merge, grid[1] // merge)
        steps = (Step(size),) if self._resizes else ()
        tiles = (Tile(size, 0, 0, *size, grid, steps),)
        rows = merged[1] * merged[2]
        return ImagePlan(
            family=self.family,
            width=width,
            height=height,
            tiles=tiles,
            pieces=(rows,),
            num_rows=rows,
            num_patches=grid[0] * grid[1],
            merged_grid=merged,
            fingerprint=fingerprint(self.family, self.pixels, tiles, None),
        )

    def _fit(self, index: int, width: int, height: int, limit: ResolutionLimit) -> tuple[int, int]:
        """(height, width) in pixels that the tower sees."""
        check_aspect(index, width, height)
        check_limit(index, limit, self.floor_pixels, "one merged patch")
        low = max(self.min_pixels, limit.min_pixels or 1)
        high = min(self.max_pixels, limit.max_pixels or self.max_pixels)
        if limit.min_pixels is not None and limit.min_pixels > self.max_pixels:
            raise unsatisfiable(index, width, height, limit, self.max_pixels)
        if not self._resizes:
            return self._as_it_is(index, width, height, limit)
        return smart_resize(height, width, self._factor, min(low, high), high)

    def _as_it_is(
        self, index: int, width: int, height: int, limit: ResolutionLimit
    ) -> tuple[int, int]:
        if width % self._factor or height % self._factor:
            raise PlanError(
                index,
                f"this model's processor does not resize, so both edges must be multiples of "
                f"{self._factor}; the image has {width} x {height} pixels",
            )
        seen = width * height
        if seen > (limit.max_pixels or seen) or seen < (limit.min_pixels or seen):
            raise unsatisfiable(index, width, height, limit, seen)
        return height, width


def smart_resize(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """(height, width), multiples of `factor`, near the picture's shape and within the bounds.

    A picture thinner than half a factor, or bounds closer together than a factor's step, can
    leave the bounds by one step; every edge is at least one factor.
    """
    rows, cols = round(height / factor), round(width / factor)
    if rows * cols * factor**2 > max_pixels:
        shrink = math.sqrt((height * width) / max_pixels)
        rows = max(1, math.floor(height / shrink / factor))
        cols = max(1, math.floor(width / shrink / factor))
    elif rows * cols * factor**2 < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        rows = math.ceil(height * grow / factor)
        cols = math.ceil(width * grow / factor)
    return rows * factor, cols * factor


def _bound(processor: ProcessorConfig, old: str, part: str, default: int) -> int:
    """A pixel bound by its old name, else from `size` by either name, else the default."""
    value = processor.image.get(old)
    size = processor.image.get("size")
    if value is None and isinstance(size, Mapping):
        value = size.get(part, size.get(old))
    if value is None:
        return default
    if not isinstance(value, int) or value < 1:
        raise ProcessorConfigError(f"{old} (size.{part}) is {value!r}; it must be positive")
    return value
