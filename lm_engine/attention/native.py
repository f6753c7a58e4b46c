"""Attention on the CPU with the kernel of native/attention.cpp.

Owns: NativeAttention, the calls of the kernel, layer by layer and, where cold keys are staged,
phase by phase; and NativeWriter. Does not own: the arithmetic (attention.cpp), how a step is cut
into tasks (native_plan.py), how the library comes about (native/library.py), or types other than
float32 (cpu.py).
"""

from __future__ import annotations

import ctypes

import torch

from kv_offload.kv_cache import KVCache
from kv_offload.tickets import Direction
from lm_engine.attention.base import AttentionBatch
from lm_engine.attention.cold import ColdWalk
from lm_engine.attention.native_plan import (
    FEW_LANES,
    KEYS_PER_FEW,
    LANES,
    MOST_HEAD_DIM,
    SPLIT_TOKENS,
    STATE_BYTES,
    Call,
    NativePlan,
    prepare,
)
from lm_engine.attention.staging import StagingRing


class NativeAttention:
    """AttentionBackend for float32 on the CPU. Use one per engine: it remembers the batch it
    prepared last, and its calls must not overlap.

    With a `ring`, cold keys are streamed: those of chunks through the ring, those of few lanes
    through a buffer of each thread. Without, they are attended where they lie. The answers are the
    same, to the bit.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        ring: StagingRing | None = None,
    ) -> None:
        limits = (ctypes.c_long * 6)()
        library.longlens_attention_limits(limits)
        known = (LANES, SPLIT_TOKENS, MOST_HEAD_DIM, FEW_LANES, STATE_BYTES, KEYS_PER_FEW)
        assert tuple(limits) == known
        self._attend = library.longlens_attend
        self._attend.argtypes = (ctypes.c_void_p, ctypes.c_int)
        self._merge = library.longlens_merge
        self._merge.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_int)
        self._ring = ring
        self._copied, self._counted = ctypes.c_int64(), 0
        self._staging = torch.empty(0)
        self._prepared_for: tuple[AttentionBatch, KVCache] | None = None
        self._plans: dict[tuple[int, int | None], NativePlan] = {}
        self._walk: ColdWalk | None = None

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        batch: AttentionBatch,
        cache: KVCache,
        *,
        window: int | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionBackend.attend."""
        dtype, q = q.dtype, q.float()
        if q.stride(-1) != 1:
            q = q.contiguous()
        plan = self._plan(batch, cache, q.shape[1], window)
        out = torch.empty(q.shape, dtype=torch.float32)
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        call = plan.call
        call.q, call.out, call.lse = q.data_ptr(), out.data_ptr(), lse.data_ptr()
        call.q_row, call.q_head = q.stride(0), q.stride(1)
        call.layer, call.scale = layer, scale
        threads, address = torch.get_num_threads(), ctypes.addressof(call)
        if plan.stages_own:
            self._own_buffers(call, threads)
        *staged, rest = plan.phases
        for index, phase in enumerate(staged):
            assert self._ring is not None
            assert self._walk is not None
            plan.stage(self._ring.take(self._walk, layer, window, index))
            plan.enter(phase)
            self._attend(address, threads)
            self._ring.release()
        plan.enter(rest)
        self._attend(address, threads)
        if plan.stages_own and self._ring is not None:
            self._count(self._ring)
        if len(plan.merges):
            self._merge(address, plan.merges.ctypes.data, len(plan.merges), threads)
        return out.to(dtype), lse

    @property
    def bytes_staged(self) -> int:
        """By the threads themselves, for few lanes; the ring counts its own."""
        return self._counted

    def _count(self, ring: StagingRing) -> None:
        ring.transfers.note(Direction.STREAM, self._copied.value - self._counted)
        self._counted = self._copied.value

    def _own_buffers(self, call: Call, threads: int) -> None:
        need = threads * 2 * KEYS_PER_FEW * call.dim
        if self._staging.numel() < need:
            self._staging = torch.empty(need)
        call.staging = self._staging.data_ptr()

    def _plan(
        self, batch: AttentionBatch, cache: KVCache, num_heads: int, window: int | None
    ) -> NativePlan:
        known = self._prepared_for
        if known is None or known[0] is not batch or known[1] is not cache:
            self._prepared_for = (batch, cache)
            self._plans = {}
            self._walk = None
            if self._ring is not None and any(s.cold for s in batch.sequences):
                few_rows = FEW_LANES * cache.layout.num_kv_heads // num_heads
                self._walk = ColdWalk(batch, cache.layout, self._ring.superblocks, few_rows)
        plan = self._plans.get((num_heads, window))
        if plan is None:
            staged = () if self._walk is None else self._walk.pieces(window)
            plan = prepare(batch, cache, num_heads, window, staged, stream=self._ring is not None)
            plan.call.copied = ctypes.addressof(self._copied)
            self._plans[(num_heads, window)] = plan
        return plan


class NativeWriter:
    """RowWriter (kv_offload/kv_cache.py) for float32 on the CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, long = ctypes.c_void_p, ctypes.c_long
        self._store = library.longlens_store
        self._store.argtypes = (
            *(pointer, long, pointer, long, long, long, long, pointer, pointer, pointer, long),
            ctypes.c_int,
        )

    def __call__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        """See RowWriter."""
        assert slots.dtype == torch.int64
        assert slots.is_contiguous()
        for rows in (k, v):
            assert rows.dtype == torch.float32
            assert rows.stride(2) == 1
            assert rows.stride(1) == rows.shape[2]
        self._store(
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            *k.shape,
            slots.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            keys.stride(0),
            torch.get_num_threads(),
        )
