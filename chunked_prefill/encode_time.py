"""How long the vision stage needs for an image, alone on its cores.

Owns: EncodeTimeModel, a formula with non-negative weights, and EncodeTimes, the formula with the
pace at which images were really encoded. Does not own: the work (vision_encoder), when it is done
(vision_share.py), or the measurement (lm_engine/calibration.py). Imports no torch.

    t = v0 + v1 P + v2 Σ P²

over an image's tiles of P patches each: every patch goes through the linears, and each pair of
patches of a tile through attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp, log

import numpy as np

from chunked_prefill.least_squares import non_negative_least_squares

_NEW = 0.25
"""Weight of the last image in the pace."""
_MOST_OFF = 20.0
"""An image whose time is this many times another one than expected counts as that much."""


@dataclass(frozen=True, slots=True)
class EncodeTimeModel:
    """Weights in seconds: per image, per patch, and per pair of patches of one tile."""

    image_s: float = 0.0
    patch_s: float = 0.0
    pair_s: float = 0.0

    def seconds(self, tiles: Iterable[int]) -> float:
        """`tiles`: patches of each tile of the image."""
        patches = pairs = 0
        for count in tiles:
            patches += count
            pairs += count * count
        return self.image_s + self.patch_s * patches + self.pair_s * pairs


def fit(images: Sequence[tuple[Sequence[int], float]]) -> EncodeTimeModel:
    """The weights that are nearest to (tiles, seconds) of some images, by relative error."""
    rows = np.array([(1.0, sum(t), sum(c * c for c in t)) for t, _ in images], dtype=np.float64)
    seconds = np.array([s for _, s in images])
    weights = non_negative_least_squares(rows / seconds[:, None], np.ones(len(images)))
    return EncodeTimeModel(*weights)


class EncodeTimes:
    """`model` as it stands: a prior that is corrected by every image that was encoded."""

    def __init__(self, model: EncodeTimeModel | None = None) -> None:
        """Without a model the first image decides, in proportion to patches."""
        self._model = model or EncodeTimeModel()
        self._pace: float | None = None
        """Measured over predicted; None until an image was encoded."""

    @property
    def model(self) -> EncodeTimeModel:
        pace, known = self._pace or 1.0, self._model
        return replace(
            known,
            image_s=pace * known.image_s,
            patch_s=pace * known.patch_s,
            pair_s=pace * known.pair_s,
        )

    def seconds(self, tiles: Iterable[int]) -> float:
        """For an image with so many patches in each of its `tiles`; 0 while nothing is known."""
        return (self._pace or 1.0) * self._model.seconds(tiles)

    def observe(self, tiles: Sequence[int], seconds: float) -> None:
        """An image took `seconds` of the stage's time."""
        if seconds <= 0 or sum(tiles) < 1:
            return
        expected_s = self._model.seconds(tiles)
        if expected_s <= 0:
            self._model = EncodeTimeModel(patch_s=seconds / sum(tiles))
            return
        ratio = seconds / expected_s
        if self._pace is None:
            self._pace = ratio
            return
        off = min(max(ratio / self._pace, 1 / _MOST_OFF), _MOST_OFF)
        self._pace *= exp(_NEW * log(off))

    def calibrated(self, model: EncodeTimeModel) -> None:
        """`model` was measured: it replaces what was known."""
        self._model, self._pace = model, None
