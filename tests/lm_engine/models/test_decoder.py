"""The decoder's logits against transformers', for every family and flag."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lm_engine.models.decoder import DecoderLayer, Deepstack
from lm_engine.models.loader import LoadedDecoder, load_decoder
from lm_engine.models.rope import inverse_frequencies, rotate, rotation
from tests.checkpoints import FAMILIES, VARIANTS, checkpoint, hf_model
from tests.lm_engine.models.dense import DenseAttention

LENGTH = 70


def prompt(seed: int = 1, length: int = LENGTH) -> Tensor:
    return torch.randint(0, 260, (length,), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def logits_of(loaded: LoadedDecoder, ids: Tensor, positions: Tensor | None = None) -> Tensor:
    decoder = loaded.decoder
    where = torch.arange(len(ids)) if positions is None else positions
    return decoder.logits(decoder(decoder.embed(ids), where, DenseAttention(loaded.config)))


@torch.inference_mode()
def reference(folder: Path, ids: Tensor, **inputs: Any) -> Tensor:
    logits: Tensor = hf_model(folder)(ids[None], **inputs).logits[0]
    return logits


@pytest.mark.parametrize("name", FAMILIES + VARIANTS)
def test_prompt_logits_equal_transformers(name: str, root: Path) -> None:
    folder = checkpoint(name, root)
    got = logits_of(load_decoder(folder), prompt())
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, reference(folder, prompt()), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("mistral", {"windows": (None,) * 3}),
        ("qwen2_window", {"windows": (None,) * 3}),
        ("smollm3", {"rope_layers": (True,) * 4}),
    ],
)
def test_flags_matter(name: str, other: dict[str, Any], root: Path) -> None:
    """Without the flag the logits are others: the agreement above is no accident of the toy."""
    loaded = load_decoder(checkpoint(name, root))
    config = replace(loaded.config, **other)
    for layer, rotated in zip(loaded.decoder.layers, config.rope_layers, strict=True):
        assert isinstance(layer, DecoderLayer)
        layer.rotated = rotated
    changed = replace(loaded, config=config)
    difference = logits_of(changed, prompt()) - reference(checkpoint(name, root), prompt())
    assert difference.abs().max() > 0.1


@pytest.mark.parametrize("pieces", [[1] * 12, [5, 7], [11, 1]])
def test_pieces_equal_the_whole(pieces: list[int], root: Path) -> None:
    loaded = load_decoder(checkpoint("qwen2_window", root))
    ids, decoder = prompt(length=12), loaded.decoder
    attention, at, parts = DenseAttention(loaded.config), 0, []
    with torch.inference_mode():
        for size in pieces:
            hidden = decoder.embed(ids[at : at + size])
            parts.append(decoder(hidden, torch.arange(at, at + size), attention))
            at += size
        got = decoder.logits(torch.cat(parts))
    torch.testing.assert_close(got, logits_of(loaded, ids), atol=1e-4, rtol=0)


def image_positions() -> Tensor:
    """(t, h, w) as an image amid text has them: 6 text tokens, a 4 x 5 grid, text again."""
    text = torch.arange(6).expand(3, -1)
    rows, columns = torch.meshgrid(torch.arange(4), torch.arange(5), indexing="ij")
    grid = torch.stack((torch.zeros(20), rows.flatten(), columns.flatten())).long() + 6
    rest = torch.arange(11, 11 + LENGTH - 26).expand(3, -1)
    return torch.cat((text, grid, rest), dim=1)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_mrope_positions_equal_transformers(name: str, root: Path) -> None:
    folder, positions = checkpoint(name, root), image_positions()
    want = reference(folder, prompt(), position_ids=positions[:, None])
    got = logits_of(load_decoder(folder), prompt(), positions)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    flat = logits_of(load_decoder(folder), prompt())
    assert (flat - want).abs().max() > 0.1


def test_one_axis_positions_drive_all_of_mrope(root: Path) -> None:
    loaded = load_decoder(checkpoint("qwen3_vl", root))
    three = torch.arange(LENGTH).expand(3, -1)
    assert torch.equal(logits_of(loaded, prompt()), logits_of(loaded, prompt(), three))


@torch.inference_mode()
def test_deepstack_equals_transformers(root: Path) -> None:
    folder = checkpoint("qwen3_vl", root)
    loaded, ids = load_decoder(folder), prompt()
    assert loaded.config.num_deepstack == 2
    rows = torch.tensor([3, 4, 5, 9, 30])
    values = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(2))
    mask = torch.zeros(1, LENGTH, dtype=torch.bool)
    mask[0, rows] = True
    text = hf_model(folder).model.language_model
    embeds = text.embed_tokens(ids)
    want = text(
        inputs_embeds=embeds[None], visual_pos_masks=mask, deepstack_visual_embeds=list(values)
    ).last_hidden_state[0]
    got = loaded.decoder(
        loaded.decoder.embed(ids),
        torch.arange(LENGTH),
        DenseAttention(loaded.config),
        Deepstack(rows, values),
    )
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


@torch.inference_mode()
def test_forward_leaves_its_input_alone(root: Path) -> None:
    loaded = load_decoder(checkpoint("llama", root))
    hidden = loaded.decoder.embed(prompt())
    before = hidden.clone()
    loaded.decoder(hidden, torch.arange(LENGTH), DenseAttention(loaded.config))
    assert torch.equal(hidden, before)


@pytest.mark.parametrize(("name", "tied"), [("llama_tied", True), ("llama", False)])
def test_tied_heads_share_storage(name: str, tied: bool, root: Path) -> None:
    decoder = load_decoder(checkpoint(name, root)).decoder
    assert (decoder.head.weight.data_ptr() == decoder.embedding.weight.data_ptr()) is tied


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["qwen3", "llama_bias"])
def test_half_widths_stay_near_float32(name: str, dtype: torch.dtype, root: Path) -> None:
    """Held against transformers' own loss at the same width: rounding happens in other places
    here, so outputs differ, but the mean error must not be larger by half."""
    folder, ids = checkpoint(name, root), prompt()
    exact = reference(folder, ids)
    loaded = load_decoder(folder, dtype=dtype)
    assert loaded.decoder.dtype == dtype
    ours = (logits_of(loaded, ids) - exact).abs().mean()
    with torch.inference_mode():
        theirs = hf_model(folder, dtype=dtype)(ids[None]).logits[0].float()
    assert 0 < ours <= 1.5 * (theirs - exact).abs().mean()


@pytest.mark.parametrize("name", ["llama", "llama_rope3", "llama_linear", "qwen2_5_vl", "qwen3_vl"])
def test_rotation_far_out_equals_transformers(name: str, root: Path) -> None:
    """Angles at 131,072 positions are large: a frequency off by one ulp would show."""
    config = load_decoder(checkpoint(name, root)).config
    model = hf_model(checkpoint(name, root)).model
    rotary = (model.language_model if "_vl" in name else model).rotary_emb
    positions = torch.tensor([0, 1, 8191, 65_537, 131_071])
    many = torch.stack((positions, positions // 3, positions // 7))
    axes = None if config.rope.axes is None else torch.tensor(config.rope.axes)
    where = positions if axes is None else many
    frequencies = inverse_frequencies(config.rope, config.head_dim)
    heads = torch.randn(5, 1, config.head_dim, generator=torch.Generator().manual_seed(3))
    got = rotate(heads, rotation(where, frequencies, axes, torch.float32))

    cos, sin = rotary(heads, where[None] if axes is None else where[:, None])
    half = config.head_dim // 2
    turned = torch.cat((-heads[..., half:], heads[..., :half]), -1)
    want = heads * cos[0].unsqueeze(1) + turned * sin[0].unsqueeze(1)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
