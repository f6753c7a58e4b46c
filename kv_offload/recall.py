"""KV that comes back to the device, for sequences that wait for it.

Owns: Recalls, the copies under way for each sequence. Does not own: whether they pay
(recall_cost.py), the blocks they go to (kv_manager.py), who waits (the scheduler), or copying
(transfer.py). Imports no torch.

A recall is a stretch of a prompt's superblocks, some on the host, some only on disk, which are
first fetched to the host. For a sequence that is larger than the device, that is all: it uses them
where they lie. They arrive in any order; what counts is how far they have arrived without a gap.
The first that fails ends the recall before it: the rest is computed. So does a deadline, and what
is late then may write only where the ticket still holds the memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kv_offload.cold_prefix import ColdPrefixes
from kv_offload.host_cache import HostNode
from kv_offload.tickets import CANCELLED, CLOSED, DEADLINE, RESET, Completion, Direction
from kv_offload.transfer import Transfers

_MOST_PARTS = 16
"""Of one recall, asked for at once."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The end of an owner's recall."""

    owner: int
    tokens: int
    """Of its prompt, have KV on the device now."""
    from_disk: int
    """Of these, tokens that came from disk."""
    node: HostNode | None = None
    """The last superblock of those that are used in place, if they are."""
    handles: tuple[int, ...] = ()
    """Their numbers, each with a reference that is the caller's now."""


@dataclass(slots=True)
class _Part:
    """Blocks of one superblock."""

    node: HostNode
    first: int
    blocks: tuple[int, ...]
    """Of the device, to which they go; none if they are used where they lie."""
    from_disk: bool
    arrived: bool = False


@dataclass(slots=True, eq=False)
class _Recall:
    owner: int
    start_tokens: int
    parts: list[_Part]
    asked: int = 0
    """Parts for which a copy was asked for."""
    end: int = 0
    """Parts that are still wanted."""
    tickets: dict[int, int] = field(default_factory=dict)
    """Part by ticket."""
    held: dict[int, int] = field(default_factory=dict)
    """Superblock by part, with a reference: of those that are used in place and have arrived."""

    @property
    def done(self) -> bool:
        return all(part.arrived for part in self.parts[: self.end])


