"""Keeps the embedding rows of waiting image tokens ahead of prefill.

Owns: the arena (which rows belong to which image), what is asked of the vision stage and when, and
`num_ready_tokens` of sequences with images. Does not own: encoding (vision_encoder), the step
(engine.py) or KV.

Rows are acquired in the order in which sequences are served and, within one, in token order, so
the image that is needed next is encoded next. A sequence holds an image from then until the KV of
the image's last token exists. When there is no room for the first sequence in line, those behind
it give back what they have not used: only the oldest is guaranteed to go on (DESIGN §3).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

from chunked_prefill.encode_time import EncodeTimes
from chunked_prefill.request import ImageSpan
from chunked_prefill.sequence import Sequence
from lm_engine.client import MediaItem
from lm_engine.outputs import RequestError
from vision_encoder.embedding_arena import Acquired, EmbeddingArena
from vision_encoder.link import EncodeJob, EncodeResult, VisionLink
from vision_encoder.stage import BYTES_GONE, CANCELLED

logger = logging.getLogger(__name__)

MISMATCH = "an image does not match what is known under its key"
QUARANTINED = "the image made the vision stage fail repeatedly and is not tried again"


@dataclass(slots=True)
class _Media:
    """One request's images."""

    items: dict[bytes, MediaItem]
    unchecked: set[bytes]
    """Keys whose pixels have not been decoded yet, here or for someone else."""
    image_decode_s: float = 0.0
    encode_s: float = 0.0
    ahead_tokens: int | None = None
    """Set when the last image becomes ready for the first time."""


@dataclass(frozen=True, slots=True)
class ImageWork:
    """What a request's images have cost so far; the fields are those of outputs.Timing."""

    image_decode_s: float = 0.0
    encode_s: float = 0.0
    ahead_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ImageFailure:
    request_id: str
    error: RequestError


