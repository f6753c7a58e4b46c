"""The scheduler of an engine, from what the operator promised.

Owns: which budget and which policy follow from the options, default promises, and the step-time
model before anything was measured. Does not own: scheduling itself (chunked_prefill), the KV
manager's sizes (kv_sizing.py).
"""

from __future__ import annotations

import torch

from chunked_prefill.budget import Budget, TimeBudget, TokenBudget
from chunked_prefill.policy import Deadline, Fcfs, Policy, TtftPromise
from chunked_prefill.scheduler import Scheduler
from chunked_prefill.step_time import StepTimeEstimator, StepTimeModel, prior_model
from kv_offload.kv_manager import KVManager
from kv_offload.radix_cache import CacheKey
from lm_engine.models.config import DecoderConfig
from lm_engine.options import EngineOptions

_CPU_TPOT_S, _CUDA_TPOT_S = 0.2, 0.05
"""Default promises: reading speed where arithmetic is dear, the field's usual one where not."""
_CPU_FLOPS, _CUDA_FLOPS = 5e10, 1e14
"""Guesses that the first steps correct."""


def build_scheduler(
    options: EngineOptions,
    config: DecoderConfig,
    device: torch.device,
    kv: KVManager,
    key: CacheKey,
) -> Scheduler:
    estimator = StepTimeEstimator(_prior(config, device))
    return Scheduler(
        kv,
        _budget(options, device, estimator),
        options.max_num_seqs,
        key,
        policy=_policy(options, estimator),
    )


def _budget(options: EngineOptions, device: torch.device, estimator: StepTimeEstimator) -> Budget:
    promise = options.tpot_slo_s
    if promise is None:
        promise = _CPU_TPOT_S if device.type == "cpu" else _CUDA_TPOT_S
    if promise == 0:
        return TokenBudget(options.max_num_batched_tokens, estimator)
    return TimeBudget(options.max_num_batched_tokens, promise, estimator)


def _policy(options: EngineOptions, estimator: StepTimeEstimator) -> Policy:
    if options.scheduling_policy == "fcfs":
        return Fcfs()
    promise = TtftPromise(options.ttft_slo_s)
    return Deadline(promise, lambda: estimator.model, options.max_num_batched_tokens)


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
        flops_per_s=_CPU_FLOPS if device.type == "cpu" else _CUDA_FLOPS,
    )
