"""Whose prompt is computed next.

Owns: the Protocol Policy; Fcfs, by arrival; Deadline, by the promise of a first token.
Does not own: how much a step computes (budget.py), who loses KV when there is too little
(scheduler.py: that is always decided by rank, so that the oldest is certain to end), or how long a
step takes (step_time.py). Imports no torch.

Serving by arrival lets one prompt of 100,000 tokens stand before a hundred short ones. Here every
request has a deadline for its first token, later for a longer prompt, and the earliest goes first;
one that can no longer meet it would only make others late as well, so it goes behind those that
still can - but never without a share of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from chunked_prefill.sequence import Sequence
from chunked_prefill.step_time import StepTimeModel


class Policy(Protocol):
    def admit(self, sequence: Sequence, now_s: float) -> None:
        """The sequence begins to wait, for the first time."""
        ...

    def order(self, sequences: Iterable[Sequence], now_s: float, step: int) -> list[Sequence]:
        """The sequences, all with tokens of a prompt to compute, who goes first first. Priorities
        of requests come before everything else."""
        ...


class Fcfs:
    """By arrival."""

    def admit(self, sequence: Sequence, now_s: float) -> None:
        """Its place is its arrival."""

    def order(self, sequences: Iterable[Sequence], now_s: float, step: int) -> list[Sequence]:
        """See Policy."""
        return sorted(sequences, key=_rank)


@dataclass(frozen=True, slots=True)
class TtftPromise:
    """Seconds from arrival to the first token: `base_s`, or `stretch` times what the prompt takes
    alone, whichever is more. Without `base_s` it is four times what 512 tokens take on this
    machine. Raises ValueError for what nobody could keep."""

    base_s: float | None = None
    stretch: float = 3.0

    def __post_init__(self) -> None:
        if self.base_s is not None and self.base_s <= 0:
            raise ValueError(f"a promise of {self.base_s} s to the first token cannot be kept")
        if self.stretch < 1:
            raise ValueError(
                f"stretch is {self.stretch}; a prompt takes at least once its time alone"
            )

    def seconds(
        self, num_tokens: int, chunk_tokens: int, model: StepTimeModel, *, encode_s: float = 0.0
    ) -> float:
        """For a prompt of so many tokens in chunks of `chunk_tokens`, whose images take `encode_s`
        to encode."""
        base_s = self.base_s
        if base_s is None:
            base_s = 4 * model.prefill_s(0, 512, chunk_tokens)
        alone_s = encode_s + model.prefill_s(0, num_tokens, chunk_tokens)
        return max(base_s, self.stretch * alone_s)


_LATE_TURN = 4
"""Every so many steps the request that is late and arrived first goes before all others: a quarter
of the prefill, and of the free seats, belongs to those that were not served in time."""


class Deadline:
    """Earliest deadline first (Liu and Layland 1973, Journal of the ACM 20(1), section 7), the late
    ones last.

    `model` gives the step-time model in force, `chunk_tokens` is the largest chunk.
    """

    def __init__(
        self, promise: TtftPromise, model: Callable[[], StepTimeModel], chunk_tokens: int
    ) -> None:
        self.promise = promise
        self._model = model
        self._chunk_tokens = chunk_tokens

    def admit(self, sequence: Sequence, now_s: float) -> None:
        """Fixes the deadline: a later, better model must not change the order of those that
        wait."""
        asked = sequence.request.ttft_s
        if asked is None:
            asked = self.promise.seconds(
                sequence.num_prompt_tokens,
                self._chunk_tokens,
                self._model(),
                encode_s=sequence.encode_s,
            )
        sequence.deadline_s = (sequence.request.arrival_s or now_s) + asked

    def order(self, sequences: Iterable[Sequence], now_s: float, step: int) -> list[Sequence]:
        """See Policy."""
        model = self._model()
        in_time: list[Sequence] = []
        late: list[Sequence] = []
        for sequence in sequences:
            # An answer that lost its KV is not late: whoever reads it waits for the next token.
            begun = sequence.num_output_tokens > 0
            need_s = model.prefill_s(
                sequence.num_computed_tokens, sequence.num_tokens, self._chunk_tokens
            )
            if sequence.encode_s:
                need_s += sequence.encode_left_s
            late_now = not begun and now_s + need_s > sequence.deadline_s
            (late if late_now else in_time).append(sequence)
        in_time.sort(key=_due)
        late.sort(key=_rank)
        turn = late[:1] if step % _LATE_TURN == 0 else []
        ordered = [*turn, *in_time, *late[len(turn) :]]
        # Stable: within one class of priority the order stays.
        return sorted(ordered, key=lambda s: s.request.priority)


def _rank(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.rank


def _due(sequence: Sequence) -> tuple[float, tuple[int, int, int]]:
    begun = sequence.num_output_tokens > 0
    return (0.0 if begun else sequence.deadline_s, sequence.rank)
