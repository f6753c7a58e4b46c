"""A recorded engine's decisions come out again, and a recording that does not fit says where."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from chunked_prefill.budget import TimeBudget, TokenBudget
from chunked_prefill.policy import Deadline, TtftPromise
from chunked_prefill.record import Recording, recorded, request_as_json, request_of_json
from chunked_prefill.record_replay import about, as_trace, main, replay, step_seconds
from chunked_prefill.request import ImageSpan, Request, SamplingParams
from chunked_prefill.scheduler import Scheduler
from chunked_prefill.sequence import Sequence
from chunked_prefill.settings import SchedulingSettings, build
from chunked_prefill.simulator import Simulator, VirtualClock
from chunked_prefill.simulator_executor import GivenExecutor, ModelExecutor
from chunked_prefill.step_plan import StepPlan
from chunked_prefill.step_time import StepTimeModel
from chunked_prefill.step_time_estimator import StepTimeEstimator
from chunked_prefill.trace import TraceError, TraceRequest
from kv_offload.kv_manager import KVManager

MODEL = StepTimeModel(0.004, 0.0002, 0.0003, 2e-7, 1e-7)
Clock = Callable[[], float]


def _build(clock: Clock) -> Scheduler:
    estimator = StepTimeEstimator(MODEL)
    return Scheduler(
        KVManager(70, 8, prefix_caching=True),
        TimeBudget(128, 0.03, estimator),
        8,
        policy=Deadline(TtftPromise(0.1), lambda: estimator.model, 128),
        clock=clock,
    )


def _record(path: Path, *, seed: int = 0) -> list[TraceRequest]:
    """A simulated run whose steps take what no model says."""
    rng = random.Random(seed)
    trace = [
        TraceRequest(
            round(i * 0.01, 3),
            rng.randint(1, 200),
            rng.randint(1, 40),
            hash_ids=(i % 3,),
            block_tokens=24,
            tenant="ab"[i % 2],
            priority=-(i % 7 == 0),
        )
        for i in range(40)
    ]
    clock = VirtualClock()
    scheduler = recorded(_build(clock), path, {"what": "a test"})
    executor = ModelExecutor(MODEL.predict_s, (0.5, 1.0, 3.0), factor=2.0, seed=seed)
    with scheduler.recording:
        Simulator(scheduler, clock, executor).run(trace)
    return trace


def test_every_decision_comes_out_again(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    _record(path)
    done = replay(path, _build)
    assert done.differences == ()
    assert done.decisions > 100
    assert about(path) == {"what": "a test"}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert sum(len(line["preempted"]) for line in lines if line["do"] == "schedule") > 0
    assert len(step_seconds(path)) == sum(line["do"] == "commit" for line in lines)


def _other_budget(clock: Clock) -> Scheduler:
    scheduler = _build(clock)
    scheduler.budget = TokenBudget(128)
    return scheduler


def _other_memory(clock: Clock) -> Scheduler:
    scheduler = _build(clock)
    return Scheduler(
        KVManager(200, 8, prefix_caching=True),
        scheduler.budget,
        8,
        policy=scheduler.policy,
        clock=clock,
    )


def test_what_an_estimate_looks_up_is_replayed(tmp_path: Path) -> None:
    """A prompt that is known to be cached is not late, and goes first; nobody else says so."""
    clock = VirtualClock()
    scheduler = recorded(_build(clock), tmp_path / "run.jsonl", {"what": "a test"})

    def prompt(number: int, first: int, length: int) -> Sequence:
        ids = tuple(range(first, first + length))
        return Sequence(Request(str(number), ids, SamplingParams(1)), number, number)

    before, cached, other = prompt(0, 0, 160), prompt(1, 0, 200), prompt(2, 500, 100)
    scheduler.add(before)
    while before.remaining:
        scheduler.commit(scheduler.schedule())
    before.append(7)
    scheduler.finish(before)
    scheduler.add(cached)
    clock.now_s += 0.16
    scheduler.add(other)
    scheduler.look_up(cached)
    assert cached.num_cached_tokens == 160
    plan = scheduler.schedule()
    assert [chunk.sequence for chunk in plan.chunks] == [cached, other]
    scheduler.kv.close()
    done = replay(tmp_path / "run.jsonl", _build)
    assert [str(difference) for difference in done.differences] == []
    assert done.decisions == scheduler.step


@pytest.mark.parametrize("build", [_other_budget, _other_memory])
def test_another_scheduler_differs_and_is_told_where(
    tmp_path: Path, build: Callable[[Clock], Scheduler]
) -> None:
    path = tmp_path / "run.jsonl"
    _record(path)
    (difference,) = replay(path, build).differences
    line = json.loads(path.read_text().splitlines()[difference.line - 1])
    assert line["chunks"] == difference.recorded["chunks"] or difference.recorded != line
    assert difference.recorded != difference.replayed
    assert str(difference).startswith(f"line {difference.line}: recorded ")


@pytest.mark.parametrize("what", ["t", "now", "observe"])
def test_all_that_is_written_is_needed(tmp_path: Path, what: str) -> None:
    """Without the clock's answers, sampled tokens or step times, decisions come out otherwise."""
    path = tmp_path / "run.jsonl"
    _record(path)
    kept = []
    for text in path.read_text().splitlines():
        line = json.loads(text)
        line.pop(what, None)
        if line["do"] != what:
            kept.append(json.dumps(line))
    path.write_text("\n".join(kept))
    assert replay(path, _build).differences


