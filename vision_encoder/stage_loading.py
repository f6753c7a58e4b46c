"""A checkpoint folder to a working VisionStage.

Owns: joining decoder of files, patches and tower into the functions that a VisionStage takes, and
the default size of a pass. Does not own: any of these parts, or where tensors come from: names and
a getter are injected, because files belong to lm_engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vision_encoder.grid import planner, read_processor_files
from vision_encoder.media import MediaError, decode, read_header
from vision_encoder.plan import ImagePlan
from vision_encoder.preprocess import PatchedImage, patchify
from vision_encoder.stage import Pass, UnreadableImageError, VisionStage
from vision_encoder.tower import VisionTower, load_tower

FLOP_BUDGET = {"cpu": 3e10, "cuda": 3e12}
"""Default FLOP of a pass, by device: about half a second of one CPU core at fp32, a few
milliseconds of a large GPU. Small images share a pass and so its weights' reads; a picture of the
usual size has one alone, so that its rows are ready before the next one is begun."""


def load_stage(
    folder: Path,
    config: Mapping[str, Any],
    names: frozenset[str],
    get: Callable[[str], Tensor],
    *,
    storage: Tensor,
    flop_budget: float | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> VisionStage[PatchedImage]:
    """The vision stage of the checkpoint in `folder`.

    Args:
        config: its config.json.
        names, get: its tensors by their Hugging Face names.
        storage: the arena's rows [num_rows, *VisionConfig.row_shape].
        flop_budget: most FLOP in one pass; None takes FLOP_BUDGET of the device.
        progress: called with (bytes read, bytes in all) while weights are read.

    Raises VisionConfigError, ProcessorConfigError, TowerLoadError, or ValueError when the
    storage's row shape is not the tower's.
    """
    pixels = planner(config, read_processor_files(folder)).pixels
    tower = load_tower(
        dict(config),
        pixels.normalization,
        names,
        get,
        dtype=dtype,
        device=device,
        progress=progress,
    )
    if tuple(storage.shape[1:]) != tower.config.row_shape:
        raise ValueError(
            f"the embedding storage has rows of {tuple(storage.shape[1:])}, this model's are "
            f"{tower.config.row_shape}"
        )

    def prepare(data: bytes, plan: ImagePlan) -> PatchedImage:
        try:
            header = read_header(data)
            if (header.width, header.height) != (plan.width, plan.height):
                # Before the decoder allocates: the limits were checked against the plan's size.
                raise ValueError("the bytes are not those that the plan was made for")
            image = decode(data, header)
        except MediaError as fault:
            raise UnreadableImageError(str(fault)) from fault
        return patchify(image, plan, pixels)

    return VisionStage(
        prepare=prepare,
        encode=partial(_pass, tower),
        cost=tower.config.flops,
        storage=storage,
        flop_budget=flop_budget or FLOP_BUDGET.get(torch.device(device).type, FLOP_BUDGET["cuda"]),
    )


def _pass(tower: VisionTower, images: Sequence[PatchedImage]) -> Pass:
    """Interrupted before each layer."""
    state = tower.begin(images)
    done = False
    while not done:
        yield
        done = tower.run_layers(state, 1)
    return tower.finish(state)
