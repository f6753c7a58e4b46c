"""Pictures inside the engine: limits, circles of waiting, faults that stay with their request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from chunked_prefill.request import SamplingParams
from lm_engine.engine import Engine
from tests.lm_engine.harness import (
    TEXT,
    Lab,
    Prompt,
    Result,
    assert_same_answer,
    assert_same_distribution,
    check_idle,
    evict_rows,
    greedy,
    picture,
    run,
    run_one,
    teacher_forced,
    warm,
)

Labs = Callable[[str], Lab]
ROWS = 16
"""Rows of any picture of the tiny LLaVA."""


def _long_text(this: Lab, tokens: int) -> str:
    text = TEXT * 40
    while len(this.encode(text)) > tokens:
        text = text[: -max(1, (len(this.encode(text)) - tokens) // 2)]
    return text


# -- sizes --------------------------------------------------------------------------------------


def test_a_large_image_split_over_chunks(lab: Labs) -> None:
    """IMG-13: 100 text tokens, one picture of 265, 50 text tokens, budgets from 64 to all."""
    this = lab("llava_onevision")
    prompt = this.prompt(_long_text(this, 100), picture(216, 216), _long_text(this, 50))
    assert prompt.media[0].plan.num_rows == 265
    whole = teacher_forced(this.engine(budget=8192), prompt)
    answer = run_one(this.engine(budget=8192), prompt, greedy(8))
    for budget in (64, 128, 257):
        engine = this.engine(budget=budget)
        assert_same_distribution(teacher_forced(engine, prompt), whole, note=f"budget {budget}")
        assert_same_answer(run_one(engine, prompt, greedy(8)), answer, note=f"budget {budget}")


def test_the_largest_image_is_served_and_a_larger_one_refused(lab: Labs) -> None:
    """IMG-14: an image larger than the arena is refused at once, and nothing waits behind it."""
    this = lab("qwen2_5_vl")
    edge = 28
    fits, too_large = picture(4 * edge, 4 * edge), picture(4 * edge, 5 * edge)
    engine = this.engine(rows=16)
    jobs = {
        "large": (this.prompt("x", too_large), greedy(3)),
        "fits": (this.prompt("x", fits), greedy(3)),
        "text": (this.prompt("x"), greedy(3)),
    }
    results = run(engine, jobs)
    error = results["large"].error
    assert error is not None
    assert error.kind == "never_fits"
    assert error.param == "messages.0.content.0"
    assert "20" in error.message
    assert "16" in error.message
    assert results["fits"].error is results["text"].error is None
    assert len(results["fits"].tokens()) == len(results["text"].tokens()) == 3


# -- circles of waiting -------------------------------------------------------------------------


def test_a_picture_at_both_ends_makes_room_for_the_one_between(lab: Labs) -> None:
    this = lab("llava")
    a, b = picture(50, 50, 1), picture(50, 60, 2)
    prompt = this.prompt("x", a, "y", b, "z", a, "!")
    want = run_one(this.engine(), prompt, greedy(4))
    engine = this.engine(rows=ROWS)
    assert_same_answer(run_one(engine, prompt, greedy(4)), want)
    assert engine.stats().images_encoded == 3


def test_rows_and_kv_cannot_wait_for_each_other(lab: Labs) -> None:
    """`large` holds the only rows and waits for KV; `small`, admitted before it, holds KV and waits
    for rows. The older one goes on."""
    this = lab("llava")
    jobs = {
        "first": (this.prompt(_long_text(this, 60)), greedy(6)),
        "large": (this.prompt("x", picture(50, 50, 1), _long_text(this, 78)), greedy(4)),
        "small": (this.prompt("yyyy", picture(50, 50, 2), "?"), greedy(4)),
    }
    assert [len(prompt) for prompt, _ in jobs.values()] == [60, 95, 21]
    roomy = this.engine()
    alone = {name: run_one(roomy, *job) for name, job in jobs.items()}
    engine = this.engine(rows=ROWS, blocks=28)
    results = run(engine, jobs, arrivals={"large": 2, "small": 4})
    for name, result in results.items():
        assert_same_answer(result, alone[name], note=name)
    assert engine.stats().preemptions == 1


def test_a_victim_of_a_higher_class_does_not_return_in_the_same_step(lab: Labs) -> None:
    """Its rows are gone, so it has to wait until they were encoded again."""
    this = lab("llava")
    big = this.prompt(_long_text(this, 70))
    shown = this.prompt("x", picture(50, 50, 1), "?")
    urgent = this.prompt(_long_text(this, 60))
    engine = this.engine(blocks=30, caching=False)
    alone = {
        name: run_one(this.engine(), prompt, greedy(12))
        for name, prompt in (("big", big), ("shown", shown), ("urgent", urgent))
    }
    requests = [
        big.request("big", greedy(12), priority=1),
        shown.request("shown", greedy(12), priority=1),
        urgent.request("urgent", greedy(12), priority=0),
    ]
    results = {request.request_id: Result() for request in requests}
    for request in requests[:2]:
        assert engine.add(request, shown.media if request.image_spans else ()) == []
    came = False
    for _ in range(200):
        running = engine.scheduler.running
        if not came and len(running) == 2 and all(s.num_output_tokens for s in running):
            came = True
            evict_rows(engine)
            assert engine.add(requests[2]) == []
        for output in engine.step():
            results[output.request_id].take(output)
        engine.check_invariants()
        if not engine.has_work():
            break
    assert came
    for name, result in results.items():
        assert_same_answer(result, alone[name], note=name)
    assert engine.stats().preemptions >= 2


# -- faults -------------------------------------------------------------------------------------


class Canary:
    """A greedy request whose every bit must be the same before and after."""

    def __init__(self, engine: Engine, prompt: Prompt) -> None:
        self._engine = engine
        self._prompt = prompt
        warm(engine, prompt)
        self._answer = self._ask()

    def _ask(self) -> list[Any]:
        result = run_one(self._engine, self._prompt, greedy(8))
        return [result.text(), result.finish(), *result.logprobs()]

    def check(self) -> None:
        assert self._ask() == self._answer


@pytest.fixture
def llava(lab: Labs) -> Lab:
    return lab("llava")


@pytest.fixture
def engine(llava: Lab) -> Engine:
    return llava.engine()


@pytest.fixture
def canary(llava: Lab, engine: Engine) -> Canary:
    return Canary(engine, llava.prompt("see ", picture(64, 64, 99), " ok"))


def _corrupted(prompt: Prompt) -> Prompt:
    """The same header, other pixels than the checksums say."""
    (item,) = prompt.media
    assert item.data is not None
    data = bytearray(item.data)
    data[-20] ^= 0xFF
    return replace(prompt, media=(replace(item, data=bytes(data)),))


def test_an_image_that_cannot_be_decoded(llava: Lab, engine: Engine, canary: Canary) -> None:
    bad = _corrupted(llava.prompt("what ", picture(48, 48, 5), "?"))
    good = llava.prompt("what ", picture(48, 48, 6), "?")
    want = run_one(engine, good, greedy(5))
    results = run(engine, {"bad": (bad, greedy(5)), "good": (good, greedy(5))})
    error = results["bad"].error
    assert error is not None
    assert (error.kind, error.param) == ("media", "messages.0.content.0")
    assert results["bad"].finished == 1
    assert not results["bad"].tokens()
    assert results["bad"].media_checked == 0
    assert_same_answer(results["good"], want)
    canary.check()


def test_bytes_of_another_size_than_planned(llava: Lab, engine: Engine, canary: Canary) -> None:
    """The header that was checked is not that of the bytes: an inner fault, not a crash."""
    prompt = llava.prompt("what ", picture(48, 48, 5), "?")
    (item,) = prompt.media
    swapped = replace(item, key=b"other", data=picture(400, 400, 1).data)
    spans = tuple(replace(span, key=b"other") for span in prompt.spans)
    result = run(engine, {"r": (replace(prompt, media=(swapped,), spans=spans), greedy(5))})["r"]
    assert result.error is not None
    assert result.error.kind == "internal"
    canary.check()


def test_a_tower_that_raises_fails_that_image_alone(
    llava: Lab,
    engine: Engine,
    canary: Canary,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert engine.images is not None
    stage: Any = engine.images.link
    cursed = picture(72, 48, 7)
    plain = stage._encode

    def encode(images: Sequence[Any]) -> Sequence[Tensor]:
        if any(image is marked for image in images for marked in seen):
            raise RuntimeError("secret 0xdead")
        rows: Sequence[Tensor] = plain(images)
        return rows

    prepare, seen = stage._prepare, []

    def mark(data: bytes, plan: Any) -> Any:
        patches = prepare(data, plan)
        if data == cursed.data:
            seen.append(patches)
        return patches

    monkeypatch.setattr(stage, "_encode", encode)
    monkeypatch.setattr(stage, "_prepare", mark)
    bad = llava.prompt("a ", cursed, "?")
    both = llava.prompt("b ", picture(48, 72, 8), " and ", cursed, "?")
    good = llava.prompt("c ", picture(48, 72, 8), "?")
    with caplog.at_level(logging.CRITICAL):
        results = run(
            engine, {n: (p, greedy(4)) for n, p in zip("abc", (bad, both, good), strict=True)}
        )
    for name, param in (("a", "messages.0.content.0"), ("b", "messages.0.content.1")):
        error = results[name].error
        assert error is not None
        assert (error.kind, error.param) == ("internal", param)
        assert "secret" not in error.message
    assert results["c"].error is None
    assert len(results["c"].tokens()) == 4
    monkeypatch.undo()
    assert run_one(engine, bad, greedy(4)).error is None
    canary.check()


def test_a_forward_pass_that_raises(
    llava: Lab,
    engine: Engine,
    canary: Canary,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Those of the pass get an error; one that waits for a seat is served."""
    plain = engine.runner.forward
    calls: list[None] = []

    def forward(*arguments: Any) -> Tensor:
        calls.append(None)
        if len(calls) == 5:
            raise RuntimeError("secret 0xdead")
        return plain(*arguments)

    monkeypatch.setattr(engine.runner, "forward", forward)
    shown = llava.prompt("a ", picture(48, 48, 3), "?")
    jobs = {
        "image": (shown, greedy(20)),
        "text": (llava.prompt("ten tin cats"), greedy(20, n=2)),
        "late": (llava.prompt("another"), greedy(5)),
    }
    with caplog.at_level(logging.CRITICAL):
        results = run(engine, jobs, arrivals={"late": 8})
    for name in ("image", "text"):
        error = results[name].error
        assert error is not None
        assert error.kind == "internal"
        assert "secret" not in error.message
        assert results[name].finished == 1
        assert 0 < len(results[name].tokens()) < 20
    assert len(results["late"].tokens()) == 5
    canary.check()


