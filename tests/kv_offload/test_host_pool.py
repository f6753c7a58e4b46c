"""Host superblocks: accounting, eviction, geometry and memory."""

from __future__ import annotations

import threading

import psutil
import pytest
import torch

from kv_offload.host_memory import HostMemory, HostMemoryError, superblocks_in_budget
from kv_offload.host_pool import HostPool, HostPoolError
from kv_offload.layout import KVLayout, LayoutError
from kv_offload.superblock import PAGE_BYTES, SuperblockLayout, least_gib
from tests.kv_offload.tiers import KV, LAYOUT


def _cached(pool: HostPool, count: int) -> tuple[int, ...]:
    """Committed superblocks that nobody references, the first the oldest."""
    reserved = pool.reserve(count)
    assert reserved is not None
    for superblock in reserved.superblocks:
        pool.commit(superblock, 4)
        pool.free([superblock])
    return reserved.superblocks


def test_least_recently_used_goes_first_and_is_named() -> None:
    pool = HostPool(4)
    a, b, c, d = _cached(pool, 4)
    pool.touch([a])
    pool.share([b])
    reserved = pool.reserve(2)
    assert reserved is not None
    assert reserved.evicted == (c, d)
    assert [pool.filled(s) for s in (a, b, c, d)] == [4, 4, 0, 0]
    assert pool.stats.evictions == 2
    pool.check_invariants()


def test_a_reservation_is_all_or_nothing() -> None:
    """Bug 10: a full host tier refuses; it neither grows nor breaks."""
    pool = HostPool(3)
    (a,) = _cached(pool, 1)
    held = pool.reserve(1)
    assert held is not None
    assert pool.reserve(3) is None
    assert pool.filled(a) == 4
    assert pool.num_available == 2
    pool.free(held.superblocks)
    assert pool.reserve(3) is not None
    assert pool.reserve(1) is None


def test_numbers_are_never_given_again() -> None:
    pool = HostPool(1)
    (old,) = _cached(pool, 1)
    reserved = pool.reserve(1)
    assert reserved is not None
    assert reserved.evicted == (old,)
    assert old not in reserved.superblocks
    assert pool.filled(old) == 0
    assert pool.ref_count(old) == 0
    pool.drop(old)
    with pytest.raises(HostPoolError, match=f"superblock {old} is not there"):
        pool.share([old])
    with pytest.raises(HostPoolError, match=f"superblock {old} is not there"):
        pool.slot(old)


def test_what_was_never_filled_is_not_kept() -> None:
    pool = HostPool(2)
    reserved = pool.reserve(2)
    assert reserved is not None
    pool.free(reserved.superblocks)
    assert (pool.num_free, pool.num_cached) == (2, 0)


def test_dropped_kv_is_freed_with_its_last_reference() -> None:
    pool = HostPool(2)
    a, b = _cached(pool, 2)
    pool.share([a])
    pool.drop(a)
    pool.drop(b)
    assert (pool.num_free, pool.num_used) == (1, 1)
    pool.free([a])
    assert pool.num_free == 2


def test_one_reservation_takes_neighbouring_slots() -> None:
    pool = HostPool(8)
    reserved = pool.reserve(5)
    assert reserved is not None
    assert [pool.slot(s) for s in reserved.superblocks] == [0, 1, 2, 3, 4]


def test_misuse_is_loud() -> None:
    pool = HostPool(2)
    reserved = pool.reserve(1)
    assert reserved is not None
    (a,) = reserved.superblocks
    with pytest.raises(ValueError, match="committed with 0 blocks"):
        pool.commit(a, 0)
    pool.commit(a, 2)
    with pytest.raises(HostPoolError, match="committed twice"):
        pool.commit(a, 2)
    pool.free([a])
    with pytest.raises(HostPoolError, match="freed twice"):
        pool.free([a])
    with pytest.raises(ValueError, match="num_superblocks must be at least 1"):
        HostPool(0)


@pytest.mark.parametrize("block_size", [1, 16, 64, 256])
def test_geometry_of_real_models(block_size: int) -> None:
    """SmolLM2-135M in fp32: 30 layers, 3 KV heads of 64, 46,080 bytes per token."""
    layout = SuperblockLayout(KVLayout(30, 3, 64, block_size))
    assert layout.num_bytes == 256 * 46_080
    assert layout.num_bytes % layout.stride_bytes == 0
    assert layout.blocks == 256 // block_size
    assert layout.superblocks_in(2**30) == 91


def test_blocks_must_fill_superblocks() -> None:
    with pytest.raises(LayoutError, match="block_size is 48; it must divide the 256 tokens"):
        SuperblockLayout(KVLayout(1, 1, 8, 48))
    with pytest.raises(LayoutError, match="block_size is 512"):
        SuperblockLayout(KVLayout(1, 1, 8, 512))


