"""What is brought back, when that pays, and what becomes of it when copies fail."""

from __future__ import annotations

from pathlib import Path

from kv_offload.host_pool import HostPool
from kv_offload.kv_manager import KVManager
from kv_offload.radix_cache import CacheKey
from kv_offload.tickets import Direction
from tests.kv_offload.tiers import LAYOUT, Rig

KEY = CacheKey()
SIZE, SUPERBLOCK = 4, 16


class Cost:
    def __init__(self, seconds_per_token: float = 1.0) -> None:
        self.seconds_per_token = seconds_per_token

    def compute_s(self, start: int, end: int) -> float:
        return (end - start) * self.seconds_per_token


class Tiers:
    """A KVManager over a Rig, whose copies end by hand."""

    def __init__(self, folder: Path | None = None, superblocks: int = 8) -> None:
        self.kv = KVManager(
            32,
            SIZE,
            prefix_caching=True,
            host=HostPool(superblocks),
            chunk_tokens=8,
            superblock_tokens=SUPERBLOCK,
        )
        assert self.kv.cold is not None
        rig = self.rig = Rig(num_blocks=32, num_superblocks=superblocks, folder=folder)
        rig.transfers._holds._blocks = self.kv.copied_blocks
        rig.transfers._holds._host = rig.transfers._host = self.kv.cold.host
        self.cost = Cost()
        self.kv.connect(rig.transfers, self.cost, LAYOUT.kv.bytes_per_token)
        assert self.kv.tiers is not None
        self.kv.tiers.worth.least_tokens = 2

    def go(self, times: int = 1) -> list[tuple[int, int]]:
        """Copies end; (owner, tokens) of loads that ended."""
        ended = []
        for _ in range(times):
            for engine in (self.rig.engine, self.rig.disk_engine):
                for ticket in list(engine.under_way):
                    engine.finish(ticket)
            ended += [(loaded.owner, loaded.tokens) for loaded in self.kv.poll()]
            self.kv.check_invariants()
        return ended

    def prompt(self, owner: int, count: int) -> None:
        """Computed from nothing, and ended."""
        assert self.kv.look_up(owner, KEY, range(count), count - 1) == 0
        assert self.kv.reserve(owner, 0, count, reach_tokens=count) is not None
        self.kv.commit(owner, list(range(count)), count)
        self.kv.free(owner)

    def start(self, owner: int, count: int) -> int:
        found = self.kv.look_up(owner, KEY, range(count), count - 1)
        if self.kv.wants_load(owner):
            assert self.kv.load(owner, range(count), reach_tokens=count)
            self.kv.start_loads()
        return found


def test_it_is_brought_only_when_that_is_faster() -> None:
    tiers = Tiers()
    tiers.prompt(1, 60)
    tiers.go(4)
    tiers.kv.cache.evict(tiers.kv.cache.num_idle)
    look = lambda: tiers.kv.look_up(2, KEY, range(60), 59)  # noqa: E731
    assert look() == 48
    tiers.kv.free(2)
    tiers.cost.seconds_per_token = 1e-9
    assert look() == 0, "computing is faster than any copy"
    tiers.kv.free(2)
    tiers.cost.seconds_per_token = 1.0
    tiers.kv.tiers.worth.least_tokens = 49  # type: ignore[union-attr]
    assert look() == 0, "too few tokens to wait for"
    tiers.kv.free(2)


def test_rates_are_those_of_copies_that_were_made() -> None:
    tiers = Tiers()
    transfers = tiers.rig.transfers
    guess = transfers.estimate_s(Direction.LOAD, 10**6)
    tiers.rig.engine.busy_seconds += 100.0
    tiers.prompt(1, 60)
    tiers.go(4)
    assert transfers.estimate_s(Direction.LOAD, 10**6) > 1000 * guess
    assert transfers.estimate_s(Direction.FETCH, 10**6) > 0


