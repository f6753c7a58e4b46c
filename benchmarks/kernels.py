"""Ratios of longlens' CPU kernels to what torch does by default, at the sizes of SmolLM2-135M.

Run: python -m benchmarks.kernels [linears] [head] [decode] [chunk] [write]
     [--threads 2] [--rounds 7]

Contestants of a row are timed in turn, and medians are compared, so that other load on the machine
falls on all of them. Weights and KV of several layers are walked, so that they come from memory as
in a real step rather than from the cache.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from kv_offload.kv_cache import KVCache
from kv_offload.layout import KVLayout
from lm_engine.attention import cpu, cpu_kernel
from lm_engine.attention.base import AttentionBatch, SequenceSlice
from lm_engine.attention.cpu import CpuAttention
from lm_engine.attention.dense import plan_rows
from lm_engine.attention.ragged import RaggedRows
from lm_engine.models.linear import Linear
from lm_engine.models.native_layers import NativeKernels, NativeLinear
from lm_engine.models.packed_linear import PackedLinear, PlainLinear
from lm_engine.native import library

WIDTH, INNER, VOCABULARY = 576, 1536, 49_152
HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
LAYERS = 8
"""Layers walked: 113 MB of weights, more than caches hold."""

Contestants = dict[str, Callable[[], object]]


def medians(contestants: Contestants, rounds: int) -> dict[str, float]:
    """Median seconds of each contestant."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for run in contestants.values():
        run()
    for _ in range(rounds):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def report(label: str, contestants: Contestants, rounds: int, per: int = 1) -> None:
    """One row: time of the first contestant, and the others' as multiples of it."""
    result = medians(contestants, rounds)
    (first, base), *others = result.items()
    ratios = "  ".join(f"{name} x{seconds / base:.2f}" for name, seconds in others)
    print(f"{label:<28} {ratios}   ({first} {base / per * 1e3:.3f} ms)", flush=True)


def random_linear(inputs: int, outputs: int) -> Linear:
    linear = Linear(inputs, outputs)
    torch.nn.init.normal_(linear.weight, std=0.02)
    return linear


def apply(
    modules: Sequence[Linear | PackedLinear | NativeLinear], x: dict[int, torch.Tensor]
) -> None:
    for module in modules:
        module(x[module.in_features])


def linears(rounds: int) -> None:
    print("Layers' linears, per layer, against F.linear")
    shapes = [
        (WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM),
        (HEADS * HEAD_DIM, WIDTH),
        (WIDTH, 2 * INNER),
        (INNER, WIDTH),
    ]
    plain = [random_linear(*shape) for _ in range(LAYERS) for shape in shapes]
    packed = [PackedLinear(linear) for linear in plain]
    kernels = NativeKernels(library.load())
    native = [NativeLinear(linear, kernels) for linear in plain]
    for rows in (1, 2, 4, 8, 16, 64, 512):
        x = {size: torch.randn(rows, size) for size in (WIDTH, INNER)}
        contestants: Contestants = {
            "F.linear": partial(apply, plain, x),
            "packed": partial(apply, packed, x),
            "native": partial(apply, native, x),
            "(reading weights)": lambda: [m.weight.sum() for m in plain],
        }
        report(f"  M = {rows}", contestants, min(rounds, 3) if rows > 64 else rounds, LAYERS)


def head(rounds: int) -> None:
    print("Tied output head, against F.linear")
    plain = random_linear(WIDTH, VOCABULARY)
    ours = PlainLinear(plain.weight, None)
    packed = PackedLinear(plain)
    for rows in (1, 2, 4, 8, 16, 64):
        x = torch.randn(rows, WIDTH)
        contestants: Contestants = {
            "F.linear": partial(plain, x),
            "plain": partial(ours, x),
            "(packed: 2nd copy)": partial(packed, x),
            "(reading weights)": plain.weight.sum,
        }
        report(f"  M = {rows}", contestants, rounds)


