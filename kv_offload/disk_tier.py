"""Superblocks on disk: found again after a restart, never believed unchecked.

Owns: DiskTier: which superblocks lie in its folder, under which keys, within which bound. Does not
own: the form of a file (disk_file.py), what a key covers (disk_key.py), host memory, or when files
are written and read (transfer.py: both happen in a copy thread). Imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kv_offload import disk_file
from kv_offload.disk_key import KEY_BYTES, MARK_BYTES
from kv_offload.kv_events import FileEvents
from kv_offload.superblock import SuperblockLayout, least_gib
from kv_offload.tickets import CopyError

logger = logging.getLogger(__name__)

MISSING, BROKEN, DISK, CLEARED = "missing", "broken", "disk", "cleared"
"""Causes of failure: no such file (any more), one that does not check out, an error of the disk, a
file that was not to be kept when it was written."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class HostBytes(Protocol):
    """The bytes of host slots; HostMemory has them."""

    def raw(self, slot: int) -> memoryview:
        """A slot's superblock, writable."""
        ...

    def seal(self, slot: int) -> None:
        """What was written into a slot is complete."""
        ...


class DiskTierError(Exception):
    """The folder cannot be used; the message says why and what helps."""


@dataclass(frozen=True, slots=True)
class DiskStats:
    """A snapshot; counters count since the start of the process."""

    files: int
    num_bytes: int
    saves: int
    hits: int
    misses: int
    """Fetches of a key that was not, or no longer, there."""
    broken: int
    """Files that did not check out, and were removed."""
    evictions: int
    cleared: int
    """Files that left by `clear`."""


