"""Pool, host, disk and transfers together, with copies that end, fail, stall and rot in any order.

A segment is one superblock's worth of KV that somebody computed. The model beside the tiers knows
its numbers and where it should be found. Freed and unready memory is NaN, and must stay so: a late
copy into it is seen, and so is a read of it.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kv_offload.block_pool import BlockPool
from kv_offload.copies import DAMAGED, TierCopies
from kv_offload.copy_manual import ManualCopyEngine
from kv_offload.disk_key import KEY_BYTES, chain_key
from kv_offload.disk_tier import BROKEN, MISSING, DiskTier
from kv_offload.host_memory import HostMemory
from kv_offload.host_pool import HostPool
from kv_offload.kv_cache import KVCache
from kv_offload.layout import KVLayout
from kv_offload.superblock import SuperblockLayout
from kv_offload.tickets import (
    DEADLINE,
    RESET,
    Completion,
    CopyError,
    Direction,
)
from kv_offload.transfer import TransferLimits, Transfers

KV = KVLayout(num_layers=2, num_kv_heads=1, head_dim=2, block_size=2)
LAYOUT = SuperblockLayout(KV, tokens=6)
NUM_BLOCKS, NUM_SUPERBLOCKS, NUM_FILES = 14, 4, 3
LIMITS = TransferLimits(copying=3, copying_for_later=2, urgent_s=10.0, later_s=20.0)


@dataclass(eq=False)
class Segment:
    """KV of `size` blocks, all of whose numbers are `value`, plus the place of each."""

    value: int
    size: int
    blocks: list[int] = field(default_factory=list)
    """Ours to free; readable once no load is open."""
    loading: int | None = None
    loaded_from: int = -1
    """Superblock of the last load."""
    host: int | None = None
    """Found in the host tier by this number, if it is still there."""
    storing: int | None = None
    fetching: tuple[int, int] | None = None
    """(ticket, superblock)"""

    @property
    def key(self) -> bytes:
        return chain_key(bytes(KEY_BYTES), (self.value,))


class Tiers(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.pool = BlockPool(NUM_BLOCKS)
        self.cache = KVCache(KV, NUM_BLOCKS, "cpu")
        self.host = HostPool(NUM_SUPERBLOCKS)
        self.memory = HostMemory(LAYOUT, NUM_SUPERBLOCKS, verify=True)
        size = NUM_FILES * (LAYOUT.num_bytes + 200)
        self.disk = DiskTier(Path(self.folder.name), LAYOUT, self.memory, size)
        self.engines = (ManualCopyEngine(), ManualCopyEngine())
        self.now = 0.0
        self.transfers = Transfers(
            self.pool,
            self.host,
            TierCopies(self.cache, self.memory),
            self.engines[0],
            disk=self.disk,
            disk_engine=self.engines[1],
            limits=LIMITS,
            clock=lambda: self.now,
        )
        self.segments: list[Segment] = []
        self.saving: dict[int, int] = {}
        """Segment's value -> ticket."""
        self.next_value = 1
        self.expected: set[int] = set()
        """Tickets that must still be answered."""
        self.rotten: set[int] = set()
        """Superblocks in whose bytes a bit was turned."""
        self.poisoned_blocks: set[int] = set()
        self.poisoned_slots: set[int] = set()

    # -- owners ------------------------------------------------------------------------------------

    @precondition(lambda self: self.pool.num_free >= LAYOUT.blocks)
    @rule(size=st.sampled_from([1, 2, 3, 3]))
    def compute(self, size: int) -> None:
        segment = Segment(self.next_value, size, self._allocate(size))
        self.next_value += 1
        self._write(segment)
        self.segments.append(segment)

    @precondition(lambda self: self._some(self._storable))
    @rule(data=st.data())
    def store(self, data: st.DataObject) -> None:
        self._store(self._choose(data, self._storable))

    def _store(self, segment: Segment) -> None:
        superblock = self._reserve()
        if superblock is None:
            return
        segment.storing = self._ask(self.transfers.store(segment.blocks, superblock))
        segment.host = superblock
        self.host.free([superblock])

    @precondition(lambda self: self._some(self._loadable))
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        self._load(self._choose(data, self._loadable))

    def _load(self, segment: Segment) -> None:
        assert segment.host is not None
        segment.blocks = self._allocate(segment.size)
        segment.loaded_from = segment.host
        self.cache.poison(segment.blocks)
        segment.loading = self._ask(self.transfers.load(segment.host, segment.blocks))

    @precondition(lambda self: self.transfers._unstarted)
    @rule()
    def start_loads(self) -> None:
        self.transfers.start_loads()

    @precondition(lambda self: self._some(self._sound))
    @rule(data=st.data())
    def stream(self, data: st.DataObject) -> None:
        """Joined at once: the manual engine ends whatever is oldest until it is this one."""
        segment = self._choose(data, self._sound)
        assert segment.host is not None
        into = torch.full((2, 1, segment.size * 2, 2), float("nan"))
        ticket = self.transfers.stream([segment.host], 1, into)
        self.transfers.join(ticket)
        assert (into == segment.value).all()

    @precondition(lambda self: self._some(self._savable))
    @rule(data=st.data())
    def save(self, data: st.DataObject) -> None:
        self._save(self._choose(data, self._savable))

    def _save(self, segment: Segment) -> None:
        assert segment.host is not None
        ticket = self.transfers.save(segment.host, segment.key)
        self.saving[segment.value] = self._ask(ticket)

    @precondition(lambda self: self._some(self._fetchable))
    @rule(data=st.data())
    def fetch(self, data: st.DataObject) -> None:
        self._fetch(self._choose(data, self._fetchable))

    def _fetch(self, segment: Segment) -> None:
        superblock = self._reserve()
        if superblock is not None:
            ticket = self._ask(self.transfers.fetch(segment.key, superblock))
            segment.fetching = (ticket, superblock)

    @precondition(lambda self: self._some(lambda s: bool(s.blocks)))
    @rule(data=st.data())
    def leave_device(self, data: st.DataObject) -> None:
        """Also while it is loaded or stored: an abort, a preemption, an eviction."""
        self._leave_device(self._choose(data, lambda s: bool(s.blocks)))

    def _leave_device(self, segment: Segment) -> None:
        self.pool.free(segment.blocks)
        segment.blocks, segment.loading = [], None

    @precondition(lambda self: self._some(self._in_host))
    @rule(data=st.data())
    def leave_host(self, data: st.DataObject) -> None:
        segment = self._choose(data, self._in_host)
        assert segment.host is not None
        self.host.drop(segment.host)
        segment.host = None

    @precondition(lambda self: self._some(lambda s: s.loading is not None))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        segment = self._choose(data, lambda s: s.loading is not None)
        assert segment.loading is not None
        self.transfers.cancel(segment.loading)
        self.expected.discard(segment.loading)
        self.pool.free(segment.blocks)
        segment.blocks, segment.loading = [], None

    @precondition(lambda self: self._some(lambda s: s.storing is not None or s.loading is not None))
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """With a copy under way, else there is nothing to it."""
        busy = [s for s in self.segments if s.storing is not None or s.loading is not None]
        self._forget(data.draw(st.sampled_from(busy)))

    @precondition(lambda self: self.transfers.num_open > 2)
    @rule()
    def reset(self) -> None:
        self.transfers.reset()
        for segment in list(self.segments):
            self._forget(segment)

    @precondition(lambda self: self.segments)
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        """One segment's next step on its way through all tiers and back. Hypothesis leaves some
        rules out of every run; without this one, few runs come that far."""
        segment = self._choose(data, lambda s: True)
        fetching = None if segment.fetching is None else segment.fetching[0]
        mine = {segment.loading, segment.storing, fetching, self.saving.get(segment.value)}
        running = [(engine, ticket) for engine, ticket in self._running() if ticket in mine]
        if running:
            running[0][0].finish(running[0][1])
        elif mine != {None}:
            self.poll()
        elif self._storable(segment):
            self._store(segment)
        elif self._savable(segment):
            self._save(segment)
        elif segment.blocks:
            self._leave_device(segment)
        elif self._loadable(segment):
            self._load(segment)
        elif self._fetchable(segment):
            self._fetch(segment)

    # -- engines and time --------------------------------------------------------------------------

    @precondition(lambda self: self._running())
    @rule(data=st.data(), polled=st.booleans())
    def finish(self, data: st.DataObject, polled: bool) -> None:
        engine, ticket = data.draw(st.sampled_from(self._running()))
        engine.finish(ticket)
        if polled:
            self.poll()

    @precondition(lambda self: self._running())
    @rule()
    def finish_all(self) -> None:
        for engine, ticket in self._running():
            engine.finish(ticket)
        self.poll()

    @precondition(lambda self: self._running())
    @rule(data=st.data(), spoil=st.booleans())
    def fail(self, data: st.DataObject, spoil: bool) -> None:
        """A copy that fails may have written half of it."""
        engine, ticket = data.draw(st.sampled_from(self._running()))
        work = engine.under_way[ticket]

        def spoil_it() -> None:
            with contextlib.suppress(CopyError):
                work.run()

        engine.fail(ticket, after=spoil_it if spoil and engine is self.engines[0] else None)

    @precondition(lambda self: self._some(self._sound) and not self._is_saving())
    @rule(data=st.data())
    def rot(self, data: st.DataObject) -> None:
        """A bit of host memory turns, but not of what is being saved: the file's own digest would
        cover the wrong bit."""
        segment = self._choose(data, self._sound)
        assert segment.host is not None
        self.memory.raw(self.host.slot(segment.host))[0] ^= 4
        self.rotten.add(segment.host)

    @precondition(lambda self: self.disk.stats.files)
    @rule(data=st.data())
    def spoil_file(self, data: st.DataObject) -> None:
        file = data.draw(st.sampled_from(sorted(Path(self.folder.name).glob("*.kv"))))
        content = bytearray(file.read_bytes() or b"?")
        if data.draw(st.booleans()):
            file.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
        else:
            content[data.draw(st.integers(0, len(content) - 1))] ^= 1
            file.write_bytes(content)

    @precondition(lambda self: self.transfers.num_open)
    @rule(seconds=st.sampled_from([0.5, 6.0, 25.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.expected or self.transfers.num_open)
    @rule()
    def poll(self) -> None:
        for answer in self.transfers.poll():
            self.expected.remove(answer.ticket)
            self.saving = {v: t for v, t in self.saving.items() if t != answer.ticket}
            self._hear(answer)

    # -- what must hold ----------------------------------------------------------------------------

    @invariant()
    def books_agree(self) -> None:
        self.pool.check_invariants()
        self.host.check_invariants()
        self.disk.check_invariants()
        self.transfers.check_invariants()
        held = self.transfers.held_blocks()
        owned = {block: 1 for s in self.segments for block in s.blocks}
        for block in range(NUM_BLOCKS):
            assert self.pool.ref_count(block) == owned.get(block, 0) + held.get(block, 0)

    @invariant()
    def what_is_readable_is_right(self) -> None:
        for segment in self.segments:
            if segment.blocks and segment.loading is None:
                for block in segment.blocks:
                    assert not self.transfers.is_being_written(block)
                    keys, values = self.cache.layer_views(block * 2, 2)
                    assert all((t == segment.value).all() for t in (*keys, *values))
            if self._in_host(segment) and segment.host not in self.rotten:
                assert segment.host is not None
                row = self.memory.superblocks[self.host.slot(segment.host)]
                assert (row[:, :, :, : 2 * segment.size] == segment.value).all()

    @invariant()
    def freed_memory_stays_untouched(self) -> None:
        free = {b for b in range(NUM_BLOCKS) if self.pool.ref_count(b) == 0}
        for block in self.poisoned_blocks & free:
            assert self.cache.view(0, block, 2)[0].isnan().all(), "a freed block was written"
            assert self.cache.view(1, block, 2)[1].isnan().all(), "a freed block was written"
        self.cache.poison(sorted(free - self.poisoned_blocks))
        self.poisoned_blocks = free
        slots = set(self.host._free_slots)
        for slot in self.poisoned_slots & slots:
            assert self.memory.superblocks[slot].isnan().all(), "a freed superblock was written"
        self.memory.poison(slots - self.poisoned_slots)
        self.poisoned_slots = slots

    def teardown(self) -> None:
        """Nothing is stuck and nothing leaks, whatever is still open."""
        if not hasattr(self, "folder"):
            return
        while self.transfers.num_open or self.expected:
            before = (self.transfers.num_open, len(self.expected))
            self.transfers.start_loads()
            for engine in self.engines:
                for ticket in list(engine.under_way):
                    engine.finish(ticket)
            self.poll()
            assert (self.transfers.num_open, len(self.expected)) < before, "somebody is stuck"
        for segment in list(self.segments):
            self._forget(segment)
        assert self.pool.num_free == NUM_BLOCKS
        assert self.host.num_used == 0
        assert self.host.num_free + self.host.num_cached == NUM_SUPERBLOCKS
        assert self.transfers.oldest_age_s == 0
        self.freed_memory_stays_untouched()
        assert self.transfers.close() == 0
        self.disk.close()
        self.folder.cleanup()

    # -- helpers -----------------------------------------------------------------------------------

    def _allocate(self, count: int) -> list[int]:
        return self.pool.allocate(count, owner=0, after=None, reach=count)

    def _write(self, segment: Segment) -> None:
        slots = torch.tensor([b * 2 + i for b in segment.blocks for i in (0, 1)])
        numbers = torch.full((len(slots), 1, 2), float(segment.value))
        for layer in range(KV.num_layers):
            self.cache.write(layer, slots, numbers, numbers)

    def _ask(self, ticket: int) -> int:
        self.expected.add(ticket)
        return ticket

    def _choose(self, data: st.DataObject, wanted: Callable[[Segment], bool]) -> Segment:
        return data.draw(st.sampled_from([s for s in self.segments if wanted(s)]))

    def _some(self, wanted: Callable[[Segment], bool]) -> bool:
        return any(wanted(segment) for segment in self.segments)

    def _running(self) -> list[tuple[ManualCopyEngine, int]]:
        return [(engine, ticket) for engine in self.engines for ticket in engine.under_way]

    def _in_host(self, segment: Segment) -> bool:
        return segment.host is not None and self.host.filled(segment.host) == segment.size

    def _sound(self, segment: Segment) -> bool:
        return self._in_host(segment) and segment.host not in self.rotten

    def _storable(self, segment: Segment) -> bool:
        free = segment.storing is None and not self._in_host(segment)
        return bool(segment.blocks) and segment.loading is None and free

    def _loadable(self, segment: Segment) -> bool:
        room = self.pool.num_free >= segment.size
        return not segment.blocks and self._in_host(segment) and room

    def _is_saving(self) -> bool:
        """Also when the owner was told of a deadline and the copy has not ended."""
        return bool(self.saving or self.engines[1].under_way)

    def _savable(self, segment: Segment) -> bool:
        full = segment.size == LAYOUT.blocks
        new = segment.key not in self.disk and segment.value not in self.saving
        return full and self._sound(segment) and new

    def _fetchable(self, segment: Segment) -> bool:
        idle = segment.fetching is None and segment.storing is None
        return idle and not self._in_host(segment) and segment.key in self.disk

    def _reserve(self) -> int | None:
        reserved = self.host.reserve(1)
        if reserved is None:
            assert self.host.num_available == 0
            return None
        for segment in self.segments:
            if segment.host in reserved.evicted:
                segment.host = None
        self.memory.poison([self.host.slot(reserved.superblocks[0])])
        return reserved.superblocks[0]

    def _forget(self, segment: Segment) -> None:
        self.pool.free(segment.blocks)
        if segment.host is not None:
            self.host.drop(segment.host)
        if segment.fetching is not None:
            self.host.free([segment.fetching[1]])
        self.segments.remove(segment)

    def _hear(self, answer: Completion) -> None:
        assert answer.cause in (*(None, "fault", DAMAGED, DEADLINE, RESET, MISSING, BROKEN),), (
            answer.cause
        )
        for segment in self._owners(answer):
            if answer.direction is Direction.LOAD:
                segment.loading = None
                if not answer.ok:
                    assert segment.loaded_from in self.rotten or answer.cause != DAMAGED
                    self.pool.free(segment.blocks)
                    segment.blocks = []
                    if answer.cause == DAMAGED and segment.host is not None:
                        self.host.drop(segment.host)
                        segment.host = None
            elif answer.direction is Direction.STORE:
                segment.storing = None
                if not answer.ok:
                    segment.host = None
            elif answer.direction is Direction.FETCH and segment.fetching is not None:
                superblock = segment.fetching[1]
                segment.fetching = None
                segment.host = superblock if answer.ok else None
                self.host.free([superblock])

    def _owners(self, answer: Completion) -> Iterator[Segment]:
        for segment in self.segments:
            fetching = segment.fetching[0] if segment.fetching else None
            if answer.ticket in (segment.loading, segment.storing, fetching):
                yield segment


_QUICK = settings(
    max_examples=40,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def test_tiers_in_any_order() -> None:
    run_state_machine_as_test(Tiers, settings=_QUICK)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_tiers_in_any_order_for_long() -> None:
    """10⁵ steps: hypothesis ends many runs early."""
    run_state_machine_as_test(
        Tiers, settings=settings(_QUICK, max_examples=800, stateful_step_count=200)
    )
