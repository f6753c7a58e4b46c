"""M-RoPE positions against the reference models' get_rope_index."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from vision_encoder.grid import mrope_positions

Grid = tuple[int, int, int]
MODELS = {"qwen2_vl": Qwen2VLModel, "qwen2_5_vl": Qwen2_5_VLModel, "qwen3_vl": Qwen3VLModel}


def hf_positions(model: Any, kinds: list[int], grids: list[Grid]) -> tuple[list[list[int]], int]:
    """The reference's positions; `grids` are merged ones, it takes those before merging."""
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
    own = SimpleNamespace(
        config=SimpleNamespace(vision_config=vision),
        get_vision_position_ids=functools.partial(model.get_vision_position_ids, None),
    )
    unmerged = torch.tensor([(t, 2 * h, 2 * w) for t, h, w in grids]) if grids else None
    positions, delta = model.get_rope_index(
        own,
        input_ids=torch.ones(1, len(kinds), dtype=torch.long),
        mm_token_type_ids=torch.tensor([kinds]),
        image_grid_thw=unmerged,
    )
    return positions[:, 0].tolist(), int(delta)


def laid_out(parts: list[int | Grid]) -> tuple[list[int], list[tuple[int, Grid]]]:
    """(kind of each token, images) of runs of text (a count) and images (a grid)."""
    kinds: list[int] = []
    images: list[tuple[int, Grid]] = []
    for part in parts:
        if isinstance(part, int):
            kinds += [0] * part
        else:
            images.append((len(kinds), part))
            kinds += [1] * (part[0] * part[1] * part[2])
    return kinds, images


def check(name: str, parts: list[int | Grid]) -> None:
    kinds, images = laid_out(parts)
    wanted, wanted_delta = hf_positions(MODELS[name], kinds, [grid for _, grid in images])
    got, delta = mrope_positions(len(kinds), images)
    assert [list(axis) for axis in got] == wanted
    assert delta == wanted_delta


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "parts",
    [
        [7],
        [3, (1, 4, 6), 5],
        [(1, 4, 6), 5],
        [3, (1, 6, 4)],
        [(1, 1, 1)],
        [1, (1, 2, 9), 1, (1, 9, 2), 1, (1, 3, 3)],
        [2, (3, 2, 2), 4],
    ],
    ids=str,
)
def test_positions_equal_the_reference(name: str, parts: list[int | Grid]) -> None:
    check(name, parts)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(sorted(MODELS)),
    st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(1, 12)),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 3),
    st.booleans(),
)
def test_any_mix_of_text_and_images(
    name: str, drawn: list[tuple[int, int, int]], tail: int, image_first: bool
) -> None:
    parts: list[int | Grid] = []
    for text, rows, cols in drawn:
        parts += [text, (1, rows, cols)]
    check(name, (parts[1:] if image_first else parts) + ([tail] if tail else []))


def test_adjacent_images_follow_each_other() -> None:
    """The reference cannot tell these apart; the rule is that of an image after no text."""
    (t, h, w), delta = mrope_positions(8, [(0, (1, 2, 2)), (4, (1, 2, 2))])
    assert t == (0, 0, 0, 0, 2, 2, 2, 2)
    assert h == (0, 0, 1, 1, 2, 2, 3, 3)
    assert w == (0, 1, 0, 1, 2, 3, 2, 3)
    assert delta == -4


@pytest.mark.parametrize("images", [[(0, (1, 2, 2)), (3, (1, 1, 1))], [(5, (1, 2, 2))]])
def test_overlapping_images_are_refused(images: list[tuple[int, Grid]]) -> None:
    with pytest.raises(ValueError, match="overlaps"):
        mrope_positions(8, images)
