"""Sequences whose beginning lies on the host because the device cannot hold them.

Owns: which sequences are that long, how many device blocks each may keep, which host superblocks
hold the beginning of each, and how much room on the host is promised to them. Does not own: device
blocks (kv_manager.py), what others may find on the host (host_cache.py), or copies. Imports no
torch.

A sequence that may outgrow the device's pool is *large*. It keeps a quota of device blocks for its
end, where it writes; when it needs more, its oldest whole superblock goes to the host, and is
attended there. Everything else stays on the device, so nobody else pays for it. Room for all that a
large sequence may become is promised at its start: two of them never wait for each other, and what
is kept on the host for later takes only what nobody was promised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from kv_offload.host_cache import HostCache, HostNode
from kv_offload.host_pool import HostPool


@dataclass(frozen=True, slots=True)
class BlockStore:
    """Copy device `blocks` into the superblock in host slot `slot`, before the step's first write
    and in the order of the step's copies."""

    blocks: tuple[int, ...]
    slot: int


class DeviceTooSmallError(ValueError):
    """The device's pool has `num_blocks`, where a large sequence needs `least_blocks`."""

    def __init__(
        self, num_blocks: int, least_blocks: int, block_size: int, chunk_tokens: int
    ) -> None:
        self.num_blocks, self.least_blocks = num_blocks, least_blocks
        super().__init__(
            f"the device's pool holds {num_blocks * block_size} tokens; sequences beyond it need "
            f"{least_blocks * block_size} of them at --max-num-batched-tokens {chunk_tokens}"
        )


@dataclass(slots=True)
class _Cold:
    """One large sequence."""

    promised: int = 0
    """Superblocks that it may become."""
    per_choice: int = 0
    """Superblocks that each choice still to be forked off may need for itself."""
    choices: int = 0
    """That are still to be forked off."""
    owned: list[int] = field(default_factory=list)
    """Numbers of the superblocks of its beginning, a reference on each."""

    @property
    def to_come(self) -> int:
        return max(0, self.promised - len(self.owned)) + self.choices * self.per_choice


