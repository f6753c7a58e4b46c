"""Copies of KV for later: from the device to the host, and from there to disk.

Owns: WriteThrough: which full superblocks were offered and not yet stored, which are being stored
or saved, and when it does not pay. Does not own: which are offered (kv_manager.py), the index of
what is there (host_cache.py), or copying (transfer.py). Imports no torch.

Nobody waits for these copies. They are made a few at a time, parents first, with room that no
request was promised, and given up as soon as anything is in their way: whoever uses the same prompt
next offers again what is missing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kv_offload.cold_prefix import ColdPrefixes
from kv_offload.host_cache import HostNode
from kv_offload.tickets import Completion, Direction
from kv_offload.transfer import Transfers

_MOST_STORES, _MOST_SAVES = 8, 2
"""Under way at once."""
_DEVICE_SHARE = 8
"""At most this part of the device is stored at once: it cannot be given to others meanwhile."""


@dataclass(frozen=True, slots=True)
class _Offer:
    owner: int
    target: HostNode
    blocks: Callable[[], Sequence[int] | None]
    """The device blocks that hold it, None when it is not there any more."""


class WriteThrough:
    def __init__(self, cold: ColdPrefixes, transfers: Transfers) -> None:
        self._cold, self._host = cold, cold.cache
        self._transfers = transfers
        self._offers: deque[_Offer] = deque()
        self._unsaved: deque[HostNode] = deque()
        share = cold.device_superblocks // _DEVICE_SHARE
        self._most_stores = max(1, min(_MOST_STORES, share))
        self._stores: dict[int, tuple[HostNode, int]] = {}
        """Node and superblock by ticket."""
        self._saves: set[int] = set()

    @property
    def busy(self) -> bool:
        """Whether there is something left to start."""
        return bool(self._offers or self._unsaved)

    def offer(
        self, owner: int, target: HostNode, blocks: Callable[[], Sequence[int] | None]
    ) -> None:
        """The device has this superblock, in what `blocks` says when it is asked."""
        if not target.pending and not self._host.holds(target):
            target.pending = True
            self._offers.append(_Offer(owner, target, blocks))

    def keep(self, node: HostNode) -> None:
        """The node has just come to the host, from the device."""
        if self._transfers.disk is not None:
            self._unsaved.append(node)

    def go_on(self) -> None:
        """Starts what may start."""
        stuck = self._transfers.is_stuck(Direction.STORE)
        while self._offers and (stuck or len(self._stores) < self._most_stores):
            self._start(self._offers.popleft(), wanted=not stuck)
        stuck = self._transfers.is_stuck(Direction.SAVE)
        while self._unsaved and (stuck or len(self._saves) < _MOST_SAVES):
            self._save(self._unsaved.popleft(), wanted=not stuck)

    def start_all(self, owner: int) -> None:
        """The owner is about to give up its blocks: starts all that it offered, or never."""
        mine = [offer for offer in self._offers if offer.owner == owner]
        self._offers = deque(offer for offer in self._offers if offer.owner != owner)
        stuck = self._transfers.is_stuck(Direction.STORE)
        for offer in mine:
            self._start(offer, wanted=not stuck)

    def _start(self, offer: _Offer, *, wanted: bool) -> None:
        target = offer.target
        blocks = offer.blocks() if wanted and self._has_place(target) else None
        handle = None if blocks is None else self._host.reserve()
        if blocks is None or handle is None:
            target.pending = False
            self._host.prune(target)
            return
        self._stores[self._transfers.store(blocks, handle)] = (target, handle)

    def _has_place(self, target: HostNode) -> bool:
        """Whether it could be found there, and its room costs no promise and none of what stands
        before it."""
        parent = target.parent
        if not target.alive or parent is None or self._host.holds(target):
            return False
        if parent.parent is not None and not (parent.pending or self._host.holds(parent)):
            return False
        self._host.touch(parent)
        return self._cold.spare() > 0 and not self._host.would_evict_above(target)

    def heard(self, answer: Completion) -> None:
        """The end of a copy, of one of these or another."""
        self._saves.discard(answer.ticket)
        if answer.ticket not in self._stores:
            return
        node, handle = self._stores.pop(answer.ticket)
        node.pending = False
        if answer.ok and node.alive and not self._host.holds(node):
            self._host.fill(node, handle)
            self._host.pool.free([handle])
            self._host.touch(node)
            self.keep(node)
        else:
            self._host.pool.drop(handle)
            self._host.pool.free([handle])
            self._host.prune(node)

    def _save(self, node: HostNode, *, wanted: bool) -> None:
        disk = self._transfers.disk
        if not wanted or disk is None or not node.alive or not self._host.holds(node):
            return
        key = self._host.disk_key(node)
        room = self._host.pool.ref_count(node.handle) > 0 or self._cold.spare() > 0
        if room and key not in disk:
            self._saves.add(self._transfers.save(node.handle, key))

    def reserved(self) -> Counter[int]:
        """References on superblocks that are being filled."""
        return Counter(handle for _, handle in self._stores.values())
