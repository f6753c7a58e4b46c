"""How much KV there is, on which tier, and how long a context and a step may be.

Owns: the sizes of the KV pool, of the host tier and of the context that "auto" resolves to, the
refusal of those that cannot be had, and the budget of a step. Does not own: the parts that are
built with them (assembly.py puts them together).
"""

from __future__ import annotations

import torch

from kv_offload.cold_prefix import DeviceTooSmallError
from kv_offload.host_memory import CudaPinner, HostMemory, HostMemoryError, superblocks_in_budget
from kv_offload.host_pool import HostPool
from kv_offload.kv_events import KVEventSink
from kv_offload.kv_manager import KVManager
from kv_offload.layout import KVLayout, LayoutError
from kv_offload.superblock import SUPERBLOCK_TOKENS, SuperblockLayout
from lm_engine.models.checkpoint import available_bytes
from lm_engine.models.config import DecoderConfig
from lm_engine.models.errors import LoadError, OutOfMemoryError
from lm_engine.options import EngineOptions

_CPU_KV_SHARE = 0.25
"""Of free host memory: pages are taken when they are first written, so this is a limit, not a
cost, and the rest stays for weights that are still to be read and for other processes."""
_CUDA_KV_SHARE = 0.9
_MIN_CONTEXT = 256


class HostTierError(LoadError):
    """The host tier that was asked for cannot be had."""


class ContextTooLongError(LoadError):
    """--max-model-len asks for more than the model or the memory has."""


def host_memory(
    options: EngineOptions, layout: KVLayout, device: torch.device
) -> HostMemory | None:
    if options.host_kv_bytes is None:
        return None
    free = available_bytes(torch.device("cpu"))
    if free is not None and options.host_kv_bytes > free:
        # As with the pool, pages are taken one by one: too much would end the server mid-request.
        raise HostTierError(
            f"--host-kv-gib asks for {options.host_kv_bytes:,} bytes, {free:,} are available; use "
            f"at most {free / 2**30:.1f}, less what the KV pool takes"
        )
    try:
        superblocks = SuperblockLayout(layout, head_major=device.type == "cpu")
        return HostMemory(
            superblocks,
            superblocks_in_budget(superblocks, options.host_kv_bytes),
            pinner=CudaPinner() if device.type == "cuda" else None,
        )
    except (HostMemoryError, LayoutError, OSError) as error:
        raise HostTierError(f"the host tier cannot be had: {error}") from error


def kv_manager(
    options: EngineOptions,
    num_blocks: int,
    host: HostMemory | None,
    events: KVEventSink | None = None,
) -> KVManager:
    try:
        return KVManager(
            num_blocks,
            options.block_size,
            prefix_caching=options.prefix_caching,
            host=None if host is None else HostPool(host.num_superblocks),
            chunk_tokens=options.max_num_batched_tokens,
            events=events,
        )
    except DeviceTooSmallError as error:
        assert host is not None
        least = error.least_blocks * host.layout.kv.bytes_per_block
        raise HostTierError(
            f"{error}. Use --kv-cache-memory-bytes {least} or more, lower "
            "--max-num-batched-tokens, or leave --host-kv-gib out."
        ) from error
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


def size_context(
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
    if host is not None and blocks:
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
