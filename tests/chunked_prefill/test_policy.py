"""Whose prompt is computed next: deadlines, lateness, the share of the late."""

from __future__ import annotations

import pytest

from chunked_prefill.policy import Deadline, Fcfs, TtftPromise
from chunked_prefill.request import Request, SamplingParams
from chunked_prefill.sequence import Sequence
from chunked_prefill.step_time import StepTimeModel

MODEL = StepTimeModel(
    constant_s=0.0, sequence_s=0.0, token_s=0.001, decode_context_s=0.0, pair_s=0.0
)
"""A millisecond per token."""


def policy(base_s: float = 1.0, stretch: float = 3.0) -> Deadline:
    return Deadline(TtftPromise(base_s, stretch), lambda: MODEL, chunk_tokens=256)


def waiting(
    deadline: Deadline,
    order: int,
    prompt: int,
    arrival_s: float,
    *,
    priority: int = 0,
    ttft_s: float | None = None,
) -> Sequence:
    request = Request(
        str(order),
        (1,) * prompt,
        SamplingParams(max_tokens=8),
        priority=priority,
        ttft_s=ttft_s,
        arrival_s=arrival_s,
    )
    sequence = Sequence(request, order, order)
    deadline.admit(sequence, arrival_s)
    return sequence


def names(sequences: list[Sequence]) -> list[str]:
    return [s.request.request_id for s in sequences]


def test_a_short_prompt_goes_before_a_long_one_that_came_first() -> None:
    rule = policy()
    long, short = waiting(rule, 0, 4000, 10.0), waiting(rule, 1, 100, 10.5)
    assert long.deadline_s == pytest.approx(10.0 + 12.0)
    assert short.deadline_s == pytest.approx(10.5 + 1.0)
    assert names(rule.order([long, short], 10.5, 1)) == ["1", "0"]
    assert names(Fcfs().order([long, short], 10.5, 1)) == ["0", "1"]


def test_who_waits_long_enough_is_not_passed_any_more() -> None:
    """Its deadline stays while those of newcomers move on."""
    rule = policy()
    long = waiting(rule, 0, 4000, 10.0)
    assert names(rule.order([long, waiting(rule, 1, 100, 21.5)], 17.0, 1)) == ["0", "1"]


def test_one_that_cannot_be_in_time_goes_last_but_for_its_turn() -> None:
    rule = policy()
    late, early = waiting(rule, 0, 800, 10.0), waiting(rule, 1, 100, 12.0)
    also_late = waiting(rule, 2, 900, 9.0)
    for step in (1, 2, 3):
        assert names(rule.order([also_late, late, early], 12.0, step)) == ["1", "0", "2"]
    assert names(rule.order([also_late, late, early], 12.0, 4)) == ["0", "1", "2"]


def test_an_answer_that_lost_its_kv_goes_first_and_is_never_late() -> None:
    rule = policy()
    begun, fresh = waiting(rule, 0, 100, 1.0), waiting(rule, 1, 100, 9.9)
    begun.append(5)
    assert names(rule.order([fresh, begun], 10.0, 1)) == ["0", "1"]


def test_what_was_computed_counts() -> None:
    """800 tokens need 0.8 s: late at 0.3 s before the end, unless most of them are done."""
    rule = policy()
    half, other = waiting(rule, 0, 800, 10.0), waiting(rule, 1, 100, 12.0)
    assert names(rule.order([half, other], half.deadline_s - 0.3, 1)) == ["1", "0"]
    half.advance(700, 1)
    assert names(rule.order([half, other], half.deadline_s - 0.3, 1)) == ["0", "1"]


def test_priority_comes_before_any_deadline() -> None:
    rule = policy()
    urgent = waiting(rule, 1, 4000, 10.0, priority=-1)
    assert names(rule.order([waiting(rule, 0, 100, 10.0), urgent], 10.0, 1)) == ["1", "0"]


def test_a_request_may_bring_a_promise_of_its_own() -> None:
    rule = policy()
    assert waiting(rule, 0, 4000, 10.0, ttft_s=0.25).deadline_s == pytest.approx(10.25)


def test_without_a_promise_the_machine_says_what_is_usual() -> None:
    """Four times the half second of 512 tokens."""
    rule = Deadline(TtftPromise(), lambda: MODEL, chunk_tokens=256)
    assert waiting(rule, 0, 100, 10.0).deadline_s == pytest.approx(10.0 + 4 * 0.512)
    assert waiting(rule, 1, 4000, 10.0).deadline_s == pytest.approx(10.0 + 12.0)


@pytest.mark.parametrize(
    ("base_s", "stretch", "says"), [(0.0, 3.0, "0.0 s"), (1.0, 0.5, "stretch is 0.5")]
)
def test_promises_that_nobody_could_keep_are_refused(
    base_s: float, stretch: float, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        TtftPromise(base_s, stretch)
