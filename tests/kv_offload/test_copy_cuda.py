"""The device's queues: every order that a device may run them in gives the same bytes."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from kv_offload.copies import TierCopies
from kv_offload.copy_cuda import CudaCopyEngine, TorchStreams
from kv_offload.host_memory import CudaPinner, HostMemory
from kv_offload.kv_cache import KVCache
from kv_offload.superblock import SuperblockLayout
from tests.kv_offload.tiers import KV, Rig


class Event:
    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed


@dataclass(eq=False)
class Stream:
    ops: deque[tuple[str, Callable[[], None] | Event]] = field(default_factory=deque)

    def step(self) -> bool:
        """Run the next thing, unless it waits for another queue."""
        if not self.ops:
            return False
        kind, what = self.ops[0]
        if isinstance(what, Event):
            if kind == "wait" and not what.passed:
                return False
            what.passed = True
        else:
            what()
        self.ops.popleft()
        return True


class FakeDevice:
    """Streams whose queues run when `run` says, in a random order that events allow."""

    def __init__(self) -> None:
        self.compute = Stream()
        self.queues = [self.compute]
        self._issuing = self.compute

    def new(self) -> Stream:
        self.queues.append(Stream())
        return self.queues[-1]

    def current(self) -> Stream:
        return self._issuing

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        self._issuing = stream
        yield
        self._issuing = self.compute

    def event(self, stream: Stream) -> Event:
        event = Event()
        stream.ops.append(("record", event))
        return event

    def order(self, stream: Stream, event: Event) -> None:
        stream.ops.append(("wait", event))

    def seconds(self, begin: Event, end: Event) -> float:
        assert begin.passed
        assert end.passed
        return 0.5

    def issue(self, op: Callable[[], None]) -> None:
        self._issuing.ops.append(("run", op))

    def run(self, choose: random.Random, steps: int) -> None:
        for _ in range(steps):
            choose.choice(self.queues).step()


@dataclass
class QueuedWork:
    """What a real Work does at once, put into the fake queue."""

    device: FakeDevice
    work: object

    @property
    def num_bytes(self) -> int:
        return self.work.num_bytes

    @property
    def to_host(self) -> bool:
        return self.work.to_host

    def enqueue(self) -> None:
        self.device.issue(self.work.enqueue)

    def run(self) -> None:
        raise AssertionError("the copy belongs into the queue")


def _rig(device: FakeDevice) -> Rig:
    rig = Rig(engine=CudaCopyEngine(device))
    copies = TierCopies(rig.cache, rig.memory)

    class Queued:
        def __getattr__(self, name: str) -> Callable[..., QueuedWork]:
            return lambda *args: QueuedWork(device, getattr(copies, name)(*args))

    rig.transfers._copies = Queued()
    return rig


@pytest.mark.parametrize("seed", range(30))
def test_copies_and_compute_keep_their_order(seed: int) -> None:
    """Compute writes blocks, they are stored, compute overwrites other blocks, stored KV is loaded
    over blocks that compute still reads, and compute reads what came."""
    choose = random.Random(seed)
    device = FakeDevice()
    rig = _rig(device)
    source, target = rig.blocks(4), rig.blocks(4)
    rig.cache.poison(source)
    rig.cache.storage[:, :, :, target[0] * 4 : target[-1] * 4 + 4] = 7.0
    read: list[torch.Tensor] = []

    def fill(blocks: list[int], value: float) -> None:
        for block in blocks:
            rig.cache.storage[:, :, :, 4 * block : 4 * block + 4] = value

    device.issue(lambda: fill(source, 5.0))
    superblock = rig.superblock()
    stored = rig.transfers.store(source, superblock)
    device.issue(lambda: read.append(rig.content(target)))
    device.run(choose, choose.randint(0, 40))
    while rig.transfers.is_open(stored):
        rig.transfers.poll()
        device.run(choose, 1)
    device.issue(lambda: read.append(rig.content(target)))
    load = rig.transfers.load(superblock, target)
    rig.transfers.join(load)
    device.issue(lambda: read.append(rig.content(target)))
    device.run(choose, 200)
    assert [float(r.unique()) for r in read] == [7.0, 7.0, 5.0]
    assert rig.transfers.poll() == []
    assert rig.transfers.num_open == 0
    assert not any(queue.ops for queue in device.queues)


def test_nothing_ends_before_its_queue_came_so_far() -> None:
    device = FakeDevice()
    rig = _rig(device)
    rig.transfers.store(rig.blocks(4), rig.superblock())
    rig.transfers.wait(0.001)
    assert rig.transfers.poll() == []
    device.run(random.Random(0), 100)
    assert [a.ok for a in rig.transfers.poll()] == [True]


def test_a_broken_device_is_a_failed_copy() -> None:
    device = FakeDevice()
    rig = _rig(device)
    rig.transfers.store(rig.blocks(4), rig.superblock())

    def broken() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    for _, what in device.queues[1].ops:
        if isinstance(what, Event):
            what.query = broken
    assert [a.cause for a in rig.transfers.poll()] == ["RuntimeError"]
    device.order = lambda stream, event: broken()
    rig.transfers.store(rig.blocks(4), rig.superblock())
    assert [a.cause for a in rig.transfers.poll()] == ["RuntimeError"]
    assert rig.transfers.num_open == 0


def test_a_joined_copy_that_fails_later_is_answered() -> None:
    device = FakeDevice()
    rig = _rig(device)
    superblock = rig.superblock()
    rig.transfers.store(rig.blocks(4), superblock)
    device.run(random.Random(0), 100)
    rig.transfers.poll()
    ticket = rig.transfers.load(superblock, rig.blocks(4))
    rig.transfers.join(ticket)
    rig.transfers.reset()
    assert [(a.ticket, a.cause) for a in rig.transfers.poll()] == [(ticket, "reset")]


def test_closing_waits_for_the_queues() -> None:
    device = FakeDevice()
    rig = _rig(device)
    rig.transfers.store(rig.blocks(4), rig.superblock())
    assert rig.transfers.close(0.01) == 1
    device.run(random.Random(0), 100)
    assert rig.transfers.close(1.0) == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    device = torch.device("cuda")
    layout = SuperblockLayout(KV, tokens=16, head_major=False)
    cache = KVCache(KV, 24, device)
    cache.storage.normal_()
    memory = HostMemory(layout, 4, pinner=CudaPinner())
    rig = Rig(engine=CudaCopyEngine(TorchStreams(device)))
    rig.transfers._copies = TierCopies(cache, memory)
    rig.blocks(24)
    for blocks in ([0, 1, 2, 3], [9, 4, 5, 20]):
        superblock = rig.superblock()
        before = torch.cat([cache.storage[:, :, 4 * b : 4 * b + 4] for b in blocks], 2)
        ticket = rig.transfers.store(blocks, superblock)
        while rig.transfers.is_open(ticket):
            rig.transfers.wait(1.0)
            rig.transfers.poll()
        load = rig.transfers.load(superblock, [10, 11, 12, 13])
        rig.transfers.join(load)
        assert torch.equal(cache.storage[:, :, 40:56], before)
        while rig.transfers.is_open(load):
            rig.transfers.poll()
    assert rig.transfers.close() == 0
    memory.close()
