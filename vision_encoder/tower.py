"""Images in, embedding rows out: the ViT and the projector of one model as one resumable pass.

Owns: VisionTower, EncodeState. Does not own: which images share a pass or when (stage.py), where
rows are kept (embedding_arena.py), how weights are read from disk (an injected getter).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vision_encoder.config import VisionConfig
from vision_encoder.fused_linear import FusedLinear, Place, empty_parameter
from vision_encoder.packed_vit import PackedViT
from vision_encoder.patch_layout import LayoutError, PatchLayout, build_layout
from vision_encoder.plan import ImagePlan, Normalization
from vision_encoder.projector import Projector, arrange_anyres
from vision_encoder.tower_weights import load_weights


class PatchedImage(Protocol):
    """One preprocessed image (preprocess.py builds them)."""

    @property
    def patches(self) -> Tensor:
        """uint8 [P, channels * patch * patch], tiles in order, each by row or by cell as the
        family does."""
        ...

    @property
    def grids(self) -> Sequence[tuple[int, int]]:
        """Patch rows and columns of each tile."""
        ...

    @property
    def plan(self) -> ImagePlan: ...


@dataclass(slots=True)
class EncodeState:
    """A pass under way. `next_layer` counts up to the tower's `num_layers`."""

    plans: tuple[ImagePlan, ...]
    layout: PatchLayout
    states: Tensor
    """[S, D] after layer `next_layer` - 1; layers change it in place."""
    next_layer: int = 0
    features: dict[int, Tensor] = field(default_factory=dict)
    """Copies of the states at feature layers below the last."""
    deepstack: list[Tensor] = field(default_factory=list)
    """[N, D_text] for each deepstack layer passed, in packed order."""


