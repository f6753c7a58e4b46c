"""From ViT states to rows of the language model's width.

Owns: Projector (pixel shuffle + Linear, mergers, LLaVA's MLP: one module by flags) and the
arrangement of anyres tiles with their newline rows. Does not own: the ViT or the order of cells -
patch_layout.py has put the patches of a cell side by side, so merging is a view.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_encoder.config import ProjectorConfig
from vision_encoder.fused_linear import FusedLinear, Place
from vision_encoder.packed_vit import make_norm
from vision_encoder.plan import AnyresLayout


class Projector(nn.Module):
    """[S, D] states -> [S / merge², out] rows: norm?, merge, Linear, (activation, Linear)?

    `norm_merged` normalises the merge² * D values of a cell together instead of each state
    (Qwen3-VL's deepstack mergers).
    """

    def __init__(
        self,
        config: ProjectorConfig,
        width: int,
        *,
        norm_merged: bool = False,
        **place: Unpack[Place],
    ) -> None:
        super().__init__()
        self.merged = width * config.merge**2
        self.norm_merged = norm_merged
        self.norm = (
            None
            if config.norm is None
            else make_norm(
                config.norm, self.merged if norm_merged else width, config.norm_eps, **place
            )
        )
        first = config.out if config.inner is None else config.inner
        self.fc1 = FusedLinear(
            self.merged,
            first,
            config.bias,
            activation=None if config.inner is None else config.activation,
            **place,
        )
        self.fc2 = (
            None
            if config.inner is None
            else FusedLinear(config.inner, config.out, config.bias, **place)
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.norm is not None and not self.norm_merged:
            x = self.norm(x)
        x = x.reshape(-1, self.merged)
        if self.norm is not None and self.norm_merged:
            x = self.norm(x)
        x = self.fc1(x)
        return x if self.fc2 is None else self.fc2(x)


def arrange_anyres(tiles: Sequence[Tensor], layout: AnyresLayout | None, newline: Tensor) -> Tensor:
    """LLaVA-OneVision's rows of one image: [num_rows, D].

    `tiles`: [side², D] rows of the base view and then of the tiles in raster order. Without a
    layout there is the base view only, followed by one newline row. With one, the tiles form a
    picture, cropped and resampled as the plan says, and each of its lines ends in a newline row.
    """
    if layout is None:
        return torch.cat((*tiles, newline[None]))
    side = math.isqrt(tiles[0].shape[0])
    picture = torch.stack(tuple(tiles[1:]))
    picture = picture.view(layout.tile_rows, layout.tile_cols, side, side, -1).transpose(1, 2)
    picture = picture.reshape(layout.tile_rows * side, layout.tile_cols * side, -1)
    top, left, height, width = layout.crop
    picture = picture[top : top + height, left : left + width]
    if layout.resample_to is not None:
        # As one channels-last batch: the permuted view is what interpolate works on fastest.
        batch = picture.permute(2, 0, 1)[None]
        picture = F.interpolate(batch, layout.resample_to, mode="bilinear")[0].permute(1, 2, 0)
    ends = newline.expand(picture.shape[0], 1, -1)
    lines = torch.cat((picture, ends), dim=1).flatten(0, 1)
    return torch.cat((tiles[0], lines))
