"""Attention on CUDA with torch's own kernels.

Owns: CudaAttention, the plain and correct path on any CUDA device; it calls a dense kernel per
sequence and part. Does not own: paged kernels, which are faster in a batch and implement the same
Protocol.
"""

from __future__ import annotations

import torch

from kv_offload.kv_cache import KVCache
from lm_engine.attention.base import DEFAULT_SPLIT_TOKENS, AttentionBatch
from lm_engine.attention.cold_costs import ColdChoice
from lm_engine.attention.cold_parts import ColdParts
from lm_engine.attention.dense import DenseKernel, RowGroup, attend_group, plan_rows


def sdpa_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    mask: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Flash attention for half precision without a mask, else the memory-efficient kernel (which
    also does float32); a DenseKernel. Both align a causal mask to the top left."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    if mask is None and q.dtype in (torch.float16, torch.bfloat16):
        flash = torch.ops.aten._scaled_dot_product_flash_attention.default
        out, lse, *_ = flash(q, k, v, 0.0, causal, False, scale=scale)
        return out, lse
    bias = None
    if mask is not None:
        # The kernel wants rows of the bias to start at multiples of 16 bytes.
        rows, keys = mask.shape
        padded = torch.zeros((rows, -(-keys // 8) * 8), dtype=q.dtype, device=q.device)
        bias = padded[:, :keys].masked_fill_(~mask, -torch.inf).expand(1, q.shape[1], rows, keys)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
    out, lse, *_ = efficient(q, k, v, bias, True, 0.0, causal, scale=scale)
    # The kernel pads the log-sum-exp to whole tiles of rows.
    return out, lse[..., : q.shape[2]].float()


class CudaAttention:
    """AttentionBackend for CUDA. Use one per engine: it remembers the batch it prepared last.

    `cold` says how the cold keys of a batch are added to what is on the device; without it they are
    brought over in the queue of compute, each time they are read. `kernel` replaces sdpa_cuda.
    """

    def __init__(
        self,
        split_tokens: int = DEFAULT_SPLIT_TOKENS,
        cold: ColdChoice | None = None,
        kernel: DenseKernel = sdpa_cuda,
    ) -> None:
        self.split_tokens = split_tokens
        self._choice, self._kernel = cold, kernel
        self._prepared_for: tuple[AttentionBatch, KVCache] | None = None
        self._cold: ColdParts | None = None
        self._plans: dict[int | None, tuple[RowGroup, ...]] = {}

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        batch: AttentionBatch,
        cache: KVCache,
        *,
        window: int | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionBackend.attend."""
        known = self._prepared_for
        if known is None or known[0] is not batch or known[1] is not cache:
            self._prepared_for = (batch, cache)
            self._plans = {}
            self._cold = None if self._choice is None else self._choice.of(batch, q.shape[1], cache)
        cold = self._cold
        if cold is not None:
            cold.begin(q, batch, cache)
        if window not in self._plans:
            self._plans[window] = tuple(
                group
                for sequence in batch.sequences
                for group in plan_rows(
                    sequence,
                    cache,
                    self.split_tokens,
                    window,
                    low=0 if cold is None else sequence.cold_tokens,
                )
            )
        dtype = q.dtype if cold is None else torch.float32
        out = torch.empty(q.shape, dtype=dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        for group in self._plans[window]:
            rows = slice(group.first_row, group.first_row + group.num_rows)
            out[rows], lse[rows] = attend_group(self._kernel, layer, q, group, cache, scale)
        if cold is not None:
            cold.add(layer, q, window, scale, out, lse)
        return out.to(q.dtype), lse
