"""Scheduler, KV on all tiers, embedding arena and vision stage as one state machine.

To the world of tests/chunked_prefill/test_tier_machine.py come images: the engine's own feed and
arena over a vision stage that does what the machine says. The rows' memory is a dictionary too: an
encode writes (key, row) where its job says, perhaps only some of it, perhaps nonsense if it fails.
What is neither ready nor being written is erased after every rule, so that rows that are read too
early, or were given to somebody else, are seen where a prompt is computed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from chunked_prefill.draft import Draft
from chunked_prefill.request import ImageSpan, Request, SamplingParams
from chunked_prefill.sequence import Sequence
from chunked_prefill.step_plan import StepPlan
from lm_engine.client import MediaItem
from lm_engine.images import ImageFailure, ImageFeed
from tests.chunked_prefill.test_prefix_machine import ARRIVAL
from tests.chunked_prefill.test_tier_machine import TieredWorld
from vision_encoder.embedding_arena import Acquired, EmbeddingArena
from vision_encoder.link import EncodeJob, EncodeResult
from vision_encoder.plan import ImagePlan
from vision_encoder.stage import BYTES_GONE, CANCELLED

ROWS = {b"a": 3, b"b": 5, b"c": 7}
"""Of each image."""


class Eyes:
    """A VisionLink whose jobs end when, and how, the machine wants."""

    def __init__(self) -> None:
        self.jobs: list[EncodeJob] = []
        self.cancelled: set[bytes] = set()
        self.replies: list[EncodeResult] = []

    def submit(self, job: EncodeJob) -> None:
        assert all(job.key != other.key for other in self.jobs), "an image is encoded twice at once"
        self.jobs.append(job)

    def cancel(self, key: bytes, epoch: int) -> None:
        self.cancelled.add(key)

    def allow(self, seconds: float) -> None:
        """It works when the machine says so."""

    def poll(self) -> list[EncodeResult]:
        replies, self.replies = self.replies, []
        return replies

    def busy(self) -> bool:
        return bool(self.jobs or self.replies)

    def end(self, job: EncodeJob, **how: Any) -> None:
        self.jobs.remove(job)
        self.cancelled.discard(job.key)
        self.replies.append(EncodeResult(job.key, job.epoch, **how))


def rows_of(runs: Iterable[tuple[int, int]]) -> list[int]:
    return [row for first, count in runs for row in range(first, first + count)]


class PicturedWorld(TieredWorld):
    # -- parts --------------------------------------------------------------------------------

    def add_parts(self) -> None:
        self.eyes = Eyes()
        rows = self.draw.randint(max(ROWS.values()) + 1, 24)
        self.feed = ImageFeed(EmbeddingArena(rows, self.draw.choice((1, 2, 4))), self.eyes)
        self.storage: dict[int, tuple[bytes, int]] = {}
        self.ending = False
        self.still = 0
        add, remove = self.scheduler.add, self.scheduler.remove

        def add_with_images(sequence: Sequence) -> None:
            keys = {span.key for span in sequence.request.image_spans}
            items = [MediaItem(key, _plan(key), "", data=b"") for key in sorted(keys)]
            self.feed.add(sequence.request.request_id, items)
            add(sequence)

        def remove_with_rows(sequence: Sequence) -> None:
            """As the engine does when a sequence ends."""
            name = sequence.request.request_id
            self.feed.drop(sequence)
            remove(sequence)
            if all(s.request.request_id != name for s in self.scheduler.in_order()):
                self.feed.forget(name)

        self.scheduler.add = add_with_images  # type: ignore[method-assign]
        self.scheduler.remove = remove_with_rows  # type: ignore[method-assign]

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
        """`image` pictures stand among the first tokens; some show parts of an image only, or one
        that is there already."""
        ids = [0] * head + [self.draw.randrange(2) for _ in range(tail)] or [0]
        if image:
            ids += [0] * (9 * image)
        keys = [self.draw.choice(sorted(ROWS)) for _ in range(image)]
        spans = []
        for place, key in enumerate(keys):
            first = self.draw.choice((0, 0, 1))
            length = ROWS[key] - first - self.draw.choice((0, 0, 1))
            spans.append(ImageSpan(9 * place + self.draw.choice((0, 2)), length, key, first))
        number = next(self.numbers)
        request = Request(
            f"r{number}",
            tuple(ids),
            SamplingParams(outputs, n=n, prompt_logprobs=whole),
            image_spans=tuple(spans),
            tenant=tenant,
            priority=priority,
        )
        if self.scheduler.never_fits(request) is None:
            self.scheduler.add(Sequence(request, next(self.numbers), number))

    # -- what the vision stage does -----------------------------------------------------------

    def an_image_becomes_ready(self, which: int) -> None:
        """Not by itself, here."""

    def write(self, job: EncodeJob, count: int) -> None:
        for index, row in enumerate(rows_of(job.rows)[:count]):
            self.storage[row] = (job.key, index)

    def job(self, which: int) -> EncodeJob:
        return self.eyes.jobs[which % len(self.eyes.jobs)]

    @precondition(lambda self: self.eyes.jobs)
    @rule(which=st.integers(0, 5))
    def an_encode_ends(self, which: int) -> None:
        job = self.job(which)
        self.write(job, ROWS[job.key])
        self.eyes.end(job)

    @precondition(lambda self: self.eyes.jobs)
    @rule(steps=st.integers(1, 4))
    def encodes_go_well(self, steps: int) -> None:
        for _ in range(steps):
            self.all_encodes_end()
            self.step()

    def all_encodes_end(self) -> None:
        for job in list(self.eyes.jobs):
            self.write(job, ROWS[job.key])
            self.eyes.end(job)

    @precondition(lambda self: self.eyes.jobs)
    @rule(which=st.integers(0, 5), count=st.integers(1, 6))
    def an_encode_goes_on(self, which: int, count: int) -> None:
        self.write(self.job(which), count)

    @precondition(lambda self: self.eyes.jobs)
    @rule(which=st.integers(0, 5), internal=st.booleans(), spoil=st.booleans())
    def an_encode_fails(self, which: int, internal: bool, spoil: bool) -> None:
        job = self.job(which)
        if spoil:
            self.storage[rows_of(job.rows)[0]] = (b"nonsense", 0)
        self.eyes.end(job, error="it is broken", internal=internal)

    @precondition(lambda self: self.eyes.jobs)
    @rule(which=st.integers(0, 5))
    def an_encode_ends_untried(self, which: int) -> None:
        """Cancelled, if it was, or its bytes were gone."""
        job = self.job(which)
        self.eyes.end(job, error=CANCELLED if job.key in self.eyes.cancelled else BYTES_GONE)

    @precondition(lambda self: self.eyes.jobs)
    @rule(stale=st.booleans(), known=st.sampled_from([None, 0, 0, 1]))
    def the_stage_restarts(self, stale: bool, known: int | None) -> None:
        """An answer of the old process may still come; it knows what it worked on, or does not."""
        lost, self.eyes.jobs = self.eyes.jobs, []
        self.eyes.cancelled.clear()
        suspects = None if known is None else [job.key for job in lost[:known]]
        self.fail(self.feed.restarted(suspects))
        if stale and lost:
            self.eyes.replies.append(EncodeResult(lost[0].key, lost[0].epoch))

    @rule()
    def rows_are_evicted(self) -> None:
        arena = self.feed.arena
        free = arena.num_rows - arena.stats().rows_used
        if free and arena.acquire(b"filler", free, "filler") is Acquired.START:
            arena.mark_failed(b"filler", arena.epoch)

    @rule(which=st.integers(0, 10))
    def abort_who_waits_for_an_image(self, which: int) -> None:
        waiting = [s for s in self.scheduler.in_order() if s.num_ready_tokens < s.num_tokens]
        if waiting:
            self.end(waiting[which % len(waiting)].request.request_id)

    def end(self, name: str) -> None:
        for sequence in list(self.scheduler.in_order()):
            if sequence.request.request_id == name:
                self.scheduler.remove(sequence)

    def fail(self, failures: list[ImageFailure]) -> None:
        for failure in failures:
            self.end(failure.request_id)

    # -- as before, with rows -----------------------------------------------------------------

    @rule(which=st.integers(0, 10))
    def preempt(self, which: int) -> None:
        running = self.scheduler.running
        if running:
            victim = running[which % len(running)]
            self.scheduler._preempt(victim, Draft(self.kv))
            self.feed.drop(victim)

    def pump(self) -> None:
        if self.ending:
            self.all_encodes_end()
        self.scheduler.look_up_images()
        self.fail(self.feed.pump(self.scheduler.in_order()))
        self.feed.take_checked()

    def schedule(self) -> StepPlan:
        plan = super().schedule()
        for victim in plan.preempted:
            self.feed.drop(victim)
        return plan

    def compute(self, sequence: Sequence, start: int, end: int) -> None:
        for span in sequence.request.image_spans:
            low, high = max(start, span.offset), min(end, span.end)
            if low >= high:
                continue
            first = span.row_offset - span.offset
            rows = self.feed.arena.row_indices(span.key, first + low, first + high)
            for index, row in enumerate(rows, first + low):
                assert self.storage.get(row) == (span.key, index), f"{sequence} reads row {row}"
        self.rows[sequence.seq_id] = set(sequence.request.image_spans)
        super().compute(sequence, start, end)

    def progress(self, plan: StepPlan) -> None:
        for chunk in plan.chunks:
            self.feed.consumed(chunk.sequence)
        if self.eyes.busy():
            # Who waits for rows that a flight has goes on when it ends.
            self.idle_steps = self.still = 0
            return
        super().progress(plan)
        here = self.scheduler.running or self.scheduler.waiting
        moves = plan.chunks or plan.preempted or self.transfers.num_open or not here
        self.still = 0 if moves else self.still + 1
        assert self.still < 4, f"nobody is waited for: {list(self.scheduler.in_order())}"

    # -- what always holds --------------------------------------------------------------------

    def erase_what_is_not_kept(self) -> None:
        super().erase_what_is_not_kept()
        arena = self.feed.arena
        arena.check_invariants()
        flying = [row for job in self.eyes.jobs for row in rows_of(job.rows)]
        ready = []
        for key, entry in arena._entries.items():
            if entry.ready:
                rows = rows_of(entry.runs)
                ready += rows
                for index, row in enumerate(rows):
                    assert self.storage.get(row) == (key, index), "a ready row was overwritten"
        assert len(set(flying + ready)) == len(flying) + len(ready), "a row has two owners"
        self.storage = {r: v for r, v in self.storage.items() if r in flying or r in ready}
        line = {s.seq_id for s in self.scheduler.in_order()}
        assert set(arena._held) <= line, "who is gone holds rows"
        held = {seq_id: keys for seq_id, keys in self.feed._holds.items() if keys}
        assert held.keys() == arena._held.keys()
        answered = {(reply.key, reply.epoch) for reply in self.eyes.replies}
        for key, entry in arena._entries.items():
            flies = any(job.key == key and job.epoch == arena.epoch for job in self.eyes.jobs)
            assert entry.ready or flies or (key, arena.epoch) in answered, "rows wait for nobody"

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.ending = True
        super().teardown()
        self.pump()
        self.pump()
        self.erase_what_is_not_kept()
        feed = self.feed
        assert feed.arena.stats().rows_used == 0
        assert not any([feed._media, feed._holds, feed._owner_of, feed._jobs, self.eyes.busy()])


def _plan(key: bytes) -> ImagePlan:
    return ImagePlan("toy", 8, 8, (), (ROWS[key],), ROWS[key], num_patches=4 * ROWS[key])


_SHORT = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_tiers_images_and_requests_in_any_order() -> None:
    run_state_machine_as_test(PicturedWorld, settings=_SHORT)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_hundred_thousand_rules() -> None:
    """LONGLENS_TIER_RULES sets another number of rules."""
    rules = int(os.environ.get("LONGLENS_TIER_RULES", "100000"))
    many = settings(_SHORT, max_examples=max(1, rules // 50), stateful_step_count=50)
    run_state_machine_as_test(PicturedWorld, settings=many)
