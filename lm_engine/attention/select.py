"""Which attention backend a device gets.

Owns: `select`. Does not own: the backends.
"""

from __future__ import annotations

import torch

from lm_engine.attention.base import DEFAULT_SPLIT_TOKENS, AttentionBackend


def select(
    device: torch.device | str, split_tokens: int = DEFAULT_SPLIT_TOKENS
) -> AttentionBackend:
    """A new backend for one engine on `device`: CPU and CUDA have their own, every other device
    gets the reference."""
    kind = torch.device(device).type
    if kind == "cpu":
        from lm_engine.attention.cpu import CpuAttention

        return CpuAttention(split_tokens)
    if kind == "cuda":
        from lm_engine.attention.torch_cuda import CudaAttention

        return CudaAttention(split_tokens)
    from lm_engine.attention.reference import ReferenceAttention

    return ReferenceAttention(split_tokens)
