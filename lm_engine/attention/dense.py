"""Attention of one sequence's rows through a kernel for dense keys.

Owns: the cutting of a sequence's context into parts that such a kernel can do - no mask, causal
from the top left, or an explicit mask - and the merge of their results.
Does not own: the kernels (cpu.py, torch_cuda.py), or lone decode rows in a batch (ragged.py).

A chunk of C rows at positions p0 .. p0 + C - 1 meets its context in up to three kinds of part:

    keys:   0 ..... first ....... full ........ p0 ........ p0 + C
            | not seen | masked: the  | seen by   | diagonal: |
            | (window) | window's edge| every row | causal    |

Without a window only the last two exist. The first two kinds are cut at canonical splits. Rows are
taken 256 at a time: kernels compute a causal diagonal in full, hidden half included, so a short one
wastes less, and the rows before it become keys without a mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from kv_offload.kv_cache import KVCache
from lm_engine.attention.base import SequenceSlice, Staged, Stretch, gather, pieces, stretches
from lm_engine.attention.merge import merge_into

_MOST_ROWS = 256
"""Rows of one group. With folded heads (cpu.py) a prompt of 4,096 tokens went from 414 to 458
tokens/s on two AVX-512 cores; what each of the two gave was not measured apart."""
_FEWEST_ROWS_UNDER_WINDOW = 128
"""A chunk longer than its window is cut into rows of about the window's length, so that masked
work stays a constant share; below this many rows calls would cost more than they save."""


class DenseKernel(Protocol):
    """Attention of C rows over n keys that lie in one strided tensor."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        causal: bool,
        mask: torch.Tensor | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [1, Hq, C, d]; k, v [1, Hkv, n, d]; mask bool [C, n], True where a row sees a key (each
        row sees at least one). `causal` means that row i sees keys 0 .. i.

        Returns (out [1, Hq, C, d], lse [1, Hq, C] float32).
        """
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """One call of the kernel: some rows of a sequence against some of its keys."""

    first_row: int
    """Row of the step at which the part's rows start."""
    num_rows: int
    causal: bool
    mask: torch.Tensor | None
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    """Per layer [1, Hkv, n, d] views, when the part's slots are consecutive; else empty."""
    stretches: tuple[Stretch, ...]

    def load(
        self, layer: int, cache: KVCache, staged: Staged | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [1, Hkv, n, d]: views, or a copy if the slots are scattered."""
        if self.keys:
            return self.keys[layer], self.values[layer]
        k, v = gather(layer, self.stretches, cache, staged)
        return k.unsqueeze(0), v.unsqueeze(0)


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Consecutive rows of one sequence with all the parts whose merge is their attention. Where
    keys up to the rows' own are planned, the first part covers every row of the group; others may
    cover only its first rows."""

    first_row: int
    num_rows: int
    parts: tuple[Part, ...]


def plan_rows(
    sequence: SequenceSlice,
    cache: KVCache,
    split: int,
    window: int | None,
    *,
    low: int = 0,
    high: int | None = None,
) -> Iterator[RowGroup]:
    """Row groups of one sequence over its keys [low, high), in order; None is all from `low` on.
    Keys that lie before the sequence's rows may be left out, at either end."""
    longest = min(sequence.query_len, _MOST_ROWS)
    if window is not None:
        longest = min(longest, max(window, _FEWEST_ROWS_UNDER_WINDOW))
    first_position = sequence.context_len - sequence.query_len
    for offset in range(0, sequence.query_len, longest):
        rows = min(longest, sequence.query_len - offset)
        yield _plan_group(
            replace(
                sequence,
                query_start=sequence.query_start + offset,
                query_len=rows,
                context_len=first_position + offset + rows,
            ),
            cache,
            split,
            window,
            low,
            high,
        )


def _plan_group(
    group: SequenceSlice,
    cache: KVCache,
    split: int,
    window: int | None,
    low: int,
    high: int | None,
) -> RowGroup:
    rows, end = group.query_len, group.context_len
    start = end - rows
    reach = end if window is None else window
    block_size = cache.layout.block_size

    def part(
        num_rows: int,
        where: tuple[Stretch, ...],
        causal: bool = False,
        mask: torch.Tensor | None = None,
    ) -> Part:
        keys: tuple[torch.Tensor, ...] = ()
        values: tuple[torch.Tensor, ...] = ()
        if len(where) == 1 and where[0].host is None:
            keys, values = cache.layer_views(where[0].slot, where[0].length)
        return Part(group.query_start, num_rows, causal, mask, keys, values, where)

    # A lone row sees its whole range, itself included: no diagonal.
    full_end = end if rows == 1 else start
    full_end = full_end if high is None else min(full_end, high)
    full_start = min(full_end, max(low, end - reach))
    edge_start = max(low, start - reach + 1)
    parts: list[Part] = []
    if rows > 1 and high is None:
        narrow = None if reach >= rows else _window_mask(start, rows, start, end, reach, cache)
        where = stretches(group, block_size, start, end)
        parts.append(part(rows, where, causal=narrow is None, mask=narrow))
    for piece in pieces(group, block_size, split, full_start, full_end):
        parts.append(part(rows, piece.stretches))
    for piece in pieces(group, block_size, split, edge_start, min(full_start, start)):
        seeing = min(rows, piece.end - 1 + reach - start)
        mask = _window_mask(start, seeing, piece.start, piece.end, reach, cache)
        parts.append(part(seeing, piece.stretches, mask=mask))
    return RowGroup(group.query_start, rows, tuple(parts))


def _window_mask(
    first_query: int, num_rows: int, start: int, end: int, window: int, cache: KVCache
) -> torch.Tensor:
    """bool [num_rows, end - start]: which of the positions start .. end - 1 the rows at
    first_query, first_query + 1, ... see."""
    queries = torch.arange(first_query, first_query + num_rows, device=cache.device)[:, None]
    keys = torch.arange(start, end, device=cache.device)
    return (keys <= queries) & (keys > queries - window)


def attend_group(
    kernel: DenseKernel,
    layer: int,
    q: torch.Tensor,
    group: RowGroup,
    cache: KVCache,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a row group; q [T, Hq, d] are the step's rows.

    Returns (out [rows, Hq, d], lse [rows, Hq] float32), possibly strided.
    """
    first, *others = group.parts
    out, lse = _attend_part(kernel, layer, q, first, cache, scale)
    if others:
        out, lse = out.float(), lse.clone()
        merge_parts(kernel, layer, q, replace(group, parts=tuple(others)), cache, scale, out, lse)
    return out, lse


def merge_parts(
    kernel: DenseKernel,
    layer: int,
    q: torch.Tensor,
    group: RowGroup,
    cache: KVCache,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    staged: Staged | None = None,
) -> None:
    """Adds the group's parts, in order, to the running attention of its rows: out [rows, Hq, d] and
    lse [rows, Hq], both float32."""
    for part in group.parts:
        part_out, part_lse = _attend_part(kernel, layer, q, part, cache, scale, staged)
        merge_into(out[: part.num_rows], lse[: part.num_rows], part_out, part_lse)


def _attend_part(
    kernel: DenseKernel,
    layer: int,
    q: torch.Tensor,
    part: Part,
    cache: KVCache,
    scale: float,
    staged: Staged | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = q[part.first_row : part.first_row + part.num_rows]
    k, v = part.load(layer, cache, staged)
    if k.dtype != q.dtype:
        k, v = k.to(q.dtype), v.to(q.dtype)
    out, lse = kernel(
        rows.transpose(0, 1).unsqueeze(0),
        k,
        v,
        causal=part.causal,
        mask=part.mask,
        scale=scale,
    )
    return out.squeeze(0).transpose(0, 1), lse.squeeze(0).transpose(0, 1)
