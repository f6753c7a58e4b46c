"""What a waiting sequence need not compute: KV that is cached, or that another is about to compute.

Owns: Prefixes, which looks sequences up in the prefix cache, and Leaders, which says whose next
block a sequence had better wait for. Does not own: the cache (kv_offload), or admission
(scheduler.py). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from chunked_prefill.sequence import Sequence
from kv_offload.kv_manager import Frontier, KVManager
from kv_offload.radix_cache import CacheKey


class Prefixes:
    """`key`: what all requests' KV depends on; the tenant is each request's own."""

    def __init__(self, kv: KVManager, key: CacheKey) -> None:
        self.kv = kv
        self.key = key

    def look_up(self, sequence: Sequence) -> None:
        """Sets a waiting sequence's counters to what the cache has of it now.

        The last token is always computed: the next one is sampled from it. So is the whole prompt
        when its log-probabilities are asked for.
        """
        limit = 0 if _computes_all(sequence) else sequence.num_tokens - 1
        key = replace(self.key, tenant=sequence.request.tenant)
        found = self.kv.look_up(
            sequence.seq_id, key, sequence.cache_ids, limit, reach_tokens=sequence.max_tokens
        )
        sequence.found(found)


class Leaders:
    """Of running sequences that can advance, or whose KV is on its way, those which are the first
    to have a block."""

    def __init__(self, kv: KVManager, running: Iterable[Sequence] = ()) -> None:
        """`running`: in the order of their rank."""
        self._kv = kv
        self._leads: dict[Frontier, Sequence] = {}
        for sequence in running:
            self.add(sequence)

    def add(self, sequence: Sequence) -> None:
        frontier = self._kv.frontier(sequence.seq_id, sequence.cache_ids)
        if frontier is not None and (sequence.advanceable > 0 or sequence.loading):
            self._leads.setdefault(frontier, sequence)

    def hold_back(self, sequence: Sequence) -> bool:
        """Whether the waiting sequence's next block is better waited for than computed: one that
        ranks before it is about to compute the same."""
        if not self._leads or _computes_all(sequence):
            return False
        frontier = self._kv.frontier(sequence.seq_id, sequence.cache_ids)
        leader = None if frontier is None else self._leads.get(frontier)
        return leader is not None and leader.rank < sequence.rank


def _computes_all(sequence: Sequence) -> bool:
    return sequence.request.sampling.prompt_logprobs is not None
