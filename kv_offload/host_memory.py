"""The host tier's memory.

Owns: HostMemory, the bytes of all superblocks, pinned or not, and the sums by which a test finds
damage to them.
Does not own: which superblocks are in use (host_pool.py), or copies (copies.py).
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import torch

from kv_offload.superblock import SuperblockLayout, least_gib

logger = logging.getLogger(__name__)

PIECE_BYTES = 1 << 30
"""Pinned at a time: one registration fails from 512 GiB on and takes 0.1 s per GB (vLLM #51081)."""


class HostMemoryError(Exception):
    """The host tier's memory cannot be had; the message says how much, where, and what helps."""


def superblocks_in_budget(layout: SuperblockLayout, budget_bytes: int) -> int:
    """Superblocks of a host tier that never takes more than its budget. Raises HostMemoryError when
    that is none."""
    count = layout.superblocks_in(budget_bytes)
    if count < 1:
        raise HostMemoryError(
            f"--host-kv-gib allows {budget_bytes:,} bytes; {layout.tokens} tokens of this model's "
            f"KV take {layout.stride_bytes:,}. Use --host-kv-gib {least_gib(layout.stride_bytes)} "
            "or more, or leave it out."
        )
    return count


class Pinner(Protocol):
    """Locks pages so that a device can reach them by itself."""

    def pin(self, address: int, num_bytes: int) -> None:
        """Raises RuntimeError when the pages cannot be locked."""
        ...

    def unpin(self, address: int) -> None: ...


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class CudaPinner:
    """Page-locks by cudaHostRegister."""

    def pin(self, address: int, num_bytes: int) -> None:
        code = _cudart().cudaHostRegister(address, num_bytes, 0)
        if int(code) != 0:
            raise RuntimeError(f"cudaHostRegister of {num_bytes:,} bytes answered {code}")

    def unpin(self, address: int) -> None:
        _cudart().cudaHostUnregister(address)


class HostMemory:
    """`num_superblocks` superblocks, each on pages of its own.

    Nothing is written at construction: memory that was never used takes none.

    Args:
        pinner: locks the pages piece by piece in a thread; the memory can be used meanwhile.
        verify: keep a sum of every block, so that one that changed while it lay here is not used.
            A debugging aid, which no setting of a server turns on: random tests of copies find by
            it what was written too early or too late. Costs a further pass over the bytes, and
            sums do not find blocks taken for others. For caches on the CPU only.
    """

    def __init__(
        self,
        layout: SuperblockLayout,
        num_superblocks: int,
        *,
        pinner: Pinner | None = None,
        piece_bytes: int = PIECE_BYTES,
        verify: bool = False,
    ) -> None:
        if num_superblocks < 1:
            raise ValueError(f"num_superblocks must be at least 1, got {num_superblocks}")
        self.layout = layout
        self.num_superblocks = num_superblocks
        self.num_bytes = num_superblocks * layout.stride_bytes
        self._map = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        dtype: torch.dtype = getattr(torch, layout.kv.dtype)
        whole = torch.frombuffer(self._map, dtype=dtype, count=self.num_bytes // dtype.itemsize)
        stride = layout.stride_bytes // dtype.itemsize
        rows = whole.view(num_superblocks, stride)[:, : layout.num_bytes // dtype.itemsize]
        self.superblocks = rows.view(num_superblocks, *layout.shape)
        """[num_superblocks, *layout.shape], one row per slot."""
        self._by_head = self.superblocks if layout.head_major else self.superblocks.transpose(3, 4)
        self.sums = np.zeros((num_superblocks, layout.blocks), dtype=np.uint64) if verify else None
        """Per slot and block; None when nothing is verified."""
        self._pinning = None
        if pinner is not None:
            per_piece = max(1, piece_bytes // layout.stride_bytes) * layout.stride_bytes
            self._pinning = _Pinning(pinner, whole.data_ptr(), self.num_bytes, per_piece)

    @property
    def pinned_bytes(self) -> int:
        """Pages locked so far; grows in the background."""
        return 0 if self._pinning is None else self._pinning.pinned_bytes

    def raw(self, slot: int) -> memoryview:
        """The bytes of a superblock in their memory order, writable."""
        start = slot * self.layout.stride_bytes
        return memoryview(self._map)[start : start + self.layout.num_bytes]

    def seal(self, slot: int) -> None:
        """The bytes of a whole slot were written from elsewhere than the cache, and are right."""
        if self.sums is not None:
            row = self.superblocks[slot].view(torch.uint8).numpy()
            self.sums[slot] = block_sums(row, self.layout)

    def keys(self, slot: int, layer: int) -> torch.Tensor:
        """[Hkv, tokens, d] view of a superblock's keys: they can be attended where they lie."""
        return self._by_head[slot, layer, 0]

    def values(self, slot: int, layer: int) -> torch.Tensor:
        """[Hkv, tokens, d] view of a superblock's values."""
        return self._by_head[slot, layer, 1]

    def poison(self, slots: Iterable[int]) -> None:
        """Fill superblocks with NaN, so that a test sees any read of freed or unready memory."""
        for slot in slots:
            self.superblocks[slot].fill_(float("nan"))

    def close(self) -> None:
        """Unlock the pages. The memory itself goes with the last tensor on it."""
        if self._pinning is not None:
            self._pinning.close()


def block_sums(part: np.ndarray, layout: SuperblockLayout) -> np.ndarray:
    """uint64 [blocks of `part`]: the sum of each block's bytes, eight at a time where they divide.

    part: uint8, some blocks of a superblock or of a cache, its axes those of layout.shape.
    """
    lead = part.shape[: layout.token_axis]
    blocks = part.shape[layout.token_axis] // layout.kv.block_size
    rows = part.reshape(*lead, blocks, -1)
    if rows.shape[-1] % 8 == 0:
        rows = rows.view(np.uint64)
    sums: np.ndarray = rows.sum(axis=-1, dtype=np.uint64).reshape(-1, blocks).sum(axis=0)
    return sums


class _Pinning:
    """Pieces are locked one after the other; the first that cannot be ends it, and the rest stays
    as it is: slower to copy, equally right."""

    def __init__(self, pinner: Pinner, address: int, num_bytes: int, piece_bytes: int) -> None:
        self._pinner = pinner
        self._address, self._num_bytes, self._piece_bytes = address, num_bytes, piece_bytes
        self._pinned: list[int] = []
        self._stop = threading.Event()
        self.pinned_bytes = 0
        self._thread = threading.Thread(target=self._pin_all, name="longlens-pin", daemon=True)
        self._thread.start()

    def _pin_all(self) -> None:
        for start in range(0, self._num_bytes, self._piece_bytes):
            if self._stop.is_set():
                return
            size = min(self._piece_bytes, self._num_bytes - start)
            try:
                self._pinner.pin(self._address + start, size)
            except RuntimeError as error:
                logger.warning(
                    "%s; %d of %d bytes of the host tier are pinned, copies of the rest are slower "
                    "(ulimit -l may be too low)",
                    *(error, self.pinned_bytes, self._num_bytes),
                )
                return
            self._pinned.append(self._address + start)
            self.pinned_bytes += size

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        while self._pinned:
            self._pinner.unpin(self._pinned.pop())
        self.pinned_bytes = 0
