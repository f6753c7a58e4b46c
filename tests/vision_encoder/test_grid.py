"""Plans from headers against the reference processors, run whole on pictures without pixels."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers as tf
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize as hf_smart_resize

from tests.vision_encoder.references import NAMES, Reference, boundary_sizes, ghost, reference
from vision_encoder.grid import (
    FAMILIES,
    ProcessorConfigError,
    limit_for_detail,
    planner,
    read_processor_files,
)
from vision_encoder.grid_qwen import smart_resize
from vision_encoder.plan import ImagePlan, PlanError, ResolutionLimit

Size = tuple[int, int]
TILED = ("smolvlm", "smolvlm_384", "smolvlm_tiny", "idefics3")
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
SIX = ("smolvlm", "idefics3", "qwen2_5_vl", "qwen3_vl", "llava", "llava_onevision")
ONEVISION = ("llava_onevision", "llava_onevision_tiny")


def expected(ref: Reference, sizes: list[Size]) -> list[tuple[int, str]]:
    """(patches that the tower sees, text in place of the placeholder) of a request's images."""
    ghosts = [ghost(*size) for size in sizes]
    options: dict[str, Any] = {"do_normalize": False, "do_rescale": False}
    own = SimpleNamespace(image_processor=ref.images, image_token="<image>")
    patch = ref.planner.pixels.patch_size
    match ref.config["model_type"]:
        case "smolvlm" | "idefics3":
            found = ref.images([ghosts], **options, return_row_col_info=True, do_pad=False)
            own.fake_image_token, own.global_image_tag = "<fake_token_around_image>", "<global-img>"
            own.image_seq_len = ref.files["image_seq_len"]
            replace = tf.Idefics3Processor.replace_image_token
            grids = zip(found["rows"][0], found["cols"][0], strict=True)
            tiles = [rows * cols + 1 for rows, cols in grids]
            assert sum(tiles) == len(found["pixel_values"][0])
            patches = [count * (ref.step // patch) ** 2 for count in tiles]
        case "llava":
            found = ref.images(ghosts, **options)
            shapes = [tuple(pixels.shape) for pixels in found["pixel_values"]]
            # The reference measures the pixels only through numpy, where ghosts cannot go.
            found = {"pixel_values": [np.broadcast_to(np.uint8(0), shape) for shape in shapes]}
            own.patch_size, own.num_additional_image_tokens = patch, 1
            own.vision_feature_select_strategy = "default"
            replace = tf.LlavaProcessor.replace_image_token
            patches = [(height // patch) * (width // patch) for _, height, width in shapes]
        case "llava_onevision":
            found = ref.images([ghosts], **options, do_pad=False)
            own = onevision_processor(ref)
            replace = tf.LlavaOnevisionProcessor.replace_image_token
            patches = [len(tiles) * (ref.step // patch) ** 2 for tiles in found["pixel_values"]]
        case _:
            found = ref.images(ghosts, **options)
            own.image_token = "<|image_pad|>"
            replace = tf.Qwen2_5_VLProcessor.replace_image_token
            patches = found["image_grid_thw"].prod(-1).tolist()
            assert sum(patches) == len(found["pixel_values"])
    return [(patches[index], replace(own, found, index)) for index in range(len(sizes))]


def onevision_processor(ref: Reference) -> Any:
    processor = tf.LlavaOnevisionProcessor.__new__(tf.LlavaOnevisionProcessor)
    processor.image_processor = ref.images
    processor.num_image_tokens = ref.files["num_image_tokens"]
    processor.vision_aspect_ratio = "anyres_max_9"
    processor.vision_feature_select_strategy = "full"
    processor.image_token = "<image>"
    return processor


def text_of(plan: ImagePlan, token: str) -> str:
    return "".join(token * piece if isinstance(piece, int) else piece for piece in plan.pieces)


def check_requests(name: str, requests: list[list[Size]]) -> None:
    ref = reference(name)
    mine = ref.planner
    for sizes in requests:
        plans = mine.plan(sizes)
        for plan, (patches, text) in zip(plans, expected(ref, sizes), strict=True):
            where = f"{name}: {plan.width} x {plan.height} of {sizes}"
            assert text_of(plan, mine.image_token) == text, where
            assert plan.num_patches == patches, where
            assert plan.num_rows == text.count(mine.image_token), where
            assert sum(tile.grid[0] * tile.grid[1] for tile in plan.tiles) == patches, where


def in_requests(sizes: list[Size], seed: int) -> list[list[Size]]:
    """Mostly single images, lists of two to four now and then."""
    draw = random.Random(seed)
    left, requests = list(sizes), []
    while left:
        count = draw.choice((1, 1, 1, 1, 2, 3, 4))
        requests.append(left[:count])
        left = left[count:]
    return requests


@pytest.mark.parametrize("name", NAMES)
def test_counts_equal_the_processors(name: str) -> None:
    sizes = boundary_sizes(reference(name).step, 120, seed=1)
    check_requests(name, in_requests(sizes, seed=2))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SIX)
def test_counts_equal_the_processors_5000(name: str) -> None:
    sizes = boundary_sizes(reference(name).step, 5000, seed=3)
    check_requests(name, in_requests(sizes, seed=4))


@pytest.mark.parametrize("name", QWEN)
def test_qwen_resize_equals_the_reference_for_many_sizes_and_bounds(name: str) -> None:
    ref, draw = reference(name), random.Random(5)
    for width, height in boundary_sizes(ref.step, 1000, seed=6):
        low = draw.choice((1, 3136, 56 * 56 * 7, 65536))
        high = draw.choice((65536, 28 * 28 * 1280, 12845056))
        theirs = hf_smart_resize(height, width, ref.step, low, high)
        assert smart_resize(height, width, ref.step, low, high) == theirs, (
            width,
            height,
            low,
            high,
        )


@pytest.mark.parametrize("name", ONEVISION)
def test_onevision_rows_equal_the_reference_for_many_sizes(name: str) -> None:
    ref = reference(name)
    mine, theirs = ref.planner, onevision_processor(ref)
    for width, height in boundary_sizes(ref.step, 1000, seed=7):
        rows = theirs._get_number_of_features(height, width, ref.step, ref.step)
        assert mine.plan([(width, height)])[0].num_rows == rows, (width, height)


def test_onevision_counts_depend_on_the_whole_list() -> None:
    mine = reference("llava_onevision").planner
    alone = mine.plan([(800, 600)])[0]
    together = mine.plan([(800, 600), (800, 600)])
    assert alone.anyres is not None
    assert alone.num_rows > 729 + 1
    assert [plan.num_rows for plan in together] == [730, 730]
    assert together[0].anyres is None
    assert alone.fingerprint != together[0].fingerprint


def test_qwen_merged_grid_and_pieces() -> None:
    plan = reference("qwen3_vl").planner.plan([(640, 480)])[0]
    assert plan.tiles[0].grid == (30, 40)
    assert plan.merged_grid == (1, 15, 20)
    assert plan.pieces == (300,)


def test_smolvlm_pieces_are_the_template_text() -> None:
    plan = reference("smolvlm").planner.plan([(100, 1000)])[0]
    fake = "<fake_token_around_image>"
    assert plan.pieces == (
        f"{fake}<row_1_col_1>",
        64,
        f"\n{fake}<row_2_col_1>",
        64,
        f"\n{fake}<row_3_col_1>",
        64,
        f"\n{fake}<row_4_col_1>",
        64,
        f"\n\n{fake}<global-img>",
        64,
        fake,
    )


def test_splitting_off_shows_the_global_view_alone() -> None:
    ref = reference("smolvlm")
    files = {**ref.files["image_processor"], "do_image_splitting": False}
    plan = planner(ref.config, files).plan([(640, 480)])[0]
    assert len(plan.tiles) == 1
    assert plan.num_rows == 64
    assert [step.size for step in plan.tiles[0].steps] == [(1536, 2048), (512, 512)]


# ---------------------------------------------------------------- limits and detail


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        (name, ResolutionLimit(low, high))
        for name in (*TILED[:2], "idefics3", *QWEN, *ONEVISION)
        for low, high in ((None, 600_000), (None, 300_000), (50_000, 1_200_000))
    ],
)
def test_a_limit_bounds_what_the_tower_sees(name: str, limit: ResolutionLimit) -> None:
    mine = reference(name).planner
    for width, height in ((3840, 2160), (640, 480), (1000, 3000), (1024, 1024)):
        plan = mine.plan([(width, height)], [limit])[0]
        seen = sum(tile.height * tile.width for tile in plan.tiles)
        assert limit.max_pixels is not None
        assert seen <= limit.max_pixels
        assert seen >= (limit.min_pixels or 0)
        default = mine.plan([(width, height)])[0]
        if sum(tile.height * tile.width for tile in default.tiles) > limit.max_pixels:
            assert plan.num_rows < default.num_rows
            assert plan.fingerprint != default.fingerprint


def test_qwen_limits_are_the_processors_own_bounds() -> None:
    ref = reference("qwen2_5_vl")
    plan = ref.planner.plan([(1000, 800)], [ResolutionLimit(max_pixels=100_000)])[0]
    height, width = hf_smart_resize(800, 1000, 28, 3136, 100_000)
    assert (plan.tiles[0].height, plan.tiles[0].width) == (height, width)
    grown = ref.planner.plan([(50, 40)], [ResolutionLimit(min_pixels=200_000)])[0]
    height, width = hf_smart_resize(40, 50, 28, 200_000, 401_408)
    assert (grown.tiles[0].height, grown.tiles[0].width) == (height, width)


@pytest.mark.parametrize(
    ("name", "limit", "words"),
    [
        ("smolvlm", ResolutionLimit(max_pixels=1000), "262144"),
        ("smolvlm", ResolutionLimit(min_pixels=10**9), "lower min_pixels"),
        ("qwen3_vl", ResolutionLimit(max_pixels=1023), "1024"),
        ("qwen3_vl", ResolutionLimit(min_pixels=10**9), "lower min_pixels"),
        ("qwen3_vl", ResolutionLimit(2000, 1500), "greater than max_pixels 1500"),
        ("qwen3_vl", ResolutionLimit(min_pixels=0), "at least 1"),
        ("llava", ResolutionLimit(max_pixels=100_000), "112896"),
        ("llava", ResolutionLimit(min_pixels=200_000), "112896"),
        ("llava_onevision", ResolutionLimit(max_pixels=100), "147456"),
        ("llava_onevision", ResolutionLimit(min_pixels=10**9), "lower min_pixels"),
    ],
)
def test_a_limit_that_cannot_be_met_is_refused(
    name: str, limit: ResolutionLimit, words: str
) -> None:
    with pytest.raises(PlanError, match=words) as refused:
        reference(name).planner.plan([(640, 480), (640, 480)], [ResolutionLimit(), limit])
    assert refused.value.index == 1


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("tiny")])
def test_low_detail_costs_less_or_the_same(name: str) -> None:
    mine = reference(name).planner
    low = limit_for_detail(mine.family, "low", mine.floor_pixels)
    cheap = mine.plan([(2000, 1500)], [low])[0]
    full = mine.plan([(2000, 1500)], [limit_for_detail(mine.family, "high")])[0]
    assert full == mine.plan([(2000, 1500)])[0]
    if name.startswith("llava") and "onevision" not in name:
        assert cheap == full
    else:
        assert cheap.num_rows < full.num_rows
    if name in ("smolvlm", "idefics3"):
        assert len(cheap.tiles) == 1


def test_an_unknown_detail_is_refused() -> None:
    with pytest.raises(ValueError, match="auto, low, high"):
        limit_for_detail("smolvlm", "medium")


# ---------------------------------------------------------------- odd pictures (IMG-08)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [(1, 1), (2, 2), (27, 257), (257, 27), (640, 1), (1, 640)])
def test_odd_sizes_are_planned_or_refused_by_rule(name: str, size: Size) -> None:
    mine = reference(name).planner
    thin = max(size) > 200 * min(size)
    if thin and name not in TILED:
        with pytest.raises(PlanError, match="200 times its shortest"):
            mine.plan([size])
    else:
        assert mine.plan([size])[0].num_rows >= 1


def test_a_picture_without_features_is_refused() -> None:
    # With an even feature map, nothing of a very thin picture survives the cutting of padding.
    config = {
        "model_type": "llava_onevision",
        "vision_config": {"image_size": 28, "patch_size": 14},
        "image_grid_pinpoints": [[28, 28]],
    }
    mine = planner(config, {"size": {"height": 28, "width": 28}})
    with pytest.raises(PlanError, match="so thin"):
        mine.plan([(150, 1)])


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (-3, 4)])
def test_empty_sizes_are_refused(size: Size) -> None:
    with pytest.raises(PlanError, match="empty"):
        reference("smolvlm").planner.plan([size])


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_the_reference_classes(family: str) -> None:
    """An empty preprocessor file leaves the reference class's own settings."""
    vision: dict[str, Any] = {"image_size": 224, "patch_size": 14}
    if family == "llava_onevision":
        vision["image_size"] = 384
    mine = planner({"model_type": family, "vision_config": vision}, {})
    classes = {
        "smolvlm": "Idefics3ImageProcessor",
        "idefics3": "Idefics3ImageProcessor",
        "llava": "CLIPImageProcessor",
        "llava_onevision": "LlavaOnevisionImageProcessor",
    }
    theirs = getattr(tf, classes.get(family, "Qwen2VLImageProcessor"))()
    assert mine.pixels.normalization.mean == tuple(theirs.image_mean)
    assert mine.pixels.normalization.std == tuple(theirs.image_std)
    assert mine.pixels.normalization.rescale == theirs.rescale_factor
    assert mine.pixels.resample == ("lanczos" if theirs.resample == 1 else "bicubic")
    assert mine.plan([(300, 200)])[0].num_rows > 0


