"""Which superblocks on the host hold KV that another request may use: a tree over token ids.

Owns: HostCache: for each CacheKey a tree of superblocks, and the numbers under which they lie in
the host's pool. Does not own: which superblocks are free,
referenced or evicted (host_pool.py), the device's tree (radix_cache.py), or copies (transfer.py).
Imports no torch.

A node is a superblock of 256 tokens, found from its parent by its tokens' ids, which are compared:
nothing is trusted to a hash here. The pool evicts without asking. Its numbers are never given
again, so a node whose superblock has gone finds nothing, never another prompt's KV; such a *hole*
stays in the tree while something lies behind it, and whoever walks stops in front of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kv_offload.disk_key import chain_key, root_key
from kv_offload.host_pool import HostPool
from kv_offload.kv_events import BlockName, KVEventSink
from kv_offload.radix_cache import CacheKey
from kv_offload.superblock import SUPERBLOCK_TOKENS

_NOWHERE = -1


class HostNode:
    """A superblock of some prompts. Made and changed by HostCache only."""

    __slots__ = (
        "alive",
        "children",
        "claims",
        "depth",
        "handle",
        "ids",
        "key",
        "name",
        "parent",
        "pending",
    )

    def __init__(
        self, parent: HostNode | None, ids: tuple[int, ...], key: bytes | None = None
    ) -> None:
        self.parent = parent
        self.ids = ids
        self.key = key
        """Its name on disk, once somebody asked for it (disk_key)."""
        self.name: BlockName | None = None
        """What it is called outside, once that was told."""
        self.depth: int = 0 if parent is None else parent.depth + 1
        """Superblocks from the start of the prompt to this one's end."""
        self.children: dict[tuple[int, ...], HostNode] = {}
        self.handle = _NOWHERE
        """Its number in the host's pool, which may have evicted it since."""
        self.pending = False
        """Whether a copy into the host is asked for or under way."""
        self.claims = 0
        """How many want to read it when it is there: it stays in the tree until then."""
        self.alive = True
        """False once it has left the tree."""