class DiskTier:
    """Full superblocks in a folder of its own, at most `max_bytes` of them; least recently used
    leave first. One process uses the folder at a time.

    Args:
        memory: the bytes of host slots, which saving reads and fetching writes.

    Raises DiskTierError when the folder cannot be written, is used by another process, or the bound
    does not hold one superblock.
    """

    def __init__(
        self, folder: Path, layout: SuperblockLayout, memory: HostBytes, max_bytes: int
    ) -> None:
        self.folder, self.layout, self.max_bytes = folder, layout, max_bytes
        self._file_bytes = disk_file.HEADER.size + layout.num_bytes
        if max_bytes < self._file_bytes:
            raise DiskTierError(
                f"--disk-kv-gib allows {max_bytes:,} bytes, a file of {layout.tokens} tokens takes "
                f"{self._file_bytes:,}. Use --disk-kv-gib {least_gib(self._file_bytes)} or more, "
                "or leave --disk-kv-path out."
            )
        self.events: FileEvents | None = None
        """Is told which files come and go."""
        self._memory = memory
        self._fingerprint = layout.fingerprint()
        self._lock = threading.Lock()
        """Around the index and counters: the copy thread changes them, the engine's loop asks."""
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._num_bytes = 0
        self._bound = max_bytes
        """Less than `max_bytes` while others leave the disk no room for that."""
        self._told_full = False
        self._saves = self._hits = self._misses = 0
        self._broken = self._evictions = self._cleared = 0
        self._clears: Counter[bytes] = Counter()
        """How often each mark was cleared: what was asked for before is not kept."""
        self._owner = _own(folder)
        self._find_files()

    @property
    def blocks(self) -> int:
        """Blocks of the superblocks that are saved: full ones only."""
        return self.layout.blocks

    @property
    def max_files(self) -> int:
        """Superblocks that the bound allows, as far as the disk has had room for them."""
        return self._bound // self._file_bytes

    @property
    def stats(self) -> DiskStats:
        with self._lock:
            return DiskStats(
                len(self._sizes),
                self._num_bytes,
                self._saves,
                self._hits,
                self._misses,
                self._broken,
                self._evictions,
                self._cleared,
            )

    def __contains__(self, key: object) -> bool:
        """Whether a fetch is worth trying; the file may still turn out broken."""
        with self._lock:
            return key in self._sizes

    def keys(self) -> tuple[bytes, ...]:
        """Of all files."""
        with self._lock:
            return tuple(self._sizes)

    def save(self, slot: int, key: bytes) -> SaveWork:
        """Write the full superblock of a slot."""
        return SaveWork(self, slot, _checked(key), self._times_cleared(key))

    def fetch(self, key: bytes, slot: int) -> FetchWork:
        """Read what was saved under a key into a slot."""
        return FetchWork(self, _checked(key), slot)

    def clear(self, mark: bytes) -> None:
        """Forget all files whose keys begin with `mark` (disk_key.tenant_mark; empty for all), also
        those that are being written now. They are removed when this returns: a restart must not
        find them."""
        with self._lock:
            self._clears[mark] += 1
            found = [key for key in self._sizes if key.startswith(mark)]
            self._cleared += len(found)
            if self.events is not None:
                self.events.files_cleared(mark)
        for key in found:
            self._forget(key)

    def close(self) -> None:
        """Leave the folder to the next process; the files stay."""
        os.close(self._owner)

    # -- in the copy thread ------------------------------------------------------------------------

    def write(self, slot: int, key: bytes, clears: int) -> None:
        """`clears`: of the key's mark, when this was asked for. Raises CopyError: DISK when the
        disk takes no more, CLEARED after a `clear`."""
        if key in self:
            return
        path = disk_file.path_of(self.folder, key)
        try:
            self._write(path, key, slot)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                logger.warning("%s was not saved: %s", path, error)
            raise CopyError(DISK) from error
        with self._lock:
            cleared = self._times_cleared(key) != clears
            if not cleared:
                self._sizes[key] = self._file_bytes
                self._num_bytes += self._file_bytes
                self._bound = max(self._bound, self._num_bytes)
                self._saves += 1
                if self.events is not None:
                    self.events.file_stored(key)
        if cleared:
            path.unlink(missing_ok=True)
            raise CopyError(CLEARED)

    def read(self, key: bytes, slot: int) -> None:
        """Raises CopyError with MISSING or BROKEN; the slot then holds anything."""
        with self._lock:
            if key not in self._sizes:
                self._misses += 1
                raise CopyError(MISSING)
            self._sizes.move_to_end(key)
        path = disk_file.path_of(self.folder, key)
        try:
            fault = disk_file.read(path, self._fingerprint, key, self._memory.raw(slot))
        except FileNotFoundError:
            logger.warning("%s is a miss: somebody else removed it", path)
            self._forget(key)
            with self._lock:
                self._misses += 1
            raise CopyError(MISSING) from None
        except OSError as error:
            fault = f"it cannot be read: {error.strerror}"
        if fault is not None:
            logger.warning("%s is a miss, and removed: %s", path, fault)
            self._forget(key)
            with self._lock:
                self._broken += 1
            raise CopyError(BROKEN)
        self._memory.seal(slot)
        with contextlib.suppress(OSError):
            os.utime(path)
        with self._lock:
            self._hits += 1
            if self.events is not None and key in self._sizes:
                self.events.file_stored(key)

    def _times_cleared(self, key: bytes) -> int:
        return self._clears[key[:MARK_BYTES]] + self._clears[b""]

    def _write(self, path: Path, key: bytes, slot: int) -> None:
        """Raises OSError. A disk that is full before the bound is reached becomes the bound."""
        self._raise_bound()
        self._make_room(self._file_bytes)
        body = self._memory.raw(slot)
        try:
            disk_file.write(path, self._fingerprint, key, body)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            with self._lock:
                self._bound = self._num_bytes
                files = len(self._sizes)
            if not self._told_full:
                self._told_full = True
                logger.warning(
                    "%s has no room for more: %s. It holds %d files, %s bytes, which is the bound "
                    "now instead of the %s of --disk-kv-gib; the least recently used make way. "
                    "Lower --disk-kv-gib, or make room there.",
                    *(self.folder, error.strerror, files, f"{self._bound:,}"),
                    f"{self.max_bytes:,}",
                )
            if not files:
                raise
            self._make_room(self._file_bytes)
            disk_file.write(path, self._fingerprint, key, body)

    def _raise_bound(self) -> None:
        """By one file, once the disk has room for it again. For two, since what a disk says is free
        cannot always be written in full."""
        if self._bound < self.max_bytes:
            with contextlib.suppress(OSError):
                if shutil.disk_usage(self.folder).free >= 2 * self._file_bytes:
                    with self._lock:
                        more = max(self._bound, self._num_bytes) + self._file_bytes
                        self._bound = min(self.max_bytes, more)

    def _make_room(self, num_bytes: int) -> None:
        while True:
            with self._lock:
                if not self._sizes or self._num_bytes + num_bytes <= self._bound:
                    return
                oldest = next(iter(self._sizes))
                self._evictions += 1
            self._forget(oldest)

    def _forget(self, key: bytes) -> None:
        with self._lock:
            self._num_bytes -= self._sizes.pop(key, 0)
            if self.events is not None:
                self.events.file_gone(key)
        with contextlib.suppress(OSError):
            disk_file.path_of(self.folder, key).unlink()

    def _find_files(self) -> None:
        """The index of what an earlier process left, oldest first; strangers' files stay."""
        found: list[tuple[float, bytes, int]] = []
        try:
            for key, entry in _files(self.folder):
                if entry.name.endswith(disk_file.UNFINISHED):
                    os.unlink(entry.path)
                    continue
                about = entry.stat(follow_symlinks=False)
                found.append((about.st_mtime, key, about.st_size))
        except OSError as error:
            os.close(self._owner)
            raise _unusable(self.folder, error) from error
        for _, key, size in sorted(found):
            self._sizes[key] = size
            self._num_bytes += size
        self._make_room(0)

    def check_invariants(self) -> None:
        with self._lock:
            if self._num_bytes != sum(self._sizes.values()) or self._num_bytes > self._bound:
                raise AssertionError(f"{self._num_bytes} bytes are counted of {self._sizes}")


