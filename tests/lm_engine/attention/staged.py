"""Staging rings over the cold batches of paged.py, and engines that copy as a test wants it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kv_offload.block_pool import BlockPool
from kv_offload.copies import TierCopies
from kv_offload.copy_engine import ThreadCopyEngine
from kv_offload.copy_manual import ManualCopyEngine
from kv_offload.host_pool import HostPool
from kv_offload.tickets import Work
from kv_offload.transfer import Transfers
from lm_engine.attention.base import AttentionBatch
from lm_engine.attention.staging import StagingRing
from tests.lm_engine.attention.paged import Paged


class PoisonedRing(StagingRing):
    """What was attended holds NaN from then on, and the books are checked at every step."""

    def take(self, *args: Any) -> torch.Tensor:
        self.check_invariants()
        self.held = super().take(*args)
        self.check_invariants()
        return self.held

    def release(self) -> None:
        self.held.fill_(torch.nan)
        super().release()
        self.check_invariants()


@dataclass
class Staged:
    """A batch with cold beginnings, whose superblocks get numbers of a pool, and a ring."""

    paged: Paged
    engine: Any = field(default_factory=ThreadCopyEngine)
    superblocks: int = 2
    buffers: int = 3
    now: float = 0.0

    def __post_init__(self) -> None:
        cache, batch = self.paged.cache, self.paged.batch
        assert cache.host is not None
        self.host = HostPool(cache.host.num_superblocks)
        reserved = self.host.reserve(cache.host.num_superblocks)
        assert reserved is not None
        number_of = {}
        for number in reserved.superblocks:
            self.host.commit(number, cache.host.layout.blocks)
            number_of[self.host.slot(number)] = number
        self.batch = AttentionBatch(
            tuple(
                replace(s, superblocks=tuple(number_of[slot] for slot in s.cold))
                for s in batch.sequences
            ),
            batch.slots,
        )
        self.copies = TierCopies(cache, cache.host)
        self.transfers = Transfers(
            BlockPool(cache.num_blocks), self.host, self.copies, self.engine, clock=lambda: self.now
        )
        self.ring = PoisonedRing(
            self.transfers, self.copies, cache, superblocks=self.superblocks, buffers=self.buffers
        )


class RandomEngine(ManualCopyEngine):
    """Copies end in any order, at any time, some with a failure that leaves NaN behind."""

    def __init__(self, seed: int, failing: float = 0.0) -> None:
        super().__init__()
        self._choose, self._failing = random.Random(seed), failing

    def start(self, ticket: int, work: Work, after: Any) -> None:
        super().start(ticket, work, after)
        spoil(work)
        self._maybe()

    def finished(self) -> list[tuple[int, str | None]]:
        self._maybe()
        return super().finished()

    def wait(self, timeout_s: float) -> None:
        if self.under_way and not self._ended:
            self._end_one()

    def _maybe(self) -> None:
        if self.under_way and self._choose.random() < 0.5:
            self._end_one()

    def _end_one(self) -> None:
        ticket = self._choose.choice(list(self.under_way))
        if self._choose.random() < self._failing:
            work = self.under_way[ticket]
            self.fail(ticket, after=lambda: spoil(work))
        else:
            self.finish(ticket)


class HangingEngine(ManualCopyEngine):
    """Nothing ends by itself; whoever waits sees `clock` go by."""

    def __init__(self, sleep: Callable[[float], None]) -> None:
        super().__init__()
        self._sleep = sleep

    def wait(self, timeout_s: float) -> None:
        self._sleep(timeout_s)


def spoil(work: Work) -> None:
    """NaN where the copy goes."""
    work.into.fill_(torch.nan)  # type: ignore[attr-defined]