class VisionTower(nn.Module):
    """Encodes images of any sizes in one packed pass.

    `encode` is `begin`, `run_layers` until done, `finish`; a scheduler may call these itself to
    put decoding steps between layers. An image's rows do not depend on what it is packed with
    (1e-5 in fp32).
    """

    def __init__(
        self,
        config: VisionConfig,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocates without initialising; `load_tower` fills the weights in."""
        super().__init__()
        place: Place = {"dtype": dtype, "device": device}
        width = config.vit.hidden
        self.config = config
        self.dtype, self.device = dtype, torch.device(device)
        self.vit = PackedViT(config.vit, **place)
        self.projector = Projector(config.projector, width * len(config.feature_layers), **place)
        self.deepstack = nn.ModuleList(
            Projector(config.projector, width, norm_merged=True, **place)
            for _ in config.deepstack_layers
        )
        self.newline = empty_parameter(config.projector.out, **place) if config.newline else None
        self.requires_grad_(False)

    @property
    def num_layers(self) -> int:
        return self.config.vit.layers

    def pack(self) -> None:
        """Moves weights into the CPU's packed layout (fp32 only); call once, after loading."""
        for module in self.modules():
            if isinstance(module, FusedLinear):
                module.pack()

    @torch.no_grad()
    def encode(self, images: Sequence[PatchedImage]) -> list[Tensor]:
        """Rows of each image, [num_rows, 1 + deepstack levels, D_text] in the order of
        `plan.pieces`, on the tower's device and in its dtype. Results may share storage."""
        if not images:
            return []
        state = self.begin(images)
        self.run_layers(state, self.num_layers)
        return self.finish(state)

    @torch.no_grad()
    def begin(self, images: Sequence[PatchedImage]) -> EncodeState:
        """Embeds the patches of at least one image.

        Raises LayoutError when patches, grids and plan of an image do not fit together.
        """
        for image in images:
            self._check(image)
        layout = build_layout(self.config, [image.grids for image in images], self.device)
        parts = [image.patches.to(self.device, non_blocking=True) for image in images]
        patches = parts[0] if len(parts) == 1 else torch.cat(parts)
        states = self.vit.embed(patches, layout)
        state = EncodeState(tuple(image.plan for image in images), layout, states)
        self._collect(state)
        return state

    @torch.no_grad()
    def run_layers(self, state: EncodeState, count: int) -> bool:
        """Runs up to `count` further layers; True once all have run."""
        for _ in range(min(count, self.num_layers - state.next_layer)):
            layer = state.next_layer
            state.states = self.vit.layers[layer](state.states, state.layout)
            if layer in self.config.deepstack_layers:
                merger = self.deepstack[self.config.deepstack_layers.index(layer)]
                state.deepstack.append(merger(state.states))
            state.next_layer += 1
            self._collect(state)
        return state.next_layer == self.num_layers

    @torch.no_grad()
    def finish(self, state: EncodeState) -> list[Tensor]:
        """Projects the states of a pass whose layers have all run; see `encode`."""
        assert state.next_layer == self.num_layers, "finish before the last layer"
        layout = state.layout
        chosen = [
            self.vit.finalize(state.states) if layer == self.num_layers else state.features[layer]
            for layer in self.config.feature_layers
        ]
        x = chosen[0] if len(chosen) == 1 else torch.cat(chosen, dim=-1)
        if layout.keep is not None:
            x = x.index_select(0, layout.keep)
        levels = [self.projector(x), *state.deepstack]
        rows = torch.stack(levels, dim=1) if len(levels) > 1 else levels[0][:, None]
        if layout.rows is not None:
            rows = rows.index_select(0, layout.rows)
        images = torch.split(rows, [sum(counts) for counts in layout.tile_rows])
        out = [
            self._arrange(image, counts, plan)
            for image, counts, plan in zip(images, layout.tile_rows, state.plans, strict=True)
        ]
        for image, plan in zip(out, state.plans, strict=True):
            if len(image) != plan.num_rows:
                raise LayoutError(
                    f"an image of {plan.width} x {plan.height} px gave {len(image)} rows where its "
                    f"plan promised {plan.num_rows}; the plan was made for another model"
                )
        return out

    def _arrange(self, rows: Tensor, tile_rows: tuple[int, ...], plan: ImagePlan) -> Tensor:
        if self.newline is None:
            return rows
        tiles = torch.split(rows[:, 0], list(tile_rows))
        return arrange_anyres(tiles, plan.anyres, self.newline)[:, None]

    def _collect(self, state: EncodeState) -> None:
        """Keeps a copy of the states where an earlier feature layer asks for them."""
        layer = state.next_layer
        if layer in self.config.feature_layers and layer < self.num_layers:
            state.features[layer] = state.states.clone()

    def _check(self, image: PatchedImage) -> None:
        expected = (sum(h * w for h, w in image.grids), self.config.vit.patch_elements)
        patches = image.patches
        if patches.dtype != torch.uint8 or tuple(patches.shape) != expected:
            raise LayoutError(
                f"patches are {patches.dtype} {tuple(patches.shape)} where grids "
                f"{tuple(image.grids)} need torch.uint8 {expected}"
            )
        if tuple(image.grids) != tuple(tile.grid for tile in image.plan.tiles):
            raise LayoutError(f"grids {tuple(image.grids)} differ from those of the plan's tiles")


def load_tower(
    config: dict[str, Any],
    preprocessor: Normalization,
    names: frozenset[str],
    get: Callable[[str], Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> VisionTower:
    """The vision tower of a checkpoint.

    `config` is config.json; `names` are the checkpoint's tensors and `get` reads one. Names as on
    the hub and as transformers 5 saves them are both understood; other tensors are not read.
    `progress(done_bytes, total_bytes)` is called after each tensor.

    Raises VisionConfigError (unsupported), TowerLoadError (missing or misshapen tensors).
    """
    tower = VisionTower(VisionConfig.from_hf(config), dtype=dtype, device=device)
    load_weights(tower, preprocessor, names, get, progress)
    tower.pack()
    return tower.eval()
