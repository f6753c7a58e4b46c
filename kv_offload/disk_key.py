"""How superblocks are named on disk.

Owns: keys of 40 bytes, by which a superblock is found again after a restart. Does not own: files
(disk_file.py), which of them there are (disk_tier.py), or the tree in memory, which compares ids
and trusts no name (host_cache.py). Imports no torch.

A key is the tenant's mark (8 bytes) and SHA-256 (32 bytes) over everything that the KV depends on:
the CacheKey, and all tokens up to the superblock's end. Nobody can make another prompt that gives
the same key (vLLM #12621, #29163). The mark only says whose files to remove.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kv_offload.radix_cache import CacheKey

MARK_BYTES = 8
KEY_BYTES = MARK_BYTES + 32


def tenant_mark(tenant: str) -> bytes:
    """The beginning of all keys of a tenant."""
    return hashlib.sha256(b"tenant " + tenant.encode()).digest()[:MARK_BYTES]


def root_key(key: CacheKey) -> bytes:
    """What stands before the first superblock of a tree. The tenant is the one that the server
    knows, never one that a client named."""
    said = (key.tenant, key.adapter, key.model, key.kv_dtype, key.rope)
    return tenant_mark(key.tenant) + hashlib.sha256(repr(said).encode()).digest()


def chain_key(parent: bytes, ids: Sequence[int]) -> bytes:
    """Of the superblock with these ids behind what `parent` names."""
    if len(parent) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(parent)}")
    said = parent + ",".join(map(str, ids)).encode()
    return parent[:MARK_BYTES] + hashlib.sha256(said).digest()
