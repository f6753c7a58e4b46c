"""Scheduler, block tables, device's and host's trees, disk and copies as one state machine.

As in test_prefix_machine.py, memory is a dictionary of what was computed where; host and disk are
such dictionaries too, and copies move their entries when, and if, the machine lets them end. What
nobody may read is erased after every rule, so that a copy that is read too early, or comes too
late, is seen as a token computed from another past than its own.
"""

from __future__ import annotations

import itertools
import os
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from chunked_prefill.budget import TokenBudget
from chunked_prefill.request import Request, SamplingParams
from chunked_prefill.scheduler import Scheduler
from chunked_prefill.sequence import Sequence as Tokens
from chunked_prefill.step_plan import StepPlan
from kv_offload.cold_prefix import BlockStore
from kv_offload.copies import DAMAGED
from kv_offload.copy_manual import ManualCopyEngine
from kv_offload.disk_tier import BROKEN, MISSING
from kv_offload.host_pool import HostPool
from kv_offload.kv_manager import KVManager
from kv_offload.tickets import CopyError
from kv_offload.transfer import TransferLimits, Transfers
from tests.chunked_prefill.test_prefix_machine import World

Place = Any
"""A device slot, or ("host", slot, token)."""


@dataclass
class Copy:
    """A Work on dictionaries."""

    act: Callable[[], None]
    num_bytes: int = 1

    def run(self) -> None:
        self.act()


class Stubborn(ManualCopyEngine):
    def wait(self, timeout_s: float) -> None:
        """Nothing ends by itself."""


class Places:
    """Copies and DiskCopies over the machine's memory."""

    def __init__(self, memory: dict[Place, Any], block_size: int, tokens: int, files: int) -> None:
        self.memory, self.size, self.tokens, self.files = memory, block_size, tokens, files
        self.on_disk: OrderedDict[bytes, list[Any]] = OrderedDict()
        self.blocks = tokens // block_size

    def _device(self, blocks: Sequence[int]) -> list[Place]:
        return [block * self.size + i for block in blocks for i in range(self.size)]

    def _host(self, slot: int, first: int = 0) -> list[Place]:
        return [("host", slot, token) for token in range(first * self.size, self.tokens)]

    def _move(self, sources: list[Place], targets: list[Place]) -> Copy:
        def act() -> None:
            for source, target in zip(sources, targets, strict=False):
                self.memory.pop(target, None)
                if source in self.memory:
                    self.memory[target] = self.memory[source]

        return Copy(act)

    def store(self, blocks: Sequence[int], slot: int) -> Copy:
        return self._move(self._device(blocks), self._host(slot))

    def load(self, slot: int, first: int, blocks: Sequence[int]) -> Copy:
        return self._move(self._host(slot, first), self._device(blocks))

    def stream(self, slots: Sequence[int], layer: int, into: Any) -> Copy:
        raise NotImplementedError

    def save(self, slot: int, key: bytes) -> Copy:
        def act() -> None:
            self.on_disk[key] = [self.memory[place] for place in self._host(slot)]
            while len(self.on_disk) > self.files:
                self.on_disk.popitem(last=False)

        return Copy(act)

    def fetch(self, key: bytes, slot: int) -> Copy:
        def act() -> None:
            if key not in self.on_disk:
                raise CopyError(MISSING)
            content = self.on_disk[key]
            if None in content:
                del self.on_disk[key]
                raise CopyError(BROKEN)
            self.memory.update(zip(self._host(slot), content, strict=True))

        return Copy(act)

    def __contains__(self, key: object) -> bool:
        return key in self.on_disk

    def clear(self, mark: bytes) -> None:
        for key in [key for key in self.on_disk if key.startswith(mark)]:
            del self.on_disk[key]

    def close(self) -> None:
        """Nothing to leave."""


class Moody:
    """CostModel: computing is dear, or not."""

    def __init__(self) -> None:
        self.dear = True

    def compute_s(self, start: int, end: int) -> float:
        return 1e9 if self.dear else 0.0


