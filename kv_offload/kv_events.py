"""What the prefix cache holds, told to whoever sends requests to several servers.

Owns: how a block is named outside this process (BlockName), the events (KVEvent), and what the
trees tell (KVEventSink). Does not own: when they do (radix_cache.py, host_cache.py), who listens
(event_recorder.py), numbers and readers (lm_engine/kv_log.py). Imports no torch.

A name is computed from what a router knows: the model's public name, the tenant's label, and the
ids of the tokens (an image's token is its content key and row). Nothing secret goes into it, so
events are shown to their own tenant only, and nothing is found by a name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Tier = Literal["device", "host", "disk"]
Kind = Literal["stored", "evicted", "cleared"]
TIERS: tuple[Tier, ...] = ("device", "host", "disk")
_VERSION = b"longlens-kv-1"


@dataclass(frozen=True, slots=True)
class BlockName:
    """A block of some prompts, or the place before their first (`num_tokens` 0)."""

    tenant: str
    key: bytes
    """32 bytes, as `root_name` and `child` say."""
    parent: bytes = b""
    """Key of the block before it."""
    num_tokens: int = 0
    """Of this block; the last of a prompt may be shorter than others of its tier."""

    def child(self, ids: Sequence[int]) -> BlockName:
        """The block with these ids behind this one: SHA-256 of this key and of the ids in lower
        case hexadecimal, separated by commas. An image token's (radix_cache.image_id) is 1, the
        image's key, and its row in 8 digits."""
        said = self.key + ",".join([f"{i:x}" for i in ids]).encode()
        return BlockName(self.tenant, hashlib.sha256(said).digest(), self.key, len(ids))


def root_name(model: str, tenant: str, adapter: bytes = b"") -> BlockName:
    """What stands before the first block of a tenant's prompts: SHA-256 of "longlens-kv-1", the
    SHA-256 of the model's name, and that of the tenant's label. With an adapter, SHA-256 of this
    and of the adapter's digest."""
    parts = [hashlib.sha256(part.encode()).digest() for part in (model, tenant)]
    key = hashlib.sha256(_VERSION + b"".join(parts)).digest()
    return BlockName(tenant, hashlib.sha256(key + adapter).digest() if adapter else key)


@dataclass(frozen=True, slots=True)
class KVEvent:
    """One change of one tier. Who applies all of a tenant's in order holds what the tier holds."""

    kind: Kind
    tier: Tier
    tenant: str
    key: bytes = b""
    """Of the block; empty when the tier was cleared of all that the tenant had."""
    parent: bytes = b""
    """With `stored`."""
    num_tokens: int = 0
    """With `stored`."""


class KVEventSink(Protocol):
    """Where the trees tell of changes. Without one they compute no names."""

    def root(self, tenant: str, adapter: bytes) -> BlockName: ...

    def stored(self, tier: Tier, name: BlockName) -> None: ...

    def evicted(self, tier: Tier, name: BlockName) -> None: ...

    def cleared(self, tier: Tier, tenants: Iterable[str]) -> None: ...

    def named(self, disk_key: bytes, disk_root: bytes, root: BlockName, name: BlockName) -> None:
        """What a superblock's file, if there is or will be one, is called outside. The roots: what
        stands before its prompt's first superblock, as files are named (disk_key.py) and outside.
        """
        ...


class FileEvents(Protocol):
    """What a DiskTier tells, also from its copy thread; keys as in disk_key.py."""

    def file_stored(self, key: bytes) -> None:
        """It is there; may be told again."""
        ...

    def file_gone(self, key: bytes) -> None: ...

    def files_cleared(self, mark: bytes) -> None:
        """All whose keys begin with `mark` are forgotten; `file_gone` may follow for each."""
        ...
