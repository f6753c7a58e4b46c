"""What the language stage and the vision stage say to each other.

Owns: EncodeJob, EncodeResult and the VisionLink Protocol. Does not own: the work (stage.py), the
rows (embedding_arena.py) or the transport (lm_engine/process/). Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from vision_encoder.plan import ImagePlan


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """Encode one image into arena rows that the language stage has allocated for it."""

    key: bytes
    epoch: int
    """The arena's epoch at allocation; a reply of another epoch is ignored."""
    plan: ImagePlan
    rows: tuple[tuple[int, int], ...]
    """(first row, count) runs in the arena that take the plan's rows in order."""
    urgency: tuple[int, int]
    """Smaller is needed sooner: (the request's place in line, the span's offset)."""
    data: bytes | None = None
    path: str | None = None


@dataclass(frozen=True, slots=True)
class EncodeResult:
    key: bytes
    epoch: int
    error: str | None = None
    """A fixed, user-readable reason when the image cannot be decoded or encoded."""
    internal: bool = False
    """True when the fault is ours (HTTP 5xx), False when the image's (4xx)."""
    image_decode_s: float = 0.0
    encode_s: float = 0.0


class VisionLink(Protocol):
    """The language stage's view of the vision stage. All methods return at once."""

    def submit(self, job: EncodeJob) -> None: ...

    def cancel(self, key: bytes, epoch: int) -> None:
        """The job is no longer wanted; a reply still comes (the rows are freed on it)."""
        ...

    def allow(self, seconds: float) -> None:
        """How long the stage may compute beside each of the steps that follow, until the next call:
        0 to rest, inf for as long as it likes, which is so before the first call."""
        ...

    def poll(self) -> list[EncodeResult]:
        """Replies since the last poll. An in-process stage does here what it was allowed."""
        ...

    def busy(self) -> bool:
        """Whether replies are outstanding."""
        ...
