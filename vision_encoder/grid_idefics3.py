"""Idefics3 and SmolVLM: tiles of one size, a global view at the end.

Owns: the arithmetic from (width, height) to tiles, rows and prompt pieces of these two families.
Does not own: pixels (preprocess.py) or the choice of a family (grid.py). Imports no torch.

The longest edge is scaled to `size.longest_edge`, both edges are then stretched to multiples of
the tile's edge, the result is cut into tiles row by row, and it is stretched once more to one
tile for the global view. A picture that ends up as one tile has only that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from vision_encoder.plan import (
    ImagePlan,
    PixelConfig,
    PlanError,
    ResolutionLimit,
    Step,
    Tile,
)
from vision_encoder.planning import PlansEachAlone, check_limit, fingerprint, unsatisfiable
from vision_encoder.processor_config import (
    IMAGENET_HALF,
    LANCZOS,
    ProcessorConfig,
    ProcessorConfigError,
    square,
)

_MAX_EDGE = 4096
"""The processor scales nothing beyond this edge, pixels."""
_MAX_TILES_PER_EDGE = 6
"""The vocabulary names rows and columns up to <row_6_col_6>."""

_FAKE = "<fake_token_around_image>"
_GLOBAL = "<global-img>"


class Idefics3Planner(PlansEachAlone):
    """Plans for `idefics3` and `smolvlm` checkpoints; see plan.ImagePlanner."""

    placeholder = "<image>"
    image_token = "<image>"

    def __init__(self, family: str, config: Mapping[str, Any], processor: ProcessorConfig) -> None:
        self.family = family
        vision = config.get("vision_config") or {}
        patch = square(vision.get("patch_size", 32), "vision_config.patch_size")
        self.pixels: PixelConfig = processor.pixels(IMAGENET_HALF, LANCZOS, patch)
        self._tile = processor.edge("max_image_size", "longest_edge", 364) or 0
        self._longest = processor.edge("size", "longest_edge", 4 * 364) or 0
        if not self._tile or not self._longest:
            raise ProcessorConfigError(
                "size and max_image_size must have a longest_edge for Idefics3 and SmolVLM"
            )
        self._resizes = processor.flag("do_resize", True)
        self._splits = processor.flag("do_image_splitting", True)
        side, factor = self._tile // patch, int(config.get("scale_factor", 2))
        if side == 0 or side % factor:
            raise ProcessorConfigError(
                f"max_image_size {self._tile} with patches of {patch} makes {side} x {side} "
                f"patches per tile, which scale_factor {factor} does not divide"
            )
        self._rows_per_tile = (side // factor) ** 2
        told = processor.own.get("image_seq_len")
        if told is not None and told != self._rows_per_tile:
            raise ProcessorConfigError(
                f"image_seq_len is {told}, but the model makes {self._rows_per_tile} rows per tile "
                f"(max_image_size {self._tile}, patch_size {patch}, scale_factor {factor})"
            )

    @property
    def floor_pixels(self) -> int:
        return self._tile**2

    def _plan_one(self, index: int, width: int, height: int, limit: ResolutionLimit) -> ImagePlan:
        steps, rows, cols = self._fit(index, width, height, limit)
        side = self._tile // self.pixels.patch_size
        tiles: list[Tile] = []
        canvas = (rows * self._tile, cols * self._tile)
        for row in range(rows if rows * cols > 1 else 0):
            for col in range(cols):
                tiles.append(self._tile_at(canvas, row, col, side, steps))
        view = steps
        if not view or view[-1].size != (self._tile, self._tile):
            view = (*steps, Step((self._tile, self._tile)))
        tiles.append(self._tile_at((self._tile, self._tile), 0, 0, side, view))
        placed = tuple(tiles)
        return ImagePlan(
            family=self.family,
            width=width,
            height=height,
            tiles=placed,
            pieces=self._pieces(rows, cols),
            num_rows=len(placed) * self._rows_per_tile,
            num_patches=len(placed) * side**2,
            fingerprint=fingerprint(self.family, self.pixels, placed, None),
        )

    def _tile_at(
        self, canvas: tuple[int, int], row: int, col: int, side: int, steps: tuple[Step, ...]
    ) -> Tile:
        edge = self._tile
        return Tile(canvas, row * edge, col * edge, edge, edge, (side, side), steps)

    def _fit(
        self, index: int, width: int, height: int, limit: ResolutionLimit
    ) -> tuple[tuple[Step, ...], int, int]:
        """Steps to the canvas and its (rows, columns) of tiles, within the limit."""
        check_limit(index, limit, self.floor_pixels, "one tile")
        found = self._canvas(width, height, self._longest)
        edges = self._other_edges(limit, self._seen(found))
        while not _within(limit, seen := self._seen(found)):
            edge = next(edges, None)
            if edge is None:
                raise unsatisfiable(index, width, height, limit, seen)
            found = self._canvas(width, height, edge)
        _, rows, cols = found
        if rows > _MAX_TILES_PER_EDGE or cols > _MAX_TILES_PER_EDGE:
            raise PlanError(
                index,
                f"an image of {width} x {height} pixels would take {rows} x {cols} tiles, more "
                f"than {_MAX_TILES_PER_EDGE} along an edge; send a smaller one",
            )
        return found

    def _other_edges(self, limit: ResolutionLimit, seen: int) -> Iterator[int]:
        """Longest edges to try instead of the processor's own, nearest first."""
        if not (self._resizes and self._splits):
            return iter(())
        default = math.ceil(self._longest / self._tile)
        if limit.max_pixels is not None and seen > limit.max_pixels:
            counts = range(default, 0, -1)
        else:
            most = min(_MAX_TILES_PER_EDGE, _MAX_EDGE // self._tile)
            counts = range(default + 1, most + 1)
        return (count * self._tile for count in counts)

    def _seen(self, found: tuple[tuple[Step, ...], int, int]) -> int:
        """Pixels that the tower sees."""
        tiles = found[1] * found[2]
        return (tiles + 1 if tiles > 1 else 1) * self._tile**2

    def _canvas(self, width: int, height: int, longest: int) -> tuple[tuple[Step, ...], int, int]:
        steps: list[Step] = []
        size = (height, width)
        if self._resizes:
            size = _scale_to_longest(height, width, longest)
            steps.append(Step(size))
        if not self._splits:
            return (*steps, Step((self._tile, self._tile))), 1, 1
        size = _stretch_to_multiples(*size, self._tile)
        steps.append(Step(size))
        return tuple(steps), size[0] // self._tile, size[1] // self._tile

    def _pieces(self, rows: int, cols: int) -> tuple[str | int, ...]:
        if rows * cols == 1:
            return _FAKE + _GLOBAL, self._rows_per_tile, _FAKE
        pieces: list[str | int] = []
        for row in range(1, rows + 1):
            for col in range(1, cols + 1):
                newline = "\n" if row > 1 and col == 1 else ""
                pieces += [f"{newline}{_FAKE}<row_{row}_col_{col}>", self._rows_per_tile]
        return (*pieces, f"\n\n{_FAKE}{_GLOBAL}", self._rows_per_tile, _FAKE)


def _within(limit: ResolutionLimit, seen: int) -> bool:
    return (limit.max_pixels is None or seen <= limit.max_pixels) and (
        limit.min_pixels is None or seen >= limit.min_pixels
    )


def _scale_to_longest(height: int, width: int, longest: int) -> tuple[int, int]:
    """(height, width) with the longest edge at `longest` and the other one even, then under
    _MAX_EDGE. The order of the floating-point operations decides the rounding, and so is that
    of the reference processor."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        height, width = longest, int(longest * ratio)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > _MAX_EDGE:
        width, height = _MAX_EDGE, int(_MAX_EDGE / ratio)
    elif height > width and height > _MAX_EDGE:
        height, width = _MAX_EDGE, int(_MAX_EDGE * ratio)
    return max(height, 1), max(width, 1)


def _stretch_to_multiples(height: int, width: int, edge: int) -> tuple[int, int]:
    """(height, width) with both edges at multiples of `edge`, the longest one decided first."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / edge) * edge
        height = math.ceil(int(width / ratio) / edge) * edge
    else:
        height = math.ceil(height / edge) * edge
        width = math.ceil(int(height * ratio) / edge) * edge
    return height, width
