"""Where each weight of a tower lies in a Hugging Face checkpoint.

Owns: names per family and their prefixes, fusion of Q, K and V, folding of pixel normalisation and
temporal slices into the patch embedding. Does not own: files (an injected getter reads tensors).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vision_encoder.config import VisionConfig
from vision_encoder.fused_linear import FusedLinear
from vision_encoder.packed_vit import PIXEL_CENTRE, VitLayer
from vision_encoder.plan import Normalization
from vision_encoder.projector import Projector

if TYPE_CHECKING:
    from vision_encoder.tower import VisionTower


class TowerLoadError(ValueError):
    """The checkpoint lacks tensors of the vision tower or has them in other shapes."""

    def __init__(
        self,
        missing: Sequence[str],
        mismatched: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]],
    ) -> None:
        self.missing = tuple(missing)
        self.mismatched = tuple(mismatched)
        shapes = [f"{name} is {got}, expected {want}" for name, want, got in mismatched]
        parts = [
            f"{len(lines)} {what}: {'; '.join(lines[:8])}{' ...' if len(lines) > 8 else ''}"
            for what, lines in (("missing", list(missing)), ("of another shape", shapes))
            if lines
        ]
        super().__init__(
            f"vision tower weights {', and '.join(parts)}. Does config.json belong to this "
            "checkpoint, and are all its files there?"
        )


@dataclass(frozen=True, slots=True)
class _Entry:
    group: str
    """Which prefix the name takes: a key of `_PREFIXES`."""
    name: str
    target: Tensor


_PREFIXES = {
    "vision": ("model.vision_model.", "vision_model."),
    "connector": ("model.connector.", "connector."),
    "visual": ("model.visual.", "visual."),
    "vision_tower": (
        "model.vision_tower.vision_model.",
        "vision_tower.vision_model.",
        "model.vision_tower.",
        "vision_tower.",
    ),
    "llava": ("model.", ""),
}
"""As saved since transformers 5, as on the hub, and with or without the inner module of CLIP and
SigLIP; the prefix under which most of a group's tensors exist is taken."""


