"""uint8 patches against the reference processors' pixel values: equal, not close."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers as tf

from tests.vision_encoder.references import NAMES, Reference, reference
from vision_encoder.grid import planner
from vision_encoder.plan import ImagePlan
from vision_encoder.preprocess import PatchedImage, normalize, patchify

SIZES = [
    (1, 1),
    (2, 2),
    (27, 257),
    (257, 27),
    (1, 200),
    (200, 1),
    (14, 14),
    (100, 1000),
    (640, 480),
    (480, 640),
    (333, 500),
    (336, 336),
    (384, 384),
    (385, 383),
    (511, 513),
    (512, 512),
    (768, 384),
    (1023, 70),
    (900, 1201),
    (1024, 1024),
]


def picture(width: int, height: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Noise over a slope: every resampling weight matters, and so do clipping and rounding."""
    draw = np.random.default_rng(seed + width * 7919 + height)
    noise = draw.integers(0, 256, (height, width, 3))
    slope = np.linspace(0, 255, width)[None, :, None]
    return np.where(draw.random((height, width, 1)) < 0.5, noise, slope).astype(np.uint8)


def reference_pixels(ref: Reference, images: list[npt.NDArray[np.uint8]]) -> Any:
    tensors = [torch.from_numpy(image).permute(2, 0, 1) for image in images]
    nested = ref.config["model_type"] in ("smolvlm", "idefics3", "llava_onevision")
    return ref.images(
        [tensors] if nested else tensors, input_data_format="channels_first", return_tensors="pt"
    )["pixel_values"]


def as_patches(tiles: torch.Tensor, patch: int) -> torch.Tensor:
    """[T, 3, H, W] to [T * rows * cols, 3 * patch**2], raster order, as a strided Conv2d cuts."""
    cut = torch.nn.functional.unfold(tiles, patch, stride=patch)
    return cut.transpose(1, 2).reshape(-1, 3 * patch * patch)


def patched(ref: Reference, images: list[npt.NDArray[np.uint8]]) -> list[PatchedImage]:
    mine = ref.planner
    plans = mine.plan([(image.shape[1], image.shape[0]) for image in images])
    return [patchify(image, plan, mine.pixels) for image, plan in zip(images, plans, strict=True)]


def check_equal(ref: Reference, images: list[npt.NDArray[np.uint8]]) -> None:
    patch = ref.planner.pixels.patch_size
    mine = patched(ref, images)
    theirs = reference_pixels(ref, images)
    family = ref.config["model_type"]
    if family.startswith("qwen"):
        both = theirs.reshape(len(theirs), 3, 2, patch * patch)
        assert torch.equal(both[:, :, 0], both[:, :, 1])
        wanted = both[:, :, 0].reshape(len(theirs), -1)
    elif family == "llava_onevision":
        wanted = torch.cat(
            [
                as_patches(tiles[: len(image.plan.tiles)], patch)
                for tiles, image in zip(theirs, mine, strict=True)
            ]
        )
    else:
        wanted = as_patches(theirs[0] if theirs.ndim == 5 else theirs, patch)
    for image in mine:
        assert image.patches.dtype == torch.uint8
        assert len(image.patches) == image.plan.num_patches
        assert image.grids == tuple(tile.grid for tile in image.plan.tiles)
    pixels = torch.cat([image.patches for image in mine])
    got = normalize(pixels, ref.planner.pixels.normalization, patch)
    assert got.shape == wanted.shape
    assert torch.equal(got, wanted)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", NAMES)
def test_patches_equal_the_processors(name: str) -> None:
    # The real tile families blow every picture up to megapixels: a few sizes here, all of them
    # in the slow test; their tiny twins run all.
    large = name in ("smolvlm", "smolvlm_384", "idefics3", "llava_onevision")
    for width, height in SIZES[2::7] if large else SIZES:
        check_equal(reference(name), [picture(width, height)])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_patches_equal_the_processors_at_all_sizes(name: str) -> None:
    for width, height in [*SIZES, (2048, 1536), (1240, 1754), (3840, 2160)]:
        check_equal(reference(name), [picture(width, height)])


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in ("smolvlm", "smolvlm_384", "idefics3")]
)
def test_lists_of_pictures_equal_the_processors(name: str) -> None:
    check_equal(reference(name), [picture(300, 200), picture(64, 230), picture(300, 200, seed=1)])


