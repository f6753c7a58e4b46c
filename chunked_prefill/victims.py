"""Whose KV is given up when there is too little: the cheapest to bring back.

Owns: Victims, the price of a sequence's KV in seconds. Does not own: who may lose it at all
(scheduler.py: only those that rank below whoever needs it, so the oldest is certain to end), how
fast anything is (step_time.py; kv_offload/transfer.py), or preemption. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from chunked_prefill.sequence import Sequence
from kv_offload.kv_manager import KVManager


class Victims:
    """`compute_s(start, end)`: seconds, or anything in proportion to them, that computing tokens
    [start, end) of a sequence takes alone."""

    def __init__(self, kv: KVManager, compute_s: Callable[[int, int], float]) -> None:
        self._kv = kv
        self._compute_s = compute_s

    def cheapest(self, candidates: Iterable[Sequence]) -> Sequence:
        """Of the lowest class of priority among `candidates`, at least one, the sequence whose KV
        is brought back soonest; of equal ones, the last by rank."""
        return min(
            candidates, key=lambda s: (-s.request.priority, self.regain_s(s), [-n for n in s.rank])
        )

    def regain_s(self, sequence: Sequence) -> float:
        """What it takes to have the sequence's KV again: all computed, with its images encoded
        once more, or its beginning brought from the host and the rest computed."""
        end = sequence.num_computed_tokens
        anew_s = self._computed_s(sequence, 0, end)
        stored, load_s = self._kv.stored(sequence.seq_id)
        stored = min(stored, end)
        if not stored:
            return anew_s
        return min(anew_s, load_s + self._computed_s(sequence, stored, end))

    def _computed_s(self, sequence: Sequence, start: int, end: int) -> float:
        spans = sequence.request.image_spans
        if not spans:
            return self._compute_s(start, end)
        used = sum(span.length for span in spans if start < span.end and span.offset < end)
        again = sequence.encode_s * used / sum(span.length for span in spans)
        return self._compute_s(start, end) + again
