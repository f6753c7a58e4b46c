"""`longlens plan` verbs about scale: users, disaggregate, lora, images, fleet.

Owns: their flags, and the counting of an image's tokens by its family. Does not own: arithmetic
(chunked_prefill/planner, vision_encoder/grid.py), output (plan_show.py), or the flags that all
verbs share (plan_flags.py). Each imports its planner when it is asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from api.plan_flags import Shown, Target, lengths, seconds, sizes, whole
from api.plan_show import answer
from chunked_prefill.planner.devices import PlanError

if TYPE_CHECKING:
    from chunked_prefill.planner.images import PlannedImage

_TARGET, _SHOWN = Target(), Shown()
_CURVE_EDGES = tuple(round(224 * 18 ** (i / 24)) for i in range(25))
"""Of the squares along a curve: 224 to 4032 pixels."""


def users(
    model: str,
    *,
    context: str | None = None,
    target: Target = _TARGET,
    shown: Shown = _SHOWN,
) -> int:
    """Users per device by split: tensor, pipeline, data, and expert parallelism.

    Parameters
    ----------
    model
        A folder with config.json, or a known shape such as llama-3.1-70b.
    context
        Lengths of context, separated by commas; 8k,32k,128k as far as the model goes.
    """
    from chunked_prefill.planner.users import plan_users

    wanted = None if context is None else lengths("context", context)
    return answer(plan_users(target.deploy(model), contexts=wanted), shown)


def disaggregate(
    model: str,
    *,
    link_gbit: float = 400.0,
    prompt: str = "4k",
    output: str = "256",
    batch: int = 32,
    tpot: str = "50ms",
    mfu: float | None = None,
    target: Target = _TARGET,
    shown: Shown = _SHOWN,
) -> int:
    """Prefill and decode on different devices: transfer against prefill, break-even links.

    Parameters
    ----------
    model
        A folder with config.json, or a known shape such as llama-3.1-70b.
    link_gbit
        Gbit/s between prefill and decode, of each device.
    prompt
        Tokens of a prompt.
    output
        Tokens of an answer.
    batch
        Sequences that decode together.
    tpot
        Promise per output token, such as 50ms.
    mfu
        Share of the dense rate that prefill reaches.
    """
    from chunked_prefill.planner.disaggregate import plan_disaggregate

    report = plan_disaggregate(
        target.deploy(model),
        link_gbit=link_gbit,
        prompt=whole("prompt", prompt),
        output=whole("output", output),
        batch=batch,
        tpot_s=seconds("tpot", tpot),
        mfu=mfu,
    )
    return answer(report, shown)


def lora(
    model: str,
    *,
    rank: int = 16,
    targets: str = "all",
    distinct: int = 32,
    batch: int = 32,
    context: str = "1k",
    target: Target = _TARGET,
    shown: Shown = _SHOWN,
) -> int:
    """Adapters: size, what different ones in a step cost, users that they displace.

    Parameters
    ----------
    model
        A folder with config.json, or a known shape such as llama-3.1-70b.
    rank
        Of each adapter.
    targets
        Linears that are adapted: all, attention, qv.
    distinct
        Different adapters in one step.
    batch
        Sequences that decode together.
    context
        Tokens of each sequence.
    """
    from chunked_prefill.planner.lora import plan_lora

    report = plan_lora(
        target.deploy(model),
        rank=rank,
        targets=targets,
        distinct=distinct,
        batch=batch,
        context=whole("context", context),
    )
    return answer(report, shown)


def images(
    model: str,
    *,
    size: str = "448x448,1024x1024,1920x1080,1786x2526",
    mfu: float | None = None,
    target: Target = _TARGET,
    shown: Shown = _SHOWN,
) -> int:
    """Images by size: tokens, the tower's work, the prefill of the tokens, KV.

    Parameters
    ----------
    model
        A folder with config.json, or qwen2-vl-7b, qwen2.5-vl-7b, qwen3-vl-2b, qwen3-vl-8b.
    size
        Width x height in pixels, separated by commas.
    mfu
        Share of the dense rate that is reached.
    """
    from chunked_prefill.planner.images import plan_images
    from chunked_prefill.planner.vision_shapes import read_vision_shape

    deployment, wanted = target.deploy(model), sizes("size", size)
    config, processor = _vision_files(model)
    squares = [(edge, edge) for edge in _CURVE_EDGES]
    report = plan_images(
        deployment,
        read_vision_shape(deployment.shape.name, config),
        _planned(config, processor, wanted),
        squares=_planned(config, processor, squares),
        mfu=mfu,
    )
    return answer(report, shown)


def _vision_files(model: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and the processor's files, of a known shape or a folder."""
    from chunked_prefill.planner.model_files import config_file, read_config
    from chunked_prefill.planner.vision_shapes import VISION_FILES
    from vision_encoder.grid import ProcessorConfigError, read_processor_files

    if model.lower() in VISION_FILES:
        return VISION_FILES[model.lower()]
    file: Path | None = config_file(model)
    if file is None:
        raise PlanError(f"{model} sees no images; of the known shapes {', '.join(VISION_FILES)} do")
    try:
        return read_config(file), read_processor_files(file.parent)
    except ProcessorConfigError as error:
        raise PlanError(str(error)) from error


def _planned(
    config: dict[str, Any], processor: dict[str, Any], wanted: Iterable[tuple[int, int]]
) -> list[PlannedImage]:
    """Each image alone in its request."""
    from chunked_prefill.planner.images import PlannedImage
    from vision_encoder.grid import ProcessorConfigError, planner
    from vision_encoder.plan import PlanError as ImageError

    found = []
    try:
        arithmetic = planner(config, processor)
        for width, height in wanted:
            plan = arithmetic.plan([(width, height)])[0]
            tiles = tuple(rows * columns for rows, columns in (t.grid for t in plan.tiles))
            found.append(PlannedImage(width, height, tiles, plan.num_rows))
    except (ProcessorConfigError, ImageError) as error:
        raise PlanError(str(error)) from error
    return found


def fleet(
    model: str,
    *,
    rate: float = 100.0,
    prompt: str = "2000",
    output: str = "300",
    hit: float = 0.0,
    tpot: str = "50ms",
    utilisation: float = 0.7,
    mfu: float | None = None,
    target: Target = _TARGET,
    shown: Shown = _SHOWN,
) -> int:
    """Servers for a stream of requests, by share of prompts found in the cache.

    Parameters
    ----------
    model
        A folder with config.json, or a known shape such as llama-3.1-70b.
    rate
        Requests per second.
    prompt
        Mean tokens of a prompt.
    output
        Mean tokens of an answer.
    hit
        Share of prompt tokens found in the cache.
    tpot
        Promise per output token, such as 50ms.
    utilisation
        Share of the servers' rates that is planned for.
    mfu
        Share of the dense rate that prefill reaches.
    """
    from chunked_prefill.planner.fleet import plan_fleet

    report = plan_fleet(
        target.deploy(model),
        rate=rate,
        prompt=whole("prompt", prompt),
        output=whole("output", output),
        hit=hit,
        tpot_s=seconds("tpot", tpot),
        utilisation=utilisation,
        mfu=mfu,
    )
    return answer(report, shown)
