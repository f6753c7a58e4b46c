"""How much KV the sequences that run will want at once, before it is wanted.

Owns: OutputForecast, which guesses from recent answers how long a running one will become, and
`peak_blocks`, the most device blocks that a set of sequences asks for at one time. Does not own:
blocks (kv_offload), or what follows from a peak (scheduler.py admits, or does not).
Imports no torch.

Admitting by what sequences hold now fills the pool with answers that all have to grow, and then
preempts; admitting by what they may become at most leaves it half empty. In between lies the peak
of the future that the past makes likely (Gong et al. 2025, "Past-Future Scheduler", arXiv
2507.10150): whoever ends first gives back what the others need to end.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

_WINDOW = 512
"""Answers remembered."""
_MOST_TIMES = 32
"""Moments at which the demand is computed; a peak between two of them is missed by little."""


class OutputForecast:
    """Lengths of recent answers. With less than `fewest` of them nothing is foretold."""

    def __init__(self, fewest: int = 16) -> None:
        self.fewest = fewest
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self._sums: list[int] = []
        """Of the first n of these; empty while nobody has asked since the last answer."""

    def observe(self, output_tokens: int) -> None:
        """An answer ended by itself or at its limit after so many tokens."""
        if len(self._recent) == _WINDOW:
            oldest = self._recent.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
        self._recent.append(output_tokens)
        insort(self._sorted, output_tokens)
        self._sums = []

    def remaining(self, produced: int, most: int) -> int:
        """Tokens that an answer of `produced` so far is expected to add, at least 1 and at most
        `most`: the mean over the remembered ones that became longer. 1 while too little is known,
        or when none became longer: then it has outlived its like, and may end with any token."""
        if len(self._sorted) < self.fewest:
            return 1
        first = bisect_right(self._sorted, produced)
        longer = len(self._sorted) - first
        if not longer:
            return 1
        if not self._sums:
            self._sums = list(accumulate(self._sorted, initial=0))
        mean = round((self._sums[-1] - self._sums[first]) / longer)
        return max(1, min(most, mean - produced))


@dataclass(frozen=True, slots=True)
class Growth:
    """One sequence, from now on."""

    tokens: int
    """Known tokens: all of them will have KV."""
    held_blocks: int
    """Device blocks it has, and gives back at its end."""
    remaining: int
    """Tokens that it adds before it ends, at least 1."""
    width: int = 1
    """Answers that grow from its prompt."""
    most_blocks: int | None = None
    """It never holds more on the device, if there is such a bound."""


def peak_blocks(growths: Sequence[Growth], block_size: int) -> int:
    """Most device blocks beyond those held now that the sequences want at one time, if each adds a
    token per step and gives all back at its end; at least 0.

    Just before the k-th of them ends, those that end then or later have grown by as many tokens as
    it had left. Blocks that two of them share count once for each, on both sides.
    """
    if not growths:
        return 0
    remaining = np.array([g.remaining for g in growths])
    times = np.unique(remaining)
    if len(times) > _MOST_TIMES:
        times = times[np.linspace(0, len(times) - 1, _MOST_TIMES).round().astype(int)]
    tokens = np.array([g.tokens for g in growths])
    held = np.array([g.held_blocks for g in growths])
    width = np.array([g.width for g in growths])
    most = np.array([_UNBOUNDED if g.most_blocks is None else g.most_blocks for g in growths])
    alive = remaining >= times[:, None]
    own = -(-(tokens + times[:, None]) // block_size)
    # A prompt's other answers share its whole blocks and copy the last one.
    others = (width - 1) * (own - tokens // block_size)
    wanted = np.maximum(held, np.minimum(own + others, most))
    demand = (np.where(alive, wanted, 0) - held).sum(axis=1)
    return max(0, int(demand.max()))


_UNBOUNDED = np.iinfo(np.int64).max
