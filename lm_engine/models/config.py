"""What a decoder is, by flags: sizes, norms, biases, windows, rope.

Owns: DecoderConfig and its reading from a Hugging Face config.json (a text model's, or a
vision-language model's with the text part nested or flat), with the defaults of the Hugging Face
classes where keys are missing.
Does not own: rope (rope_config.py), tensors (decoder.py, rope.py), files (loader.py), vision
configuration. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lm_engine.models.errors import UnsupportedModelError
from lm_engine.models.families import ABSENT_TEXT, FAMILIES, TEXT_OF, Family, Json
from lm_engine.models.rope_config import RopeConfig, reach, read_rope

_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """One decoder-only language model. Per-layer tuples have `num_layers` entries."""

    architecture: str
    """The text part's model_type, such as "llama" or "qwen2_5_vl_text"."""
    vocab_size: int
    """Rows of the token table and of the head; may exceed the tokenizer's length."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    """Positions that the model was made for, its rope's stretching included."""
    rope: RopeConfig
    windows: tuple[int | None, ...]
    """Keys that a query of this layer sees, itself included: key j for query i iff
    i - window < j <= i. None sees all of the past."""
    rope_layers: tuple[bool, ...]
    """False where the layer uses no positions (SmolLM3's NoPE layers)."""
    activation: str = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm over each head of q and k before rope (Qwen3)."""
    tied: bool = False
    """Whether the head is the token table."""
    num_deepstack: int = 0
    """Layers whose output receives further image embeddings (Qwen3-VL); layers 0..n-1."""
    fused: bool = False
    """Whether checkpoints store q, k and v as one tensor, and gate and up as another (Phi-3)."""

    @property
    def scale(self) -> float:
        """What q·k is multiplied by before the softmax."""
        return float(self.head_dim**-0.5)

    @property
    def num_parameters(self) -> int:
        """Elements of all weights, a tied head counted once."""
        heads = self.num_heads + 2 * self.num_kv_heads
        q_rows, qkv_rows = self.num_heads * self.head_dim, heads * self.head_dim
        d, inner = self.hidden_size, self.intermediate_size
        layer = d * (qkv_rows + q_rows + 3 * inner) + 2 * d
        layer += qkv_rows * self.qkv_bias + d * self.o_bias + (2 * inner + d) * self.mlp_bias
        layer += 2 * self.head_dim * self.qk_norm
        return layer * self.num_layers + d + self.vocab_size * d * (1 if self.tied else 2)

    @property
    def most_positions(self) -> int:
        """Longest context that may be asked for. A linear rope divides positions, so that its
        factor allows more than max_position_embeddings, which some files count already."""
        if self.rope.kind == "linear":
            return int(max(1.0, self.rope.factor) * self.max_positions)
        return self.max_positions

    def for_context(self, max_model_len: int) -> DecoderConfig:
        """With the rope of a server whose contexts may become so long."""
        return replace(self, rope=self.rope.for_context(max_model_len))

    @property
    def rope_fingerprint(self) -> bytes:
        """32 bytes of everything about positions that cached keys depend on."""
        return self.rope.fingerprint(self.head_dim, self.rope_layers)

    @classmethod
    def from_hf(cls, config: Json) -> DecoderConfig:
        """Reads a config.json, given as a dict.

        Raises UnsupportedModelError for an architecture, rope type, activation or option without
        code, naming what is supported.
        """
        outer_type = str(config.get("model_type", ""))
        text, text_type = _text_part(config, outer_type)
        family = FAMILIES.get(text_type)
        if family is None:
            raise UnsupportedModelError(
                f"model_type {text_type or outer_type!r} is not supported. Supported are: "
                f"{', '.join(supported_model_types())}."
            )
        values = {**family.defaults, **{k: v for k, v in text.items() if v is not None}}
        hidden, heads = int(values["hidden_size"]), int(values["num_attention_heads"])
        layers = int(values["num_hidden_layers"])
        head_dim = hidden // heads
        if family.reads_head_dim:
            head_dim = int(values.get("head_dim", head_dim))
        vision = config.get("vision_config") or {}
        deepstack = vision.get("deepstack_visual_indexes", (8, 16, 24)) if family.deepstack else ()
        biased = bool(values.get("attention_bias", False)) if family.reads_bias else False
        rope = read_rope(values, family, head_dim)
        return cls(
            architecture=text_type,
            vocab_size=int(values["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(values["intermediate_size"]),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=int(values.get("num_key_value_heads", heads)),
            head_dim=head_dim,
            norm_eps=float(values["rms_norm_eps"]),
            max_positions=reach(rope, int(values["max_position_embeddings"])),
            rope=rope,
            windows=_windows(text, values, family, layers),
            rope_layers=_rope_layers(values, family, layers),
            activation=_activation(values),
            qkv_bias=biased or family.qkv_bias,
            o_bias=biased,
            mlp_bias=bool(values.get("mlp_bias", False)) if family.reads_mlp_bias else False,
            qk_norm=family.qk_norm,
            tied=bool(config.get("tie_word_embeddings") or values.get("tie_word_embeddings")),
            num_deepstack=len(deepstack),
            fused=family.fused,
        )


def supported_model_types() -> tuple[str, ...]:
    """Every model_type that `DecoderConfig.from_hf` reads."""
    text_only = (name for name in FAMILIES if not name.endswith("_text"))
    return tuple(sorted({*text_only, *TEXT_OF}))


def _text_part(config: Json, outer_type: str) -> tuple[Json, str]:
    if outer_type not in TEXT_OF:
        return config, outer_type
    nested = config.get("text_config")
    if nested is None:
        # Qwen2.5-VL's first release wrote its text keys flat, beside vision_config.
        flat = config if outer_type in ("qwen2_vl", "qwen2_5_vl") else {}
        return ABSENT_TEXT.get(outer_type, flat), TEXT_OF[outer_type]
    text_type = str(nested.get("model_type") or TEXT_OF[outer_type])
    # Early Qwen-VL files repeat the outer type in the nested part.
    return nested, TEXT_OF.get(text_type, text_type)


def _activation(values: Json) -> str:
    name = str(values["hidden_act"])
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"hidden_act {name!r} is not supported. Supported are: {', '.join(_ACTIVATIONS)}."
        )
    return name


def _windows(text: Json, values: Json, family: Family, layers: int) -> tuple[int | None, ...]:
    # An explicit null means no window, an absent key the class's default: only `text` can tell.
    size = values.get("sliding_window")
    if "sliding_window" in text and text["sliding_window"] is None:
        size = None
    if family.window == "always":
        return (None if size is None else int(size),) * layers
    if family.window == "never" or size is None or not values.get("use_sliding_window", False):
        return (None,) * layers
    kinds = values.get("layer_types")
    if kinds is None and family.window == "by_rope":
        ropes = _rope_layers(values, family, layers)
        kinds = ["full_attention" if rope else "sliding_attention" for rope in ropes]
    elif kinds is None:
        first = int(values["max_window_layers"])
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if len(kinds) < layers or set(kinds) - {"full_attention", "sliding_attention"}:
        raise UnsupportedModelError(
            f"layer_types has {len(kinds)} entries of {sorted(set(kinds))} for {layers} layers; "
            "supported are full_attention and sliding_attention, one entry per layer."
        )
    return tuple(int(size) if kind == "sliding_attention" else None for kind in kinds[:layers])


def _rope_layers(values: Json, family: Family, layers: int) -> tuple[bool, ...]:
    if family.window != "by_rope":
        return (True,) * layers
    flags = values.get("no_rope_layers")
    if flags is None:
        interval = int(values["no_rope_layer_interval"])
        return tuple((i + 1) % interval != 0 for i in range(layers))
    return tuple(bool(flag) for flag in flags[:layers])


__all__ = ["DecoderConfig", "RopeConfig", "supported_model_types"]