def test_a_recording_is_a_trace_too(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    trace = _record(path)
    again = list(as_trace(path))
    assert [r.token_ids for r in again] == [r.prompt_ids(i) for i, r in enumerate(trace)]
    for ours, theirs in zip(trace, again, strict=True):
        assert (theirs.output_tokens, theirs.tenant, theirs.priority) == (
            ours.output_tokens,
            ours.tenant,
            ours.priority,
        )
        assert theirs.arrival_s == pytest.approx(ours.arrival_s, abs=1e-9)
    clock = VirtualClock()
    simulator = Simulator(_build(clock), clock, GivenExecutor(step_seconds(path)))
    outcome = simulator.run(again)
    assert outcome.steps == len(step_seconds(path))


# -- a live engine ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "smolvlm"])
def test_a_live_engines_decisions_come_out_again(
    tmp_path_factory: pytest.TempPathFactory, family: str
) -> None:
    """With wall-clock step times that steer budget and order, pictures that become ready when they
    do, too little memory, aborts, several choices, priorities, and a cache that is cleared."""
    from tests.lm_engine.harness import Lab, picture

    folder = tmp_path_factory.mktemp("recorded")
    lab = Lab(family, folder)
    path = folder / "run.jsonl"

    def scheduler(engine: object, clock: Clock | None = None) -> Scheduler:
        made: Scheduler = engine.scheduler  # type: ignore[attr-defined]
        estimator = StepTimeEstimator(MODEL)
        made.budget = TimeBudget(48, 0.002, estimator)
        made.policy = Deadline(TtftPromise(0.02), lambda: estimator.model, 48)
        if clock is not None:
            made._clock = clock
        return made

    def fresh(clock: Clock) -> Scheduler:
        return scheduler(lab.engine(block_size=4, blocks=56, seats=8), clock)

    rng = random.Random(3)
    engine = lab.engine(block_size=4, blocks=56, seats=8)
    aborted: set[str] = set()
    with recorded(scheduler(engine), path, {}).recording:
        todo = list(range(30))
        for step in range(4000):
            if todo and rng.random() < 0.6:
                number = todo.pop(0)
                parts: list[object] = ["the thing in the rain: " * rng.randint(1, 4)]
                if family == "smolvlm" and number % 3 == 0:
                    parts.insert(1, picture(60, 40, number % 4))
                prompt = lab.prompt(*parts, f"a cat {number}")  # type: ignore[arg-type]
                sampling = SamplingParams(
                    rng.randint(1, 40), n=1 + 2 * (number % 5 == 0), seed=number, ignore_eos=True
                )
                request = prompt.request(str(number), sampling, priority=-(number % 6 == 0))
                assert not engine.add(request, prompt.media)
            if step % 40 == 39:
                running = [s.request.request_id for s in engine.scheduler.in_order()]
                if running:
                    aborted.add(rng.choice(running))
                    engine.abort(rng.choice(running))
            if step == 100:
                engine.reset_prefix_cache("")
            if not todo and not engine.has_work():
                break
            engine.step()
            engine.check_invariants()
        else:
            raise AssertionError("the engine does not come to its end")
    assert aborted
    done = replay(path, fresh)
    assert [str(d) for d in done.differences] == []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    calls = {line["do"] for line in lines}
    assert calls >= {"add", "fork", "schedule", "commit", "finish", "remove", "observe", "clear"}
    assert ("look_up_images" in calls) == (family == "smolvlm")
    assert done.decisions == sum(line["do"] == "schedule" for line in lines)
    assert any(line.get("preempted") for line in lines)


# -- a file that says of what its scheduler was made ---------------------------------------------


SETTINGS = SchedulingSettings(
    policy="deadline",
    ttft_slo_s=0.1,
    tpot_slo_s=0.03,
    step_share=(0.4, 0.8),
    max_num_seqs=8,
    max_num_batched_tokens=128,
)


def _record_settings(path: Path) -> None:
    """With settings that change on the way."""
    clock = VirtualClock()
    kv = KVManager(90, 8, prefix_caching=True)
    scheduler = recorded(build(SETTINGS, kv, StepTimeEstimator(MODEL), clock=clock), path)
    simulator = Simulator(scheduler, clock, ModelExecutor(MODEL.predict_s, (0.7, 1.4)))

    def change(plan: StepPlan, now_s: float) -> None:
        if plan.step == 100:
            new = replace(SETTINGS, policy="fcfs", tpot_slo_s=0.0, max_num_seqs=5)
            scheduler.reconfigure(new)

    simulator.on_step = change
    simulator.run(TraceRequest(i * 0.015, 10 + 13 * (i % 17), 1 + i % 23) for i in range(120))
    scheduler.kv.close()
    assert scheduler.step > 200


def test_a_recording_says_of_what_its_scheduler_was_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    _record_settings(path)
    done = replay(path)
    assert done.differences == ()
    assert main([str(path)]) == 0
    assert capsys.readouterr().out == f"100 % of {done.decisions} decisions came out again\n"
    assert path.stat().st_mode & 0o777 == 0o600, "prompts can be read from their ids"


def test_the_first_other_decision_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    _record_settings(path)
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    number = next(i for i, line in enumerate(lines) if len(line.get("chunks", ())) > 2)
    lines[number]["chunks"][1][2] += 1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = sum(line["do"] == "schedule" for line in lines[:number])
    assert main([str(path)]) == 1
    said = capsys.readouterr().out
    assert said.startswith(f"after {before} equal decisions, line {number + 1}: recorded ")
    path.write_text('{"do":"begin","form":2,"about":{"settings":{}}}\n')
    assert main([str(path)]) == 2
    assert "line 1: it does not say of what its scheduler was made" in capsys.readouterr().err
    assert main([str(tmp_path / "none")]) == main([]) == 2


def test_a_killed_process_leaves_what_it_did(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    _record_settings(path)
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    half = replay(path)
    path.write_text(text)
    assert half.differences == ()
    assert 20 < half.decisions < replay(path).decisions


def test_a_recording_never_writes_over_another(tmp_path: Path) -> None:
    for name in ("run.jsonl", "run.2.jsonl", "run.3.jsonl"):
        with Recording(tmp_path / "run.jsonl") as recording:
            assert recording.path == tmp_path / name
    with pytest.raises(FileNotFoundError):
        Recording(tmp_path / "none" / "run.jsonl")


def test_a_full_disk_ends_the_recording_and_not_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    recording = Recording.__new__(Recording)
    recording.path, recording.num_lines = Path("/dev/full"), 0
    recording._file = Path("/dev/full").open("w", buffering=1)  # noqa: SIM115
    for _ in range(3):
        recording.write({"do": "commit"})
    assert recording.num_lines == 0
    assert caplog.text.count("ends after 0 lines: [Errno 28]") == 1


# -- faults -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("", 1, "the recording is empty"),
        ('{"do":"add"}\n', 1, "it does not begin a recording of form 2"),
        ('{"do":"begin","form":1}\n', 1, "it does not begin a recording of form 2"),
        ('{"do":"begin","form":2}\nx\n', 2, "it is not JSON"),
        ('{"do":"begin","form":2}\n[]\n', 2, "it is [], expected a JSON object"),
        ('{"do":"begin","form":2}\n{}\n', 2, 'it is no object with "do"'),
        ('{"do":"begin","form":2}\n\udcff\n', 2, "'utf-8' codec can't decode"),
        ('{"do":"begin","form":2}\n{"do":"dance"}\n', 2, "'dance' cannot be followed"),
        ('{"do":"begin","form":2}\n{"do":"finish","seq":4}\n', 2, "'finish' cannot be followed"),
        ('{"do":"begin","form":2}\n{"do":"commit"}\n', 2, "nothing was scheduled"),
    ],
)
def test_a_broken_recording_names_the_line(tmp_path: Path, text: str, line: int, says: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(TraceError) as caught:
        replay(path, _build)
    assert caught.value.line == line
    assert says in str(caught.value)


def test_a_recording_begins_at_the_beginning(tmp_path: Path) -> None:
    scheduler = _build(VirtualClock())
    scheduler.add(Sequence(Request("a", (1, 2), SamplingParams(1)), 0, 0))
    with pytest.raises(ValueError, match="has done nothing yet; this one is at step 0"):
        recorded(scheduler, tmp_path / "run.jsonl", {})
    assert not list(tmp_path.iterdir())


def test_a_request_comes_back_as_far_as_a_scheduler_reads_it() -> None:
    request = Request(
        "a",
        (5, 6, 7, 8),
        SamplingParams(9, n=2, prompt_logprobs=0, stop=("x",), temperature=0.5),
        image_spans=(ImageSpan(1, 2, b"\x00\xff", row_offset=3),),
        positions=((0, 1, 2, 3),) * 3,
        tenant="t",
        priority=-2,
        ttft_s=0.5,
        arrival_s=12.25,
    )
    again = request_of_json(json.loads(json.dumps(request_as_json(request))))
    assert again.image_spans == request.image_spans
    assert (again.token_ids, again.tenant, again.priority) == ((5, 6, 7, 8), "t", -2)
    assert (again.ttft_s, again.arrival_s) == (0.5, 12.25)
    assert (again.sampling.max_tokens, again.sampling.n) == (9, 2)
    assert again.sampling.prompt_logprobs == 0
    assert again.sampling.stop == ()
    assert again.positions is None
