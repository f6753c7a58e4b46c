"""Host and disk behind the device's KV, for one engine.

Owns: the disk tier's folder and bound from the options, what computing instead of copying would
cost, and the tiers' numbers for whoever asks. Does not own: the host's memory and the sizes
(kv_sizing.py), copies (transfers.py, kv_offload), or what is chosen (kv_offload/recall_cost.py).
"""

from __future__ import annotations

from pathlib import Path

from chunked_prefill.budget import Budget
from chunked_prefill.scheduler import Scheduler
from kv_offload.disk_tier import DiskTier, DiskTierError, check_folder
from kv_offload.host_memory import HostMemory
from kv_offload.kv_manager import KVManager
from kv_offload.superblock import SuperblockLayout
from kv_offload.tickets import CANCELLED
from lm_engine.client import TierStats
from lm_engine.kv_sizing import HostTierError
from lm_engine.options import EngineOptions


def check_disk(options: EngineOptions) -> None:
    """What can be known before the model is read. Raises HostTierError with what helps."""
    if options.disk_kv_path is None:
        return
    if options.host_kv_bytes is None:
        raise HostTierError(
            "--disk-kv-path needs host memory, through which its KV comes and goes: add "
            "--host-kv-gib 1 or more"
        )
    try:
        check_folder(Path(options.disk_kv_path), options.disk_kv_bytes)
    except DiskTierError as error:
        raise HostTierError(str(error)) from error


def disk_tier(options: EngineOptions, host: HostMemory | None) -> DiskTier | None:
    """None when none was asked for. Raises HostTierError with what helps."""
    if options.disk_kv_path is None or host is None:
        return None
    try:
        layout: SuperblockLayout = host.layout
        return DiskTier(Path(options.disk_kv_path), layout, host, options.disk_kv_bytes)
    except DiskTierError as error:
        raise HostTierError(str(error)) from error


def tier_stats(kv: KVManager) -> TierStats | None:
    """None where there is nothing behind the device."""
    if kv.tiers is None or kv.cold is None:
        return None
    host, transfers = kv.cold.host, kv.tiers.transfers
    disk = transfers.disk
    files = disk.stats if isinstance(disk, DiskTier) else None
    return TierStats(
        host_superblocks=host.num_superblocks,
        host_used=host.num_used,
        host_cached=host.num_cached,
        host_evictions=host.stats.evictions,
        host_cleared=kv.cold.cache.num_cleared,
        disk_superblocks=disk.max_files if isinstance(disk, DiskTier) else 0,
        disk_cached=files.files if files else 0,
        disk_evictions=files.evictions if files else 0,
        disk_cleared=files.cleared if files else 0,
        disk_broken=files.broken if files else 0,
        copies_awaited=transfers.num_awaited,
        oldest_copy_age_s=transfers.oldest_age_s,
        stalled_s=kv.tiers.stalled_seconds,
        staging_stalled_s=transfers.stalled_seconds,
        bytes_copied=tuple((d.value, count) for d, count in transfers.bytes_copied.items()),
        failures=tuple(
            (direction.value, cause, count)
            for (direction, cause), count in transfers.failures.items()
            # Nobody wanted it any more: an abort, or the rest of a recall that ended.
            if cause != CANCELLED
        ),
    )


class PrefillCost:
    """CostModel of kv_offload: the prompt computed alone, by the step times that the scheduler's
    budget has learnt. A budget that learns nothing says nothing; then a copy always pays."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def compute_s(self, start: int, end: int) -> float:
        budget: Budget = self._scheduler.budget
        if budget.estimator is None:
            return float("inf")
        model = budget.estimator.model
        return model.prefill_s(start, end, budget.max_num_batched_tokens)
