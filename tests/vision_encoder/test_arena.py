"""EmbeddingArena: single flight, eviction, epochs, quarantine, and its books under any order."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vision_encoder.embedding_arena import (
    CRASHES_TO_QUARANTINE,
    MAX_SUSPECTS,
    Acquired,
    ArenaInvariantError,
    EmbeddingArena,
)

A, B, C = b"a" * 32, b"b" * 32, b"c" * 32


def test_one_flight_serves_every_holder() -> None:
    arena = EmbeddingArena(64, granule=16)
    assert arena.acquire(A, 20, "r1") is Acquired.START
    assert arena.acquire(A, 20, "r2") is Acquired.PENDING
    assert arena.acquire(A, 20, "r1") is Acquired.PENDING
    assert not arena.is_ready(A)
    assert arena.mark_ready(A, 0)
    assert arena.acquire(A, 20, "r3") is Acquired.READY
    assert arena.holders(A) == {"r1", "r2", "r3"}
    stats = arena.stats()
    assert (stats.queries, stats.hits, stats.encodes) == (3, 2, 1)
    assert (stats.rows_used, stats.rows_cached, stats.rows_total) == (32, 0, 64)
    arena.check_invariants()


def test_rows_are_exact_and_gather_in_order() -> None:
    arena = EmbeddingArena(64, granule=16)
    arena.acquire(A, 10, "r")
    arena.acquire(B, 16, "r")
    arena.acquire(C, 16, "r")
    for key in (A, C):
        arena.mark_failed(key, 0)
    assert arena.acquire(b"d", 40, "r") is Acquired.START
    assert arena.rows(b"d") == ((0, 16), (32, 24))
    expected = [*range(16), *range(32, 56)]
    assert arena.row_indices(b"d") == expected
    assert arena.row_indices(b"d", 14, 20) == expected[14:20]
    assert arena.row_indices(b"d", 20, 20) == []
    with pytest.raises(ValueError, match=r"\[0, 41\)"):
        arena.row_indices(b"d", 0, 41)
    arena.check_invariants()


def test_a_gap_that_holds_all_rows_is_preferred_to_scattered_granules() -> None:
    arena = EmbeddingArena(96, granule=16)
    for key, rows in ((A, 16), (B, 16), (C, 16)):
        arena.acquire(key, rows, "r")
    arena.mark_failed(A, 0)
    arena.acquire(b"d", 32, "r")
    assert arena.rows(b"d") == ((48, 32),)


def test_the_last_granule_may_be_short() -> None:
    arena = EmbeddingArena(20, granule=16)
    assert arena.can_ever_fit(20)
    assert not arena.can_ever_fit(21)
    assert arena.acquire(A, 20, "r") is Acquired.START
    assert arena.rows(A) == ((0, 20),)
    assert arena.stats().rows_used == 20
    arena.mark_failed(A, 0)
    assert arena.acquire(B, 4, "r") is Acquired.START
    assert arena.acquire(C, 4, "r") is Acquired.START
    assert arena.stats().rows_used == 20
    arena.check_invariants()


def test_img_14_an_image_larger_than_the_arena_is_refused_not_queued() -> None:
    arena = EmbeddingArena(64)
    assert not arena.can_ever_fit(65)
    with pytest.raises(ValueError, match="65 rows cannot lie in an arena of 64"):
        arena.acquire(A, 65, "r")
    with pytest.raises(ValueError, match="0 rows"):
        arena.acquire(A, 0, "r")
    arena.acquire(A, 64, "r")
    assert arena.acquire(B, 1, "r2") is Acquired.FULL
    assert arena.holders(B) == frozenset()
    assert arena.stats().queries == 1


def test_a_key_has_one_size() -> None:
    arena = EmbeddingArena(64)
    arena.acquire(A, 10, "r")
    with pytest.raises(ValueError, match="10 rows here, 11"):
        arena.acquire(A, 11, "r2")


def test_eviction_takes_the_longest_unused_image_that_nobody_holds() -> None:
    arena = EmbeddingArena(48, granule=16)
    for key in (A, B, C):
        arena.acquire(key, 16, "r")
        arena.mark_ready(key, 0)
    assert arena.acquire(b"d", 16, "r2") is Acquired.FULL
    for key in (B, A):
        arena.release(key, "r")
    assert arena.stats().rows_cached == 32
    assert arena.acquire(B, 16, "r2") is Acquired.READY
    arena.release(B, "r2")
    assert arena.acquire(b"d", 16, "r2") is Acquired.START
    assert not arena.is_ready(A)
    assert arena.is_ready(B)
    assert arena.is_ready(C)
    assert arena.stats().evictions == 1
    arena.check_invariants()


def test_nothing_is_evicted_for_an_image_that_would_not_fit_anyway() -> None:
    arena = EmbeddingArena(48, granule=16)
    for key in (A, B):
        arena.acquire(key, 16, "r")
        arena.mark_ready(key, 0)
    arena.release(A, "r")
    assert arena.acquire(C, 33, "r2") is Acquired.FULL
    assert arena.is_ready(A)


def test_rows_in_flight_outlive_their_holders_until_the_reply() -> None:
    arena = EmbeddingArena(32, granule=16)
    arena.acquire(A, 32, "r")
    arena.release_all("r")
    assert arena.acquire(B, 1, "r2") is Acquired.FULL
    assert arena.mark_ready(A, 0)
    assert arena.stats().rows_cached == 32
    assert arena.acquire(B, 1, "r2") is Acquired.START
    arena.check_invariants()


def test_failure_frees_rows_and_names_the_holders() -> None:
    arena = EmbeddingArena(32)
    arena.acquire(A, 32, "r1")
    arena.acquire(A, 32, "r2")
    assert arena.mark_failed(A, 0) == {"r1", "r2"}
    assert arena.stats().rows_used == 0
    assert arena.mark_failed(A, 0) == frozenset()
    arena.release_all("r1")
    assert arena.acquire(A, 32, "r1") is Acquired.START
    arena.check_invariants()


def test_a_cancelled_job_is_tried_again_when_someone_joined_it() -> None:
    arena = EmbeddingArena(32)
    arena.acquire(A, 16, "r1")
    arena.release(A, "r1")
    assert arena.acquire(A, 16, "r2") is Acquired.PENDING
    assert arena.mark_cancelled(A, 0)
    assert arena.holders(A) == {"r2"}
    arena.release(A, "r2")
    assert not arena.mark_cancelled(A, 0)
    assert arena.stats().rows_used == 0
    arena.check_invariants()


def test_replies_of_a_former_epoch_change_nothing() -> None:
    arena = EmbeddingArena(32)
    arena.acquire(A, 16, "r")
    assert arena.new_epoch() == [A]
    assert not arena.mark_ready(A, 0)
    assert arena.mark_failed(A, 0) == frozenset()
    assert not arena.is_ready(A)
    assert arena.mark_ready(A, arena.epoch)


def test_a_new_epoch_returns_what_is_wanted_and_drops_what_is_not() -> None:
    arena = EmbeddingArena(96, granule=16)
    arena.acquire(A, 16, "r")
    arena.mark_ready(A, 0)
    arena.acquire(B, 16, "r")
    arena.acquire(C, 16, "gone")
    arena.release_all("gone")
    assert arena.new_epoch() == [B]
    assert arena.is_ready(A)
    assert arena.stats().rows_used == 32
    arena.check_invariants()


def test_an_image_in_flight_at_two_crashes_is_quarantined() -> None:
    arena = EmbeddingArena(64)
    arena.acquire(A, 16, "r")
    arena.new_epoch()
    assert not arena.is_quarantined(A)
    assert arena.new_epoch() == [A]
    assert arena.is_quarantined(A)
    assert arena.mark_failed(A, arena.epoch) == {"r"}
    assert arena.acquire(A, 16, "r") is Acquired.QUARANTINED
    assert arena.stats().rows_used == 0


def test_only_suspects_are_blamed_and_success_clears_the_name() -> None:
    arena = EmbeddingArena(64)
    for key in (A, B):
        arena.acquire(key, 16, "r")
    for _ in range(CRASHES_TO_QUARANTINE):
        arena.new_epoch(suspects=[A])
    assert arena.is_quarantined(A)
    assert not arena.is_quarantined(B)
    arena.new_epoch()
    assert arena.mark_ready(B, arena.epoch)
    arena.release_all("r")
    arena.acquire(C, 64, "r")
    arena.mark_failed(C, arena.epoch)
    arena.acquire(B, 16, "r")
    arena.new_epoch()
    assert not arena.is_quarantined(B)


def test_the_memory_of_suspects_is_bounded() -> None:
    arena = EmbeddingArena(MAX_SUSPECTS + 100, granule=1)
    for index in range(MAX_SUSPECTS + 100):
        arena.acquire(b"%d" % index, 1, "r")
    last = b"%d" % (MAX_SUSPECTS + 99)
    arena.new_epoch()
    arena.new_epoch(suspects=[last])
    arena.check_invariants()
    assert len(arena._crashes) == MAX_SUSPECTS
    assert arena.is_quarantined(last)


def test_check_invariants_finds_a_lost_granule() -> None:
    arena = EmbeddingArena(64)
    arena.acquire(A, 16, "r")
    arena._free.pop()
    with pytest.raises(ArenaInvariantError, match="granules are lost"):
        arena.check_invariants()


@pytest.mark.parametrize(("rows", "granule"), [(0, 16), (16, 0)])
def test_sizes_are_positive(rows: int, granule: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        EmbeddingArena(rows, granule)


class ArenaMachine(RuleBasedStateMachine):
    """Any order of requests, replies, losses and restarts, against a memory that records writes.

    The model is a list of who wrote each row last; a ready image must find its own name in all its
    rows, which fails if rows are shared, freed while a job may write, or handed out twice.
    """

    keys = st.integers(0, 7)
    holders = st.integers(0, 4)

    def __init__(self) -> None:
        super().__init__()
        self.arena = EmbeddingArena(100, granule=8)
        self.sizes = [3, 8, 9, 16, 24, 40, 60, 100]
        self.memory: list[tuple[int, int] | None] = [None] * 100
        self.jobs: list[tuple[int, int, tuple[tuple[int, int], ...], int]] = []
        self.serial = 0
        self.content: dict[int, int] = {}
        self.random = random.Random(0)

    def key(self, number: int) -> bytes:
        return bytes([number]) * 32

    def submit(self, number: int) -> None:
        self.serial += 1
        rows = self.arena.rows(self.key(number))
        self.jobs.append((number, self.arena.epoch, rows, self.serial))

    @rule(number=keys, holder=holders)
    def acquire(self, number: int, holder: int) -> None:
        before = self.arena.stats()
        got = self.arena.acquire(self.key(number), self.sizes[number], holder)
        if got is Acquired.START:
            self.submit(number)
        elif got in (Acquired.FULL, Acquired.QUARANTINED):
            assert self.arena.stats() == before
            assert holder not in self.arena.holders(self.key(number))
        if got is Acquired.FULL:
            room = before.rows_total - before.rows_used
            assert room < self.sizes[number]
        if got is Acquired.READY:
            assert self.arena.is_ready(self.key(number))

    @rule(number=keys, holder=holders)
    def release(self, number: int, holder: int) -> None:
        self.arena.release(self.key(number), holder)

    @rule(holder=holders)
    def abort(self, holder: int) -> None:
        self.arena.release_all(holder)
        for number in range(8):
            assert holder not in self.arena.holders(self.key(number))

    @precondition(lambda self: self.jobs)
    @rule(pick=st.randoms(use_true_random=False), outcome=st.sampled_from("rrrfc"))
    def reply(self, pick: random.Random, outcome: str) -> None:
        job = self.jobs.pop(pick.randrange(len(self.jobs)))
        number, epoch, rows, serial = job
        key = self.key(number)
        if outcome == "r":
            for first, count in rows:
                self.memory[first : first + count] = [(number, serial)] * count
            if self.arena.mark_ready(key, epoch):
                self.content[number] = serial
        elif outcome == "f":
            holders = self.arena.holders(key)
            assert self.arena.mark_failed(key, epoch) == holders
        elif self.arena.mark_cancelled(key, epoch):
            self.submit(number)

    @rule()
    def restart_vision(self) -> None:
        # A dead process writes no more, so what it was asked to do is gone.
        self.jobs.clear()
        for key in self.arena.new_epoch():
            if self.arena.is_quarantined(key):
                assert self.arena.mark_failed(key, self.arena.epoch)
            else:
                self.submit(key[0])

    @invariant()
    def books_agree(self) -> None:
        self.arena.check_invariants()

    @invariant()
    def ready_rows_hold_what_was_committed(self) -> None:
        for number in range(8):
            if self.arena.is_ready(self.key(number)):
                indices = self.arena.row_indices(self.key(number))
                assert len(indices) == self.sizes[number]
                written = {self.memory[index] for index in indices}
                assert written == {(number, self.content[number])}

    @invariant()
    def every_entry_in_flight_has_one_job(self) -> None:
        current = [job[0] for job in self.jobs if job[1] == self.arena.epoch]
        assert len(current) == len(set(current))
        for number in range(8):
            waiting = bool(self.arena.holders(self.key(number))) and not self.arena.is_ready(
                self.key(number)
            )
            if waiting:
                assert number in current


ArenaMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, database=None
)
TestArenaMachine = ArenaMachine.TestCase