class ImageFeed:
    """One language stage's view of images. Not thread-safe: the loop owns it."""

    def __init__(
        self, arena: EmbeddingArena, link: VisionLink, pace: EncodeTimes | None = None
    ) -> None:
        self.arena = arena
        self.link = link
        self._media: dict[str, _Media] = {}
        self._checked: list[str] = []
        self._holds: dict[int, set[bytes]] = {}
        """Images that each sequence holds in the arena, by sequence id."""
        self._owner_of: dict[object, str] = {}
        """Request of each sequence that holds something."""
        self._jobs: set[bytes] = set()
        """Images in flight."""
        self.pace = pace or EncodeTimes()
        self._working_since_s = 0.0
        """When the stage began with what it works on: its last reply, or a job when it had none."""

    def add(self, request_id: str, items: Iterable[MediaItem]) -> None:
        by_key = {item.key: item for item in items}
        self._media[request_id] = _Media(by_key, set(by_key))

    def forget(self, request_id: str) -> None:
        """The request has ended and its sequences were dropped."""
        self._media.pop(request_id, None)

    def work(self, request_id: str) -> ImageWork:
        """What was spent on this request's images so far."""
        media = self._media.get(request_id)
        if media is None:
            return ImageWork()
        return ImageWork(media.image_decode_s, media.encode_s, media.ahead_tokens or 0)

    def busy(self) -> bool:
        return self.link.busy()

    def encode_s(self, media: Iterable[MediaItem]) -> float:
        """Seconds of the vision stage for images that are not ready yet, alone."""
        return sum(
            self.pace.seconds(item.plan.tile_patches)
            for item in media
            if not self.arena.is_ready(item.key)
        )

    def take_checked(self) -> list[str]:
        """Requests whose last image was found to be sound since the last call."""
        checked, self._checked = self._checked, []
        return checked

    def ready_in_s(
        self, line: Iterable[Sequence], candidate: Sequence, media: Iterable[MediaItem]
    ) -> dict[bytes, float]:
        """See estimate.Images."""
        own = {item.key: item for item in media}
        worked_s = time.monotonic() - self._working_since_s if self._jobs else 0.0
        begun_s = 0.0
        ready: dict[bytes, float] = {}
        for sequence in (*line, candidate):
            known = own if sequence is candidate else self._media[sequence.request.request_id].items
            for span in sequence.request.image_spans:
                done = span.end <= sequence.num_computed_tokens or self.arena.is_ready(span.key)
                if not done and span.key not in ready:
                    begun_s += self.pace.seconds(known[span.key].plan.tile_patches)
                    ready[span.key] = max(0.0, begun_s - worked_s)
        return ready

    # -- before a step ------------------------------------------------------------------------

    def pump(self, in_order: Iterable[Sequence]) -> list[ImageFailure]:
        """Takes replies, asks for what is needed next, and sets `num_ready_tokens`."""
        failures: list[ImageFailure] = []
        for result in self.link.poll():
            failures += self._take(result)
        line = [s for s in in_order if s.request.image_spans]
        for sequence in line:
            self._check_computed(sequence)
            self.consumed(sequence)
        needing = [s for s in line if self._pending(s)]
        for place, sequence in enumerate(needing):
            try:
                outcome = self._acquire(sequence, place)
                if outcome is Acquired.FULL and place == 0:
                    outcome = self._reclaim_for(sequence, line[line.index(sequence) + 1 :])
            except ValueError:
                # A key that the arena knows with another number of rows: the request's maker broke
                # the promise of keys, which must not end everyone else's.
                logger.exception("an image of %s was refused", sequence.request.request_id)
                error = RequestError("internal", MISMATCH)
                failures.append(ImageFailure(sequence.request.request_id, error))
                continue
            if outcome is Acquired.QUARANTINED:
                failures.append(self._quarantined(sequence))
            elif outcome is Acquired.FULL:
                break
        for sequence in line:
            waited = sequence.num_ready_tokens < sequence.num_tokens
            sequence.num_ready_tokens = self._ready(sequence)
            if waited and sequence.num_ready_tokens == sequence.num_tokens:
                media = self._media[sequence.request.request_id]
                if media.ahead_tokens is None:
                    media.ahead_tokens = sequence.num_computed_tokens - sequence.num_cached_tokens
        return failures

    def _quarantined(self, sequence: Sequence) -> ImageFailure:
        request_id = sequence.request.request_id
        key = next(s.key for s in self._pending(sequence) if self.arena.is_quarantined(s.key))
        param = self._media[request_id].items[key].param
        return ImageFailure(request_id, RequestError("media", QUARANTINED, param))

    def _acquire(self, sequence: Sequence, place: int) -> Acquired:
        """Holds the sequence's remaining images in token order as far as there is room."""
        outcome = Acquired.READY
        for span in self._pending(sequence):
            media = self._media[sequence.request.request_id]
            item = media.items[span.key]
            outcome = self.arena.acquire(span.key, item.plan.num_rows, sequence.seq_id)
            if outcome in (Acquired.FULL, Acquired.QUARANTINED):
                return outcome
            self._holds.setdefault(sequence.seq_id, set()).add(span.key)
            self._owner_of[sequence.seq_id] = sequence.request.request_id
            if outcome is Acquired.START:
                self._submit(item, (place, span.offset))
            elif outcome is Acquired.READY:
                self._mark_checked(span.key, sequence.request.request_id)
        return outcome

    def _reclaim_for(self, first: Sequence, behind: list[Sequence]) -> Acquired:
        """Takes rows from the end of the line until the first sequence's next image has room."""
        outcome = Acquired.FULL
        for victim in reversed(behind):
            if outcome is not Acquired.FULL:
                break
            self.drop(victim)
            outcome = self._acquire(first, 0)
        if outcome is Acquired.FULL and self._give_back_later(first):
            outcome = self._acquire(first, 0)
        return outcome

    def _give_back_later(self, sequence: Sequence) -> bool:
        """Gives back images that the sequence holds for a later place than its next pending span:
        one picture at both ends of a prompt must not keep the one between them out for ever."""
        held = self._holds.get(sequence.seq_id, set())
        needed = [s for s in sequence.request.image_spans if s.end > sequence.num_computed_tokens]
        sooner: set[bytes] = set()
        for span in needed:
            if span.key not in held:
                break
            sooner.add(span.key)
        later = held - sooner
        for key in later:
            held.remove(key)
            self._release(sequence.seq_id, key)
        return bool(later)

    def _release(self, seq_id: int, key: bytes) -> None:
        """Rows of a flight that nobody wants any more are freed with its reply."""
        self.arena.release(key, seq_id)
        if key in self._jobs and not self.arena.holders(key):
            self.link.cancel(key, self.arena.epoch)

    def _submit(self, item: MediaItem, urgency: tuple[int, int]) -> None:
        if not self._jobs:
            self._working_since_s = time.monotonic()
        self._jobs.add(item.key)
        self.link.submit(
            EncodeJob(
                key=item.key,
                epoch=self.arena.epoch,
                plan=item.plan,
                rows=self.arena.rows(item.key),
                urgency=urgency,
                data=item.data,
                path=item.path,
            )
        )

    def _pending(self, sequence: Sequence) -> list[ImageSpan]:
        """Spans without KV whose image the sequence does not hold; one per image."""
        held = self._holds.get(sequence.seq_id, set())
        pending: dict[bytes, ImageSpan] = {}
        for span in sequence.request.image_spans:
            if span.end > sequence.num_computed_tokens and span.key not in held:
                pending.setdefault(span.key, span)
        return list(pending.values())

    def _ready(self, sequence: Sequence) -> int:
        held = self._holds.get(sequence.seq_id, set())
        for span in sequence.request.image_spans:
            if span.end > sequence.num_computed_tokens and not (
                span.key in held and self.arena.is_ready(span.key)
            ):
                return max(span.offset, sequence.num_computed_tokens)
        return sequence.num_tokens

    # -- replies ------------------------------------------------------------------------------

    def _take(self, result: EncodeResult) -> list[ImageFailure]:
        if result.epoch != self.arena.epoch:
            return []
        self._jobs.discard(result.key)
        self._working_since_s = time.monotonic()
        if result.error in (CANCELLED, BYTES_GONE):
            if self.arena.mark_cancelled(result.key, result.epoch):
                return self._resubmit(result.key)
            return []
        if result.error is None:
            holders = self.arena.holders(result.key)
            self.arena.mark_ready(result.key, result.epoch)
            for place, request_id in enumerate(self._requests_of(holders)):
                media = self._media[request_id]
                if place == 0:
                    tiles = media.items[result.key].plan.tile_patches
                    self.pace.observe(tiles, result.image_decode_s + result.encode_s)
                media.image_decode_s += result.image_decode_s
                media.encode_s += result.encode_s
                self._mark_checked(result.key, request_id)
            return []
        holders = self.arena.mark_failed(result.key, result.epoch)
        return [
            ImageFailure(
                request_id,
                RequestError(
                    "internal" if result.internal else "media",
                    result.error,
                    self._media[request_id].items[result.key].param,
                ),
            )
            for request_id in self._requests_of(holders)
        ]

    def _resubmit(self, key: bytes) -> list[ImageFailure]:
        """A flight that ended untried goes on with the bytes of a holder that still has them."""
        requests = self._requests_of(self.arena.holders(key))
        for request_id in requests:
            item = self._media[request_id].items[key]
            if item.data is not None or (item.path is not None and os.path.exists(item.path)):
                self._submit(item, (0, 0))
                return []
        self.arena.mark_failed(key, self.arena.epoch)
        error = RequestError("internal", BYTES_GONE)
        return [ImageFailure(request_id, error) for request_id in requests]

    def _requests_of(self, holders: Iterable[object]) -> list[str]:
        """Requests, in the order in which they came, that have one of these sequences."""
        wanted = set(holders)
        owners = {self._owner_of[holder] for holder in wanted}
        return [request_id for request_id in self._media if request_id in owners]

    def _check_computed(self, sequence: Sequence) -> None:
        """Images whose KV was found are sound: someone decoded the same bytes before. Their rows
        are not asked for."""
        media = self._media[sequence.request.request_id]
        for span in sequence.request.image_spans if media.unchecked else ():
            if span.end <= sequence.num_cached_tokens:
                self._mark_checked(span.key, sequence.request.request_id)

    def _mark_checked(self, key: bytes, request_id: str) -> None:
        media = self._media[request_id]
        if key in media.unchecked:
            media.unchecked.remove(key)
            if not media.unchecked:
                self._checked.append(request_id)

    # -- after a step -------------------------------------------------------------------------

    def consumed(self, sequence: Sequence) -> None:
        """KV exists up to `num_computed_tokens`: images that lie wholly before are given back. For
        a waiting sequence that is what the prefix cache has; should it lose that, they are asked
        for again."""
        held = self._holds.get(sequence.seq_id)
        if not held:
            return
        last_end = {span.key: span.end for span in sequence.request.image_spans}
        for key in [k for k in held if last_end[k] <= sequence.num_computed_tokens]:
            held.remove(key)
            self._release(sequence.seq_id, key)

    def drop(self, sequence: Sequence) -> None:
        """The sequence ended or lost its KV: it holds nothing."""
        self._owner_of.pop(sequence.seq_id, None)
        for key in self._holds.pop(sequence.seq_id, set()):
            self._release(sequence.seq_id, key)

    def restarted(self, suspects: Iterable[bytes] | None = None) -> list[ImageFailure]:
        """The vision stage is a new process: what was in flight is asked for again, except images
        that were there at repeated crashes."""
        failures: list[ImageFailure] = []
        self._jobs.clear()
        for key in self.arena.new_epoch(None if suspects is None else set(suspects)):
            if self.arena.is_quarantined(key):
                for request_id in self._requests_of(self.arena.mark_failed(key, self.arena.epoch)):
                    param = self._media[request_id].items[key].param
                    error = RequestError("media", QUARANTINED, param)
                    failures.append(ImageFailure(request_id, error))
            else:
                failures += self._resubmit(key)
        return failures
