"""The generator: labels agree with what is drawn, and the split holds."""

from __future__ import annotations

import random

import numpy as np
import pytest

data = pytest.importorskip("demo_model.data")
try:
    FONTS = data.faces(held_out=False)
except FileNotFoundError:
    pytest.skip("no fonts installed", allow_module_level=True)


def test_held_out_strings_and_faces_are_never_drawn_for_training() -> None:
    rng = random.Random(0)
    drawn = {data.draw_digits(rng) for _ in range(2000)}
    assert not any(data.is_held_out(text) for text in drawn)
    assert not {f.stem for f in FONTS} & set(data.HELD_OUT_FACES)


def test_labels_spell_the_number_in_reading_order() -> None:
    rng = random.Random(1)
    for _ in range(60):
        text = data.draw_digits(rng)
        example = data.to_example(rng, data.render(rng, text, FONTS))
        labels = example.cell_labels.flatten()
        assert "".join(data.CHARS[v] for v in labels[labels != data.BLANK]) == text
        assert example.pixels.shape == (len(example.patch_labels) * 16, 256, 3)


def test_columns_are_adjacent() -> None:
    assert data.columns([0.5, 4.5, 7.5]) == [2, 3, 4]
    assert data.columns([7.5]) == [7]
    assert data.columns([c / 2 + 2 for c in range(8)]) == list(range(8))


def test_squash_equals_the_image_processor() -> None:
    torch = pytest.importorskip("torch")
    from PIL import Image
    from transformers import Idefics3ImageProcessor

    processor = Idefics3ImageProcessor(
        size={"longest_edge": 256},
        max_image_size={"longest_edge": 256},
        resample=3,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    rng = random.Random(2)
    for _ in range(8):
        image = data.render(rng, data.draw_digits(rng), FONTS).image
        theirs = processor([image], return_tensors="pt")["pixel_values"][0, 0]
        ours = torch.from_numpy(data.squash(image).copy()).permute(2, 0, 1) / 127.5 - 1
        assert theirs.shape == ours.shape
        worst = float((theirs - ours).abs().max()) * 127.5
        assert worst < 2.5, worst  # grey levels: the two libraries round differently
    assert isinstance(image, Image.Image)
    assert np.asarray(image).ndim == 3
