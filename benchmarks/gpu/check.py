"""One run on a GPU: is it right, and how fast is it against what the card can do? One table last.

Owns: correctness of the CUDA paths against the CPU on tiny checkpoints, then speed of a decoder of
real size with random weights against the measured copy bandwidth and matmul rate. Does not own:
serving (no HTTP here: GPU hosts often lack its libraries) or kernels.

python -m benchmarks.gpu.check [--device cuda]
`--device cpu` runs the same script with toy sizes, to test the script itself.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from chunked_prefill.request import Request, SamplingParams
from kv_offload.kv_cache import KVCache
from kv_offload.layout import KVLayout
from lm_engine.attention.base import AttentionBatch, SequenceSlice
from lm_engine.attention.reference import ReferenceAttention
from lm_engine.attention.select import select
from lm_engine.engine import Engine
from lm_engine.models.config import DecoderConfig
from lm_engine.models.decoder import Decoder
from lm_engine.options import EngineOptions
from tests.checkpoints import TEXT_FAMILIES, checkpoint

Row = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Card:
    """What the device does at best, measured."""

    copy_bytes_per_s: float
    """Bytes read plus bytes written by a device copy, per second."""
    matmul_flop_per_s: float
    dtype: torch.dtype


def timed(work: Callable[[], object], device: torch.device, repeats: int = 7) -> float:
    """Median seconds of one call."""
    for _ in range(2):
        work()
    times = []
    for _ in range(repeats):
        _wait(device)
        begin = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_card(device: torch.device, toy: bool) -> Card:
    dtype = torch.float32 if toy else torch.bfloat16
    size = 1 << (22 if toy else 30)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = timed(lambda: target.copy_(source), device)
    edge = 512 if toy else 8192
    a = torch.randn(edge, edge, device=device, dtype=dtype)
    matmul_s = timed(lambda: a @ a, device)
    return Card(2 * size / copy_s, 2 * edge**3 / matmul_s, dtype)


# -- right ------------------------------------------------------------------------------------


def engine_difference(folder: Path, device: torch.device) -> float:
    """Largest |difference| of teacher-forced log-probabilities between the device and the CPU,
    fp32, prompts of several lengths in one batch, prefilled in chunks of 24 tokens."""
    found: list[dict[str, list[float]]] = []
    for where in ("cpu", str(device)):
        engine = Engine.load(
            EngineOptions(
                str(folder),
                device=where,
                dtype="float32",
                max_num_batched_tokens=24,
                max_model_len=256,
                kv_memory_bytes=1 << 24,
            )
        )
        generator = torch.Generator().manual_seed(5)
        for index, length in enumerate((5, 17, 40, 70)):
            ids = torch.randint(0, 250, (length,), generator=generator).tolist()
            sampling = SamplingParams(1, temperature=0.0, prompt_logprobs=0)
            engine.add(Request(str(index), tuple(ids), sampling))
        logprobs: dict[str, list[float]] = {}
        while engine.has_work():
            for output in engine.step():
                if output.prompt_logprobs:
                    logprobs[output.request_id] = [
                        p.logprob for p in output.prompt_logprobs if p is not None
                    ]
        found.append(logprobs)
    here, there = found
    return max(abs(a - b) for name in here for a, b in zip(here[name], there[name], strict=True))


def attention_difference(device: torch.device, dtype: torch.dtype) -> float:
    """Largest |difference| between the device's backend and the reference on the same device."""
    layout = KVLayout(
        num_layers=1,
        num_kv_heads=2,
        head_dim=64,
        block_size=16,
        dtype=str(dtype).removeprefix("torch."),
        windows=(None,),
    )
    cache = KVCache(layout, 64, device)
    generator = torch.Generator().manual_seed(1)
    cache.storage.copy_(torch.randn(cache.storage.shape, generator=generator))
    slices, rows = [], 0
    for first_block, query, context in ((0, 1, 200), (20, 30, 90), (40, 1, 33), (50, 64, 64)):
        slices.append(SequenceSlice(rows, query, context, ((first_block, 14),)))
        rows += query
    slots = torch.zeros(rows, dtype=torch.int64, device=device)
    batch = AttentionBatch(tuple(slices), slots)
    q = torch.randn(rows, 4, 64, generator=generator).to(device, dtype)
    worst = 0.0
    for window in (None, 50):
        out, lse = select(device).attend(0, q, batch, cache, window=window, scale=0.125)
        want, want_lse = ReferenceAttention().attend(0, q, batch, cache, window=window, scale=0.125)
        worst = max(worst, (out.float() - want.float()).abs().max().item())
        worst = max(worst, (lse - want_lse).abs().max().item())
    return worst


