"""What a live scheduler was told and what it decided, a line of JSON at a time.

Owns: RecordingScheduler, which serves and writes down every call, and the lines' form. Does not
own: decisions (scheduler.py), or running them again (record_replay.py). Imports no torch.

A decision follows from calls, their order, the clock's answers, and what others change on sequences
between calls: tokens that were sampled and images that became ready. All of it is written, nothing
else: texts and pixels stay out, but the ids of prompts are in, because the prefix cache compares
them. A line is an object with the call's name under "do":

    begin    what the maker of the scheduler says of it, for whoever builds it again
    add      seq, order, request
    fork     parent, seq, choice
    schedule step, chunks [[seq, start, length]], preempted [seq], copies (how many)
    commit, look_up_images
    finish, remove   seq
    observe  load, seconds
    clear    tenant (null: all)

and, where there was any, "t": the clock's answers during the call, and "now": {seq: [ready tokens,
tokens sampled since]} before it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import IO, Any

from chunked_prefill.budget import Budget
from chunked_prefill.request import ImageSpan, Request, SamplingParams
from chunked_prefill.scheduler import Scheduler, StepPlan
from chunked_prefill.sequence import Sequence
from chunked_prefill.step_time import StepLoad, StepTimeEstimator

FORM = 1
"""Version of the lines' form."""

Clock = Callable[[], float]


class Recording:
    """A file that is being written; close it, or use it in a `with`."""

    def __init__(self, path: Path | str, about: dict[str, Any] | None = None) -> None:
        """`about`: whatever is needed to build an equal scheduler, as plain values."""
        self._file: IO[str] = Path(path).open("w", encoding="utf-8")  # noqa: SIM115
        self.num_lines = 0
        self.write({"do": "begin", "form": FORM, "about": about or {}})

    def write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self.num_lines += 1

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class RecordingScheduler(Scheduler):
    """A scheduler that writes down what it is told and what it decides. Made by `recorded`."""

    _recording: Recording
    _reads: list[float]
    """The clock's answers since the last line."""
    _known: dict[int, tuple[int, int]]
    """(ready tokens, tokens) of each sequence as the file has them."""

    def _begin(self, recording: Recording) -> None:
        self._recording, self._reads, self._known = recording, [], {}
        plain = self._clock

        def clock() -> float:
            now_s = plain()
            self._reads.append(now_s)
            return now_s

        self._clock = clock
        self.budget = _RecordingBudget(self.budget, self)
        cache = self.kv.cache
        clear = cache.clear

        def cleared(tenant: str | None = None) -> int:
            self._write({"do": "clear", "tenant": tenant}, self._changes())
            return clear(tenant)

        cache.clear = cleared  # type: ignore[method-assign]

    def add(self, sequence: Sequence) -> None:
        changes = self._changes()
        super().add(sequence)
        line = {
            "do": "add",
            "seq": sequence.seq_id,
            "order": sequence.order,
            "request": request_as_json(sequence.request),
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

    def observed(self, load: StepLoad, seconds: float) -> None:
        """A step's time is about to be told to the budget."""
        line = {"do": "observe", "load": asdict(load), "seconds": seconds}
        self._write(line, self._changes())

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
        self._recording.write(line)
        self._known = {
            s.seq_id: (s.num_ready_tokens, s.num_tokens)
            for group in (self._running, self._waiting)
            for s in group
        }


class _RecordingBudget:
    def __init__(self, budget: Budget, scheduler: RecordingScheduler) -> None:
        self.max_num_batched_tokens = budget.max_num_batched_tokens
        self._budget = budget
        self._scheduler = scheduler

    @property
    def estimator(self) -> StepTimeEstimator | None:
        return self._budget.estimator

    def decodes(self, count: int, prompts_wait: bool, step: int) -> int:
        return self._budget.decodes(count, prompts_wait, step)

    def chunk(
        self, load: StepLoad, depth: int, wanted: int, *, share: float = 1.0, least: int = 0
    ) -> int:
        return self._budget.chunk(load, depth, wanted, share=share, least=least)

    def observe(self, load: StepLoad, seconds: float) -> None:
        self._scheduler.observed(load, seconds)
        self._budget.observe(load, seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._budget, name)


def recorded(scheduler: Scheduler, recording: Recording) -> RecordingScheduler:
    """The scheduler, with its parts, writing to `recording` from now on; use it in place of the one
    given. Raises ValueError when that one has worked already, since what was before is not in the
    file, and when it has host or disk tiers: when their copies end is not written.
    """
    if scheduler.kv.tiers is not None:
        raise ValueError(
            "a scheduler with a host or disk tier of the prefix cache cannot be recorded; serve "
            "without --host-kv-gib to record"
        )
    if scheduler.step or list(scheduler.in_order()) or scheduler.kv.cache.num_blocks:
        raise ValueError(
            "a recording has to begin with a scheduler that has done nothing yet; this one is at "
            f"step {scheduler.step}"
        )
    recording_scheduler = RecordingScheduler.__new__(RecordingScheduler)
    recording_scheduler.__dict__.update(scheduler.__dict__)
    recording_scheduler._begin(recording)
    return recording_scheduler


# -- values as JSON -----------------------------------------------------------------------------


def plan_as_json(plan: StepPlan) -> dict[str, Any]:
    """What a step decides."""
    return {
        "step": plan.step,
        "chunks": [[c.sequence.seq_id, c.start, c.length] for c in plan.chunks],
        "preempted": [s.seq_id for s in plan.preempted],
        "copies": len(plan.copies),
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
