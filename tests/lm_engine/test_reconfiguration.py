"""Settings that change while an engine answers: the answers do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from chunked_prefill.settings import SchedulingSettings
from lm_engine.outputs import RequestError
from lm_engine.reconfiguration import SchedulingState
from tests.lm_engine.harness import LOGPROB_TOLERANCE, Job, Lab, greedy, picture, run

LENGTH = 10
SETTINGS = (
    SchedulingSettings(policy="fcfs", max_num_seqs=1, max_num_batched_tokens=3),
    SchedulingSettings(tpot_slo_s=0.001, step_share=(0.1, 0.2), max_num_batched_tokens=17),
    SchedulingSettings(ttft_slo_s=0.001, tpot_slo_s=5.0, max_num_seqs=2, long_prompt_share=0.1),
    SchedulingSettings(max_num_seqs=32, max_num_batched_tokens=512),
)


def jobs(lab: Lab) -> dict[str, Job]:
    texts = ("the thing in the rain " * 6, "a cat", "ten tin rings " * 9, "one more")
    found = {f"text {i}": (lab.prompt(text), greedy(LENGTH)) for i, text in enumerate(texts)}
    if lab.takes_images:
        prompt = lab.prompt("see ", picture(48, 64), " and ", picture(64, 32), " there")
        found["pictures"] = (prompt, greedy(LENGTH))
    return found


@pytest.mark.parametrize("family", ["llama", "smolvlm"])
@pytest.mark.parametrize("seed", range(3))
def test_answers_are_the_same_whatever_changes_while_they_are_made(
    lab: Callable[[str], Lab], family: str, seed: int
) -> None:
    built = lab(family)
    wanted = run(built.engine(), jobs(built))
    engine = built.engine(blocks=120)
    draws = Random(seed)
    arrivals = {name: draws.randrange(12) for name in wanted}
    changes = 0

    def change(step: int) -> None:
        nonlocal changes
        if draws.random() < 0.5:
            settings = draws.choice(SETTINGS)
            settings = replace(settings, max_num_seqs=min(32, settings.max_num_seqs))
            found = engine.scheduling(settings)
            assert isinstance(found, SchedulingState), found
            assert found.settings == settings
            changes += 1

    got = run(engine, jobs(built), before_step=change, arrivals=arrivals)
    assert changes > 3
    for name, result in got.items():
        assert result.error is None
        assert result.tokens() == wanted[name].tokens()
        for a, b in zip(result.logprobs(), wanted[name].logprobs(), strict=True):
            assert abs(a.logprob - b.logprob) <= LOGPROB_TOLERANCE


def test_what_is_told_is_what_is_in_force(lab: Callable[[str], Lab]) -> None:
    engine = lab("llama").engine(budget=64, blocks=50, seats=8)
    before = engine.scheduling()
    assert isinstance(before, SchedulingState)
    assert before.settings == engine.scheduler.settings
    assert (before.max_num_seqs, before.max_num_batched_tokens) == (8, 64)
    assert (before.kv_blocks, before.block_size, before.prefix_caching) == (50, 4, True)
    after = engine.scheduling(replace(before.settings, max_num_seqs=2))
    assert isinstance(after, SchedulingState)
    assert after.max_num_seqs == 8, "limits are those of the start"
    assert engine.scheduler.max_num_seqs == 2


def test_limits_of_the_start_hold_and_nothing_changes_beyond_them(
    lab: Callable[[str], Lab],
) -> None:
    engine = lab("llama").engine(budget=64, seats=8)
    known = engine.scheduling()
    assert isinstance(known, SchedulingState)
    for change, param in (
        ({"max_num_seqs": 9}, "max_num_seqs"),
        ({"max_num_batched_tokens": 65, "max_num_seqs": 1}, "max_num_batched_tokens"),
    ):
        found = engine.scheduling(replace(known.settings, **change))  # type: ignore[arg-type]
        assert isinstance(found, RequestError)
        assert (found.kind, found.param) == ("invalid", param)
        assert engine.scheduler.settings == known.settings
        assert engine.scheduler.max_num_seqs == 8


def test_a_request_for_more_choices_than_seats_now_is_refused(lab: Callable[[str], Lab]) -> None:
    built = lab("llama")
    engine = built.engine(seats=8)
    known = engine.scheduling()
    assert isinstance(known, SchedulingState)
    engine.scheduling(replace(known.settings, max_num_seqs=2))
    prompt = built.prompt("a cat")
    result = run(engine, {"four": (prompt, greedy(2, n=4)), "two": (prompt, greedy(2, n=2))})
    assert result["four"].error is not None
    assert result["four"].error.param == "n"
    assert result["two"].error is None
