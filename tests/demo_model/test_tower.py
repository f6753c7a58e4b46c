"""The training module computes what transformers' Idefics3 tower computes; its loss is right."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from demo_model.codes import captions, export, fit_codes  # noqa: E402
from demo_model.scenes import to_cells  # noqa: E402
from demo_model.tower import Tower, TowerConfig  # noqa: E402


def test_some_cells_alone_are_computed_at_their_true_places() -> None:
    torch.manual_seed(0)
    sizes = TowerConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2
    )
    tower = Tower(sizes).eval()
    # Without attention every patch stands alone, and its place still counts.
    tower.last.self_attn.out_proj.weight.data.zero_()
    pixels, cells = torch.randn(1, 64, 4, 16, 16, 3), torch.arange(64)[None]
    keep = torch.tensor([[3, 17, 40]])
    whole, part = tower.tokens(pixels, cells), tower.tokens(pixels[:, keep[0]], keep)
    assert torch.allclose(whole[:, keep[0]], part, atol=1e-6)


def _transformers(sizes: TowerConfig) -> tuple[torch.nn.Module, torch.nn.Module]:
    from transformers import Idefics3Config
    from transformers.models.idefics3.modeling_idefics3 import (
        Idefics3Connector,
        Idefics3VisionTransformer,
    )

    own = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = Idefics3Config(
        vision_config={k: getattr(sizes, k) for k in (*own, "image_size", "patch_size")},
        text_config={
            "model_type": "llama",
            "hidden_size": sizes.text_hidden_size,
            "num_attention_heads": 4,
        },
        scale_factor=2,
    )
    return Idefics3VisionTransformer(config.vision_config).eval(), Idefics3Connector(config)


def _tiles(pixels: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.from_numpy(to_cells(p.numpy())) for p in pixels.permute(0, 2, 3, 1)])


SIZES = TowerConfig(
    hidden_size=64,
    intermediate_size=300,
    num_hidden_layers=3,
    num_attention_heads=2,
    text_hidden_size=80,
)


def test_tower_equals_transformers_once_its_thinner_layers_are_padded() -> None:
    torch.manual_seed(0)
    tower = Tower(SIZES).eval()
    assert tower.vision_model.encoder.layers[0].mlp.fc1.out_features == 256
    vision, connector = _transformers(SIZES)
    state = tower.padded_state()
    for part, name in ((vision, "vision_model."), (connector, "connector.")):
        part.load_state_dict(
            {k.removeprefix(name): v for k, v in state.items() if k.startswith(name)}
        )
    pixels = torch.randn(2, 3, 256, 256)
    with torch.no_grad():
        theirs = connector(vision(pixels).last_hidden_state)
        ours = tower.tokens(_tiles(pixels), torch.arange(64).expand(2, -1))
    assert torch.allclose(ours, theirs, atol=1e-4)


def test_codes_make_embeddings_of_the_units_that_fire(tmp_path: Path) -> None:
    """An exported tower, read by transformers, says the class whose unit fires, else the filler."""
    torch.manual_seed(0)
    tower = Tower(SIZES).eval()
    anchors = torch.randn(301, 80)
    codes = fit_codes(anchors, 64)
    said = codes.embeddings()
    assert torch.nn.functional.cosine_similarity(said, anchors).min() > 0.75
    assert codes.codes.mean(-1).abs().max() < 1e-4
    assert (codes.codes.square().mean(-1) - 1).abs().max() < 1e-3
    # Patch by patch: the first three layers do nothing, the units see the patch and the bias.
    fc1 = tower.last.mlp.fc1
    fc1.weight.data.zero_()
    fc1.bias.data.fill_(-2.0)
    for fires in (None, 7, 250):
        fc1.bias.data.fill_(-2.0)
        if fires is not None:
            fc1.bias.data[fires] = 3.0
        # Tuning gives the matrix a part along the direction that no code has.
        prompt = {"codes": codes.codes, "matrix": codes.matrix + 0.1, "middle": codes.middle}
        save_file({**prompt, "special_rows": torch.zeros(40, 80)}, tmp_path / "prompt.safetensors")
        export(tower, tmp_path / "prompt.safetensors", tmp_path / "v.safetensors", "a test")
        tensors = load_file(tmp_path / "v.safetensors")
        assert torch.allclose(captions(tensors), said, atol=0.02)
        vision, connector = _transformers(SIZES)
        for part, name in ((vision, "model.vision_model."), (connector, "model.connector.")):
            part.load_state_dict(
                {k.removeprefix(name): v for k, v in tensors.items() if k.startswith(name)}
            )
        with torch.no_grad():
            tokens = connector(vision(torch.randn(1, 3, 256, 256)).last_hidden_state)[0]
        wanted = said[-1 if fires is None else fires].expand_as(tokens)
        assert torch.nn.functional.cosine_similarity(tokens, wanted).min() > 0.99, fires
