"""Images: what the tower and the prefill of their tokens cost, by size.

Owns: the operations of a vision tower, and the plan. Does not own: the counts of patches and tokens
(vision_encoder/grid.py; they are given), or towers' sizes (vision_shapes.py). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chunked_prefill.planner.deployment import Deployment
from chunked_prefill.planner.report import Column, Curve, Fact, Line, Report, Table, Value
from chunked_prefill.planner.vision_shapes import VisionShape


@dataclass(frozen=True, slots=True)
class PlannedImage:
    """What a family's arithmetic says about one size."""

    width: int
    height: int
    tiles: tuple[int, ...]
    """Patches of each tile; attention does not cross tiles."""
    tokens: int
    """Rows that the language model reads."""


def tower_flops(parameters: float, layers: int, width: int, patches: float) -> float:
    """2·N·P + 4·L·d·P²: each patch times each weight, and attention over all pairs, unmasked, by
    scores and sums (ViT, arXiv 2010.11929; counted as Kaplan et al. 2020, arXiv 2001.08361)."""
    return 2 * parameters * patches + 4 * layers * width * patches**2


def image_flops(shape: VisionShape, image: PlannedImage) -> float:
    """`tower_flops` per tile with attention in windows where the tower has them (Qwen2.5-VL, arXiv
    2502.13923, section 2.1.1), and the mergers, which see merged rows only. Counting the merger per
    patch, as 2·N·P with all 675e6 parameters of Qwen2-VL's tower does, adds 3 % to it."""
    windowed = shape.layers - shape.full_layers
    total = 2.0 * shape.merger_parameters * image.tokens
    for patches in image.tiles:
        total += tower_flops(shape.parameters, shape.full_layers, shape.width, patches)
        total += 4 * windowed * shape.width * patches * min(patches, shape.window_patches)
    return total


def tokens_flops(deployment: Deployment, tokens: int) -> float:
    """2·N·S + 2·L·d·S² of the layers alone: embedding rows replace the embedding, and only a
    prompt's last token reaches the head (see kv.prefill_seconds)."""
    shape = deployment.shape
    attention = 2 * shape.num_layers * shape.attention_width * tokens**2
    return float(2 * shape.body_parameters * tokens + attention)


def plan_images(
    deployment: Deployment,
    tower: VisionShape,
    images: Sequence[PlannedImage],
    *,
    squares: Sequence[PlannedImage] = (),
    mfu: float | None = None,
) -> Report:
    """Costs of `images`, and of growing `squares` for the curve and the place where the tower
    overtakes the language model. Raises PlanError."""
    share = deployment.mfu(mfu)
    rate = share * deployment.flops_per_s
    rows: list[tuple[Value, ...]] = []
    for image in images:
        patches, seeing = sum(image.tiles), image_flops(tower, image)
        reading = tokens_flops(deployment, image.tokens)
        rows.append(
            (
                *(f"{image.width} x {image.height}", len(image.tiles), patches, image.tokens),
                *(seeing, reading, seeing / rate, reading / rate),
                image.tokens * deployment.kv_bytes_per_token,
            )
        )
    columns = (
        *(Column("image"), Column("tiles"), Column("patches"), Column("tokens", "tokens")),
        *(Column("tower", "flop"), Column("prefill", "flop"), Column("tower time", "s")),
        *(Column("prefill time", "s"), Column("KV", "bytes")),
    )
    largest = max(images, key=lambda image: sum(image.tiles))
    seeing, reading = image_flops(tower, largest), tokens_flops(deployment, largest.tokens)
    even = None
    if tower.full_layers:
        even = tower.parameters / (2 * tower.full_layers * tower.width)
    return Report(
        planner="images",
        title=f"Images: {deployment.name}",
        formulas=(
            "tower [flop] = 2 N P + 4 d (L_full P² + L_window P · window) + 2 N_merger tokens",
            "prefill of its tokens [flop] = 2 N S + 2 L d S²",
        ),
        facts=(
            Fact("tower parameters per patch", tower.parameters),
            Fact("per row for the language model", tower.merger_parameters),
            Fact("rate", rate, "flop/s", f"{share:g} (mfu) of the dense rate"),
            Fact("attention equals weights at", even, "", "patches of one tile"),
        ),
        tables=(Table("", columns, tuple(rows)),),
        binds=(
            f"At {largest.width} x {largest.height} the "
            f"{'tower' if seeing > reading else 'prefill of the tokens'} takes "
            f"{max(seeing, reading) / (seeing + reading):.0%} of the operations."
        ),
        reverses=_turns(deployment, tower, squares, even),
        curve=_curve(deployment, tower, squares),
    )


def _turns(
    deployment: Deployment,
    tower: VisionShape,
    squares: Sequence[PlannedImage],
    even: float | None,
) -> tuple[str, ...]:
    words = []
    over = [image_flops(tower, image) > tokens_flops(deployment, image.tokens) for image in squares]
    for before, after, image in zip(over, over[1:], squares[1:], strict=False):
        if before != after:
            more, less = ("tower", "prefill") if after else ("prefill", "tower")
            words.append(
                f"From about {image.width} x {image.height} on the {more} costs more than the "
                f"{less}."
            )
    if even is not None and squares and max(map(max, (i.tiles for i in squares))) > even:
        words.append(
            f"Above {even:,.0f} patches in a tile the tower's attention costs more than its "
            "weights: twice the pixels cost more than three times as much, so limit the pixels."
        )
    which = "tower" if over and over[-1] else "prefill"
    return tuple(words) or (f"Nowhere up to the largest size: the {which} costs more throughout.",)


def _curve(
    deployment: Deployment, tower: VisionShape, squares: Sequence[PlannedImage]
) -> Curve | None:
    if len(squares) < 2:
        return None
    xs = tuple(image.width * image.height / 1e6 for image in squares)
    seeing = tuple(image_flops(tower, image) / 1e12 for image in squares)
    reading = tuple(tokens_flops(deployment, image.tokens) / 1e12 for image in squares)
    return Curve(
        title=f"Cost of a square image\n{deployment.shape.name}",
        x_label="image [megapixels]",
        y_label="operations [TFLOP]",
        lines=(Line("vision tower", xs, seeing), Line("prefill of its tokens", xs, reading)),
        log_x=10,
        log_y=True,
    )
