"""Positions of prompts with pictures on three axes (M-RoPE).

Owns: the positions of Qwen2-VL, Qwen2.5-VL and Qwen3-VL prompts.
Does not own: the rotation itself (lm_engine/models). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

Axis = tuple[int, ...]


def mrope_positions(
    num_tokens: int, images: Sequence[tuple[int, tuple[int, int, int]]]
) -> tuple[tuple[Axis, Axis, Axis], int]:
    """((t, h, w) positions of each prompt token, delta).

    `images` gives each image's first token and its merged grid (t, h, w), in prompt order; an
    image takes t * h * w tokens. Text counts up on all axes at once. An image that starts at
    position p has t = p + frame, h = p + row, w = p + column, and the text after it goes on at
    p + max(h, w). Generated token i sits at i + delta on all axes, where i counts from the
    prompt's first token.

    Raises ValueError when images overlap or leave the prompt.
    """
    axes: tuple[list[Sequence[int]], ...] = ([], [], [])
    token, position, highest = 0, 0, -1
    for offset, (frames, rows, cols) in images:
        if offset < token or offset + frames * rows * cols > num_tokens:
            raise ValueError(
                f"an image of {frames} x {rows} x {cols} tokens at {offset} overlaps the one "
                f"before it, which ends at {token}, or leaves the prompt of {num_tokens} tokens"
            )
        text = range(position, position + offset - token)
        for axis in axes:
            axis.append(text)
        position += offset - token
        span = range(position, position + cols)
        axes[0].extend((position + frame,) * (rows * cols) for frame in range(frames))
        axes[1].extend((position + row,) * cols for _ in range(frames) for row in range(rows))
        axes[2].extend(span for _ in range(frames * rows))
        highest = max(highest, position + max(frames, rows, cols) - 1)
        token = offset + frames * rows * cols
        position += max(rows, cols)
    rest = range(position, position + num_tokens - token)
    for axis in axes:
        axis.append(rest)
    highest = max(highest, position + num_tokens - token - 1)
    t, h, w = (tuple(chain.from_iterable(axis)) for axis in axes)
    return (t, h, w), highest + 1 - num_tokens
