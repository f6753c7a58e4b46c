"""What a live scheduler was told and what it decided, a line of JSON at a time.

Owns: RecordingScheduler, which serves and writes down every call, and the lines' form. Does not
own: decisions (scheduler.py), or running them again (record_replay.py). Imports no torch.

A decision follows from calls, their order, the clock's answers, and what others change on sequences
between calls: tokens that were sampled and images that became ready. All of it is written, nothing
else: texts and pixels stay out, but the ids of prompts are in, because the prefix cache compares
them. A line is an object with the call's name under "do":

    begin    about: of what an equal scheduler is built
    add      seq, order, request, encode_s, found (tokens that the cache was known to have of it)
    fork     parent, seq, choice
    schedule step, chunks [[seq, start, length]], preempted [seq], copies (how many), vision_s
    commit, look_up_images
    finish, remove, look_up   seq
    observe  load, seconds
    reconfigure  settings
    calibrated   model, residuals
    clear    tenant (null: all)

and, where there was any, "t": the clock's answers during the call, and "now": {seq: [ready tokens,
tokens sampled since]} before it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection
from dataclasses import MISSING, asdict, fields
from math import isfinite
from pathlib import Path
from typing import IO, Any

from chunked_prefill.request import ImageSpan, Request, SamplingParams
from chunked_prefill.scheduler import Scheduler
from chunked_prefill.sequence import Sequence
from chunked_prefill.settings import SchedulingSettings
from chunked_prefill.step_plan import StepPlan
from chunked_prefill.step_time import StepLoad, StepTimeModel

FORM = 2
"""Version of the lines' form."""

_log = logging.getLogger(__name__)


class Recording:
    """A file that is being written; close it, or use it in a `with`. Only its owner can read it:
    the ids of prompts are their words."""

    def __init__(self, path: Path | str) -> None:
        """A file that is there stays: the name gets the first free number. Raises OSError."""
        self.path, self._file = _new_file(Path(path))
        self.num_lines = 0
        _log.info("every scheduling decision goes into %s", self.path)

    def write(self, line: dict[str, Any]) -> None:
        """One whole line, at once: a process that is killed leaves what it did. Where the file
        cannot be written any more (a full disk), that is logged, and nothing is recorded further:
        who serves is not ended by it."""
        if self._file.closed:
            return
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        except OSError as error:
            _log.error("the recording %s ends after %d lines: %s", self.path, self.num_lines, error)
            self.close()
            return
        self.num_lines += 1

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            _log.error("the end of the recording %s is not written: %s", self.path, error)

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _new_file(wanted: Path) -> tuple[Path, IO[str]]:
    path, number = wanted, 1
    while True:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            number += 1
            path = wanted.with_name(f"{wanted.stem}.{number}{wanted.suffix}")
            continue
        return path, os.fdopen(descriptor, "w", buffering=1, encoding="utf-8")


class RecordingScheduler(Scheduler):
    """A scheduler that writes down what it is told and what it decides. Made by `recorded`."""

    recording: Recording
    _reads: list[float]
    """The clock's answers since the last line."""
    _known: dict[int, tuple[int, int]]
    """(ready tokens, tokens) of each sequence as the file has them."""

    def _begin(self, recording: Recording, about: dict[str, Any]) -> None:
        self.recording, self._reads, self._known = recording, [], {}
        self._write({"do": "begin", "form": FORM, "about": about}, {})
        plain = self._clock

        def clock() -> float:
            now_s = plain()
            self._reads.append(now_s)
            return now_s

        self._clock = clock
        self._watch_budget()
        cache = self.kv.cache
        clear, close = cache.clear, self.kv.close

        def cleared(tenant: str | None = None) -> int:
            self._write({"do": "clear", "tenant": tenant}, self._changes())
            return clear(tenant)

        def closed() -> None:
            recording.close()
            close()

        cache.clear = cleared  # type: ignore[method-assign]
        self.kv.close = closed  # type: ignore[method-assign]

    def _watch_budget(self) -> None:
        budget = self.budget
        observe = budget.observe

        def observed(load: StepLoad, seconds: float) -> None:
            line = {"do": "observe", "load": asdict(load), "seconds": seconds}
            self._write(line, self._changes())
            observe(load, seconds)

        budget.observe = observed  # type: ignore[method-assign]

    def reconfigure(self, settings: SchedulingSettings) -> None:
        changes = self._changes()
        super().reconfigure(settings)
        self._watch_budget()
        self._write({"do": "reconfigure", "settings": asdict(settings)}, changes)

    def calibrated(self, model: StepTimeModel, residuals: Collection[float]) -> None:
        changes = self._changes()
        super().calibrated(model, residuals)
        line = {"do": "calibrated", "model": asdict(model), "residuals": list(residuals)}
        self._write(line, changes)

    def add(self, sequence: Sequence) -> None:
        changes, found = self._changes(), sequence.num_computed_tokens
        super().add(sequence)
        line = {
            "do": "add",
            "seq": sequence.seq_id,
            "order": sequence.order,
            "request": request_as_json(sequence.request),
            "encode_s": sequence.encode_s,
            "found": found,
        }
        self._write(line, changes)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        changes = self._changes()
        super().fork(parent, child)
        line = {
            "do": "fork",
            "parent": parent.seq_id,
            "seq": child.seq_id,
            "choice": child.choice,
        }
        self._write(line, changes)

    def finish(self, sequence: Sequence) -> None:
        changes = self._changes()
        self._known.pop(sequence.seq_id, None)
        super().finish(sequence)
        self._write({"do": "finish", "seq": sequence.seq_id}, changes)

    def remove(self, sequence: Sequence) -> None:
        if sequence.seq_id not in self._known:
            # As part of `finish`.
            super().remove(sequence)
            return
        changes = self._changes()
        del self._known[sequence.seq_id]
        super().remove(sequence)
        self._write({"do": "remove", "seq": sequence.seq_id}, changes)

    def look_up(self, sequence: Sequence) -> None:
        # Estimates look up all that wait; what `add` was found to have is in its own line.
        changes = self._changes()
        super().look_up(sequence)
        if sequence.seq_id in self._known:
            self._write({"do": "look_up", "seq": sequence.seq_id}, changes)

    def look_up_images(self) -> None:
        changes = self._changes()
        super().look_up_images()
        self._write({"do": "look_up_images"}, changes)

    def schedule(self) -> StepPlan:
        changes = self._changes()
        plan = super().schedule()
        self._write({"do": "schedule", **plan_as_json(plan)}, changes)
        return plan

    def commit(self, plan: StepPlan) -> None:
        changes = self._changes()
        super().commit(plan)
        self._write({"do": "commit"}, changes)

    def _changes(self) -> dict[str, list[Any]]:
        """What others have changed on sequences since the last line."""
        changes: dict[str, list[Any]] = {}
        for group in (self._running, self._waiting):
            for sequence in group:
                before = self._known.get(sequence.seq_id)
                if before is None:
                    continue
                if (sequence.num_ready_tokens, sequence.num_tokens) != before:
                    sampled = sequence.token_ids[before[1] :]
                    changes[str(sequence.seq_id)] = [sequence.num_ready_tokens, sampled]
        return changes

    def _write(self, line: dict[str, Any], changes: dict[str, list[Any]]) -> None:
        if self._reads:
            line["t"] = self._reads[:]
            self._reads.clear()
        if changes:
            line["now"] = changes
        self.recording.write(line)
        self._known = {
            s.seq_id: (s.num_ready_tokens, s.num_tokens)
            for group in (self._running, self._waiting)
            for s in group
        }