def test_requests_that_contradict_their_images_are_refused(
    llava: Lab, engine: Engine, canary: Canary
) -> None:
    prompt = llava.prompt("a ", picture(48, 48, 3), "?")
    (span,), (item,) = prompt.spans, prompt.media
    wrong = {
        "no image": replace(prompt, media=()),
        "too many rows": replace(prompt, spans=(replace(span, row_offset=1),)),
        "outside": replace(prompt, spans=(replace(span, offset=len(prompt) - 3),)),
        "empty": replace(prompt, spans=(replace(span, length=0),)),
        "negative": replace(prompt, spans=(replace(span, row_offset=-1, length=4),)),
        "overlap": replace(prompt, spans=(span, span)),
        "too large": replace(
            prompt, media=(replace(item, plan=replace(item.plan, num_rows=10_000)),)
        ),
    }
    steps = engine.scheduler.step
    for name, broken in wrong.items():
        (output,) = engine.add(broken.request(name, greedy(2)), broken.media)
        assert output.finished, name
        assert output.error is not None, name
        assert output.error.kind in ("internal", "never_fits"), name
    assert engine.scheduler.step == steps
    assert not engine.has_work()
    canary.check()


def test_a_key_whose_plan_differs_from_the_known_one(
    llava: Lab, engine: Engine, canary: Canary
) -> None:
    """A key promises equal rows; a request that breaks the promise fails alone."""
    first = llava.prompt("a ", picture(48, 48, 3), "?")
    (span,), (item,) = first.spans, first.media
    liar = replace(
        first,
        spans=(replace(span, length=8),),
        media=(replace(item, plan=replace(item.plan, num_rows=8, pieces=(8,))),),
    )
    other = llava.prompt("ten tin cats")
    jobs = {"first": (first, greedy(6)), "liar": (liar, greedy(6)), "other": (other, greedy(6))}
    results = run(engine, jobs)
    assert results["liar"].error is not None
    assert results["liar"].error.kind == "internal"
    assert len(results["first"].tokens()) == len(results["other"].tokens()) == 6
    canary.check()


