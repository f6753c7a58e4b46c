"""One vision transformer by flags, over all patches of a pass at once.

Owns: patch embedding, positions, layers. Does not own: the order of patches (patch_layout.py), what
becomes of the states (projector.py), or weights' names (tower_weights.py). Mathematics only.

States of all tiles stand in one [S, D] tensor; only attention sees where a tile begins. Two
algebraic folds: normalisation of pixels goes into the patch embedding's weights, and a kernel
over several frames is summed over them, since a still image repeats its frame.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_encoder.config import Norm, VitConfig
from vision_encoder.fused_linear import FusedLinear, Place, activate, empty_parameter
from vision_encoder.patch_layout import PatchLayout, Run

PIXEL_CENTRE = 128
"""Subtracted from uint8 pixels before the first Linear: the values stay exact in bfloat16 and
float16, and products stay as small as those of normalised pixels."""

MLP_ROWS: Mapping[str, int] = {"cpu": 1024, "cuda": 32_768}
"""Rows that pass through an MLP at once, which bounds the wide tensor inside it; on a CPU it then
stays in cache as well."""


def make_norm(
    kind: Norm,
    width: int,
    eps: float,
    **place: Unpack[Place],
) -> nn.Module:
    if kind == "rms":
        return nn.RMSNorm(width, eps=eps, **place)
    return nn.LayerNorm(width, eps=eps, **place)


def rotate(qk: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [S, 2, heads, d] queries and keys by angles [S, 1, 1, d / 2], computed
    in float32: (a, b) -> (a cos - b sin, b cos + a sin), a and b the halves of a head."""
    a, b = qk.float().chunk(2, dim=-1)
    turned = torch.cat(
        (torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)), dim=-1
    )
    return turned.to(qk.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, runs: Sequence[Run]) -> Tensor:
    """Softmax attention within segments. q, k, v: [S, heads, d]; returns [S, heads * d].

    Equal-sized neighbours share one batched call, on views.
    """
    parts = []
    for run in runs:
        shape = (run.count, run.length, *q.shape[1:])
        queries, keys, values = (
            t[run.start : run.stop].view(shape).transpose(1, 2) for t in (q, k, v)
        )
        out = F.scaled_dot_product_attention(queries, keys, values)
        parts.append(out.transpose(1, 2).reshape(run.count * run.length, -1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class VitLayer(nn.Module):
    """x += out(attend(qkv(norm(x)))); x += mlp(norm(x)). `x` [S, D] is changed in place."""

    def __init__(
        self,
        config: VitConfig,
        windowed: bool,
        **place: Unpack[Place],
    ) -> None:
        super().__init__()
        width, inner = config.hidden, config.intermediate
        self.heads, self.head_dim = config.heads, config.head_dim
        self.windowed = windowed
        self.norm1 = make_norm(config.norm, width, config.norm_eps, **place)
        self.norm2 = make_norm(config.norm, width, config.norm_eps, **place)
        self.qkv = FusedLinear(width, 3 * width, **place)
        self.out = FusedLinear(width, width, **place)
        self.gate_activation = config.activation if config.gated_mlp else None
        if config.gated_mlp:
            self.fc1 = FusedLinear(width, 2 * inner, **place)
        else:
            self.fc1 = FusedLinear(width, inner, activation=config.activation, **place)
        self.fc2 = FusedLinear(inner, width, **place)

    def forward(self, x: Tensor, layout: PatchLayout) -> Tensor:
        qkv = self.qkv(self.norm1(x)).view(-1, 3, self.heads, self.head_dim)
        q, k, v = qkv.unbind(1)
        if layout.cos is not None and layout.sin is not None:
            q, k = rotate(qkv[:, :2], layout.cos, layout.sin).unbind(1)
        runs = layout.window_runs if self.windowed else layout.tile_runs
        x.add_(self.out(attend(q, k, v, runs)))
        for rows in torch.split(x, MLP_ROWS.get(x.device.type, MLP_ROWS["cuda"])):
            hidden = self.fc1(self.norm2(rows))
            if self.gate_activation is not None:
                gate, up = hidden.chunk(2, dim=-1)
                hidden = activate(gate, self.gate_activation).mul_(up)
            rows.add_(self.fc2(hidden))
        return x


class PackedViT(nn.Module):
    """The ViT as three steps, so that layers can be granted in quanta: `embed`, each of `layers`
    in order, `finalize`."""

    def __init__(
        self,
        config: VitConfig,
        **place: Unpack[Place],
    ) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = FusedLinear(config.patch_elements, config.hidden, **place)
        self.cls = empty_parameter(config.hidden, **place) if config.cls_token else None
        table = config.position_side**2 + (1 if config.cls_token else 0)
        self.positions = (
            None if config.positions == "none" else empty_parameter(table, config.hidden, **place)
        )
        self.pre_norm = self._norm(config.pre_norm, **place)
        self.layers = nn.ModuleList(
            VitLayer(config, config.windowed(layer), **place) for layer in range(config.layers)
        )
        self.post_norm = self._norm(config.post_norm, **place)

    def _norm(self, wanted: bool, **place: Unpack[Place]) -> nn.Module | None:
        config = self.config
        if not wanted:
            return None
        return make_norm(config.norm, config.hidden, config.norm_eps, **place)

    def embed(self, patches: Tensor, layout: PatchLayout) -> Tensor:
        """States before layer 0, [S, D], from uint8 patches [P, C * p * p] in arriving order."""
        if layout.gather is not None:
            patches = patches.index_select(0, layout.gather)
        bias = self.patch_embed.bias
        assert bias is not None
        x: Tensor = self.patch_embed(patches.to(bias.dtype).sub_(PIXEL_CENTRE))
        if self.cls is not None:
            x = self._with_cls(x, layout)
        if self.positions is not None:
            x = self._add_positions(x, self.positions, layout)
        return x if self.pre_norm is None else self.pre_norm(x)

    def finalize(self, x: Tensor) -> Tensor:
        return x if self.post_norm is None else self.post_norm(x)

    def _with_cls(self, x: Tensor, layout: PatchLayout) -> Tensor:
        assert self.cls is not None
        states = x.new_empty(layout.num_states, x.shape[1])
        done = 0
        for run in layout.tile_runs:
            tiles = states[run.start : run.stop].view(run.count, run.length, -1)
            patches = run.count * (run.length - 1)
            tiles[:, 0] = self.cls
            tiles[:, 1:] = x[done : done + patches].view(run.count, run.length - 1, -1)
            done += patches
        return states

    def _add_positions(self, x: Tensor, table: Tensor, layout: PatchLayout) -> Tensor:
        assert layout.position_index is not None
        if layout.position_weight is None:
            return x.add_(table.index_select(0, layout.position_index[0]))
        mixed: Tensor | None = None
        for index, weight in zip(layout.position_index, layout.position_weight, strict=True):
            tap = table.index_select(0, index).float().mul_(weight[:, None])
            mixed = tap if mixed is None else mixed.add_(tap)
        assert mixed is not None
        return x.add_(mixed.to(x.dtype))
