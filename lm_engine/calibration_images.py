"""Images that nobody sent, to see how long they take to encode.

Owns: Encodings, which has random pictures encoded, one at a time, and leaves arena and vision stage
as they were. Does not own: the formula (chunked_prefill/encode_time.py), or what is done with it.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from math import inf

import numpy as np
from PIL import Image

from chunked_prefill import encode_time
from chunked_prefill.encode_time import EncodeTimeModel
from lm_engine.images import ImageFeed
from vision_encoder.embedding_arena import Acquired
from vision_encoder.link import EncodeJob, EncodeResult
from vision_encoder.plan import ImagePlan, PlanError

_SIZES = ((112, 112), (224, 224), (448, 336), (640, 480), (1024, 768))
_ROUNDS = 3
"""The first is for what is compiled or allocated at first use, and does not count."""
_REPLY_S = 0.002
"""Between two looks for an encoded image."""


class Encodings:
    """Pictures of some sizes, small ones first, again and again until `until_s` of
    time.perf_counter()."""

    def __init__(
        self,
        images: ImageFeed,
        plan_images: Callable[[list[tuple[int, int]]], list[ImagePlan]],
        until_s: float,
    ) -> None:
        self._images = images
        self._plan_images = plan_images
        self._until_s = until_s
        self.times: list[tuple[tuple[int, ...], float]] = []
        """(patches of each tile, seconds)."""

    def run(self) -> Iterator[str]:
        """A word now and then, also while the stage is at work."""
        for number in range(_ROUNDS):
            took_s = 0.0
            for size in _SIZES:
                if time.perf_counter() + 3 * took_s > self._until_s:
                    break
                began_s = time.perf_counter()
                yield from self._encode(size, number)
                took_s = time.perf_counter() - began_s

    def fit(self) -> EncodeTimeModel | None:
        return encode_time.fit(self.times) if len(self.times) > 1 else None

    def _encode(self, size: tuple[int, int], number: int) -> Iterator[str]:
        """Nothing, when the image cannot be encoded without taking rows from the cache."""
        try:
            plan = self._plan_images([size])[0]
        except PlanError:
            return
        arena, link = self._images.arena, self._images.link
        stats = arena.stats()
        if plan.num_rows > stats.rows_total - stats.rows_used - stats.rows_cached:
            return
        key = f"calibration {number} {size}".encode().ljust(32, b"\0")
        if arena.acquire(key, plan.num_rows, self) is not Acquired.START:
            return
        epoch, rows = arena.epoch, arena.rows(key)
        # Nobody holds it: should the stage or this end, its rows are freed with the flight.
        arena.release(key, self)
        link.allow(inf)
        link.submit(EncodeJob(key, epoch, plan, rows, (0, 0), data=_picture(size, number)))
        done: EncodeResult | None = None
        while done is None and link.busy():
            yield "images"
            done = next((result for result in link.poll() if result.key == key), None)
            if done is None:
                time.sleep(_REPLY_S)
        arena.mark_failed(key, epoch)
        if done is not None and done.error is None and number:
            self.times.append((plan.tile_patches, done.image_decode_s + done.encode_s))


def _picture(size: tuple[int, int], seed: int) -> bytes:
    width, height = size
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (-(-height // 8), -(-width // 8), 3), dtype=np.uint8)
    file = io.BytesIO()
    pixels = coarse.repeat(8, axis=0).repeat(8, axis=1)[:height, :width]
    Image.fromarray(pixels).save(file, "JPEG", quality=90)
    return file.getvalue()
