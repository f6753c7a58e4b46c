"""Which blocks hold KV that another request may use: a tree over token ids.

Owns: the tree, the references that it holds on the pool's blocks, and which of its blocks nobody
else uses, in the order in which they are evicted. Does not own: free lists and counts of references
(block_pool.py), who uses which block (kv_manager.py), or KV bytes. Imports no torch.

A node is a block: its key is the ids of the block's tokens, its place in the tree says which tokens
stand before them. Keys are compared, never hashes of them, so a hit is never another prompt's KV.
Siblings are sorted, so that the one which shares the longest beginning with given ids is a
neighbour of the place where they would go. A block that was not full when its sequence ended is a
leaf with a shorter key; it can be copied, not shared.

Whoever uses a node's block uses those of all its ancestors. Blocks are given up deepest first, so
in the order of their giving up every node stands before its ancestors: the first is always a leaf,
and least recently used eviction takes constant time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kv_offload.block_pool import BlockPool
from kv_offload.kv_events import BlockName, KVEventSink

BlockIds = tuple[int, ...]
"""Ids of the tokens of one block."""

_ROW_BITS = 32


@dataclass(frozen=True, slots=True)
class CacheKey:
    """What KV depends on besides the tokens before it. Trees of different keys share nothing.

    Positions are not part of it: they follow from the tokens and the images before, whose content
    keys cover their grids.
    """

    tenant: str = ""
    adapter: bytes = b""
    """Digest of the adapter's weights; empty for none."""
    model: bytes = b""
    """Digest of the model's configuration and files."""
    kv_dtype: str = ""
    rope: bytes = b""
    """Fingerprint of how positions are encoded."""


def image_id(key: bytes, row: int) -> int:
    """The id that stands in a tree for the image token that takes embedding row `row` of the image
    with content key `key`. No vocabulary has it, and no other key and row give it."""
    return int.from_bytes(b"\x01" + key, "big") << _ROW_BITS | row


class Node:
    """A block of some prompts. Made and changed by RadixCache only."""

    __slots__ = ("alive", "block", "children", "depth", "ids", "keys", "name", "parent")

    def __init__(self, parent: Node | None, ids: BlockIds, block: int) -> None:
        self.parent = parent
        self.ids = ids
        self.block = block
        """-1 for a root, which holds no tokens."""
        self.depth: int = 0 if parent is None else parent.depth + 1
        """Blocks from the start of the prompt to this one's end."""
        self.children: list[Node] = []
        self.keys: list[BlockIds] = []
        """The children's ids, ascending."""
        self.alive = True
        """False once it has left the tree."""
        self.name: BlockName | None = None
        """What it is called outside, where somebody listens."""

    def child(self, ids: BlockIds) -> Node | None:
        place = bisect_left(self.keys, ids)
        if place < len(self.keys) and self.keys[place] == ids:
            return self.children[place]
        return None

    def path(self) -> list[int]:
        """Blocks from the start of the prompt to this one."""
        blocks: list[int] = []
        node = self
        while node.parent is not None:
            blocks.append(node.block)
            node = node.parent
        return blocks[::-1]


