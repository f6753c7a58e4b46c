"""The training module computes what transformers' Idefics3 tower computes; its loss is right."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from demo_model.scenes import to_cells  # noqa: E402
from demo_model.tower import Tower, TowerConfig, placing_loss  # noqa: E402


def test_placing_loss_equals_the_sum_over_places() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 6, 4).log_softmax(-1)
    where = torch.tensor([0, 0, 1])
    starts = torch.tensor([[0, 1], [3, 4], [2, -1]])
    tokens = torch.tensor([[1, 1], [2, -1], [0, 2]])
    loss, classes = placing_loss(logits, where, starts, tokens)
    total = 0.0
    for image in range(2):
        paths = [[3] * 6]
        for i in range(3):
            if int(where[i]) != image:
                continue
            said = [t for t in tokens[i].tolist() if t >= 0]
            paths = [
                [*path[:at], *said, *path[at + len(said) :]]
                for path in paths
                for at in starts[i].tolist()
                if at >= 0
            ]
        chances = [
            math.exp(sum(float(logits[image, t, c]) for t, c in enumerate(path))) for path in paths
        ]
        total -= math.log(sum(chances))
        assert classes[image].tolist() == paths[chances.index(max(chances))]
    assert float(loss) == pytest.approx(total / 2, abs=1e-4)


def test_some_cells_alone_are_computed_at_their_true_places() -> None:
    torch.manual_seed(0)
    sizes = TowerConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=0, num_attention_heads=2
    )
    tower = Tower(sizes).eval()
    pixels, cells = torch.randn(1, 64, 4, 16, 16, 3), torch.arange(64)[None]
    keep = torch.tensor([[3, 17, 40]])
    whole, part = tower(pixels, cells)[0], tower(pixels[:, keep[0]], keep)[0]
    assert torch.allclose(whole[:, keep[0]], part, atol=1e-6)


def test_tower_equals_transformers() -> None:
    from transformers import Idefics3Config
    from transformers.models.idefics3.modeling_idefics3 import (
        Idefics3Connector,
        Idefics3VisionTransformer,
    )

    torch.manual_seed(0)
    sizes = TowerConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=2,
        text_hidden_size=48,
    )
    tower = Tower(sizes).eval()
    config = Idefics3Config(
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": 256,
            "patch_size": 16,
        },
        text_config={"model_type": "llama", "hidden_size": 48, "num_attention_heads": 4},
        scale_factor=2,
    )
    vision, connector = Idefics3VisionTransformer(config.vision_config), Idefics3Connector(config)
    vision.load_state_dict(tower.vision_model.state_dict())
    connector.load_state_dict(tower.connector.state_dict())
    pixels = torch.randn(2, 3, 256, 256)
    with torch.no_grad():
        theirs = connector(vision.eval()(pixels).last_hidden_state)
        cells = torch.stack(
            [torch.from_numpy(to_cells(p.numpy())) for p in pixels.permute(0, 2, 3, 1)]
        )
        ours, *_ = tower(cells, torch.arange(64).expand(2, -1))
    assert torch.allclose(ours, theirs, atol=1e-4)
