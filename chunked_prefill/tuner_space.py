"""Which settings a tuner may try on a server, and what a point of the search means.

Owns: the knobs' values for a server's limits and a promise, and the way from a point to
SchedulingSettings. Does not own: the search (tuner.py), or the settings' meaning (settings.py).
Imports no torch.

Two families: the scheduler's own policy, whose steps are bounded in time, and static token budgets
by arrival, which is what others tune. The second is there to be compared with.
"""

from __future__ import annotations

from typing import Any

from chunked_prefill.settings import LONG_PROMPT_SHARE, STEP_SHARE, SchedulingSettings
from chunked_prefill.tuner import Family, Knob

DEADLINE, STATIC = "deadline", "static"
_TPOT_FACTORS = (0.5, 0.75, 1.0, 1.5, 2.5)
"""Times the promise: it is one of an answer's mean, so single steps may take longer, and with many
gaps they have to be shorter."""
_STEP_SHARES = ((0.2, 0.4), (0.3, 0.6), STEP_SHARE, (0.6, 1.0))
_LONG_SHARES = (0.25, LONG_PROMPT_SHARE, 1.0)


def families(
    *,
    tpot_s: float,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    long_prompts: bool,
) -> tuple[Family, ...]:
    """`max_...`: what the server was started with. `long_prompts`: whether the traffic has any
    whose share of the KV pool matters."""
    seats = _ladder("max_num_seqs", 2, max_num_seqs)
    own = [
        Knob("tpot_slo_s", tuple(tpot_s * factor for factor in _TPOT_FACTORS), 2),
        Knob("step_share", _STEP_SHARES, 2),
        seats,
        _ladder("max_num_batched_tokens", 64, max_num_batched_tokens),
    ]
    if long_prompts:
        own.append(Knob("long_prompt_share", _LONG_SHARES, 1))
    static = (_ladder("max_num_batched_tokens", 32, max_num_batched_tokens), seats)
    return (Family(DEADLINE, tuple(own)), Family(STATIC, static))


def settings_of(family: str, values: dict[str, Any], *, ttft_s: float) -> SchedulingSettings:
    if family == STATIC:
        return SchedulingSettings(policy="fcfs", ttft_slo_s=ttft_s, tpot_slo_s=0.0, **values)
    return SchedulingSettings(policy="deadline", ttft_slo_s=ttft_s, **values)


def _ladder(name: str, least: int, most: int) -> Knob:
    """Doubling up to `most`, at which servers start."""
    values = [most]
    while values[-1] // 2 >= least:
        values.append(values[-1] // 2)
    return Knob(name, tuple(reversed(values)), len(values) - 1)
