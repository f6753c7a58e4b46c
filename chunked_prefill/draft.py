"""A step's plan while it is being made.

Owns: Draft: chunks with the KV reserved for them, and how one is taken back. Does not own: who gets
a chunk (scheduler.py), or KV (kv_offload). Imports no torch.
"""

from __future__ import annotations

from chunked_prefill.sequence import Sequence
from chunked_prefill.step_plan import ScheduledChunk
from kv_offload.kv_manager import BlockCopy, BlockStore, KVManager


class Draft:
    """A plan in the making; a chunk is in it exactly while its KV is reserved."""

    def __init__(self, kv: KVManager) -> None:
        self.kv = kv
        self.chunks: list[ScheduledChunk] = []
        self.copies: list[BlockCopy | BlockStore] = []
        self.preempted: list[Sequence] = []
        self.out_of_memory = False
        """Whether a running sequence lacked KV; nobody is admitted in such a step."""
        self._copies_of: dict[int, tuple[BlockCopy | BlockStore, ...]] = {}

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    def try_add(self, sequence: Sequence, length: int) -> bool:
        """A chunk of `length`, or 0: its KV is to be loaded first."""
        if not length:
            return self.kv.load(
                sequence.seq_id,
                sequence.cache_ids,
                reach_tokens=sequence.max_tokens,
                known_tokens=sequence.num_tokens,
                choices=sequence.width,
            )
        start = sequence.num_computed_tokens
        if not self.kv.has_place(sequence.seq_id, start, start + length):
            copies = self.kv.reserve(
                sequence.seq_id,
                start,
                start + length,
                reach_tokens=sequence.max_tokens,
                known_tokens=sequence.num_tokens,
                choices=sequence.width,
            )
            if copies is None:
                return False
            self.copies.extend(copies)
            self._copies_of[sequence.seq_id] = copies
        self.chunks.append(ScheduledChunk(sequence, start, length))
        return True

    def drop(self, sequence: Sequence) -> None:
        self.chunks = [c for c in self.chunks if c.sequence is not sequence]
        for copy in self._copies_of.pop(sequence.seq_id, ()):
            self.copies.remove(copy)
