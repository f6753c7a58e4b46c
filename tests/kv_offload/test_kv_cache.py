"""Geometry and storage of keys and values."""

from __future__ import annotations

import random

import psutil
import pytest
import torch

from kv_offload.kv_cache import KVCache
from kv_offload.layout import KVLayout, LayoutError

LAYOUT = KVLayout(num_layers=2, num_kv_heads=3, head_dim=4, block_size=8)


def test_bytes_follow_the_formula() -> None:
    llama_8b = KVLayout(32, 8, 128, 16, "bfloat16")
    assert llama_8b.bytes_per_token == 131_072
    assert llama_8b.bytes_per_block == 16 * 131_072
    smollm2 = KVLayout(30, 3, 64)
    assert smollm2.bytes_per_token == 2 * 30 * 3 * 64 * 4
    assert smollm2.blocks_for(0) == 0
    assert smollm2.blocks_for(16) == 1
    assert smollm2.blocks_for(17) == 2
    assert smollm2.blocks_in(3 * smollm2.bytes_per_block + 5) == 3
    assert KVCache(LAYOUT, 5, "cpu").num_bytes == 5 * 8 * 2 * 2 * 3 * 4 * 4


def test_windows_are_per_layer() -> None:
    assert KVLayout(2, 1, 4, windows=(None, 7)).window(1) == 7
    assert KVLayout(2, 1, 4).window(1) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0"),
        ({"head_dim": -1}, "head_dim is -1"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"windows": (4,)}, "windows has 1 entries for 2 layers"),
        ({"windows": (None, 0)}, r"windows\[1\] is 0"),
    ],
)
def test_an_impossible_layout_names_its_field(fields: dict[str, object], message: str) -> None:
    valid: dict[str, object] = {"num_layers": 2, "num_kv_heads": 1, "head_dim": 4}
    with pytest.raises(LayoutError, match=message):
        KVLayout(**(valid | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(6))
def test_writes_land_in_their_slots_and_nowhere_else(seed: int) -> None:
    """Rows in runs and alone, from strided rows, twice with the same number of slots."""
    choose = random.Random(seed)
    cache = KVCache(LAYOUT, 20, "cpu")
    cache.poison(range(20))
    wanted: dict[int, torch.Tensor] = {}
    for _ in range(2):
        starts = choose.sample(range(0, 160, 32), 3)
        slots = [s + i for s in starts for i in range(choose.choice([1, 3, 20]))]
        choose.shuffle(slots) if seed % 2 else None
        fused = torch.randn(len(slots), 9, 4)
        k, v = fused[:, 1:4], fused[:, 5:8]
        for layer in range(2):
            cache.write(layer, torch.tensor(slots), k + layer, v + layer)
        wanted |= {s: torch.stack([k[i], v[i]]) for i, s in enumerate(slots)}
    for layer in range(2):
        for slot in range(160):
            stored = torch.stack([cache.keys[layer][:, slot], cache.values[layer][:, slot]])
            if slot in wanted:
                assert torch.equal(stored, wanted[slot] + layer)
            else:
                assert stored.isnan().all()


def test_slots_changed_in_place_are_seen() -> None:
    cache = KVCache(LAYOUT, 4, "cpu")
    slots = torch.tensor([0, 5])
    cache.write(0, slots, torch.zeros(2, 3, 4), torch.zeros(2, 3, 4))
    slots += 1
    cache.write(0, slots, torch.ones(2, 3, 4), torch.ones(2, 3, 4))
    assert (cache.keys[0][:, 6] == 1).all()
    assert (cache.keys[0][:, 5] == 0).all()


def test_views_share_memory_with_the_cache() -> None:
    cache = KVCache(LAYOUT, 4, "cpu")
    slots = torch.arange(8, 20)
    k, v = torch.randn(12, 3, 4), torch.randn(12, 3, 4)
    cache.write(1, slots, k, v)
    keys, values = cache.view(1, 1, 12)
    assert torch.equal(keys, k.transpose(0, 1))
    assert torch.equal(values, v.transpose(0, 1))
    all_keys, all_values = cache.layer_views(8, 12)
    assert torch.equal(all_keys[1][0], keys)
    assert all_values[1].data_ptr() == values.data_ptr()
    flat_keys, flat_values = cache.flat(1)
    assert torch.equal(flat_keys[2 * 32 + 9], k[1, 2])
    assert flat_values.data_ptr() == cache.values[1].data_ptr()


def test_copied_blocks_are_equal_and_independent() -> None:
    cache = KVCache(LAYOUT, 6, "cpu")
    for layer in range(2):
        cache.write(layer, torch.arange(48), torch.randn(48, 3, 4), torch.randn(48, 3, 4))
    before = cache.storage.clone()
    cache.copy_blocks([1, 1, 4], [0, 2, 5])
    for source, target in [(1, 0), (1, 2), (4, 5)]:
        for layer in range(2):
            assert torch.equal(cache.view(layer, target, 8)[0], cache.view(layer, source, 8)[0])
            assert torch.equal(cache.view(layer, target, 8)[1], cache.view(layer, source, 8)[1])
    for block in (1, 3, 4):
        kept = before[:, :, :, block * 8 : block * 8 + 8]
        assert torch.equal(cache.storage[:, :, :, block * 8 : block * 8 + 8], kept)
    cache.poison([0])
    assert not cache.view(0, 1, 8)[0].isnan().any()


def test_bad_copies_are_refused() -> None:
    cache = KVCache(LAYOUT, 4, "cpu")
    with pytest.raises(ValueError, match="2 sources for 1 targets"):
        cache.copy_blocks([0, 1], [2])
    with pytest.raises(ValueError, match=r"blocks \[1\] are both"):
        cache.copy_blocks([0, 1], [1, 2])
    with pytest.raises(ValueError, match="num_blocks is 0"):
        KVCache(LAYOUT, 0, "cpu")


def test_unused_capacity_takes_no_memory() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    cache = KVCache(KVLayout(30, 3, 64, 16), 10_000, "cpu")
    k = torch.ones(16, 3, 64)
    for layer in range(30):
        cache.write(layer, torch.arange(16), k, k)
    grown = process.memory_info().rss - before
    assert cache.num_bytes > 7e9
    assert grown < 50e6
