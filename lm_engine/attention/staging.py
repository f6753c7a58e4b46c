"""A small ring of buffers through which cold keys and values pass on their way to attention.

Owns: StagingRing: its memory, which buffer holds what, and that the next piece is copied while
this one is attended. Does not own: what the pieces are (cold.py), tickets (kv_offload/transfer.py),
or attention.

A buffer is in one of four states: free; ahead (a ticket fills it, or has); taken (attended); and
settling (nobody waits for its ticket any more, but the copy may still write). It is written again
only when no ticket on it is open and the compute that reads it has been issued before the new
ticket's fence.

A copy that fails, or is late, is made again at once by the one that computes: the superblock is
still on the host, and the engine's only loop must neither die of it nor attend what did not arrive.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kv_offload.copies import TierCopies, copy_now
from kv_offload.kv_cache import KVCache
from kv_offload.superblock import SUPERBLOCK_TOKENS
from kv_offload.tickets import Direction, TransferError
from kv_offload.transfer import Transfers
from lm_engine.attention.cold import ColdPiece, ColdWalk

logger = logging.getLogger(__name__)

DEFAULT_SUPERBLOCKS, DEFAULT_BUFFERS = 8, 3
_SETTLE_S, _GRACE_S = 30.0, 0.002
"""Longest wait for a device to let go of a buffer, longer than any step that is not lost; and for
copies that nobody wants any more, before this thread copies instead."""


@dataclass(frozen=True, slots=True, eq=False)
class _Ahead:
    layer: int
    piece: ColdPiece
    buffer: int
    ticket: int


class StagingRing:
    """`buffers` buffers of up to `superblocks` superblocks of one layer each, and one more that is
    allocated when a copy has to be made again while its buffer is still being written."""

    def __init__(
        self,
        transfers: Transfers,
        copies: TierCopies,
        cache: KVCache,
        *,
        superblocks: int = DEFAULT_SUPERBLOCKS,
        buffers: int = DEFAULT_BUFFERS,
    ) -> None:
        if superblocks < 1 or buffers < 2:
            raise ValueError(
                f"a ring of {buffers} buffers of {superblocks} superblocks cannot copy one piece "
                "while another is attended; it takes 2 buffers of 1"
            )
        self.transfers = transfers
        self.superblocks = superblocks
        self.device = cache.device
        self._copies = copies
        self._axis = copies.layout.token_axis - 1
        shape = list(copies.layout.shape[1:])
        shape[self._axis] = superblocks * SUPERBLOCK_TOKENS
        self._shape, self._dtype = shape, cache.dtype
        self._buffers = [self._allocate() for _ in range(buffers)]
        self._spare: torch.Tensor | None = None
        self._free = list(range(buffers))
        self._ahead: deque[_Ahead] = deque()
        self._settling: list[tuple[int, int]] = []
        """(buffer, ticket)."""
        self._taken: tuple[int, int] | None = None
        """(buffer, ticket) of the piece being attended; (-1, -1) for the spare."""
        self._walk: ColdWalk | None = None
        self._upcoming: Iterator[tuple[int, ColdPiece]] = iter(())
        self.bytes_staged = 0
        """That were attended, also those copied again; some that were copied ahead never are."""
        self.retries = 0
        """Pieces that were copied by the computing thread, because their ticket failed or hung."""

    @property
    def num_bytes(self) -> int:
        """Most that the ring ever takes."""
        return (len(self._buffers) + 1) * self._buffers[0].nbytes

    def take(self, walk: ColdWalk, layer: int, window: int | None, index: int) -> torch.Tensor:
        """Piece `index` of a layer, to be read by compute that is issued before `release`.

        Returns [2, Hkv, T, d], or [2, T, Hkv, d] where the cache is token-major, T = piece.tokens.
        """
        assert self._taken is None, "the piece before was not released"
        piece = walk.pieces(window)[index]
        first = self._ahead[0] if self._ahead else None
        if self._walk is not walk or first is None or (first.layer, first.piece) != (layer, piece):
            self._abandon()
            self._walk = walk
            self._upcoming = walk.after(layer, window, index)
            self._wait_for_room()
            if self._free and not self._stuck():
                self._submit(layer, piece)
                self._fill()
        self.bytes_staged += self._bytes_of(piece)
        if not self._ahead:
            return self._copy_now(layer, piece)
        entry = self._ahead.popleft()
        self._taken = (entry.buffer, entry.ticket)
        if self._settling:
            self._fill()
        try:
            self._join(entry)
        except TransferError as error:
            logger.warning("a piece of cold KV is copied again: %s", error)
            self._give_back()
            return self._copy_now(layer, piece)
        return self._part(self._buffers[entry.buffer], piece)

    def release(self) -> None:
        """Whatever reads the piece taken last has been issued."""
        self._give_back()
        self._fill()

    def reset(self) -> None:
        """Forgets what was taken and copied ahead; for a step that ended before its time."""
        self._give_back()
        self._abandon()
        self._walk = None

    def check_invariants(self) -> None:
        """No buffer is in two states, and none that is free may still be written."""
        held = [entry.buffer for entry in self._ahead] + [b for b, _ in self._settling] + self._free
        held += [self._taken[0]] if self._taken is not None and self._taken[0] >= 0 else []
        if sorted(held) != list(range(len(self._buffers))):
            raise AssertionError(f"buffers {sorted(held)} are held, there are {len(self._buffers)}")

    # -- inside ------------------------------------------------------------------------------------

    def _allocate(self) -> torch.Tensor:
        return torch.empty(self._shape, dtype=self._dtype, device=self.device)

    def _part(self, buffer: torch.Tensor, piece: ColdPiece) -> torch.Tensor:
        return buffer.narrow(self._axis, 0, piece.tokens)

    def _bytes_of(self, piece: ColdPiece) -> int:
        return self._buffers[0].nbytes * len(piece.slots) // self.superblocks

    def _fill(self) -> None:
        """Starts copies as far ahead as buffers are free."""
        self._settle()
        if self._stuck():
            return
        while self._free and (upcoming := next(self._upcoming, None)) is not None:
            self._submit(*upcoming)

    def _submit(self, layer: int, piece: ColdPiece) -> None:
        buffer = self._free.pop(0)
        into = self._part(self._buffers[buffer], piece)
        ticket = self.transfers.stream(piece.superblocks, layer, into)
        self._ahead.append(_Ahead(layer, piece, buffer, ticket))

    def _stuck(self) -> bool:
        """Whether a ticket would wait behind a copy that does not end."""
        return self.transfers.is_stuck(Direction.STREAM)

    def _give_back(self) -> None:
        if self._taken is not None and self._taken[0] >= 0:
            self._settling.append(self._taken)
        self._taken = None

    def _settle(self) -> None:
        if any(self.transfers.is_open(ticket) for _, ticket in self._settling):
            self.transfers.advance()
        still = [pair for pair in self._settling if self.transfers.is_open(pair[1])]
        self._free += [pair[0] for pair in self._settling if pair not in still]
        self._settling = still

    def _wait_for_room(self) -> None:
        """Until a buffer is free; only a moment when the copies that have them do not end."""
        self._settle()
        while self._settling and ((stuck := self._stuck()) or not self._free):
            wait_s = _GRACE_S if stuck else _SETTLE_S
            if not self.transfers.settled(self._settling[0][1], wait_s):
                return
            self._settle()

    def _join(self, entry: _Ahead) -> None:
        if self._stuck():
            self.transfers.cancel(entry.ticket)
            raise TransferError("a copy before it was given up and has not ended")
        self.transfers.join(entry.ticket)

    def _copy_now(self, layer: int, piece: ColdPiece) -> torch.Tensor:
        """In the queue of compute, or by this thread."""
        self.retries += 1
        self._settle()
        if self._free:
            self._taken = (self._free.pop(0), -1)
            buffer = self._buffers[self._taken[0]]
        else:
            self._taken = (-1, -1)
            if self._spare is None:
                self._spare = self._allocate()
            buffer = self._spare
        into = self._part(buffer, piece)
        copy_now(self._copies.stream(piece.slots, layer, into), self.device)
        self.transfers.note(Direction.STREAM, into.nbytes)
        return into

    def _abandon(self) -> None:
        for entry in self._ahead:
            self.transfers.cancel(entry.ticket)
            self._settling.append((entry.buffer, entry.ticket))
        self._ahead.clear()
        self._upcoming = iter(())
