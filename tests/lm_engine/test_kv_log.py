"""Numbers without gaps, snapshots for who comes late or is too slow, and tenants apart."""

from __future__ import annotations

import asyncio
import random

import pytest

from kv_offload.kv_events import TIERS, KVEvent, Tier
from lm_engine.kv_log import KVEventLog, KVReader, KVSnapshot


def stored(number: int, tenant: str = "", tier: Tier = "device") -> KVEvent:
    return KVEvent("stored", tier, tenant, number.to_bytes(32, "big"), b"p" * 32, 16)


def evicted(number: int, tenant: str = "", tier: Tier = "device") -> KVEvent:
    return KVEvent("evicted", tier, tenant, number.to_bytes(32, "big"))


def cleared(tier: Tier, tenant: str = "") -> KVEvent:
    return KVEvent("cleared", tier, tenant)


class Reader:
    """Applies what it reads; checks that numbers follow each other but for snapshots."""

    def __init__(self, reader: KVReader, last: int = 0) -> None:
        self.reader, self.last = reader, last
        self.held: set[tuple[str, bytes]] = set()
        self.snapshots = 0

    def read(self, most: int = 1000) -> bool:
        """Whether there was something."""
        taken = self.reader.take(most)
        if isinstance(taken, KVSnapshot):
            assert taken.number >= self.last
            self.last, self.snapshots = taken.number, self.snapshots + 1
            self.held = {(event.tier, event.key) for event in taken.blocks}
            return True
        assert len(taken) <= most
        for one in taken:
            assert one.number == self.last + 1
            self.last = one.number
            event = one.event
            if event.kind == "stored":
                self.held.add((event.tier, event.key))
            elif event.kind == "evicted":
                self.held.remove((event.tier, event.key))
            else:
                self.held = {row for row in self.held if row[0] != event.tier}
        return bool(taken)


def test_who_comes_late_gets_a_snapshot_and_then_changes() -> None:
    log = KVEventLog()
    log.publish([stored(1), stored(2), stored(1, tier="host"), evicted(1)])
    reader = Reader(log.reader(""))
    assert reader.read()
    assert (reader.last, reader.snapshots) == (4, 1)
    assert reader.held == {("device", stored(2).key), ("host", stored(1).key)}
    assert not reader.read()
    log.publish([cleared("device"), stored(3)])
    assert reader.read()
    assert reader.held == {("device", stored(3).key), ("host", stored(1).key)}
    assert reader.snapshots == 1


def test_who_comes_back_goes_on_where_it_was() -> None:
    log = KVEventLog(most_events=5)
    log.publish(stored(number) for number in range(8))
    for after, snapshots in ((8, 0), (7, 0), (3, 0), (2, 1), (0, 1), (9, 1), (10**15, 1)):
        reader = log.reader("", after)
        taken = reader.take(100)
        if snapshots:
            assert isinstance(taken, KVSnapshot)
            assert taken.number == 8
        else:
            assert isinstance(taken, list)
            assert [one.number for one in taken] == list(range(after + 1, 9))


def test_a_slow_reader_starts_over_and_costs_no_more_memory() -> None:
    log = KVEventLog(most_events=5)
    reader = Reader(log.reader(""))
    reader.read()
    log.publish(stored(number) for number in range(5))
    reader.read(most=2)
    assert (reader.last, reader.snapshots) == (2, 1)
    log.publish([stored(5), stored(6)])
    reader.read(most=2)
    assert (reader.last, reader.snapshots) == (4, 1), "just not too slow"
    log.publish(stored(number) for number in range(7, 2000))
    assert len(log._feeds[""].events) == 5
    reader.read()
    assert (reader.last, reader.snapshots) == (2000, 2)
    assert len(reader.held) == 2000


def test_tenants_have_numbers_of_their_own() -> None:
    log = KVEventLog()
    a, b = Reader(log.reader("a")), Reader(log.reader("b"))
    a.read(), b.read()
    log.publish([stored(1, "a"), stored(2, "a"), stored(3, "b"), cleared("device", "a")])
    a.read(), b.read()
    assert (a.last, a.held) == (3, set())
    assert (b.last, b.held) == (1, {("device", stored(3).key)})
    b.reader.news.clear()
    log.publish([stored(4, "a")])
    assert not b.reader.news.is_set(), "others' events wake nobody"


def test_a_new_language_stage_begins_with_nothing() -> None:
    log = KVEventLog()
    reader = Reader(log.reader("a"))
    log.publish(stored(1, "a", tier) for tier in TIERS)
    log.publish([stored(1, "b")])
    reader.read()
    assert len(reader.held) == 3
    log.clear()
    reader.read()
    assert reader.held == set()
    assert reader.snapshots == 1
    assert log.reader("b").take(9) == KVSnapshot(4, ())


def test_the_end_is_heard_behind_the_last_event() -> None:
    log = KVEventLog()
    reader = log.reader("")
    reader.take(1)
    assert not reader.news.is_set() or reader.take(1) == []
    log.publish([stored(1), stored(2)])
    log.end()
    assert reader.news.is_set()
    assert not reader.ended
    reader.take(1)
    assert not reader.ended
    reader.take(1)
    assert reader.ended


def test_closed_readers_are_forgotten() -> None:
    log = KVEventLog()
    readers = [log.reader("a") for _ in range(3)]
    assert (log.num_readers("a"), log.num_readers("b")) == (3, 0)
    for reader in readers:
        reader.close()
    assert log.num_readers("a") == 0


@pytest.mark.parametrize("seed", range(5))
def test_readers_of_any_speed_hold_the_same_in_the_end(seed: int) -> None:
    draw = random.Random(seed)
    log = KVEventLog(most_events=20)
    truth: set[tuple[str, bytes]] = set()
    readers = [Reader(log.reader("")) for _ in range(4)]
    for _ in range(600):
        tier, number = draw.choice(TIERS), draw.randrange(30)
        row = (tier, stored(number).key)
        if draw.random() < 0.02:
            log.publish([cleared(tier)])
            truth = {one for one in truth if one[0] != tier}
        elif row in truth:
            log.publish([evicted(number, tier=tier)])
            truth.remove(row)
        else:
            log.publish([stored(number, tier=tier)])
            truth.add(row)
        for speed, reader in enumerate(readers):
            if draw.random() < 0.3**speed:
                reader.read(most=draw.randrange(1, 9))
    for reader in readers:
        while reader.read():
            pass
        assert reader.held == truth
    assert readers[0].snapshots == 1 < readers[3].snapshots


async def test_a_reader_sleeps_until_there_is_news() -> None:
    log = KVEventLog()
    reader = log.reader("")
    reader.take(9)
    assert reader.take(9) == []
    waiting = asyncio.create_task(reader.news.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    log.publish([stored(1)])
    await asyncio.wait_for(waiting, 5)
