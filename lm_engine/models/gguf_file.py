"""The GGUF container: metadata, tensor index, blocks to numbers.

Owns: reading a GGUF file (versions 2 and 3, little-endian) and turning the block formats Q4_0,
Q4_1, Q8_0 and the plain F32, F16, BF16 into tensors, bit-exactly as their definitions say.
Does not own: what architectures and names mean (gguf.py), the tokenizer in the metadata
(gguf_tokenizer.py). The format is documented at github.com/ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lm_engine.models.errors import CorruptFileError, TruncatedFileError, UnsupportedModelError
from lm_engine.models.weights import MappedFile

_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
_RUN_BLOCKS = 1024
"""32,768 weights: within a core's cache, and few enough that torch does not wake other threads."""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How weights are stored: runs of `weights` numbers in `block_bytes` bytes."""

    name: str
    weights: int
    block_bytes: int
    decode: Callable[[Tensor], Tensor]
    """uint8 [blocks, block_bytes] -> float [blocks, weights], of dtype `dtype`."""
    dtype: torch.dtype = torch.float32


def _half(raw: Tensor) -> Tensor:
    """Two bytes per row as float16, widened: uint8 [n, 2] -> float32 [n, 1]."""
    return raw.contiguous().view(torch.float16).float()


def _nibbles(raw: Tensor) -> Tensor:
    """uint8 [n, 16] -> float32 [n, 32]: the low halves are weights 0..15, the high ones 16..31."""
    return torch.cat((raw & 15, raw >> 4), dim=-1).float()


def _q4_0(raw: Tensor) -> Tensor:
    return _half(raw[:, :2]) * (_nibbles(raw[:, 2:]) - 8)


def _q4_1(raw: Tensor) -> Tensor:
    return _half(raw[:, :2]) * _nibbles(raw[:, 4:]) + _half(raw[:, 2:4])


def _q8_0(raw: Tensor) -> Tensor:
    return _half(raw[:, :2]) * raw[:, 2:].contiguous().view(torch.int8).float()


