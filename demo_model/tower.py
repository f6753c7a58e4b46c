"""The demo's vision tower as a training module: an Idefics3 tower that also takes parts of a tile.

Owns the mathematics of the SigLIP-style encoder and its connector under the parameter names of
transformers' Idefics3 model, so that a state dict trained here loads there. Does not own data,
optimisation or serving, nor what the tower's last product says (`codes`). Two things it does that
Idefics3 does not: it runs on some of a tile's patches at their true positions, which makes training
several times cheaper, and it shows the last layer's hidden units, which are the classes that
training supervises.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class TowerConfig:
    """Sizes of the tower; the field names are Idefics3's own."""

    hidden_size: int = 192
    intermediate_size: int = 1056  # of the last layer: one unit per class
    num_hidden_layers: int = 9
    num_attention_heads: int = 6
    image_size: int = 256
    patch_size: int = 16
    scale_factor: int = 2
    text_hidden_size: int = 576
    layer_norm_eps: float = 1e-6

    @property
    def trained_units(self) -> int:
        """The hidden units of every layer but the last; in the file, zeros stand for the rest."""
        return min(4 * self.hidden_size, self.intermediate_size)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


# After how many layers a patch is asked for its character, for the characters beside it, and for
# the cell that says it.
GLYPHS_AT, MATES_AT, AIMS_AT = 4, 5, 6
CODE = 32  # channels that carry the position at the start: one attention head reads all of them
CODE_SPEEDS = 1.7 * 0.62 ** torch.arange(CODE // 4)  # radians per patch


def _position_code(side: int) -> Tensor:
    """(side*side, CODE): cosines and sines of the row, then of the column."""
    angles = torch.arange(side)[:, None] * CODE_SPEEDS
    axis = torch.stack([angles.cos(), angles.sin()], dim=-1).flatten(1)
    rows = axis[:, None, :].expand(side, side, -1)
    cols = axis[None, :, :].expand(side, side, -1)
    return torch.cat([rows, cols], dim=-1).reshape(side * side, CODE)


def _shift(down: int, right: int) -> Tensor:
    """(CODE, CODE): turns the code of a patch into the code of the one `down`, `right` of it."""
    turn = torch.zeros(CODE, CODE)
    half = CODE // 2
    for start, steps in ((0, down), (half, right)):
        for i, speed in enumerate(CODE_SPEEDS.tolist()):
            cos, sin = math.cos(speed * steps), math.sin(speed * steps)
            at = start + 2 * i
            turn[at : at + 2, at : at + 2] = torch.tensor([[cos, -sin], [sin, cos]])
    return turn


def _cosine_filters(count: int, size: int) -> Tensor:
    """(count, 3, size, size): the slowest cosine patterns of brightness, a few of colour."""
    grid = (torch.arange(size) + 0.5) * math.pi / size
    waves = torch.stack([torch.cos(grid * k) for k in range(size)])
    order = sorted(((u, v) for u in range(size) for v in range(size)), key=lambda p: sum(p))
    colours = count // 8
    grey = torch.tensor([0.299, 0.587, 0.114])
    tints = (torch.tensor([0.7, -0.6, -0.1]), torch.tensor([-0.2, -0.3, 0.5]))
    plan = [(uv, grey) for uv in order[: count - colours]]
    plan += [(order[i // 2], tints[i % 2]) for i in range(colours)]
    filters = []
    for (u, v), weights in plan:
        pattern = torch.outer(waves[u], waves[v])
        pattern = pattern / pattern.norm() * (1 + u + v) ** 0.8 / size
        filters.append(weights[:, None, None] * pattern)
    return torch.stack(filters)


class _Embeddings(nn.Module):
    """Patches and positions, which start in channels of their own.

    A patch begins as its slowest cosine coefficients, a position as a code that one attention head
    can shift: learning both from noise is what a small transformer spends its first hours on.
    """

    def __init__(self, c: TowerConfig) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, c.hidden_size, c.patch_size, stride=c.patch_size)
        assert self.patch_embedding.bias is not None
        nn.init.zeros_(self.patch_embedding.bias)
        side = c.image_size // c.patch_size
        self.position_embedding = nn.Embedding(side * side, c.hidden_size)
        with torch.no_grad():
            self.position_embedding.weight.mul_(0.02)
            self.position_embedding.weight[:, :CODE] = _position_code(side)
            self.patch_embedding.weight.zero_()
            filters = _cosine_filters(c.hidden_size - CODE, c.patch_size)
            self.patch_embedding.weight[CODE:] = filters


class _Attention(nn.Module):
    def __init__(self, c: TowerConfig) -> None:
        super().__init__()
        self.heads = c.num_attention_heads
        self.q_proj = nn.Linear(c.hidden_size, c.hidden_size)
        self.k_proj = nn.Linear(c.hidden_size, c.hidden_size)
        self.v_proj = nn.Linear(c.hidden_size, c.hidden_size)
        self.out_proj = nn.Linear(c.hidden_size, c.hidden_size)

    def look_around(self) -> None:
        """Start with one head per neighbouring patch: left, right, above, below."""
        neighbours = ((0, -1), (0, 1), (-1, 0), (1, 0))
        d = self.q_proj.in_features // self.heads
        with torch.no_grad():
            for head, (down, right) in enumerate(neighbours[: self.heads]):
                rows = slice(head * d, head * d + CODE)
                self.q_proj.weight[rows] *= 0.2
                self.k_proj.weight[rows] *= 0.2
                self.q_proj.weight[rows, :CODE] = 2.5 * _shift(down, right)
                self.k_proj.weight[rows, :CODE] = 2.5 * torch.eye(CODE)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        # One product for q, k and v: three thin ones are slower on a CPU.
        weight = torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight])
        bias = torch.cat([self.q_proj.bias, self.k_proj.bias, self.v_proj.bias])
        qkv = F.linear(x, weight, bias).view(b, t, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        # Written out: the fused CPU kernel's backward pass takes three times as long at this size.
        scores = (q * (d // self.heads) ** -0.5) @ k.transpose(-2, -1)
        mixed = scores.softmax(-1, dtype=scores.dtype) @ v
        out: Tensor = self.out_proj(mixed.transpose(1, 2).reshape(b, t, d))
        return out


class _Mlp(nn.Module):
    def __init__(self, width: int, units: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, units)
        self.fc2 = nn.Linear(units, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(F.gelu(self.fc1(x), approximate="tanh"))
        return out


class _Layer(nn.Module):
    def __init__(self, c: TowerConfig, units: int) -> None:
        super().__init__()
        self.self_attn = _Attention(c)
        self.layer_norm1 = nn.LayerNorm(c.hidden_size, eps=c.layer_norm_eps)
        self.mlp = _Mlp(c.hidden_size, units)
        self.layer_norm2 = nn.LayerNorm(c.hidden_size, eps=c.layer_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        out: Tensor = x + self.mlp(self.layer_norm2(x))
        return out


class _Encoder(nn.Module):
    def __init__(self, c: TowerConfig) -> None:
        super().__init__()
        layers = [_Layer(c, c.trained_units) for _ in range(c.num_hidden_layers - 1)]
        layers.append(_Layer(c, c.intermediate_size))
        for layer in layers[:2]:
            layer.self_attn.look_around()
        self.layers = nn.ModuleList(layers)


class _Vision(nn.Module):
    def __init__(self, c: TowerConfig) -> None:
        super().__init__()
        self.embeddings = _Embeddings(c)
        self.encoder = _Encoder(c)
        self.post_layernorm = nn.LayerNorm(c.hidden_size, eps=c.layer_norm_eps)


class _Projection(nn.Module):
    def __init__(self, c: TowerConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(c.hidden_size * c.scale_factor**2, c.text_hidden_size, bias=False)


class _Connector(nn.Module):
    def __init__(self, c: TowerConfig) -> None:
        super().__init__()
        self.modality_projection = _Projection(c)


class Seen(NamedTuple):
    """What training supervises, per cell and patch."""

    units: Tensor  # (B, N, 4, classes): the last layer's hidden units before their GELU
    named: Tensor  # (B, N, 4, hidden): the last layer's input, normalised as those units' input is
    late: Tensor  # (B, N, 4, hidden) after `AIMS_AT` layers
    middle: Tensor  # (B, N, 4, hidden) after `MATES_AT` layers
    early: Tensor  # (B, N, 4, hidden) after `GLYPHS_AT` layers


class Tower(nn.Module):
    """Pixels of some cells to image-token embeddings, and the features training supervises."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.config = config
        self.vision_model = _Vision(config)
        self.connector = _Connector(config)

    @property
    def last(self) -> _Layer:
        """The layer whose hidden units are the classes."""
        return cast(_Layer, self.vision_model.encoder.layers[-1])

    def _embed(self, pixels: Tensor, cells: Tensor) -> Tensor:
        c, embeddings = self.config, self.vision_model.embeddings
        side, s = c.image_size // c.patch_size, c.scale_factor
        conv = embeddings.patch_embedding
        weight = conv.weight.permute(0, 2, 3, 1).flatten(1)  # channels last, as the pixels are
        x = F.linear(pixels.flatten(3).flatten(1, 2), weight, conv.bias)
        corner = (cells // (side // s)) * s * side + (cells % (side // s)) * s
        inner = torch.tensor([0, 1, side, side + 1], device=cells.device)
        ids = (corner[:, :, None] + inner).flatten(1)
        out: Tensor = x + embeddings.position_embedding(ids)
        return out

    def _run(self, pixels: Tensor, cells: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The state that the last layer's units read, and those before each layer."""
        trace = [self._embed(pixels, cells)]
        for layer in self.vision_model.encoder.layers[:-1]:
            trace.append(layer(trace[-1]))
        mixed = self.last.self_attn(self.last.layer_norm1(trace[-1]))
        return trace[-1] + mixed, trace

    def forward(self, pixels: Tensor, cells: Tensor) -> Seen:
        """Classify the patches of some cells (2 x 2 patches each) of tiles.

        `pixels` (B, N, 4, patch, patch, 3), normalised; `cells` (B, N) their places in the tile, in
        reading order.
        """
        x, trace = self._run(pixels, cells)
        last = self.last
        parts = (
            last.mlp.fc1(last.layer_norm2(x)),
            last.layer_norm2(trace[-1]),
            *(trace[min(at, len(trace) - 1)] for at in (AIMS_AT, MATES_AT, GLYPHS_AT)),
        )
        return Seen(*(p.view(*cells.shape, 4, -1) for p in parts))

    def tokens(self, pixels: Tensor, cells: Tensor) -> Tensor:
        """The image tokens (B, N, text) of those cells, as Idefics3 computes them."""
        x, _ = self._run(pixels, cells)
        x = self.vision_model.post_layernorm(x + self.last.mlp(self.last.layer_norm2(x)))
        # Pixel shuffle: one token is its two by two patches, rows first.
        out: Tensor = self.connector.modality_projection.proj(x.view(*cells.shape, -1))
        return out

    def padded_state(self) -> dict[str, Tensor]:
        """The state dict with every layer as wide as the last, as Idefics3 wants them."""
        state = dict(self.state_dict())
        for name, value in state.items():
            axis = 1 if name.endswith("fc2.weight") else 0
            if ".mlp." in name and not name.endswith("fc2.bias"):
                missing = self.config.intermediate_size - value.shape[axis]
                state[name] = F.pad(
                    value, (0, missing) if axis or value.ndim == 1 else (0, 0, 0, missing)
                )
        return state
