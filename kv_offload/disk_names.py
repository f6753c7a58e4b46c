"""What the disk tier's files are called outside, over restarts.

Owns: DiskNames: the file `names` in the disk tier's folder, a line per superblock. Does not own:
which files there are (disk_tier.py), or events (event_recorder.py). Imports no torch.

A file's own name is computed from what nobody outside knows (disk_key.py), and its tokens are not
kept, so the outside name has to be written down. A line is added before the superblock is written:
a line without a file says nothing, and is dropped with the next rewriting. Tenants' labels and
hashes are all that it holds; like the files it can be read by its owner only.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kv_offload.disk_key import root_key
from kv_offload.kv_events import BlockName, root_name
from kv_offload.radix_cache import CacheKey

logger = logging.getLogger(__name__)

_FILE, _UNFINISHED = "names", "names.part"
_UNDER_WAY = 64
"""More files than are written or read at once."""


@dataclass(frozen=True, slots=True)
class _Line:
    disk_root: bytes
    root: bytes
    """Key of the outside root, which changes with the model's public name."""
    name: BlockName

    def text(self, disk_key: bytes) -> str:
        said = (disk_key, self.disk_root, self.root, self.name.key, self.name.parent)
        fields = [*(one.hex() for one in said), self.name.num_tokens, self.name.tenant]
        return json.dumps(fields) + "\n"


def _read(line: str) -> tuple[bytes, _Line] | None:
    """None for what is no line of this kind, such as one that a crash cut off."""
    try:
        *said, num_tokens, tenant = json.loads(line)
        disk_key, disk_root, root, key, parent = map(bytes.fromhex, said)
    except (ValueError, TypeError):
        return None
    if not isinstance(tenant, str) or not isinstance(num_tokens, int):
        return None
    return disk_key, _Line(disk_root, root, BlockName(tenant, key, parent, num_tokens))


class DiskNames:
    """The names of a folder's files. `get` is for any thread, the rest for the engine's loop.

    `most_files`: that the tier may hold; `files` says which there are.
    """

    def __init__(self, folder: Path, most_files: int, files: Callable[[], Sequence[bytes]]) -> None:
        self._path, self._unfinished = folder / _FILE, folder / _UNFINISHED
        self._files = files
        self._recent = most_files + _UNDER_WAY
        """Lines that are kept without a file: it may be about to be written."""
        self._lines: OrderedDict[bytes, _Line] = OrderedDict()
        """By the names of files, as they were last asked for."""

    def open(self, model: str, key: CacheKey) -> list[bytes]:
        """Reads what an earlier process wrote; returns the files whose KV this one can use.
        `model`: its public name. `key`: what its KV depends on, for any tenant."""
        try:
            text = self._path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            text = ""
        self._lines = OrderedDict(
            found for line in text.splitlines() if (found := _read(line)) is not None
        )
        self._rewrite(0)
        return [file for file, line in self._lines.items() if _is_ours(line, model, key)]

    def get(self, disk_key: bytes) -> BlockName | None:
        line = self._lines.get(disk_key)
        return None if line is None else line.name

    def add(self, disk_key: bytes, disk_root: bytes, root: BlockName, name: BlockName) -> None:
        line = _Line(disk_root, root.key, name)
        known = self._lines.get(disk_key) == line
        self._lines[disk_key] = line
        self._lines.move_to_end(disk_key)
        if known:
            return
        with self._forgiven():
            _write(self._path, "a", line.text(disk_key))
        if len(self._lines) > 4 * self._recent:
            self._rewrite(self._recent)

    def _rewrite(self, recent: int) -> None:
        """Leaves out lines without a file but for the most `recent` ones."""
        keep = {*self._files(), *list(self._lines)[len(self._lines) - recent :]}
        lines = ((key, line) for key, line in self._lines.items() if key in keep)
        self._lines = OrderedDict(lines)
        text = "".join(line.text(key) for key, line in self._lines.items())
        with self._forgiven():
            _write(self._unfinished, "w", text)
            os.replace(self._unfinished, self._path)

    @contextlib.contextmanager
    def _forgiven(self) -> Iterator[None]:
        """A disk that takes no more costs what a later process could tell, and nothing now."""
        try:
            yield
        except OSError as error:
            logger.warning("%s was not written: %s", self._path, error)


def _is_ours(line: _Line, model: str, key: CacheKey) -> bool:
    """Whether this process would find the file for its prompts, and call it so."""
    tenant = line.name.tenant
    ours = line.disk_root == root_key(replace(key, tenant=tenant))
    return ours and line.root == root_name(model, tenant, key.adapter).key


def _write(path: Path, mode: str, text: str) -> None:
    with open(path, mode, encoding="utf-8", opener=_private) as file:
        file.write(text)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
