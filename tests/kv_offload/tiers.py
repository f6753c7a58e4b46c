"""Small tiers for tests: a cache, host memory and transfers between them.

Owns: `Rig`, which puts them together with any engine. Does not own: any assertion.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kv_offload import disk_file
from kv_offload.block_pool import BlockPool
from kv_offload.copies import TierCopies
from kv_offload.copy_manual import ManualCopyEngine
from kv_offload.disk_tier import DiskTier
from kv_offload.host_memory import HostMemory
from kv_offload.host_pool import HostPool
from kv_offload.kv_cache import KVCache
from kv_offload.layout import KVLayout
from kv_offload.superblock import SuperblockLayout
from kv_offload.transfer import TransferLimits, Transfers

KV = KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=4)
LAYOUT = SuperblockLayout(KV, tokens=16)


@dataclass
class Rig:
    """Transfers over random KV; the clock is moved by hand."""

    num_blocks: int = 24
    num_superblocks: int = 4
    engine: Any = field(default_factory=ManualCopyEngine)
    limits: TransferLimits = field(default_factory=TransferLimits)
    verify: bool = False
    folder: Path | None = None
    """Of a disk tier for 4 superblocks."""
    now: float = 0.0

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks)
        self.cache = KVCache(KV, self.num_blocks, "cpu")
        self.cache.storage.normal_()
        self.host = HostPool(self.num_superblocks)
        self.memory = HostMemory(LAYOUT, self.num_superblocks, verify=self.verify)
        self.memory.poison(range(self.num_superblocks))
        self.disk = None
        if self.folder is not None:
            size = disk_file.HEADER.size + LAYOUT.num_bytes
            self.disk = DiskTier(self.folder, LAYOUT, self.memory, 4 * size)
        self.disk_engine = ManualCopyEngine()
        self.transfers = Transfers(
            self.pool,
            self.host,
            TierCopies(self.cache, self.memory),
            self.engine,
            disk=self.disk,
            disk_engine=self.disk_engine,
            limits=self.limits,
            clock=lambda: self.now,
        )

    def blocks(self, count: int) -> list[int]:
        return self.pool.allocate(count, owner=0, after=None, reach=count)

    def superblock(self) -> int:
        reserved = self.host.reserve(1)
        assert reserved is not None
        return reserved.superblocks[0]

    def content(self, blocks: list[int]) -> torch.Tensor:
        """[L, 2, Hkv, tokens, d] of device blocks, a copy."""
        size = KV.block_size
        slots = [block * size + i for block in blocks for i in range(size)]
        return self.cache.storage[:, :, :, slots].clone()

    def stored(self, blocks: list[int]) -> int:
        """A superblock that holds the blocks."""
        superblock = self.superblock()
        ticket = self.transfers.store(blocks, superblock)
        self.transfers.join(ticket)
        return superblock
