"""Events of the prefix cache, numbered and kept for readers outside the language stage.

Owns: KVEventLog - one row of numbers per tenant without gaps, the last events of each, what each
tenant's tiers hold now - and KVReader, one reader's place in it. Does not own: what happens
(kv_offload), how it comes here (process/), or its form over HTTP (api/kv_events.py). Imports no
torch; one event loop, no threads.

A reader that is too slow is not waited for: once the events that it has not read are dropped, it
starts over from a snapshot. Nobody's numbers say anything about other tenants.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

from kv_offload.kv_events import TIERS, KVEvent, Tier

MOST_EVENTS = 16_384
"""Kept of each tenant."""


@dataclass(frozen=True, slots=True)
class Numbered:
    number: int
    event: KVEvent


@dataclass(frozen=True, slots=True)
class KVSnapshot:
    """All that the tenant's tiers held after the event with this number."""

    number: int
    blocks: tuple[KVEvent, ...]
    """As they were stored."""


@dataclass(slots=True)
class _Feed:
    """One tenant's."""

    last: int = 0
    """Number of the newest event; the first has number 1."""
    events: dict[int, KVEvent] = field(default_factory=dict)
    """The newest, by number."""
    held: dict[Tier, dict[bytes, KVEvent]] = field(
        default_factory=lambda: {tier: {} for tier in TIERS}
    )
    readers: set[KVReader] = field(default_factory=set)

    def push(self, event: KVEvent, most: int) -> None:
        self.last += 1
        self.events[self.last] = event
        self.events.pop(self.last - most, None)
        held = self.held[event.tier]
        if event.kind == "stored":
            held[event.key] = event
        elif event.kind == "evicted":
            held.pop(event.key, None)
        else:
            held.clear()

    def snapshot(self) -> KVSnapshot:
        held = (event for tier in TIERS for event in self.held[tier].values())
        return KVSnapshot(self.last, tuple(held))


class KVEventLog:
    """`most_events` are kept of each tenant."""

    def __init__(self, most_events: int = MOST_EVENTS) -> None:
        self.stream = secrets.token_hex(8)
        """Numbers of another stream mean nothing here."""
        self.ended = False
        """Nothing will be published any more."""
        self._most_events = most_events
        self._feeds: dict[str, _Feed] = {}

    def publish(self, events: Iterable[KVEvent]) -> None:
        """In their order."""
        told: set[str] = set()
        for event in events:
            self._feed(event.tenant).push(event, self._most_events)
            told.add(event.tenant)
        for tenant in told:
            self._wake(tenant)

    def clear(self) -> None:
        """Every tier of every tenant lost everything: the language stage is gone. What a new one
        finds on disk it tells itself."""
        tenants = [tenant for tenant, feed in self._feeds.items() if feed.last]
        self.publish(KVEvent("cleared", tier, tenant) for tenant in tenants for tier in TIERS)

    def end(self) -> None:
        self.ended = True
        for tenant in self._feeds:
            self._wake(tenant)

    def num_readers(self, tenant: str) -> int:
        return len(self._feeds[tenant].readers) if tenant in self._feeds else 0

    def reader(self, tenant: str, after: int | None = None) -> KVReader:
        """A reader of the tenant's events behind number `after` of this stream; None for one that
        knows nothing. It is in the way until it is closed."""
        feed = self._feed(tenant)
        reader = KVReader(self, feed, after)
        feed.readers.add(reader)
        return reader

    def _feed(self, tenant: str) -> _Feed:
        feed = self._feeds.get(tenant)
        if feed is None:
            feed = self._feeds[tenant] = _Feed()
        return feed

    def _wake(self, tenant: str) -> None:
        for reader in self._feeds[tenant].readers:
            reader.news.set()


class KVReader:
    """Made by KVEventLog.reader."""

    def __init__(self, log: KVEventLog, feed: _Feed, after: int | None) -> None:
        self.news = asyncio.Event()
        """Set when `take` may have something."""
        self.news.set()
        self._log, self._feed, self._after = log, feed, after

    @property
    def ended(self) -> bool:
        """Whether everything was read, and nothing will follow."""
        return self._log.ended and self._after == self._feed.last

    def take(self, most: int) -> KVSnapshot | list[Numbered]:
        """The next events, `most` of them at most; a snapshot where they are not known any more. An
        empty list when there is nothing new."""
        feed, after = self._feed, self._after
        known = after is not None and (after == feed.last or after + 1 in feed.events)
        if after is None or not known:
            snapshot = feed.snapshot()
            self._after = snapshot.number
            return snapshot
        end = min(feed.last, after + most)
        self._after = end
        if end == feed.last:
            self.news.clear()
        return [Numbered(number, feed.events[number]) for number in range(after + 1, end + 1)]

    def close(self) -> None:
        self._feed.readers.discard(self)
