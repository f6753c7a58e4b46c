"""What the stages are built from when they serve a real model.

Owns: the three functions that messages.Factories names by default. Does not own: how an engine or
a tower is put together (assembly.py), or the processes. Importing this module imports torch: the
supervisor does so once, before it forks.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from lm_engine.assembly import build_vision, resolve_device, vision_dtype, vision_shape
from lm_engine.engine import Engine
from lm_engine.models.checkpoint import open_checkpoint
from lm_engine.options import EngineOptions
from lm_engine.process.language import LanguageEngine
from lm_engine.process.messages import Plan
from lm_engine.process.vision import VisionWorker
from vision_encoder.embedding_storage import allocate_storage, storage_bytes
from vision_encoder.link import VisionLink
from vision_encoder.stage import VisionStage

Report = Callable[[str, float, float], None]


def plan(options: EngineOptions, report: Report) -> Plan:
    """Finds the model's files, fetching a hub id if need be, and sizes what the stages share.

    On a GPU the vision stage lives in the language process (DESIGN §3), so no region is shared.
    """
    report("finding the model", 0.0, 0.0)
    checkpoint = open_checkpoint(options.model)
    try:
        shape = vision_shape(checkpoint, options)
        on_cpu = resolve_device(options).type == "cpu"
        resolved = replace(
            options,
            model=str(checkpoint.path),
            served_name=options.served_name or checkpoint.name,
        )
    finally:
        checkpoint.close()
    if shape is None or not options.vision_process or not on_cpu:
        return Plan(resolved)
    return Plan(
        resolved,
        has_vision=True,
        region_bytes=storage_bytes(shape.num_rows, shape.depth, shape.dim, shape.dtype),
        num_rows=shape.num_rows,
        row_shape=(shape.depth, shape.dim),
    )


def language(
    plan: Plan, report: Report, link: VisionLink | None, region: mmap.mmap | None
) -> LanguageEngine:
    """The engine; with a link, its embedding rows lie in `region`."""
    return Engine.load(
        plan.options,
        progress=lambda phase, done, total, eta_s: report(phase, done, total),
        vision=link,
        storage=_storage(plan, region) if link is not None and region is not None else None,
    )


def vision(plan: Plan, report: Report, region: mmap.mmap) -> VisionWorker:
    """The vision stage, writing into `region`."""
    checkpoint = open_checkpoint(plan.options.model)
    try:
        stage = build_vision(
            checkpoint,
            plan.options,
            _storage(plan, region),
            progress=lambda phase, done, total, eta_s: report(phase, done, total),
        )
    finally:
        checkpoint.close()
    if not isinstance(stage, VisionStage):
        raise TypeError(f"expected a VisionStage, got {type(stage).__name__}")
    return stage


def _storage(plan: Plan, region: mmap.mmap) -> Tensor:
    return allocate_storage(
        plan.num_rows, *plan.row_shape, vision_dtype(plan.options), shared=region
    )