def test_images_for_a_text_model_are_refused(lab: Labs) -> None:
    this = lab("llama")
    shown = lab("llava").prompt("a ", picture(48, 48, 3), "?")
    engine = this.engine()
    ids = tuple(min(token, 200) for token in shown.token_ids)
    broken = replace(shown, token_ids=ids)
    (output,) = engine.add(broken.request("r", greedy(2)), broken.media)
    assert output.error is not None
    assert output.error.param == "messages.0.content.0"


def test_a_restarted_vision_stage_is_asked_again(llava: Lab, engine: Engine) -> None:
    """Jobs in flight die with the stage; a picture that was there at two crashes is refused."""
    assert engine.images is not None
    stage: Any = engine.images.link
    prompt = llava.prompt("a ", picture(48, 48, 3), " b ", picture(48, 50, 3), "?")
    want = run_one(engine, prompt, greedy(4))
    evict_rows(engine)
    result = Result()
    assert engine.add(prompt.request("r", greedy(4)), prompt.media) == []
    engine.images.pump(engine.scheduler.in_order())
    assert stage.busy()
    stage.reset()
    assert engine.vision_restarted([]) == []
    while engine.has_work():
        for output in engine.step():
            result.take(output)
        engine.check_invariants()
    assert_same_answer(result, want)

    evict_rows(engine)
    assert engine.add(prompt.request("r", greedy(4)), prompt.media) == []
    engine.images.pump(engine.scheduler.in_order())
    suspect = prompt.media[1]
    stage.reset()
    assert engine.vision_restarted([suspect.key]) == []
    stage.reset()
    (output,) = engine.vision_restarted([suspect.key])
    assert output.error is not None
    assert (output.error.kind, output.error.param) == ("media", suspect.param)
    while engine.has_work():
        engine.step()
    assert engine.stats().embedding_rows_used == 0