class RadixCache:
    """Trees of blocks of one pool. The cache holds one reference on each block that it knows."""

    def __init__(self, pool: BlockPool, block_size: int, events: KVEventSink | None = None) -> None:
        """`events` is told which blocks come and go."""
        self.block_size = block_size
        self.least_copied_tokens = max(1, block_size // 8)
        """Fewer tokens are not worth a copy of their block."""
        self.version = 0
        """Changes whenever a look-up might find something else than before."""
        self.num_evicted = 0
        """Blocks evicted for room, since the start."""
        self.num_cleared = 0
        """Blocks that left by `clear`."""
        self._pool = pool
        self._events = events
        self._roots: dict[CacheKey, Node] = {}
        self._nodes: dict[int, Node] = {}
        """By block."""
        self._idle: OrderedDict[int, Node] = OrderedDict()
        """Nodes whose block nobody else refers to, the next to be evicted first."""
        self._held: Counter[int] = Counter()
        """References of copies, by block."""

    @property
    def num_blocks(self) -> int:
        return len(self._nodes)

    @property
    def num_idle(self) -> int:
        """Blocks that `evict` could give back."""
        return len(self._idle)

    @property
    def num_held(self) -> int:
        """Blocks that copies refer to."""
        return len(self._held)

    # -- looking up ---------------------------------------------------------------------------

    def root(self, key: CacheKey) -> Node:
        node = self._roots.get(key)
        if node is None:
            node = self._roots[key] = Node(None, (), -1)
            if self._events is not None:
                node.name = self._events.root(key.tenant, key.adapter)
        return node

    def walk(self, node: Node, ids: Sequence[int], limit: int) -> Node:
        """From `node`, which lies on the path of `ids`, to the deepest node whose tokens are among
        the first `limit` of `ids`."""
        size = self.block_size
        at = node.depth * size
        while at + size <= limit:
            child = node.child(tuple(ids[at : at + size]))
            if child is None:
                break
            node, at = child, at + size
        return node

    def beginning(self, node: Node, ids: Sequence[int], limit: int) -> tuple[Node, int] | None:
        """The child of `node` that shares most tokens with what follows in the first `limit` of
        `ids`, and how many; None when too few for a copy."""
        at = node.depth * self.block_size
        rest = tuple(ids[at : min(at + self.block_size, limit)])
        place = bisect_left(node.keys, rest)
        found: tuple[Node, int] | None = None
        most = self.least_copied_tokens - 1
        for index in (place - 1, place):
            if 0 <= index < len(node.keys):
                shared = _shared(node.keys[index], rest)
                if shared > most:
                    found, most = (node.children[index], shared), shared
        return found

    # -- what is in the tree ------------------------------------------------------------------

    def insert(self, parent: Node, ids: BlockIds, block: int) -> Node:
        """The child of `parent` with these ids: a new one for `block`, unless there is one, or one
        that begins with them, with a block of its own already."""
        place = bisect_left(parent.keys, ids)
        if place < len(parent.keys) and parent.keys[place][: len(ids)] == ids:
            return parent.children[place]
        if place > 0:
            shorter = parent.children[place - 1]
            if shorter.ids == ids[: len(shorter.ids)] and shorter.block in self._idle:
                del self._idle[shorter.block]
                self._drop(shorter)
                place -= 1
        node = Node(parent, ids, block)
        self._pool.share([block])
        parent.keys.insert(place, ids)
        parent.children.insert(place, node)
        self._nodes[block] = node
        self.version += 1
        if self._events is not None and parent.name is not None:
            node.name = parent.name.child(ids)
            self._events.stored("device", node.name)
        return node

    def take(self, blocks: Sequence[int]) -> None:
        """One more user of each of these blocks of the tree."""
        self._pool.share(blocks)
        for block in blocks:
            self._idle.pop(block, None)

    def touch(self, node: Node) -> None:
        """The node, a child of one in use, was used: it is evicted later."""
        if node.block in self._idle:
            self._idle.move_to_end(node.block)

    def give_up(self, blocks: Sequence[int]) -> None:
        """One user less of each block, of the tree or not; `blocks` in the order of their tokens.
        What nobody uses any more becomes free, or idle if the tree has it."""
        for block in reversed(blocks):
            self._pool.free([block])
            node = self._nodes.get(block)
            if node is not None and self._pool.ref_count(block) == 1:
                self._idle[block] = node

    def hold(self, blocks: Sequence[int]) -> None:
        """A copy reads or writes these blocks: they are not free before `release`, whoever gives
        them up, but that is no use of theirs. The tree may let go of them meanwhile."""
        self._pool.share(blocks)
        for block in blocks:
            self._held[block] += 1
            self._idle.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """The copy has ended; `blocks` in the order of their tokens."""
        highest: Node | None = None
        for block in reversed(blocks):
            self._held[block] -= 1
            if not self._held[block]:
                del self._held[block]
            self._pool.free([block])
            node = self._nodes.get(block)
            if node is not None and self._pool.ref_count(block) == 1:
                self._idle[block] = highest = node
        # Ancestors that became idle before stay behind what lies below them.
        up = None if highest is None else highest.parent
        while up is not None and up.parent is not None and self.users(up.block) == 0:
            self.touch(up)
            up = up.parent

    def is_held(self, block: int) -> bool:
        """Whether a copy reads or writes the block."""
        return block in self._held

    def holds(self, block: int) -> int:
        """References of copies on the block."""
        return self._held[block]

    def users(self, block: int) -> int:
        """Sequences that use the block."""
        return self._pool.ref_count(block) - (block in self._nodes) - self._held[block]

    def evict(self, count: int) -> None:
        """Gives `count` of the `num_idle` blocks back to the pool, least recently used first."""
        for _ in range(count):
            _, node = self._idle.popitem(last=False)
            self._drop(node)
        self.num_evicted += count

    def clear(self, tenant: str | None = None) -> int:
        """Forgets everything, or everything of one tenant, and returns how many blocks that was.
        Sequences that use such blocks keep them, but nobody finds them any more."""
        forgotten = 0
        keys = [k for k in self._roots if tenant is None or k.tenant == tenant]
        for key in keys:
            nodes = [self._roots.pop(key)]
            while nodes:
                node = nodes.pop()
                nodes += node.children
                node.alive = False
                if node.parent is not None:
                    del self._nodes[node.block]
                    self._idle.pop(node.block, None)
                    self._pool.free([node.block])
                    forgotten += 1
        self.num_cleared += forgotten
        self.version += 1
        if self._events is not None:
            self._events.cleared("device", [key.tenant for key in keys])
        return forgotten

    def _drop(self, node: Node) -> None:
        """Takes a node out of the tree that nobody uses, with what lies below it: such that only
        copies hold, which are not evicted for themselves."""
        for child in list(node.children):
            if child.block in self._idle or self.users(child.block):
                raise AssertionError(f"block {child.block} leaves the tree too late")
            self._drop(child)
        parent = node.parent
        if parent is None:
            raise AssertionError("a root cannot be evicted")
        place = bisect_left(parent.keys, node.ids)
        del parent.keys[place], parent.children[place]
        del self._nodes[node.block]
        node.alive = False
        self._pool.free([node.block])
        self.version += 1
        if self._events is not None and node.name is not None:
            self._events.evicted("device", node.name)

    def check_invariants(self) -> None:
        seen: dict[int, Node] = {}
        nodes = list(self._roots.values())
        while nodes:
            node = nodes.pop()
            nodes += node.children
            if not node.alive:
                raise AssertionError("a node of the tree is marked as gone")
            if node.keys != sorted(set(node.keys)) or node.keys != [c.ids for c in node.children]:
                raise AssertionError("a node's keys are not its children's ids in order")
            for child in node.children:
                full = len(child.ids) == self.block_size
                if child.parent is not node or not child.ids or (child.children and not full):
                    raise AssertionError(f"the node of block {child.block} is out of place")
                if child.block in seen:
                    raise AssertionError(f"block {child.block} is in the tree twice")
                seen[child.block] = child
                if self.users(child.block) > 0 and node.parent and self.users(node.block) == 0:
                    raise AssertionError(f"block {child.block} is used without the one before it")
        if seen != self._nodes:
            raise AssertionError("the tree and its table of blocks differ")
        idle = {block for block in seen if self._pool.ref_count(block) == 1}
        if idle != set(self._idle):
            raise AssertionError("the idle blocks are not those that only the tree refers to")
        place = {block: i for i, block in enumerate(self._idle)}
        for block, node in self._idle.items():
            up = node.parent
            while up is not None and up.block not in place and self._held[up.block]:
                up = up.parent
            if up is not None and place.get(up.block, len(place)) < place[block]:
                raise AssertionError(f"block {up.block} would be evicted before block {block}")


def _shared(a: BlockIds, b: BlockIds) -> int:
    """Length of the common beginning."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))


class HeldBlocks:
    """References of copies on the blocks of a RadixCache's pool; BlockRefs of tickets.py."""

    def __init__(self, cache: RadixCache, pool: BlockPool) -> None:
        self._cache, self._pool = cache, pool

    def ref_count(self, block: int) -> int:
        return self._pool.ref_count(block)

    def share(self, blocks: Sequence[int]) -> None:
        self._cache.hold(blocks)

    def free(self, blocks: Sequence[int]) -> None:
        self._cache.release(blocks)
