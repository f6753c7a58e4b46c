"""The unit in which KV leaves the device: a superblock of 256 tokens, all layers.

Owns: SuperblockLayout: shape, bytes and identity of a superblock in host memory and on disk.
Does not own: which superblocks are in use (host_pool.py), their memory (host_memory.py), or
copies. Imports no torch.

A superblock is [layer][K|V][token]: one layer's keys and values are one piece, so that a layer can
be brought in by itself, and every piece is large. Host-to-device copies run at a tenth of the
link's rate in pieces under 28 KiB (vLLM #42212): blocks of 16 tokens are too small to move.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

from kv_offload.layout import KVLayout, LayoutError

SUPERBLOCK_TOKENS = 256
PAGE_BYTES = 4096
"""Superblocks begin on a page: memory is pinned by pages, and two pieces must not share one."""


@dataclass(frozen=True, slots=True)
class SuperblockLayout:
    """Geometry of the superblocks of one model.

    Raises LayoutError when the device's blocks do not fill a superblock evenly.
    """

    kv: KVLayout
    tokens: int = SUPERBLOCK_TOKENS
    head_major: bool = True
    """The order of tokens and heads, which is that of the device's cache (kv_cache.py): heads
    first on the CPU, tokens first elsewhere."""

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.tokens % self.kv.block_size:
            raise LayoutError(
                f"block_size is {self.kv.block_size}; it must divide the {self.tokens} tokens of a "
                "superblock, so choose a power of two up to that"
            )

    @property
    def blocks(self) -> int:
        """Device blocks in a full superblock."""
        return self.tokens // self.kv.block_size

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """[L, 2, Hkv, tokens, d], or [L, 2, tokens, Hkv, d] without `head_major`."""
        kv = self.kv
        rows = (kv.num_kv_heads, self.tokens) if self.head_major else (self.tokens, kv.num_kv_heads)
        return (kv.num_layers, 2, *rows, kv.head_dim)

    @property
    def token_axis(self) -> int:
        """Which axis of `shape` counts tokens."""
        return 3 if self.head_major else 2

    @property
    def num_bytes(self) -> int:
        """Of the keys and values of a full superblock."""
        return self.kv.bytes_per_token * self.tokens

    @property
    def stride_bytes(self) -> int:
        """From one superblock to the next in host memory."""
        return -(-self.num_bytes // PAGE_BYTES) * PAGE_BYTES

    def superblocks_in(self, num_bytes: int) -> int:
        """Most superblocks whose memory fits into `num_bytes`."""
        return num_bytes // self.stride_bytes

    def fingerprint(self) -> bytes:
        """32 bytes that differ whenever the same bytes would mean something else."""
        kv = self.kv
        said = (kv.num_layers, kv.num_kv_heads, kv.head_dim, kv.dtype, kv.windows)
        order = (self.tokens, self.head_major)
        return hashlib.sha256(repr((said, order)).encode()).digest()


def least_gib(num_bytes: int) -> str:
    """GiB as a flag takes them, rounded up to what holds so many bytes."""
    return f"{math.ceil(num_bytes / 2**30 * 1e4) / 1e4:.4f}".rstrip("0").rstrip(".")