class HostCache:
    """The index over one pool. It holds no references: what nobody else references may be evicted.

    `tokens`: of a superblock. `events` is told which superblocks come and go.
    """

    def __init__(
        self,
        pool: HostPool,
        tokens: int = SUPERBLOCK_TOKENS,
        events: KVEventSink | None = None,
    ) -> None:
        self._events = events
        self.pool = pool
        self.tokens = tokens
        self.version = 0
        """Changes whenever a look-up might find something else than before."""
        self.num_cleared = 0
        """Superblocks that left by `clear`."""
        self._roots: dict[CacheKey, HostNode] = {}
        self._nodes: dict[int, HostNode] = {}
        """By number in the pool."""

    # -- looking up --------------------------------------------------------------------------------

    def root(self, key: CacheKey) -> HostNode:
        node = self._roots.get(key)
        if node is None:
            node = self._roots[key] = HostNode(None, (), root_key(key))
            if self._events is not None:
                node.name = self._events.root(key.tenant, key.adapter)
        return node

    def holds(self, node: HostNode) -> bool:
        """Whether the superblock is on the host now."""
        return node.handle != _NOWHERE and self.pool.filled(node.handle) > 0

    def knows(self, handle: int) -> bool:
        """Whether somebody may find this superblock later."""
        return handle in self._nodes

    def ids_at(self, ids: Sequence[int], index: int) -> tuple[int, ...]:
        """The tokens of superblock `index`; shorter than one where `ids` end."""
        return tuple(ids[index * self.tokens : (index + 1) * self.tokens])

    def walk(self, seen: HostNode, ids: Sequence[int]) -> HostNode:
        """The deepest node on the path of `ids` that is on the host with all before it. `seen` is a
        node of that path, where a walk ended before."""
        node = self._unbroken(seen)
        while True:
            child = node.children.get(self.ids_at(ids, node.depth))
            if child is None or not self.holds(child):
                return node
            node = child

    def _unbroken(self, node: HostNode) -> HostNode:
        """The deepest of a path's nodes before the first hole."""
        found = node
        while node.parent is not None:
            if not self.holds(node):
                found = node.parent
            node = node.parent
        return found

    def handles(self, node: HostNode) -> list[int]:
        """Numbers of the superblocks from the start of the prompt to this one."""
        return [step.handle for step in upwards(node)][::-1]

    def touch(self, node: HostNode) -> None:
        """The superblock was used with all before it."""
        self.pool.touch([step.handle for step in upwards(node)])

    def would_evict_above(self, node: HostNode) -> bool:
        """Whether the next reservation would take room from an ancestor of the node."""
        loser = self.pool.next_evicted
        return loser is not None and any(step.handle == loser for step in upwards(node))

    def disk_key(self, node: HostNode) -> bytes:
        """Under which the node's superblock lies on disk."""
        step, unnamed = node, []
        while step.key is None:
            unnamed.append(step)
            assert step.parent is not None
            step = step.parent
        key = step.key
        for step in reversed(unnamed):
            key = step.key = chain_key(key, step.ids)
        if self._events is not None and node.parent is not None:
            self._tell_name(self._events, node, key)
        return key

    def _tell_name(self, events: KVEventSink, node: HostNode, key: bytes) -> None:
        root = node
        while root.parent is not None:
            root = root.parent
        assert root.key is not None
        events.named(key, root.key, _name(root), _name(node))

    # -- what is in the tree -----------------------------------------------------------------------

    def child(self, parent: HostNode, ids: tuple[int, ...]) -> HostNode:
        """The child with these ids; a hole if there was none."""
        node = parent.children.get(ids)
        if node is None:
            node = parent.children[ids] = HostNode(parent, ids)
        return node

    def fill(self, node: HostNode, handle: int) -> None:
        """The node, a hole of the tree, is that superblock from now on."""
        if not node.alive or self.holds(node):
            raise AssertionError(f"superblock {handle} has no place in the tree")
        node.handle = handle
        self._nodes[handle] = node
        self.version += 1
        if self._events is not None:
            self._events.stored("host", _name(node))

    def reserve(self) -> int | None:
        """A superblock with one reference, for which the longest unused one may be evicted; None
        when all are referenced."""
        reserved = self.pool.reserve(1)
        if reserved is None:
            return None
        for handle in reserved.evicted:
            self._forget(self._nodes.pop(handle))
        return reserved.superblocks[0]

    def discard(self, node: HostNode) -> None:
        """What the superblock holds is of no use to anybody."""
        if node.handle != _NOWHERE:
            self.pool.drop(node.handle)
            del self._nodes[node.handle]
            self._forget(node)

    def _forget(self, node: HostNode) -> None:
        node.handle = _NOWHERE
        self.version += 1
        if self._events is not None:
            self._events.evicted("host", _name(node))
        self.prune(node)

    def prune(self, node: HostNode) -> None:
        """Takes the node out of the tree if it is a hole that nothing needs, and its ancestors
        likewise."""
        while node.parent is not None and node.alive:
            if node.children or node.pending or node.claims or node.handle != _NOWHERE:
                return
            del node.parent.children[node.ids]
            node.alive = False
            node = node.parent

    def clear(self, tenant: str | None = None) -> int:
        """Forgets everything, or everything of one tenant, and returns how many superblocks that
        was. What is referenced stays where it is, but nobody finds it any more."""
        forgotten = 0
        keys = [k for k in self._roots if tenant is None or k.tenant == tenant]
        for key in keys:
            nodes = [self._roots.pop(key)]
            while nodes:
                node = nodes.pop()
                nodes += node.children.values()
                node.alive = False
                if node.handle != _NOWHERE:
                    self.pool.drop(node.handle)
                    del self._nodes[node.handle]
                    node.handle = _NOWHERE
                    forgotten += 1
        self.num_cleared += forgotten
        self.version += 1
        if self._events is not None:
            self._events.cleared("host", [key.tenant for key in keys])
        return forgotten

    def check_invariants(self) -> None:
        self.pool.check_invariants()
        seen: dict[int, HostNode] = {}
        nodes = list(self._roots.values())
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            if not node.alive or any(c.parent is not node for c in node.children.values()):
                raise AssertionError("a node is out of place")
            if node.handle == _NOWHERE:
                needed = node.children or node.pending or node.claims
                if node.parent is not None and not needed:
                    raise AssertionError("a hole without anything behind it is in the tree")
                continue
            if not self.pool.filled(node.handle):
                raise AssertionError(f"superblock {node.handle} is in the tree without its KV")
            seen[node.handle] = node
        if seen != self._nodes:
            raise AssertionError("the tree and its table of superblocks differ")


def _name(node: HostNode) -> BlockName:
    """What the node of a tree with a named root is called outside."""
    step, unnamed = node, []
    while step.name is None:
        unnamed.append(step)
        assert step.parent is not None
        step = step.parent
    name = step.name
    for step in reversed(unnamed):
        name = step.name = name.child(step.ids)
    return name


def upwards(node: HostNode) -> Iterator[HostNode]:
    """The node and its ancestors but for the root."""
    while node.parent is not None:
        yield node
        node = node.parent
