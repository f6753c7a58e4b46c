"""Vision towers by their sizes.

Owns: VisionShape, its reading from the vision part of a config.json, and the towers of well-known
models. Does not own: how many patches and tokens an image takes (vision_encoder/grid.py), or the
tower itself. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chunked_prefill.planner.devices import PlanError


@dataclass(frozen=True, slots=True)
class VisionShape:
    """A vision transformer and what joins it to the language model."""

    name: str
    layers: int
    width: int
    parameters: int
    """That each patch is multiplied by: patch embedding and layers, without norms and biases."""
    merger_parameters: int
    """That each row for the language model is multiplied by, deepstack's mergers included."""
    full_layers: int
    """Layers in which a patch attends to its whole tile; the others have windows."""
    window_patches: int = 0
    """Patches of a window."""


def read_vision_shape(name: str, config: Mapping[str, Any]) -> VisionShape:
    """The tower that a config.json states: of the Qwen-VL families, or a SigLIP or CLIP tower with
    the connector of Idefics3 or LLaVA. Raises PlanError without one, or for a missing key."""
    vision, text = config.get("vision_config"), config.get("text_config") or config
    if not isinstance(vision, Mapping):
        raise PlanError(f"config.json of {name} has no vision_config: the model sees no images")

    def number(*keys: str) -> int:
        for key in keys:
            value = vision.get(key)
            if isinstance(value, list):
                value = value[0] if value else None
            if isinstance(value, int | float) and value >= 1:
                return int(value)
        raise PlanError(f"vision_config of {name} lacks {' or '.join(keys)}, or it is under 1")

    layers, patch = number("depth", "num_hidden_layers"), number("patch_size")
    if "depth" not in vision:
        width = number("hidden_size")
        joined = width * int(config.get("scale_factor") or 1) ** 2
        out = int(text.get("hidden_size") or joined)
        second = 0 if "scale_factor" in config else out * out
        numbers = 3 * patch**2 * width + layers * _block(width, number("intermediate_size"), 2)
        return VisionShape(name, layers, width, numbers, joined * out + second, layers)
    width = number("embed_dim", "hidden_size")
    inner = width * number("mlp_ratio") if "mlp_ratio" in vision else number("intermediate_size")
    windows = int(vision.get("window_size") or 0) // patch
    joined = width * number("spatial_merge_size") ** 2
    out = number("hidden_size") if "embed_dim" in vision else number("out_hidden_size")
    mergers = 1 + len(vision.get("deepstack_visual_indexes") or ())
    numbers = 3 * number("temporal_patch_size") * patch**2 * width
    return VisionShape(
        name,
        layers,
        width,
        numbers + layers * _block(width, inner, 3 if windows else 2),
        mergers * (joined * joined + joined * out),
        len(vision.get("fullatt_block_indexes") or ()) if windows else layers,
        windows**2,
    )


def _block(width: int, inner: int, matrices: int) -> int:
    """Of one layer: four projections, and an MLP of two matrices, or three where it is gated."""
    return 4 * width**2 + matrices * width * inner


def _qwen2(family: str, **vision: Any) -> dict[str, Any]:
    common = {"depth": 32, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
    return {"model_type": family, "vision_config": common | vision}


def _qwen3(**vision: Any) -> dict[str, Any]:
    common = {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}
    return {"model_type": "qwen3_vl", "vision_config": common | vision}


_28_PIXELS = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 16_384}
_32_PIXELS = {"size": {"shortest_edge": 256 * 256, "longest_edge": 4096 * 4096}}
VISION_FILES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2-vl-7b": (_qwen2("qwen2_vl", embed_dim=1280, mlp_ratio=4, hidden_size=3584), _28_PIXELS),
    "qwen2.5-vl-7b": (
        _qwen2(
            "qwen2_5_vl",
            hidden_size=1280,
            intermediate_size=3420,
            out_hidden_size=3584,
            window_size=112,
            fullatt_block_indexes=[7, 15, 23, 31],
        ),
        _28_PIXELS,
    ),
    "qwen3-vl-2b": (
        _qwen3(
            depth=24,
            hidden_size=1024,
            intermediate_size=4096,
            out_hidden_size=2048,
            deepstack_visual_indexes=[5, 11, 17],
        ),
        _32_PIXELS,
    ),
    "qwen3-vl-8b": (
        _qwen3(
            depth=27,
            hidden_size=1152,
            intermediate_size=4304,
            out_hidden_size=4096,
            deepstack_visual_indexes=[8, 16, 24],
        ),
        _32_PIXELS,
    ),
}
"""Of the named shapes that see: the parts of config.json and of the image processor's file that
sizes follow from, as published with each model."""
