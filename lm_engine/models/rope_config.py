"""How positions become angles, as config.json states it.

Owns: RopeConfig, its reading, which context it allows, and the fingerprint of what cached keys
depend on. Does not own: frequencies and rotation (rope.py), or the rest of a configuration
(config.py). Imports no torch.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import astuple, dataclass, replace
from typing import Literal

from lm_engine.models.errors import DynamicRopeError, UnsupportedModelError
from lm_engine.models.families import Family, Json

RopeKind = Literal["default", "linear", "llama3", "divided", "yarn", "longrope"]
_NAMED = ("default", "linear", "llama3", "yarn", "longrope", "mrope")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """angle[p, i] = p[axis of i] * frequency[i], i < rotated / 2, frequency[i] = theta **
    (-2i / rotated), then changed as `kind` says."""

    theta: float
    kind: RopeKind = "default"
    """linear: all frequencies / factor. llama3: the long wavelengths / factor, the middle ones
    blended (Llama 3.1). yarn: the same by numbers of turns (Peng et al. 2023, arXiv 2309.00071).
    longrope, divided: frequency[i] / divisors[i] (Ding et al. 2024, arXiv 2402.13753; GGUF)."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0
    """Positions before they were stretched."""
    divisors: tuple[float, ...] = ()
    axes: tuple[int, ...] | None = None
    """M-RoPE: which of the positions (t, h, w) = 0, 1, 2 drives frequency i. None: one axis."""
    rotated: int | None = None
    """Leading numbers of every head that are rotated; None: all of them."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """yarn: more than beta_fast turns over the original positions are kept, fewer than beta_slow
    are divided; `truncate` rounds where these lie to whole frequencies, outwards."""
    attention_factor: float = 1.0
    """Queries and keys are multiplied by it where they are rotated (yarn, longrope)."""
    long_divisors: tuple[float, ...] = ()
    """longrope: the divisors of a context longer than the original one, until `for_context` has
    decided."""

    def for_context(self, max_model_len: int) -> RopeConfig:
        """The rope of all sequences of a server whose contexts may become so long.

        Where transformers takes longrope's long divisors for a prompt longer than the original
        positions, and the short ones otherwise, the choice is made here once: cached keys of one
        kind would be wrong for the other.
        """
        if self.kind != "longrope":
            return self
        long = max_model_len > self.original_max_positions
        chosen = (self.long_divisors if long else ()) or self.divisors
        return replace(self, divisors=chosen, long_divisors=())

    def fingerprint(self, head_dim: int, rope_layers: tuple[bool, ...]) -> bytes:
        """32 bytes that differ whenever the same token at the same position might get another key:
        part of every name of cached KV."""
        whole = replace(self, rotated=self.rotated or head_dim)
        said = repr((1, astuple(whole), head_dim, rope_layers))
        return hashlib.sha256(said.encode()).digest()


def read_rope(values: Json, family: Family, head_dim: int) -> RopeConfig:
    """The rope of a text configuration whose missing keys hold their defaults.

    Raises UnsupportedModelError for a type without code and for keys that are missing or make no
    sense, DynamicRopeError for the type that cannot be cached.
    """
    found = values.get("rope_parameters") or values.get("rope_scaling") or {}
    theta = float(found.get("rope_theta") or values.get("rope_theta") or family.theta)
    kind = str(found.get("rope_type") or found.get("type") or "default")
    if kind == "mrope" and family.mrope != "none":
        kind = "default"
    if kind == "su" or (kind == "yarn" and family.yarn_is_longrope):
        kind = "longrope"
    rotated = _rotated(found, values, family, head_dim)
    size = rotated or head_dim
    plain = RopeConfig(theta, axes=_axes(found, family, size), rotated=rotated)
    if kind == "default":
        return plain
    if kind == "dynamic":
        raise DynamicRopeError(float(found.get("factor") or 2.0), _original(found, values))
    if kind == "divided":
        return replace(plain, kind="divided", divisors=_divisors(found, "divisors", size))
    if kind == "linear":
        return replace(plain, kind="linear", factor=_positive(found, "factor", kind))
    if kind == "llama3":
        return replace(
            plain,
            kind="llama3",
            factor=_positive(found, "factor", kind),
            low_freq_factor=_positive(found, "low_freq_factor", kind),
            high_freq_factor=_positive(found, "high_freq_factor", kind),
            original_max_positions=_original(found, values),
        )
    if kind == "yarn":
        return _yarn(plain, found, values)
    if kind == "longrope":
        return _longrope(plain, found, values, size)
    raise UnsupportedModelError(
        f"rope type {kind!r} is not supported. Supported are: {', '.join(_NAMED)}."
    )


def reach(rope: RopeConfig, positions: int) -> int:
    """Positions that the model was made for, given its max_position_embeddings: a yarn that was
    added to a file (as Qwen's cards advise) stretches the original ones."""
    if rope.kind == "yarn":
        return max(positions, int(rope.factor * rope.original_max_positions))
    return positions


def _yarn(plain: RopeConfig, found: Json, values: Json) -> RopeConfig:
    original = _original(found, values)
    if found.get("factor") is None:
        factor = float(values["max_position_embeddings"]) / original
    else:
        factor = _positive(found, "factor", "yarn")
    attention = found.get("attention_factor")
    if attention is None:
        attention = _yarn_attention(factor, found.get("mscale"), found.get("mscale_all_dim"))
    return replace(
        plain,
        kind="yarn",
        factor=factor,
        original_max_positions=original,
        beta_fast=float(found.get("beta_fast") or 32.0),
        beta_slow=float(found.get("beta_slow") or 1.0),
        truncate=bool(found.get("truncate", True)),
        attention_factor=float(attention),
    )


def _yarn_attention(factor: float, mscale: float | None, all_dim: float | None) -> float:
    """0.1 ln(factor) + 1, the square root of 1/t of arXiv 2309.00071, section 3.4; with DeepSeek's
    two weights of the logarithm where both are given."""

    def weighted(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if mscale and all_dim:
        return weighted(float(mscale)) / weighted(float(all_dim))
    return weighted(1.0)


def _longrope(plain: RopeConfig, found: Json, values: Json, size: int) -> RopeConfig:
    original = _original(found, values)
    factor = float(found.get("factor") or values["max_position_embeddings"] / original)
    attention = found.get("attention_factor")
    if attention is None:
        # As Phi-3's own code has it.
        stretched = factor > 1
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if stretched else 1.0
    return replace(
        plain,
        kind="longrope",
        factor=factor,
        original_max_positions=original,
        divisors=_divisors(found, "short_factor", size),
        long_divisors=_divisors(found, "long_factor", size),
        attention_factor=float(attention),
    )


def _original(found: Json, values: Json) -> int:
    """The key beside the scaling comes first, as in transformers (Phi-3's files)."""
    for place in (values, found):
        if place.get("original_max_position_embeddings"):
            return int(place["original_max_position_embeddings"])
    return int(values["max_position_embeddings"])


def _positive(found: Json, name: str, kind: str) -> float:
    value = found.get(name)
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not 0 < float(value) < math.inf:  # type: ignore[arg-type]
        raise UnsupportedModelError(
            f"rope type {kind!r} has {name} = {value!r} in config.json; it needs a positive number."
        )
    return float(value)  # type: ignore[arg-type]


def _divisors(found: Json, name: str, size: int) -> tuple[float, ...]:
    values = found.get(name) or ()
    if len(values) != size // 2 or not all(float(value) > 0 for value in values):
        raise UnsupportedModelError(
            f"the rope's {name} has {len(values)} numbers in config.json; it needs one positive "
            f"number for each of {size // 2} frequencies."
        )
    return tuple(float(value) for value in values)


def _rotated(found: Json, values: Json, family: Family, head_dim: int) -> int | None:
    part = found.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0
    if float(part) == 1.0:
        return None
    rotated = int(head_dim * float(part))
    if not family.partial_rope:
        raise UnsupportedModelError(
            f"partial_rotary_factor {part} is not supported for this model_type; it must be 1.0."
        )
    if rotated % 2 or not 0 < rotated <= head_dim:
        raise UnsupportedModelError(
            f"partial_rotary_factor {part} rotates {rotated} of {head_dim} numbers of a head; it "
            "must be an even number of them."
        )
    return rotated


def _axes(found: Json, family: Family, size: int) -> tuple[int, ...] | None:
    """Which of (t, h, w) drives each of size / 2 frequencies.

    Sectioned (Qwen2-VL, Qwen2.5-VL): runs of the given lengths. Interleaved (Qwen3-VL):
    t h w t h w ... until the h and w counts are used up, then t.
    """
    if family.mrope == "none":
        return None
    section = [int(n) for n in found.get("mrope_section", family.mrope_section)]
    if len(section) != 3 or sum(section) != size // 2:
        raise UnsupportedModelError(
            f"mrope_section {section} must be three lengths that add up to head_dim / 2 = "
            f"{size // 2}."
        )
    if family.mrope == "sectioned":
        return tuple(axis for axis, count in enumerate(section) for _ in range(count))
    axes = [0] * (size // 2)
    for axis in (1, 2):
        for index in range(axis, min(3 * section[axis], len(axes)), 3):
            axes[index] = axis
    return tuple(axes)
