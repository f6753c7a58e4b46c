"""The generators: the split holds, and the supervision agrees with what is drawn."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

data = pytest.importorskip("demo_model.data")
from demo_model import examples, lexicon, mixture, scenes, shapes, texts  # noqa: E402

try:
    FONTS = data.faces(held_out=False)
except FileNotFoundError:
    pytest.skip("no fonts installed", allow_module_level=True)

TEXT_KINDS = ("word", "number", "price", "words", "receipt")


def _lines(classes: np.ndarray) -> list[str]:
    """What each row of cells says, fillers at its end left out."""
    rows = np.asarray(classes).reshape(data.CELLS, data.CELLS)
    return ["".join(lexicon.CLASSES[c] for c in row).rstrip() for row in rows]


def test_held_out_strings_phrases_and_faces_are_never_drawn_for_training() -> None:
    rng = random.Random(0)
    drawn = {data.draw_digits(rng) for _ in range(2000)}
    assert not any(data.is_held_out(text) for text in drawn)
    assert not {f.stem for f in FONTS} & set(data.HELD_OUT_FACES)
    for _ in range(200):
        words = [w.lower() for line in texts.draw_words(rng) for w in line]
        assert not texts.held_out_phrase(words)
        held = [w.lower() for line in texts.draw_words(rng, held_out=True) for w in line]
        assert texts.held_out_phrase(held)
        total = texts.draw_receipt(rng)[-1][1]
        assert not data.is_held_out(total)
    assert not set(lexicon.UNSEEN) & set(lexicon.WORDS)


@pytest.mark.parametrize("kind", TEXT_KINDS)
def test_cells_say_the_text_from_the_first_on(kind: str) -> None:
    rng = random.Random(1)
    for _ in range(25):
        layout = mixture.lay_out(rng, kind, held_out=False)
        lines: dict[int, list[str]] = {}
        for item in layout.items:
            lines.setdefault(item.line, []).append(item.text.lower())
        written = [" ".join(words) for words in lines.values()]
        if kind == "words":  # a phrase runs on over its lines
            written = [" ".join(written)]
        said = [row.strip() for row in _lines(examples.captions(layout.items))]
        assert said == [*written, *[""] * (data.CELLS - len(written))]


def test_a_line_of_too_many_tokens_is_refused() -> None:
    boxes = tuple((20.0 * i, 0.0, 20.0 * i + 20, 40.0) for i in range(9))
    with pytest.raises(ValueError, match="8 rows of 8 tokens"):
        examples.captions((scenes.Item("123456789", boxes, 0),))


def test_a_draft_keeps_every_cell_that_speaks() -> None:
    rng = random.Random(2)
    for _ in range(20):
        drawn, count = mixture.draw(rng, {"words": 1, "receipt": 1, "shapes": 1, "count": 1})
        example = drawn.with_cells(rng, count)
        assert len(set(example.cells.tolist())) == len(example.pixels) == count
        whole = drawn.with_cells(rng, data.CELLS**2)
        assert mixture.truth(example) == mixture.truth(whole) != []
        assert len(example.classes) > len(mixture.truth(example)), "a cell that says nothing"


def test_every_patch_of_text_aims_at_the_cell_that_says_it() -> None:
    rng = random.Random(6)
    for kind in TEXT_KINDS:
        layout = mixture.lay_out(rng, kind, held_out=False)
        classes = examples.captions(layout.items)
        glyphs, _, spots, aims, words = examples.label(layout.items)
        on = spots[..., 0] >= 0
        assert on.any()
        assert (aims[on] >= 0).all()
        said = classes[aims[..., 0] * data.CELLS + aims[..., 1]]
        worded = on & (words >= 0)
        assert (said[worded] == words[worded]).all()
        spelled = on & (words < 0) & (glyphs[..., 0] == glyphs[..., 1])
        spelled &= glyphs[..., 0] != lexicon.NO_GLYPH
        own = [lexicon.CLASS_OF[lexicon.GLYPHS[g]] for g in glyphs[spelled][:, 0]]
        assert said[spelled].tolist() == own


def test_glyph_labels_stand_where_ink_is() -> None:
    rng = random.Random(3)
    inked = total = 0
    for _ in range(30):
        layout = mixture.lay_out(rng, "word", held_out=False)
        everywhere = np.arange(data.CELLS**2)
        glyphs, mates, spots, _, words = examples.label(layout.items)
        pixels = scenes.paint_cells(rng, layout, everywhere).astype(float)
        spread = pixels.std(axis=(2, 3)).mean(axis=-1)  # (64, 4)
        labelled = (glyphs != lexicon.NO_GLYPH).any(-1)
        inked += int((spread[labelled] > 4).sum())
        total += int(labelled.sum())
        assert ((mates[..., 0] >= 0) <= (words >= 0)).all()
        assert ((mates[..., 0] >= 0) == (spots[..., 0] >= 0)).all()
        spelled = {lexicon.GLYPHS[g] for g in glyphs.flatten() if g != lexicon.NO_GLYPH}
        assert spelled <= set(layout.items[0].text.lower())
    assert inked / total > 0.8


def test_half_a_word_names_its_neighbours() -> None:
    item = scenes.Item(
        "cat", tuple((40.0 + 32 * i, 32.0, 72.0 + 32 * i, 64.0) for i in range(3)), 0
    )
    glyphs, mates, spots, *_ = examples.label((item,))
    on_a = glyphs == lexicon.glyph("a")
    assert on_a.any()
    patch = np.argwhere(on_a.all(-1))[0]
    before2, before, after, after2 = (int(m) for m in mates[tuple(patch)])
    assert (before, after) == (lexicon.glyph("c"), lexicon.glyph("t"))
    assert before2 == after2 == lexicon.NO_GLYPH
    assert spots[tuple(patch)].tolist() == [1, 1]


def test_shapes_say_what_and_where_they_are() -> None:
    rng = random.Random(4)
    counts: Counter[int] = Counter()
    for _ in range(60):
        scene = shapes.two_shapes(rng)
        first, second = scene.shapes
        if scene.sides == ("left", "right"):
            assert first.x < second.x
        else:
            assert scene.sides == ("above", "below")
            assert first.y < second.y
        assert (first.kind, first.colour) != (second.kind, second.colour)
        said = [line.strip() for line in _lines(shapes.captions(scene)) if line]
        assert said == [" ".join(caption) for caption in scene.captions]
        aims, *_ = shapes.label(scene)
        assert set(aims[..., 0].flatten().tolist()) == {-1, 0, 1}
        scene = shapes.equal_shapes(rng)
        counts[len(scene.shapes)] += 1
        _, words, tags, _ = shapes.label(scene)
        ordinals = {lexicon.CLASSES[w].strip() for w in words.flatten() if w >= 0}
        assert ordinals == set(lexicon.COUNTS[: len(scene.shapes)])
        assert len(set(tags.flatten().tolist())) == 2
    assert set(counts) == set(range(1, 7))


def test_the_fast_drawing_is_the_squashed_image() -> None:
    for seed in range(6):
        layout = mixture.lay_out(random.Random(seed), "word", held_out=False, longest_px=(200, 400))
        inks = []
        for real in (False, True):
            drawn = examples.text_draft(random.Random(0), layout, real)
            example = drawn.with_cells(random.Random(0), data.CELLS**2)
            grey = example.pixels.astype(float).mean(-1)
            paper = np.median(grey)
            inks.append(np.abs(grey - paper).mean(axis=(2, 3)).flatten())
        assert np.corrcoef(*inks)[0, 1] > 0.95


def test_squash_equals_the_image_processor() -> None:
    torch = pytest.importorskip("torch")
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
        image = scenes.draw_whole(rng, mixture.lay_out(rng, "number", held_out=False))
        theirs = processor([image], return_tensors="pt")["pixel_values"][0, 0]
        ours = torch.from_numpy(data.squash(image).copy()).permute(2, 0, 1) / 127.5 - 1
        assert theirs.shape == ours.shape
        worst = float((theirs - ours).abs().max()) * 127.5
        assert worst < 2.5, worst  # grey levels: the two libraries round differently