def test_old_and_new_files_read_alike(tmp_path: Path) -> None:
    ref = reference("smolvlm")
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
    image = json.loads(json.dumps(ref.files["image_processor"]))
    (old / "preprocessor_config.json").write_text(json.dumps(image))
    (old / "processor_config.json").write_text(json.dumps({"image_seq_len": 64}))
    # A nested image processor wins over a file that an older save left behind.
    stale = {**image, "max_image_size": {"longest_edge": 384}}
    (new / "preprocessor_config.json").write_text(json.dumps(stale))
    nested = {"image_processor": image, "image_seq_len": 64}
    (new / "processor_config.json").write_text(json.dumps(nested))
    plans = [
        planner(ref.config, read_processor_files(folder)).plan([(800, 600)])
        for folder in (old, new)
    ]
    assert plans[0] == plans[1]
    assert plans[0] == planner(ref.config, image).plan([(800, 600)])
    assert read_processor_files(tmp_path / "none") == {"image_processor": {}}


@pytest.mark.parametrize(
    ("config", "files", "words"),
    [
        ({"model_type": "parrot"}, {}, "'parrot' has no image planner"),
        ({"model_type": "smolvlm", "vision_config": {"patch_size": 28}}, {}, "scale_factor 2"),
        (
            {"model_type": "smolvlm", "vision_config": {"patch_size": 14}},
            {"image_seq_len": 7},
            "image_seq_len is 7, but the model makes 169",
        ),
        ({"model_type": "qwen3_vl"}, {"patch_size": 14}, "is 14, the vision model's is 16"),
        ({"model_type": "qwen3_vl"}, {"resample": 5}, "resample is 5"),
        ({"model_type": "qwen3_vl"}, {"image_mean": [0.5]}, "image_mean has 1 values"),
        ({"model_type": "qwen3_vl"}, {"size": {"longest_edge": -4}}, "must be positive"),
        ({"model_type": "llava_onevision", "vision_aspect_ratio": "square"}, {}, "'square'"),
        (
            {"model_type": "llava_onevision", "image_grid_pinpoints": [[384, 100]]},
            {},
            "384 x 100, not a multiple",
        ),
        (
            {"model_type": "llava_onevision", "image_grid_pinpoints": [[384, 384]]},
            {"image_grid_pinpoints": [[384, 768]]},
            "differ",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused(
    config: dict[str, Any], files: dict[str, Any], words: str
) -> None:
    with pytest.raises(ProcessorConfigError, match=words):
        planner(config, files)


def test_a_processor_file_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "processor_config.json").write_text("{")
    with pytest.raises(ProcessorConfigError, match="is not JSON"):
        read_processor_files(tmp_path)


# ---------------------------------------------------------------- fingerprints, imports


def test_fingerprints_separate_what_changes_rows() -> None:
    ref = reference("qwen3_vl")
    size = [(640, 480)]
    base = ref.planner.plan(size)[0].fingerprint
    assert ref.planner.plan(size)[0].fingerprint == base
    changed = [
        {**ref.files, "image_mean": [0.4] * 3},
        {**ref.files, "resample": 2},
        {**ref.files, "size": {"shortest_edge": 65536, "longest_edge": 100_000}},
    ]
    others = {planner(ref.config, files).plan(size)[0].fingerprint for files in changed}
    assert len(others | {base}) == 4
    assert len(base) == 32


def test_planning_imports_neither_torch_nor_pillow() -> None:
    code = (
        "import sys, vision_encoder.grid, vision_encoder.image_header\n"
        "print(sorted({'torch', 'PIL', 'transformers', 'numpy'} & set(sys.modules)))\n"
        "import vision_encoder.media\n"
        "print(sorted({'torch', 'torchvision', 'transformers'} & set(sys.modules)))\n"
    )
    root = Path(__file__).parents[2]
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert out.stdout.split("\n")[:2] == ["[]", "[]"]
