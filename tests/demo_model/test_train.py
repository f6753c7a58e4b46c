"""Training: batches come again as they were, and every part that training owns learns."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")
data = pytest.importorskip("demo_model.data")

from demo_model import lexicon, train  # noqa: E402
from demo_model.tower import TowerConfig  # noqa: E402

try:
    data.faces(held_out=False)
except FileNotFoundError:
    pytest.skip("no fonts installed", allow_module_level=True)

MIX = {"word": 1.0, "number": 1.0, "receipt": 1.0, "shapes": 1.0, "count": 1.0, "nothing": 0.5}
SMALL = TowerConfig(
    hidden_size=64,
    intermediate_size=lexicon.FILLER,
    num_hidden_layers=2,
    num_attention_heads=2,
)


def test_the_stream_goes_on_where_it_was() -> None:
    fresh = list(itertools.islice(train.stream(3, (0, 0), MIX, 512), 20))
    _, pool, used = fresh[11]
    again = list(itertools.islice(train.stream(3, (pool, used), MIX, 512), 8))
    for (batch, *place), (other, *other_place) in zip(fresh[12:], again, strict=True):
        assert place == other_place
        assert all(torch.equal(batch[k], other[k]) for k in batch)


def test_batches_hold_about_as_many_patches_as_asked() -> None:
    for batch in train.pool(1, 0, MIX, 512):
        images, cells = batch["cells"].shape
        assert batch["classes"].shape == (images, cells)
        assert images == 1 or images * cells * 4 <= 512


def test_every_weight_but_the_codes_own_has_a_gradient() -> None:
    torch.manual_seed(0)
    model = train.Trainee(SMALL)
    batch = max(train.pool(2, 0, MIX, 1024), key=lambda b: len(b["cells"]))
    # Of so few images not all kinds need be in one batch; two heads need theirs.
    assert (batch["words"] >= 0).any()
    loss, report = model.losses(batch, train.Weights())
    assert torch.isfinite(loss)
    loss.backward()
    silent = {n for n, p in model.named_parameters() if p.grad is None}
    last = "tower.vision_model.encoder.layers.1.mlp.fc2."
    codes = {last + "weight", last + "bias", "tower.vision_model.post_layernorm.weight"}
    codes |= {
        "tower.vision_model.post_layernorm.bias",
        "tower.connector.modality_projection.proj.weight",
    }
    heads = {"tag_head.weight", "tag_head.bias"}
    assert codes <= silent <= codes | heads
    learned = {
        id(p)
        for o in train.make_optimisers(model, 1e-3)
        for g in o.param_groups
        for p in g["params"]
    }
    assert learned == {id(p) for n, p in model.named_parameters() if n not in codes}
    assert set(report) >= {"glyph", "mates", "spots", "aims", "word", "said", "loud"}


def test_a_few_steps_lower_the_loss() -> None:
    torch.manual_seed(0)
    model = train.Trainee(SMALL)
    optimisers = train.make_optimisers(model, 3e-3)
    batch = train.pool(2, 0, {"word": 1.0}, 1024)[0]
    seen = []
    for _ in range(12):
        loss, _ = model.losses(batch, train.Weights())
        model.zero_grad(set_to_none=True)
        loss.backward()
        for optimiser in optimisers:
            optimiser.step()
        seen.append(float(loss.detach()))
    assert seen[-1] < 0.7 * seen[0], seen
