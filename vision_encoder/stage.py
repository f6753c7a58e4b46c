"""The vision stage's work: image bytes in, rows in the arena's storage out.

Owns: the queue of jobs in the order in which rows are needed, what shares one pass of the tower,
the replies, and that no image's fault ends the stage.
Does not own: which rows (embedding_arena.py, with the language stage), the arithmetic of a tower
(tower.py), pixels (media.py, preprocess.py), or the process that it may run in (lm_engine/process).

`advance` does one unit of work, either the pixels of one image or a part of a pass of the tower, so
that a caller may rest, do something else, or hear of jobs between any two units. `poll` runs units
until a pass has ended or the time that was allowed is over: the face that an in-process engine
uses.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Generic, TypeVar

import torch
from torch import Tensor

from vision_encoder.link import EncodeJob, EncodeResult
from vision_encoder.plan import ImagePlan

logger = logging.getLogger(__name__)

CANCELLED = "cancelled"
"""EncodeResult.error of a job that was cancelled before its pass began."""
BYTES_GONE = "the image's bytes are no longer available"
"""EncodeResult.error of a job whose spool file its owner had removed. Like CANCELLED it says
nothing about the image: a joined holder submits the job again (EmbeddingArena.mark_cancelled)."""
INTERNAL = "the image could not be encoded because of an internal error"

P = TypeVar("P")
Pass = Generator[None, None, Sequence[Tensor]]
"""A pass of the tower over images together, interrupted between its parts. It returns per image a
tensor [plan.num_rows, depth, dim] in row order."""


class UnreadableImageError(Exception):
    """Raised by a `prepare` function: the image is at fault, for the fixed reason given."""


@dataclass(slots=True, eq=False)
class _Work(Generic[P]):
    job: EncodeJob
    cancelled: bool = False
    patches: P | None = None
    image_decode_s: float = 0.0


@dataclass(slots=True, eq=False)
class _UnderWay(Generic[P]):
    batch: list[_Work[P]]
    run: Pass
    worked_s: float = 0.0


class VisionStage(Generic[P]):
    """Encodes images into storage rows; implements VisionLink for a caller in the same process.

    Args:
        prepare: bytes and plan to the tower's input; raises UnreadableImageError with a
            user-readable reason. Whatever else it raises is an internal fault of that image.
        encode: begins a pass over images together.
        cost: a plan's share of a pass, FLOP.
        storage: the arena's rows [num_rows, depth, dim]; only rows named by jobs are written.
        flop_budget: most FLOP that share a pass; a single dearer image has a pass of its own.
    """

    def __init__(
        self,
        *,
        prepare: Callable[[bytes, ImagePlan], P],
        encode: Callable[[Sequence[P]], Pass],
        cost: Callable[[ImagePlan], float],
        storage: Tensor,
        flop_budget: float,
    ) -> None:
        self._prepare = prepare
        self._encode = encode
        self._cost = cost
        self._storage = storage
        self._flop_budget = flop_budget
        self._works: dict[bytes, _Work[P]] = {}
        self._alone: set[bytes] = set()
        self._replies: list[EncodeResult] = []
        self._under_way: _UnderWay[P] | None = None
        self._allowed_s = inf

    # -- VisionLink ------------------------------------------------------------------------------

    def submit(self, job: EncodeJob) -> None:
        """Queue a job. One of the same key and epoch is joined and keeps the smaller urgency; one
        of another epoch is forgotten, as its reply would be ignored."""
        known = self._works.get(job.key)
        if known is not None and known.job.epoch == job.epoch:
            known.cancelled = False
            if job.urgency < known.job.urgency:
                known.job = job
            return
        self._works[job.key] = _Work(job)

    def cancel(self, key: bytes, epoch: int) -> None:
        work = self._works.get(key)
        if work is not None and work.job.epoch == epoch:
            work.cancelled = True

    def allow(self, seconds: float) -> None:
        """See VisionLink."""
        self._allowed_s = seconds

    def poll(self) -> list[EncodeResult]:
        """Replies; works until one pass of the tower has ended, nothing is queued, or what was
        allowed is used up."""
        until_s = time.perf_counter() + self._allowed_s
        replies: list[EncodeResult] = []
        while self.busy() and not replies and time.perf_counter() < until_s:
            replies = self.advance()
        return replies

    def busy(self) -> bool:
        return bool(self._works or self._replies)

    def isolate(self, keys: Iterable[bytes]) -> None:
        """Encode each of these images in a pass of its own, because one of them may have ended a
        former process: the next time it will be known which."""
        self._alone.update(keys)

    def reset(self) -> None:
        """Forget all jobs and replies: whoever asked is gone, and its rows belong to a new arena.
        No row is written after this until a job is submitted."""
        self._works.clear()
        self._replies.clear()
        self._under_way = None

    # -- work ------------------------------------------------------------------------------------

    def advance(self) -> list[EncodeResult]:
        """One unit of work: drop what was cancelled, then one image's pixels or part of a pass. A
        pass that began is ended unless nobody wants any of its images any more."""
        if self._under_way is not None and all(w.cancelled for w in self._under_way.batch):
            self._under_way = None
        kept = () if self._under_way is None else self._under_way.batch
        for work in [w for w in self._works.values() if w.cancelled and w not in kept]:
            self._reply(work, error=CANCELLED)
        if self._under_way is not None:
            self._go_on(self._under_way)
        else:
            self._begin()
        replies, self._replies = self._replies, []
        return replies

    def _begin(self) -> None:
        batch = self._next_batch()
        unprepared = next((work for work in batch if work.patches is None), None)
        if unprepared is not None:
            self._read_pixels(unprepared)
        elif batch:
            patches = [work.patches for work in batch if work.patches is not None]
            self._under_way = _UnderWay(batch, _run(self._encode, patches))
            self._go_on(self._under_way)

    def in_hand(self) -> list[bytes]:
        """Keys that the next `advance` works on: the suspects if the process dies in it."""
        if self._under_way is not None:
            return [work.job.key for work in self._under_way.batch]
        batch = self._next_batch()
        unprepared = next((work for work in batch if work.patches is None), None)
        return [unprepared.job.key] if unprepared else [work.job.key for work in batch]

    def _next_batch(self) -> list[_Work[P]]:
        """The soonest needed jobs that fit into one pass, never none while jobs are queued."""
        batch: list[_Work[P]] = []
        left = self._flop_budget
        for work in sorted(self._works.values(), key=lambda work: work.job.urgency):
            if work.cancelled:
                continue
            left -= self._cost(work.job.plan)
            alone = work.job.key in self._alone
            if batch and (alone or left < 0):
                break
            batch.append(work)
            if alone:
                break
        return batch

    def _read_pixels(self, work: _Work[P]) -> None:
        begin = time.perf_counter()
        try:
            work.patches = self._prepare(_bytes_of(work.job), work.job.plan)
        except FileNotFoundError:
            self._reply(work, error=BYTES_GONE, internal=True)
        except UnreadableImageError as fault:
            self._reply(work, error=str(fault))
        except Exception:
            logger.exception("preparing image %s failed", work.job.key.hex()[:16])
            self._reply(work, error=INTERNAL, internal=True)
        work.image_decode_s = time.perf_counter() - begin

    def _go_on(self, under_way: _UnderWay[P]) -> None:
        """A part of a pass. When it fails, each image is tried alone, so that only the one at fault
        is answered with an error."""
        batch = under_way.batch
        begin = time.perf_counter()
        try:
            with torch.inference_mode():
                encoded = _part(under_way.run)
                if encoded is not None:
                    for work, rows in zip(batch, encoded, strict=True):
                        if self._is_current(work):
                            self._write(work.job, rows)
        except Exception:
            self._under_way = None
            if len(batch) > 1:
                logger.warning("a pass of %d images failed; each is tried alone", len(batch))
                self.isolate(work.job.key for work in batch)
                return
            logger.exception("encoding image %s failed", batch[0].job.key.hex()[:16])
            if self._is_current(batch[0]):
                self._reply(batch[0], error=INTERNAL, internal=True)
            return
        under_way.worked_s += time.perf_counter() - begin
        if encoded is None:
            return
        self._under_way = None
        costs = [self._cost(work.job.plan) for work in batch]
        for work, cost in zip(batch, costs, strict=True):
            share = cost / sum(costs) if sum(costs) else 1 / len(batch)
            if self._is_current(work):
                self._reply(work, encode_s=under_way.worked_s * share)

    def _is_current(self, work: _Work[P]) -> bool:
        """Not if a job of a new epoch took its place: then its rows are somebody else's."""
        return self._works.get(work.job.key) is work

    def _write(self, job: EncodeJob, rows: Tensor) -> None:
        if rows.shape != (job.plan.num_rows, *self._storage.shape[1:]):
            raise ValueError(
                f"the tower gave rows of shape {tuple(rows.shape)} for a plan of "
                f"{job.plan.num_rows} rows and a storage of {tuple(self._storage.shape)}"
            )
        if not bool(torch.isfinite(rows).all()):
            raise ValueError("the tower gave rows that are not finite")
        base = 0
        for first, count in job.rows:
            self._storage[first : first + count].copy_(rows[base : base + count])
            base += count
        if base != job.plan.num_rows:
            raise ValueError(f"the job names {base} rows for an image of {job.plan.num_rows}")

    def _reply(
        self,
        work: _Work[P],
        *,
        error: str | None = None,
        internal: bool = False,
        encode_s: float = 0.0,
    ) -> None:
        del self._works[work.job.key]
        self._alone.discard(work.job.key)
        self._replies.append(
            EncodeResult(
                key=work.job.key,
                epoch=work.job.epoch,
                error=error,
                internal=internal,
                image_decode_s=work.image_decode_s,
                encode_s=encode_s,
            )
        )


def _run(encode: Callable[[Sequence[P]], Pass], patches: Sequence[P]) -> Pass:
    """So that also the beginning of a pass is a part of it."""
    return (yield from encode(patches))


def _part(run: Pass) -> Sequence[Tensor] | None:
    """The next part of a pass; its result if that was the last."""
    try:
        next(run)
    except StopIteration as end:
        encoded: Sequence[Tensor] = end.value
        return encoded
    return None


def _bytes_of(job: EncodeJob) -> bytes:
    if job.data is not None:
        return job.data
    if job.path is None:
        raise ValueError("the job carries neither bytes nor a path")
    with open(job.path, "rb") as spool:
        return spool.read()
