"""Events of the prefix cache, collected until somebody takes them.

Owns: EventRecorder, and which files of the disk tier were told of. Does not own: the form of events
(kv_events.py), names that outlive the process (disk_names.py), or what becomes of events.
Imports no torch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from kv_offload.disk_names import DiskNames
from kv_offload.disk_tier import DiskTier
from kv_offload.kv_events import BlockName, KVEvent, Tier, root_name
from kv_offload.radix_cache import CacheKey


class EventRecorder:
    """KVEventSink and FileEvents: told by the engine's loop and by the thread that writes files.
    Whoever steps the engine takes the events; they are kept until then.

    `model`: its public name.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._events: list[KVEvent] = []
        self._names: DiskNames | None = None
        self._files: dict[bytes, BlockName] = {}
        """Of the disk tier, as far as they were told of."""

    def take(self) -> tuple[KVEvent, ...]:
        """What was told since the last call, in order."""
        if not self._events:
            return ()
        with self._lock:
            events, self._events = tuple(self._events), []
        return events

    def follow(self, disk: DiskTier, key: CacheKey) -> None:
        """Tells of the files that an earlier process left, and of what becomes of the tier's from
        now on. `key`: what this process's KV depends on, for any tenant; other files are nobody's
        here."""
        self._names = DiskNames(disk.folder, disk.max_files, disk.keys)
        disk.events = self
        for file in self._names.open(self._model, key):
            self.file_stored(file)

    # -- device and host ---------------------------------------------------------------------------

    def root(self, tenant: str, adapter: bytes) -> BlockName:
        return root_name(self._model, tenant, adapter)

    def stored(self, tier: Tier, name: BlockName) -> None:
        with self._lock:
            self._store(tier, name)

    def evicted(self, tier: Tier, name: BlockName) -> None:
        with self._lock:
            self._events.append(KVEvent("evicted", tier, name.tenant, name.key))

    def cleared(self, tier: Tier, tenants: Iterable[str]) -> None:
        with self._lock:
            self._events += [KVEvent("cleared", tier, tenant) for tenant in sorted(set(tenants))]

    def _store(self, tier: Tier, name: BlockName) -> None:
        event = KVEvent("stored", tier, name.tenant, name.key, name.parent, name.num_tokens)
        self._events.append(event)

    # -- disk --------------------------------------------------------------------------------------

    def named(self, disk_key: bytes, disk_root: bytes, root: BlockName, name: BlockName) -> None:
        if self._names is not None:
            self._names.add(disk_key, disk_root, root, name)

    def file_stored(self, key: bytes) -> None:
        name = None if self._names is None else self._names.get(key)
        with self._lock:
            if name is not None and key not in self._files:
                self._files[key] = name
                self._store("disk", name)

    def file_gone(self, key: bytes) -> None:
        with self._lock:
            name = self._files.pop(key, None)
            if name is not None:
                self._events.append(KVEvent("evicted", "disk", name.tenant, name.key))

    def files_cleared(self, mark: bytes) -> None:
        with self._lock:
            gone = [key for key in self._files if key.startswith(mark)]
            tenants = {self._files.pop(key).tenant for key in gone}
            self._events += [KVEvent("cleared", "disk", tenant) for tenant in sorted(tenants)]
