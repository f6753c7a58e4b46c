"""Scenes of coloured shapes: two of them and their relation, or several equal ones to count.

Owns: choosing, placing and drawing shapes, and the supervision that follows. Does not own what is
shared with text: examples, cells, colours' names, degradations.

Two different shapes say `colour shape side` in a row of cells each ("blue square left"), equal
shapes `count colour shape` in the first ("three red circles").
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

from demo_model import data, lexicon
from demo_model.data import CELL_PX, CELLS, GRID, PATCH_PX, TILE_PX
from demo_model.examples import Draft, Example, no_characters
from demo_model.scenes import Ints, to_cells

NO_SHAPE = len(lexicon.COLOURS) * len(lexicon.SHAPES)  # tag of a patch without one
RGB = tuple[int, int, int]


@dataclass(frozen=True)
class Shape:
    """A shape by centre and radius, in pixels of an image of its scene."""

    kind: str
    colour: str
    x: float
    y: float
    radius: float
    turn: float  # radians


@dataclass(frozen=True)
class ShapeScene:
    """Shapes in reading order on paper; `sides` of two different ones, empty for equal ones."""

    width: int
    height: int
    paper: RGB
    shapes: tuple[Shape, ...]
    sides: tuple[str, ...]

    @property
    def captions(self) -> tuple[tuple[str, ...], ...]:
        """What each item says, word by word."""
        first = self.shapes[0]
        if not self.sides:
            n = len(self.shapes)
            name = first.kind if n == 1 else f"{first.kind}s"
            return ((lexicon.COUNTS[n - 1], first.colour, name),)
        return tuple(
            (s.colour, s.kind, side) for s, side in zip(self.shapes, self.sides, strict=True)
        )


def _size(rng: random.Random) -> tuple[int, int]:
    longest = math.exp(rng.uniform(math.log(96), math.log(1024)))
    aspect = math.exp(rng.uniform(math.log(0.75), math.log(1.34)))
    return (
        round(longest if aspect >= 1 else longest * aspect),
        round(longest if aspect < 1 else longest / aspect),
    )


def _paper(rng: random.Random, used: set[str]) -> RGB:
    """A background well apart from every colour on it."""
    while True:
        if rng.random() < 0.65:
            grey = rng.choice((rng.randint(205, 255), rng.randint(205, 255), rng.randint(0, 70)))
            tint = [min(255, max(0, grey + rng.randint(-8, 8))) for _ in range(3)]
        else:
            tint = [rng.randint(0, 255) for _ in range(3)]
        paper = (tint[0], tint[1], tint[2])
        if all(math.dist(paper, lexicon.COLOURS[c]) > 110 for c in used):
            return paper


def two_shapes(rng: random.Random) -> ShapeScene:
    """Two different shapes, clearly beside or above each other."""
    width, height = _size(rng)
    while True:
        kinds = [rng.choice(lexicon.SHAPES) for _ in range(2)]
        colours = [rng.choice(list(lexicon.COLOURS)) for _ in range(2)]
        if kinds[0] != kinds[1] or colours[0] != colours[1]:
            break
    least = min(width, height)
    across = rng.random() < 0.5
    radii = [least * rng.uniform(0.1, 0.2) for _ in range(2)]
    # Wide enough apart for three tokens each, and never diagonal: shares of width and height.
    margins = [(1.15 * r / width, 1.15 * r / height) for r in radii]
    main, other = (0, 1) if across else (1, 0)
    gap = rng.uniform(0.42, 0.99 - margins[0][main] - margins[1][main])
    start = rng.uniform(margins[0][main], 1 - margins[1][main] - gap)
    low = max(margins[0][other], margins[1][other])
    level = rng.uniform(low, 1 - low)
    tilt = rng.uniform(-0.3, 0.3) * gap
    shares = ((start, level), (start + gap, min(1 - low, max(low, level + tilt))))
    spots = [((a, b) if across else (b, a)) for a, b in shares]
    spots = [(x * width, y * height) for x, y in spots]
    sides = ("left", "right") if across else ("above", "below")
    shapes = tuple(
        Shape(k, c, x, y, r, rng.uniform(-0.25, 0.25))
        for k, c, (x, y), r in zip(kinds, colours, spots, radii, strict=True)
    )
    return ShapeScene(width, height, _paper(rng, set(colours)), shapes, sides)


def equal_shapes(rng: random.Random, count: int | None = None) -> ShapeScene:
    """One to six shapes alike in kind, colour and size, apart from each other."""
    width, height = _size(rng)
    count = count or rng.randint(1, 6)
    kind, colour = rng.choice(lexicon.SHAPES), rng.choice(list(lexicon.COLOURS))
    least = min(width, height)
    radius = least * rng.uniform(0.075, 0.2 if count < 4 else 0.14)
    spots: list[tuple[float, float]] = []
    tries = 0
    while len(spots) < count:
        tries += 1
        if tries > 200:
            spots, tries, radius = [], 0, radius * 0.9
        x = rng.uniform(radius * 1.1, width - radius * 1.1)
        y = rng.uniform(radius * 1.1, height - radius * 1.1)
        if all(math.dist((x, y), s) > 2.35 * radius for s in spots):
            spots.append((x, y))
    spots.sort(key=lambda s: (s[1] * CELLS // height, s[0]))
    shapes = tuple(Shape(kind, colour, x, y, radius, rng.uniform(-0.25, 0.25)) for x, y in spots)
    return ShapeScene(width, height, _paper(rng, {colour}), shapes, ())


def _outline(shape: Shape) -> list[tuple[float, float]]:
    """Corners around the origin, for radius 1."""
    if shape.kind == "square":
        angles = [math.pi / 4 + k * math.pi / 2 for k in range(4)]
        radii = [1.0] * 4
    elif shape.kind == "triangle":
        angles = [-math.pi / 2 + k * 2 * math.pi / 3 for k in range(3)]
        radii = [1.1] * 3
    else:
        angles = [-math.pi / 2 + k * math.pi / 5 for k in range(10)]
        radii = [1.1, 0.46] * 5
    return [
        (r * math.cos(a + shape.turn), r * math.sin(a + shape.turn))
        for a, r in zip(angles, radii, strict=True)
    ]


def draw(rng: random.Random, scene: ShapeScene) -> Image.Image:
    """The scene as a real image."""
    image = data.background(rng, scene.width, scene.height, scene.paper)
    jitter = {
        s.colour: tuple(
            min(255, max(0, c + rng.randint(-14, 14))) for c in lexicon.COLOURS[s.colour]
        )
        for s in scene.shapes
    }
    for shape in scene.shapes:
        half = math.ceil(shape.radius * 1.15) + 1
        fine = 3
        mask = Image.new("L", (2 * half * fine, 2 * half * fine), 0)
        pen = ImageDraw.Draw(mask)
        if shape.kind == "circle":
            near, far = (half - shape.radius) * fine, (half + shape.radius) * fine
            pen.ellipse((near, near, far, far), fill=255)
        else:
            pen.polygon(
                [
                    ((half + x * shape.radius) * fine, (half + y * shape.radius) * fine)
                    for x, y in _outline(shape)
                ],
                fill=255,
            )
        mask = mask.reduce(fine)
        at = (round(shape.x) - half, round(shape.y) - half)
        image.paste(Image.new("RGB", mask.size, jitter[shape.colour]), at, mask)
    return data.degrade(rng, image, min(s.radius for s in scene.shapes))


def captions(scene: ShapeScene) -> Ints:
    """What all cells of the tile say, (64,) classes: one caption per row."""
    out = np.full(CELLS * CELLS, lexicon.FILLER, dtype=np.int64)
    for row, caption in enumerate(scene.captions):
        for col, word in enumerate(caption):
            out[row * CELLS + col] = lexicon.CLASS_OF[f" {word}"]
    return out


def label(scene: ShapeScene) -> tuple[Ints, Ints, Ints, set[int]]:
    """Tile-wide `aims`, `words` and `tags`, and the cells needed."""
    sx, sy = TILE_PX / scene.width, TILE_PX / scene.height
    aims = np.full((GRID, GRID, 2), -1, dtype=np.int64)
    words = np.full((GRID, GRID), -1, dtype=np.int64)
    tags = np.full((GRID, GRID), NO_SHAPE, dtype=np.int64)
    mid = (np.arange(GRID) + 0.5) * PATCH_PX
    need = {r * CELLS + c for r in range(len(scene.captions)) for c in range(4)}
    colours = list(lexicon.COLOURS)
    for i, shape in enumerate(scene.shapes):
        x, y, rx, ry = shape.x * sx, shape.y * sy, shape.radius * sx, shape.radius * sy
        inside = np.hypot((mid[None, :] - x) / rx, (mid[:, None] - y) / ry) < 0.85
        inside[min(GRID - 1, int(y // PATCH_PX)), min(GRID - 1, int(x // PATCH_PX))] = True
        tags[inside] = colours.index(shape.colour) * len(lexicon.SHAPES) + lexicon.SHAPES.index(
            shape.kind
        )
        says = scene.sides[i] if scene.sides else lexicon.COUNTS[i]
        words[inside] = lexicon.CLASS_OF[f" {says}"]
        aims[inside] = (i if scene.sides else 0, 0)
        for r in range(max(0, int((y - ry) // CELL_PX)), min(CELLS, int((y + ry) // CELL_PX) + 1)):
            for c in range(
                max(0, int((x - rx) // CELL_PX)), min(CELLS, int((x + rx) // CELL_PX) + 1)
            ):
                need.add(r * CELLS + c)
    shuffle = (CELLS, 2, CELLS, 2)
    cell_words = words.reshape(shuffle).transpose(0, 2, 1, 3).reshape(-1, 4)
    cell_tags = tags.reshape(shuffle).transpose(0, 2, 1, 3).reshape(-1, 4)
    cell_aims = aims.reshape(*shuffle, 2).transpose(0, 2, 1, 3, 4).reshape(-1, 4, 2)
    return cell_aims, cell_words, cell_tags, need


def shape_draft(rng: random.Random, scene: ShapeScene) -> Draft:
    """A training example of the scene, from its real image."""
    aims, words, tags, need = label(scene)
    said = captions(scene)

    def make(keep: Ints) -> Example:
        pixels = to_cells(data.squash(draw(rng, scene)))[keep]
        labels = (*no_characters(len(keep)), aims[keep], words[keep], tags[keep])
        return Example(pixels, keep, said[keep], *labels)

    return Draft(frozenset(need), make)
