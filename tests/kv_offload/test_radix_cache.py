"""What the prefix cache finds, keeps and gives up; its life with requests is a state machine in
tests/chunked_prefill/test_prefix_machine.py."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kv_offload.block_pool import BlockPool
from kv_offload.kv_manager import BlockCopy, KVManager
from kv_offload.radix_cache import CacheKey, RadixCache, image_id
from vision_encoder.media import content_key

SIZE = 4
KEY = CacheKey("tenant", b"adapter", b"model", "float32", b"rope")


def manager(blocks: int = 32, size: int = SIZE) -> KVManager:
    return KVManager(blocks, size, prefix_caching=True)


def compute(kv: KVManager, owner: int, ids: list[int], key: CacheKey = KEY) -> int:
    """An owner's whole life; returns how many of its tokens were found."""
    found = kv.look_up(owner, key, ids, len(ids) - 1)
    assert kv.reserve(owner, found, len(ids), reach_tokens=len(ids)) is not None
    kv.seal(owner, ids, len(ids))
    kv.free(owner)
    kv.check_invariants()
    return found


def blocks_of(kv: KVManager, owner: int) -> list[int]:
    return [block for first, count in kv.runs(owner) for block in range(first, first + count)]


def found(kv: KVManager, ids: list[int], key: CacheKey = KEY) -> int:
    tokens = kv.look_up(-1, key, ids, len(ids))
    kv.free(-1)
    return tokens


@pytest.mark.parametrize("size", [1, 4, 16])
def test_a_hit_is_the_common_beginning_and_leaves_one_token(size: int) -> None:
    """PFX-08: also where the prompt is exactly k blocks."""
    for length in range(1, 4 * size + 2):
        kv = manager(blocks=64, size=size)
        ids = list(range(length))
        least = kv.cache.least_copied_tokens

        def worth_it(tokens: int, size: int = size, least: int = least) -> int:
            return tokens if tokens % size >= least else tokens // size * size

        assert compute(kv, 0, ids) == 0
        assert compute(kv, 1, ids) == worth_it(length - 1)
        assert compute(kv, 2, [*ids, 99]) == worth_it(length)


def test_a_hit_inside_a_block_copies_it() -> None:
    kv = manager()
    compute(kv, 0, [1, 2, 3, 4, 5, 6, 7, 8])
    assert kv.look_up(1, KEY, [1, 2, 3, 4, 5, 6, 70, 80, 90], 8) == 6
    copies = kv.reserve(1, 6, 9, reach_tokens=20)
    assert copies is not None
    ((source, target),) = [(c.source, c.target) for c in copies]
    first, second, third = blocks_of(kv, 1)
    assert (source, target) == (kv.cache.root(KEY).children[0].children[0].block, second)
    assert kv.pool.ref_count(first) == 2
    assert kv.pool.ref_count(second) == kv.pool.ref_count(third) == 1
    kv.check_invariants()


def test_blocks_are_found_while_their_owner_runs_but_only_what_was_committed() -> None:
    kv = manager()
    ids = list(range(12))
    kv.look_up(0, KEY, ids, 11)
    assert kv.reserve(0, 0, 12, reach_tokens=12) == ()
    assert found(kv, ids) == 0
    kv.commit(0, ids, 7)
    assert found(kv, ids) == 4
    kv.commit(0, ids, 12)
    assert found(kv, ids) == 12
    kv.free(0)
    assert found(kv, ids) == 12


def test_least_recently_used_leaves_go_first() -> None:
    kv = manager(blocks=6)
    old, new = [1] * 8, [2] * 8
    compute(kv, 0, old)
    compute(kv, 1, new)
    compute(kv, 2, [*old, 9])
    assert found(kv, old) == found(kv, new) == 8
    assert kv.pool.num_free == 1
    kv.cache.evict(1)
    assert (found(kv, old), found(kv, new)) == (8, 4)
    kv.cache.evict(1)
    assert (found(kv, old), found(kv, new)) == (8, 0)
    kv.cache.evict(1)
    assert found(kv, [*old, 9]) == 8, "the longest leaf of what is left"
    kv.cache.evict(2)
    assert kv.pool.num_free == 6
    kv.check_invariants()


