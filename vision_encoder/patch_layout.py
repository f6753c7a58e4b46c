"""The order in which the patches of many images stand in one pass, and who attends to whom.

Owns: PatchLayout - the permutation from arriving patches to packed states, runs of equal-sized
attention segments, positions and rotary angles of each state, and the way back to rows per image.
Does not own: weights, activations, or which images share a pass (stage.py).

Three choices make the pass cheap. Attention inside a tile does not depend on the order of its
patches, so patches are permuted once, as bytes: cell by cell, which turns every merge or pixel
shuffle into a view. Tiles are sorted by size, so equal-sized tiles attend in one batched call.
Windows are sorted by size within their image for the same reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from vision_encoder.config import VisionConfig

Grid = tuple[int, int]


class LayoutError(ValueError):
    """A tile's grid does not suit the tower: planner and tower disagree about the model."""


@dataclass(frozen=True, slots=True)
class Run:
    """`count` adjacent segments of `length` states each, from state `start` on."""

    start: int
    count: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.count * self.length


@dataclass(frozen=True, slots=True)
class PatchLayout:
    """A packed pass over P patches, S states (P plus a CLS per tile) and N rows.

    All tensors live on the tower's device; index tensors are int64.
    """

    gather: Tensor | None
    """[P]: index of the arriving patch that stands at each packed place; None is the identity."""
    tile_runs: tuple[Run, ...]
    window_runs: tuple[Run, ...]
    """Empty without windows."""
    position_index: Tensor | None
    """[taps, S] rows of the position table that a state's position is mixed from."""
    position_weight: Tensor | None
    """[taps, S] float32; None with one tap of weight 1."""
    cos: Tensor | None
    """[S, 1, 1, head_dim / 2] float32, as is `sin`."""
    sin: Tensor | None
    keep: Tensor | None
    """States that reach the projector when each tile's first is dropped; None keeps all."""
    rows: Tensor | None
    """[N] packed place of each row, rows in the order of images, tiles, cells; None: identity."""
    tile_rows: tuple[tuple[int, ...], ...]
    """For each image, the rows of each of its tiles."""

    @property
    def num_states(self) -> int:
        return self.tile_runs[-1].stop if self.tile_runs else 0


@dataclass(frozen=True, slots=True)
class _GridOrder:
    """What depends on a tile's grid alone."""

    source: Tensor
    """[P] arriving patch of each packed place within the tile."""
    row: Tensor
    """[P] patch coordinates, int64, as is `col`."""
    col: Tensor
    cells: Tensor
    """[cells] raster index of the cell at each packed place."""
    windows: tuple[int, ...]
    """Patches of each attention window, in packed order."""


