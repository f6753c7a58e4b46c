"""From options and files to an engine: the composition root.

Owns: what "auto" resolves to (dtype, device, sizes of the KV pool, of the embedding arena and of
the context), and the order in which parts are built. Does not own: any part.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from chunked_prefill.budget import Budget, TimeBudget, TokenBudget
from chunked_prefill.scheduler import Scheduler
from chunked_prefill.step_time import StepTimeEstimator, prior_model
from kv_offload.host_memory import HostMemory, HostMemoryError, superblocks_in_budget
from kv_offload.host_pool import HostPool
from kv_offload.kv_cache import KVCache
from kv_offload.kv_manager import KVManager
from kv_offload.layout import KVLayout, LayoutError
from kv_offload.radix_cache import CacheKey
from kv_offload.superblock import SUPERBLOCK_TOKENS, SuperblockLayout
from lm_engine.attention.native import NativeWriter
from lm_engine.attention.select import select
from lm_engine.client import ModelInfo
from lm_engine.engine import Engine
from lm_engine.images import ImageFeed
from lm_engine.models.checkpoint import Checkpoint, available_bytes, open_checkpoint
from lm_engine.models.config import DecoderConfig
from lm_engine.models.decoder import Decoder
from lm_engine.models.errors import (
    LoadError,
    MissingFileError,
    OutOfMemoryError,
    UnsupportedModelError,
)
from lm_engine.models.loader import LoadProgress, load_decoder
from lm_engine.models.native_layers import can_nativize, nativize
from lm_engine.models.packed_linear import can_pack, pack
from lm_engine.native.library import NativeUnavailableError
from lm_engine.native.library import load as load_kernels
from lm_engine.options import EngineOptions
from lm_engine.runner import Runner
from vision_encoder.config import VisionConfig
from vision_encoder.embedding_arena import EmbeddingArena
from vision_encoder.embedding_storage import allocate_storage
from vision_encoder.grid import planner, read_processor_files
from vision_encoder.link import VisionLink
from vision_encoder.stage_loading import load_stage

_log = logging.getLogger(__name__)

Progress = Callable[[str, float, float, float | None], None]
"""progress(phase, done, total, eta_s); done and total in bytes, 0 while unknown."""

_DEFAULT_EMBEDDING_ROWS = 8192
_CPU_KV_SHARE = 0.25
"""Of free host memory: pages are taken when they are first written, so this is a limit, not a
cost, and the rest stays for weights that are still to be read and for other processes."""
_CUDA_KV_SHARE = 0.9
_MIN_CONTEXT = 256
_CPU_TPOT_S, _CUDA_TPOT_S = 0.2, 0.05
"""Default promises: reading speed where arithmetic is dear, the field's usual one where not."""
_STEP_SHARE = 0.75
"""Of the promise that a step may plan for; the rest is for what no model of steps foresees."""
_CPU_FLOPS, _CUDA_FLOPS = 5e10, 1e14
"""Guesses that the first steps correct."""


class HostTierError(LoadError):
    """The host tier that was asked for cannot be had."""


class ContextTooLongError(LoadError):
    """--max-model-len asks for more than the model or the memory has."""


@dataclass(frozen=True, slots=True)
class VisionShape:
    """What the embedding storage looks like, known before any weight is read."""

    num_rows: int
    depth: int
    """1 + deepstack levels."""
    dim: int
    dtype: torch.dtype


