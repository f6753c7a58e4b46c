"""Scheduler, block tables, prefix cache and pool as one state machine.

The model of memory is a dictionary from slot to what was computed there: tenant and ids of all
tokens up to this one. Whatever happens, a token is computed from its own past only, and what is
neither used nor cached is erased after every rule.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from chunked_prefill.budget import TokenBudget
from chunked_prefill.draft import Draft
from chunked_prefill.request import ImageSpan, Request, SamplingParams
from chunked_prefill.scheduler import Scheduler
from chunked_prefill.sequence import Sequence
from chunked_prefill.step_plan import StepPlan
from kv_offload.kv_manager import KVManager

Value = tuple[str, tuple[int, ...]]


ARRIVAL: dict[str, st.SearchStrategy[Any]] = {
    "head": st.integers(0, 30),
    "tail": st.integers(0, 6),
    "image": st.integers(0, 3),
    "outputs": st.integers(1, 12),
    "n": st.sampled_from([1, 1, 1, 2, 3]),
    "tenant": st.sampled_from(["", "", "other"]),
    "priority": st.sampled_from([0, 0, 0, 1]),
    "whole": st.sampled_from([None, None, None, 0]),
}
"""Of `arrive`."""


class World(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 2, 4, 16]),
        tokens=st.integers(40, 200),
        budget=st.sampled_from([1, 3, 8, 64]),
        seats=st.integers(3, 8),
        seed=st.integers(0, 2**32),
    )
    def start(self, block_size: int, tokens: int, budget: int, seats: int, seed: int) -> None:
        self.kv = KVManager(max(1, tokens // block_size), block_size, prefix_caching=True)
        self.scheduler = Scheduler(self.kv, TokenBudget(budget), seats)
        self.draw = random.Random(seed)
        self.memory: dict[int, Value] = {}
        self.numbers = itertools.count()
        self.idle_steps = 0
        self.rows: dict[int, set[ImageSpan]] = {}
        """Spans whose rows each sequence has, by sequence id."""

    # -- what happens to requests -------------------------------------------------------------

    @rule(**ARRIVAL)
    def arrive(
        self,
        head: int,
        tail: int,
        image: int,
        outputs: int,
        n: int,
        tenant: str,
        priority: int,
        whole: int | None,
    ) -> None:
        """Prompts with long common beginnings: zeros, perhaps an image, then something else."""
        ids = [0] * head + [self.draw.randrange(2) for _ in range(tail)] or [0]
        spans: tuple[ImageSpan, ...] = ()
        if image and len(ids) > 8:
            start, key = self.draw.choice((2, 5)), bytes([self.draw.randrange(2)])
            spans = (ImageSpan(start, 3 * image % 4 + 1, key, self.draw.choice((0, 0, 1))),)
        if self.scheduler.running and self.draw.random() < 0.3:
            # The next turn of a conversation.
            known = self.draw.choice(self.scheduler.running)
            ids, spans = [*known.token_ids, *ids[:3]], known.request.image_spans
            tenant = known.request.tenant
        number = next(self.numbers)
        request = Request(
            f"r{number}",
            tuple(ids),
            SamplingParams(outputs, n=n, prompt_logprobs=whole),
            image_spans=spans,
            tenant=tenant,
            priority=priority,
        )
        if self.scheduler.never_fits(request) is None:
            self.scheduler.add(Sequence(request, next(self.numbers), number))

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    @rule()
    def a_step_that_fails(self) -> None:
        plan = self.schedule()
        names = {c.sequence.request.request_id for c in plan.chunks}
        for sequence in list(self.scheduler.in_order()):
            if sequence.request.request_id in names:
                self.scheduler.remove(sequence)

    @rule(which=st.integers(0, 10))
    def abort(self, which: int) -> None:
        line = list(self.scheduler.in_order())
        if line:
            name = line[which % len(line)].request.request_id
            for sequence in line:
                if sequence.request.request_id == name:
                    self.scheduler.remove(sequence)

    @rule(which=st.integers(0, 10))
    def preempt(self, which: int) -> None:
        running = self.scheduler.running
        if running:
            victim = running[which % len(running)]
            self.scheduler._preempt(victim, Draft(self.kv))
            self.rows.pop(victim.seq_id, None)

    @rule(tenant=st.sampled_from([None, "", "other"]))
    def clear(self, tenant: str | None) -> None:
        self.kv.cache.clear(tenant)

    @rule(count=st.integers(1, 9))
    def evict(self, count: int) -> None:
        self.kv.cache.evict(min(count, self.kv.cache.num_idle))

    @rule(which=st.integers(0, 10))
    def an_image_becomes_ready(self, which: int) -> None:
        line = [s for s in self.scheduler.in_order() if self.missing(s)]
        if line:
            sequence = line[which % len(line)]
            self.rows.setdefault(sequence.seq_id, set()).add(self.missing(sequence)[0])

    def missing(self, sequence: Sequence) -> list[ImageSpan]:
        """Spans whose rows it needs and has not; nobody provides those of what was found."""
        have = self.rows.get(sequence.seq_id, set())
        spans = sequence.request.image_spans
        return [s for s in spans if s.end > sequence.num_computed_tokens and s not in have]

    def pump(self) -> None:
        self.scheduler.look_up_images()
        for sequence in self.scheduler.in_order():
            sequence.num_ready_tokens = sequence.num_tokens
            if missing := self.missing(sequence):
                first = missing[0].offset
                sequence.num_ready_tokens = max(first, sequence.num_computed_tokens)

    # -- a step -------------------------------------------------------------------------------

    def step(self) -> None:
        plan = self.schedule()
        for chunk in plan.chunks:
            self.compute(chunk.sequence, chunk.start, chunk.end)
        self.scheduler.commit(plan)
        for chunk in plan.chunks:
            if chunk.sequence.remaining == 0:
                self.sample(chunk.sequence)
        self.progress(plan)

    def schedule(self) -> StepPlan:
        self.pump()
        plan = self.scheduler.schedule()
        for victim in plan.preempted:
            self.rows.pop(victim.seq_id, None)
        size = self.kv.block_size
        for copy in plan.copies:
            assert copy.source != copy.target
            for offset in range(size):
                value = self.memory.get(copy.source * size + offset)
                self.memory.pop(copy.target * size + offset, None)
                if value is not None:
                    self.memory[copy.target * size + offset] = value
        return plan

    def slots(self, sequence: Sequence) -> list[int]:
        size = self.kv.block_size
        return [
            block * size + offset
            for first, count in self.kv.runs(sequence.seq_id)
            for block in range(first, first + count)
            for offset in range(size)
        ]

    def compute(self, sequence: Sequence, start: int, end: int) -> None:
        slots, tenant = self.slots(sequence), sequence.request.tenant
        for position in range(start):
            truth = (tenant, tuple(sequence.cache_ids[: position + 1]))
            assert self.memory[slots[position]] == truth, f"{sequence} reads {position}"
        for span in sequence.request.image_spans:
            if start < span.end and span.offset < end:
                assert span in self.rows[sequence.seq_id], f"{sequence} has no rows"
        for position in range(start, end):
            assert self.writable(slots[position]), "a shared block is written"
            self.memory[slots[position]] = (tenant, tuple(sequence.cache_ids[: position + 1]))

    def writable(self, slot: int) -> bool:
        return self.kv.pool.ref_count(slot // self.kv.block_size) == 1

    def sample(self, first: Sequence) -> None:
        family = [first]
        for choice in range(1, first.width):
            child = first.fork(next(self.numbers), choice)
            self.scheduler.fork(first, child)
            family.append(child)
        for member in family:
            member.append(self.draw.choice((0, 0, 0, 1)))
            if member.num_output_tokens == member.request.sampling.max_tokens:
                self.scheduler.finish(member)

    def progress(self, plan: StepPlan) -> None:
        """Something always advances unless all that could waits for an image."""
        able = [s for s in self.scheduler.in_order() if s.advanceable > 0]
        stuck = not plan.chunks and not plan.preempted and bool(able)
        self.idle_steps = self.idle_steps + 1 if stuck else 0
        # A waiting one may have to be looked up once more, and needs a seat that a stuck one has.
        waiting_for_a_seat = any(s.advanceable <= 0 for s in self.scheduler.running)
        assert self.idle_steps < 3 or waiting_for_a_seat, list(self.scheduler.in_order())

    # -- what always holds --------------------------------------------------------------------

    @invariant()
    def the_books_agree(self) -> None:
        self.scheduler.check_invariants()
        pool = self.kv.pool
        if not self.scheduler.running:
            assert pool.num_free + self.kv.cache.num_idle == pool.num_blocks

    @invariant()
    def erase_what_is_not_kept(self) -> None:
        size = self.kv.block_size
        kept: set[int] = set()
        for sequence in self.scheduler.running:
            kept |= set(self.slots(sequence)[: sequence.num_computed_tokens])
        for block, node in self.kv.cache._nodes.items():
            kept |= set(range(block * size, block * size + len(node.ids)))
        assert kept <= set(self.memory), "something is cached or held that was never computed"
        self.memory = {slot: value for slot, value in self.memory.items() if slot in kept}

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(3000):
            if not self.scheduler.running and not self.scheduler.waiting:
                break
            for sequence in self.scheduler.in_order():
                self.rows.setdefault(sequence.seq_id, set()).update(sequence.request.image_spans)
            self.step()
            self.the_books_agree()
            self.erase_what_is_not_kept()
        else:
            raise AssertionError(f"stuck: {list(self.scheduler.in_order())}")
        self.the_books_agree()
        self.kv.cache.clear()
        assert self.kv.pool.num_free == self.kv.pool.num_blocks
        assert not (self.kv.pool._claims >= 0).any()


TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_steps() -> None:
    many = settings(max_examples=1500, stateful_step_count=50, deadline=None)
    run_state_machine_as_test(World, settings=many)
