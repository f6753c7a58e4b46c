"""Attention spelled out: what every other backend is tested against.

Owns: ReferenceAttention. Does not own: speed. It runs on any device and dtype, in float32 or the
inputs' own precision if that is wider.
"""

from __future__ import annotations

import torch

from kv_offload.kv_cache import KVCache
from lm_engine.attention.base import (
    DEFAULT_SPLIT_TOKENS,
    AttentionBatch,
    SequenceSlice,
    gather,
    pieces,
)
from lm_engine.attention.merge import merge


class ReferenceAttention:
    """For each sequence and canonical split: gather keys and values, mask, softmax; then merge."""

    def __init__(self, split_tokens: int = DEFAULT_SPLIT_TOKENS) -> None:
        self.split_tokens = split_tokens

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
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        for sequence in batch.sequences:
            rows = slice(sequence.query_start, sequence.query_start + sequence.query_len)
            out[rows], lse[rows] = self._attend_one(layer, q[rows], sequence, cache, window, scale)
        return out, lse

    def _attend_one(
        self,
        layer: int,
        q: torch.Tensor,
        sequence: SequenceSlice,
        cache: KVCache,
        window: int | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        end = sequence.context_len
        positions = torch.arange(end - sequence.query_len, end, device=q.device)
        outs, lses = [], []
        for piece in pieces(sequence, cache.layout.block_size, self.split_tokens, 0, end):
            keys, values = gather(layer, piece.stretches, cache)
            keys_at = torch.arange(piece.start, piece.end, device=q.device)
            visible = keys_at <= positions[:, None]
            if window is not None:
                visible &= keys_at > positions[:, None] - window
            part = attend_dense(q, keys, values, visible, scale)
            outs.append(part[0])
            lses.append(part[1])
        return merge(outs, lses)


def attend_dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * q k^T, over visible keys) v.

    q [C, Hq, d]; k, v [Hkv, n, d]; visible bool [C, n]. Returns (out [C, Hq, d] in q's dtype,
    lse [C, Hq] float32); a row that sees nothing is zero with lse -inf.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[0]
    keys = k.to(wide).repeat_interleave(group, dim=0)
    values = v.to(wide).repeat_interleave(group, dim=0)
    scores = torch.einsum("chd,hnd->chn", q.to(wide), keys) * scale
    scores = scores.masked_fill(~visible[:, None, :], -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    some = torch.where(lse == -torch.inf, 0.0, lse)
    out = torch.einsum("chn,hnd->chd", torch.exp(scores - some.unsqueeze(-1)), values)
    return out.to(q.dtype), lse.float()