def test_media_are_reported_as_checked_once(llava: Lab, engine: Engine) -> None:
    prompt = llava.prompt("a ", picture(48, 48, 3), " b ", picture(48, 50, 3), "?")
    cold = run_one(engine, prompt, SamplingParams(2, temperature=0.0))
    cached = run_one(engine, prompt, SamplingParams(2, temperature=0.0))
    assert cold.media_checked == cached.media_checked == 1
    assert cold.usage is not None
    assert cold.usage.image_tokens == 2 * ROWS


def test_an_image_whose_file_is_gone_fails_its_request(
    llava: Lab, engine: Engine, canary: Canary, tmp_path: Path
) -> None:
    prompt = llava.prompt("a ", picture(48, 48, 3), "?")
    (item,) = prompt.media
    gone = replace(prompt, media=(replace(item, data=None, path=str(tmp_path / "gone")),))
    (result,) = run(engine, {"gone": (gone, greedy(2))}).values()
    assert result.error is not None
    assert result.error.kind == "internal"
    check_idle(engine)
    canary.check()


def test_an_image_of_repeated_crashes_is_refused_by_name(
    llava: Lab, engine: Engine, canary: Canary
) -> None:
    prompt = llava.prompt("a ", picture(48, 48, 3), "?")
    assert engine.add(prompt.request("one", greedy(2)), prompt.media) == []
    engine.step()
    assert engine.vision_restarted() == []
    (at_crash,) = engine.vision_restarted()
    (later,) = run(engine, {"two": (prompt, greedy(2))}).values()
    for error in (at_crash.error, later.error):
        assert error is not None
        assert (error.kind, error.param) == ("media", prompt.media[0].param)
    check_idle(engine)
    canary.check()