def load_weights(
    tower: VisionTower,
    normalization: Normalization,
    names: frozenset[str],
    get: Callable[[str], Tensor],
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Fills a tower's parameters in place, converting to its dtype tensor by tensor.

    Raises TowerLoadError listing everything missing or misshapen.
    """
    qwen = tower.config.patches_in_cells
    entries = list(_qwen_entries(tower) if qwen else _siglip_entries(tower))
    kernel, bias = _patch_names(tower.config)
    group = entries[0].group
    members: dict[str, list[str]] = {group: [kernel]}
    for entry in entries:
        members.setdefault(entry.group, []).append(entry.name)
    prefixes = {key: _prefix(key, own, names) for key, own in members.items()}
    full = [prefixes[entry.group] + entry.name for entry in entries]
    patch_full = [prefixes[group] + name for name in (kernel, bias) if name is not None]
    missing = [name for name in (*patch_full, *full) if name not in names]
    if missing:
        raise TowerLoadError(missing, ())

    total = sum(p.numel() * p.element_size() for p in tower.parameters())
    mismatched: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
    done = 0
    with torch.no_grad():
        for name, entry in zip(full, entries, strict=True):
            tensor, target = get(name), entry.target
            if tensor.shape != target.shape:
                mismatched.append((name, tuple(target.shape), tuple(tensor.shape)))
                continue
            target.copy_(tensor)
            done += target.numel() * target.element_size()
            if progress is not None:
                progress(done, total)
        patch_tensors = [get(name) for name in patch_full]
        for name, tensor, want in zip(
            patch_full, patch_tensors, _patch_shapes(tower.config), strict=False
        ):
            if tuple(tensor.shape) != want:
                mismatched.append((name, want, tuple(tensor.shape)))
        if mismatched:
            raise TowerLoadError((), mismatched)
        weight, offset = fold_patch_embedding(
            patch_tensors[0], patch_tensors[1] if bias is not None else None, normalization
        )
        _weight(tower.vit.patch_embed).copy_(weight)
        _bias(tower.vit.patch_embed).copy_(offset)
    if progress is not None:
        progress(total, total)


def fold_patch_embedding(
    kernel: Tensor, bias: Tensor | None, normalization: Normalization
) -> tuple[Tensor, Tensor]:
    """Weight [D, C * p * p] and bias [D], float64, of the Linear on (uint8 pixel - PIXEL_CENTRE)
    that equals the convolution on normalised pixels.

    A kernel [D, C, frames, p, p] sees one still image in all frames, so it is summed over them.
    With x = (u * rescale - mean) / std, and u = PIXEL_CENTRE + v: x = v * rescale / std
    + (PIXEL_CENTRE * rescale - mean) / std.
    """
    kernel = kernel.double()
    if kernel.ndim == 5:
        kernel = kernel.sum(2)
    mean = torch.tensor(tuple(normalization.mean), dtype=torch.float64, device=kernel.device)
    std = torch.tensor(tuple(normalization.std), dtype=torch.float64, device=kernel.device)
    weight = kernel * (normalization.rescale / std)[None, :, None, None]
    centre = (PIXEL_CENTRE * normalization.rescale - mean) / std
    offset = (kernel * centre[None, :, None, None]).sum((1, 2, 3))
    if bias is not None:
        offset = offset + bias.double()
    return weight.flatten(1), offset


def _patch_names(config: VisionConfig) -> tuple[str, str | None]:
    stem = "patch_embed.proj" if config.patches_in_cells else "embeddings.patch_embedding"
    return f"{stem}.weight", f"{stem}.bias" if config.vit.patch_bias else None


def _patch_shapes(config: VisionConfig) -> tuple[tuple[int, ...], ...]:
    vit = config.vit
    frames = (vit.temporal_patch,) if config.patches_in_cells else ()
    return (vit.hidden, vit.channels, *frames, vit.patch, vit.patch), (vit.hidden,)


def _prefix(group: str, members: Sequence[str], names: frozenset[str]) -> str:
    return max(_PREFIXES[group], key=lambda prefix: sum(prefix + name in names for name in members))


def _siglip_entries(tower: VisionTower) -> Iterator[_Entry]:
    """SigLIP and CLIP under Idefics3's or LLaVA's names."""
    llava = tower.config.family.startswith("llava")
    group = "vision_tower" if llava else "vision"
    vit = tower.vit
    assert vit.positions is not None
    yield _Entry(group, "embeddings.position_embedding.weight", vit.positions)
    if vit.cls is not None:
        yield _Entry(group, "embeddings.class_embedding", vit.cls)
    if vit.pre_norm is not None:
        # CLIP's own spelling.
        yield from _norm(group, "pre_layrnorm", vit.pre_norm)
    if vit.post_norm is not None:
        yield from _norm(group, "post_layernorm", vit.post_norm)
    for index, layer in enumerate(vit.layers):
        assert isinstance(layer, VitLayer)
        stem = f"encoder.layers.{index}."
        yield from _norm(group, stem + "layer_norm1", layer.norm1)
        yield from _norm(group, stem + "layer_norm2", layer.norm2)
        parts = tuple(f"{stem}self_attn.{letter}_proj" for letter in "qkv")
        yield from _stacked(group, parts, layer.qkv)
        yield from _linear(group, stem + "self_attn.out_proj", layer.out)
        yield from _linear(group, stem + "mlp.fc1", layer.fc1)
        yield from _linear(group, stem + "mlp.fc2", layer.fc2)
    projector = tower.projector
    if not llava:
        yield from _linear("connector", "modality_projection.proj", projector.fc1)
        return
    assert projector.fc2 is not None
    yield from _linear("llava", "multi_modal_projector.linear_1", projector.fc1)
    yield from _linear("llava", "multi_modal_projector.linear_2", projector.fc2)
    if tower.newline is not None:
        yield _Entry("llava", "image_newline", tower.newline)


def _qwen_entries(tower: VisionTower) -> Iterator[_Entry]:
    family, vit, group = tower.config.family, tower.vit, "visual"
    mlp = {"qwen2_vl": ("fc1", "fc2"), "qwen3_vl": ("linear_fc1", "linear_fc2")}
    merger = ("norm", "linear_fc1", "linear_fc2")
    if family != "qwen3_vl":
        merger = ("ln_q", "mlp.0", "mlp.2")
    for index, layer in enumerate(vit.layers):
        assert isinstance(layer, VitLayer)
        stem = f"blocks.{index}."
        yield from _norm(group, stem + "norm1", layer.norm1)
        yield from _norm(group, stem + "norm2", layer.norm2)
        yield from _linear(group, stem + "attn.qkv", layer.qkv)
        yield from _linear(group, stem + "attn.proj", layer.out)
        if layer.gate_activation is not None:
            gates = (stem + "mlp.gate_proj", stem + "mlp.up_proj")
            yield from _stacked(group, gates, layer.fc1)
            yield from _linear(group, stem + "mlp.down_proj", layer.fc2)
        else:
            first, second = mlp[family]
            yield from _linear(group, f"{stem}mlp.{first}", layer.fc1)
            yield from _linear(group, f"{stem}mlp.{second}", layer.fc2)
    if vit.positions is not None:
        yield _Entry(group, "pos_embed.weight", vit.positions)
    yield from _merger("merger", merger, tower.projector)
    for index, module in enumerate(tower.deepstack):
        assert isinstance(module, Projector)
        yield from _merger(f"deepstack_merger_list.{index}", merger, module)


def _merger(stem: str, names: tuple[str, str, str], module: Projector) -> Iterator[_Entry]:
    assert module.norm is not None
    assert module.fc2 is not None
    yield from _norm("visual", f"{stem}.{names[0]}", module.norm)
    yield from _linear("visual", f"{stem}.{names[1]}", module.fc1)
    yield from _linear("visual", f"{stem}.{names[2]}", module.fc2)


def _norm(group: str, stem: str, module: nn.Module) -> Iterator[_Entry]:
    assert isinstance(module, (nn.LayerNorm, nn.RMSNorm))
    yield _Entry(group, stem + ".weight", module.weight)
    if isinstance(module, nn.LayerNorm):
        yield _Entry(group, stem + ".bias", module.bias)


def _linear(group: str, stem: str, module: FusedLinear) -> Iterator[_Entry]:
    return _stacked(group, (stem,), module)


def _stacked(group: str, stems: Sequence[str], module: FusedLinear) -> Iterator[_Entry]:
    """Equal-sized Linears stacked into one, in order."""
    for stem, part in zip(stems, _weight(module).detach().chunk(len(stems)), strict=True):
        yield _Entry(group, stem + ".weight", part)
    if module.bias is not None:
        for stem, part in zip(stems, module.bias.detach().chunk(len(stems)), strict=True):
            yield _Entry(group, stem + ".bias", part)


def _weight(module: FusedLinear) -> Tensor:
    assert module.weight is not None, "packed before its weights were loaded"
    return module.weight


def _bias(module: FusedLinear) -> Tensor:
    assert module.bias is not None
    return module.bias
