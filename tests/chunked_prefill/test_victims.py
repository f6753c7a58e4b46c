"""Whose KV is given up: the cheapest to bring back of those that rank below whoever needs it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from chunked_prefill.request import ImageSpan, Request, SamplingParams
from chunked_prefill.sequence import Sequence
from chunked_prefill.victims import Victims
from tests.chunked_prefill.test_scheduler import Driver


class Books:
    """Of KV: what the host has of whom, and the seconds to bring it."""

    def __init__(self, stored: dict[int, tuple[int, float]] | None = None) -> None:
        self._stored = stored or {}

    def stored(self, owner: int) -> tuple[int, float]:
        return self._stored.get(owner, (0, 0.0))


def holder(
    number: int, computed: int, *, priority: int = 0, image: int = 0, encode_s: float = 0.0
) -> Sequence:
    spans = (ImageSpan(0, image, b"k"),) if image else ()
    request = Request(
        str(number),
        tuple(range(computed + 1)),
        SamplingParams(4),
        image_spans=spans,
        priority=priority,
    )
    sequence = Sequence(request, number, number)
    sequence.encode_s = encode_s
    sequence.advance(computed, 1)
    return sequence


def victims(books: Any = None) -> Victims:
    """A millisecond per token, more behind many others."""
    return Victims(
        books or Books(), lambda start, end: 1e-3 * (end - start) + 1e-6 * (end**2 - start**2)
    )


def test_the_cheapest_to_compute_again_is_given_up() -> None:
    long, short, middle = holder(1, 4000), holder(2, 50), holder(3, 400)
    assert victims().cheapest([long, short, middle]) is short
    assert victims().regain_s(short) == pytest.approx(0.0525)


def test_what_lies_on_the_host_is_brought_back_where_that_is_faster() -> None:
    """3,840 of 4,000 tokens are there: 10 ms of copying and 160 tokens, against 20 seconds."""
    stored, other = holder(1, 4000), holder(2, 1800)
    rule = victims(Books({1: (3840, 0.01)}))
    assert rule.cheapest([stored, other]) is stored
    assert rule.regain_s(stored) == pytest.approx(0.01 + 0.16 + 1e-6 * (4000**2 - 3840**2))
    slow = victims(Books({1: (3840, 60.0)}))
    assert slow.cheapest([stored, other]) is other
    assert slow.regain_s(stored) == pytest.approx(4.0 + 16.0)


def test_pictures_have_to_be_encoded_again() -> None:
    shown, text = holder(1, 100, image=80, encode_s=2.0), holder(2, 300)
    assert victims().cheapest([shown, text]) is text
    assert victims().regain_s(shown) == pytest.approx(0.11 + 2.0)
    # Not when the KV of their tokens is on the host.
    assert victims(Books({1: (90, 0.01)})).regain_s(shown) < 0.03


def test_a_lower_class_goes_first_whatever_it_costs_and_equals_go_by_rank() -> None:
    dear, cheap = holder(1, 4000, priority=1), holder(2, 10)
    assert victims().cheapest([dear, cheap]) is dear
    first, last = holder(3, 100), holder(4, 100)
    assert victims().cheapest([last, first]) is last


@pytest.mark.parametrize("seed", range(20))
def test_nobody_who_ranks_before_the_needy_loses_kv_and_the_oldest_ends_first(seed: int) -> None:
    """Random crowds over small pools: the oldest of those that run is never preempted while it
    runs, a victim ranks below one that was served in that step, and everything ends."""
    rng = random.Random(seed)
    bench = Driver(blocks=rng.randint(14, 40), block_size=4, budget=rng.choice([8, 64]), seats=8)
    for _ in range(16):
        outputs = rng.randint(1, 25)
        bench.add(rng.randint(1, 50 - outputs), outputs)
    while bench.scheduler.running or bench.scheduler.waiting:
        before = min(bench.scheduler.running, key=lambda s: s.rank, default=None)
        plan = bench.step()
        assert plan.chunks
        if plan.preempted:
            assert before not in plan.preempted
            served = min(c.sequence.rank for c in plan.chunks)
            assert all(served < victim.rank for victim in plan.preempted)
    assert len(bench.finished) == 16


@pytest.mark.parametrize(("blocks", "oldest"), [(20, 3), (22, 4), (24, 5)])
def test_an_answer_that_just_began_goes_before_a_long_one_that_came_after_it(
    blocks: int, oldest: int
) -> None:
    """All three decode when the oldest lacks a block: the youngest would have to compute 52 tokens
    and more again, the one between them a third of that."""
    bench = Driver(blocks=blocks, block_size=4, budget=64, seats=8)
    needy, small, big = (bench.add(prompt, 40) for prompt in (oldest, 5, 40))
    plan = bench.step()
    while not plan.preempted:
        plan = bench.step()
    assert plan.preempted == (small,)
    assert {c.sequence for c in plan.chunks} == {needy, big}
    bench.run()
    assert needy.num_preemptions == 0
