"""What attention is asked and what it answers, whoever computes it.

Owns: SequenceSlice and AttentionBatch (which rows see which keys), the Protocol AttentionBackend,
and `pieces`, which cuts a context at canonical splits and finds where its slots lie.
Does not own: storage (kv_offload/kv_cache.py), how a batch is built (batch.py), or any kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from kv_offload.kv_cache import KVCache
from kv_offload.superblock import SUPERBLOCK_TOKENS

DEFAULT_SPLIT_TOKENS = 2048
"""Canonical splits begin at multiples of this many tokens (DESIGN idea 4)."""


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """One sequence's share of a step: `query_len` rows, the last of its context so far."""

    query_start: int
    """First row of this sequence in the step's tensors."""
    query_len: int
    """Rows, at least 1; row i sits at position context_len - query_len + i."""
    context_len: int
    """Tokens whose KV is in the cache once this step has written its own."""
    runs: tuple[tuple[int, int], ...]
    """The block table as stretches of consecutive blocks: (first block, blocks), in order."""
    cold: tuple[int, ...] = ()
    """Host slots of the superblocks that hold the context's beginning; `runs` hold the rest."""
    superblocks: tuple[int, ...] = ()
    """The same superblocks' numbers in the host's pool, by which they are copied; may be left out
    where nothing is."""

    def __post_init__(self) -> None:
        if not 1 <= self.query_len <= self.context_len:
            raise ValueError(
                f"query_len is {self.query_len} with context_len {self.context_len}; a slice has "
                "at least one row, and its rows are the last of its context"
            )

    @property
    def cold_tokens(self) -> int:
        return len(self.cold) * SUPERBLOCK_TOKENS


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBatch:
    """Which rows of a step see which keys. Immutable, so that a backend may prepare once per batch
    and use it in every layer; compared by identity."""

    sequences: tuple[SequenceSlice, ...]
    """Disjoint row ranges which together cover all rows, in ascending order."""
    slots: torch.Tensor
    """int64 [T] on the cache's device: where each row's own key and value are stored."""

    def __post_init__(self) -> None:
        row = 0
        for sequence in self.sequences:
            if sequence.query_start != row:
                raise ValueError(
                    f"a slice starts at row {sequence.query_start} where row {row} is next; slices "
                    "must cover the step's rows in order"
                )
            row += sequence.query_len
        if row != self.slots.shape[0]:
            raise ValueError(f"slices cover {row} rows but there are {self.slots.shape[0]} slots")


class AttentionBackend(Protocol):
    """Attention of a step's rows over the paged cache."""

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
        """Attend rows `q` [T, Hq, d] over keys at positions <= their own, which the cache holds
        already for this step's rows too.

        Query head h uses KV head h // (Hq / Hkv). With a window w, a row at position p sees the
        positions p - w + 1 .. p. Scores are multiplied by `scale` before the softmax.

        Returns (out [T, Hq, d] in q's dtype, contiguous; lse [T, Hq] float32, the natural
        logarithm of the sum over seen keys of exp(scaled score)).
        """
        ...


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive positions in consecutive slots of one memory."""

    slot: int
    """First slot: of the cache, or counted from the start of host superblock `host`."""
    length: int
    host: int | None = None
    """Host slot of the superblock, None in the device's cache."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Keys of one sequence within one canonical split: consecutive positions, in one or several
    stretches of consecutive slots."""

    start: int
    """Position of the first key."""
    length: int
    stretches: tuple[Stretch, ...]
    """In order of position; their lengths add up to `length`."""

    @property
    def end(self) -> int:
        return self.start + self.length


def stretches(
    sequence: SequenceSlice, block_size: int, start: int, end: int
) -> tuple[Stretch, ...]:
    """Where the KV of positions [start, end) lies, neighbours joined.

    Raises ValueError when the block table ends before `end`.
    """
    found: list[Stretch] = []
    for index, host in enumerate(sequence.cold):
        position = index * SUPERBLOCK_TOKENS
        low, high = max(start, position), min(end, position + SUPERBLOCK_TOKENS)
        if low < high:
            found.append(Stretch(low - position, high - low, host))
    position = sequence.cold_tokens
    for first_block, num_blocks in sequence.runs:
        size = num_blocks * block_size
        low, high = max(start, position), min(end, position + size)
        if low < high:
            slot = first_block * block_size + low - position
            last = found[-1] if found else None
            if last is not None and last.host is None and last.slot + last.length == slot:
                found[-1] = Stretch(last.slot, last.length + high - low)
            else:
                found.append(Stretch(slot, high - low))
        position += size
        if position >= end:
            break
    if position < end:
        raise ValueError(
            f"the block table covers {position} tokens of a context of {end}; "
            f"it lacks {-(-(end - position) // block_size)} blocks"
        )
    return tuple(found)


def pieces(
    sequence: SequenceSlice, block_size: int, split: int, start: int, end: int
) -> Iterator[Piece]:
    """Cut the positions [start, end) of a sequence at multiples of `split`, in order."""
    while start < end:
        stop = min(end, (start // split + 1) * split)
        yield Piece(start, stop - start, stretches(sequence, block_size, start, stop))
        start = stop


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """Cold superblocks of one layer that lie in a staging buffer."""

    both: torch.Tensor
    """[2, Hkv, T, d] view of keys and values."""
    places: Mapping[int, int]
    """Host slot to the first token of its superblock."""


def gather(
    layer: int, where: tuple[Stretch, ...], cache: KVCache, staged: Staged | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [Hkv, n, d] of the stretches in order: a view if they are one, else a copy.
    Cold stretches are read from `staged` where it is given, else from the host and brought to the
    device. Raises ValueError for a cold stretch when the cache has no host memory."""
    if staged is not None:
        where = _in_buffer(where, staged.places)
        slices = (staged.both[:, :, s.slot : s.slot + s.length] for s in where)
        parts = [(both[0], both[1]) for both in slices]
    else:
        parts = [_part(layer, stretch, cache) for stretch in where]
    if len(parts) == 1:
        return parts[0]
    return torch.cat([k for k, _ in parts], dim=1), torch.cat([v for _, v in parts], dim=1)


def _in_buffer(where: tuple[Stretch, ...], places: Mapping[int, int]) -> tuple[Stretch, ...]:
    """Cold stretches by their slots in the buffer, neighbours joined."""
    found: list[Stretch] = []
    for stretch in where:
        assert stretch.host is not None
        slot = places[stretch.host] + stretch.slot
        last = found[-1] if found else None
        if last is not None and last.slot + last.length == slot:
            found[-1] = Stretch(last.slot, last.length + stretch.length)
        else:
            found.append(Stretch(slot, stretch.length))
    return tuple(found)


def _part(layer: int, stretch: Stretch, cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
    end = stretch.slot + stretch.length
    if stretch.host is None:
        return cache.keys[layer][:, stretch.slot : end], cache.values[layer][:, stretch.slot : end]
    if cache.host is None:
        raise ValueError(f"host superblock {stretch.host} is named, but the cache has no host tier")
    keys, values = cache.host.keys(stretch.host, layer), cache.host.values(stretch.host, layer)
    return (
        keys[:, stretch.slot : end].to(cache.device),
        values[:, stretch.slot : end].to(cache.device),
    )
