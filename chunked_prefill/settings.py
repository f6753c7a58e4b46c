"""What of a scheduler may change while it serves.

Owns: SchedulingSettings, what is wrong with one, and the scheduler, budget and policy that follow
from it. Does not own: scheduling, or the change between two steps (Scheduler.reconfigure), which
settings are good (tuner.py), or sizes that are fixed at start, such as the KV pool's. Imports no
torch.

A server, a simulation and a tuner build their schedulers from the same value, so that what was
simulated is what serves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite
from typing import Literal

from chunked_prefill.budget import Budget, TimeBudget
from chunked_prefill.long_prompts import DEFAULT_SHARE
from chunked_prefill.policy import Deadline, Fcfs, Policy, TtftPromise
from chunked_prefill.scheduler import Scheduler
from chunked_prefill.share_control import ShareControl
from chunked_prefill.step_time_estimator import StepTimeEstimator
from kv_offload.kv_manager import KVManager
from kv_offload.radix_cache import CacheKey

PolicyName = Literal["deadline", "fcfs"]
STEP_SHARE = (0.3, 0.9)
_START_SHARE = 0.75
LONG_PROMPT_SHARE = DEFAULT_SHARE
_QUANTUM = 0.5
"""Of the promised time to a first token, the most of a step that nobody's next token waits for."""


class SettingsError(ValueError):
    """A setting that nobody could schedule by: its name, its value, what is expected."""

    def __init__(self, name: str, value: object, expected: str) -> None:
        super().__init__(f"{name} is {value}, expected {expected}")
        self.name = name


@dataclass(frozen=True, slots=True)
class SchedulingSettings:
    """Raises SettingsError for values that make no sense."""

    policy: PolicyName = "deadline"
    """Whose prompt goes first: by when its first token is due, or by arrival."""
    ttft_slo_s: float | None = None
    """See TtftPromise.base_s."""
    tpot_slo_s: float = 0.0
    """Seconds per output token that steps with prompts are kept under; 0: tokens alone decide, but
    for what single requests were promised."""
    step_share: tuple[float, float] = STEP_SHARE
    """Least and most of `tpot_slo_s` that such a step may plan for; in between it follows what
    steps really take (share_control.py)."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    long_prompt_share: float = LONG_PROMPT_SHARE
    """Of the KV pool, what long prompts together may hold while short ones wait."""

    def __post_init__(self) -> None:
        least, most = self.step_share
        for name, value, good, expected in (
            ("policy", self.policy, self.policy in ("deadline", "fcfs"), "deadline or fcfs"),
            (
                "ttft_slo_s",
                self.ttft_slo_s,
                self.ttft_slo_s is None or (self.ttft_slo_s > 0 and isfinite(self.ttft_slo_s)),
                "seconds above 0, or none",
            ),
            (
                "tpot_slo_s",
                self.tpot_slo_s,
                self.tpot_slo_s >= 0 and isfinite(self.tpot_slo_s),
                "seconds, or 0 for no promise",
            ),
            (
                "step_share",
                f"{least:g}-{most:g}",
                0 < least <= most <= 1,
                "two shares above 0 and at most 1, the least first",
            ),
            ("max_num_seqs", self.max_num_seqs, self.max_num_seqs >= 1, "at least 1"),
            (
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                self.max_num_batched_tokens >= 1,
                "at least 1",
            ),
            (
                "long_prompt_share",
                self.long_prompt_share,
                0 < self.long_prompt_share <= 1,
                "a share above 0 and at most 1",
            ),
        ):
            if not good:
                raise SettingsError(name, value, expected)

    def check(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """Raises SettingsError for more than a server was started for."""
        for name, most in (
            ("max_num_seqs", max_num_seqs),
            ("max_num_batched_tokens", max_num_batched_tokens),
        ):
            if getattr(self, name) > most:
                flag = f"--{name.replace('_', '-')}"
                raise SettingsError(
                    name,
                    getattr(self, name),
                    f"at most {most}, with which the server was started ({flag})",
                )

    def check_choices(self, widest: int) -> None:
        """Raises SettingsError when there would be no seats for a request's `widest` choices."""
        if self.max_num_seqs < widest:
            expected = f"at least {widest}, the choices of a request that is here"
            raise SettingsError("max_num_seqs", self.max_num_seqs, expected)

    def build_budget(self, estimator: StepTimeEstimator) -> Budget:
        least, most = self.step_share
        control = ShareControl(min(max(_START_SHARE, least), most), least, most)
        promise_s = self.tpot_slo_s or inf
        quantum_s = inf if self.ttft_slo_s is None else _QUANTUM * self.ttft_slo_s
        return TimeBudget(self.max_num_batched_tokens, promise_s, estimator, control, quantum_s)

    def build_policy(self, estimator: StepTimeEstimator) -> Policy:
        if self.policy == "fcfs":
            return Fcfs()
        promise = TtftPromise(self.ttft_slo_s)
        return Deadline(promise, lambda: estimator.model, self.max_num_batched_tokens)


def build(
    settings: SchedulingSettings,
    kv: KVManager,
    estimator: StepTimeEstimator,
    cache_key: CacheKey | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Scheduler:
    """The one way to a scheduler of a server, a simulation or a replay."""
    scheduler = Scheduler(
        kv,
        settings.build_budget(estimator),
        settings.max_num_seqs,
        cache_key,
        policy=settings.build_policy(estimator),
        clock=clock,
    )
    scheduler.settings = settings
    scheduler.long_prompts.share = settings.long_prompt_share
    return scheduler
