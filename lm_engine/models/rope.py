"""Rotary positions: from a RopeConfig to rotated heads.

Owns: the inverse frequencies of each rope kind and the rotation itself.
Does not own: which position a token has (the request says), or where heads go afterwards.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lm_engine.models.rope_config import RopeConfig

Rotation = tuple[Tensor, Tensor]
"""(cos, signed sin), each [T, 1, rotated]: what `rotate` needs of the positions."""


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each rotated pair, float32 [rotated / 2].

    Computed in float32 in the order of the reference implementations: float64 would differ from
    them by an ulp, which a position of 100,000 turns into 1e-2 radians.
    """
    size = rope.rotated or head_dim
    period = rope.theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    frequency = 1.0 / period
    if rope.kind == "linear":
        return frequency / rope.factor
    if rope.kind == "divided":
        return frequency / torch.tensor(rope.divisors, dtype=torch.float32)
    if rope.kind == "longrope":
        return 1.0 / (torch.tensor(rope.divisors, dtype=torch.float32) * period)
    if rope.kind == "llama3":
        return _llama3(rope, frequency)
    if rope.kind == "yarn":
        return _yarn(rope, size, period)
    return frequency


def _yarn(rope: RopeConfig, size: int, period: Tensor) -> Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): frequencies that turn more than beta_fast times over
    the original positions are kept, those under beta_slow turns divided, between them blended
    along the index of the frequency."""

    def index_at(turns: float) -> float:
        wavelength = rope.original_max_positions / (turns * 2 * math.pi)
        return size * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = index_at(rope.beta_fast), index_at(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(size // 2, dtype=torch.float32) - low) / (high - low)
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (rope.factor * period) * (1 - kept) + 1.0 / period * kept


def _llama3(rope: RopeConfig, frequency: Tensor) -> Tensor:
    """Llama 3.1: wavelengths beyond original / low are stretched by the factor, those under
    original / high are kept, and between the two the frequency is blended linearly."""
    wavelength = 2 * math.pi / frequency
    longest = rope.original_max_positions / rope.low_freq_factor
    shortest = rope.original_max_positions / rope.high_freq_factor
    turns = rope.original_max_positions / wavelength
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - kept) * frequency / rope.factor + kept * frequency
    stretched = torch.where(wavelength > longest, frequency / rope.factor, blended)
    return torch.where(wavelength < shortest, frequency, stretched)


def rotation(
    positions: Tensor,
    frequencies: Tensor,
    axes: Tensor | None,
    dtype: torch.dtype,
    attention_factor: float = 1.0,
) -> Rotation:
    """cos and signed sin of every token's angles times the attention factor, once per forward pass.

    positions: [T] or [3, T] int64. frequencies: float32 [rotated / 2]. axes: int64 [rotated / 2]
    into the three position rows, or None. Positions on one axis drive all frequencies whatever
    `axes` says.
    """
    spots = positions.to(torch.float32)
    if spots.ndim == 2:
        spots = spots[0] if axes is None else spots.index_select(0, axes).t()
    angles = (spots if spots.ndim == 2 else spots.unsqueeze(-1)) * frequencies
    cos, sin = angles.cos(), angles.sin()
    if attention_factor != 1.0:
        cos, sin = cos * attention_factor, sin * attention_factor
    whole_cos = torch.cat((cos, cos), dim=-1).unsqueeze(1)
    whole_sin = torch.cat((-sin, sin), dim=-1).unsqueeze(1)
    return whole_cos.to(dtype), whole_sin.to(dtype)


def rotate(heads: Tensor, by: Rotation) -> Tensor:
    """Rotates pair (x[i], x[i + rotated / 2]) of every head; heads: [T, H, head_dim]. What lies
    beyond `rotated`, in models that rotate a part only, stays as it is.

    Rolling by half of what is rotated swaps the pair's members, and the sign that rotation needs
    lies in the sine: three operations instead of the six of the textbook form.
    """
    cos, sin = by
    size = cos.shape[-1]
    part = heads[..., :size]
    turned = torch.addcmul(part * cos, torch.roll(part, size // 2, -1), sin)
    return turned if size == heads.shape[-1] else torch.cat((turned, heads[..., size:]), -1)
