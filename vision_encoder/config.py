"""What a vision tower is made of: flags of the ViT and of the projector, and what encoding costs.

Owns: VitConfig, ProjectorConfig, VisionConfig (read from a Hugging Face config.json), and the FLOPs
of encoding a planned image. Does not own: tensors, weights, or token counts (grid.py). Imports no
torch, so that planners and the stage's budget run anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vision_encoder.plan import ImagePlan

Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu"]
Norm = Literal["layer", "rms"]
Positions = Literal["learned", "bucketed", "interpolated", "none"]
Json = Mapping[str, Any]

FAMILIES = (
    "smolvlm",
    "idefics3",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "llava",
    "llava_onevision",
)

_ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "swish": "silu",
}

_TEXT_HIDDEN_DEFAULT = {"llama": 4096, "mistral": 4096, "qwen2": 4096}
"""`hidden_size` of transformers' text config classes, which older config.json files leave out."""


class VisionConfigError(ValueError):
    """A config.json describes a vision tower that cannot be built; `field` names the culprit."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


@dataclass(frozen=True, slots=True)
class VitConfig:
    """One ViT by flags; sizes in elements, patch in pixels."""

    hidden: int
    layers: int
    """Layers that are computed: none above the highest feature layer."""
    heads: int
    intermediate: int
    patch: int
    activation: Activation
    channels: int = 3
    temporal_patch: int = 1
    """Frames under one patch embedding kernel; a still image repeats its only frame."""
    patch_bias: bool = True
    norm: Norm = "layer"
    norm_eps: float = 1e-6
    gated_mlp: bool = False
    positions: Positions = "learned"
    position_side: int = 0
    """Rows (= columns) of the grid of learned positions."""
    rope_theta: float | None = None
    """Base of the 2-D rotary embedding; None rotates nothing."""
    cls_token: bool = False
    pre_norm: bool = False
    """A norm between the embeddings and the first layer (CLIP)."""
    post_norm: bool = False
    """A norm after the last layer."""
    window: int | None = None
    """Side, in merged cells, of attention windows; None attends over the whole tile everywhere."""
    full_attention_layers: tuple[int, ...] = ()
    """Layers that attend over the whole tile although `window` is set."""

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def patch_elements(self) -> int:
        """Bytes of one uint8 patch: channels * patch * patch."""
        return self.channels * self.patch * self.patch

    def windowed(self, layer: int) -> bool:
        return self.window is not None and layer not in self.full_attention_layers


@dataclass(frozen=True, slots=True)
class ProjectorConfig:
    """From ViT states to rows of the language model's width: norm, merge, one or two Linears."""

    merge: int
    """Side of the square of patches that becomes one row."""
    out: int
    """Width of the language model."""
    inner: int | None
    """Width between two Linears; None means one Linear."""
    activation: Activation = "gelu"
    bias: bool = True
    norm: Norm | None = None
    norm_eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class VisionCost:
    """FLOPs (a multiply and an add are two) of encoding one image."""

    linear_flops: float
    """Grows with the number of patches."""
    attention_flops: float
    """Grows with the square of a segment's patches: QKᵀ and the product with V."""

    @property
    def total(self) -> float:
        return self.linear_flops + self.attention_flops


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """A whole tower. `feature_layers` index the states before layer 0, after layer 0, and so on;
    several are concatenated in the order given, without `post_norm`."""

    family: str
    vit: VitConfig
    projector: ProjectorConfig
    feature_layers: tuple[int, ...]
    patches_in_cells: bool = False
    """Patches arrive cell by cell (merge x merge at a time, as Qwen's do) instead of row by row."""
    drop_first: bool = False
    """Leave out each tile's first state (the CLS token of CLIP)."""
    deepstack_layers: tuple[int, ...] = ()
    """Layers whose output is projected by a merger of its own, in the order of the rows' slots."""
    newline: bool = False
    """A learned row ends an image, or each line of its picture of tiles (LLaVA-OneVision)."""

    @property
    def row_shape(self) -> tuple[int, int]:
        """Shape of one embedding row: (1 + deepstack levels, text width)."""
        return 1 + len(self.deepstack_layers), self.projector.out

    @classmethod
    def from_hf(cls, config: Json) -> VisionConfig:
        """Reads the config.json of a vision-language model; missing keys take the defaults of
        transformers' config classes.

        Raises VisionConfigError naming the field when the family or a value is not supported.
        """
        family = config.get("model_type")
        if family in ("smolvlm", "idefics3"):
            built = _idefics3(family, config)
        elif family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
            built = _qwen(family, config)
        elif family in ("llava", "llava_onevision"):
            built = _llava(family, config)
        else:
            raise VisionConfigError(
                "model_type", f"{family!r} has no vision tower here; one of {', '.join(FAMILIES)}"
            )
        _check(built)
        return built

    def cost(self, plan: ImagePlan) -> VisionCost:
        """FLOPs of encoding an image: patch embedding, all layers, mergers and projector."""
        vit, merge = self.vit, self.projector.merge
        patches = sum(tile.grid[0] * tile.grid[1] for tile in plan.tiles)
        states = patches + (len(plan.tiles) if vit.cls_token else 0)
        linear = 2.0 * patches * vit.patch_elements * vit.hidden
        attention = 0.0
        for layer in range(vit.layers):
            part = self.layer_cost(plan, layer)
            linear += part.linear_flops
            attention += part.attention_flops
        kept = states - (len(plan.tiles) if self.drop_first else 0)
        cells = kept / merge**2
        width = vit.hidden * merge**2 * len(self.feature_layers)
        inner, out = self.projector.inner, self.projector.out
        per_cell = width * out if inner is None else width * inner + inner * out
        linear += 2.0 * cells * per_cell * (1 + len(self.deepstack_layers))
        return VisionCost(linear, attention)

    def layer_cost(self, plan: ImagePlan, layer: int) -> VisionCost:
        """FLOPs of one layer over all tiles of an image, for granting quanta of layers."""
        vit = self.vit
        extra = 1 if vit.cls_token else 0
        states = sum(tile.grid[0] * tile.grid[1] + extra for tile in plan.tiles)
        mlp = (3 if vit.gated_mlp else 2) * vit.hidden * vit.intermediate
        linear = 2.0 * states * (4 * vit.hidden**2 + mlp)
        if vit.windowed(layer):
            pairs = sum(self._window_pairs(tile.grid) for tile in plan.tiles)
        else:
            pairs = sum((tile.grid[0] * tile.grid[1] + extra) ** 2 for tile in plan.tiles)
        return VisionCost(linear, 4.0 * pairs * vit.hidden)

    def flops(self, plan: ImagePlan) -> float:
        return self.cost(plan).total

    def _window_pairs(self, grid: tuple[int, int]) -> int:
        """Sum over windows of the squared number of patches. A window is the product of an
        interval of rows and one of columns, so the sum factors."""
        window, merge = self.vit.window or 1, self.projector.merge
        sides = 1
        for cells in (grid[0] // merge, grid[1] // merge):
            full, rest = divmod(cells, window)
            sides *= full * window**2 + rest**2
        return int(sides * merge**4)


def _idefics3(family: str, config: Json) -> VisionConfig:
    vision = _section(config, "vision_config")
    layers = _int(vision, "num_hidden_layers", 12)
    patch = _int(vision, "patch_size", 32)
    vit = VitConfig(
        hidden=_int(vision, "hidden_size", 1152),
        layers=layers,
        heads=_int(vision, "num_attention_heads", 16),
        intermediate=_int(vision, "intermediate_size", 3072),
        patch=patch,
        channels=_int(vision, "num_channels", 3),
        activation=_activation(vision, "hidden_act", "gelu_pytorch_tanh"),
        norm_eps=float(vision.get("layer_norm_eps", 1e-6)),
        positions="bucketed",
        position_side=_int(vision, "image_size", 224) // patch,
        post_norm=True,
    )
    projector = ProjectorConfig(
        merge=_int(config, "scale_factor", 2), out=_text_hidden(config), inner=None, bias=False
    )
    return VisionConfig(family, vit, projector, feature_layers=(layers,))


def _qwen(family: str, config: Json) -> VisionConfig:
    vision = _section(config, "vision_config")
    modern, old = family == "qwen3_vl", family == "qwen2_vl"
    windows = family == "qwen2_5_vl"
    patch = _int(vision, "patch_size", 16 if modern else 14)
    merge = _int(vision, "spatial_merge_size", 2)
    layers = _int(vision, "depth", 27 if modern else 32)
    rope = vision.get("rope_parameters") or {}
    if old:
        # Qwen2-VL alone calls the ViT's width embed_dim and the language model's hidden_size.
        hidden = _int(vision, "embed_dim", 1280)
        out = _int(vision, "hidden_size", 3584)
        intermediate = int(hidden * float(vision.get("mlp_ratio", 4)))
    else:
        hidden = _int(vision, "hidden_size", 1152 if modern else 3584)
        out = _int(vision, "out_hidden_size", 3584)
        intermediate = _int(vision, "intermediate_size", 4304 if modern else 3420)
    default_activation = {"qwen2_vl": "quick_gelu", "qwen2_5_vl": "silu"}
    vit = VitConfig(
        hidden=hidden,
        layers=layers,
        heads=_int(vision, "num_heads", 16),
        intermediate=intermediate,
        patch=patch,
        channels=_int(vision, "in_channels", 3),
        temporal_patch=_int(vision, "temporal_patch_size", 2),
        patch_bias=modern,
        activation=_activation(
            vision, "hidden_act", default_activation.get(family, "gelu_pytorch_tanh")
        ),
        norm="rms" if windows else "layer",
        norm_eps=1e-6,
        gated_mlp=windows,
        positions="interpolated" if modern else "none",
        position_side=int(_int(vision, "num_position_embeddings", 2304) ** 0.5) if modern else 0,
        rope_theta=float(rope.get("rope_theta", 10_000.0)),
        window=_int(vision, "window_size", 112) // merge // patch if windows else None,
        full_attention_layers=(
            tuple(vision.get("fullatt_block_indexes", (7, 15, 23, 31))) if windows else ()
        ),
    )
    projector = ProjectorConfig(
        merge=merge, out=out, inner=hidden * merge**2, norm=vit.norm, norm_eps=1e-6
    )
    deepstack = tuple(vision.get("deepstack_visual_indexes", (8, 16, 24))) if modern else ()
    return VisionConfig(
        family, vit, projector, (layers,), patches_in_cells=True, deepstack_layers=deepstack
    )


_LLAVA_VISION_DEFAULT: Mapping[str, Json] = {
    "llava": {
        "model_type": "clip_vision_model",
        "intermediate_size": 4096,
        "hidden_size": 1024,
        "patch_size": 14,
        "image_size": 336,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
    },
    "llava_onevision": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "patch_size": 14,
        "image_size": 384,
        "num_hidden_layers": 26,
        "num_attention_heads": 16,
    },
}
"""The towers that transformers builds when config.json has no vision_config at all."""