def recorded(
    scheduler: Scheduler, path: Path | str, about: dict[str, Any] | None = None
) -> RecordingScheduler:
    """Makes the scheduler one that records into a file from now on, and returns it; the file is
    closed with the scheduler's KV manager. `about`, plain values, is for whoever builds an equal
    scheduler; None says all that record_replay.py needs.

    Raises OSError for a file that cannot be made, and ValueError when the scheduler has worked
    already, since what was before is not in the file, and when it has host or disk tiers: when
    their copies end is not written.
    """
    if scheduler.kv.cold is not None:
        raise ValueError(
            "a scheduler with a host or disk tier of the prefix cache cannot be recorded; serve "
            "without --host-kv-gib to record"
        )
    if scheduler.step or list(scheduler.in_order()) or scheduler.kv.cache.num_blocks:
        raise ValueError(
            "a recording has to begin with a scheduler that has done nothing yet; this one is at "
            f"step {scheduler.step}"
        )
    made_of = _made_of(scheduler) if about is None else about
    # In place: its parts, and whoever was given it, know this one.
    scheduler.__class__ = RecordingScheduler
    assert isinstance(scheduler, RecordingScheduler)
    scheduler._begin(Recording(path), made_of)
    return scheduler


def _made_of(scheduler: Scheduler) -> dict[str, Any]:
    """Of one that settings.build has built."""
    estimator = scheduler.budget.estimator
    if scheduler.settings is None or estimator is None:
        raise ValueError("what this scheduler was built from is not known; pass `about`")
    kv = scheduler.kv
    return {
        "settings": asdict(scheduler.settings),
        "kv": {
            "num_blocks": kv.pool.num_blocks,
            "block_size": kv.block_size,
            "prefix_caching": kv.prefix_caching,
        },
        "model": asdict(estimator.model),
        "residuals": estimator.residuals,
        "vision": asdict(scheduler.vision),
    }


# -- values as JSON -----------------------------------------------------------------------------


def plan_as_json(plan: StepPlan) -> dict[str, Any]:
    """What a step decides."""
    return {
        "step": plan.step,
        "chunks": [[c.sequence.seq_id, c.start, c.length] for c in plan.chunks],
        "preempted": [s.seq_id for s in plan.preempted],
        "copies": len(plan.copies),
        "vision_s": plan.vision_s if isfinite(plan.vision_s) else None,
    }


_NOT_FOR_SCHEDULERS = {"positions", "position_delta", "evidence"}


def request_as_json(request: Request) -> dict[str, Any]:
    """All that differs from a field's default and that a scheduler might read: no stop strings, no
    positions."""
    row = _differing(request)
    row["sampling"] = _differing(request.sampling)
    if request.image_spans:
        row["image_spans"] = [
            [span.offset, span.length, span.key.hex(), span.row_offset]
            for span in request.image_spans
        ]
    return row


def request_of_json(row: dict[str, Any]) -> Request:
    """The request again. Raises TypeError or ValueError for what is none."""
    values = dict(row)
    spans = tuple(
        ImageSpan(offset, length, bytes.fromhex(key), row_offset)
        for offset, length, key, row_offset in values.pop("image_spans", ())
    )
    return Request(
        token_ids=tuple(values.pop("token_ids")),
        sampling=SamplingParams(**values.pop("sampling")),
        image_spans=spans,
        **values,
    )


def _differing(value: Request | SamplingParams) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for field in fields(value):
        found = getattr(value, field.name)
        if field.name in _NOT_FOR_SCHEDULERS or found == field.default:
            continue
        if field.default is MISSING or not isinstance(found, tuple | SamplingParams):
            row[field.name] = found
    return row
