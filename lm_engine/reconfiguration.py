"""What a running engine schedules by, and the change of it.

Owns: SchedulingState, what a tuner has to know of a server that it did not start, and `change`,
which puts settings in force or says what is wrong with them. Does not own: the settings
(chunked_prefill/settings.py), when it is called (between two steps), or who may (api). Imports no
torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from chunked_prefill.calibration_file import Calibration
from chunked_prefill.scheduler import Scheduler
from chunked_prefill.settings import SchedulingSettings, SettingsError
from chunked_prefill.step_time import StepTimeModel
from chunked_prefill.vision_share import VisionShare
from lm_engine.client import ModelInfo
from lm_engine.outputs import RequestError


@dataclass(frozen=True, slots=True)
class SchedulingState:
    settings: SchedulingSettings
    """In force from the next step on."""
    max_num_seqs: int
    """Settings may have at most so many; the server was started with them."""
    max_num_batched_tokens: int
    kv_blocks: int
    block_size: int
    prefix_caching: bool
    model: StepTimeModel
    """As learnt so far."""
    guard: float
    """Factor on its predictions under which nine steps in ten stay."""
    observed: int
    """Steps that it was learnt from."""
    vision: VisionShare = field(default_factory=VisionShare)
    """How the vision stage shares the machine."""
    calibration: Calibration | None = None
    """What was measured while nobody was served, where that was done."""


def state(scheduler: Scheduler, info: ModelInfo) -> SchedulingState | RequestError:
    """`info`: of the start."""
    estimator = scheduler.budget.estimator
    if scheduler.settings is None or estimator is None:
        return RequestError("invalid", "this engine's scheduler has no settings to tell of")
    kv = scheduler.kv
    return SchedulingState(
        settings=scheduler.settings,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        kv_blocks=kv.pool.num_blocks,
        block_size=kv.block_size,
        prefix_caching=kv.prefix_caching,
        model=estimator.model,
        guard=estimator.guard,
        observed=estimator.num_observed,
        vision=scheduler.vision,
    )


def change(
    scheduler: Scheduler, info: ModelInfo, settings: SchedulingSettings
) -> SchedulingState | RequestError:
    """Call it between two steps. An error means that nothing was changed."""
    try:
        settings.check(
            max_num_seqs=info.max_num_seqs, max_num_batched_tokens=info.max_num_batched_tokens
        )
        scheduler.reconfigure(settings)
    except SettingsError as error:
        return RequestError("invalid", str(error), error.name)
    return state(scheduler, info)
