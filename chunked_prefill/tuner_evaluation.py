"""What traffic would meet at a server with other settings, by simulation.

Owns: Served (what of a server a simulation has to know), and the trials of a search made with it.
Does not own: the simulation (simulator_server.py), the search (tuner.py), or where a calibration
comes from. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from chunked_prefill.goodput import Promise, RequestTimes
from chunked_prefill.settings import SchedulingSettings
from chunked_prefill.simulator import Delays, Outcome
from chunked_prefill.simulator_server import simulate_server
from chunked_prefill.simulator_vision import ImageModel, VisionStage
from chunked_prefill.step_time import StepTimeModel
from chunked_prefill.trace import TraceRequest
from chunked_prefill.tuner import Trial

_APART_S = 1e4
"""Between requests of which each is to find an idle server."""
_NEVER_S = 1e9
"""In place of infinite: percentiles lie between numbers."""


@dataclass(frozen=True, slots=True)
class Served:
    """A server as its simulation sees it."""

    model: StepTimeModel
    kv_blocks: int
    block_size: int = 16
    prefix_caching: bool = True
    residuals: tuple[float, ...] = ()
    """Measured step times over predicted, at evenly spaced quantiles."""
    delays: Delays = field(default_factory=Delays)
    images: Callable[[int | None], ImageModel] | None = None
    """What images cost under a limit of their resolution, in pixels; None: it sees none."""
    vision: Callable[[], VisionStage] = VisionStage

    def simulate(
        self,
        requests: Sequence[TraceRequest],
        settings: SchedulingSettings,
        *,
        seed: int = 0,
        resolution: int | None = None,
    ) -> Outcome:
        return simulate_server(
            requests,
            settings,
            model=self.model,
            kv_blocks=self.kv_blocks,
            residuals=self.residuals,
            block_size=self.block_size,
            prefix_caching=self.prefix_caching,
            images=None if self.images is None else self.images(resolution),
            vision=self.vision(),
            delays=self.delays,
            seed=seed,
        )


def trial(times: Sequence[RequestTimes], promise: Promise) -> Trial:
    """In the order of arrival. A request without an answer has waited for ever."""
    ordered = sorted(times, key=lambda t: (t.arrival_s, t.request_id))
    ttft = p95([t.ttft_s if t.error is None else inf for t in ordered])
    tpot = p95([t.tpot_s if t.error is None else inf for t in ordered])
    gaps = [t.max_gap_s for t in ordered]
    return Trial(
        tuple(promise.missed(t) is None for t in ordered),
        max(ttft / promise.ttft_s, tpot / promise.tpot_s),
        ttft,
        tpot,
        float(np.percentile(gaps, 99)) if gaps else 0.0,
    )


def p95(values: Sequence[float]) -> float:
    """0 without values."""
    finite = np.minimum(np.asarray(values, dtype=np.float64), _NEVER_S)
    return float(np.percentile(finite, 95)) if len(finite) else 0.0


def one_at_a_time(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """The same requests, each on a server that has nothing else to do."""
    return [
        replace(request, arrival_s=number * _APART_S) for number, request in enumerate(requests)
    ]


def faster(requests: Sequence[TraceRequest], speed: float) -> list[TraceRequest]:
    """The same requests at `speed` times their rate."""
    return [replace(request, arrival_s=request.arrival_s / speed) for request in requests]
