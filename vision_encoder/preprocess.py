"""Pixels to patches, in uint8.

Owns: resizing, padding, cutting into tiles and patches as the family's processor does, without
leaving uint8; PatchedImage.
Does not own: which tiles (grid.py), decoding (media.py), normalisation - PixelConfig carries it
and the tower folds it into its first Linear.

The reference processors (torchvision backend) resize uint8 pictures in uint8 and normalise
afterwards, so normalising these patches gives their pixel values.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from vision_encoder.plan import Filter, ImagePlan, Normalization, PixelConfig, Step, Tile

__all__ = ["Normalization", "PatchedImage", "normalize", "patchify"]


@dataclass(frozen=True, slots=True)
class PatchedImage:
    """One picture as its tower takes it."""

    patches: Tensor
    """uint8 [P, 3 * patch_size**2]: channel, row, column within a patch; tiles one after another,
    patches within a tile in PixelConfig.merge_size order. One temporal slice."""
    grids: tuple[tuple[int, int], ...]
    """Patch rows and columns of each tile."""
    plan: ImagePlan


def patchify(image: npt.NDArray[np.uint8], plan: ImagePlan, config: PixelConfig) -> PatchedImage:
    """Patches of a decoded picture, uint8 [height, width, 3] (media.decode).

    Raises ValueError when the picture does not have the size that the plan was made for.
    """
    if image.dtype != np.uint8 or image.shape != (plan.height, plan.width, 3):
        raise ValueError(
            f"the plan is for uint8 ({plan.height}, {plan.width}, 3), the picture is "
            f"{image.dtype} {image.shape}"
        )
    # A channels-last view: torch's uint8 resize works on it without repacking.
    source = torch.from_numpy(image).permute(2, 0, 1).unsqueeze(0)
    canvases = _Canvases(source, config.resample)
    patches = [_cut(canvases.after(_steps(tile)), tile, config) for tile in plan.tiles]
    return PatchedImage(
        patches=patches[0] if len(patches) == 1 else torch.cat(patches),
        grids=tuple(tile.grid for tile in plan.tiles),
        plan=plan,
    )


def normalize(patches: Tensor, normalization: Normalization, patch_size: int) -> Tensor:
    """float32 [P, 3 * patch_size**2] of uint8 patches: what the reference processor gives.

    The tower does not call this; it folds the same map into its first Linear.
    """
    area = patch_size**2
    # By the reciprocal, as the reference does: dividing differs from it in the last bit.
    inverse = 1.0 / normalization.rescale
    mean = torch.tensor(normalization.mean).repeat_interleave(area) * inverse
    std = torch.tensor(normalization.std).repeat_interleave(area) * inverse
    return (patches.float() - mean) / std


def _steps(tile: Tile) -> tuple[Step, ...]:
    return tile.steps or (Step(tile.resize_to),)


class _Canvases:
    """The picture after each prefix of steps, each computed once."""

    def __init__(self, source: Tensor, resample: Filter) -> None:
        self._done: dict[tuple[Step, ...], Tensor] = {(): source}
        self._resample = resample

    def after(self, steps: tuple[Step, ...]) -> Tensor:
        """uint8 [1, 3, H, W]."""
        if steps not in self._done:
            before = self.after(steps[:-1])
            last = steps[-1]
            if last.paste_at is None:
                self._done[steps] = _resize(before, last.size, self._resample)
            else:
                self._done[steps] = _paste(before, last)
        return self._done[steps]


def _resize(image: Tensor, size: tuple[int, int], resample: Filter) -> Tensor:
    """uint8 [1, 3, H, W] to `size`, antialiased."""
    if image.shape[-2:] == size:
        return image
    if resample == "nearest":
        return F.interpolate(image, size=size, mode="nearest-exact")
    if resample == "lanczos" and not hasattr(torch.ops.aten, "_upsample_lanczos2d_aa"):
        # torch before 2.12 has no Lanczos; the reference processor takes bicubic there as well.
        resample = "bicubic"
    if resample == "bilinear" and not _uint8_bilinear():
        resized = F.interpolate(
            image.float(), size=size, mode="bilinear", align_corners=False, antialias=True
        )
        return resized.round_().to(torch.uint8)
    return F.interpolate(image, size=size, mode=resample, align_corners=False, antialias=True)


def _uint8_bilinear() -> bool:
    """Whether torch resizes uint8 bilinearly by the route that the reference takes here."""
    vectors = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return vectors or platform.machine() in ("aarch64", "arm64")


def _paste(image: Tensor, step: Step) -> Tensor:
    height, width = image.shape[-2:]
    top, left = step.paste_at or (0, 0)
    canvas = torch.tensor(step.fill, dtype=torch.uint8).expand(1, *step.size, 3).contiguous()
    canvas = canvas.permute(0, 3, 1, 2)
    canvas[..., top : top + height, left : left + width] = image
    return canvas


def _cut(canvas: Tensor, tile: Tile, config: PixelConfig) -> Tensor:
    """uint8 [rows * cols, 3 * patch_size**2]."""
    patch, merge = config.patch_size, config.merge_size
    rows, cols = tile.grid
    top, left = tile.top, tile.left
    part = canvas[0, :, top : top + rows * patch, left : left + cols * patch]
    part = part.reshape(3, rows // merge, merge, patch, cols // merge, merge, patch)
    return part.permute(1, 4, 2, 5, 0, 3, 6).reshape(rows * cols, 3 * patch * patch)
