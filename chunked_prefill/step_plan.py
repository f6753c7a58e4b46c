"""What the scheduler decides for one step.

Owns: ScheduledChunk, StepPlan, and NeverFits, the answer to what can never be served. Does not own:
how it is decided (scheduler.py), or the tensors that follow (lm_engine/batch.py). Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from chunked_prefill.sequence import Sequence
from kv_offload.kv_manager import BlockCopy, BlockStore


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Compute tokens [start, start + length) of the sequence."""

    sequence: Sequence
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def samples(self) -> bool:
        """Whether the chunk ends at the sequence's last token, so that the next is sampled."""
        return self.end == self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: KV for every chunk is reserved; `copies` come before the first write."""

    step: int
    chunks: tuple[ScheduledChunk, ...]
    copies: tuple[BlockCopy | BlockStore, ...]
    preempted: tuple[Sequence, ...]
    vision_s: float = inf
    """How long the vision stage may work beside this step: 0 to rest, inf until the next step says
    otherwise (vision_share.py)."""

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class NeverFits:
    """Why a request can never be served here, in numbers, and what would help."""

    need_tokens: int
    have_tokens: int
    remedy: str