def build_layout(
    config: VisionConfig, images: Sequence[Sequence[Grid]], device: torch.device | str = "cpu"
) -> PatchLayout:
    """Layout of one pass over `images`, each the (rows, columns) patch grids of its tiles.

    Raises LayoutError when a grid is not divisible into cells, or is not the one grid that the
    position table was learned for.
    """
    vit, cell = config.vit, config.projector.merge**2
    extra = 1 if vit.cls_token else 0
    dropped = 1 if config.drop_first else 0
    tiles = [(i, grid) for i, grids in enumerate(images) for grid in grids]
    orders = {grid: _order(config, grid) for grid in {grid for _, grid in tiles}}
    positions = {grid: _positions(config, grid, orders[grid]) for grid in orders}
    sizes = [height * width for _, (height, width) in tiles]
    packed = sorted(range(len(tiles)), key=lambda tile: sizes[tile])
    patch_start = _starts(sizes)

    gather = [orders[tiles[t][1]].source + patch_start[t] for t in packed]
    row_counts = [(size + extra - dropped) // cell for size in sizes]
    row_start = _starts(row_counts)
    rows = torch.empty(sum(row_counts), dtype=torch.int64)
    place = 0
    for t in packed:
        span = torch.arange(place, place + row_counts[t])
        cells = orders[tiles[t][1]].cells if cell > 1 else torch.arange(row_counts[t])
        rows[row_start[t] + cells] = span
        place += row_counts[t]

    lengths = [sizes[t] + extra for t in packed]
    windows = [length for t in packed for length in orders[tiles[t][1]].windows]
    cos, sin = _rope(config, [orders[tiles[t][1]] for t in packed])
    index = [positions[tiles[t][1]] for t in packed]
    keep = _without_first(lengths) if config.drop_first else None
    tile_rows: list[list[int]] = [[] for _ in images]
    for (image, _), count in zip(tiles, row_counts, strict=True):
        tile_rows[image].append(count)

    def on(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device, non_blocking=True)

    weighted = vit.positions == "interpolated"
    return PatchLayout(
        gather=on(_unless_identity(torch.cat(gather))),
        tile_runs=_runs(lengths),
        window_runs=_runs(windows) if vit.window is not None else (),
        position_index=on(torch.cat([i for i, _ in index], 1)) if vit.positions != "none" else None,
        position_weight=on(torch.cat([w for _, w in index], 1)) if weighted else None,
        cos=on(cos),
        sin=on(sin),
        keep=on(keep),
        rows=on(_unless_identity(rows)),
        tile_rows=tuple(tuple(counts) for counts in tile_rows),
    )


def _order(config: VisionConfig, grid: Grid) -> _GridOrder:
    merge, window = config.projector.merge, config.vit.window
    height, width = grid
    if height < 1 or width < 1 or height % merge or width % merge:
        raise LayoutError(
            f"a tile of {height} x {width} patches does not divide into cells of "
            f"{merge} x {merge}; the plan was made for another model"
        )
    down, across = height // merge, width // merge
    cells = torch.arange(down * across)
    windows: tuple[int, ...] = ()
    if window is not None:
        owner = (cells // across // window) * -(-across // window) + cells % across // window
        counts = torch.bincount(owner)
        by_size = torch.argsort(counts, descending=True, stable=True)
        rank = torch.empty_like(by_size)
        rank[by_size] = torch.arange(len(by_size))
        cells = torch.argsort(rank[owner], stable=True)
        windows = tuple((counts[by_size] * merge**2).tolist())
    inside = torch.arange(merge**2)
    row = ((cells // across * merge)[:, None] + inside // merge).flatten()
    col = ((cells % across * merge)[:, None] + inside % merge).flatten()
    if config.patches_in_cells:
        source = (cells[:, None] * merge**2 + inside).flatten()
    else:
        source = row * width + col
    return _GridOrder(source, row, col, cells, windows)


def _positions(config: VisionConfig, grid: Grid, order: _GridOrder) -> tuple[Tensor, Tensor]:
    """Taps into the position table, [taps, states of the tile], and their weights."""
    vit, side = config.vit, config.vit.position_side
    one = torch.ones(1, len(order.row))
    if vit.positions == "none":
        return torch.zeros(1, 0, dtype=torch.int64), one
    if vit.positions == "interpolated":
        return _bilinear(grid, side, order)
    if vit.positions == "bucketed":
        row = _buckets(grid[0], side)[order.row]
        col = _buckets(grid[1], side)[order.col]
    else:
        if grid != (side, side):
            raise LayoutError(
                f"a tile of {grid[0]} x {grid[1]} patches, but positions were learned for "
                f"{side} x {side}; the plan was made for another model"
            )
        row, col = order.row, order.col
    index = row * side + col
    if vit.cls_token:
        index = torch.cat([index.new_zeros(1), index + 1])
    return index[None], one


def _buckets(count: int, side: int) -> Tensor:
    """Learned row (or column) for each of `count` rows spread over a table of `side`.

    NaViT's fractional coordinates i / count, cut at multiples of 1 / side. In float32 a coordinate
    can fall just short of its cut, and checkpoints were trained on exactly that, so the steps
    are multiplied, clamped and compared in the precision that transformers uses.
    """
    cuts = torch.arange(1 / side, 1.0, 1 / side)
    step = 1.0 / torch.tensor(count)
    coordinate = (torch.arange(count, dtype=torch.float32) * step).clamp(max=1.0 - 1e-6)
    return torch.bucketize(coordinate, cuts, right=True)


def _bilinear(grid: Grid, side: int, order: _GridOrder) -> tuple[Tensor, Tensor]:
    """Four corners around each patch on a table of side x side whose corners are the grid's."""
    taps, weights = [], []
    for count, coordinate in ((grid[0], order.row), (grid[1], order.col)):
        at = coordinate.to(torch.float32) * (side - 1) / max(count - 1, 1)
        low = at.floor()
        high_weight = at - low
        first = low.long()
        taps.append((first, (first + 1).clamp(max=side - 1)))
        weights.append((1 - high_weight, high_weight))
    index = [r * side + c for r in taps[0] for c in taps[1]]
    weight = [r * c for r in weights[0] for c in weights[1]]
    return torch.stack(index), torch.stack(weight)


def _rope(
    config: VisionConfig, orders: Sequence[_GridOrder]
) -> tuple[Tensor | None, Tensor | None]:
    """Axial 2-D rope: the first half of a head's frequencies turns by row, the second by column."""
    theta = config.vit.rope_theta
    if theta is None:
        return None, None
    axis = config.vit.head_dim // 2
    frequency = 1.0 / theta ** (torch.arange(0, axis, 2, dtype=torch.float32) / axis)
    row = torch.cat([order.row for order in orders]).float()
    col = torch.cat([order.col for order in orders]).float()
    angle = torch.cat([row[:, None] * frequency, col[:, None] * frequency], dim=1)
    return angle.cos()[:, None, None], angle.sin()[:, None, None]


def _runs(lengths: Sequence[int]) -> tuple[Run, ...]:
    runs, start = [], 0
    for length, group in groupby(lengths):
        run = Run(start, len(list(group)), length)
        runs.append(run)
        start = run.stop
    return tuple(runs)


def _without_first(lengths: Sequence[int]) -> Tensor:
    keep = torch.ones(sum(lengths), dtype=torch.bool)
    keep[torch.tensor(_starts(lengths))] = False
    return keep.nonzero().flatten()


def _starts(counts: Sequence[int]) -> list[int]:
    starts, total = [], 0
    for count in counts:
        starts.append(total)
        total += count
    return starts


def _unless_identity(index: Tensor) -> Tensor | None:
    return None if torch.equal(index, torch.arange(len(index))) else index
