"""Whether KV is better brought back than computed.

Owns: CostModel, and Worth: how far host and disk have a prompt, and how much of that to bring.
Does not own: bringing it (recall.py), the index (host_cache.py), or measuring (transfer.py knows
how fast copies are, a CostModel how fast compute is). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kv_offload.disk_key import chain_key
from kv_offload.host_cache import HostCache, HostNode
from kv_offload.tickets import Direction
from kv_offload.transfer import Transfers

LEAST_TOKENS = 64
"""Fewer are not worth a wait."""
_LATENCY_S = 0.002
"""Before the first bytes move, and until somebody hears of the last."""


class CostModel(Protocol):
    """What it would take to do without a copy."""

    def compute_s(self, start: int, end: int) -> float:
        """Seconds to compute the KV of tokens [start, end) of a prompt."""
        ...


class Worth:
    """`block_size` tokens and `bytes_per_token` bytes are those of the device's cache."""

    def __init__(
        self,
        host: HostCache,
        transfers: Transfers,
        cost: CostModel,
        *,
        block_size: int,
        bytes_per_token: int,
    ) -> None:
        self.cost = cost
        self.least_tokens = LEAST_TOKENS
        self._host, self._transfers = host, transfers
        self._block_size, self._bytes_per_token = block_size, bytes_per_token

    def loading(
        self, seen: HostNode, ids: Sequence[int], keys: list[bytes], have: int, limit: int
    ) -> int:
        """Up to which token a recall would bring the prompt `ids`, of which the device has the
        first `have` tokens and may have the first `limit`; 0 when it is not worth it.

        `seen` is its deepest superblock on the host. `keys`, kept from call to call, are the names
        of its superblocks on disk as far as they were needed.
        """
        if limit - have < self.least_tokens or self._transfers.is_stuck(Direction.LOAD):
            return 0
        limit -= limit % self._block_size
        on_host = min(limit, seen.depth * self._host.tokens)
        ends = {on_host: 0.0}
        depth, fetched = self._on_disk(seen, ids, keys, limit)
        if fetched:
            num_bytes = fetched * self._host.tokens * self._bytes_per_token
            ends[min(limit, depth * self._host.tokens)] = self._transfers.estimate_s(
                Direction.FETCH, num_bytes
            )
        best, most_saved = 0, 0.0
        for end, fetch_s in ends.items():
            if end - have < self.least_tokens:
                continue
            saved = self.cost.compute_s(have, end) - fetch_s - self.load_s(end - have)
            if saved > most_saved:
                best, most_saved = end, saved
        return best

    def recall_s(self, have: int, end: int, seen: HostNode | None, *, large: bool) -> float:
        """Seconds to bring tokens [have, end), of which the host has those before `seen`: what it
        has not comes from disk, and all of it goes on to the device unless the owner is large."""
        on_host = 0 if seen is None else seen.depth * self._host.tokens
        fetched = max(0, end - max(have, on_host)) * self._bytes_per_token
        fetch_s = self._transfers.estimate_s(Direction.FETCH, fetched) if fetched else 0.0
        return fetch_s + (_LATENCY_S if large else self.load_s(end - have))

    def load_s(self, num_tokens: int) -> float:
        """Seconds from asking for tokens that lie on the host to having them on the device."""
        num_bytes = num_tokens * self._bytes_per_token
        return _LATENCY_S + self._transfers.estimate_s(Direction.LOAD, num_bytes)

    def fetching(self, seen: HostNode, ids: Sequence[int], keys: list[bytes], limit: int) -> int:
        """As `loading`, of superblocks that are fetched from disk and used on the host: up to which
        token; 0 when it is not worth it."""
        depth, fetched = self._on_disk(seen, ids, keys, limit)
        end = min(depth, limit // self._host.tokens) * self._host.tokens
        start = seen.depth * self._host.tokens
        if not fetched or end - start < self.least_tokens:
            return 0
        num_bytes = fetched * self._host.tokens * self._bytes_per_token
        takes = _LATENCY_S + self._transfers.estimate_s(Direction.FETCH, num_bytes)
        return end if self.cost.compute_s(start, end) > takes else 0

    def _on_disk(
        self, seen: HostNode, ids: Sequence[int], keys: list[bytes], limit: int
    ) -> tuple[int, int]:
        """How many superblocks host and disk have together, and how many of them only the disk."""
        disk, tokens = self._transfers.disk, self._host.tokens
        depth, fetched = seen.depth, 0
        if disk is None or self._transfers.is_stuck(Direction.FETCH):
            return depth, fetched
        node: HostNode | None = seen
        while depth * tokens < limit and (depth + 1) * tokens <= len(ids):
            step = self._host.ids_at(ids, depth)
            node = None if node is None else node.children.get(step)
            if node is None or not self._host.holds(node):
                if self._key(seen, ids, keys, depth) not in disk:
                    break
                fetched += 1
            depth += 1
        return depth, fetched

    def _key(self, seen: HostNode, ids: Sequence[int], keys: list[bytes], index: int) -> bytes:
        if not keys:
            root = seen
            while root.parent is not None:
                root = root.parent
            keys.append(self._host.disk_key(root))
        while len(keys) <= index + 1:
            keys.append(chain_key(keys[-1], self._host.ids_at(ids, len(keys) - 1)))
        return keys[index + 1]
