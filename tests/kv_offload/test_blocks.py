"""Block accounting as a state machine: nothing is lost, shared blocks are never written."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from kv_offload.block_pool import BlockPool, OutOfBlocksError
from kv_offload.kv_manager import KVManager

BLOCK_SIZE = 4
NUM_BLOCKS = 24


class Blocks(RuleBasedStateMachine):
    """A model of what each slot holds is kept beside the manager: `content[block]` maps offsets to
    (owner, position) and is moved by the copies that `reserve` returns."""

    owners = Bundle("owners")

    @initialize()
    def start(self) -> None:
        self.kv = KVManager(NUM_BLOCKS, BLOCK_SIZE)
        self.lengths: dict[int, int] = {}
        self.truth: dict[int, list[int]] = {}
        self.slots: dict[int, int] = {}
        self.next_owner = 0
        self.next_value = 0

    @rule(target=owners)
    def arrive(self) -> int:
        owner, self.next_owner = self.next_owner, self.next_owner + 1
        self.lengths[owner] = 0
        self.truth[owner] = []
        return owner

    @rule(owner=owners, count=st.integers(1, 11), reach=st.integers(0, 60))
    def grow(self, owner: int, count: int, reach: int) -> None:
        if owner not in self.lengths:
            return
        start, free = self.lengths[owner], self.kv.pool.num_free
        copies = self.kv.reserve(owner, start, start + count, reach_tokens=reach)
        if copies is None:
            assert self.kv.pool.num_free == free
            return
        for copy in copies:
            for offset in range(BLOCK_SIZE):
                value = self.slots.get(copy.source * BLOCK_SIZE + offset)
                if value is not None:
                    self.slots[copy.target * BLOCK_SIZE + offset] = value
        blocks = self._blocks(owner)
        for position in range(start, start + count):
            block = blocks[position // BLOCK_SIZE]
            assert self.kv.pool.ref_count(block) == 1, "a shared block is about to be written"
            self.next_value += 1
            self.slots[block * BLOCK_SIZE + position % BLOCK_SIZE] = self.next_value
            self.truth[owner].append(self.next_value)
        self.lengths[owner] = start + count

    @rule(target=owners, parent=owners)
    def fork(self, parent: int) -> int:
        child = self.arrive()
        if self.lengths.get(parent):
            self.kv.fork(parent, child)
            self.lengths[child] = self.lengths[parent]
            self.truth[child] = list(self.truth[parent])
        return child

    @rule(owner=consumes(owners))
    def leave(self, owner: int) -> None:
        if self.lengths.pop(owner, None) is not None:
            self.kv.free(owner)

    @invariant()
    def books_agree(self) -> None:
        self.kv.check_invariants()

    @invariant()
    def everyone_reads_what_he_wrote(self) -> None:
        for owner, length in self.lengths.items():
            if length == 0:
                continue
            blocks = self._blocks(owner)
            read = [
                self.slots[blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE]
                for p in range(length)
            ]
            assert read == self.truth[owner]

    def teardown(self) -> None:
        for owner in self.lengths:
            self.kv.free(owner)
        assert self.kv.pool.num_free == NUM_BLOCKS
        assert not (self.kv.pool._claims >= 0).any()

    def _blocks(self, owner: int) -> list[int]:
        return [first + i for first, count in self.kv.runs(owner) for i in range(count)]


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_two_growing_sequences_stay_contiguous() -> None:
    kv = KVManager(64, BLOCK_SIZE)
    for length in range(1, 80):
        for owner in (0, 1):
            assert kv.reserve(owner, length - 1, length, reach_tokens=80) is not None
    assert len(kv.runs(0)) == len(kv.runs(1)) == 1


def test_claims_never_make_an_allocation_fail() -> None:
    pool = BlockPool(8)
    first = pool.allocate(1, owner=0, after=None, reach=8)
    others = pool.allocate(7, owner=1, after=None, reach=1)
    assert sorted(first + others) == list(range(8))
    with pytest.raises(OutOfBlocksError, match="1 blocks needed, 0 free"):
        pool.allocate(1, owner=0, after=first[-1], reach=1)


def test_misuse_is_loud() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1, owner=0, after=None, reach=1)
    pool.free([block])
    with pytest.raises(ValueError, match="freed twice"):
        pool.free([block])
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.share([block])
