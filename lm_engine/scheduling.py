"""The scheduler of an engine, from what the operator promised.

Owns: which scheduling settings follow from the options, default promises, and the step-time model
before anything was measured. Does not own: scheduling itself (chunked_prefill), the KV manager's
sizes (kv_sizing.py).
"""

from __future__ import annotations

import torch

from chunked_prefill.calibration_file import Calibration
from chunked_prefill.scheduler import Scheduler
from chunked_prefill.settings import SchedulingSettings, build
from chunked_prefill.step_time import StepTimeModel, prior_model
from chunked_prefill.step_time_estimator import StepTimeEstimator
from kv_offload.kv_manager import KVManager
from kv_offload.radix_cache import CacheKey
from lm_engine.attention.native_plan import LANES
from lm_engine.models.config import DecoderConfig
from lm_engine.options import EngineOptions

_CPU_TPOT_S, _CUDA_TPOT_S = 0.2, 0.05
"""Default promises: reading speed where arithmetic is dear, the field's usual one where not."""
_CPU_FLOPS, _CUDA_FLOPS = 5e10, 1e14


def build_scheduler(
    options: EngineOptions,
    config: DecoderConfig,
    device: torch.device,
    kv: KVManager,
    key: CacheKey,
    calibration: Calibration | None = None,
) -> Scheduler:
    """`calibration`: of this engine, from an earlier start; None begins with a coarse prior."""
    if calibration is None:
        estimator = StepTimeEstimator(_prior(config, device))
    else:
        estimator = StepTimeEstimator(calibration.model, calibration.residuals)
    return build(scheduling_settings(options, device), kv, estimator, key)


def scheduling_settings(options: EngineOptions, device: torch.device) -> SchedulingSettings:
    promise = options.tpot_slo_s
    if promise is None:
        promise = _CPU_TPOT_S if device.type == "cpu" else _CUDA_TPOT_S
    return SchedulingSettings(
        policy=options.scheduling_policy,
        ttft_slo_s=options.ttft_slo_s,
        tpot_slo_s=promise,
        step_share=options.step_share,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        long_prompt_share=options.long_prompt_share,
    )


def _prior(config: DecoderConfig, device: torch.device) -> StepTimeModel:
    attention_width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    weights = (
        config.num_layers
        * config.hidden_size
        * (2 * attention_width + 2 * kv_width + 3 * config.intermediate_size)
    )
    return prior_model(
        linear_flops_per_token=2 * weights,
        attention_flops_per_pair=4 * attention_width * config.num_layers,
        flops_per_s=flops_per_s(device),
        tile_rows=LANES * config.num_kv_heads / config.num_heads,
    )


def flops_per_s(device: torch.device) -> float:
    """A guess that the first steps and images correct."""
    return _CPU_FLOPS if device.type == "cpu" else _CUDA_FLOPS