def _plain(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda raw: raw.view(dtype)


_FORMATS = {
    0: BlockFormat("F32", 1, 4, _plain(torch.float32), torch.float32),
    1: BlockFormat("F16", 1, 2, _plain(torch.float16), torch.float16),
    2: BlockFormat("Q4_0", 32, 18, _q4_0),
    3: BlockFormat("Q4_1", 32, 20, _q4_1),
    8: BlockFormat("Q8_0", 32, 34, _q8_0),
    30: BlockFormat("BF16", 1, 2, _plain(torch.bfloat16), torch.bfloat16),
}
_OTHER_NAMES = {
    6: "Q5_0",
    7: "Q5_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    20: "IQ4_NL",
    23: "IQ4_XS",
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of the file. `shape` is in row-major order: the last dimension is contiguous."""

    shape: tuple[int, ...]
    format_id: int
    start: int
    """Byte offset in the file."""

    @property
    def format(self) -> BlockFormat:
        return _FORMATS[self.format_id]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) // self.format.weights * self.format.block_bytes


class _Cursor:
    """Reads values off a mapped file's front; running past its end raises struct.error."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer
        self.at = 0

    def scalar(self, code: str) -> Any:
        value = struct.unpack_from(code, self._buffer, self.at)[0]
        self.at += struct.calcsize(code)
        return value

    def string(self) -> str:
        length = self.scalar("<Q")
        raw = self._buffer[self.at : self.at + length]
        if len(raw) != length:
            raise struct.error("string runs past the end")
        self.at += length
        return str(raw, "utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        return self.scalar(_SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if kind in (_STRING, _ARRAY):
            return [self.value(kind) for _ in range(count)]
        letter = _SCALARS[kind][1]
        size = struct.calcsize(f"<{letter}")
        if self.at + count * size > len(self._buffer):
            raise struct.error("array runs past the end")
        values = list(struct.unpack_from(f"<{count}{letter}", self._buffer, self.at))
        self.at += count * size
        return values


class GGUFFile:
    """An opened GGUF file: `metadata`, `tensors`, and numbers on demand.

    Raises CorruptFileError, TruncatedFileError, or UnsupportedModelError (block formats).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorEntry] = {}
        size = path.stat().st_size
        with path.open("rb") as file:
            lead = file.read(8)
        if lead[:4] != b"GGUF":
            raise CorruptFileError(f"{path} is not a GGUF file: it starts with {lead[:4]!r}.")
        if lead[4:] not in (b"\2\0\0\0", b"\3\0\0\0"):
            raise UnsupportedModelError(
                f"{path} has GGUF version {int.from_bytes(lead[4:], 'little')}; supported are 2 "
                "and 3, little-endian."
            )
        self._file = MappedFile(path)
        try:
            self._read_index(size)
        except struct.error:
            raise TruncatedFileError(str(path), size + 1, size) from None
        except (KeyError, IndexError, OverflowError, MemoryError):
            raise CorruptFileError(f"{path} has an unreadable GGUF header.") from None

    def _read_index(self, size: int) -> None:
        cursor = _Cursor(self._file.buffer)
        cursor.at = 8
        num_tensors, num_keys = cursor.scalar("<Q"), cursor.scalar("<Q")
        for _ in range(num_keys):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("<I"))
        found: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(num_tensors):
            name, rank = cursor.string(), cursor.scalar("<I")
            if rank > _MOST_DIMENSIONS:
                raise IndexError(rank)
            shape = tuple(cursor.scalar("<Q") for _ in range(rank))[::-1]
            found.append((name, shape, cursor.scalar("<I"), cursor.scalar("<Q")))
        alignment = int(self.metadata.get("general.alignment", 32))
        data = -(-cursor.at // alignment) * alignment
        for name, shape, kind, offset in found:
            if kind not in _FORMATS:
                raise UnsupportedModelError(
                    f"{self.path}: tensor {name} is stored as "
                    f"{_OTHER_NAMES.get(kind, f'type {kind}')}. Supported are: "
                    f"{', '.join(item.name for item in _FORMATS.values())}."
                )
            self.tensors[name] = TensorEntry(shape, kind, data + offset)
        end = max((entry.start + entry.num_bytes for entry in self.tensors.values()), default=0)
        if end > size:
            raise TruncatedFileError(str(self.path), end, size)

    def blocks(self, name: str) -> Tensor:
        """The tensor as stored: uint8 [number of blocks, block_bytes], a view of the file."""
        entry = self.tensors[name]
        raw = self._file.tensor(torch.uint8, entry.start, entry.start + entry.num_bytes)
        return raw.view(-1, entry.format.block_bytes)

    def get(self, name: str) -> Tensor:
        """The tensor as numbers: float32 for block formats, else as stored."""
        entry = self.tensors[name]
        return entry.format.decode(self.blocks(name)).reshape(entry.shape)

    def copy_to(self, name: str, target: Tensor) -> None:
        """Fills `target`. Blocks are decoded in runs that fit a core's cache, which is both faster
        than one pass and free of temporaries of the tensor's size."""
        entry = self.tensors[name]
        if entry.format.weights == 1 or tuple(target.shape) != entry.shape:
            target.copy_(self.get(name))
            return
        flat = target.view(-1, entry.format.weights)
        raw = self.blocks(name)
        for first in range(0, raw.shape[0], _RUN_BLOCKS):
            run = raw[first : first + _RUN_BLOCKS]
            flat[first : first + _RUN_BLOCKS].copy_(entry.format.decode(run))

    def release(self, name: str) -> None:
        """Drops the tensor's pages from this process's memory."""
        entry = self.tensors[name]
        self._file.release(entry.start, entry.start + entry.num_bytes)

    def close(self) -> None:
        self._file.close()