@pytest.mark.parametrize("resample", [0, 1, 2, 3])
def test_every_filter_equals_the_processors(resample: int) -> None:
    ref = reference("llava_padded")
    images = tf.LlavaImageProcessor(**{**ref.files, "resample": resample})
    changed = Reference(ref.config, images.to_dict(), images, ref.step)
    for size in ((300, 200), (40, 90), (112, 112)):
        check_equal(changed, [picture(*size)])


@pytest.mark.parametrize(
    "switches",
    [{"do_rescale": False}, {"do_normalize": False}, {"do_rescale": False, "do_normalize": False}],
)
def test_switched_off_steps_equal_the_processors(switches: dict[str, bool]) -> None:
    ref = reference("qwen2_5_vl")
    images = tf.Qwen2VLImageProcessor(**{**ref.files, **switches})
    changed = Reference(ref.config, images.to_dict(), images, ref.step)
    image = picture(300, 200)
    theirs = reference_pixels(changed, [image]).reshape(-1, 3, 2, 196)[:, :, 0].reshape(-1, 588)
    mine = patched(changed, [image])[0].patches
    got = normalize(mine, changed.planner.pixels.normalization, 14)
    assert (got - theirs.float()).abs().max() <= 1e-6 * theirs.abs().max()


def test_an_affine_map_is_the_normalisation() -> None:
    config = reference("qwen2_5_vl").planner.pixels
    samples = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 3 * 196)
    wanted = normalize(samples, config.normalization, 14).reshape(256, 3, 196)[:, :, 0]
    scale, shift = (
        torch.tensor(v) for v in (config.normalization.scale, config.normalization.shift)
    )
    assert torch.allclose(torch.arange(256.0)[:, None] * scale + shift, wanted, atol=1e-6)


def test_tiles_sit_where_the_plan_says() -> None:
    """A picture of exactly four tiles is cut, not resampled."""
    ref = reference("smolvlm_tiny")
    image = picture(256, 128)
    (mine,) = patched(ref, [image])
    per_tile = 16
    for index, tile in enumerate(mine.plan.tiles[:-1]):
        part = image[tile.top : tile.top + 64, tile.left : tile.left + 64]
        wanted = as_patches(torch.from_numpy(part).permute(2, 0, 1)[None].float(), 16)
        assert torch.equal(mine.patches[index * per_tile : (index + 1) * per_tile].float(), wanted)


def test_the_first_tile_of_llava_onevision_is_the_base_view() -> None:
    mine = reference("llava_onevision_tiny").planner
    plan = mine.plan([(144, 72)])[0]
    image = np.zeros((72, 144, 3), np.uint8)
    image[:, :72, 0] = 255
    patches = patchify(image, plan, mine.pixels).patches.reshape(len(plan.tiles), 25, 3, 196)
    red = patches[:, :, 0].float().mean(dim=(1, 2))
    assert red[0] == pytest.approx(127, abs=12)
    assert (red[1:] > 250).any()
    assert (red[1:] < 5).any()


def test_a_picture_of_another_size_is_refused() -> None:
    mine = reference("qwen3_vl").planner
    plan: ImagePlan = mine.plan([(64, 48)])[0]
    with pytest.raises(ValueError, match=r"uint8 \(48, 64, 3\)"):
        patchify(picture(48, 64), plan, mine.pixels)
    with pytest.raises(ValueError, match="float64"):
        patchify(np.zeros((48, 64, 3)), plan, mine.pixels)  # type: ignore[arg-type]


def test_the_source_is_left_alone() -> None:
    mine = reference("llava_padded").planner
    image = picture(90, 70)
    before = image.copy()
    patchify(image, mine.plan([(90, 70)])[0], mine.pixels)
    assert np.array_equal(image, before)


def test_plans_without_steps_mean_one_resize() -> None:
    ref = reference("qwen3_vl")
    plan = ref.planner.plan([(300, 200)])[0]
    tile = plan.tiles[0]
    bare = type(tile)(tile.resize_to, 0, 0, tile.height, tile.width, tile.grid)
    changed = ImagePlan(
        plan.family, 300, 200, (bare,), plan.pieces, plan.num_rows, plan.num_patches
    )
    image = picture(300, 200)
    config = planner(ref.config, ref.files).pixels
    assert torch.equal(
        patchify(image, changed, config).patches, patchify(image, plan, config).patches
    )
