"""A recording run again, decision by decision.

Run: python -m chunked_prefill.record_replay FILE

Owns: the reader of recordings (record.py has their form), and `replay`, which tells a fresh
scheduler what the recorded one was told and compares what it decides. Does not own: how a scheduler
is built from settings (settings.py). Imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chunked_prefill.record import FORM, plan_as_json, request_of_json
from chunked_prefill.scheduler import Scheduler
from chunked_prefill.sequence import Sequence
from chunked_prefill.settings import SchedulingSettings, build
from chunked_prefill.step_plan import StepPlan
from chunked_prefill.step_time import StepLoad, StepTimeModel
from chunked_prefill.step_time_estimator import StepTimeEstimator
from chunked_prefill.trace import TraceError, TraceRequest, json_object
from chunked_prefill.vision_share import VisionShare
from kv_offload.kv_manager import KVManager

Line = dict[str, Any]
Clock = Callable[[], float]
Build = Callable[[Clock], Scheduler]


@dataclass(frozen=True, slots=True)
class Difference:
    """A decision that came out otherwise."""

    line: int
    recorded: Line
    replayed: Line

    def __str__(self) -> str:
        return f"line {self.line}: recorded {self.recorded}, replayed {self.replayed}"


@dataclass(frozen=True, slots=True)
class Replayed:
    decisions: int
    """Steps that were scheduled, empty ones included."""
    differences: tuple[Difference, ...]


def read_recording(path: Path | str) -> Iterator[tuple[int, Line]]:
    """(number, line) from the file's first on. Raises TraceError for what is no recording."""
    number = 0
    with Path(path).open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                line = json_object(raw.decode())
            except ValueError as error:
                if number > 1 and not raw.endswith(b"\n"):
                    # The process was killed while it wrote its last line.
                    return
                raise TraceError(path, number, str(error)) from None
            if "do" not in line:
                raise TraceError(path, number, 'it is no object with "do"')
            if number == 1 and (line["do"] != "begin" or line.get("form") != FORM):
                fault = f"it does not begin a recording of form {FORM}"
                raise TraceError(path, number, fault)
            yield number, line
    if number == 0:
        raise TraceError(path, 1, "the recording is empty")


def about(path: Path | str) -> dict[str, Any]:
    """What the maker of the recorded scheduler said of it."""
    _, first = next(read_recording(path))
    found = first.get("about", {})
    return found if isinstance(found, dict) else {}


def rebuilt(about: dict[str, Any], clock: Clock) -> Scheduler:
    """A scheduler that is equal to the recorded one, from what `recorded` says of that. Raises
    KeyError, TypeError or ValueError for what is not of this form."""
    kv = KVManager(**about["kv"])
    estimator = StepTimeEstimator(StepTimeModel(**about["model"]), about["residuals"])
    scheduler = build(_settings(about["settings"]), kv, estimator, clock=clock)
    scheduler.vision = VisionShare(**about["vision"])
    return scheduler


def _settings(row: dict[str, Any]) -> SchedulingSettings:
    least, most = row["step_share"]
    return SchedulingSettings(**{**row, "step_share": (least, most)})


def replay(path: Path | str, build: Build | None = None, *, most_differences: int = 1) -> Replayed:
    """Tells `build(clock)`, or what the recording says how to build, all that was recorded. Ends
    after `most_differences`: what follows one says little. Raises TraceError for a line that cannot
    be followed."""
    if build is None:
        said = about(path)
        try:
            rebuilt(said, float)
        except (KeyError, TypeError, ValueError) as error:
            fault = f"it does not say of what its scheduler was made: {error!r}"
            raise TraceError(path, 1, fault) from error
        run = _Run(lambda clock: rebuilt(said, clock))
    else:
        run = _Run(build)
    for number, line in read_recording(path):
        try:
            run.follow(number, line)
        except (KeyError, IndexError, TypeError, ValueError, AssertionError) as error:
            if run.differences:
                break
            fault = f"{line['do']!r} cannot be followed: {error!r}"
            raise TraceError(path, number, fault) from error
        if len(run.differences) >= most_differences:
            break
    return Replayed(run.decisions, tuple(run.differences))


