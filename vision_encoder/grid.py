"""Which arithmetic a checkpoint's pictures follow.

Owns: the choice of a planner by family, and what `detail` means.
Does not own: a family's arithmetic (grid_idefics3.py, grid_qwen.py, grid_llava.py), the files
(processor_config.py), positions (mrope.py), or pixels. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vision_encoder.grid_idefics3 import Idefics3Planner
from vision_encoder.grid_llava import LlavaOnevisionPlanner, LlavaPlanner
from vision_encoder.grid_qwen import QwenPlanner
from vision_encoder.mrope import mrope_positions
from vision_encoder.plan import ImagePlanner, ResolutionLimit
from vision_encoder.processor_config import (
    ProcessorConfig,
    ProcessorConfigError,
    read_processor_files,
)

__all__ = [
    "DETAILS",
    "FAMILIES",
    "ProcessorConfigError",
    "limit_for_detail",
    "mrope_positions",
    "planner",
    "read_processor_files",
]

_PLANNERS: dict[str, Callable[[str, Mapping[str, Any], ProcessorConfig], ImagePlanner]] = {
    "smolvlm": Idefics3Planner,
    "idefics3": Idefics3Planner,
    "qwen2_vl": QwenPlanner,
    "qwen2_5_vl": QwenPlanner,
    "qwen3_vl": QwenPlanner,
    "llava": LlavaPlanner,
    "llava_onevision": LlavaOnevisionPlanner,
}
FAMILIES = tuple(_PLANNERS)

DETAILS = ("auto", "low", "high")
_LOW_DETAIL_PIXELS = 512 * 512


def planner(
    config: Mapping[str, Any], preprocessor_config: Mapping[str, Any] | None = None
) -> ImagePlanner:
    """The planner of a checkpoint, from its config.json and its processor files.

    `preprocessor_config` is what `read_processor_files` gives, or either file's contents alone.
    Absent keys take the reference image processor's defaults. Raises ProcessorConfigError for a
    family without a planner and for files that contradict each other.
    """
    family = str(config.get("model_type", ""))
    if family not in _PLANNERS:
        raise ProcessorConfigError(
            f"model_type {family!r} has no image planner; supported are {', '.join(FAMILIES)}"
        )
    return _PLANNERS[family](family, config, ProcessorConfig.of(preprocessor_config or {}))


def limit_for_detail(family: str, detail: str, floor_pixels: int = 0) -> ResolutionLimit:
    """What the OpenAI `detail` of an image means here.

    "high" and "auto" are the model's own range. "low" shows the tower at most 512 x 512 pixels:
    about 256 tokens for Qwen, the global view alone for tile families; LLaVA-1.5 knows one size
    only. `floor_pixels` (the planner's) keeps "low" possible for a model whose least is more.
    Raises ValueError for another word.
    """
    if detail not in DETAILS:
        raise ValueError(f"detail is {detail!r}; it must be one of {', '.join(DETAILS)}")
    if detail != "low" or family == "llava":
        return ResolutionLimit()
    return ResolutionLimit(max_pixels=max(_LOW_DETAIL_PIXELS, floor_pixels))
