"""How long the vision stage may work beside the next step of the language stage.

Owns: VisionShare, one decision per step, for a vision stage of its own process and for one that
works between steps. Does not own: whose prompt or image is due first (policy.py), the milliseconds
of a step (budget.py), or the work (vision_encoder/stage.py; simulator_vision.py). Imports no torch.

Both stages compute on the same cores. An image that is due before every prompt that could be
computed is encoded now; else the vision stage rests, and prompts have all cores. Beside decodes
alone it works in as many steps as leaves their mean within the promise, but in one of
`fewest_of` at least, so that a full house of answers cannot keep an image out.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf

_FEWEST_OF = 8
_IMAGES_PART = 0.75
"""Of the milliseconds that decodes leave, for an image that is due before all prompts."""
_ONE_UNIT_S = 1e-3
"""A stage that may work at all does at least one layer."""


@dataclass(frozen=True, slots=True)
class VisionShare:
    """Raises ValueError for a `slowdown` below 1."""

    own_process: bool = True
    """Works while steps run; else between them, in the same loop."""
    slowdown: float = 2.0
    """How much longer a step takes while the other process works: on the CPU each then has half of
    the threads."""
    fewest_of: int = _FEWEST_OF

    def __post_init__(self) -> None:
        if self.slowdown < 1 or self.fewest_of < 1:
            raise ValueError(
                f"slowdown is {self.slowdown} and fewest_of {self.fewest_of}; both are at least 1"
            )

    def grant_s(
        self, step: int, *, first: bool, prompts: bool, decode_s: float, limit_s: float
    ) -> float:
        """Seconds: 0 to rest, inf to work until told otherwise.

        Args:
            first: whether an image is due before every prompt that could be computed now.
            prompts: whether there are such prompts.
            decode_s: what the step's decodes take alone; 0 without any.
            limit_s: the most that they may take; inf without a promise.
        """
        if not first:
            return 0.0
        if decode_s <= 0:
            return inf
        turn = step % self.fewest_of == 0
        if self.own_process:
            return inf if step % self._every(decode_s, limit_s) == 0 else 0.0
        room_s = (limit_s - decode_s) * (_IMAGES_PART if prompts else 1.0)
        if room_s == inf:
            return decode_s
        if room_s <= 0:
            return _ONE_UNIT_S if turn else 0.0
        return room_s

    def _every(self, decode_s: float, limit_s: float) -> int:
        """One step of so many may be slowed down: their mean stays within the limit."""
        more_s, room_s = decode_s * (self.slowdown - 1), limit_s - decode_s
        if more_s <= room_s:
            return 1
        return self.fewest_of if room_s <= 0 else min(self.fewest_of, ceil(more_s / room_s))
