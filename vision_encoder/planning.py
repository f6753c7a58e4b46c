"""What the families' planners share: numbering, limits, fingerprints.

Owns: the checks that every planner makes of sizes and limits, their error texts, and `plan` of the
families that plan each image alone.
Does not own: any family's arithmetic (grid_*.py). Imports no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from vision_encoder.plan import (
    AnyresLayout,
    ImagePlan,
    PixelConfig,
    PlanError,
    ResolutionLimit,
    Tile,
)

MAX_ASPECT = 200
"""Longest over shortest edge; beyond it the arithmetic of Qwen's processor gives up, and a
shortest-edge resize (LLaVA) would make strips of millions of pixels."""


def numbered(
    sizes: list[tuple[int, int]], limits: list[ResolutionLimit] | None
) -> Iterator[tuple[int, int, int, ResolutionLimit]]:
    """(index, width, height, limit) of each image, after the checks that need no family."""
    if limits is not None and len(limits) != len(sizes):
        raise ValueError(f"{len(sizes)} sizes but {len(limits)} limits; give one per image")
    for index, (width, height) in enumerate(sizes):
        if width < 1 or height < 1:
            raise PlanError(index, f"the image has {width} x {height} pixels; it is empty")
        yield index, width, height, limits[index] if limits else ResolutionLimit()


class PlansEachAlone:
    """`plan` of a family whose images do not depend on how many come along."""

    def plan(
        self, sizes: list[tuple[int, int]], limits: list[ResolutionLimit] | None = None
    ) -> list[ImagePlan]:
        return [
            self._plan_one(index, width, height, limit)
            for index, width, height, limit in numbered(sizes, limits)
        ]

    def _plan_one(self, index: int, width: int, height: int, limit: ResolutionLimit) -> ImagePlan:
        raise NotImplementedError


def check_limit(index: int, limit: ResolutionLimit, floor: int, floor_name: str) -> None:
    """Refuses limits that contradict themselves or lie below what the model can see."""
    low, high = limit.min_pixels, limit.max_pixels
    if low is not None and low < 1:
        raise PlanError(index, f"min_pixels is {low}; it must be at least 1")
    if high is not None and high < floor:
        raise PlanError(
            index,
            f"max_pixels is {high}, below the {floor} pixels of {floor_name}, the least that this "
            "model can be shown; raise max_pixels",
        )
    if low is not None and high is not None and low > high:
        raise PlanError(index, f"min_pixels {low} is greater than max_pixels {high}")


def check_aspect(index: int, width: int, height: int) -> None:
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise PlanError(
            index,
            f"the image has {width} x {height} pixels; this model takes no image whose longest "
            f"edge is more than {MAX_ASPECT} times its shortest",
        )


def unsatisfiable(
    index: int, width: int, height: int, limit: ResolutionLimit, seen: int
) -> PlanError:
    """No setting of the model meets the limit; `seen` is the pixel count nearest to it."""
    too_many = limit.max_pixels is not None and seen > limit.max_pixels
    name, change = ("max_pixels", "raise") if too_many else ("min_pixels", "lower")
    value = limit.max_pixels if too_many else limit.min_pixels
    return PlanError(
        index,
        f"{name} {value} cannot be met for an image of {width} x {height} pixels: the nearest that "
        f"this model can be shown is {seen} pixels; {change} {name}",
    )


def fingerprint(
    family: str, pixels: PixelConfig, tiles: tuple[Tile, ...], anyres: AnyresLayout | None
) -> bytes:
    """32 bytes over everything that decides the rows beside the picture and the weights.

    The repr of these frozen dataclasses is canonical: every field by name, strings quoted,
    floats in full.
    """
    text = repr((family, pixels, tiles, anyres))
    return hashlib.blake2b(text.encode(), digest_size=32).digest()
