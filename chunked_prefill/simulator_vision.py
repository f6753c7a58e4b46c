"""A vision stage without pixels: when the rows of which image are there.

Owns: ImageCost (what a model makes of an image's size), and VisionStage, which works off images in
the order of need and keeps each sequence's readiness. Does not own: the sequences' other counters,
or the language stage's clock (simulator.py). Imports no torch.

A stage of its own process works beside steps, and both may slow each other down; in the
scheduler's process it works between them. When, and in between for how long, the scheduler says.
Rows stay until their request ends: the arena's size is not simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf

from chunked_prefill.encode_time import EncodeTimeModel
from chunked_prefill.sequence import Sequence as Progress


@dataclass(frozen=True, slots=True)
class ImageCost:
    tokens: int
    """Of the prompt, at least 1."""
    encode_s: float
    """From encoded bytes to rows, on a stage that works alone."""


ImageModel = Callable[[Sequence[tuple[int, int]]], Sequence[ImageCost]]
"""What the images of one request, (width, height) in pixels, cost: all together, because some
families' counts depend on how many there are."""


@dataclass(frozen=True, slots=True)
class GridImages:
    """An ImageModel for families that cut an image of any size into square patches.

    An image keeps its proportions and takes between `fewest` and `most` tokens of `pixels` squared
    each, as Qwen2-VL's do; a token is merged from four patches of one tile.
    """

    encode: EncodeTimeModel
    pixels: int = 28
    fewest: int = 4
    most: int = 16_384

    def __call__(self, sizes: Sequence[tuple[int, int]]) -> list[ImageCost]:
        return [self._cost(width, height) for width, height in sizes]

    def _cost(self, width: int, height: int) -> ImageCost:
        columns, rows = width / self.pixels, height / self.pixels
        area = columns * rows
        shrink = (min(max(area, self.fewest), self.most) / area) ** 0.5
        tokens = max(1, round(columns * shrink)) * max(1, round(rows * shrink))
        return ImageCost(tokens, self.encode.seconds([4 * tokens]))


@dataclass(slots=True)
class _Job:
    urgency: tuple[int, int]
    left_s: float


class VisionStage:
    """`own_process`: works while steps run, else between them. `slowdown`: factor on both stages'
    times while both work (cores or bandwidth that they share), at least 1."""

    def __init__(self, *, own_process: bool = True, slowdown: float = 1.0) -> None:
        self.own_process = own_process
        self.slowdown = slowdown
        self.busy_s = 0.0
        """Seconds of encoding that were done."""
        self._costs: dict[bytes, float] = {}
        self._jobs: dict[bytes, _Job] = {}
        self._current: bytes | None = None
        self._ready: set[bytes] = set()

    def add(self, costs: dict[bytes, float]) -> None:
        """Images of a new request by key; encoded when they are needed."""
        self._costs |= costs

    def forget(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._costs.pop(key, None)
            self._jobs.pop(key, None)
            self._ready.discard(key)
            if key == self._current:
                self._current = None

    def pump(self, in_order: Iterable[Progress]) -> None:
        """Asks for the images without KV, in the order in which their sequences are served, and
        says how far each may be computed."""
        for place, sequence in enumerate(in_order):
            ready = sequence.num_tokens
            for span in sequence.request.image_spans:
                if span.end <= sequence.num_computed_tokens or span.key in self._ready:
                    continue
                ready = min(ready, max(span.offset, sequence.num_computed_tokens))
                job = self._jobs.get(span.key)
                if job is None:
                    self._jobs[span.key] = _Job((place, span.offset), self._costs[span.key])
                else:
                    job.urgency = (place, span.offset)
            sequence.num_ready_tokens = ready

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    def next_done_s(self) -> float:
        """Work left until the next image is ready; inf without any."""
        key = self._next()
        return inf if key is None else self._jobs[key].left_s

    def beside(self, step_s: float) -> float:
        """A step of `step_s` runs on the other stage; returns how long both together take."""
        left = step_s
        while left > 0 and (key := self._next()) is not None:
            left -= self._work(key, left)
        return step_s + (step_s - left) * (self.slowdown - 1)

    def alone(self, seconds: float) -> float:
        """Works for so long, or until an image is ready; returns how long that was."""
        key = self._next()
        return 0.0 if key is None else self._work(key, seconds)

    def _next(self) -> bytes | None:
        if self._current is None and self._jobs:
            self._current = min(self._jobs, key=lambda key: self._jobs[key].urgency)
        return self._current

    def _work(self, key: bytes, seconds: float) -> float:
        job = self._jobs[key]
        done = min(seconds, job.left_s)
        job.left_s -= done
        self.busy_s += done
        if job.left_s <= 0:
            del self._jobs[key]
            self._ready.add(key)
            self._current = None
        return done
