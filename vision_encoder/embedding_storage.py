"""The memory that embedding rows lie in.

Owns: allocating the tensor [num_rows, depth, dim], private or in memory that processes forked
later share. Does not own: which row is whose (embedding_arena.py).
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor


def storage_bytes(num_rows: int, depth: int, dim: int, dtype: torch.dtype) -> int:
    """Bytes of a storage of `num_rows` rows, each `depth` = 1 + deepstack levels of `dim`."""
    return num_rows * depth * dim * dtype.itemsize


def shared_memory(num_bytes: int) -> mmap.mmap:
    """Anonymous zeroed memory that survives a fork and is shared by parent and children.

    It has no name, so nothing is left behind however the processes end. Pages take memory when
    they are first written.
    """
    return mmap.mmap(-1, max(num_bytes, mmap.PAGESIZE))


def allocate_storage(
    num_rows: int,
    depth: int,
    dim: int,
    dtype: torch.dtype,
    shared: mmap.mmap | None = None,
    *,
    device: torch.device | str = "cpu",
) -> Tensor:
    """A tensor [num_rows, depth, dim] of `dtype`, zeroed.

    Args:
        shared: memory from `shared_memory` to lie in, from its first byte; CPU only.

    Raises:
        ValueError: `shared` is too small, or the device is not the CPU.
    """
    if shared is None:
        return torch.zeros(num_rows, depth, dim, dtype=dtype, device=device)
    need = storage_bytes(num_rows, depth, dim, dtype)
    if torch.device(device).type != "cpu":
        raise ValueError(
            f"shared memory is the CPU's; rows on {device} need a storage of their own"
        )
    if need > len(shared):
        raise ValueError(
            f"{num_rows} rows of {depth} x {dim} {dtype} need {need} bytes, "
            f"the shared memory has {len(shared)}"
        )
    flat = torch.frombuffer(shared, dtype=dtype, count=num_rows * depth * dim)
    return flat.view(num_rows, depth, dim)