def resolve_device(options: EngineOptions) -> torch.device:
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise UnsupportedModelError(
            f"--device {options.device}: torch {torch.__version__} finds no CUDA device here. Use "
            "--device cpu, or install a driver and a CUDA build of torch."
        )
    if options.device != "auto":
        return torch.device(options.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def vision_shape(checkpoint: Checkpoint, options: EngineOptions) -> VisionShape | None:
    """Shape of the embedding storage, or None for a text model."""
    if "vision_config" not in checkpoint.config:
        return None
    depth, dim = VisionConfig.from_hf(checkpoint.config).row_shape
    rows = options.embedding_rows or max(_DEFAULT_EMBEDDING_ROWS, _largest_image(checkpoint))
    return VisionShape(rows, depth, dim, vision_dtype(options))


def _largest_image(checkpoint: Checkpoint) -> int:
    """Rows of the dearest image that the model's own limits let through, square or elongated."""
    pictures = planner(checkpoint.config, read_processor_files(checkpoint.path))
    sizes = ((7000, 7000), (14000, 3500), (3500, 14000))
    return max(pictures.plan([size])[0].num_rows for size in sizes)


def vision_dtype(options: EngineOptions) -> torch.dtype:
    """Of the tower and of its rows."""
    on_cpu = resolve_device(options).type == "cpu"
    if options.dtype == "auto":
        return torch.float32 if on_cpu else torch.bfloat16
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(options.dtype, torch.float32)


def build_vision(
    checkpoint: Checkpoint,
    options: EngineOptions,
    storage: Tensor,
    *,
    progress: Progress | None = None,
    between_layers: Callable[[], None] | None = None,
) -> VisionLink:
    """The vision stage of an opened checkpoint; it writes rows into `storage`."""
    source = checkpoint.source

    def report(done: int, total: int) -> None:
        if progress is not None:
            progress("vision weights", done, total, None)

    return load_stage(
        checkpoint.path,
        checkpoint.config,
        source.names(),
        source.get,
        storage=storage,
        dtype=vision_dtype(options),
        device=resolve_device(options),
        progress=report,
        between_layers=between_layers,
    )


def build_engine(
    options: EngineOptions,
    *,
    progress: Progress | None = None,
    vision: VisionLink | None = None,
    storage: Tensor | None = None,
) -> Engine:
    """An engine for `options.model`.

    `vision` is the link to a vision stage that runs elsewhere and writes into `storage`
    [rows, depth, dim]; without it a model that takes images gets a stage in this process.
    Raises LoadError (models/errors.py), VisionConfigError, TowerLoadError or ProcessorConfigError,
    each with the cause, the numbers and a remedy.
    """

    def report(state: LoadProgress) -> None:
        if progress is not None and state.phase != "ready":
            progress(state.phase, state.done_bytes, state.total_bytes, state.eta_s)

    device = resolve_device(options)
    checkpoint = open_checkpoint(options.model)
    shape = vision_shape(checkpoint, options)
    tokenizer = load_tokenizer(checkpoint, options.tokenizer)
    if vision is None and options.threads is not None:
        # With a neighbour, the share of the threads is settled before each step (process/).
        torch.set_num_threads(options.threads)
    loaded = load_decoder(checkpoint, dtype=options.dtype, device=device, progress=report)
    kernels = _kernels(loaded.decoder)
    _lay_out(loaded.decoder, kernels)
    config = loaded.config
    layout = KVLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=options.block_size,
        dtype=str(loaded.decoder.dtype).removeprefix("torch."),
        windows=config.windows,
    )
    host = _host_memory(options, layout, device)
    num_blocks, max_model_len = _size_context(options, config, layout, device, host)
    loaded.decoder.fix_context(max_model_len)
    config = loaded.decoder.config

    images = None
    if shape is not None:
        if storage is None:
            storage = allocate_storage(
                shape.num_rows, shape.depth, shape.dim, shape.dtype, device=device
            )
        if vision is None:
            vision = build_vision(checkpoint, options, storage, progress=progress)
        images = ImageFeed(EmbeddingArena(storage.shape[0]), vision)
    checkpoint.close()

    kv = _kv_manager(options, num_blocks, host)
    info = ModelInfo(
        name=options.served_name or loaded.name,
        max_model_len=max_model_len,
        vocab_size=loaded.vocab_size,
        kv_capacity_tokens=kv.capacity_tokens,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        embedding_rows=0 if storage is None else storage.shape[0],
        eos_token_ids=loaded.eos_ids,
        dtype=layout.dtype,
        device=str(device),
    )
    runner = Runner(
        loaded.decoder,
        KVCache(
            layout, num_blocks, device, None if kernels is None else NativeWriter(kernels), host
        ),
        select(device, dtype=loaded.decoder.dtype, head_dim=layout.head_dim, library=kernels),
        embeddings=storage,
    )
    scheduler = Scheduler(
        kv,
        _budget(options, loaded.decoder, device),
        options.max_num_seqs,
        cache_key(checkpoint, config, layout),
    )
    mrope = config.rope.axes is not None
    return Engine(info, scheduler, runner, tokenizer, images, mrope=mrope)


