"""Sequences whose beginning lies on the host because the device cannot hold them.

Owns: which sequences are that long, how many device blocks each may keep, and which host
superblocks hold the beginning of each. Does not own: device blocks (kv_manager.py), the host pool's
books (host_pool.py), or copies. Imports no torch.

A sequence that may outgrow the device's pool is *large*. It keeps a quota of device blocks for its
end, where it writes; when it needs more, its oldest whole superblock goes to the host, and is
attended there. Everything else stays on the device, so nobody else pays for it. Room for all that a
large sequence may become is promised at its start: two of them never wait for each other.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kv_offload.host_pool import HostPool
from kv_offload.superblock import SUPERBLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class BlockStore:
    """Copy device `blocks` into the superblock in host slot `slot`, before the step's first write
    and in the order of the step's copies."""

    blocks: tuple[int, ...]
    slot: int


class ColdPrefixes:
    """The cold beginnings over one device pool of `num_blocks` blocks and one host pool.

    `chunk_tokens`: most tokens that a step adds to a sequence. Raises ValueError when the device is
    too small for a large sequence at all.
    """

    def __init__(self, host: HostPool, num_blocks: int, block_size: int, chunk_tokens: int) -> None:
        if SUPERBLOCK_TOKENS % block_size:
            raise ValueError(
                f"block_size is {block_size}; it must divide the {SUPERBLOCK_TOKENS} tokens of a "
                "superblock, so choose a power of two up to that"
            )
        self.host = host
        self.size = SUPERBLOCK_TOKENS // block_size
        """Device blocks of a superblock."""
        chunk_blocks = -(-chunk_tokens // block_size)
        least = 2 * (self.size + chunk_blocks)
        self.quota_blocks = max(least, num_blocks // 2)
        """Most device blocks of one large sequence: half of them can be a hit of the prefix cache,
        and a chunk and a superblock that is not full yet fit into the other half."""
        if self.quota_blocks > num_blocks:
            raise ValueError(
                f"the device's pool holds {num_blocks * block_size} tokens; sequences beyond it "
                f"need {least * block_size} of them at chunks of {chunk_tokens}. Give the pool "
                "more memory, lower --max-num-batched-tokens, or leave --host-kv-gib out"
            )
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._owned: dict[int, list[int]] = {}
        self._promised: dict[int, int] = {}

    @property
    def capacity_tokens(self) -> int:
        return self.host.num_superblocks * SUPERBLOCK_TOKENS

    def is_large(self, reach_tokens: int) -> bool:
        """Whether a sequence that may become so long cannot be promised to the device."""
        return reach_tokens > self._num_blocks * self._block_size

    def has_room(self, owner: int, reach_tokens: int, without: Collection[int] = ()) -> bool:
        """Whether all that the sequence may become fits beside what is promised to others, were
        those of `without` gone."""
        gone = {owner, *without}
        others = sum(count for o, count in self._promised.items() if o not in gone)
        return others + self._need(reach_tokens) <= self.host.num_superblocks

    def promise(self, owner: int, reach_tokens: int) -> None:
        self._promised[owner] = self._need(reach_tokens)

    def _need(self, reach_tokens: int) -> int:
        return -(-reach_tokens // SUPERBLOCK_TOKENS)

    def num_blocks(self, owner: int) -> int:
        """Device blocks whose worth of tokens lies on the host."""
        return len(self._owned.get(owner, ())) * self.size

    def superblocks(self, owner: int) -> tuple[int, ...]:
        """The numbers of the owner's beginning in the host's pool, in order."""
        return tuple(self._owned.get(owner, ()))

    def slots(self, owner: int) -> tuple[int, ...]:
        """Host slots of the owner's beginning, in order."""
        return tuple(self.host.slot(handle) for handle in self._owned.get(owner, ()))

    def push(self, owner: int, blocks: list[int]) -> BlockStore | None:
        """The owner's next superblock goes to the host; None when the host has no room."""
        if len(blocks) != self.size:
            raise ValueError(f"a superblock has {self.size} blocks, got {len(blocks)}")
        reserved = self.host.reserve(1)
        if reserved is None:
            return None
        (handle,) = reserved.superblocks
        self.host.commit(handle, self.size)
        self._owned.setdefault(owner, []).append(handle)
        return BlockStore(tuple(blocks), self.host.slot(handle))

    def free(self, owner: int) -> None:
        self._promised.pop(owner, None)
        for handle in self._owned.pop(owner, ()):
            self.host.drop(handle)
            self.host.free([handle])

    def check_invariants(self) -> None:
        self.host.check_invariants()
        counts: dict[int, int] = {}
        for owner, handles in self._owned.items():
            if owner not in self._promised:
                raise AssertionError(f"sequence {owner} has a cold beginning that nobody promised")
            if len(set(handles)) != len(handles):
                raise AssertionError("a beginning names a superblock twice")
            for handle in handles:
                counts[handle] = counts.get(handle, 0) + 1
        for handle, count in counts.items():
            if self.host.ref_count(handle) != count:
                raise AssertionError(
                    f"superblock {handle}: {self.host.ref_count(handle)} references, {count} owners"
                )
        if self.host.num_used != len(counts):
            raise AssertionError("superblocks are used that no sequence names")