class TieredWorld(World):
    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        superblock=st.sampled_from([4, 8]),
        tokens=st.integers(48, 120),
        superblocks=st.integers(2, 30),
        files=st.sampled_from([0, 3, 12]),
        budget=st.sampled_from([1, 3, 8]),
        seats=st.integers(3, 8),
        seed=st.integers(0, 2**32),
    )
    def start(  # type: ignore[override]
        self,
        block_size: int,
        superblock: int,
        tokens: int,
        superblocks: int,
        files: int,
        budget: int,
        seats: int,
        seed: int,
    ) -> None:
        host = HostPool(superblocks)
        self.kv = KVManager(
            tokens // block_size,
            block_size,
            prefix_caching=True,
            host=host,
            chunk_tokens=budget,
            superblock_tokens=superblock,
        )
        self.memory = {}
        self.places = Places(self.memory, block_size, superblock, files)
        self.engines = (Stubborn(), Stubborn())
        self.now = 0.0
        self.transfers = Transfers(
            self.kv.copied_blocks,
            host,
            self.places,
            self.engines[0],
            disk=self.places if files else None,
            disk_engine=self.engines[1] if files else None,
            limits=TransferLimits(copying=3, copying_for_later=2, urgent_s=10, later_s=20),
            clock=lambda: self.now,
        )
        self.moody = Moody()
        self.kv.connect(self.transfers, self.moody, 1)
        assert self.kv.tiers is not None
        self.kv.tiers.worth.least_tokens = 2
        self.scheduler = Scheduler(self.kv, TokenBudget(budget), seats)
        self.draw = random.Random(seed)
        self.haste = self.draw.choice((0.0, 0.2, 1.0))
        self.numbers = itertools.count()
        self.idle_steps = 0
        self.rows = {}
        self.add_parts()

    def add_parts(self) -> None:
        """For worlds of more parts: those above are there."""

    # -- copies -------------------------------------------------------------------------------

    def under_way(self) -> list[tuple[Stubborn, int]]:
        return [(engine, ticket) for engine in self.engines for ticket in engine.under_way]

    @precondition(lambda self: self.under_way())
    @rule(which=st.integers(0, 30))
    def a_copy_ends(self, which: int) -> None:
        under_way = self.under_way()
        engine, ticket = under_way[which % len(under_way)]
        engine.finish(ticket)

    @precondition(lambda self: self.under_way())
    @rule(which=st.integers(0, 30), spoil=st.booleans(), cause=st.sampled_from(["fault", DAMAGED]))
    def a_copy_fails(self, which: int, spoil: bool, cause: str) -> None:
        """It may have written something else."""
        under_way = self.under_way()
        engine, ticket = under_way[which % len(under_way)]
        work = engine.under_way[ticket]
        engine.fail(ticket, cause, after=work.run if spoil and engine is self.engines[0] else None)

    @precondition(lambda self: self.under_way())
    @rule(steps=st.integers(1, 3))
    def copies_go_well(self, steps: int) -> None:
        for _ in range(steps):
            for engine, ticket in self.under_way():
                engine.finish(ticket)
            self.step()

    @precondition(lambda self: self.transfers.num_open)
    @rule(seconds=st.sampled_from([1.0, 11.0, 25.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(dear=st.booleans())
    def the_mood_changes(self, dear: bool) -> None:
        self.moody.dear = dear or self.draw.random() < 0.7

    @precondition(lambda self: self.places.on_disk)
    @rule(which=st.integers(0, 30), broken=st.booleans())
    def a_file_is_spoilt(self, which: int, broken: bool) -> None:
        keys = list(self.places.on_disk)
        key = keys[which % len(keys)]
        if broken:
            self.places.on_disk[key] = [None]
        else:
            del self.places.on_disk[key]

    @rule(head=st.integers(20, 120), outputs=st.integers(1, 30), n=st.sampled_from([1, 1, 2]))
    def a_long_one_arrives(self, head: int, outputs: int, n: int) -> None:
        self.arrive(head, 2, 0, outputs, n, "", 0, None)

    @precondition(lambda self: self.room_beyond_the_device() > 0)
    @rule(short=st.integers(1, 20))
    def the_beginning_of_one_that_gives_up_blocks_is_asked_for(self, short: int) -> None:
        """In the very step in which it does, with the rest of the device full of others' KV, and
        all of the host promised to it, so that nothing was stored before."""
        tokens = self.kv.pool.num_blocks * self.kv.block_size
        self.send(tuple(self.draw.choices(range(9, 16), k=tokens)), 1)
        self.go_on_until(lambda: not self.scheduler.running and not self.scheduler.waiting)
        ids = tuple(self.draw.choices(range(2, 9), k=tokens - short))
        self.send(ids, short + self.room_beyond_the_device())
        self.go_on_until(lambda: any(map(self.gives_up_blocks, self.scheduler.running)))
        for sequence in self.scheduler.running:
            if self.gives_up_blocks(sequence):
                cold = self.kv.cold_tokens(sequence.seq_id)
                self.send((*sequence.token_ids[:cold], 1), 1)
        self.step()

    def room_beyond_the_device(self) -> int:
        """Tokens."""
        return self.kv.capacity_tokens - self.kv.pool.num_blocks * self.kv.block_size

    def go_on_until(self, reached: Callable[[], bool]) -> None:
        """Or for so long."""
        for _ in range(200):
            if reached():
                return
            self.step()
            for engine, ticket in self.under_way():
                engine.finish(ticket)

    def gives_up_blocks(self, sequence: Tokens) -> bool:
        """Whether what the sequence computes next sends its oldest superblock to the host."""
        owner, end = sequence.seq_id, sequence.num_computed_tokens
        full = self.kv.held_blocks(owner) == self.kv.device_bound(sequence.max_tokens)
        return full and self.kv.cold_tokens(owner) > 0 and self.kv.held_tokens(owner) == end

    def send(self, ids: tuple[int, ...], outputs: int) -> None:
        number = next(self.numbers)
        request = Request(f"r{number}", ids, SamplingParams(outputs))
        if self.scheduler.never_fits(request) is None:
            self.scheduler.add(Tokens(request, next(self.numbers), number))

    # -- as before, with more places ----------------------------------------------------------

    @rule(tenant=st.sampled_from([None, "", "other"]))
    def clear(self, tenant: str | None) -> None:
        self.kv.clear(tenant)

    def schedule(self) -> StepPlan:
        self.scheduler.take_loaded()
        self.pump()
        plan = self.scheduler.schedule()
        for victim in plan.preempted:
            self.rows.pop(victim.seq_id, None)
        self.copies_go_on()
        for copy in plan.copies:
            if isinstance(copy, BlockStore):
                self.places.store(copy.blocks, copy.slot).run()
            else:
                device = self.places._device
                self.places._move(device([copy.source]), device([copy.target])).run()
        self.kv.start_loads()
        self.copies_go_on()
        return plan

    def copies_go_on(self) -> None:
        """A thread that copies does not wait for the step's parts."""
        for engine, ticket in self.under_way():
            if self.draw.random() < self.haste:
                engine.finish(ticket)

    def slots(self, sequence: Tokens) -> list[Place]:
        cold = [p for slot in self.kv.cold_slots(sequence.seq_id) for p in self.places._host(slot)]
        return cold + super().slots(sequence)

    def writable(self, place: Place) -> bool:
        block = -1 if isinstance(place, tuple) else place // self.kv.block_size
        return block >= 0 and self.kv.pool.ref_count(block) == 1

    def progress(self, plan: StepPlan) -> None:
        if self.transfers.num_open:
            # Who waits for memory or for KV that a copy holds goes on when it ends.
            self.idle_steps = 0
            return
        super().progress(plan)

    def the_books_agree(self) -> None:
        self.scheduler.check_invariants()
        pool, cache = self.kv.pool, self.kv.cache
        if not self.scheduler.running:
            assert pool.num_free + cache.num_idle + cache.num_held == pool.num_blocks
        if not self.scheduler.running and not self.transfers.num_open:
            assert self.kv.cold is not None
            assert self.kv.cold.host.num_used == 0

    def erase_what_is_not_kept(self) -> None:
        size, kv = self.kv.block_size, self.kv
        assert kv.cold is not None
        kept: set[Place] = set()
        written: set[Place] = set()
        for sequence in self.scheduler.running:
            valid = sequence.num_computed_tokens
            if sequence.loading:
                valid = kv.sources(sequence.seq_id).device
                written |= set(self.slots(sequence))
            kept |= set(self.slots(sequence)[:valid])
        for block, node in kv.cache._nodes.items():
            kept |= set(range(block * size, block * size + len(node.ids)))
        for handle, entry in kv.cold.host._entries.items():
            if kv.cold.host.filled(handle):
                kept |= set(self.places._host(entry.slot))
        assert kept <= set(self.memory), "something is cached or held that was never computed"
        for block in self.transfers.held_blocks():
            written |= set(self.places._device([block]))
        for handle in self.transfers.held_superblocks():
            written |= set(self.places._host(kv.cold.host.slot(handle)))
        for place in [p for p in self.memory if p not in kept and p not in written]:
            del self.memory[place]

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.moody.dear = True
        for _ in range(30_000):
            if not self.scheduler.running and not self.scheduler.waiting and not self.kv.copying:
                break
            for engine, ticket in self.under_way():
                engine.finish(ticket)
            for sequence in self.scheduler.in_order():
                self.rows.setdefault(sequence.seq_id, set()).update(sequence.request.image_spans)
            self.step()
            self.the_books_agree()
            self.erase_what_is_not_kept()
        else:
            raise AssertionError(f"stuck: {list(self.scheduler.in_order())}")
        for engine, ticket in self.under_way():
            engine.finish(ticket)
        self.step()
        assert self.transfers.num_open == 0
        self.the_books_agree()
        self.kv.clear()
        assert self.kv.pool.num_free == self.kv.pool.num_blocks
        assert self.kv.cold is not None
        assert self.kv.cold.host.num_free == self.kv.cold.host.num_superblocks
        assert not (self.kv.pool._claims >= 0).any()


_SHORT = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_tiers_and_requests_in_any_order() -> None:
    run_state_machine_as_test(TieredWorld, settings=_SHORT)


def blocks_stored_and_loaded_in_one_step() -> list[int]:
    """While the machine plays such a case to its end."""
    world = TieredWorld()
    world.start(4, 8, 64, 30, 0, 8, 4, 0)
    world.haste = 1.0
    found: list[int] = []
    schedule = world.scheduler.schedule

    def watched() -> StepPlan:
        plan = schedule()
        for copy in plan.copies:
            if isinstance(copy, BlockStore):
                found.extend(filter(world.transfers.is_being_written, copy.blocks))
        return plan

    world.scheduler.schedule = watched  # type: ignore[method-assign]
    world.the_beginning_of_one_that_gives_up_blocks_is_asked_for(9)
    world.teardown()
    return found


def test_blocks_are_stored_before_a_load_of_the_same_step_overwrites_them() -> None:
    assert blocks_stored_and_loaded_in_one_step()


def test_the_machine_sees_a_load_that_starts_before_the_copies_of_its_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = Transfers.load

    def at_once(self: Transfers, *args: Any, **kwargs: Any) -> int:
        ticket = load(self, *args, **kwargs)
        self.start_loads()
        return ticket

    monkeypatch.setattr(Transfers, "load", at_once)
    with pytest.raises(AssertionError, match="reads"):
        blocks_stored_and_loaded_in_one_step()


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_hundred_thousand_rules() -> None:
    """LONGLENS_TIER_RULES sets another number of rules."""
    rules = int(os.environ.get("LONGLENS_TIER_RULES", "100000"))
    many = settings(_SHORT, max_examples=max(1, rules // 50), stateful_step_count=50)
    run_state_machine_as_test(TieredWorld, settings=many)
