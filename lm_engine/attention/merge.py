"""Merging attention over parts of a context into attention over all of it.

Owns: the log-sum-exp merge, on which every placement of KV rests (DESIGN idea 4): for disjoint key
sets A and B with outputs o and log-sum-exps l,

    l = log(exp(l_A) + exp(l_B)),   o = exp(l_A - l) * o_A + exp(l_B - l) * o_B

(Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018).
Does not own: how a part is computed, or where it is cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def merge_weights(lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Share of the attention that falls on each part, and the log-sum-exp of the whole.

    `lses` are P tensors of one shape [...]. Returns (weights [P, ...] float32, lse [...] float32).
    A part whose lse is -inf (the row sees no key there) has weight 0, also when all are -inf; the
    whole's lse is then -inf.
    """
    stacked = torch.stack([lse.float() for lse in lses])
    peak = stacked.amax(0)
    # With no key at all, -inf - -inf would be NaN.
    shifted = torch.exp(stacked - torch.where(peak == -torch.inf, 0.0, peak))
    total = shifted[0].clone()
    for part in shifted[1:]:
        total += part
    weights = shifted / torch.where(total == 0, 1.0, total)
    return weights, peak + torch.log(total)


def merge(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge P partial attentions, always summed in the order given.

    `outs` are P tensors [..., d] of one dtype, `lses` P tensors [...]. Returns (out [..., d] in the
    dtype of `outs`, lse [...] float32); arithmetic is float32. A row that no part sees is zero
    with lse -inf; the output of a part in which a row sees nothing is ignored, whatever it holds.
    """
    if len(outs) == 1:
        return outs[0], lses[0].float()
    weights, lse = merge_weights(lses)
    result = torch.zeros(outs[0].shape, dtype=torch.float32, device=outs[0].device)
    for out, weight in zip(outs, weights, strict=True):
        share = weight.unsqueeze(-1)
        result += torch.where(share == 0, 0.0, out.float() * share)
    return result.to(outs[0].dtype), lse


def merge_stacked(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge` of parts in which every row sees a key, stacked: outs [P, ..., d], lses [P, ...].
    Returns float32 (out [..., d], lse [...])."""
    lse = torch.logsumexp(lses.float(), 0)
    weights = torch.exp(lses - lse)
    return (outs.float() * weights.unsqueeze(-1)).sum(0), lse


def merge_into(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> None:
    """Add one more part to a running attention in place: `out` [..., d] and `lse` [...], both
    float32. Rows of `lse` that are -inf take the part as it is."""
    peak = torch.maximum(lse, part_lse)
    peak.masked_fill_(peak == -torch.inf, 0.0)
    old = torch.exp(lse - peak)
    new = torch.exp(part_lse - peak)
    total = old + new
    torch.add(peak, torch.log(total), out=lse)
    total.masked_fill_(total == 0, 1.0)
    out.mul_((old / total).unsqueeze(-1))
    out.addcmul_(part, (new / total).unsqueeze(-1))
