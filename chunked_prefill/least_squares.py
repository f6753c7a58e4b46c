"""Least squares whose weights mean something, and so are never negative.

Owns: the method. Does not own: what is fitted (step_time.py, encode_time.py). Imports no torch.
"""

from __future__ import annotations

import numpy as np


def non_negative_least_squares(rows: np.ndarray, wanted: np.ndarray) -> list[float]:
    """x >= 0 that minimises |rows x - wanted|², by Lawson and Hanson's active set ("Solving Least
    Squares Problems", 1974, chapter 23). rows: [n, k] with k small."""
    scale = np.linalg.norm(rows, axis=0)
    scale[scale == 0] = 1.0
    # k is small, n is not: everything is said by the products of columns.
    a = rows / scale
    products, wished = a.T @ a, a.T @ wanted
    size = len(scale)
    x = np.zeros(size)
    free = np.zeros(size, dtype=bool)
    for _ in range(6 * size):
        gradient = wished - products @ x
        gradient[free] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= 1e-10:
            break
        free[best] = True
        while True:
            trial = np.zeros(size)
            trial[free] = np.linalg.lstsq(products[np.ix_(free, free)], wished[free], rcond=None)[0]
            if (trial[free] > 0).all():
                x = trial
                break
            falling = free & (trial <= 0)
            step = float(np.min(x[falling] / (x[falling] - trial[falling])))
            x = x + step * (trial - x)
            free &= x > 1e-12
            x[~free] = 0.0
    return [float(v) for v in x / scale]
