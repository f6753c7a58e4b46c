"""Which attention backend a device gets, and which way its cold keys take.

Owns: `select`. Does not own: the backends, or what each way costs (cold_costs.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from lm_engine.attention.base import DEFAULT_SPLIT_TOKENS, AttentionBackend
from lm_engine.attention.staging import StagingRing

if TYPE_CHECKING:
    from lm_engine.attention.cold_costs import ColdRates


def select(
    device: torch.device | str,
    *,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 0,
    library: ctypes.CDLL | None = None,
    split_tokens: int = DEFAULT_SPLIT_TOKENS,
    ring: StagingRing | None = None,
    cold_kv: str = "auto",
    rates: Callable[[], ColdRates] | None = None,
) -> AttentionBackend:
    """A new backend for one engine on `device`, for keys and values of `dtype` with heads of
    `head_dim`. The CPU's is native where `library` (native/library.py) is given and can do it, else
    torch's; CUDA has its own, and every other device gets the reference.

    With a `ring`, cold keys are staged through it; on CUDA only where `cold_kv` is "stream", or
    "auto" and that is cheaper than attending them on the CPU, by `rates`, which say that there is a
    host tier. Without one, the CPU attends them where they lie.
    """
    kind = torch.device(device).type
    if kind == "cpu":
        from lm_engine.attention.cold_parts import StagedParts
        from lm_engine.attention.cpu import CpuAttention
        from lm_engine.attention.cpu_kernel import flash_cpu
        from lm_engine.attention.native import NativeAttention
        from lm_engine.attention.native_plan import MOST_HEAD_DIM

        if library is not None and dtype == torch.float32 and head_dim <= MOST_HEAD_DIM:
            return NativeAttention(library, ring)
        staged = None if ring is None else StagedParts(flash_cpu, ring, split_tokens)
        return CpuAttention(split_tokens, staged)
    if kind == "cuda":
        from lm_engine.attention.cold_costs import ColdChoice
        from lm_engine.attention.cold_parts import HostParts, StagedParts
        from lm_engine.attention.torch_cuda import CudaAttention, sdpa_cuda

        if rates is None:
            return CudaAttention(split_tokens)
        choice = ColdChoice(
            None if ring is None else StagedParts(sdpa_cuda, ring, split_tokens),
            None if cold_kv == "stream" else HostParts(),
            rates,
        )
        return CudaAttention(split_tokens, choice)
    from lm_engine.attention.reference import ReferenceAttention

    return ReferenceAttention(split_tokens)