@dataclass(frozen=True, slots=True)
class SaveWork:
    """Writes one file; a Work."""

    tier: DiskTier
    slot: int
    key: bytes
    clears: int

    @property
    def num_bytes(self) -> int:
        return self.tier.layout.num_bytes

    def run(self) -> None:
        self.tier.write(self.slot, self.key, self.clears)


@dataclass(frozen=True, slots=True)
class FetchWork:
    """Reads one file; a Work."""

    tier: DiskTier
    key: bytes
    slot: int

    @property
    def num_bytes(self) -> int:
        return self.tier.layout.num_bytes

    def run(self) -> None:
        self.tier.read(self.key, self.slot)


def _checked(key: bytes) -> bytes:
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
    return key


def check_folder(folder: Path, max_bytes: int) -> None:
    """Raises DiskTierError when no tier can be opened in the folder now; warns of a bound that the
    disk has no room for."""
    owner = _own(folder)
    try:
        held = sum(entry.stat(follow_symlinks=False).st_size for _, entry in _files(folder))
        have = shutil.disk_usage(folder).free + held
    except OSError as error:
        raise _unusable(folder, error) from error
    finally:
        os.close(owner)
    if max_bytes > have:
        logger.warning(
            "--disk-kv-gib allows %s bytes in %s, where %s are free or held by its files: when the "
            "disk is full, the least recently used make way. Use --disk-kv-gib %.3g or less to "
            "leave room for others.",
            *(f"{max_bytes:,}", folder, f"{have:,}", have / 2**30),
        )


def _files(folder: Path) -> Iterator[tuple[bytes, os.DirEntry[str]]]:
    """The tier's own files with their keys, also unfinished ones. Raises OSError."""
    with os.scandir(folder) as entries:
        for entry in entries:
            key = disk_file.key_of(entry.name)
            if key is not None and entry.is_file(follow_symlinks=False):
                yield key, entry


def _unusable(folder: Path, error: OSError) -> DiskTierError:
    return DiskTierError(
        f"the disk tier's folder {folder} cannot be used: {error.strerror}. Give --disk-kv-path a "
        "folder that this user can read and write."
    )


def _own(folder: Path) -> int:
    """A descriptor that holds the folder for this process."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        held = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unusable(folder, error) from error
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(held)
        raise DiskTierError(
            f"the disk tier's folder {folder} is used by another server; give each its own"
        ) from error
    return held
