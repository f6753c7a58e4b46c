"""torch's flash kernel for the CPU, and its traps.

Owns: `flash_cpu`, a DenseKernel (dense.py). Does not own: what it is called with.
"""

from __future__ import annotations

import torch


def flash_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    mask: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's flash kernel for the CPU; a DenseKernel.

    It reads strided views and grouped heads as they are. Its causal mask starts at the top left.
    A row that sees no key would get a log-sum-exp of 0 instead of -inf: DenseKernel's callers never
    ask for one. Without a mask the query heads of a KV head become rows of one head, which gives
    the kernel larger blocks: 150 against 125 GFLOP/s on two AVX-512 cores.
    """
    _, heads, rows, dim = q.shape
    if mask is None and not causal and rows > 1 and heads > k.shape[1]:
        folded = q.reshape(1, k.shape[1], -1, dim)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
            folded, k, v, 0.0, False, scale=scale
        )
        return out.reshape(1, heads, rows, dim), lse.reshape(1, heads, rows)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        q, k, v, 0.0, causal, attn_mask=None if mask is None else _additive(mask, q), scale=scale
    )
    return out, lse


def _additive(mask: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    bias = torch.zeros(mask.shape, dtype=q.dtype)
    return bias.masked_fill_(~mask, -torch.inf)
