"""How much of the KV pool long prompts may hold together.

Owns: LongPrompts, the rule of one admission. Does not own: admission (scheduler.py), or blocks
(kv_offload). Imports no torch.

A few prompts that each take a good part of the pool would fill it, and hundreds of short ones would
wait until one of them ends. So while short ones come, long ones share a part of the pool, and wait
for one another beyond it; one that runs without another long one may have all that it needs.
"""

from __future__ import annotations

from collections.abc import Iterable

from chunked_prefill.sequence import Sequence
from kv_offload.kv_manager import KVManager

DEFAULT_SHARE = 0.5
_LONG_OF = 8
"""A sequence is long when it takes more than this part of the pool for itself."""
_REMEMBERED = 32
"""Arrivals after which the last short one counts no more: without any, nobody would use what is
kept for them."""


class LongPrompts:
    """`share`: of the pool, what long ones may hold together; 1 is no rule."""

    def __init__(self, kv: KVManager, share: float = DEFAULT_SHARE) -> None:
        self.share = share
        self._kv = kv
        self._since_short = _REMEMBERED

    def arrived(self, sequence: Sequence) -> None:
        short = not self._is_long(self._kv.blocks_for(sequence.num_tokens + 1))
        self._since_short = 0 if short else self._since_short + 1

    def crowds_out(self, sequence: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether `sequence` is long and would, beside the long ones of `running`, take more than
        their share. Blocks that were found on the device count for nobody: questions about one
        document share it, and answers share their prompt."""
        own = self._own_blocks(sequence)
        if self._since_short >= _REMEMBERED or not self._is_long(own):
            return False
        others = sum(n for n in map(self._own_blocks, running) if self._is_long(n))
        return others > 0 and own + others > self.share * self._kv.pool.num_blocks

    def _is_long(self, blocks: int) -> bool:
        return blocks * _LONG_OF > self._kv.pool.num_blocks

    def _own_blocks(self, sequence: Sequence) -> int:
        kv, name = self._kv, sequence.seq_id
        held = kv.held_blocks(name)
        wanted = held + kv.lacking_blocks(name, sequence.num_tokens + 1, sequence.max_tokens)
        if sequence.choice:
            found = sequence.num_prompt_tokens
        elif held:
            found = kv.sources(name).device
        else:
            found = 0 if kv.wants_load(name) else sequence.num_cached_tokens
        return max(0, wanted - found // kv.block_size)
