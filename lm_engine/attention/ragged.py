"""Attention of many lone rows over contexts of different lengths, on the CPU, in a few calls.

Owns: RaggedRows, a batch of decode rows laid out as one sparse matrix. Does not own: chunks, or the
choice of when this pays (cpu.py).

torch has no CPU kernel for a ragged batch, and a call per sequence costs more than its arithmetic.
But the scores of such a batch are a product sampled at known places: row (sequence, query head) of
Q against rows (KV head, slot) of K, which is `torch.sparse.sampled_addmm` over a CSR pattern; and
their product with V is a weighted sum of rows of V per bag, which is `torch.embedding_bag`. Both
read the cache where it lies, by slot, so blocks may be scattered, and both run all sequences and
heads in parallel.

The entries of each row are padded to a multiple of `_ALIGN`, so that the softmax between the two
works on dense chunks; a pad repeats the row's first key and gets the score -inf.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kv_offload.kv_cache import KVCache

_ALIGN = 64
"""Entries per chunk. Longer chunks would waste more pads, shorter ones slow the reductions."""

_EVEN_ENOUGH = 1.2
"""Rows are padded to the longest when that adds at most a fifth: the softmax is then plain."""


@dataclass(frozen=True, slots=True)
class RaggedKeys:
    """One row's keys."""

    row: int
    """Row of the step."""
    stretches: tuple[tuple[int, int], ...]
    """(first slot, slots), at least one slot in all."""

    @property
    def num_keys(self) -> int:
        return sum(n for _, n in self.stretches)


def fits(num_keys: int, cache: KVCache) -> bool:
    """Whether a row of so many keys can be laid out over this cache: torch takes no pattern with
    more entries than its matrix has, and pads are entries (this fails in tiny caches only)."""
    return -(-num_keys // _ALIGN) * _ALIGN <= cache.layout.num_kv_heads * cache.num_slots


class RaggedRows:
    """A prepared batch of lone rows; used once per layer, so it may reuse its buffers."""

    def __init__(self, rows: Sequence[RaggedKeys], num_heads: int, cache: KVCache) -> None:
        self.rows = tuple(item.row for item in rows)
        first, last = self.rows[0], self.rows[-1]
        self.selection: slice | torch.Tensor = torch.tensor(self.rows)
        """Index of the batch's rows among the step's."""
        if last - first + 1 == len(self.rows):
            self.selection = slice(first, last + 1)
        num_kv_heads = cache.layout.num_kv_heads
        total_slots = num_kv_heads * cache.num_slots
        index_type = torch.int32 if total_slots < 2**31 else torch.int64
        lengths = [item.num_keys for item in rows]
        chunks = [-(-n // _ALIGN) for n in lengths]
        self._even = max(chunks) * len(rows) <= _EVEN_ENOUGH * sum(chunks)
        if self._even:
            chunks = [max(chunks)] * len(rows)
        padded = [count * _ALIGN for count in chunks]

        offsets = torch.arange(num_kv_heads, dtype=index_type).mul_(cache.num_slots)
        offsets = offsets.repeat_interleave(num_heads // num_kv_heads).unsqueeze(1)
        columns, pads, position = [], [], 0
        for item, length, size in zip(rows, lengths, padded, strict=True):
            slots = torch.full((size,), item.stretches[0][0], dtype=index_type)
            at = 0
            for first, count in item.stretches:
                torch.arange(first, first + count, out=slots[at : at + count])
                at += count
            columns.append((slots + offsets).view(-1))
            if length < size:
                heads = torch.arange(num_heads).unsqueeze(1) * size
                pads.append((torch.arange(position + length, position + size) + heads).view(-1))
            position += num_heads * size
        self._columns = torch.cat(columns)
        self._pads = torch.cat(pads) if pads else None
        row_sizes = torch.tensor(padded, dtype=index_type).repeat_interleave(num_heads)
        starts = torch.zeros(row_sizes.shape[0] + 1, dtype=index_type)
        torch.cumsum(row_sizes, 0, out=starts[1:])
        self._starts = starts[:-1].contiguous()
        self._row_of_chunk = torch.arange(row_sizes.shape[0]).repeat_interleave(row_sizes // _ALIGN)
        self._scores = torch.zeros(position)
        self._pattern = _csr(starts, self._columns, self._scores, total_slots)

    def attend(
        self, layer: int, q: torch.Tensor, cache: KVCache, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [B, Hq, d], the batch's rows in the order given at construction.

        Returns (out [B, Hq, d], lse [B, Hq]), float32.
        """
        num_rows, num_heads, dim = q.shape
        keys, values = cache.flat(layer)
        scores = self._scores
        # beta = 0 still multiplies what is there, and 0 * NaN would outlive its layer.
        scores.zero_()
        torch.sparse.sampled_addmm(
            self._pattern,
            q.float().reshape(-1, dim),
            keys.t(),
            beta=0.0,
            alpha=scale,
            out=self._pattern,
        )
        if self._pads is not None:
            scores.index_fill_(0, self._pads, -torch.inf)
        peak, total = self._exponentiate(num_rows * num_heads)
        out = torch.embedding_bag(values, self._columns, self._starts, False, 0, False, scores)[0]
        out = out.div_(total.unsqueeze(1)).view(num_rows, num_heads, dim)
        return out, total.log_().add_(peak).view(num_rows, num_heads)

    def _exponentiate(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Replace scores by exp(score - its row's peak); returns peaks and sums, [rows]."""
        if self._even:
            dense = self._scores.view(num_rows, -1)
            peak = dense.amax(1)
            dense.sub_(peak.unsqueeze(1)).exp_()
            return peak, dense.sum(1)
        dense = self._scores.view(-1, _ALIGN)
        owner = self._row_of_chunk
        peak = torch.full((num_rows,), -torch.inf)
        peak.scatter_reduce_(0, owner, dense.amax(1), "amax")
        dense.sub_(peak[owner].unsqueeze(1)).exp_()
        return peak, torch.zeros(num_rows).index_add_(0, owner, dense.sum(1))


def _csr(
    starts: torch.Tensor, columns: torch.Tensor, entries: torch.Tensor, width: int
) -> torch.Tensor:
    """A CSR tensor that shares `entries`."""
    with warnings.catch_warnings():
        # torch announces, once per process, that sparse CSR is in beta.
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support")
        return torch.sparse_csr_tensor(
            starts, columns, entries, (starts.shape[0] - 1, width), check_invariants=False
        )