class _Run:
    def __init__(self, build: Build) -> None:
        self._times: list[float] = []
        self._last_s = 0.0
        self._sequences: dict[int, Sequence] = {}
        self._plan: StepPlan | None = None
        self.decisions = 0
        self.differences: list[Difference] = []
        self.scheduler = build(self._clock)

    def _clock(self) -> float:
        """The recorded answers in turn; more questions than were recorded get the last one."""
        if self._times:
            self._last_s = self._times.pop(0)
        return self._last_s

    def follow(self, number: int, line: Line) -> None:
        self._times = list(line.get("t", ()))
        for name, (ready, sampled) in line.get("now", {}).items():
            sequence = self._sequences[int(name)]
            for token in sampled:
                sequence.append(token)
            sequence.num_ready_tokens = ready
        match line["do"]:
            case "begin":
                pass
            case "add":
                sequence = Sequence(request_of_json(line["request"]), line["seq"], line["order"])
                sequence.encode_s = line["encode_s"]
                if line["found"]:
                    # Whoever estimated its first token had looked it up.
                    self.scheduler.look_up(sequence)
                self._sequences[sequence.seq_id] = sequence
                self.scheduler.add(sequence)
            case "fork":
                parent = self._sequences[line["parent"]]
                child = parent.fork(line["seq"], line["choice"])
                self._sequences[child.seq_id] = child
                self.scheduler.fork(parent, child)
            case "schedule":
                self._schedule(number, line)
            case "commit":
                assert self._plan is not None, "nothing was scheduled"
                self.scheduler.commit(self._plan)
            case "look_up":
                self.scheduler.look_up(self._sequences[line["seq"]])
            case "look_up_images":
                self.scheduler.look_up_images()
            case "finish":
                self.scheduler.finish(self._sequences.pop(line["seq"]))
            case "remove":
                self.scheduler.remove(self._sequences.pop(line["seq"]))
            case "observe":
                self.scheduler.budget.observe(StepLoad(**line["load"]), line["seconds"])
            case "reconfigure":
                self.scheduler.reconfigure(_settings(line["settings"]))
            case "calibrated":
                self.scheduler.calibrated(StepTimeModel(**line["model"]), line["residuals"])
            case "clear":
                self.scheduler.kv.cache.clear(line["tenant"])
            case other:
                raise ValueError(f"a call {other!r} is not known")

    def _schedule(self, number: int, line: Line) -> None:
        self._plan = self.scheduler.schedule()
        self.decisions += 1
        decided = plan_as_json(self._plan)
        wanted = {name: line[name] for name in decided}
        if decided != wanted:
            self.differences.append(Difference(number, wanted, decided))


# -- a recording as a trace ---------------------------------------------------------------------


def as_trace(path: Path | str) -> Iterator[TraceRequest]:
    """The recorded requests by arrival, as traffic for a simulator: their prompts' ids, and as many
    tokens as they were given until they ended. Those without any, and images, are left out."""
    starts: dict[int, tuple[float, dict[str, Any]]] = {}
    tokens: dict[int, int] = {}
    for _, line in read_recording(path):
        if line["do"] == "add":
            arrival_s = line["request"].get("arrival_s") or (line.get("t") or [0.0])[0]
            starts[line["seq"]] = (arrival_s, line["request"])
        for name, (_, sampled) in line.get("now", {}).items():
            tokens[int(name)] = tokens.get(int(name), 0) + len(sampled)
    first_s = min((arrival_s for arrival_s, _ in starts.values()), default=0.0)
    for seq, (arrival_s, row) in sorted(starts.items(), key=lambda item: item[1][0]):
        ids: SequenceOf[int] = row["token_ids"]
        if tokens.get(seq):
            yield TraceRequest(
                arrival_s - first_s,
                len(ids),
                tokens[seq],
                token_ids=tuple(ids),
                tenant=row.get("tenant", ""),
                priority=row.get("priority", 0),
            )


def step_seconds(path: Path | str) -> list[float]:
    """How long the recorded steps took, in order."""
    return [line["seconds"] for _, line in read_recording(path) if line["do"] == "observe"]


def main(arguments: list[str]) -> int:
    """0 when every decision came out again, 1 when one did not, 2 for what cannot be replayed."""
    if len(arguments) != 1:
        print("usage: python -m chunked_prefill.record_replay FILE", file=sys.stderr)
        return 2
    try:
        done = replay(arguments[0])
    except (OSError, TraceError) as error:
        print(error, file=sys.stderr)
        return 2
    if done.differences:
        print(f"after {done.decisions - 1} equal decisions, {done.differences[0]}")
        return 1
    print(f"100 % of {done.decisions} decisions came out again")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
