"""From a folder, a GGUF file or a hub id to a decoder ready to run.

Owns: finding a checkpoint, checking it against its configuration and against free memory, filling
a Decoder's fused parameters tensor by tensor, progress.
Does not own: file formats (weights.py, gguf.py), what config.json means (config.py), the vision
tower (it reads the same Checkpoint), tokenizers.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lm_engine.models.checkpoint import Checkpoint, available_bytes, open_checkpoint
from lm_engine.models.config import DecoderConfig
from lm_engine.models.decoder import Decoder, DecoderLayer
from lm_engine.models.errors import (
    Mismatch,
    OutOfMemoryError,
    UnsupportedModelError,
    WeightMismatchError,
)
from lm_engine.models.weights import WeightSource

Phase = Literal["open", "check", "weights", "ready"]

_PREFIXES = (
    "model.language_model.",
    "language_model.model.",
    "model.text_model.",
    "model.model.",
    "model.",
    "language_model.",
    "text_model.",
    "",
)
"""Where token table, layers and final norm lie in a checkpoint, by who wrote it."""
_HEADS = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")
_IGNORED = re.compile(r"\.rotary_emb\.inv_freq$")
"""Written by old versions of transformers; follows from the configuration."""
_DTYPE_NAMES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far loading is."""

    phase: Phase
    done_bytes: int
    """Of stored weights read."""
    total_bytes: int
    """Stored weights that will be read; 0 while unknown."""
    elapsed_s: float
    eta_s: float | None
    """Seconds to go at the rate so far; None before there is a rate."""


@dataclass(frozen=True, slots=True)
class LoadedDecoder:
    config: DecoderConfig
    decoder: Decoder
    eos_ids: tuple[int, ...]
    """Token ids that end a generation."""
    name: str
    """The hub id, or the folder's or file's name."""
    checkpoint: Checkpoint
    """Still open, for whoever reads the vision tower and the tokenizer; close it after."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.config.vocab_size


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one tensor of a checkpoint goes."""

    name: str
    target: Tensor
    """A view of a parameter; of shape [..., *shape], the tensor is repeated over the front."""
    shape: tuple[int, ...]


def load_decoder(
    model: str | Path | Checkpoint,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    progress: Callable[[LoadProgress], None] | None = None,
    free_bytes: int | None = None,
) -> LoadedDecoder:
    """Loads the language model of a checkpoint: a folder, a .gguf file or a hub id.

    dtype: "float32", "bfloat16", "float16", or "auto": float32 on the CPU (few CPUs multiply
    half-width numbers fast), the checkpoint's own elsewhere. free_bytes: memory that may be used,
    measured when None. Weights are copied one tensor at a time into their final place, so peak
    memory is one copy plus the largest tensor.

    Raises LoadError (errors.py). A path makes no network call.
    """
    report = _Reporter(progress)
    report("open")
    checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(model)
    config = DecoderConfig.from_hf(checkpoint.config)
    source, home = checkpoint.source, torch.device(device)
    base = _find_prefix(source)
    config = _settle_tying(config, source, base)
    report("check")
    sketch = list(_places(Decoder(config, device="meta"), base, source))
    _check_tensors(source, base, sketch)
    chosen = _choose_dtype(dtype, checkpoint, base, home)
    _check_memory(config, chosen, home, free_bytes)

    decoder = Decoder(config, dtype=chosen, device=home).eval()
    report.total_bytes = sum(source.stored_bytes(place.name) for place in sketch)
    report("weights")
    with torch.no_grad():
        for place in _places(decoder, base, source):
            source.copy_to(place.name, place.target)
            report("weights", source.stored_bytes(place.name))
    report("ready")
    return LoadedDecoder(config, decoder, checkpoint.eos_ids, checkpoint.name, checkpoint)


class _Reporter:
    """Turns bytes read into LoadProgress."""

    def __init__(self, progress: Callable[[LoadProgress], None] | None) -> None:
        self._progress = progress
        self._start_s = self._weights_s = time.monotonic()
        self._done_bytes = 0
        self.total_bytes = 0

    def __call__(self, phase: Phase, read_bytes: int = 0) -> None:
        now_s = time.monotonic()
        if not self._done_bytes:
            self._weights_s = self._weights_s if read_bytes else now_s
        self._done_bytes += read_bytes
        if self._progress is None:
            return
        eta_s = None
        if self._done_bytes:
            rest = self.total_bytes - self._done_bytes
            eta_s = (now_s - self._weights_s) * rest / self._done_bytes
        self._progress(
            LoadProgress(phase, self._done_bytes, self.total_bytes, now_s - self._start_s, eta_s)
        )


def _find_prefix(source: WeightSource) -> str:
    names = source.names()
    for prefix in _PREFIXES:
        if f"{prefix}embed_tokens.weight" in names:
            return prefix
    raise UnsupportedModelError(
        f"{source.where} has no token table: looked for embed_tokens.weight under "
        f"{', '.join(repr(prefix) for prefix in _PREFIXES)} among {len(names)} tensors."
    )


def _head_name(source: WeightSource) -> str:
    return next((name for name in _HEADS if name in source.names()), _HEADS[0])