def test_cached_blocks_are_room_and_are_given_back_only_when_needed() -> None:
    kv = manager(blocks=8)
    compute(kv, 0, list(range(32)))
    assert (kv.pool.num_free, kv.num_available) == (0, 8)
    assert kv.can_start(1, 32, promised_blocks=0)
    assert not kv.can_start(1, 32, promised_blocks=1)
    assert kv.look_up(2, KEY, list(range(32)), 31) == 31
    assert kv.can_start(2, 32, promised_blocks=0)
    assert not kv.can_start(2, 32, promised_blocks=1), "idle blocks are counted as room already"
    assert kv.reserve(1, 0, 4, reach_tokens=8) == ()
    assert found(kv, list(range(32))) == 28
    assert kv.reserve(1, 4, 32, reach_tokens=40) == ()
    assert kv.reserve(2, 0, 1, reach_tokens=1) is None
    kv.check_invariants()


def test_what_a_hit_shares_with_running_ones_needs_no_room() -> None:
    kv = manager(blocks=8)
    ids = list(range(24))
    kv.look_up(0, KEY, ids, 23)
    kv.reserve(0, 0, 24, reach_tokens=24)
    kv.commit(0, ids, 24)
    more = [*ids, 50, 51, 52]
    assert kv.look_up(1, KEY, more, 26) == 24
    assert kv.can_start(1, 28, promised_blocks=1)
    assert not kv.can_start(1, 28, promised_blocks=2)
    # Without the owner that it shares with, it has to hold the six blocks itself.
    assert kv.can_start(1, 32, promised_blocks=0, without=[0])
    assert not kv.can_start(1, 33, promised_blocks=0, without=[0])


def test_the_second_of_two_who_computed_the_same_gives_its_copy_back() -> None:
    kv = manager()
    ids = list(range(10))
    for owner in (0, 1):
        kv.look_up(owner, KEY, ids, 9)
        kv.reserve(owner, 0, 10, reach_tokens=20)
    assert kv.pool.num_used == 6
    kv.commit(0, ids, 10)
    kv.commit(1, ids, 10)
    kv.check_invariants()
    assert kv.pool.num_used == 4
    assert blocks_of(kv, 0)[:2] == blocks_of(kv, 1)[:2]
    assert blocks_of(kv, 0)[2] != blocks_of(kv, 1)[2]


def test_a_cleared_tenant_finds_nothing_and_running_owners_keep_their_blocks() -> None:
    kv = manager()
    ids = list(range(10))
    other = replace(KEY, tenant="other")
    compute(kv, 5, ids, other)
    kv.look_up(0, KEY, ids, 9)
    kv.reserve(0, 0, 8, reach_tokens=20)
    kv.commit(0, ids, 8)
    assert kv.cache.clear("tenant") == 2
    kv.check_invariants()
    assert (found(kv, ids), found(kv, ids, other)) == (0, 10)
    kv.reserve(0, 8, 10, reach_tokens=20)
    kv.seal(0, ids, 10)
    assert found(kv, ids) == 0, "what began before must not come back"
    kv.free(0)
    assert kv.cache.clear() == 3
    assert kv.pool.num_free == kv.pool.num_blocks


def test_a_block_to_copy_from_may_be_the_last_one_there_is() -> None:
    """A hit never needs more room than the same request without one."""
    kv = manager(blocks=2)
    compute(kv, 0, [1, 2, 3, 4, 5, 6, 7, 8])
    before = kv.cache.root(KEY).children[0].children[0].block
    assert kv.look_up(1, KEY, [1, 2, 3, 4, 5, 6, 70], 6) == 6
    assert kv.reserve(1, 6, 7, reach_tokens=7) == (), "it is where it is needed"
    assert blocks_of(kv, 1)[1] == before
    kv.check_invariants()
    kv = manager(blocks=3)
    compute(kv, 0, [1, 2, 3, 4, 5, 6, 7, 8])
    assert kv.look_up(1, KEY, [1, 2, 3, 4, 5, 6, 70], 6) == 6
    assert kv.reserve(1, 6, 13, reach_tokens=13) is None
    kv.check_invariants()
    assert found(kv, [1, 2, 3, 4, 5, 6, 7, 8]) == 8


