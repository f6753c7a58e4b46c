"""Tickets: order, fences, deadlines, failures, and that nothing is reused too early."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kv_offload.copy_engine import ThreadCopyEngine
from kv_offload.copy_manual import ManualCopyEngine
from kv_offload.disk_key import KEY_BYTES
from kv_offload.tickets import DEADLINE, CopyError, Direction, TransferError, Work
from kv_offload.transfer import TransferLimits
from tests.kv_offload.tiers import LAYOUT, Rig


def test_kv_goes_out_and_comes_back() -> None:
    rig = Rig(engine=ThreadCopyEngine())
    blocks = rig.blocks(4)
    before = rig.content(blocks)
    superblock = rig.stored(blocks)
    rig.cache.poison(blocks)
    target = rig.blocks(4)
    rig.transfers.join(rig.transfers.load(superblock, target))
    assert torch.equal(rig.content(target), before)
    assert rig.transfers.num_open == 0
    assert rig.transfers.poll() == []
    assert rig.transfers.bytes_copied[Direction.LOAD] == before.nbytes
    assert rig.transfers.close() == 0


def test_part_of_a_superblock_is_loaded() -> None:
    rig = Rig()
    blocks = rig.blocks(3)
    before = rig.content(blocks[1:])
    superblock = rig.stored(blocks)
    target = rig.blocks(2)
    rig.transfers.join(rig.transfers.load(superblock, target, first=1))
    assert torch.equal(rig.content(target), before)


def test_blocks_freed_while_they_are_stored_are_not_given_away() -> None:
    """Bug 2: slots freed during a device-to-host copy."""
    rig = Rig()
    blocks = rig.blocks(4)
    superblock = rig.superblock()
    rig.transfers.store(blocks, superblock)
    rig.pool.free(blocks)
    assert rig.pool.num_free == 20
    assert not set(rig.blocks(20)) & set(blocks)
    rig.engine.finish(0)
    rig.transfers.poll()
    assert rig.pool.num_free == 4


def test_blocks_freed_while_they_are_loaded_are_not_given_away() -> None:
    rig = Rig()
    superblock = rig.stored(rig.blocks(4))
    target = rig.blocks(4)
    ticket = rig.transfers.load(superblock, target)
    rig.transfers.start_loads()
    assert all(rig.transfers.is_being_written(block) for block in target)
    rig.pool.free(target)
    rig.host.free([superblock])
    rig.host.drop(superblock)
    assert not set(rig.blocks(16)) & set(target)
    assert rig.host.num_free == 3
    rig.engine.finish(ticket)
    (answer,) = rig.transfers.poll()
    assert answer.ok
    assert rig.pool.num_free == 4
    assert rig.host.num_free == 4
    assert not any(rig.transfers.is_being_written(block) for block in target)


def test_what_is_not_stored_yet_cannot_be_loaded() -> None:
    """Bug 1: both directions are fenced."""
    rig = Rig()
    blocks, superblock = rig.blocks(4), rig.superblock()
    rig.transfers.store(blocks, superblock)
    with pytest.raises(TransferError, match="holds 0 blocks; 0 to 4"):
        rig.transfers.load(superblock, rig.blocks(4))
    with pytest.raises(TransferError, match="hold no KV"):
        rig.transfers.stream([superblock], 0, torch.empty(2, 2, 16, 4))
    with pytest.raises(TransferError, match="filled, or being filled"):
        rig.transfers.store(rig.blocks(4), superblock)


def test_blocks_of_an_open_copy_are_neither_overwritten_nor_stored() -> None:
    rig = Rig()
    superblock = rig.stored(rig.blocks(4))
    target = rig.blocks(4)
    rig.transfers.load(superblock, target)
    with pytest.raises(TransferError, match="still being loaded"):
        rig.transfers.store(target, rig.superblock())
    with pytest.raises(TransferError, match="has not ended"):
        rig.transfers.load(superblock, target)
    source = rig.blocks(4)
    rig.transfers.store(source, rig.superblock())
    with pytest.raises(TransferError, match="has not ended"):
        rig.transfers.load(superblock, source)


def test_a_failed_copy_gives_everything_back() -> None:
    rig = Rig()
    blocks, superblock = rig.blocks(4), rig.superblock()
    rig.transfers.store(blocks, superblock)
    rig.engine.fail(0, "fault")
    (answer,) = rig.transfers.poll()
    assert (answer.ok, answer.cause) == (False, "fault")
    assert rig.host.filled(superblock) == 0
    assert rig.transfers.failures[Direction.STORE, "fault"] == 1
    rig.host.free([superblock])
    rig.pool.free(blocks)
    assert rig.host.num_free == 4
    assert rig.pool.num_free == 24


def test_a_late_copy_is_answered_once_and_holds_its_memory() -> None:
    """Bug 5: nobody waits without a deadline; and the copy may still be writing."""
    rig = Rig(limits=TransferLimits(urgent_s=10.0))
    superblock = rig.stored(rig.blocks(4))
    target = rig.blocks(4)
    ticket = rig.transfers.load(superblock, target)
    rig.now = 9.0
    assert rig.transfers.poll() == []
    rig.now = 11.0
    (answer,) = rig.transfers.poll()
    assert (answer.ticket, answer.cause, answer.seconds) == (ticket, "deadline", 11.0)
    rig.pool.free(target)
    assert rig.transfers.is_open(ticket)
    assert rig.transfers.oldest_age_s == 11.0
    assert not set(rig.blocks(16)) & set(target)
    rig.engine.finish(ticket)
    assert rig.transfers.poll() == []
    assert rig.pool.num_free == 4
    assert not rig.transfers.is_open(ticket)


def test_a_way_with_a_stuck_copy_is_known(tmp_path: Path) -> None:
    rig = Rig(folder=tmp_path)
    superblock = rig.stored(rig.blocks(4))
    save = rig.transfers.save(superblock, bytes(KEY_BYTES))
    assert not rig.transfers.is_stuck(Direction.FETCH)
    rig.now = 100.0
    rig.transfers.poll()
    assert rig.transfers.is_stuck(Direction.FETCH)
    assert not rig.transfers.is_stuck(Direction.LOAD)
    rig.disk_engine.finish(save)
    rig.transfers.poll()
    assert not rig.transfers.is_stuck(Direction.FETCH)
    assert not Rig().transfers.is_stuck(Direction.FETCH)
    assert rig.disk is not None
    rig.disk.close()


def test_a_late_store_fills_nothing() -> None:
    rig = Rig(limits=TransferLimits(later_s=10.0))
    superblock = rig.superblock()
    ticket = rig.transfers.store(rig.blocks(4), superblock)
    rig.now = 11.0
    assert [a.cause for a in rig.transfers.poll()] == ["deadline"]
    rig.host.free([superblock])
    rig.engine.finish(ticket)
    assert rig.transfers.poll() == []
    assert rig.host.num_free == 4


def test_a_ticket_that_never_began_is_closed_at_its_deadline() -> None:
    rig = Rig(limits=TransferLimits(copying=1, later_s=10.0))
    first = rig.transfers.store(rig.blocks(4), rig.superblock())
    second = rig.transfers.store(rig.blocks(4), rig.superblock())
    assert list(rig.engine.under_way) == [first]
    rig.now = 11.0
    assert [a.ticket for a in rig.transfers.poll()] == [first, second]
    assert rig.transfers.is_open(first)
    assert not rig.transfers.is_open(second)


def test_completions_come_by_ticket_whoever_still_lives() -> None:
    """Bug 3: completions filtered by live request leak blocks."""
    rig = Rig(limits=TransferLimits(copying_for_later=4))
    tickets = [rig.transfers.store(rig.blocks(4), rig.superblock()) for _ in range(3)]
    rig.transfers.cancel(tickets[1])
    for ticket in reversed(tickets):
        rig.engine.finish(ticket)
    assert [a.ticket for a in rig.transfers.poll()] == [tickets[2], tickets[0]]
    assert rig.transfers.num_open == 0
    rig.transfers.cancel(tickets[0])
    rig.transfers.cancel(99)


def test_an_answer_not_yet_polled_can_be_cancelled() -> None:
    rig = Rig()
    ticket = rig.transfers.store(rig.blocks(4), rig.superblock())
    rig.transfers.reset()
    rig.transfers.cancel(ticket)
    assert rig.transfers.poll() == []


def test_a_load_starts_after_what_was_issued_since_it_was_asked_for() -> None:
    """What reads its blocks may be issued between the two."""
    rig, fences = Rig(), iter("abcdef")
    rig.engine.fence = lambda: next(fences)
    started: dict[int, str] = {}
    start = rig.engine.start

    def note(ticket: int, work: Work, after: str) -> None:
        started[ticket] = after
        start(ticket, work, after)

    rig.engine.start = note
    source = rig.blocks(4)
    superblock = rig.stored(source)
    target = rig.blocks(4)
    load = rig.transfers.load(superblock, target)
    store = rig.transfers.store(source, rig.superblock())
    assert list(rig.engine.under_way) == [store]
    rig.transfers.start_loads()
    rig.transfers.start_loads()
    assert started == {0: "a", store: "b", load: "c"}


@pytest.mark.parametrize("how", ["poll", "wait", "settled", "join"])
def test_a_load_that_nobody_starts_starts_with_the_next_look(how: str) -> None:
    rig = Rig()
    superblock = rig.stored(rig.blocks(4))
    load = rig.transfers.load(superblock, rig.blocks(4))
    looks: dict[str, Callable[[], object]] = {
        "poll": rig.transfers.poll,
        "wait": lambda: rig.transfers.wait(1.0),
        "settled": lambda: rig.transfers.settled(load),
        "join": lambda: rig.transfers.join(load),
    }
    looks[how]()
    while rig.transfers.num_open:
        rig.transfers.wait(1.0)
        rig.transfers.poll()
    assert rig.transfers.bytes_copied[Direction.LOAD] == LAYOUT.num_bytes


@pytest.mark.parametrize("how", ["cancel", "reset", "close", "deadline"])
def test_a_load_that_never_starts_gives_everything_back(how: str) -> None:
    rig = Rig(limits=TransferLimits(copying=1))
    superblock = rig.stored(rig.blocks(4))
    load = rig.transfers.load(superblock, rig.blocks(4))
    rig.transfers.check_invariants()
    assert rig.transfers.held_superblocks() == {superblock: 1}
    if how == "cancel":
        rig.transfers.cancel(load)
    elif how == "deadline":
        rig.transfers.store(rig.blocks(1), rig.superblock())
        rig.now = 11.0
        assert [a.cause for a in rig.transfers.poll()] == [DEADLINE]
    else:
        rig.transfers.reset() if how == "reset" else rig.transfers.close()
        assert [a.ticket for a in rig.transfers.poll()] == [load]
    assert not rig.transfers.is_open(load)
    assert superblock not in rig.transfers.held_superblocks()
    assert not rig.engine.under_way or how == "deadline"
    rig.transfers.check_invariants()


def test_what_a_request_waits_for_passes_what_is_only_kept() -> None:
    rig = Rig(limits=TransferLimits(copying=2, copying_for_later=1))
    superblock = rig.stored(rig.blocks(4))
    stores = [rig.transfers.store(rig.blocks(2), rig.superblock()) for _ in range(3)]
    load = rig.transfers.load(superblock, rig.blocks(4))
    rig.transfers.start_loads()
    assert list(rig.engine.under_way) == [stores[0], load]
    rig.engine.finish(load)
    rig.transfers.poll()
    assert list(rig.engine.under_way) == [stores[0]]
    rig.engine.finish(stores[0])
    rig.transfers.poll()
    assert list(rig.engine.under_way) == [stores[1]]


def test_the_engine_is_never_given_more_than_it_takes() -> None:
    """Bug 11: a full queue of the device made each call wait."""
    rig = Rig(num_blocks=100, num_superblocks=40)
    superblock = rig.stored(rig.blocks(1))
    for _ in range(30):
        rig.transfers.load(superblock, rig.blocks(1))
    rig.transfers.start_loads()
    assert len(rig.engine.under_way) == TransferLimits().copying
    while rig.transfers.num_open:
        rig.engine.finish(next(iter(rig.engine.under_way)))
        rig.transfers.poll()
        rig.transfers.check_invariants()


def test_join_passes_the_queue_and_takes_the_answer() -> None:
    rig = Rig(limits=TransferLimits(copying=1))
    superblock = rig.stored(rig.blocks(4))
    first = rig.transfers.load(superblock, rig.blocks(4))
    second = rig.transfers.load(superblock, rig.blocks(4))
    rig.transfers.join(second)
    assert [a.ticket for a in rig.transfers.poll()] == [first]
    with pytest.raises(TransferError, match=f"ticket {second} was answered before"):
        rig.transfers.join(second)


def test_join_raises_what_went_wrong() -> None:
    rig = Rig(limits=TransferLimits(urgent_s=10.0))
    superblock = rig.stored(rig.blocks(4))
    failed = rig.transfers.load(superblock, rig.blocks(4))
    rig.transfers.start_loads()
    rig.engine.fail(failed, "fault")
    with pytest.raises(TransferError, match=f"load {failed} failed: fault"):
        rig.transfers.join(failed)
    late = rig.transfers.load(superblock, rig.blocks(4))
    rig.engine.wait = lambda timeout_s: setattr(rig, "now", rig.now + timeout_s)
    with pytest.raises(TransferError, match=f"load {late} failed: deadline"):
        rig.transfers.join(late)
    assert rig.transfers.stalled_seconds == 10.0


def test_reset_tells_everybody_and_waits_for_the_copies() -> None:
    rig = Rig(limits=TransferLimits(copying=1))
    blocks = rig.blocks(4)
    tickets = [rig.transfers.store(blocks, rig.superblock()) for _ in range(3)]
    rig.transfers.reset()
    assert {a.ticket: a.cause for a in rig.transfers.poll()} == dict.fromkeys(tickets, "reset")
    assert rig.transfers.held_blocks() == dict.fromkeys(blocks, 1)
    rig.engine.finish(tickets[0])
    rig.transfers.poll()
    assert rig.transfers.num_open == 0


def test_closing_ends_what_was_begun() -> None:
    rig = Rig()
    ticket = rig.transfers.store(rig.blocks(4), rig.superblock())
    assert rig.transfers.close() == 0
    assert [(a.ticket, a.cause) for a in rig.transfers.poll()] == [(ticket, "closed")]
    with pytest.raises(TransferError, match="were closed"):
        rig.transfers.store(rig.blocks(4), rig.superblock())


def test_a_disk_that_is_not_there_is_said() -> None:
    rig = Rig()
    with pytest.raises(TransferError, match="no disk tier"):
        rig.transfers.fetch(bytes(KEY_BYTES), rig.superblock())


def test_a_bit_that_turned_is_found() -> None:
    rig = Rig(verify=True)
    superblock = rig.stored(rig.blocks(4))
    rig.memory.raw(rig.host.slot(superblock))[100] ^= 1
    ticket = rig.transfers.load(superblock, rig.blocks(4))
    with pytest.raises(TransferError, match="damaged"):
        rig.transfers.join(ticket)


class _Gate:
    """A Work that waits to be let through."""

    num_bytes = 1

    def __init__(self, error: Exception | None = None) -> None:
        self.let = threading.Event()
        self.error = error

    def run(self) -> None:
        self.let.wait(10)
        if self.error is not None:
            raise self.error


def _all_finished(engine: ThreadCopyEngine, count: int) -> list[tuple[int, str | None]]:
    found: list[tuple[int, str | None]] = []
    for _ in range(100):
        engine.wait(1.0)
        found += engine.finished()
        if len(found) == count:
            return found
    raise AssertionError(f"only {found} ended")


def test_the_thread_copies_beside_its_caller() -> None:
    engine = ThreadCopyEngine()
    works: list[Any] = [_Gate(), _Gate(CopyError("torn")), _Gate(ZeroDivisionError())]
    for ticket, work in enumerate(works):
        engine.start(ticket, work, engine.fence())
    engine.wait(0.01)
    assert engine.finished() == []
    for work in works:
        work.let.set()
    assert _all_finished(engine, 3) == [(0, None), (1, "torn"), (2, "ZeroDivisionError")]
    assert engine.busy_seconds > 0
    engine.close(5.0)
    with pytest.raises(RuntimeError, match="closed"):
        engine.start(3, works[0], None)


def test_a_thread_that_is_stuck_does_not_hold_up_the_end() -> None:
    engine = ThreadCopyEngine()
    work = _Gate()
    engine.start(0, work, None)
    engine.close(0.01)
    work.let.set()


def test_a_waiter_wakes_when_a_copy_ends() -> None:
    engine = ThreadCopyEngine()
    rig = Rig(engine=engine)
    ticket = rig.transfers.store(rig.blocks(4), rig.superblock())
    answers: list[Any] = []
    while not answers:
        rig.transfers.wait(5.0)
        answers = rig.transfers.poll()
    assert [a.ticket for a in answers] == [ticket]
    rig.transfers.wait(5.0)
    rig.transfers.close()


def test_the_manual_engine_stalls_until_told() -> None:
    engine = ManualCopyEngine()
    engine.start(0, _Gate(), None)
    assert engine.finished() == []
    assert list(engine.under_way) == [0]


@pytest.mark.parametrize(
    "module", ["copy_engine", "copy_manual", "disk_tier", "host_pool", "superblock", "transfer"]
)
def test_accounting_needs_no_torch(module: str) -> None:
    code = f"import sys, kv_offload.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("seed", range(3))
def test_random_use_with_a_real_thread(seed: int) -> None:
    """Copies run beside the caller, who frees, poisons and reuses whatever he may."""
    choose = random.Random(seed)
    rig = Rig(engine=ThreadCopyEngine(), num_superblocks=5, verify=True)
    device: list[tuple[list[int], torch.Tensor]] = []
    host: dict[int, torch.Tensor] = {}
    storing: dict[int, tuple[int, torch.Tensor]] = {}
    loading: dict[int, tuple[list[int], torch.Tensor]] = {}
    loads = 0
    for _ in range(300):
        action = choose.choice(["compute", "store", "load", "free", "poll", "poll"])
        if action == "compute" and rig.pool.num_free >= 4:
            blocks = rig.blocks(4)
            rig.cache.poison(blocks)
            rig.cache.storage[:, :, :, [4 * b + i for b in blocks for i in range(4)]] = (
                choose.random()
            )
            device.append((blocks, rig.content(blocks)))
        elif action == "store" and device:
            reserved = rig.host.reserve(1)
            if reserved is not None:
                for gone in reserved.evicted:
                    host.pop(gone, None)
                blocks, content = choose.choice(device)
                ticket = rig.transfers.store(blocks, reserved.superblocks[0])
                rig.host.free(reserved.superblocks)
                storing[ticket] = (reserved.superblocks[0], content)
        elif action == "load" and host and rig.pool.num_free >= 4:
            superblock, content = choose.choice(list(host.items()))
            blocks = rig.blocks(4)
            rig.cache.poison(blocks)
            loading[rig.transfers.load(superblock, blocks)] = (blocks, content)
        elif action == "free" and device:
            rig.pool.free(device.pop(choose.randrange(len(device)))[0])
        elif action == "poll":
            rig.transfers.wait(0.001)
            for answer in rig.transfers.poll():
                assert answer.ok
                if answer.ticket in storing:
                    superblock, content = storing.pop(answer.ticket)
                    host[superblock] = content
                else:
                    loads += 1
                    device.append(loading.pop(answer.ticket))
                    assert torch.equal(rig.content(device[-1][0]), device[-1][1])
        rig.transfers.check_invariants()
    assert loads > 10
    while rig.transfers.num_open:
        rig.transfers.wait(1.0)
        rig.transfers.poll()
    for blocks, _ in (*device, *loading.values()):
        rig.pool.free(blocks)
    assert rig.pool.num_free == 24
    assert rig.host.num_used == 0
    assert rig.transfers.close() == 0


def test_an_end_that_was_seen_and_not_told_is_still_awaited() -> None:
    """Who waits for one ticket sees the ends of others, whose owners hear of them by `poll`."""
    rig = Rig()
    blocks, superblock = rig.blocks(2), rig.superblock()
    rig.transfers.store(blocks, superblock)
    assert rig.transfers.num_awaited == 1
    rig.engine.finish(min(rig.engine.under_way))
    rig.transfers.advance()
    assert (rig.transfers.num_open, rig.transfers.num_awaited) == (0, 1)
    assert len(rig.transfers.poll()) == 1
    assert rig.transfers.num_awaited == 0
