"""Rotary positions: from a RopeConfig to rotated heads.

Owns: the inverse frequencies of each rope kind and the rotation itself.
Does not own: which position a token has (the request says), or where heads go afterwards.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lm_engine.models.config import RopeConfig

Rotation = tuple[Tensor, Tensor]
"""(cos, signed sin), each [T, 1, head_dim]: what `rotate` needs of the positions."""


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each rotated pair, float32 [head_dim / 2].

    Computed in float32 in the order of the reference implementations: float64 would differ from
    them by an ulp, which a position of 100,000 turns into 1e-2 radians.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequency = 1.0 / (rope.theta**exponent)
    if rope.kind == "linear":
        return frequency / rope.factor
    if rope.kind == "divided":
        return frequency / torch.tensor(rope.divisors, dtype=torch.float32)
    if rope.kind == "llama3":
        return _llama3(rope, frequency)
    return frequency


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
    positions: Tensor, frequencies: Tensor, axes: Tensor | None, dtype: torch.dtype
) -> Rotation:
    """cos and signed sin of every token's angles, once per forward pass.

    positions: [T] or [3, T] int64. frequencies: float32 [head_dim / 2]. axes: int64
    [head_dim / 2] into the three position rows, or None. Positions on one axis drive all
    frequencies whatever `axes` says.
    """
    spots = positions.to(torch.float32)
    if spots.ndim == 2:
        spots = spots[0] if axes is None else spots.index_select(0, axes).t()
    angles = (spots if spots.ndim == 2 else spots.unsqueeze(-1)) * frequencies
    cos, sin = angles.cos(), angles.sin()
    whole_cos = torch.cat((cos, cos), dim=-1).unsqueeze(1)
    whole_sin = torch.cat((-sin, sin), dim=-1).unsqueeze(1)
    return whole_cos.to(dtype), whole_sin.to(dtype)


def rotate(heads: Tensor, by: Rotation) -> Tensor:
    """Rotates pair (x[i], x[i + head_dim / 2]) of every head; heads: [T, H, head_dim].

    Rolling by half a head swaps the pair's members, and the sign that rotation needs lies in the
    sine: three operations instead of the six of the textbook form.
    """
    cos, sin = by
    return torch.addcmul(heads * cos, torch.roll(heads, heads.shape[-1] // 2, -1), sin)
