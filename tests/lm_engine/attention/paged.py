"""Random paged batches, written to a cache whose every other slot is NaN."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch

from kv_offload.host_memory import HostMemory
from kv_offload.kv_cache import KVCache
from kv_offload.layout import KVLayout
from kv_offload.superblock import SUPERBLOCK_TOKENS, SuperblockLayout
from lm_engine.attention.base import AttentionBatch, SequenceSlice


@dataclass
class Paged:
    cache: KVCache
    batch: AttentionBatch
    q: torch.Tensor
    keys: list[torch.Tensor]
    """Per sequence [context, Hkv, d] of layer 0, in order of position."""
    values: list[torch.Tensor]


def make_paged(
    lengths: list[tuple[int, int]],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 4,
    scatter: float = 0.0,
    num_layers: int = 1,
    dtype: str = "float32",
    windows: tuple[int | None, ...] = (),
    seed: int = 0,
) -> Paged:
    """`lengths` are (query_len, context_len); `scatter` is the chance that a block does not
    follow its predecessor."""
    choose = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    layout = KVLayout(num_layers, num_kv_heads, head_dim, block_size, dtype, windows)
    needed = [layout.blocks_for(context) for _, context in lengths]
    cache = KVCache(layout, 3 * sum(needed) + 2, "cpu")
    cache.poison(range(cache.num_blocks))
    free = list(range(1, cache.num_blocks))
    sequences, all_slots, keys, values = [], [], [], []
    row = 0
    for (query_len, context), count in zip(lengths, needed, strict=True):
        blocks: list[int] = []
        while len(blocks) < count:
            if blocks and blocks[-1] + 1 in free and choose.random() >= scatter:
                block = blocks[-1] + 1
            else:
                block = choose.choice(free)
            free.remove(block)
            blocks.append(block)
        runs: list[tuple[int, int]] = []
        for block in blocks:
            if runs and sum(runs[-1]) == block:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((block, 1))
        slots = torch.tensor(
            [blocks[i // block_size] * block_size + i % block_size for i in range(context)]
        )
        k = torch.randn(context, num_kv_heads, head_dim, generator=generator)
        v = torch.randn(context, num_kv_heads, head_dim, generator=generator)
        for layer in range(num_layers):
            cache.write(layer, slots, k * (layer + 1), v * (layer + 1))
        keys.append(k.to(cache.dtype))
        values.append(v.to(cache.dtype))
        sequences.append(SequenceSlice(row, query_len, context, tuple(runs)))
        all_slots.append(slots[context - query_len :])
        row += query_len
    q = torch.randn(row, num_heads, head_dim, generator=generator).to(cache.dtype)
    return Paged(cache, AttentionBatch(tuple(sequences), torch.cat(all_slots)), q, keys, values)


def offload(paged: Paged, superblocks: int) -> Paged:
    """The same batch with up to so many superblocks of each context on the host, as far as they
    end before its rows; their blocks on the device are poisoned. They lie in mixed order."""
    layout = paged.cache.layout
    size = SUPERBLOCK_TOKENS // layout.block_size
    counts = [
        min(superblocks, (s.context_len - s.query_len) // SUPERBLOCK_TOKENS)
        for s in paged.batch.sequences
    ]
    host = HostMemory(SuperblockLayout(layout), sum(counts) + 1)
    host.poison(range(host.num_superblocks))
    slots = list(range(host.num_superblocks))
    random.Random(1).shuffle(slots)
    cache = KVCache(layout, paged.cache.num_blocks, "cpu", host=host)
    cache.storage.copy_(paged.cache.storage)
    sequences = []
    for sequence, count in zip(paged.batch.sequences, counts, strict=True):
        blocks = [first + i for first, length in sequence.runs for i in range(length)]
        cold = []
        for _ in range(count):
            slot, gone, blocks = slots.pop(), blocks[:size], blocks[size:]
            rows = [b * layout.block_size + i for b in gone for i in range(layout.block_size)]
            host.superblocks[slot] = cache.storage[:, :, :, rows]
            cache.poison(gone)
            cold.append(slot)
        runs = tuple((block, 1) for block in blocks)
        sequences.append(replace(sequence, runs=runs, cold=tuple(cold)))
    batch = AttentionBatch(tuple(sequences), paged.batch.slots)
    return Paged(cache, batch, paged.q, paged.keys, paged.values)


def naive(
    paged: Paged, window: int | None, scale: float, layer: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, in float64, row by row, from the unpaged keys and values."""
    outs, lses = [], []
    group = paged.q.shape[1] // paged.keys[0].shape[1]
    for sequence, k, v in zip(paged.batch.sequences, paged.keys, paged.values, strict=True):
        for i in range(sequence.query_len):
            position = sequence.context_len - sequence.query_len + i
            start = 0 if window is None else max(0, position - window + 1)
            q = paged.q[sequence.query_start + i].double()
            heads, head_lses = [], []
            for h in range(q.shape[0]):
                seen = slice(start, position + 1)
                scores = k[seen, h // group].double() @ q[h] * scale * (layer + 1)
                heads.append(torch.softmax(scores, 0) @ v[seen, h // group].double() * (layer + 1))
                head_lses.append(torch.logsumexp(scores, 0))
            outs.append(torch.stack(heads))
            lses.append(torch.stack(head_lses))
    return torch.stack(outs), torch.stack(lses)
