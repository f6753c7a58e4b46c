"""What images cost under a limit of their resolution.

Owns: the ImageModel of a checkpoint, by its own header arithmetic, and the limits that are worth
trying for the images of given traffic. Does not own: that arithmetic (vision_encoder/grid.py), or
how long encoding takes (the calibration). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from api.media import capped
from api.tokenizer import read_json
from chunked_prefill.encode_time import EncodeTimeModel
from chunked_prefill.simulator_vision import ImageCost
from chunked_prefill.trace import TraceRequest
from vision_encoder.grid import FAMILIES, planner, read_processor_files
from vision_encoder.plan import ImagePlan, ImagePlanner, ResolutionLimit

_EDGES = (2048, 1536, 1024, 768, 512, 384, 256)
"""Of the squares whose pixels are tried as limits."""


@dataclass(frozen=True, slots=True)
class PlannedImages:
    """An ImageModel."""

    planner: ImagePlanner
    encode: EncodeTimeModel
    resolution: int | None = None

    def __call__(self, sizes: Sequence[tuple[int, int]]) -> list[ImageCost]:
        limit = capped(ResolutionLimit(), self.resolution, self.planner.floor_pixels)
        plans = self.planner.plan(list(sizes), [limit] * len(sizes))
        return [ImageCost(plan.num_rows, self.encode.seconds(_tiles(plan))) for plan in plans]


def _tiles(plan: ImagePlan) -> list[int]:
    return [tile.grid[0] * tile.grid[1] for tile in plan.tiles]


def find_planner(model: Path) -> ImagePlanner | None:
    """None for a model that sees no images."""
    config = read_json(model / "config.json") if model.is_dir() else {}
    if config.get("model_type") not in FAMILIES or "vision_config" not in config:
        return None
    return planner(config, read_processor_files(model))


def limits_worth_trying(
    images: Callable[[int | None], PlannedImages], requests: Sequence[TraceRequest]
) -> list[int | None]:
    """From no limit down, each with fewer image tokens for these requests than the one before."""
    found: list[int | None] = []
    last: int | None = None
    for limit in (None, *(edge * edge for edge in _EDGES)):
        model = images(limit)
        tokens = sum(cost.tokens for r in requests if r.images for cost in model(r.images))
        if last is None or tokens < last:
            found.append(limit)
            last = tokens
    return found