def cache_key(checkpoint: Checkpoint, config: DecoderConfig, layout: KVLayout) -> CacheKey:
    """What the KV of all requests depends on. The model is its configuration and the names, sizes
    and times of change of its files: reading them all once more would double the time of a start,
    and a device's cache does not outlive the process that read them."""
    path = checkpoint.path
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    digest = hashlib.blake2b(digest_size=32)
    digest.update(json.dumps(checkpoint.config, sort_keys=True, default=str).encode())
    for file in files:
        stat = file.stat()
        digest.update(f"\0{file.name}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
    return CacheKey(model=digest.digest(), kv_dtype=layout.dtype, rope=config.rope_fingerprint)


def _budget(options: EngineOptions, decoder: Decoder, device: torch.device) -> Budget:
    promise = options.tpot_slo_s
    if promise is None:
        promise = _CPU_TPOT_S if device.type == "cpu" else _CUDA_TPOT_S
    if promise == 0:
        return TokenBudget(options.max_num_batched_tokens)
    config = decoder.config
    attention_width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    weights = (
        config.num_layers
        * config.hidden_size
        * (2 * attention_width + 2 * kv_width + 3 * config.intermediate_size)
    )
    prior = prior_model(
        linear_flops_per_token=2 * weights,
        attention_flops_per_pair=4 * attention_width * config.num_layers,
        flops_per_s=_CPU_FLOPS if device.type == "cpu" else _CUDA_FLOPS,
    )
    return TimeBudget(
        options.max_num_batched_tokens, _STEP_SHARE * promise, StepTimeEstimator(prior)
    )


def _kernels(decoder: Decoder) -> ctypes.CDLL | None:
    """The native library, where this decoder can use it and it can be had."""
    if not can_nativize(decoder):
        return None
    try:
        return load_kernels()
    except NativeUnavailableError as error:
        _log.warning("Slower kernels are used: %s", error)
        return None


def _lay_out(decoder: Decoder, kernels: ctypes.CDLL | None) -> None:
    """Puts the weights into the order of the fastest kernels for them here."""
    if kernels is not None:
        nativize(decoder, kernels)
    elif can_pack(decoder):
        pack(decoder)
    _return_freed_memory()


def _return_freed_memory() -> None:
    """Packing frees every weight once; glibc keeps much of it (220 MB of a 135M model) unless asked
    not to. Other C libraries have no such call."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def load_tokenizer(checkpoint: Checkpoint, override: str | None = None) -> Tokenizer:
    """The tokenizer of the folder `override`, or the one beside the weights, or the one inside a
    GGUF file: the API reads the same one. Raises MissingFileError or UnsupportedModelError."""
    path = checkpoint.path
    folder = Path(override).expanduser() if override else path.parent if path.is_file() else path
    file = folder / "tokenizer.json"
    if file.exists():
        return Tokenizer.from_file(str(file))
    if path.is_file() and not override:
        from lm_engine.models.gguf_tokenizer import read_tokenizer

        return read_tokenizer(path)
    return _converted_tokenizer(folder)


def _converted_tokenizer(folder: Path) -> Tokenizer:
    """Checkpoints without tokenizer.json carry a slow tokenizer that transformers converts."""
    from transformers import AutoTokenizer

    try:
        slow: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        backend = slow.backend_tokenizer
    except Exception as cause:
        raise MissingFileError(
            f"{folder} has no tokenizer.json and no tokenizer that converts to one; save it with "
            "transformers (AutoTokenizer.from_pretrained(...).save_pretrained(folder))."
        ) from cause
    if not isinstance(backend, Tokenizer):
        raise MissingFileError(
            f"{folder}: its tokenizer has no fast form; tokenizer.json is needed"
        )
    return backend


def _host_memory(
    options: EngineOptions, layout: KVLayout, device: torch.device
) -> HostMemory | None:
    if options.host_kv_bytes is None:
        return None
    try:
        superblocks = SuperblockLayout(layout, head_major=device.type == "cpu")
        return HostMemory(superblocks, superblocks_in_budget(superblocks, options.host_kv_bytes))
    except (HostMemoryError, LayoutError) as error:
        raise HostTierError(str(error)) from error


def _kv_manager(options: EngineOptions, num_blocks: int, host: HostMemory | None) -> KVManager:
    try:
        return KVManager(
            num_blocks,
            options.block_size,
            prefix_caching=options.prefix_caching,
            host=None if host is None else HostPool(host.num_superblocks),
            chunk_tokens=options.max_num_batched_tokens,
        )
    except ValueError as error:
        raise HostTierError(str(error)) from error


def _check_pool(options: EngineOptions, need_bytes: int, device: torch.device) -> None:
    """Refuses a pool that somebody asked for and the machine cannot hold. A CPU's pages are taken
    one by one, so that without this the kernel would end the server in the middle of a request."""
    free = available_bytes(device)
    if options.kv_memory_bytes is None or free is None or need_bytes <= free:
        return
    share = int((_CPU_KV_SHARE if device.type == "cpu" else _CUDA_KV_SHARE) * free)
    raise OutOfMemoryError(
        need_bytes,
        free,
        str(device),
        f"Use --kv-cache-memory-bytes {free} or less, or leave it out: {share} bytes are taken "
        "then.",
        what=f"the KV pool of --kv-cache-memory-bytes {options.kv_memory_bytes} needs",
    )


def _size_context(
    options: EngineOptions,
    config: DecoderConfig,
    layout: KVLayout,
    device: torch.device,
    host: HostMemory | None = None,
) -> tuple[int, int]:
    """(blocks of the pool, longest context). The pool never exceeds what all sequences could use;
    the context is fitted to the pool, or to the host tier's, when nobody asked for a length."""
    if options.max_model_len is not None and options.max_model_len > config.most_positions:
        raise ContextTooLongError(_too_long(options.max_model_len, config))
    wanted = options.max_model_len or config.max_positions
    ceiling = -(-wanted // layout.block_size) * options.max_num_seqs
    if options.kv_memory_bytes is not None:
        budget = options.kv_memory_bytes
    else:
        share = _CPU_KV_SHARE if device.type == "cpu" else _CUDA_KV_SHARE
        free = available_bytes(device)
        budget = ceiling * layout.bytes_per_block if free is None else int(share * free)
    blocks = min(ceiling, budget // layout.bytes_per_block)
    held = blocks * layout.block_size
    _check_pool(options, blocks * layout.bytes_per_block, device)
    if host is not None:
        held = max(held, host.num_superblocks * SUPERBLOCK_TOKENS)
    need = options.max_model_len or min(wanted, _MIN_CONTEXT)
    if held < need:
        need_bytes = -(-need // layout.block_size) * layout.bytes_per_block
        shorter = f", or --max-model-len {held}" if held else ""
        raise OutOfMemoryError(
            need_bytes,
            budget,
            str(device),
            f"Use --kv-cache-memory-bytes {need_bytes} or more{shorter}.",
            what=f"the KV of one context of {need} tokens, the least that is worth serving, needs"
            if options.max_model_len is None
            else f"the KV of --max-model-len {need} needs",
        )
    return blocks, min(wanted, held)


def _too_long(asked: int, config: DecoderConfig) -> str:
    have = config.most_positions
    stretch = ""
    if config.rope.kind == "default":
        rope = (
            f'{{"rope_type": "yarn", "factor": {-(-asked // have)}.0, '
            f'"original_max_position_embeddings": {have}}}'
        )
        stretch = f', or stretch its positions by "rope_scaling": {rope} in config.json'
    return (
        f"--max-model-len {asked} exceeds the {have} positions that this model was made for; use "
        f"--max-model-len {have} or less{stretch}."
    )