def _llava(family: str, config: Json) -> VisionConfig:
    default = _LLAVA_VISION_DEFAULT[family]
    vision = config.get("vision_config") or default
    kind = vision.get("model_type", default["model_type"])
    if kind not in ("clip_vision_model", "siglip_vision_model"):
        raise VisionConfigError(
            "vision_config.model_type",
            f"{kind!r} is not supported in {family}; clip_vision_model or siglip_vision_model is",
        )
    clip = kind == "clip_vision_model"
    total = _int(vision, "num_hidden_layers", 12)
    chosen = config.get("vision_feature_layer", -2 if family == "llava" else -1)
    features = _feature_layers(chosen, total)
    strategy = config.get(
        "vision_feature_select_strategy", "default" if family == "llava" else "full"
    )
    patch = _int(vision, "patch_size", 32 if clip else 16)
    vit = VitConfig(
        hidden=_int(vision, "hidden_size", 768),
        layers=max(features),
        heads=_int(vision, "num_attention_heads", 12),
        intermediate=_int(vision, "intermediate_size", 3072),
        patch=patch,
        channels=_int(vision, "num_channels", 3),
        patch_bias=not clip,
        activation=_activation(vision, "hidden_act", "quick_gelu" if clip else "gelu_pytorch_tanh"),
        norm_eps=float(vision.get("layer_norm_eps", 1e-5 if clip else 1e-6)),
        position_side=_int(vision, "image_size", 224) // patch,
        cls_token=clip,
        pre_norm=clip,
    )
    width = _text_hidden(config)
    projector = ProjectorConfig(
        merge=1,
        out=width,
        inner=width,
        activation=_activation(config, "projector_hidden_act", "gelu"),
        bias=bool(config.get("multimodal_projector_bias", True)),
    )
    if strategy not in ("default", "full"):
        raise VisionConfigError(
            "vision_feature_select_strategy", f"{strategy!r} is neither 'default' nor 'full'"
        )
    newline = family == "llava_onevision"
    if newline and clip == (strategy == "full"):
        raise VisionConfigError(
            "vision_feature_select_strategy",
            f"{strategy!r} on {kind} leaves a number of states that is no square grid, which "
            "llava_onevision needs",
        )
    return VisionConfig(
        family,
        vit,
        projector,
        features,
        drop_first=strategy == "default",
        newline=newline,
    )


