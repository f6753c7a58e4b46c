"""LLaVA-1.5 and LLaVA-OneVision.

Owns: the arithmetic from (width, height) to tiles, rows and the anyres layout of these families.
Does not own: pixels (preprocess.py), the joining of features (projector.py), or the choice of a
family (grid.py). Imports no torch.

LLaVA-1.5 shows every picture as one square of fixed size. LLaVA-OneVision shows a request's only
picture as a base view plus the tiles of the best of its resolutions, but several pictures as one
padded square each: its token counts depend on the whole list.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from vision_encoder.plan import (
    AnyresLayout,
    ImagePlan,
    PixelConfig,
    PlanError,
    ResolutionLimit,
    Step,
    Tile,
)
from vision_encoder.planning import (
    PlansEachAlone,
    check_aspect,
    check_limit,
    fingerprint,
    numbered,
    unsatisfiable,
)
from vision_encoder.processor_config import (
    BICUBIC,
    CLIP_STATISTICS,
    IMAGENET_HALF,
    ProcessorConfig,
    ProcessorConfigError,
    square,
)

_ONEVISION_TILE = 384
_ONEVISION_PINPOINTS = tuple(
    (_ONEVISION_TILE * row, _ONEVISION_TILE * col) for row in range(1, 7) for col in range(1, 7)
)
_SHRINK_ABOVE = 1.1
"""Feature maps up to this much (per edge) above the allowance are left alone."""


class LlavaPlanner(PlansEachAlone):
    """Plans for `llava` checkpoints with a CLIP or SigLIP tower; see plan.ImagePlanner."""

    placeholder = "<image>"
    image_token = "<image>"

    def __init__(self, family: str, config: Mapping[str, Any], processor: ProcessorConfig) -> None:
        self.family = family
        vision = config.get("vision_config") or {}
        patch = square(vision.get("patch_size", 14), "vision_config.patch_size")
        edge = square(vision.get("image_size", 336), "vision_config.image_size")
        clip = str(vision.get("model_type", "clip_vision_model")).startswith("clip")
        kind = str(processor.image.get("image_processor_type") or ("CLIP" if clip else "Siglip"))
        siglip = kind.startswith("Siglip")
        statistics = IMAGENET_HALF if siglip else CLIP_STATISTICS
        self.pixels: PixelConfig = processor.pixels(statistics, BICUBIC, patch)
        self._processor = processor
        self._edge = edge
        self._shortest = processor.edge("size", "shortest_edge", None if siglip else 224)
        self._crops = processor.flag("do_center_crop", not siglip)
        self._pads = kind.startswith("Llava") and processor.flag("do_pad", False)
        side = edge // patch
        drops_first = config.get("vision_feature_select_strategy", "default") == "default"
        self._grid = (side, side)
        self._rows = side**2 + (1 if clip else 0) - (1 if drops_first else 0)

    @property
    def floor_pixels(self) -> int:
        return self._edge**2

    def _plan_one(self, index: int, width: int, height: int, limit: ResolutionLimit) -> ImagePlan:
        check_aspect(index, width, height)
        check_limit(index, limit, self.floor_pixels, "the one size that it takes")
        if limit.min_pixels is not None and limit.min_pixels > self.floor_pixels:
            raise unsatisfiable(index, width, height, limit, self.floor_pixels)
        tiles = (self._tile(index, width, height),)
        return ImagePlan(
            family=self.family,
            width=width,
            height=height,
            tiles=tiles,
            pieces=(self._rows,),
            num_rows=self._rows,
            num_patches=self._grid[0] * self._grid[1],
            fingerprint=fingerprint(self.family, self.pixels, tiles, None),
        )

    def _tile(self, index: int, width: int, height: int) -> Tile:
        steps: list[Step] = []
        size = (height, width)
        if self._pads and width != height:
            steps.append(_square_pad(size, self._processor))
            size = steps[-1].size
        if self._processor.flag("do_resize", True):
            size = self._resized(size)
            steps.append(Step(size))
        top = left = 0
        crop = size
        if self._crops:
            crop = (
                self._processor.edge("crop_size", "height", 224) or 0,
                self._processor.edge("crop_size", "width", 224) or 0,
            )
            canvas = (max(size[0], crop[0]), max(size[1], crop[1]))
            if canvas != size:
                steps.append(Step(canvas, ((canvas[0] - size[0]) // 2, (canvas[1] - size[1]) // 2)))
                size = canvas
            top, left = (size[0] - crop[0]) // 2, (size[1] - crop[1]) // 2
        if crop != (self._edge, self._edge):
            raise PlanError(
                index,
                f"this model's processor makes {crop[1]} x {crop[0]} pixels of an image of "
                f"{width} x {height}, but its tower takes {self._edge} x {self._edge}",
            )
        return Tile(size, top, left, *crop, self._grid, tuple(steps))

    def _resized(self, size: tuple[int, int]) -> tuple[int, int]:
        shortest = self._shortest
        if shortest is None:
            return (
                self._processor.edge("size", "height", 224) or 0,
                self._processor.edge("size", "width", 224) or 0,
            )
        height, width = size
        if width <= height:
            return int(shortest * height / width), shortest
        return shortest, int(shortest * width / height)


class LlavaOnevisionPlanner:
    """Plans for `llava_onevision` checkpoints (anyres_max_N); see plan.ImagePlanner."""

    placeholder = "<image>"
    image_token = "<image>"

    def __init__(self, family: str, config: Mapping[str, Any], processor: ProcessorConfig) -> None:
        self.family = family
        vision = config.get("vision_config") or {}
        patch = square(vision.get("patch_size", 14), "vision_config.patch_size")
        self._edge = square(vision.get("image_size", _ONEVISION_TILE), "vision_config.image_size")
        self.pixels: PixelConfig = processor.pixels(CLIP_STATISTICS, BICUBIC, patch)
        self._processor = processor
        self._side = self._edge // patch
        self._pinpoints = _pinpoints(config, processor, self._edge)
        self._allowance = _allowance(
            config.get("vision_aspect_ratio")
            or processor.own.get("vision_aspect_ratio")
            or "anyres_max_9"
        )
        size = processor.edge("size", "height", _ONEVISION_TILE) or processor.edge(
            "size", "shortest_edge", None
        )
        if size != self._edge:
            raise ProcessorConfigError(
                f"the processor makes tiles of {size} pixels, the tower takes {self._edge}"
            )
        if config.get("vision_feature_select_strategy", "full") != "full":
            raise ProcessorConfigError(
                "vision_feature_select_strategy must be 'full' for LLaVA-OneVision: its SigLIP "
                "tower has no class token to drop"
            )

    @property
    def floor_pixels(self) -> int:
        return self._edge**2

    def plan(
        self, sizes: list[tuple[int, int]], limits: list[ResolutionLimit] | None = None
    ) -> list[ImagePlan]:
        return [
            self._plan_one(index, width, height, limit, alone=len(sizes) == 1)
            for index, width, height, limit in numbered(sizes, limits)
        ]

    def _plan_one(
        self, index: int, width: int, height: int, limit: ResolutionLimit, alone: bool
    ) -> ImagePlan:
        check_aspect(index, width, height)
        check_limit(index, limit, self.floor_pixels, "one tile")
        area = self.floor_pixels
        canvas = self._best(width, height, limit) if alone else None
        seen = area if canvas is None else area + canvas[0] * canvas[1]
        if limit.min_pixels is not None and seen < limit.min_pixels:
            raise unsatisfiable(index, width, height, limit, seen)
        if canvas is None:
            return self._squared(width, height)
        return self._tiled(index, width, height, canvas)

    def _best(self, width: int, height: int, limit: ResolutionLimit) -> tuple[int, int] | None:
        """The resolution (height, width) that keeps most of the picture and wastes least, of
        those within the limit; None when only the base view is."""
        best: tuple[int, int] | None = None
        best_kept, best_wasted = 0, math.inf
        for rows, cols in self._pinpoints:
            seen = rows * cols + self.floor_pixels
            if limit.max_pixels is not None and seen > limit.max_pixels:
                continue
            if limit.min_pixels is not None and seen < limit.min_pixels:
                continue
            scale = min(cols / width, rows / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            wasted = rows * cols - kept
            if kept > best_kept or (kept == best_kept and wasted < best_wasted):
                best, best_kept, best_wasted = (rows, cols), kept, wasted
        return best

    def _squared(self, width: int, height: int) -> ImagePlan:
        """One padded square; its rows end with one newline row."""
        size = (height, width)
        steps: list[Step] = []
        if width != height:
            steps.append(_square_pad(size, self._processor))
        steps.append(Step((self._edge, self._edge)))
        tiles = (self._view(tuple(steps)),)
        return self._planned(width, height, tiles, self._side**2 + 1, None)

    def _tiled(self, index: int, width: int, height: int, canvas: tuple[int, int]) -> ImagePlan:
        edge = self._edge
        fitted = _fit_inside(height, width, canvas)
        corner = ((canvas[0] - fitted[0]) // 2, (canvas[1] - fitted[1]) // 2)
        steps = [Step(fitted)]
        if fitted != canvas:
            steps.append(Step(canvas, corner))
        grid = (self._side, self._side)
        rows, cols = canvas[0] // edge, canvas[1] // edge
        tiles = (
            self._view((Step((edge, edge)),)),
            *(
                Tile(canvas, row * edge, col * edge, edge, edge, grid, tuple(steps))
                for row in range(rows)
                for col in range(cols)
            ),
        )
        layout = self._layout(width, height, rows, cols)
        kept = layout.resample_to or layout.crop[2:]
        if kept[0] < 1 or kept[1] < 1:
            raise PlanError(
                index,
                f"the image has {width} x {height} pixels; nothing of so thin an image is left in "
                "this model's features, send one that is less stretched",
            )
        return self._planned(width, height, tiles, self._side**2 + kept[0] * (kept[1] + 1), layout)

    def _layout(self, width: int, height: int, tile_rows: int, tile_cols: int) -> AnyresLayout:
        """What of the joined feature map is picture, and the size it is shrunk to. The
        operations and their order are the reference's, as they decide the rounding."""
        rows, cols = tile_rows * self._side, tile_cols * self._side
        crop = (0, 0, rows, cols)
        if width / height > cols / rows:
            margin = (rows - int(round(height * (cols / width), 7))) // 2
            crop = (margin, 0, rows - 2 * margin, cols)
        else:
            margin = (cols - int(round(width * (rows / height), 7))) // 2
            crop = (0, margin, rows, cols - 2 * margin)
        ratio = math.sqrt(crop[2] * crop[3] / (self._allowance * self._side**2))
        shrunk = None
        if ratio > _SHRINK_ABOVE:
            shrunk = (int(crop[2] // ratio), int(crop[3] // ratio))
        return AnyresLayout(tile_rows, tile_cols, crop, shrunk)

    def _view(self, steps: tuple[Step, ...]) -> Tile:
        edge = self._edge
        return Tile((edge, edge), 0, 0, edge, edge, (self._side, self._side), steps)

    def _planned(
        self,
        width: int,
        height: int,
        tiles: tuple[Tile, ...],
        rows: int,
        layout: AnyresLayout | None,
    ) -> ImagePlan:
        return ImagePlan(
            family=self.family,
            width=width,
            height=height,
            tiles=tiles,
            pieces=(rows,),
            num_rows=rows,
            num_patches=len(tiles) * self._side**2,
            anyres=layout,
            fingerprint=fingerprint(self.family, self.pixels, tiles, layout),
        )


def _square_pad(size: tuple[int, int], processor: ProcessorConfig) -> Step:
    """Centred on a square filled with the mean colour."""
    height, width = size
    edge = max(size)
    mean = processor.channels("image_mean", CLIP_STATISTICS[0])
    red, green, blue = (int(value * 255) for value in mean)
    return Step((edge, edge), ((edge - height) // 2, (edge - width) // 2), (red, green, blue))


def _fit_inside(height: int, width: int, canvas: tuple[int, int]) -> tuple[int, int]:
    """(height, width) of the picture scaled to touch the canvas's edges from inside."""
    by_width, by_height = canvas[1] / width, canvas[0] / height
    if by_width < by_height:
        return min(math.ceil(height * by_width), canvas[0]), canvas[1]
    return canvas[0], min(math.ceil(width * by_height), canvas[1])


def _pinpoints(
    config: Mapping[str, Any], processor: ProcessorConfig, edge: int
) -> tuple[tuple[int, int], ...]:
    """Resolutions (height, width), in the order that decides ties."""
    told = processor.image.get("image_grid_pinpoints")
    model = config.get("image_grid_pinpoints")
    if told is not None and model is not None and [*map(tuple, told)] != [*map(tuple, model)]:
        raise ProcessorConfigError(
            "image_grid_pinpoints differ between the processor's files and config.json; the files "
            "come from different checkpoints"
        )
    found = told or model or _ONEVISION_PINPOINTS
    for height, width in found:
        if height % edge or width % edge or not height or not width:
            raise ProcessorConfigError(
                f"image_grid_pinpoints holds {height} x {width}, not a multiple of the tile {edge}"
            )
    return tuple((int(height), int(width)) for height, width in found)


def _allowance(name: str) -> int:
    """N of anyres_max_N: tiles' worth of features that a picture may keep."""
    match = re.fullmatch(r"anyres_max_([1-9]\d*)", name)
    if match is None:
        raise ProcessorConfigError(
            f"vision_aspect_ratio is {name!r}; supported is anyres_max_N, such as anyres_max_9"
        )
    return int(match[1])
