"""Which attention backend a device gets.

Owns: `select`. Does not own: the backends.
"""

from __future__ import annotations

import ctypes

import torch

from lm_engine.attention.base import DEFAULT_SPLIT_TOKENS, AttentionBackend


def select(
    device: torch.device | str,
    *,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 0,
    library: ctypes.CDLL | None = None,
    split_tokens: int = DEFAULT_SPLIT_TOKENS,
) -> AttentionBackend:
    """A new backend for one engine on `device`, for keys and values of `dtype` with heads of
    `head_dim`. The CPU's is native where `library` (native/library.py) is given and can do it, else
    torch's; CUDA has its own, and every other device gets the reference."""
    kind = torch.device(device).type
    if kind == "cpu":
        from lm_engine.attention.cpu import CpuAttention
        from lm_engine.attention.native import MOST_HEAD_DIM, NativeAttention

        if library is not None and dtype == torch.float32 and head_dim <= MOST_HEAD_DIM:
            return NativeAttention(library)
        return CpuAttention(split_tokens)
    if kind == "cuda":
        from lm_engine.attention.torch_cuda import CudaAttention

        return CudaAttention(split_tokens)
    from lm_engine.attention.reference import ReferenceAttention

    return ReferenceAttention(split_tokens)