class Recalls:
    """`block_size`: tokens of the device's blocks."""

    def __init__(
        self,
        cold: ColdPrefixes,
        transfers: Transfers,
        block_size: int,
    ) -> None:
        self._cold, self._host = cold, cold.cache
        self._transfers = transfers
        self._block_size = block_size
        self._recalls: dict[int, _Recall] = {}
        self._by_ticket: dict[int, _Recall] = {}
        self._fetching: dict[int, int] = {}
        """Superblock by ticket."""

    # -- life of a recall --------------------------------------------------------------------------

    def begin(
        self, owner: int, root: HostNode, ids: Sequence[int], start: int, blocks: Sequence[int]
    ) -> None:
        """Asks for tokens from `start` on, into `blocks`, which are the owner's and have just been
        allocated. `poll` tells of the end, unless `cancel` comes first."""
        size = self._host.tokens // self._block_size
        parts: list[_Part] = []
        node, index = root, start // self._host.tokens
        for depth in range(index):
            node = self._host.child(node, self._host.ids_at(ids, depth))
        at, first = 0, start // self._block_size - index * size
        while at < len(blocks):
            node = self._host.child(node, self._host.ids_at(ids, index))
            count = min(size - first, len(blocks) - at)
            here = self._host.holds(node)
            node.claims += 1
            parts.append(_Part(node, first, tuple(blocks[at : at + count]), not here))
            at, first, index = at + count, 0, index + 1
        self._host.touch(node)
        recall = self._recalls[owner] = _Recall(owner, start, parts, end=len(parts))
        self._ask(recall)

    def begin_in_place(self, owner: int, root: HostNode, ids: Sequence[int], count: int) -> None:
        """Asks for the first `count` superblocks, which are used where they lie. The owner was
        promised the room."""
        parts: list[_Part] = []
        node = root
        for index in range(count):
            node = self._host.child(node, self._host.ids_at(ids, index))
            node.claims += 1
            parts.append(_Part(node, 0, (), not self._host.holds(node)))
        self._host.touch(node)
        recall = self._recalls[owner] = _Recall(owner, 0, parts, end=len(parts))
        self._ask(recall)

    def cancel(self, owner: int) -> None:
        """The owner does not want it any more; owners without a recall are ignored."""
        recall = self._recalls.pop(owner, None)
        if recall is not None:
            self._cut(recall, 0)

    def go_on(self) -> list[Loaded]:
        """Asks for what may be asked for, and ends what is at its end."""
        ended: list[Loaded] = []
        for recall in list(self._recalls.values()):
            if not recall.done:
                self._ask(recall)
            if recall.done:
                del self._recalls[recall.owner]
                ended.append(self._result(recall))
                self._unclaim(recall.parts[: recall.end])
        return ended

    def _result(self, recall: _Recall) -> Loaded:
        brought = recall.parts[: recall.end]
        if recall.held:
            disk = sum(part.from_disk for part in brought) * self._host.tokens
            handles = tuple(recall.held[index] for index in range(recall.end))
            tokens = len(handles) * self._host.tokens
            return Loaded(recall.owner, tokens, disk, brought[-1].node, handles)
        tokens = sum(len(part.blocks) for part in brought) * self._block_size
        disk = sum(len(part.blocks) for part in brought if part.from_disk) * self._block_size
        return Loaded(recall.owner, recall.start_tokens + tokens, disk)

    def _ask(self, recall: _Recall) -> None:
        while recall.asked < recall.end and len(recall.tickets) < _MOST_PARTS:
            index = recall.asked
            part = recall.parts[index]
            if not part.node.alive:
                self._cut(recall, index)
            elif self._host.holds(part.node):
                if not part.blocks:
                    self._hold(recall, index)
                    recall.asked += 1
                    continue
                unused = self._host.pool.ref_count(part.node.handle) == 0
                if unused and self._cold.spare() < 1:
                    self._wait_for_room(recall, index)
                    return
                self._load(recall, index)
                recall.asked += 1
            elif part.node.pending:
                return
            elif not self._fetch(recall, index):
                self._wait_for_room(recall, index)
                return

    def _wait_for_room(self, recall: _Recall, index: int) -> None:
        """The host has none that nobody was promised; copies under way may give some back."""
        if not recall.tickets:
            self._cut(recall, index)

    def _load(self, recall: _Recall, index: int) -> None:
        part = recall.parts[index]
        ticket = self._transfers.load(part.node.handle, part.blocks, first=part.first)
        recall.tickets[ticket] = index
        self._by_ticket[ticket] = recall

    def _hold(self, recall: _Recall, index: int) -> None:
        part = recall.parts[index]
        self._host.pool.share([part.node.handle])
        recall.held[index] = part.node.handle
        part.arrived = True

    def _room(self, recall: _Recall) -> int:
        """Superblocks that may be taken for the recall: what an owner uses in place was promised to
        it."""
        in_place = not recall.parts[0].blocks
        return self._cold.spare() + (self._cold.to_come(recall.owner) if in_place else 0)

    def _fetch(self, recall: _Recall, index: int) -> bool:
        """False when the host has no room for it."""
        node, disk = recall.parts[index].node, self._transfers.disk
        key = self._host.disk_key(node)
        if disk is None or key not in disk:
            self._cut(recall, index)
            return True
        if self._room(recall) < 1 or self._host.would_evict_above(node):
            return False
        handle = self._host.reserve()
        if handle is None:
            return False
        node.pending = True
        ticket = self._transfers.fetch(key, handle)
        self._fetching[ticket] = handle
        recall.tickets[ticket] = index
        self._by_ticket[ticket] = recall
        recall.parts[index].from_disk = True
        recall.asked += 1
        return True

    def _cut(self, recall: _Recall, end: int) -> None:
        """Parts from `end` on are not wanted any more."""
        end = min(end, recall.end)
        unwanted, recall.end = recall.parts[end : recall.end], end
        for ticket in [t for t, index in recall.tickets.items() if index >= recall.end]:
            self._transfers.cancel(ticket)
            self._close(ticket, ok=False)
        for index in [i for i in recall.held if i >= end]:
            self._host.pool.free([recall.held.pop(index)])
        self._unclaim(unwanted)

    def _unclaim(self, parts: Sequence[_Part]) -> None:
        for part in parts:
            part.node.claims -= 1
            self._host.prune(part.node)

    def heard(self, answer: Completion) -> bool:
        """Whether the answer was to one of these."""
        recall = self._by_ticket.get(answer.ticket)
        if recall is None:
            return False
        index = recall.tickets[answer.ticket]
        part = recall.parts[index]
        if answer.direction is Direction.FETCH:
            self._close(answer.ticket, ok=answer.ok)
            if self._host.holds(part.node):
                self._load(recall, index) if part.blocks else self._hold(recall, index)
            else:
                self._cut(recall, index)
            return True
        self._close(answer.ticket, ok=answer.ok)
        part.arrived = answer.ok
        if not answer.ok:
            if answer.cause not in (DEADLINE, CANCELLED, RESET, CLOSED) and part.node.alive:
                # Whatever lies there, it could not be brought, and would not be the next time.
                self._host.discard(part.node)
            self._cut(recall, index)
        return True

    def _close(self, ticket: int, *, ok: bool) -> None:
        """The ticket is of no more use here."""
        recall = self._by_ticket.pop(ticket)
        node = recall.parts[recall.tickets.pop(ticket)].node
        handle = self._fetching.pop(ticket, None)
        if handle is None:
            return
        node.pending = False
        pool = self._host.pool
        if ok and node.alive and not self._host.holds(node):
            self._host.fill(node, handle)
            pool.free([handle])
            self._host.touch(node)
        else:
            pool.drop(handle)
            pool.free([handle])
            self._host.prune(node)

    # -- looking -----------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether somebody waits."""
        return bool(self._recalls)

    def reserved(self) -> Counter[int]:
        """References on superblocks that are being filled, or wait for others."""
        held = (handle for recall in self._recalls.values() for handle in recall.held.values())
        return Counter(self._fetching.values()) + Counter(held)

    def check_invariants(self) -> None:
        tickets = {t: r for r in self._recalls.values() for t in r.tickets}
        if tickets != self._by_ticket:
            raise AssertionError("the tickets of recalls are miscounted")
        for recall in self._recalls.values():
            if any(index >= recall.end for index in recall.tickets.values()):
                raise AssertionError("a copy is under way that nobody waits for")
