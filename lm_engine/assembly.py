"""From options and files to an engine: the composition root.

Owns: what "auto" resolves to (dtype, device, size of the embedding arena; kv_sizing.py has the KV
and the context), and the order in which parts are built. Does not own: any part.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from chunked_prefill.encode_time import EncodeTimeModel, EncodeTimes
from chunked_prefill.vision_share import VisionShare
from kv_offload.event_recorder import EventRecorder
from kv_offload.kv_cache import KVCache
from kv_offload.layout import KVLayout
from kv_offload.radix_cache import CacheKey
from lm_engine.attention.cold_costs import hiding_chunks, rates_of
from lm_engine.attention.native import NativeWriter
from lm_engine.attention.select import select
from lm_engine.calibration_cache import calibration_file
from lm_engine.client import ModelInfo
from lm_engine.engine import Engine
from lm_engine.images import ImageFeed
from lm_engine.kv_sizing import host_memory, kv_manager, size_context
from lm_engine.kv_tiers import PrefillCost, check_disk, disk_tier
from lm_engine.models.checkpoint import Checkpoint, open_checkpoint
from lm_engine.models.config import DecoderConfig
from lm_engine.models.decoder import Decoder
from lm_engine.models.errors import (
    MissingFileError,
    UnsupportedModelError,
)
from lm_engine.models.loader import LoadProgress, load_decoder
from lm_engine.models.native_layers import can_nativize, nativize
from lm_engine.models.packed_linear import can_pack, pack
from lm_engine.native.library import NativeUnavailableError
from lm_engine.native.library import load as load_kernels
from lm_engine.options import EngineOptions
from lm_engine.recording import record
from lm_engine.runner import Runner
from lm_engine.scheduling import build_scheduler, flops_per_s
from lm_engine.transfers import build_transfers, staging_ring
from vision_encoder.config import VisionConfig
from vision_encoder.embedding_arena import EmbeddingArena
from vision_encoder.embedding_storage import allocate_storage
from vision_encoder.grid import planner, read_processor_files
from vision_encoder.link import VisionLink
from vision_encoder.plan import ImagePlanner
from vision_encoder.stage_loading import load_stage

_log = logging.getLogger(__name__)

Progress = Callable[[str, float, float, float | None], None]
"""progress(phase, done, total, eta_s); done and total in bytes, 0 while unknown."""

_DEFAULT_EMBEDDING_ROWS = 8192


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

    check_disk(options)
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
    host = host_memory(options, layout, device)
    disk = disk_tier(options, host)
    num_blocks, max_model_len = size_context(options, config, layout, device, host)
    loaded.decoder.fix_context(max_model_len)
    config = loaded.decoder.config

    images = pictures = None
    sharing = VisionShare(own_process=vision is not None)
    if shape is not None:
        if storage is None:
            storage = allocate_storage(
                shape.num_rows, shape.depth, shape.dim, shape.dtype, device=device
            )
        if vision is None:
            vision = build_vision(checkpoint, options, storage, progress=progress)
        pictures = planner(checkpoint.config, read_processor_files(checkpoint.path))
        pace = EncodeTimes(_encode_prior(checkpoint, pictures, device))
        images = ImageFeed(EmbeddingArena(storage.shape[0]), vision, pace)
    checkpoint.close()

    name = options.served_name or loaded.name
    events = EventRecorder(name) if options.kv_events else None
    kv = kv_manager(options, num_blocks, host, events)
    info = ModelInfo(
        name=name,
        max_model_len=max_model_len,
        vocab_size=loaded.vocab_size,
        kv_capacity_tokens=kv.capacity_tokens,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        embedding_rows=0 if storage is None else storage.shape[0],
        eos_token_ids=loaded.eos_ids,
        dtype=layout.dtype,
        device=str(device),
        num_layers=loaded.decoder.config.num_layers,
    )
    writer = None if kernels is None else NativeWriter(kernels)
    cache = KVCache(layout, num_blocks, device, writer, host)
    transfers = None
    if kv.cold is not None:
        transfers = build_transfers(kv.copied_blocks, kv.cold.host, cache, disk=disk)
    ring = staging_ring(options.cold_kv, cache, transfers)
    rates = rates_of(cache, config.num_heads)
    attention = select(
        device,
        dtype=loaded.decoder.dtype,
        head_dim=layout.head_dim,
        library=kernels,
        ring=ring,
        cold_kv=options.cold_kv,
        rates=rates,
    )
    runner = Runner(loaded.decoder, cache, attention, embeddings=storage, ring=ring)
    key = cache_key(checkpoint, config, layout, lasting=disk is not None)
    kept = calibration_file(options, key, device, kernels="torch" if kernels is None else "native")
    calibration = kept.load()
    if images is not None and calibration is not None and calibration.encode is not None:
        images.pace.calibrated(calibration.encode)
    scheduler = build_scheduler(options, config, device, kv, key, calibration)
    scheduler.vision = sharing
    if transfers is not None:
        kv.connect(transfers, PrefillCost(scheduler), layout.bytes_per_token)
    if ring is not None and rates is not None:
        scheduler.cold_chunk = hiding_chunks(rates, layout, config)
    if events is not None and disk is not None:
        events.follow(disk, key)
    if options.record is not None:
        record(options.record, scheduler)
    mrope = config.rope.axes is not None
    return Engine(
        info,
        scheduler,
        runner,
        tokenizer,
        images,
        mrope=mrope,
        kv_events=events,
        calibration=calibration,
        calibration_file=kept,
        plan_images=None if pictures is None else pictures.plan,
    )


def _encode_prior(
    checkpoint: Checkpoint, pictures: ImagePlanner, device: torch.device
) -> EncodeTimeModel:
    """From the tower's arithmetic alone: what two sizes of image cost, at the pace of a usual
    device, until images were measured."""
    tower = VisionConfig.from_hf(checkpoint.config)
    plan = pictures.plan([(448, 448)])[0]
    cost = tower.cost(plan)
    tiles, per_second = plan.tile_patches, flops_per_s(device)
    return EncodeTimeModel(
        patch_s=cost.linear_flops / sum(tiles) / per_second,
        pair_s=cost.attention_flops / sum(n * n for n in tiles) / per_second,
    )


def cache_key(
    checkpoint: Checkpoint, config: DecoderConfig, layout: KVLayout, *, lasting: bool = False
) -> CacheKey:
    """What the KV of all requests depends on. The model is its configuration and the names, sizes
    and times of change of its files: reading them all once more would double the time of a start.
    What is `lasting` outlives this process, in which the files were read, so samples of their bytes
    count as well, and so does the program's version."""
    path = checkpoint.path
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    digest = hashlib.blake2b(digest_size=32)
    digest.update(json.dumps(checkpoint.config, sort_keys=True, default=str).encode())
    for file in files:
        stat = file.stat()
        digest.update(f"\0{file.name}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
        if lasting:
            _sample(file, stat.st_size, digest)
    if lasting:
        digest.update(version("longlens").encode())
    return CacheKey(model=digest.digest(), kv_dtype=layout.dtype, rope=config.rope_fingerprint)


def _sample(file: Path, num_bytes: int, digest: hashlib.blake2b) -> None:
    """The file's beginning, which says what is where in it, and a page of every MiB."""
    with file.open("rb", buffering=0) as weights:
        for start in range(0, num_bytes, 1 << 20):
            weights.seek(start)
            digest.update(weights.read(4096 if start else 1 << 16))


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
