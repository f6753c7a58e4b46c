"""Plain attention over one whole sequence, as obvious as can be: the decoder tests' AttentionFn.

Owns: `DenseAttention`. Does not own: the engine's attention, which has tests of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lm_engine.models.config import DecoderConfig


class DenseAttention:
    """Keeps the keys and values of one sequence and attends with an explicit mask, so that a
    prompt may be given in pieces."""

    def __init__(self, config: DecoderConfig) -> None:
        self._config = config
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in self._kept:
            k = torch.cat((self._kept[layer][0], k))
            v = torch.cat((self._kept[layer][1], v))
        self._kept[layer] = (k, v)
        group = self._config.num_heads // self._config.num_kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * self._config.scale
        key = torch.arange(k.shape[0])
        query = key[-q.shape[0] :].unsqueeze(1)
        seen = key <= query
        window = self._config.windows[layer]
        if window is not None:
            seen &= key > query - window
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v)
