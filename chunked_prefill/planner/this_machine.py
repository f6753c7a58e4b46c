"""The rates of this machine's processor, measured in a fraction of a second.

Owns: the two measurements. Does not own: the rest of a DeviceSpec (devices.py), or the step times
of an engine, which step_time.py learns while it runs. Imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from chunked_prefill.planner.devices import DeviceSpec

_READ_BYTES = 128 * 2**20
"""Several times what a desktop's last cache holds."""
_MATRIX = 768
_REPEATS = 5


def measured(spec: DeviceSpec) -> DeviceSpec:
    """`spec` with the memory bandwidth and the matrix rate that numpy reaches now, in fp32 and with
    as many threads as its BLAS takes: best of five, since what else runs can only slow them."""
    numbers = np.ones(_READ_BYTES // 4, dtype=np.float32)
    square = np.ones((_MATRIX, _MATRIX), dtype=np.float32)
    return replace(
        spec,
        bandwidth_bytes_per_s=_READ_BYTES / _shortest(numbers.max),
        bf16_flops_per_s=2 * _MATRIX**3 / _shortest(lambda: square @ square),
        measured=True,
    )


def _shortest(work: Callable[[], object]) -> float:
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