def check_right(device: torch.device, rows: list[Row]) -> None:
    for dtype, bound in ((torch.float32, 1e-3), (torch.bfloat16, 3e-2)):
        if device.type == "cpu" and dtype != torch.float32:
            continue
        difference = attention_difference(device, dtype)
        rows.append(
            (
                f"attention against reference, {dtype}",
                f"{difference:.1e}",
                _verdict(difference, bound),
            )
        )
    with tempfile.TemporaryDirectory() as root:
        for family in TEXT_FAMILIES:
            difference = engine_difference(checkpoint(family, Path(root)), device)
            rows.append(
                (
                    f"engine against CPU, {family}, fp32",
                    f"{difference:.1e}",
                    _verdict(difference, 1e-3),
                )
            )


def _verdict(difference: float, bound: float) -> str:
    return "ok" if difference <= bound else f"WRONG (bound {bound:.0e})"


# -- fast -------------------------------------------------------------------------------------


def speed_config(toy: bool) -> DecoderConfig:
    """Llama-3.2-1B's shape, or a toy's."""
    sizes = (
        {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
        if toy
        else {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "head_dim": 64,
        }
    )
    return DecoderConfig.from_hf(
        {
            "model_type": "llama",
            "vocab_size": 1024 if toy else 128256,
            "num_attention_heads": 4 if toy else 32,
            "num_key_value_heads": 2 if toy else 8,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            **sizes,
        }
    )


def check_fast(device: torch.device, card: Card, toy: bool, rows: list[Row]) -> None:
    config = speed_config(toy)
    decoder = Decoder(config, dtype=card.dtype, device=device).eval()
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(0, 0.02)
    layout = KVLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=16,
        dtype=str(card.dtype).removeprefix("torch."),
        windows=config.windows,
    )
    weights = config.num_parameters * card.dtype.itemsize
    context = 64 if toy else 4096
    widest = 8 if toy else 64
    per_sequence = -(-(context + 2048) // 16)
    cache = KVCache(layout, widest * per_sequence, device)
    cache.storage.zero_()
    backend = select(device)

    def step(sequences: int, length: int) -> Callable[[], object]:
        slices = tuple(
            SequenceSlice(i * length, length, context + length, ((i * per_sequence, per_sequence),))
            for i in range(sequences)
        )
        slots = torch.cat(
            [torch.arange(length) + i * per_sequence * 16 + context for i in range(sequences)]
        ).to(device)
        batch = AttentionBatch(slices, slots)
        token_ids = torch.zeros(sequences * length, dtype=torch.int64, device=device)
        positions = torch.arange(context, context + length, device=device).repeat(sequences)

        @torch.inference_mode()
        def run() -> object:
            def attend(
                layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
            ) -> torch.Tensor:
                cache.write(layer, slots, k, v)
                return backend.attend(layer, q, batch, cache, window=None, scale=config.scale)[0]

            hidden = decoder(decoder.embed(token_ids), positions, attend)
            return decoder.logits(hidden[-sequences:])

        return run

    for sequences in (1, 8, widest):
        seconds = timed(step(sequences, 1), device)
        moved = weights + sequences * context * layout.bytes_per_token
        share = moved / seconds / card.copy_bytes_per_s
        rows.append(
            (
                f"decode step, {sequences} x {context} tokens of context",
                f"{seconds * 1e3:.2f} ms",
                f"{share:.0%} of copy bandwidth",
            )
        )
    for length in (64,) if toy else (512, 2048):
        seconds = timed(step(1, length), device)
        flop = 2 * config.num_parameters * length + 4 * config.num_layers * (
            config.num_heads * config.head_dim
        ) * length * (context + length / 2)
        rows.append(
            (
                f"prefill chunk of {length} at depth {context}",
                f"{seconds * 1e3:.2f} ms",
                f"{flop / seconds / card.matmul_flop_per_s:.0%} of matmul rate",
            )
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here; --device cpu tests the script itself with toy sizes")
    toy = device.type == "cpu"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    begin = time.perf_counter()
    rows: list[Row] = []
    print("checking against the CPU ...", flush=True)
    check_right(device, rows)
    print("measuring ...", flush=True)
    card = measure_card(device, toy)
    rows.append(("device copy", f"{card.copy_bytes_per_s / 1e9:.0f} GB/s", "measured"))
    rows.append(
        (f"matmul, {card.dtype}", f"{card.matmul_flop_per_s / 1e12:.2f} TFLOP/s", "measured")
    )
    check_fast(device, card, toy, rows)
    print(f"\n{name}, torch {torch.__version__}, {time.perf_counter() - begin:.0f} s\n")
    print("| check | figure | verdict |\n|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    if any("WRONG" in row[2] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
