"""The host's index, the promises to large sequences, and copies' holds on the device's tree."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kv_offload.block_pool import BlockPool
from kv_offload.cold_prefix import ColdPrefixes
from kv_offload.disk_key import KEY_BYTES, chain_key, root_key, tenant_mark
from kv_offload.host_cache import HostCache, HostNode
from kv_offload.host_pool import HostPool
from kv_offload.radix_cache import CacheKey, HeldBlocks, Node, RadixCache

KEY = CacheKey("tenant", b"adapter", b"model", "float32", b"rope")


def kept(index: HostCache, ids: tuple[int, ...]) -> list[HostNode]:
    """Superblocks of all of `ids`, cached on the host."""
    node, found = index.root(KEY), []
    for at in range(len(ids) // index.tokens):
        node = index.child(node, index.ids_at(ids, at))
        if not index.holds(node):
            handle = index.reserve()
            assert handle is not None
            index.pool.commit(handle, 1)
            index.fill(node, handle)
            index.pool.free([handle])
        index.touch(node)
        found.append(node)
    return found


def test_a_walk_ends_before_the_first_hole() -> None:
    index = HostCache(HostPool(6), tokens=2)
    ids = tuple(range(10))
    path = kept(index, ids)
    root = index.root(KEY)
    assert index.walk(root, ids).depth == 5
    assert index.walk(root, (*ids[:5], 99, *ids[6:])).depth == 2
    assert index.walk(root, ids[:7]).depth == 3
    assert index.handles(path[2]) == [node.handle for node in path[:3]]
    index.discard(path[2])
    index.check_invariants()
    assert index.walk(root, ids).depth == 2
    assert index.walk(path[4], ids).depth == 2, "also from a node that was found before"
    assert path[2].alive, "what lies behind it may be of use again"
    index.discard(path[4])
    assert not path[4].alive
    index.discard(path[3])
    assert not path[3].alive
    assert not path[2].alive, "a hole with nothing behind it is gone"
    index.check_invariants()


def test_an_evicted_superblock_is_never_another_ones() -> None:
    index = HostCache(HostPool(3), tokens=2)
    first = kept(index, (1, 2, 3, 4))
    version = index.version
    second = kept(index, (5, 6, 7, 8))
    assert index.version > version
    assert index.walk(index.root(KEY), (1, 2, 3, 4)).depth == 1, "leaves leave first"
    assert not index.holds(first[1])
    assert [index.holds(node) for node in second] == [True, True]
    index.check_invariants()


def test_a_reset_is_of_one_tenant_and_what_is_referenced_stays() -> None:
    index = HostCache(HostPool(6), tokens=2)
    path = kept(index, (1, 2, 3, 4))
    handle = path[0].handle
    index.pool.share([handle])
    other = index.root(replace(KEY, tenant="other"))
    assert index.clear("nobody") == 0
    assert index.clear("tenant") == 2
    assert (index.pool.num_used, index.pool.num_cached) == (1, 0)
    assert not path[0].alive
    assert other.alive
    assert index.walk(index.root(KEY), (1, 2, 3, 4)).depth == 0
    index.pool.free([handle])
    assert index.pool.num_free == 6
    index.check_invariants()


def test_every_component_of_a_key_makes_another_name_on_disk() -> None:
    other = {
        "tenant": "x",
        "adapter": b"x",
        "model": b"x",
        "kv_dtype": "x",
        "rope": b"x",
    }
    names = {root_key(KEY)} | {root_key(replace(KEY, **{k: v})) for k, v in other.items()}
    assert len(names) == 6
    index = HostCache(HostPool(2), tokens=2)
    path = kept(index, (1, 2, 3, 4))
    name = index.disk_key(path[1])
    assert name == chain_key(chain_key(root_key(KEY), (1, 2)), (3, 4))
    assert name.startswith(tenant_mark("tenant"))
    assert len(name) == KEY_BYTES
    assert chain_key(root_key(KEY), (1, 23)) != chain_key(root_key(KEY), (12, 3))


# -- promises -----------------------------------------------------------------------------------


def cold(superblocks: int) -> ColdPrefixes:
    """16 blocks of one token on the device, superblocks of 4."""
    return ColdPrefixes(HostCache(HostPool(superblocks), tokens=4), 16, 1, 2)


def test_two_large_ones_are_never_promised_more_than_there_is() -> None:
    prefixes = cold(10)
    assert prefixes.quota_blocks == 12
    assert prefixes.has_room(1, 24, 20)
    prefixes.promise(1, 24, 20)
    assert prefixes.spare() == 4
    assert not prefixes.has_room(2, 20, 18)
    assert prefixes.has_room(2, 16, 14)
    assert prefixes.has_room(2, 20, 18, without=[1])
    prefixes.settle(1)
    assert prefixes.spare() == 10
    prefixes.free(1)
    prefixes.check_invariants()


def test_the_last_token_needs_no_kv() -> None:
    """A request that fills the device is held by it, also where the host could not take it."""
    prefixes = cold(2)
    assert not prefixes.is_large(17)
    assert prefixes.is_large(18)


def test_choices_share_what_is_cold_at_the_prompts_end() -> None:
    prefixes = cold(20)
    assert prefixes.room_tokens(40, 36, 1) == 40
    # 36 tokens less 12 of the quota are common: 6 superblocks; each further choice needs 4.
    assert prefixes.room_tokens(40, 36, 3) == (10 + 2 * 4) * 4
    assert prefixes.ever_fits(40, 36, 3)
    assert not prefixes.ever_fits(40, 36, 4)
    prefixes.promise(1, 40, 36, 3)
    stores = prefixes.push(1, list(range(12)), ())
    assert stores is not None
    assert len(stores) == 3
    prefixes.fork(1, 2)
    prefixes.fork(1, 3)
    assert prefixes.references() == dict.fromkeys(prefixes.superblocks(1), 3)
    prefixes.free(1)
    prefixes.free(3)
    assert prefixes.host.num_used == 3
    prefixes.free(2)
    assert prefixes.host.num_free == 20
    prefixes.check_invariants()


def test_what_is_there_is_taken_instead_of_copied() -> None:
    prefixes = cold(4)
    path = kept(prefixes.cache, tuple(range(8)))
    for node in path:
        prefixes.host._entries[node.handle].filled = 4
    kept(prefixes.cache, tuple(range(50, 58)))
    assert prefixes.host.num_free == 0
    prefixes.promise(1, 16)
    stores = prefixes.push(1, list(range(12)), path)
    assert stores is not None
    assert len(stores) == 1, "room for the third was not made of the first two"
    assert prefixes.superblocks(1)[:2] == tuple(node.handle for node in path)
    prefixes.free(1)
    assert prefixes.host.num_cached == 3
    prefixes.check_invariants()
    prefixes.cache.check_invariants()


# -- holds --------------------------------------------------------------------------------------


def chain(cache: RadixCache, pool: BlockPool, length: int) -> list[Node]:
    """A prompt of `length` blocks in the tree, used by nobody."""
    blocks = pool.allocate(length, owner=1, after=None, reach=length)
    node, found = cache.root(KEY), []
    for block in blocks:
        node = cache.insert(node, (block,), block)
        found.append(node)
    cache.give_up(blocks)
    return found


def test_a_held_block_leaves_the_tree_with_what_stands_before_it() -> None:
    pool = BlockPool(8)
    cache = RadixCache(pool, 1)
    nodes = chain(cache, pool, 4)
    held = HeldBlocks(cache, pool)
    held.share([nodes[1].block, nodes[2].block])
    cache.check_invariants()
    assert cache.num_idle == 2, "what a copy reads cannot be had"
    cache.evict(2)
    assert (pool.num_free, cache.num_blocks) == (6, 0)
    cache.check_invariants()
    held.free([nodes[1].block, nodes[2].block])
    assert pool.num_free == 8
    assert cache.num_held == 0


def test_a_released_block_is_evicted_before_its_ancestors() -> None:
    pool = BlockPool(8)
    cache = RadixCache(pool, 1)
    nodes = chain(cache, pool, 5)
    held = HeldBlocks(cache, pool)
    held.share([nodes[1].block])
    held.share([nodes[3].block])
    held.free([nodes[3].block])
    cache.check_invariants()
    held.free([nodes[1].block])
    cache.check_invariants()
    for left in (4, 3, 2, 1, 0):
        cache.evict(1)
        cache.check_invariants()
        assert sum(node.alive for node in nodes) == left
        assert all(node.alive for node in nodes[:left])


def test_a_reset_while_a_copy_reads() -> None:
    pool = BlockPool(4)
    cache = RadixCache(pool, 1)
    nodes = chain(cache, pool, 2)
    held = HeldBlocks(cache, pool)
    held.share([node.block for node in nodes])
    cache.clear()
    assert pool.num_free == 2
    held.free([node.block for node in nodes])
    assert pool.num_free == 4
    with pytest.raises(ValueError, match="freed twice"):
        held.free([0])