def test_it_may_begin_and_end_within_a_superblock() -> None:
    """KVO-04: a prompt that is whole superblocks still computes its last token."""
    tiers = Tiers()
    tiers.prompt(1, 64)
    tiers.go(8)
    cache = tiers.kv.cache
    cache.evict(cache.num_idle - 6)
    assert tiers.start(2, 64) == 60
    assert tiers.go(2) == [(2, 60)]
    assert tiers.kv.held_tokens(2) == 60
    sources = tiers.kv.sources(2)
    assert (sources.device, sources.host, sources.disk) == (24, 36, 0)
    tiers.kv.free(2)
    assert tiers.kv.pool.num_free + cache.num_idle == 32


def test_what_arrived_before_the_first_failure_is_used() -> None:
    for bad in range(3):
        tiers = Tiers()
        tiers.prompt(1, 60)
        tiers.go(4)
        tiers.kv.cache.evict(tiers.kv.cache.num_idle)
        assert tiers.start(2, 60) == 48
        tickets = sorted(tiers.rig.engine.under_way)
        tiers.rig.engine.fail(tickets[bad])
        assert tiers.go(2) == [(2, bad * 16)]
        assert tiers.kv.held_tokens(2) == bad * 16
        tiers.kv.free(2)
        assert tiers.start(3, 60) == bad * 16, "what could not be brought is not tried again"
        tiers.kv.free(3)
        tiers.go(2)
        assert tiers.rig.transfers.num_open == 0


def test_a_late_copy_keeps_its_memory_and_nobody_waits(tmp_path: Path) -> None:
    tiers = Tiers()
    tiers.prompt(1, 60)
    tiers.go(4)
    tiers.kv.cache.evict(tiers.kv.cache.num_idle)
    assert tiers.start(2, 60) == 48
    tiers.rig.engine.finish(min(tiers.rig.engine.under_way))
    assert tiers.kv.poll() == []
    tiers.rig.now += 60
    (loaded,) = tiers.kv.poll()
    assert (loaded.owner, loaded.tokens) == (2, 16)
    assert tiers.kv.held_blocks(2) == 4
    assert tiers.kv.cache.num_held == 8, "the others may still be written"
    assert not tiers.kv.copying
    assert tiers.start(3, 60) == 0, "nobody goes that way while something is stuck there"
    tiers.kv.check_invariants()
    tiers.kv.free(2)
    tiers.kv.free(3)
    tiers.go()
    assert tiers.kv.pool.num_free + tiers.kv.cache.num_idle == 32


def test_host_and_disk_and_host_again(tmp_path: Path) -> None:
    """The disk holds what the host gave up, in the middle of a prompt or at its end."""
    tiers = Tiers(tmp_path)
    tiers.prompt(1, 64)
    tiers.go(8)
    assert tiers.rig.disk is not None
    assert tiers.rig.disk.stats.files == 4
    assert tiers.kv.cold is not None
    host = tiers.kv.cold.cache
    for holes in ([3], [1], [0, 2]):
        tiers.kv.cache.evict(tiers.kv.cache.num_idle)
        path = [host.root(KEY)]
        for index in range(4):
            path.append(host.child(path[-1], tuple(range(16 * index, 16 * index + 16))))
        for hole in sorted(holes, reverse=True):
            host.discard(path[hole + 1])
        assert tiers.start(2, 70) == 64
        assert tiers.go(4) == [(2, 64)]
        assert tiers.kv.sources(2).disk == 16 * len(holes)
        tiers.kv.free(2)
    tiers.rig.disk.close()


def test_what_is_kept_never_takes_promised_room() -> None:
    """Whatever is stored or brought meanwhile, a large sequence gets all that it was promised."""
    tiers = Tiers(superblocks=10)
    cold = tiers.kv.cold
    assert cold is not None
    cold.promise(99, 9 * SUPERBLOCK)
    tiers.prompt(1, 64)
    tiers.go(8)
    assert cold.host.num_cached == 4, "room is used while nobody wants it"
    tiers.kv.cache.evict(tiers.kv.cache.num_idle)
    assert tiers.start(2, 64) == 60
    assert len(tiers.rig.engine.under_way) == 1, "one at a time can be taken from the promise"
    blocks = list(range(9 * SUPERBLOCK // SIZE))
    assert cold.push(99, blocks) is not None
    tiers.go(8)
    assert tiers.kv.held_tokens(2) < 64
    tiers.kv.free(2)
    cold.free(99)
    tiers.go()
    assert cold.host.num_used == 0
