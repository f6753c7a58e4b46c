"""Tensors of a checkpoint, read lazily from mapped files.

Owns: the WeightSource protocol and its safetensors implementation (one file, or shards named by an
index), with checks that a file is whole before any tensor is used.
Does not own: what names mean (loader.py), GGUF (gguf.py), where tensors go.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from lm_engine.models.errors import (
    CorruptFileError,
    MissingFileError,
    PickleWeightsError,
    TruncatedFileError,
    UnsupportedModelError,
)

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_LONGEST_HEADER_BYTES = 100_000_000


class WeightSource(Protocol):
    """A checkpoint's tensors by their Hugging Face names."""

    @property
    def where(self) -> str:
        """The file or folder, for messages."""
        ...

    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype:
        """Of what `get` returns, or, where that is dequantised, the nearest to what is stored."""
        ...

    def stored_bytes(self, name: str) -> int:
        """Bytes that reading the tensor touches on disk."""
        ...

    def get(self, name: str) -> Tensor:
        """The tensor on the CPU: often a view of the mapped file, never to be written to. Raises
        KeyError for an unknown name."""
        ...

    def copy_to(self, name: str, target: Tensor) -> None:
        """Fills `target`, of the tensor's shape or one that it broadcasts to, of any dtype and
        device, without a second whole copy in memory; the file's pages are dropped after."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class MappedFile:
    """One file mapped copy-on-write, whose pages can be dropped by interval."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            # Copy-on-write, because torch warns about buffers that it could not write to.
            self._map: mmap.mmap | None = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    @property
    def buffer(self) -> mmap.mmap:
        if self._map is None:
            raise ValueError(f"{self.path} is closed")
        return self._map

    def tensor(self, dtype: torch.dtype, start: int, end: int) -> Tensor:
        """A flat view of bytes [start, end)."""
        if start == end:
            return torch.empty(0, dtype=dtype)
        count = (end - start) // dtype.itemsize
        return torch.frombuffer(self.buffer, dtype=dtype, count=count, offset=start)

    def release(self, start: int, end: int) -> None:
        """Drops the whole pages inside [start, end) from this process's memory."""
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = end // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self.buffer.madvise(mmap.MADV_DONTNEED, first, length)

    def close(self) -> None:
        """Lets go of the mapping. Tensors that are views of it keep it alive; unmapping it here
        would leave them pointing at nothing."""
        self._map = None


class SafetensorsSource:
    """The safetensors weights of a folder: `model.safetensors`, or the shards that
    `model.safetensors.index.json` names."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: list[MappedFile] = []
        self._where: dict[str, tuple[MappedFile, _Entry]] = {}
        single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
        if index.exists():
            wanted = read_json(index).get("weight_map")
            if not isinstance(wanted, Mapping):
                raise CorruptFileError(f"{index} has no weight_map.")
            self._open_shards(index, {str(k): str(v) for k, v in wanted.items()})
        elif single.exists():
            self._open(single)
        else:
            raise _no_weights(folder)

    def _open_shards(self, index: Path, wanted: Mapping[str, str]) -> None:
        shards = sorted(set(wanted.values()))
        absent = [name for name in shards if not (self._folder / name).exists()]
        if absent:
            raise MissingFileError(
                f"{index} names {len(shards)} files, {len(absent)} missing: {', '.join(absent)}. "
                "Complete the download."
            )
        for name in shards:
            self._open(self._folder / name)
        lost = sorted(set(wanted) - set(self._where))
        if lost:
            raise CorruptFileError(
                f"{index} names {len(lost)} tensor(s) that its files do not hold, such as "
                f"{lost[0]} in {wanted[lost[0]]}."
            )

    def _open(self, path: Path) -> None:
        header, data_start = _read_header(path)
        file = MappedFile(path)
        self._files.append(file)
        for name, fields in header.items():
            start, end = fields["data_offsets"]
            shape = tuple(int(n) for n in fields["shape"])
            entry = _Entry(fields["dtype"], shape, data_start + start, data_start + end)
            self._where[name] = (file, entry)

    @property
    def where(self) -> str:
        return str(self._folder)

    def names(self) -> frozenset[str]:
        return frozenset(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._where[name][1].shape

    def dtype(self, name: str) -> torch.dtype:
        stored = self._where[name][1].dtype
        if stored not in _DTYPES:
            raise UnsupportedModelError(
                f"{self.where}: tensor {name} is stored as {stored}. Supported are: "
                f"{', '.join(_DTYPES)}."
            )
        return _DTYPES[stored]

    def stored_bytes(self, name: str) -> int:
        entry = self._where[name][1]
        return entry.end - entry.start

    def get(self, name: str) -> Tensor:
        file, entry = self._where[name]
        return file.tensor(self.dtype(name), entry.start, entry.end).view(entry.shape)

    def copy_to(self, name: str, target: Tensor) -> None:
        target.copy_(self.get(name))
        file, entry = self._where[name]
        file.release(entry.start, entry.end)

    def close(self) -> None:
        for file in self._files:
            file.close()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises MissingFileError or CorruptFileError naming it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MissingFileError(f"{path} is missing.") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CorruptFileError(f"{path} is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise CorruptFileError(f"{path} holds a {type(value).__name__}, not a JSON object.")
    return value


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """(tensor name -> dtype, shape, offsets; where data start), after checking that the file holds
    exactly the bytes that it describes. The format: 8 bytes of length, JSON, data."""
    size = path.stat().st_size
    with path.open("rb") as file:
        lead = file.read(8)
        if len(lead) < 8:
            raise TruncatedFileError(str(path), 8, size)
        length = int.from_bytes(lead, "little")
        if length > _LONGEST_HEADER_BYTES:
            raise CorruptFileError(
                f"{path} is not a safetensors file: its header would be {length:,} bytes long. "
                "A Git LFS pointer or an HTML page may have been saved in its place."
            )
        if 8 + length > size:
            raise TruncatedFileError(str(path), 8 + length, size)
        try:
            header = _parse_header(file.read(length))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            raise CorruptFileError(
                f"{path} is not a safetensors file: its header is unreadable."
            ) from None
    end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
    if 8 + length + end > size:
        raise TruncatedFileError(str(path), 8 + length + end, size)
    return header, 8 + length


def _parse_header(raw: bytes) -> dict[str, Any]:
    """Any exception of a badly shaped value means: not a header."""
    header = {name: entry for name, entry in json.loads(raw).items() if name != "__metadata__"}
    for name, entry in header.items():
        start, end = (int(offset) for offset in entry["data_offsets"])
        count = math.prod(int(size) for size in entry["shape"])
        dtype = _DTYPES.get(entry["dtype"])
        if not 0 <= start <= end or (dtype is not None and end - start != count * dtype.itemsize):
            raise ValueError(f"{name} of {count} {entry['dtype']} lies in {start}..{end}")
    return header


def _no_weights(folder: Path) -> MissingFileError | PickleWeightsError:
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if pickled:
        return PickleWeightsError(
            f"{folder} has only pickled weights ({', '.join(pickled[:3])}), which can run code "
            "when they are read. Convert them to safetensors: load the model with transformers "
            "somewhere safe and call save_pretrained."
        )
    return MissingFileError(
        f"{folder} has no weights: neither model.safetensors nor model.safetensors.index.json."
    )