def _settle_tying(config: DecoderConfig, source: WeightSource, base: str) -> DecoderConfig:
    """The configuration says "tied", but a checkpoint that stores a head of its own, different
    from the table, means it: transformers decides alike."""
    head = _head_name(source)
    if not config.tied or head not in source.names():
        return config
    table = f"{base}embed_tokens.weight"
    if source.shape(head) == source.shape(table) and torch.equal(
        source.get(head), source.get(table)
    ):
        return config
    return replace(config, tied=False)


def _places(decoder: Decoder, base: str, source: WeightSource) -> Iterator[_Place]:
    """Every tensor that the decoder needs, in the order in which checkpoints store them."""

    def whole(name: str, parameter: Tensor) -> _Place:
        return _Place(name, parameter, tuple(parameter.shape))

    yield whole(f"{base}embed_tokens.weight", decoder.get_parameter("embedding.weight"))
    for index, layer in enumerate(decoder.layers):
        assert isinstance(layer, DecoderLayer)
        yield from _layer_places(layer, f"{base}layers.{index}.", decoder.config.fused)
    yield whole(f"{base}norm.weight", decoder.norm.weight)
    if not decoder.config.tied:
        yield whole(_head_name(source), decoder.head.weight)


def _layer_places(layer: DecoderLayer, at: str, fused: bool) -> Iterator[_Place]:
    q, kv = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    inner = layer.gate_up.out_features // 2
    qkv: tuple[tuple[str, int], ...] = (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
    gate_up: tuple[tuple[str, int], ...] = (("gate_proj", inner), ("up_proj", inner))
    if fused:
        qkv, gate_up = (("qkv_proj", q + 2 * kv),), (("gate_up_proj", 2 * inner),)
    linears = (
        (layer.qkv, "self_attn.", qkv),
        (layer.o, "self_attn.", (("o_proj", layer.o.out_features),)),
        (layer.gate_up, "mlp.", gate_up),
        (layer.down, "mlp.", (("down_proj", layer.down.out_features),)),
    )
    for linear, part, pieces in linears:
        for kind in ("weight", "bias"):
            parameter: Tensor | None = getattr(linear, kind)
            if parameter is None:
                continue
            views = torch.split(parameter, [rows for _, rows in pieces])
            for (name, _), view in zip(pieces, views, strict=True):
                yield _Place(f"{at}{part}{name}.{kind}", view, tuple(view.shape))
    for name, norm in (
        ("input_layernorm", layer.attention_norm),
        ("post_attention_layernorm", layer.mlp_norm),
    ):
        yield _Place(f"{at}{name}.weight", norm.weight, tuple(norm.weight.shape))
    if layer.head_norm is not None:
        views = torch.split(layer.head_norm.weight, [layer.num_heads, layer.num_kv_heads])
        for name, view in zip(("q_norm", "k_norm"), views, strict=True):
            yield _Place(f"{at}self_attn.{name}.weight", view, (layer.head_dim,))


def _check_tensors(source: WeightSource, base: str, places: list[_Place]) -> None:
    names = source.names()
    wrong = [
        Mismatch(place.name, place.shape, actual)
        for place in places
        for actual in [source.shape(place.name) if place.name in names else None]
        if actual != place.shape
    ]
    if wrong:
        raise WeightMismatchError(source.where, wrong)
    known = {place.name for place in places}
    extra = sorted(
        name
        for name in names - known
        if name.startswith(f"{base}layers.") and not _IGNORED.search(name)
    )
    if extra:
        raise UnsupportedModelError(
            f"{source.where}: {len(extra)} tensor(s) of the decoder have no place in the model "
            f"that config.json describes, such as {', '.join(extra[:3])}."
        )
    coded = [place.name for place in places if not source.dtype(place.name).is_floating_point]
    if coded:
        raise UnsupportedModelError(
            f"{source.where}: {coded[0]} is stored as {source.dtype(coded[0])}; weights must be "
            "floating-point numbers or GGUF blocks."
        )


def _choose_dtype(
    asked: str | torch.dtype, checkpoint: Checkpoint, base: str, device: torch.device
) -> torch.dtype:
    if isinstance(asked, torch.dtype):
        return asked
    if asked != "auto":
        if asked not in _DTYPE_NAMES:
            raise UnsupportedModelError(
                f"--dtype {asked!r} is not supported. Supported are: auto, "
                f"{', '.join(_DTYPE_NAMES)}."
            )
        return _DTYPE_NAMES[asked]
    if device.type == "cpu":
        return torch.float32
    text: dict[str, Any] = checkpoint.config.get("text_config") or {}
    for config in (checkpoint.config, text):
        name = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
        if name in _DTYPE_NAMES:
            return _DTYPE_NAMES[name]
    stored = checkpoint.source.dtype(f"{base}embed_tokens.weight")
    return stored if stored in _DTYPE_NAMES.values() else torch.bfloat16


def _check_memory(
    config: DecoderConfig, dtype: torch.dtype, device: torch.device, free_bytes: int | None
) -> None:
    have = available_bytes(device) if free_bytes is None else free_bytes
    need = config.num_parameters * dtype.itemsize
    if have is None or need <= have:
        return
    half = config.num_parameters * 2
    if dtype.itemsize > 2 and half <= have:
        remedy = f"With --dtype bfloat16 they need {half:,} and fit."
    else:
        remedy = (
            f"Even --dtype bfloat16 needs {half:,}; take a smaller model, or free "
            f"{half - have:,} bytes."
            if half > have
            else f"Free {need - have:,} bytes."
        )
    raise OutOfMemoryError(need, have, str(device), remedy)