def _feature_layers(chosen: int | Sequence[int], total: int) -> tuple[int, ...]:
    wanted = (chosen,) if isinstance(chosen, int) else tuple(chosen)
    for index in wanted:
        if not -total - 1 <= index <= total:
            raise VisionConfigError(
                "vision_feature_layer",
                f"{index} is outside -{total + 1} to {total}, the states of {total} layers",
            )
    return tuple(index % (total + 1) for index in wanted)


def _section(config: Json, name: str) -> Json:
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise VisionConfigError(name, f"expected an object, got {type(value).__name__}")
    return value


def _int(config: Json, name: str, default: int) -> int:
    """An integer; square sizes given as a pair of equal numbers count as one."""
    value = config.get(name)
    if value is None:
        return default
    if isinstance(value, (list, tuple)) and value and all(side == value[0] for side in value):
        value = value[0]
    if not isinstance(value, int) or isinstance(value, bool):
        raise VisionConfigError(name, f"expected one integer, got {value!r}")
    return value


def _activation(config: Json, name: str, default: str) -> Activation:
    value = config.get(name, default)
    if value not in _ACTIVATIONS:
        raise VisionConfigError(
            name, f"activation {value!r} is not supported; one of {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[value]


def _text_hidden(config: Json) -> int:
    text = _section(config, "text_config")
    if "hidden_size" in text:
        return _int(text, "hidden_size", 0)
    kind = text.get("model_type", "qwen2" if config["model_type"] == "llava_onevision" else "llama")
    if kind not in _TEXT_HIDDEN_DEFAULT:
        raise VisionConfigError(
            "text_config.hidden_size", f"missing, and no default is known for {kind!r}"
        )
    return _TEXT_HIDDEN_DEFAULT[kind]


def _check(config: VisionConfig) -> None:
    """What would otherwise surface as a shape error deep inside a layer."""
    vit = config.vit
    for name in ("hidden", "heads", "intermediate", "patch", "channels", "temporal_patch"):
        if getattr(vit, name) < 1:
            raise VisionConfigError(f"vision_config ({name})", f"{getattr(vit, name)} is below 1")
    if vit.hidden % vit.heads:
        raise VisionConfigError(
            "vision_config", f"width {vit.hidden} is not a multiple of {vit.heads} heads"
        )
    if vit.rope_theta is not None and vit.head_dim % 4:
        raise VisionConfigError(
            "vision_config", f"2-D rope needs a head size divisible by 4, got {vit.head_dim}"
        )
    if vit.window is not None and vit.window < 1:
        raise VisionConfigError(
            "window_size",
            f"smaller than one merged cell of {vit.patch * config.projector.merge} px",
        )
    late = [layer for layer in config.deepstack_layers if not 0 <= layer < vit.layers]
    if late:
        raise VisionConfigError(
            "deepstack_visual_indexes", f"{late} are not among the {vit.layers} layers"
        )