class ColdPrefixes:
    """The cold beginnings over one device pool of `num_blocks` blocks and one host pool.

    `chunk_tokens`: most tokens that a step adds to a sequence. Raises DeviceTooSmallError when the
    device is too small for a large sequence at all, ValueError for a block_size that does not fit.
    """

    def __init__(
        self, cache: HostCache, num_blocks: int, block_size: int, chunk_tokens: int
    ) -> None:
        if cache.tokens % block_size:
            raise ValueError(
                f"block_size is {block_size}; it must divide the {cache.tokens} tokens of a "
                "superblock, so choose a power of two up to that"
            )
        self.cache = cache
        self.size = cache.tokens // block_size
        """Device blocks of a superblock."""
        chunk_blocks = -(-chunk_tokens // block_size)
        least = 2 * (self.size + chunk_blocks)
        self.quota_blocks = max(least, num_blocks // 2)
        """Most device blocks of one large sequence: half of them can be a hit of the prefix cache,
        and a chunk and a superblock that is not full yet fit into the other half."""
        if self.quota_blocks > num_blocks:
            raise DeviceTooSmallError(num_blocks, least, block_size, chunk_tokens)
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._owners: dict[int, _Cold] = {}
        self._references: Counter[int] = Counter()
        """Owners of each superblock."""

    @property
    def host(self) -> HostPool:
        return self.cache.pool

    @property
    def device_superblocks(self) -> int:
        """Whole superblocks that the device's pool holds."""
        return self._num_blocks // self.size

    @property
    def capacity_tokens(self) -> int:
        return self.host.num_superblocks * self.cache.tokens

    def is_large(self, reach_tokens: int) -> bool:
        """Whether a sequence that may become so long cannot be promised to the device. Its last
        token needs no KV."""
        return reach_tokens - 1 > self._num_blocks * self._block_size

    # -- room ----------------------------------------------------------------------------------

    def ever_fits(self, reach_tokens: int, prompt_tokens: int, choices: int) -> bool:
        """Whether the whole host holds a request of `choices` answers that may each become so
        long."""
        wish = self._wish(reach_tokens, prompt_tokens, choices)
        return wish.to_come <= self.host.num_superblocks

    def room_tokens(self, reach_tokens: int, prompt_tokens: int, choices: int) -> int:
        """On the host, that such a request needs."""
        return self._wish(reach_tokens, prompt_tokens, choices).to_come * self.cache.tokens

    def has_room(
        self,
        owner: int,
        reach_tokens: int,
        prompt_tokens: int,
        choices: int = 1,
        *,
        without: Collection[int] = (),
        shared: Sequence[int] = (),
    ) -> bool:
        """Whether all that the sequence may become fits beside what is promised to others, were
        those of `without` gone. It would start from the superblocks `shared`, which are there."""
        gone = {owner, *without}
        leaving: Counter[int] = Counter()
        for other in without:
            if other in self._owners:
                leaving.update(self._owners[other].owned)
        freed = sum(self.host.ref_count(handle) == count for handle, count in leaving.items())
        others = sum(cold.to_come for o, cold in self._owners.items() if o not in gone)
        there = sum(self.host.ref_count(handle) > leaving[handle] for handle in shared)
        need = self._wish(reach_tokens, prompt_tokens, choices).to_come - there
        return others + need <= self.host.num_available + freed

    def spare(self) -> int:
        """Superblocks that can be had and that nobody was promised."""
        return self.host.num_available - sum(cold.to_come for cold in self._owners.values())

    def promise(
        self, owner: int, reach_tokens: int, prompt_tokens: int = 0, choices: int = 1
    ) -> None:
        """Sets room aside for the sequence; again, when it is there already, changes nothing."""
        if owner not in self._owners:
            self._owners[owner] = self._wish(reach_tokens, prompt_tokens, choices)

    def to_come(self, owner: int) -> int:
        """Superblocks that the owner was promised and has not yet."""
        return self._owners[owner].to_come if owner in self._owners else 0

    def settle(self, owner: int) -> None:
        """The sequence grows no more: the rest of its promise is free for others."""
        if owner in self._owners:
            cold = self._owners[owner]
            cold.promised, cold.choices = len(cold.owned), 0

    def _wish(self, reach_tokens: int, prompt_tokens: int, choices: int) -> _Cold:
        """Choices share what is cold at the end of the prompt: all but a quota of blocks."""
        whole = self._superblocks(reach_tokens)
        hot = self.quota_blocks * self._block_size
        common = self._superblocks(max(0, prompt_tokens - hot))
        return _Cold(whole, whole - min(common, whole), choices - 1)

    def _superblocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.cache.tokens)

    # -- beginnings ------------------------------------------------------------------------------

    def count(self, owner: int) -> int:
        """Superblocks of the owner's beginning."""
        cold = self._owners.get(owner)
        return 0 if cold is None else len(cold.owned)

    def num_blocks(self, owner: int) -> int:
        """Device blocks whose worth of tokens lies on the host."""
        return self.count(owner) * self.size

    def superblocks(self, owner: int) -> tuple[int, ...]:
        """The numbers of the owner's beginning in the host's pool, in order."""
        cold = self._owners.get(owner)
        return () if cold is None else tuple(cold.owned)

    def slots(self, owner: int) -> tuple[int, ...]:
        """Host slots of the owner's beginning, in order."""
        return tuple(self.host.slot(handle) for handle in self.superblocks(owner))

    def push(
        self, owner: int, blocks: Sequence[int], path: Sequence[HostNode] = ()
    ) -> tuple[BlockStore, ...] | None:
        """The owner's next superblocks go to the host. `path` are their nodes as far as they have
        some: what is there already is not copied again. Returns the copies to make, or None, with
        nothing changed, when the host has no room."""
        if len(blocks) % self.size:
            raise ValueError(f"a superblock has {self.size} blocks, got {len(blocks)} of several")
        count = len(blocks) // self.size
        there = {i: n.handle for i, n in enumerate(path[:count]) if self.cache.holds(n)}
        # Held before room is made, which might evict them.
        self.host.share(there.values())
        if count - len(there) > self.host.num_available:
            self.host.free(there.values())
            return None
        stores = []
        for i in range(count):
            if i in there:
                self.take(owner, [there[i]])
                continue
            handle = self.cache.reserve()
            assert handle is not None
            self.host.commit(handle, self.size)
            self._owners[owner].owned.append(handle)
            self._references[handle] += 1
            part = tuple(blocks[i * self.size : (i + 1) * self.size])
            stores.append(BlockStore(part, self.host.slot(handle)))
        self.host.free(there.values())
        return tuple(stores)

    def take(self, owner: int, handles: Sequence[int]) -> None:
        """The owner's beginning goes on with superblocks that are on the host already."""
        self.host.share(handles)
        self._references.update(handles)
        self._owners[owner].owned += handles

    def replace(self, owner: int, index: int, handle: int) -> None:
        """Superblock `index` of the owner's beginning lies on the host twice; use the other."""
        own = self._owners[owner].owned[index]
        self.host.share([handle])
        self._references[handle] += 1
        self._owners[owner].owned[index] = handle
        self._give_up(own)

    def fork(self, parent: int, child: int) -> None:
        """The child shares the parent's beginning, and has its part of the parent's promise."""
        family = self._owners[parent]
        family.choices = max(0, family.choices - 1)
        self._owners[child] = _Cold(family.promised)
        self.take(child, family.owned)

    def free(self, owner: int) -> None:
        """What nobody may find is free, the rest is kept while there is room."""
        cold = self._owners.pop(owner, None)
        for handle in reversed(cold.owned if cold else ()):
            self._give_up(handle)

    def _give_up(self, handle: int) -> None:
        self._references[handle] -= 1
        if not self._references[handle]:
            del self._references[handle]
            if not self.cache.knows(handle):
                self.host.drop(handle)
        self.host.free([handle])

    def references(self) -> Counter[int]:
        """References on superblocks, for the pool's own checks."""
        return Counter(self._references)

    def check_invariants(self) -> None:
        counts: Counter[int] = Counter()
        for owner, cold in self._owners.items():
            if len(cold.owned) > cold.promised:
                raise AssertionError(f"sequence {owner} has more on the host than was promised")
            if len(set(cold.owned)) != len(cold.owned):
                raise AssertionError("a beginning names a superblock twice")
            counts.update(cold.owned)
        if counts != self._references:
            raise AssertionError("the owners of superblocks are miscounted")
        for handle in counts:
            if self.host.filled(handle) != self.size:
                raise AssertionError(f"superblock {handle} of a beginning is not whole")
