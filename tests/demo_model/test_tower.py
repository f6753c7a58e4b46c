"""The training module computes what transformers' Idefics3 tower computes; its loss is right."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from demo_model.tower import Tower, TowerConfig, spelling_loss  # noqa: E402


def test_spelling_loss_equals_the_sum_over_places() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 6, 4).log_softmax(-1)
    targets, lengths = torch.tensor([[1, 1, 2], [0, 0, 0]]), torch.tensor([3, 1])
    losses, classes = spelling_loss(logits, targets, lengths)
    for i in range(2):
        wanted = targets[i, : lengths[i]].tolist()
        total = 0.0
        for start in range(6 - len(wanted) + 1):
            path = [3] * 6
            for k, label in enumerate(wanted):
                path[start + k] = label
            total += math.exp(sum(float(logits[i, t, c]) for t, c in enumerate(path)))
        spelled = [c for c in classes[i].tolist() if c != 3]
        assert spelled == wanted
        assert float(losses[i]) == pytest.approx(-math.log(total), abs=1e-4)


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
        ours, _, _ = tower(pixels, torch.zeros(2, dtype=torch.long))
    assert torch.allclose(ours, theirs, atol=1e-4)
