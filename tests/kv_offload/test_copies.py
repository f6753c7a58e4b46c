"""The bytes that move: runs of blocks, both memory orders, staging buffers."""

from __future__ import annotations

import random

import pytest
import torch

from kv_offload.copies import BlockCopy, LayerCopy, TierCopies
from kv_offload.host_memory import HostMemory
from kv_offload.kv_cache import KVCache
from kv_offload.layout import KVLayout
from kv_offload.superblock import SuperblockLayout
from tests.kv_offload.tiers import KV, LAYOUT


def _rig(dtype: str = "float32") -> tuple[KVCache, HostMemory, TierCopies]:
    kv = KVLayout(3, 2, 4, block_size=4, dtype=dtype)
    layout = SuperblockLayout(kv, tokens=16)
    cache, memory = KVCache(kv, 12, "cpu"), HostMemory(layout, 3)
    cache.storage.copy_(torch.randn(cache.storage.shape))
    memory.poison(range(3))
    return cache, memory, TierCopies(cache, memory)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", range(4))
def test_any_blocks_in_any_order(seed: int, dtype: str) -> None:
    choose = random.Random(seed)
    cache, memory, copies = _rig(dtype)
    blocks = choose.sample(range(12), choose.randint(1, 4))
    copies.store(blocks, 1).run()
    for index, block in enumerate(blocks):
        for layer in range(3):
            keys, values = cache.view(layer, block, 4)
            at = slice(4 * index, 4 * index + 4)
            assert torch.equal(memory.keys(1, layer)[:, at], keys)
            assert torch.equal(memory.values(1, layer)[:, at], values)
    assert memory.superblocks[1][:, :, :, 4 * len(blocks) :].isnan().all()
    assert memory.superblocks[0].isnan().all()
    before = cache.storage.clone()
    target = choose.sample(range(12), len(blocks))
    copies.load(1, 0, target).run()
    for source, goal in zip(blocks, target, strict=True):
        was = before[:, :, :, 4 * source : 4 * source + 4]
        assert torch.equal(cache.storage[:, :, :, 4 * goal : 4 * goal + 4], was)
    for block in set(range(12)) - set(target):
        at = slice(4 * block, 4 * block + 4)
        assert torch.equal(cache.storage[:, :, :, at], before[:, :, :, at])


def test_neighbouring_blocks_are_one_copy() -> None:
    _, _, copies = _rig()
    assert copies.store([3, 4, 5, 9], 0).runs == ((12, 0, 12), (36, 12, 4))
    assert copies.load(0, 1, [7, 8]).runs == ((28, 4, 8),)
    assert copies.store([3, 4, 5, 9], 0).num_bytes == 16 * KV.bytes_per_token


@pytest.mark.parametrize("head_major", [True, False])
@pytest.mark.parametrize("first", [0, 1])
def test_queued_copies_bring_the_same_bytes(head_major: bool, first: int) -> None:
    """As a device would run them, in either memory order."""
    layout = SuperblockLayout(KV, tokens=16, head_major=head_major)
    axis = layout.token_axis
    shape = list(layout.shape)
    shape[axis] = 48
    device, host = torch.randn(shape), torch.full(layout.shape, float("nan"))
    runs = ((20, 4 * first, 8), (0, 4 * first + 8, 4))
    BlockCopy(device, host, layout, runs, True, None).enqueue()
    wanted = torch.cat([device.narrow(axis, 20, 8), device.narrow(axis, 0, 4)], axis)
    assert torch.equal(host.narrow(axis, 4 * first, 12), wanted)
    back = torch.zeros(shape)
    BlockCopy(back, host, layout, ((4, 4 * first, 12),), False, None).enqueue()
    assert torch.equal(back.narrow(axis, 4, 12), wanted)
    assert (back.narrow(axis, 0, 4) == 0).all()
    assert (back.narrow(axis, 16, 32) == 0).all()


@pytest.mark.parametrize("slots", [[2, 0], [0, 1], [1, 2, 0]])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 32])
def test_a_layer_goes_into_a_staging_buffer(tokens: int, slots: list[int]) -> None:
    _, memory, copies = _rig()
    memory.superblocks.normal_()
    ring = torch.full((2, 2, 2, 40, 4), float("nan"))
    into = ring[1, :, :, :tokens]
    work = copies.stream(slots, 1, into)
    work.run()
    wanted = torch.cat([memory.superblocks[s, 1] for s in slots], 2)[:, :, :tokens]
    assert torch.equal(into, wanted)
    assert ring[0].isnan().all()
    assert ring[1, :, :, tokens:].isnan().all()
    assert work.num_bytes == wanted.nbytes
    into.fill_(0)
    work.enqueue()
    assert torch.equal(into, wanted)


def test_a_layer_in_token_order() -> None:
    layout = SuperblockLayout(KV, tokens=16, head_major=False)
    superblocks = torch.randn(3, *layout.shape)
    into = torch.empty(2, 40, 2, 4)
    LayerCopy(superblocks, 2, ((1, 2, 16), (0, 1, 8)), into, 1).enqueue()
    wanted = torch.cat([superblocks[1, 2], superblocks[2, 2], superblocks[0, 2]], 1)[:, :40]
    assert torch.equal(into, wanted)


def test_neighbouring_superblocks_are_one_copy() -> None:
    _, _, copies = _rig()
    into = torch.empty(2, 2, 40, 4)
    assert copies.stream([1, 2, 0], 0, into).runs == ((1, 2, 16), (0, 1, 8))


def test_misfits_are_refused() -> None:
    cache, memory, copies = _rig()
    with pytest.raises(ValueError, match="5 blocks from block 0"):
        copies.store([0, 1, 2, 3, 4], 0)
    with pytest.raises(ValueError, match="2 blocks from block 3"):
        copies.load(0, 3, [0, 1])
    for shape in [(2, 2, 33, 4), (2, 1, 16, 4), (2, 2, 16, 3)]:
        with pytest.raises(ValueError, match="does not take a layer of 2 superblocks"):
            copies.stream([0, 1], 0, torch.empty(shape))
    other = HostMemory(SuperblockLayout(KVLayout(3, 2, 8, block_size=4), 16), 1)
    with pytest.raises(ValueError, match="the device's cache is"):
        TierCopies(cache, other)
    assert memory.layout == LAYOUT
