"""What an image's header decides: tiles, patches, tokens, positions.

Owns: ImagePlan, the value that passes from the planner (grid.py) through the prompt builder (api)
to preprocessing (preprocess.py) and the tower (packed_vit.py, projector.py); ResolutionLimit; and
PixelConfig, what a model's processor says about pixels once for all images.
Does not own: how a family computes a plan (grid.py), pixels, or tensors. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

Filter = Literal["nearest", "bilinear", "bicubic", "lanczos"]
"""Resampling filters, all antialiased but the first."""


@dataclass(frozen=True, slots=True)
class ResolutionLimit:
    """What a user may say about an image's cost; None leaves the model's own default.

    Pixels are those that the vision tower sees, all tiles of the image together. A bound that
    the model's own range already satisfies changes nothing; one that it cannot satisfy is a
    PlanError.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None


@dataclass(frozen=True, slots=True)
class Normalization:
    """y = (x * rescale - mean) / std per channel, x in 0..255; the tower folds it into its first
    Linear."""

    rescale: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @property
    def scale(self) -> tuple[float, float, float]:
        """a of y = a * x + b, per channel."""
        r, g, b = (self.rescale / s for s in self.std)
        return r, g, b

    @property
    def shift(self) -> tuple[float, float, float]:
        """b of y = a * x + b, per channel."""
        r, g, b = (-m / s for m, s in zip(self.mean, self.std, strict=True))
        return r, g, b


@dataclass(frozen=True, slots=True)
class PixelConfig:
    """How a model's processor turns pixels into patches; the same for every image."""

    patch_size: int
    """Edge of a patch, pixels."""
    resample: Filter
    normalization: Normalization
    merge_size: int = 1
    """Patches are ordered in blocks of merge_size x merge_size, blocks in raster order and
    patches in raster order within a block; 1 is plain raster order."""


@dataclass(frozen=True, slots=True)
class Step:
    """One operation on the whole picture: resize to `size` or, where `paste_at` is set, put the
    picture with its corner at (top, left) onto a canvas of `size` filled with `fill`."""

    size: tuple[int, int]
    """(height, width) of the result, pixels."""
    paste_at: tuple[int, int] | None = None
    fill: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class Tile:
    """One rectangle that the ViT sees as one image (attention does not cross tiles).

    The source image goes through `steps` (none: one resize to `resize_to`) with the family's
    filter, rounding to uint8 after each; the result is `resize_to` = (height, width) in size and
    the tile is its rectangle [top, top + height) x [left, left + width). Tiles that share their
    first steps share that work.
    """

    resize_to: tuple[int, int]
    top: int
    left: int
    height: int
    width: int
    grid: tuple[int, int]
    """Patch rows and columns; rows * columns patches. Pixels right of and below the last whole
    patch are not seen."""
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True)
class AnyresLayout:
    """How LLaVA-OneVision joins the features of the tiles after the first (the base view).

    The tiles, tile_rows x tile_cols in raster order, form one feature map of tile_rows *
    grid_rows by tile_cols * grid_cols patches. `crop` of it is kept (the padding is cut away),
    resampled bilinearly (align_corners=False) to `resample_to` where that is set, each row gets
    one newline embedding at its end, and the rows follow the base view's.
    """

    tile_rows: int
    tile_cols: int
    crop: tuple[int, int, int, int]
    """(top, left, height, width), patches of the joined map."""
    resample_to: tuple[int, int] | None = None
    """(height, width), patches."""


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """Everything about one image that follows from the headers of the request's images."""

    family: str
    width: int
    """Pixels of the source after EXIF orientation."""
    height: int
    tiles: tuple[Tile, ...]
    pieces: tuple[str | int, ...]
    """What replaces the image's placeholder in the prompt: a string is template text (its special
    tokens count as specials), an int is a run of that many embedding rows, in row order."""
    num_rows: int
    """Embedding rows in all: the sum of the ints in `pieces`."""
    num_patches: int
    merged_grid: tuple[int, int, int] | None = None
    """(t, h, w) after merging, for M-RoPE positions; None for one-axis positions."""
    anyres: AnyresLayout | None = None
    """Set where LLaVA-OneVision sees tiles beside the base view."""
    fingerprint: bytes = b""
    """Canonical bytes of all parameters that influence the rows, for the content key."""

    @property
    def tile_patches(self) -> tuple[int, ...]:
        """Patches of each tile."""
        return tuple(tile.grid[0] * tile.grid[1] for tile in self.tiles)


class ImagePlanner(Protocol):
    """Per-family arithmetic, fixed by the model's configuration."""

    @property
    def family(self) -> str: ...

    @property
    def placeholder(self) -> str:
        """The string that stands for one image in a rendered chat template."""
        ...

    @property
    def image_token(self) -> str:
        """The token whose id fills an image's rows in the prompt."""
        ...

    @property
    def pixels(self) -> PixelConfig: ...

    @property
    def floor_pixels(self) -> int:
        """Fewest pixels that the tower can be shown for an image; a smaller max_pixels is a
        PlanError."""
        ...

    def plan(
        self, sizes: list[tuple[int, int]], limits: list[ResolutionLimit] | None = None
    ) -> list[ImagePlan]:
        """Plans for all images of one request, taken together, from (width, height) in pixels.

        Raises PlanError naming the image's index when a size cannot be served.
        """
        ...


class PlanError(ValueError):
    """An image's size cannot be served; `index` is its place among the request's images."""

    def __init__(self, index: int, message: str) -> None:
        super().__init__(message)
        self.index = index
