"""The cold beginnings of a batch, cut into pieces that are staged and attended one by one.

Owns: ColdPiece (superblocks that go through the ring together, and which rows' keys they are), and
ColdWalk (their order over the layers of a step). Does not own: the ring (staging.py), who attends
(native.py, cold_parts.py), or which superblocks are cold (kv_offload/cold_prefix.py).

Pieces are in order of position over all sequences at once, so that a superblock which several of
them share is staged once per layer, and each sequence meets its own in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from kv_offload.layout import KVLayout
from kv_offload.superblock import SUPERBLOCK_TOKENS
from lm_engine.attention.base import AttentionBatch, SequenceSlice


@dataclass(frozen=True, slots=True)
class Span:
    """Keys of one sequence that a piece holds."""

    sequence: int
    """Index in the batch."""
    start: int
    end: int
    """Positions [start, end), whole superblocks."""


@dataclass(frozen=True, slots=True, eq=False)
class ColdPiece:
    superblocks: tuple[int, ...]
    """Their numbers in the host's pool, in the order in which they lie in the staging buffer."""
    slots: tuple[int, ...]
    """The same superblocks' host slots."""
    places: dict[int, int]
    """Host slot to the first token of its superblock in the buffer."""
    spans: tuple[Span, ...]

    @property
    def tokens(self) -> int:
        return len(self.slots) * SUPERBLOCK_TOKENS


def first_seen(sequence: SequenceSlice, window: int | None) -> int:
    """The first position that any row of the slice sees."""
    before = sequence.context_len - sequence.query_len
    return 0 if window is None else max(0, before + 1 - window)


def cold_pieces(
    batch: AttentionBatch, window: int | None, most: int, above_rows: int = 0
) -> tuple[ColdPiece, ...]:
    """The superblocks of the batch's cold beginnings that some row sees, at most `most` to a piece
    and about equally many, since one is copied while another is attended. Only of sequences with
    more than `above_rows` rows.

    Raises ValueError for cold slots without their numbers in the pool: they cannot be copied.
    """
    owners: dict[tuple[int, int], list[int]] = {}
    numbers: dict[int, int] = {}
    for index, sequence in enumerate(batch.sequences):
        if len(sequence.superblocks) != len(sequence.cold):
            raise ValueError(
                f"sequence {index} of the batch has {len(sequence.cold)} cold slots, but "
                f"{len(sequence.superblocks)} numbers of superblocks"
            )
        if sequence.query_len <= above_rows:
            continue
        numbers.update(zip(sequence.cold, sequence.superblocks, strict=True))
        for i in range(first_seen(sequence, window) // SUPERBLOCK_TOKENS, len(sequence.cold)):
            owners.setdefault((i, sequence.cold[i]), []).append(index)
    keys = sorted(owners, key=lambda key: (key[0], owners[key]))
    count = -(-len(keys) // most)
    bounds = [len(keys) * i // count for i in range(count + 1)] if count else []
    return tuple(
        _piece({key: owners[key] for key in keys[low:high]}, numbers)
        for low, high in pairwise(bounds)
    )


def _piece(owners: dict[tuple[int, int], list[int]], numbers: dict[int, int]) -> ColdPiece:
    """`owners`: superblocks as (index in the context, host slot), and who has them."""
    # Neighbours of one sequence lie next to each other, so that they are read as one stretch.
    order = sorted(owners, key=lambda key: (owners[key], key))
    found: dict[int, list[int]] = {}
    for (i, _), sequences in owners.items():
        for sequence in sequences:
            found.setdefault(sequence, []).append(i)
    size = SUPERBLOCK_TOKENS
    return ColdPiece(
        tuple(numbers[slot] for _, slot in order),
        tuple(slot for _, slot in order),
        {slot: place * size for place, (_, slot) in enumerate(order)},
        tuple(
            Span(sequence, min(indices) * size, (max(indices) + 1) * size)
            for sequence, indices in sorted(found.items())
        ),
    )


class ColdWalk:
    """The pieces of one batch, layer by layer."""

    def __init__(
        self,
        batch: AttentionBatch,
        layout: KVLayout,
        most_superblocks: int,
        above_rows: int = 0,
    ) -> None:
        self._batch, self._layout, self._most = batch, layout, most_superblocks
        self._above_rows = above_rows
        self._pieces: dict[int | None, tuple[ColdPiece, ...]] = {}

    def pieces(self, window: int | None) -> tuple[ColdPiece, ...]:
        """Of a layer with this window, in order."""
        if window not in self._pieces:
            self._pieces[window] = cold_pieces(self._batch, window, self._most, self._above_rows)
        return self._pieces[window]

    def after(self, layer: int, window: int | None, index: int) -> Iterator[tuple[int, ColdPiece]]:
        """What is likely to be asked for after piece `index` of a layer, in order."""
        yield from ((layer, piece) for piece in self.pieces(window)[index + 1 :])
        for later in range(layer + 1, self._layout.num_layers):
            yield from ((later, piece) for piece in self.pieces(self._layout.window(later)))
