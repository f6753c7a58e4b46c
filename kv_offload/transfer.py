"""Copies between tiers as tickets: nothing is reused while a ticket on it is open.

Owns: Transfers: open tickets, deadlines, giving up, and who is told of the end.
Does not own: which blocks or superblocks to copy (the prefix cache and the scheduler say), what a
ticket holds (holds.py), the order of copies (lanes.py), memory (copies.py, disk_tier.py), or the
copying (copy_engine.py, copy_cuda.py). Imports no torch. For one thread: the engine's loop calls
everything here.

Life of a ticket:

    store, load, stream, save, fetch    references taken, the fence noted; the number is returned
    start_loads, poll                   loads get their fence, and start
    poll                                copies are started and closed; owners are told once
    closed                              references given back, a filled superblock is committed

Both directions are fenced. A copy begins after the compute that was issued before the call: it
reads what that wrote, and does not overwrite what that reads. What it writes may be read when
`poll` has told of it (or after `join`), never before; `is_being_written` tells.

Asking for a load starts nothing. A step's plan gives up blocks whose KV its own copies still read
(a superblock that goes to the host, a block that is copied on write), and may give the same blocks
to a load. So loads wait for `start_loads`, after the plan's copies were issued, and take their
fence there. Whoever has nothing to issue needs no such call: the next `poll`, `wait` or `join`,
none of which belongs between a plan and its copies, starts them as well.

A ticket holds a reference of its own on each block and superblock, so an owner may free his at any
time (an abort): they return to their pools when the copy has let go of them. For the same reason
an owner who is told that a deadline passed may go on without the copy, but its memory stays taken
until the engine says that it ended, however late. Tickets are closed by number, whether or not
anybody still waits for them.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kv_offload.holds import Hold, Holds
from kv_offload.host_pool import HostPool
from kv_offload.lanes import DISK_RATE, MEMORY_RATE, Lane, Rate, Ticket
from kv_offload.tickets import (
    CANCELLED,
    CLOSED,
    DEADLINE,
    RESET,
    BlockRefs,
    Completion,
    Copies,
    CopyEngine,
    Direction,
    DiskCopies,
    TransferError,
    Work,
)

_GLANCE_S = 0.005
"""How late the end of a copy to or from disk may be seen while memory is copied, too."""


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """How much is under way at once, and for how long."""

    copying: int = 16
    """Copies handed to one engine at a time; see Lane."""
    copying_for_later: int = 8
    """Of these, stores and saves."""
    urgent_s: float = 10.0
    """Deadline of loads, streams and fetches, from the call."""
    later_s: float = 60.0
    """Deadline of stores and saves."""


class Transfers:
    """All open copies of one engine.

    Args:
        blocks: references on the device's blocks. Where a prefix cache counts their users, it must
            hear of these, too (take, give_up), not only the pool.
        host: the host's pool.
        copies, engine: device and host memory, and who copies between them.
        disk, disk_engine: the same between host memory and disk; None without a disk tier.
        stream_engine: who copies what is streamed, None: `engine`. A step waits for it, and should
            not find loads before it in a queue.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        blocks: BlockRefs,
        host: HostPool,
        copies: Copies,
        engine: CopyEngine,
        *,
        disk: DiskCopies | None = None,
        disk_engine: CopyEngine | None = None,
        stream_engine: CopyEngine | None = None,
        limits: TransferLimits = TransferLimits(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._copies, self._disk = copies, disk
        self._limits, self._clock = limits, clock
        self._holds = Holds(blocks, host)
        most = (limits.copying, limits.copying_for_later)
        self._memory_lane = Lane(engine, Rate(MEMORY_RATE), *most)
        self._disk_lane = self._stream_lane = None
        if disk_engine is not None:
            self._disk_lane = Lane(disk_engine, Rate(DISK_RATE), *most)
        if stream_engine is not None:
            self._stream_lane = Lane(stream_engine, Rate(MEMORY_RATE), *most)
        every = (self._stream_lane, self._memory_lane, self._disk_lane)
        self._lanes = [lane for lane in every if lane is not None]
        self._open: dict[int, Ticket] = {}
        self._unstarted: list[Ticket] = []
        """Loads that wait for the copies of the step which is being planned."""
        self._answers: deque[Completion] = deque()
        self._next = 0
        self._closed = False
        self.bytes_copied: Counter[Direction] = Counter()
        """Bytes of the copies that succeeded, since construction."""
        self.failures: Counter[tuple[Direction, str]] = Counter()
        """Failures by direction and cause, since construction."""
        self.stalled_seconds = 0.0
        """That `join` has slept: copies which compute did not hide."""

    # -- asking ------------------------------------------------------------------------------------

    def store(self, blocks: Sequence[int], superblock: int) -> int:
        """Copy device `blocks` into a reserved superblock and commit it; the ticket's number.

        Their KV must have been computed, by what was issued before this call, and must not change.
        Raises TransferError for blocks that are still being loaded, and for a superblock that is
        filled or being filled.
        """
        self._holds.must_be_readable(blocks)
        self._holds.must_be_empty(superblock)
        work = self._copies.store(blocks, self._host.slot(superblock))
        hold = Hold(reads=tuple(blocks), superblocks=(superblock,), filled=len(blocks))
        return self._submit(self._memory_lane, Direction.STORE, work, hold)

    def load(self, superblock: int, blocks: Sequence[int], *, first: int = 0) -> int:
        """Copy blocks `first`, `first` + 1, ... of a superblock into device `blocks`, which the
        caller has just allocated; the ticket's number. It starts with `start_loads`.

        Raises TransferError for blocks that another ticket reads or writes, and for blocks that the
        superblock does not hold.
        """
        filled = self._host.filled(superblock)
        if first + len(blocks) > filled:
            raise TransferError(
                f"superblock {superblock} holds {filled} blocks; "
                f"{first} to {first + len(blocks)} cannot be loaded"
            )
        self._holds.must_be_unused(blocks)
        work = self._copies.load(self._host.slot(superblock), first, blocks)
        hold = Hold(writes=tuple(blocks), superblocks=(superblock,))
        return self._submit(self._memory_lane, Direction.LOAD, work, hold)

    def stream(self, superblocks: Sequence[int], layer: int, into: Any) -> int:
        """Copy one layer's keys and values of filled superblocks, in order, into a staging buffer
        (see copies.py for its shape); the ticket's number. `join` it before the buffer is read."""
        missing = [s for s in superblocks if not self._host.filled(s)]
        if missing:
            raise TransferError(f"superblocks {missing} hold no KV: evicted, or not yet stored")
        slots = [self._host.slot(superblock) for superblock in superblocks]
        work = self._copies.stream(slots, layer, into)
        hold = Hold(superblocks=tuple(superblocks))
        return self._submit(self._stream_lane or self._memory_lane, Direction.STREAM, work, hold)

    def save(self, superblock: int, key: bytes) -> int:
        """Write a full superblock to disk under a 32-byte key; the ticket's number."""
        disk, lane = self._need_disk()
        filled = self._host.filled(superblock)
        if filled != disk.blocks:
            raise TransferError(
                f"superblock {superblock} holds {filled} blocks; only those with all "
                f"{disk.blocks} are saved"
            )
        work = disk.save(self._host.slot(superblock), key)
        return self._submit(lane, Direction.SAVE, work, Hold(superblocks=(superblock,)))

    def fetch(self, key: bytes, superblock: int) -> int:
        """Read what was saved under a key into a reserved superblock and commit it; the ticket's
        number. A missing, foreign or damaged file is a failure like any other."""
        disk, lane = self._need_disk()
        self._holds.must_be_empty(superblock)
        work = disk.fetch(key, self._host.slot(superblock))
        hold = Hold(superblocks=(superblock,), filled=disk.blocks)
        return self._submit(lane, Direction.FETCH, work, hold)

    def cancel(self, ticket: int) -> None:
        """The owner does not want it any more and is not told of its end. Closed tickets, and
        numbers never given, are ignored."""
        found = self._open.get(ticket)
        if found is None or found.told:
            self._answers = deque(a for a in self._answers if a.ticket != ticket)
            return
        self._give_up(found, CANCELLED, tell=False)

    def start_loads(self) -> None:
        """All reads of blocks that were given up before the loads were asked for are issued."""
        unstarted, self._unstarted = self._unstarted, []
        for ticket in unstarted:
            ticket.after = self._memory_lane.engine.fence()
            self._memory_lane.add(ticket)

    # -- answering ---------------------------------------------------------------------------------

    def poll(self) -> list[Completion]:
        """Close what ended, give up what is late, start what may start. Every ticket that was not
        cancelled is answered exactly once."""
        self._advance()
        answers = list(self._answers)
        self._answers.clear()
        return answers

    def note(self, direction: Direction, num_bytes: int) -> None:
        """Counts a copy that was made without a ticket."""
        self.bytes_copied[direction] += num_bytes

    def advance(self) -> None:
        """What `poll` does, for one who waits for a few tickets: answers stay for their owners."""
        self._advance()

    def settled(self, ticket: int, timeout_s: float = 0.0) -> bool:
        """Whether the copy has let go of its memory, waited for up to `timeout_s`. Says nothing of
        its success, and answers nobody."""
        until = self._clock() + timeout_s
        self._advance()
        while ticket in self._open:
            left_s = until - self._clock()
            if left_s <= 0:
                return False
            self._lane_of(self._open[ticket]).engine.wait(left_s)
            self._advance()
        return True

    def join(self, ticket: int) -> None:
        """What the ticket brings may be read by compute issued after this call.

        Blocks until the copy ended, unless the engine can order the device's own queues: then it
        returns at once, and `poll` answers the ticket only if it fails. Otherwise `poll` does not
        answer it any more.
        Raises TransferError when the copy failed or its deadline passed.
        """
        found = self._open.get(ticket)
        if found is not None and not found.told:
            self.start_loads()
            lane = self._lane_of(found)
            lane.start_now(found)
            if lane.engine.order_compute_after(ticket):
                found.joined = True
                return
            began = self._clock()
            while ticket in self._open and not found.told:
                lane.engine.wait(max(0.0, found.deadline - self._clock()))
                self._advance()
            self.stalled_seconds += self._clock() - began
        answer = next((a for a in self._answers if a.ticket == ticket), None)
        if answer is None:
            raise TransferError(f"ticket {ticket} was answered before, or cancelled")
        self._answers.remove(answer)
        if not answer.ok:
            raise TransferError(f"{answer.direction.value} {ticket} failed: {answer.cause}")

    def wait(self, timeout_s: float) -> None:
        """Sleep until something may have ended, when a loop has nothing else to do."""
        if self._answers or not self._open:
            return
        self._advance()
        busy = [lane for lane in self._lanes if lane.copying()]
        if busy and not self._answers:
            # With both lanes busy the other one's end is seen a little late, never missed.
            busy[0].engine.wait(timeout_s if len(busy) == 1 else min(timeout_s, _GLANCE_S))

    def reset(self) -> None:
        """Give up everything: owners are told, memory follows as the copies end."""
        for ticket in list(self._open.values()):
            if not ticket.told:
                self._give_up(ticket, RESET, tell=True)

    def close(self, timeout_s: float = 5.0) -> int:
        """Give up everything and end the engines; how many copies would not end. Their memory must
        not be freed."""
        for ticket in list(self._open.values()):
            if not ticket.told:
                self._give_up(ticket, CLOSED, tell=True)
        self._closed = True
        for lane in self._lanes:
            lane.engine.close(timeout_s)
        self._close_ended()
        return len(self._open)

    # -- looking -----------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """Tickets whose memory is still held, also those nobody waits for."""
        return len(self._open)

    @property
    def num_awaited(self) -> int:
        """Tickets whose end somebody is still to be told of, by `poll`."""
        return len(self._answers) + sum(not ticket.told for ticket in self._open.values())

    def now(self) -> float:
        """On the clock of the deadlines, seconds."""
        return self._clock()

    @property
    def disk(self) -> DiskCopies | None:
        return self._disk

    def estimate_s(self, direction: Direction, num_bytes: int) -> float:
        """Seconds that a copy of so many bytes takes by itself, from those that were made."""
        lane = self._lane_for(direction)
        return float("inf") if lane is None else num_bytes / lane.rate.bytes_per_s

    @property
    def oldest_age_s(self) -> float:
        """Of the oldest open ticket, 0 without one."""
        oldest = min((t.submitted for t in self._open.values()), default=None)
        return 0.0 if oldest is None else self._clock() - oldest

    def is_open(self, ticket: int) -> bool:
        """Whether the copy may still touch its memory, also when its owner was told of a failure: a
        staging buffer is not reused before."""
        return ticket in self._open

    def is_stuck(self, direction: Direction) -> bool:
        """Whether a copy on the same way was given up and has not ended: whoever can do without
        (by computing, say) should not wait behind it."""
        lane = self._lane_for(direction)
        return lane is not None and any(ticket.told for ticket in lane.copying())

    def is_being_written(self, block: int) -> bool:
        """Whether the device block waits for a load: nobody may read it."""
        return self._holds.is_being_written(block)

    def held_blocks(self) -> Counter[int]:
        """References that open tickets hold on device blocks, for their pool's own checks."""
        held: Counter[int] = Counter()
        for ticket in self._open.values():
            held.update(ticket.hold.reads)
            held.update(ticket.hold.writes)
        return held

    def held_superblocks(self) -> Counter[int]:
        """References that open tickets hold on superblocks, likewise."""
        return Counter(s for ticket in self._open.values() for s in ticket.hold.superblocks)

    def check_invariants(self) -> None:
        unstarted = [ticket.number for ticket in self._unstarted]
        known = sorted(unstarted + [n for lane in self._lanes for n in lane.numbers()])
        if known != sorted(self._open):
            raise AssertionError(f"the lanes have tickets {known}, open are {sorted(self._open)}")
        self._holds.check_invariants([ticket.hold for ticket in self._open.values()])

    # -- inside ------------------------------------------------------------------------------------

    def _need_disk(self) -> tuple[DiskCopies, Lane]:
        if self._disk is None or self._disk_lane is None:
            raise TransferError("there is no disk tier; give it a folder")
        return self._disk, self._disk_lane

    def _lane_for(self, direction: Direction) -> Lane | None:
        to_disk = direction in (Direction.SAVE, Direction.FETCH)
        if direction is Direction.STREAM and self._stream_lane is not None:
            return self._stream_lane
        return self._disk_lane if to_disk else self._memory_lane

    def _lane_of(self, ticket: Ticket) -> Lane:
        lane = self._lane_for(ticket.direction)
        assert lane is not None
        return lane

    def _submit(self, lane: Lane, direction: Direction, work: Work, hold: Hold) -> int:
        if self._closed:
            raise TransferError("the transfers were closed")
        now = self._clock()
        limit = self._limits.urgent_s if direction.urgent else self._limits.later_s
        number, is_load = self._next, direction is Direction.LOAD
        fence = None if is_load else lane.engine.fence()
        ticket = Ticket(number, direction, work, fence, hold, now, now + limit)
        self._next += 1
        self._holds.take(hold)
        self._open[number] = ticket
        if is_load:
            self._unstarted.append(ticket)
        else:
            lane.add(ticket)
        return number

    def _advance(self) -> None:
        self.start_loads()
        self._close_ended()
        now = self._clock()
        for ticket in [t for t in self._open.values() if not t.told and t.deadline <= now]:
            self._give_up(ticket, DEADLINE, tell=True)
        for lane in self._lanes:
            lane.launch()

    def _close_ended(self) -> None:
        for lane in self._lanes:
            num_bytes = 0
            for ticket, cause in lane.ended():
                num_bytes += ticket.work.num_bytes if cause is None else 0
                self._close(ticket, cause)
            lane.rate.observe(num_bytes, lane.engine.busy_seconds)

    def _close(self, ticket: Ticket, cause: str | None) -> None:
        if cause is None:
            self.bytes_copied[ticket.direction] += ticket.work.num_bytes
            if not ticket.told:
                if ticket.hold.filled:
                    self._host.commit(ticket.hold.superblocks[0], ticket.hold.filled)
                if not ticket.joined:
                    self._tell(ticket, None)
        elif not ticket.told:
            self._fail(ticket, cause, tell=True)
        self._release(ticket)

    def _give_up(self, ticket: Ticket, cause: str, *, tell: bool) -> None:
        """The owner stops waiting. What has not begun is closed; what has begun keeps its memory
        until it ends, and commits nothing then."""
        ticket.told = True
        self._fail(ticket, cause, tell=tell)
        if ticket in self._unstarted:
            self._unstarted.remove(ticket)
            self._release(ticket)
        elif self._lane_of(ticket).withdraw(ticket):
            self._release(ticket)

    def _release(self, ticket: Ticket) -> None:
        del self._open[ticket.number]
        self._holds.give_back(ticket.hold)

    def _fail(self, ticket: Ticket, cause: str, *, tell: bool) -> None:
        self.failures[ticket.direction, cause] += 1
        if tell:
            self._tell(ticket, cause)

    def _tell(self, ticket: Ticket, cause: str | None) -> None:
        seconds = self._clock() - ticket.submitted
        self._answers.append(Completion(ticket.number, ticket.direction, cause, seconds))
