"""How much of the promised time between tokens a step may plan for.

Owns: ShareControl, which corrects that share while serving. Does not own: what fits into it
(budget.py), or the model of step times whose errors it answers for (step_time.py).
Imports no torch.
"""

from __future__ import annotations

from collections import deque

import numpy as np

_WINDOW = 64
"""Steps looked back on."""
_EVERY = 16
"""Steps between two decisions, so that the next sees what the last one did."""
_QUANTILE = 0.95
_DOWN, _UP = 0.9, 0.02
"""Additive increase, multiplicative decrease (Chiu and Jain 1989, Computer Networks 17(1)): a
broken promise is answered at once, room is taken back slowly."""


class ShareControl:
    """A share of the promise between `least` and `most`: lowered when one mixed step in twenty took
    longer than was promised, raised while there is room."""

    def __init__(self, start: float = 0.75, least: float = 0.3, most: float = 0.9) -> None:
        if not 0 < least <= start <= most:
            raise ValueError(f"a share starts between its bounds, got {least}, {start}, {most}")
        self.share = start
        self._least, self._most = least, most
        self._ratios: deque[float] = deque(maxlen=_WINDOW)
        self._since = 0

    def observe(self, taken: float) -> None:
        """A step in which prompts and answers both advanced took `taken` times the promise."""
        self._ratios.append(taken)
        self._since += 1
        if self._since < _EVERY:
            return
        self._since = 0
        high = float(np.quantile(self._ratios, _QUANTILE))
        if high > 1.0:
            self.share = max(self._least, self.share * _DOWN)
            self._ratios.clear()
        elif high < 1.0 - 2 * _UP:
            self.share = min(self._most, self.share + _UP)