def test_a_fork_that_ended_does_not_change_under_the_one_that_goes_on() -> None:
    kv = manager()
    ids = [1, 2, 3, 4, 5, 6]
    kv.look_up(0, KEY, ids, 5)
    kv.reserve(0, 0, 6, reach_tokens=20)
    kv.commit(0, ids, 6)
    kv.fork(0, 1)
    kv.seal(0, ids, 6)
    kv.free(0)
    shared = blocks_of(kv, 1)[-1]
    copies = kv.reserve(1, 6, 7, reach_tokens=20)
    assert copies == (BlockCopy(shared, blocks_of(kv, 1)[-1]),)
    kv.check_invariants()
    assert found(kv, [*ids, 7]) == 6


@pytest.mark.parametrize("field", ["tenant", "adapter", "model", "kv_dtype", "rope"])
def test_every_part_of_the_key_alone_is_a_miss(field: str) -> None:
    kv = manager()
    ids = list(range(16))
    compute(kv, 0, ids)
    value = getattr(KEY, field)
    other = replace(KEY, **{field: value + ("x" if isinstance(value, str) else b"x")})
    assert found(kv, ids) == 16
    assert found(kv, ids, other) == 0


def test_image_ids_differ_by_key_and_row_and_from_tokens() -> None:
    seen: dict[int, object] = {token: token for token in (0, 1, 127, 2**31)}
    for key in (b"", b"\0", b"\0\0", b"\1", b"\1\0", b"\0" * 32, b"\xff" * 32):
        for row in (0, 1, 255, 2**32 - 1):
            assert seen.setdefault(image_id(key, row), (key, row)) == (key, row)
    assert len(seen) == 4 + 7 * 4


def test_no_wrong_hit_in_a_hundred_thousand_pairs() -> None:
    """Prompts that differ from a cached one in a token, an image, its shape, its rows, the tenant,
    the adapter or not at all: what is found is the longest beginning that was computed, never
    more."""
    draw = random.Random(4)
    pool = BlockPool(4096)
    cache = RadixCache(pool, SIZE)
    images = [
        content_key(data, shape, b"model") for data in (b"1", b"2") for shape in (b"8", b"4", b"2")
    ]
    keys = [CacheKey(tenant, adapter) for tenant in ("", "a", "b") for adapter in (b"", b"a")]

    def change(ids: list[int], key: CacheKey) -> tuple[list[int], CacheKey]:
        ids, kind = list(ids), draw.randrange(6)
        if kind == 0:
            ids[draw.randrange(len(ids))] = draw.randrange(3)
        elif kind == 1:
            start, row = draw.randrange(len(ids) - 3), draw.randrange(3)
            image = draw.choice(images)
            ids[start : start + 3] = [image_id(image, row + i) for i in range(3)]
        elif kind == 2:
            ids[draw.randrange(len(ids))] += 1
        elif kind == 3:
            key = replace(key, tenant=draw.choice(("", "a", "b", "c")))
        elif kind == 4:
            key = replace(key, adapter=draw.choice((b"", b"a", b"b")))
        return ids, key

    prompts = [([draw.randrange(3) for _ in range(draw.randint(6, 14))], k) for k in keys * 20]
    prompts += [change(*draw.choice(prompts)) for _ in range(600)]
    computed: set[tuple[CacheKey, tuple[int, ...]]] = set()
    for ids, key in prompts:
        node = cache.root(key)
        for start in range(0, len(ids), SIZE):
            (block,) = pool.allocate(1, owner=0, after=None, reach=1)
            node = cache.insert(node, tuple(ids[start : start + SIZE]), block)
            cache.give_up([block])
        computed |= {(key, tuple(ids[:end])) for end in range(len(ids) + 1)}
    for _ in range(100_000):
        ids, key = change(*draw.choice(prompts))
        node = cache.walk(cache.root(key), ids, len(ids))
        tail = cache.beginning(node, ids, len(ids))
        hit = node.depth * SIZE + (tail[1] if tail else 0)
        assert hit == 0 or (key, tuple(ids[:hit])) in computed
        assert (key, tuple(ids[: hit + 1])) not in computed or hit == len(ids)
