"""A whole server's language stage simulated, from what it was started with.

Owns: `simulate_server`: which scheduler, clock, executor and books a server's settings and its
calibration mean. Does not own: the loop (simulator.py), what the settings mean (settings.py), or
where a calibration comes from. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from chunked_prefill.settings import SchedulingSettings, build
from chunked_prefill.simulator import Delays, Outcome, Simulator, VirtualClock
from chunked_prefill.simulator_executor import ModelExecutor
from chunked_prefill.simulator_pool import counting_kv
from chunked_prefill.simulator_vision import ImageModel, VisionStage
from chunked_prefill.step_time import StepTimeModel
from chunked_prefill.step_time_estimator import StepTimeEstimator
from chunked_prefill.trace import TraceRequest


def simulate_server(
    requests: Iterable[TraceRequest],
    settings: SchedulingSettings,
    *,
    model: StepTimeModel,
    kv_blocks: int,
    residuals: Sequence[float] = (),
    block_size: int = 16,
    prefix_caching: bool = True,
    images: ImageModel | None = None,
    vision: VisionStage | None = None,
    delays: Delays | None = None,
    seed: int = 0,
    until_s: float = inf,
) -> Outcome:
    """What users of a server with these settings would see of the requests, which come by arrival.

    Steps take what the calibrated `model` says, times a draw from `residuals` (see ModelExecutor),
    and the server knows the model from its start, as one with a calibration does. Its users' times
    include `delays`, what a step takes outside of the model. `images` is needed where requests have
    some; `vision` serves this one simulation. A request's isolated time is the model's for its
    prompt alone, with its images.
    """
    clock = VirtualClock()
    kv = counting_kv(kv_blocks, block_size, prefix_caching=prefix_caching)
    scheduler = build(settings, kv, StepTimeEstimator(model, residuals), clock=clock)
    outside = delays or Delays()

    def alone_s(tokens: int) -> float:
        prefill_s = model.prefill_s(0, tokens, settings.max_num_batched_tokens)
        steps = -(-tokens // settings.max_num_batched_tokens)
        between_s = (steps - 1) * outside.between_steps_s
        return outside.ingress_s + prefill_s + between_s + outside.egress_s

    simulator = Simulator(
        scheduler,
        clock,
        ModelExecutor(model.predict_s, residuals, seed=seed),
        images=images,
        vision=vision,
        delays=outside,
        alone_s=alone_s,
    )
    return simulator.run(requests, until_s=until_s)
