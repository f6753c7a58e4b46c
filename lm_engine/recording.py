"""A served engine whose scheduler's decisions are recorded (`--record FILE`).

Owns: `record`, and how a start fails when it cannot be done. Does not own: what is written
(chunked_prefill/record.py). Imports no torch.
"""

from __future__ import annotations

from chunked_prefill.record import recorded
from chunked_prefill.scheduler import Scheduler
from lm_engine.models.errors import LoadError


class RecordError(LoadError):
    """The recording that was asked for cannot be made."""


def record(path: str, scheduler: Scheduler) -> None:
    """From now on, in place. Call it before anything was scheduled."""
    try:
        recorded(scheduler, path)
    except (OSError, ValueError) as error:
        raise RecordError(f"--record {path}: {error}") from error
