"""The one set of open copies of an engine: which memory, and which way of copying a device has.

Owns: `build_transfers`, and `staging_ring`. Does not own: tickets (kv_offload/transfer.py), the
memories, or who asks for copies (the prefix tiers, attention/staging.py).
"""

from __future__ import annotations

import torch

from kv_offload.copies import TierCopies
from kv_offload.copy_cuda import CudaCopyEngine, TorchStreams
from kv_offload.copy_engine import ThreadCopyEngine
from kv_offload.host_pool import HostPool
from kv_offload.kv_cache import KVCache
from kv_offload.tickets import BlockRefs, CopyEngine, DiskCopies
from kv_offload.transfer import Transfers
from lm_engine.attention.staging import StagingRing
from lm_engine.options import ColdKV


def copy_engine(device: torch.device, name: str = "longlens-copy") -> CopyEngine:
    """Queues of its own on CUDA, a thread beside the one that computes elsewhere, which begins with
    the first copy."""
    if device.type == "cuda":
        return CudaCopyEngine(TorchStreams(device))
    return ThreadCopyEngine(name)


def build_transfers(
    blocks: BlockRefs,
    host: HostPool,
    cache: KVCache,
    *,
    engine: CopyEngine | None = None,
    disk: DiskCopies | None = None,
) -> Transfers:
    """Copies between `cache` and its host memory, and to disk where there is one.

    `blocks` counts references on the cache's blocks: whoever also counts users of them must be
    asked instead of the pool (see Transfers). What is streamed has queues or a thread of its own:
    attention waits for it, and should not find loads before it. `engine` replaces both, for tests.
    Raises ValueError for a cache without host memory.
    """
    if cache.host is None:
        raise ValueError("the cache has no host memory, so there is nothing to copy to or from")
    return Transfers(
        blocks,
        host,
        TierCopies(cache, cache.host),
        engine or copy_engine(cache.device),
        disk=disk,
        disk_engine=None if disk is None else ThreadCopyEngine("longlens-disk"),
        stream_engine=engine or copy_engine(cache.device, "longlens-stream"),
    )


def staging_ring(
    cold_kv: ColdKV, cache: KVCache, transfers: Transfers | None
) -> StagingRing | None:
    """The buffers through which cold KV is streamed; None where it never is."""
    on_cpu = cache.device.type == "cpu"
    if transfers is None or cache.host is None or cold_kv == "cpu":
        return None
    if cold_kv == "auto" and on_cpu:
        return None
    return StagingRing(transfers, TierCopies(cache, cache.host), cache)