def filled_cache(tokens: int) -> KVCache:
    cache = KVCache(KVLayout(LAYERS, KV_HEADS, HEAD_DIM, 16), -(-tokens // 16), "cpu")
    cache.storage.normal_()
    return cache


def decode_batch(lengths: list[int]) -> tuple[AttentionBatch, int]:
    """One row per context length; contexts lie behind each other. Returns the slots used too."""
    sequences, slots, block = [], [], 0
    for row, length in enumerate(lengths):
        blocks = -(-length // 16)
        sequences.append(SequenceSlice(row, 1, length, ((block, blocks),)))
        slots.append(block * 16 + length - 1)
        block += blocks
    return AttentionBatch(tuple(sequences), torch.tensor(slots)), block * 16


def all_layers(
    backend: CpuAttention, q: torch.Tensor, batch: AttentionBatch, cache: KVCache
) -> None:
    for layer in range(LAYERS):
        backend.attend(layer, q, batch, cache, window=None, scale=0.125)


class OneByOne(CpuAttention):
    """Every row through the flash kernel."""

    def _prepare(
        self, batch: AttentionBatch, cache: KVCache, num_heads: int, window: int | None
    ) -> cpu._Plan:
        groups = [
            group
            for sequence in batch.sequences
            for group in plan_rows(sequence, cache, self.split_tokens, window)
        ]
        return cpu._Plan((), tuple(groups))


class AllRagged(CpuAttention):
    """Every lone row through ragged.py."""

    def _prepare(
        self, batch: AttentionBatch, cache: KVCache, num_heads: int, window: int | None
    ) -> cpu._Plan:
        rows = [row for s in batch.sequences if (row := cpu._lone_row(s, cache, window))]
        most = cpu._MOST_RAGGED_ENTRIES // num_heads
        ragged = [RaggedRows(part, num_heads, cache) for part in cpu._batches(rows, most)]
        return cpu._Plan(tuple(ragged), ())


def plan_only(batch: AttentionBatch, cache: KVCache) -> None:
    CpuAttention()._plan(batch, cache, HEADS, None)


def decode(rounds: int) -> None:
    print("Decode attention, per layer, against a flash call per sequence and split")
    print("(plan: once per step, as a share of these 8 layers)")
    cases = [
        ("1 x 512", [512]),
        ("1 x 2,048", [2048]),
        ("1 x 8,192", [8192]),
        ("2 x 512", [512] * 2),
        ("2 x 2,048", [2048] * 2),
        ("4 x 512", [512] * 4),
        ("8 x 256", [256] * 8),
        ("16 x 256", [256] * 16),
        ("16 x 100..1,500", [100 + 93 * i for i in range(16)]),
        ("64 x 256", [256] * 64),
        ("8 x 4,096", [4096] * 8),
    ]
    for label, lengths in cases:
        batch, used = decode_batch(lengths)
        cache = filled_cache(used)
        q = torch.randn(len(lengths), HEADS, HEAD_DIM)

        contestants: Contestants = {
            "flash": partial(all_layers, OneByOne(), q, batch, cache),
            "chosen": partial(all_layers, CpuAttention(), q, batch, cache),
            "ragged": partial(all_layers, AllRagged(), q, batch, cache),
            "(plan)": partial(plan_only, batch, cache),
        }
        report(f"  {label}", contestants, rounds, LAYERS)


def chunk(rounds: int) -> None:
    print("Chunk attention, per layer: GFLOP/s of the whole call, and of one unmasked flash call")
    for rows, context in [(256, 256), (256, 2048), (256, 8192), (512, 4096), (16, 2048)]:
        cache = filled_cache(context)
        batch = AttentionBatch(
            (SequenceSlice(0, rows, context, ((0, -(-context // 16)),)),),
            torch.arange(context - rows, context),
        )
        q = torch.randn(rows, HEADS, HEAD_DIM)
        keys, values = cache.layer_views(0, context)

        def plain(q: torch.Tensor = q, keys=keys, values=values) -> None:  # type: ignore[no-untyped-def]
            for k, v in zip(keys, values, strict=True):
                cpu_kernel.flash_cpu(
                    q.transpose(0, 1).unsqueeze(0), k, v, causal=False, mask=None, scale=0.125
                )

        result = medians(
            {"ours": partial(all_layers, CpuAttention(), q, batch, cache), "plain": plain},
            min(rounds, 3),
        )
        pairs = rows * (context - rows) + rows * (rows + 1) / 2
        rate = 4 * HEADS * HEAD_DIM * pairs * LAYERS / result["ours"] / 1e9
        plain_rate = 4 * HEADS * HEAD_DIM * rows * context * LAYERS / result["plain"] / 1e9
        share = rate / plain_rate
        print(f"  {rows} rows over {context:<6} {rate:6.0f} {plain_rate:6.0f}   x{share:.2f}")


def write(rounds: int) -> None:
    print("Writing KV, per layer, against index_put")
    cache = filled_cache(8192)
    for label, slots in [
        ("1 row", torch.tensor([77])),
        ("16 rows apart", torch.arange(16) * 256),
        ("512 rows in a run", torch.arange(100, 612)),
        ("256 in a run, 8 apart", torch.cat([torch.arange(256), 1000 + torch.arange(8) * 100])),
    ]:
        fused = torch.randn(slots.shape[0], HEADS + 2 * KV_HEADS, HEAD_DIM)
        k, v = fused[:, HEADS : HEADS + KV_HEADS], fused[:, HEADS + KV_HEADS :]

        def put(slots=slots, k=k, v=v) -> None:  # type: ignore[no-untyped-def]
            for layer in range(LAYERS):
                cache.keys[layer].transpose(0, 1)[slots] = k
                cache.values[layer].transpose(0, 1)[slots] = v

        def ours(slots=slots, k=k, v=v) -> None:  # type: ignore[no-untyped-def]
            for layer in range(LAYERS):
                cache.write(layer, slots, k, v)

        report(f"  {label}", {"index_put": put, "ours": ours}, rounds * 3, LAYERS)


SECTIONS = {"linears": linears, "head": head, "decode": decode, "chunk": chunk, "write": write}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], default=[])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    with torch.inference_mode():
        for name in options.sections or SECTIONS:
            SECTIONS[name](options.rounds)


if __name__ == "__main__":
    main()