def test_fingerprints_differ_with_the_meaning_of_the_bytes() -> None:
    layouts = [
        LAYOUT,
        SuperblockLayout(KV, tokens=32),
        SuperblockLayout(KV, tokens=16, head_major=False),
        SuperblockLayout(KVLayout(3, 4, 2, block_size=4), tokens=16),
        SuperblockLayout(KVLayout(3, 2, 4, block_size=4, windows=(8, None, None)), tokens=16),
        SuperblockLayout(KVLayout(3, 2, 8, block_size=4, dtype="bfloat16"), tokens=16),
    ]
    assert len({layout.fingerprint() for layout in layouts}) == len(layouts)
    # Device blocks of another size hold the same superblocks.
    other = SuperblockLayout(KVLayout(3, 2, 4, block_size=8), tokens=16)
    assert other.fingerprint() == LAYOUT.fingerprint()


@pytest.mark.parametrize("head_major", [False, True])
def test_memory_is_addressed_alike_in_both_orders(head_major: bool) -> None:
    layout = SuperblockLayout(KV, tokens=16, head_major=head_major)
    memory = HostMemory(layout, 3)
    memory.superblocks.normal_()
    part = memory.superblocks[1, 2]
    keys, values = (p if head_major else p.transpose(0, 1) for p in part)
    assert torch.equal(memory.keys(1, 2), keys)
    assert torch.equal(memory.values(1, 2), values)
    assert memory.keys(1, 2).shape == (2, 16, 4)
    raw = torch.frombuffer(memory.raw(1), dtype=torch.float32)
    assert torch.equal(raw, memory.superblocks[1].reshape(-1))
    memory.poison([1])
    assert memory.superblocks[1].isnan().all()
    assert not memory.superblocks[[0, 2]].isnan().any()
    assert memory.superblocks.data_ptr() % PAGE_BYTES == 0
    assert memory.keys(1, 0).data_ptr() % PAGE_BYTES == 0
    memory.close()


def test_a_budget_is_never_exceeded() -> None:
    layout = SuperblockLayout(KVLayout(30, 3, 64, 16))
    count = superblocks_in_budget(layout, 2**30)
    assert HostMemory(layout, count).num_bytes <= 2**30 < HostMemory(layout, count + 1).num_bytes
    with pytest.raises(
        HostMemoryError,
        match=r"256 tokens of this model's KV take 11,796,480\. Use --host-kv-gib 0\.011 or more",
    ):
        superblocks_in_budget(layout, 11_796_479)
    assert superblocks_in_budget(layout, int(0.011 * 2**30)) == 1


def test_gib_in_messages_are_enough_and_no_more() -> None:
    for num_bytes in (1, 3000, 11_796_480, 2**30, 5 * 2**29, 3 * 2**30 + 1):
        said = float(least_gib(num_bytes))
        assert num_bytes <= said * 2**30 < num_bytes + 110_000
    assert least_gib(20 * 2**30) == "20"


def test_unused_capacity_takes_no_memory() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    layout = SuperblockLayout(KVLayout(30, 3, 64, 16))
    memory = HostMemory(layout, 500)
    memory.superblocks[3].fill_(1.0)
    assert memory.num_bytes > 5e9
    assert process.memory_info().rss - before < 50e6


class _Pinner:
    def __init__(self, fail_at: int | None = None) -> None:
        self.pinned: dict[int, int] = {}
        self.gate = threading.Event()
        self.calls = 0
        self._fail_at = fail_at

    def pin(self, address: int, num_bytes: int) -> None:
        self.gate.wait(10)
        self.calls += 1
        if self.calls == self._fail_at:
            raise RuntimeError("out of lockable memory")
        self.pinned[address] = num_bytes

    def unpin(self, address: int) -> None:
        del self.pinned[address]


def test_memory_is_pinned_in_pieces_while_it_is_used() -> None:
    pinner = _Pinner()
    memory = HostMemory(LAYOUT, 7, pinner=pinner, piece_bytes=2 * LAYOUT.stride_bytes + 1)
    memory.superblocks[0].fill_(1.0)
    assert memory.pinned_bytes == 0
    pinner.gate.set()
    memory._pinning._thread.join(10)
    assert memory.pinned_bytes == memory.num_bytes
    pieces = sorted(pinner.pinned.items())
    start = memory.superblocks.data_ptr()
    assert [size for _, size in pieces] == [8192, 8192, 8192, 4096]
    assert [address - start for address, _ in pieces] == [0, 8192, 16384, 24576]
    memory.close()
    assert pinner.pinned == {}
    assert memory.pinned_bytes == 0


def test_memory_that_cannot_be_pinned_is_used_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    pinner = _Pinner(fail_at=3)
    pinner.gate.set()
    memory = HostMemory(LAYOUT, 4, pinner=pinner, piece_bytes=1)
    memory._pinning._thread.join(10)
    assert memory.pinned_bytes == 2 * LAYOUT.stride_bytes
    assert pinner.calls == 3
    assert "8192 of 16384 bytes of the host tier are pinned" in caplog.text
    memory.close()
    assert pinner.pinned == {}


def test_pinning_stops_when_the_memory_is_closed() -> None:
    pinner = _Pinner()
    memory = HostMemory(LAYOUT, 4, pinner=pinner, piece_bytes=1)
    threading.Timer(0.05, pinner.gate.set).start()
    memory.close()
    assert pinner.pinned == {}
    assert pinner.calls <= 1
