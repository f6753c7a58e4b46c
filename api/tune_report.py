"""What a run of `tune` found, as a configuration, as JSON and in words.

Owns: Verified, Result, and their forms. Does not own: pictures (tune_plot.py), or what is found
(tune_search.py, tune_run.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from api.tune_search import Candidate, Found, described
from chunked_prefill.goodput import (
    Interval,
    Promise,
    Report,
    RequestTimes,
    bootstrap,
    wilson,
)
from chunked_prefill.settings import SchedulingSettings
from chunked_prefill.tuner_verdict import Impossible, Reached, ms


@dataclass(frozen=True, slots=True)
class Verified:
    """One candidate on the running server."""

    candidate: Candidate
    report: Report
    reached: Reached
    goodput: Interval
    """95 %, by resampling requests."""

    @classmethod
    def of(cls, candidate: Candidate, times: Sequence[RequestTimes], promise: Promise) -> Verified:
        kept = [promise.missed(t) is None for t in times]
        return cls(candidate, Report.of(times, promise), Reached.of(times), share(kept))


@dataclass(frozen=True, slots=True)
class Result:
    """A whole run. With `impossible` nothing was found; without, `verified` has the best first."""

    model: str
    promise: Promise
    traffic: dict[str, Any]
    """What decides the requests, as flags of `bench`."""
    requests: int
    phases_s: dict[str, float]
    calibration: str
    """Where the step times come from."""
    found: Found | None = None
    verified: tuple[Verified, ...] = ()
    binding: str = ""
    impossible: Impossible | None = None

    @property
    def choice(self) -> Verified | None:
        return self.verified[0] if self.verified else None

    @property
    def kept(self) -> bool:
        """Whether the promise can be kept, as far as is known."""
        return self.choice is not None and not self.choice.reached.broken(self.promise)


def share(kept: Sequence[bool]) -> Interval:
    """By resampling requests; where all are alike, which resampling cannot see beyond, by Wilson's
    score."""
    if len(set(kept)) < 2:
        return wilson(sum(kept), len(kept))
    return bootstrap([float(one) for one in kept], lambda values: float(values.mean()))


def predicted(candidate: Candidate) -> Interval:
    """Goodput over all simulated excerpts, by resampling requests."""
    return share(candidate.standing.kept)


# -- the configuration --------------------------------------------------------------------------


def configuration(result: Result, base: Mapping[str, Any]) -> str:
    """YAML for `longlens serve --config`: the chosen settings, after the `base` ones that the
    server was started with."""
    assert result.choice is not None
    assert result.found is not None
    values = {str(name).replace("_", "-"): value for name, value in base.items()}
    values |= flags_of(result.choice.candidate.settings, result.found.resolution)
    good, simulated = result.choice.goodput, predicted(result.choice.candidate)
    lines = [
        f"# longlens tune: TTFT {ms(result.promise.ttft_s)}, TPOT {ms(result.promise.tpot_s)} at "
        "p95",
        f"# goodput {percent(good)} verified, {percent(simulated)} predicted",
        f"# {result.binding}",
        *(f"{name}: {_yaml(value)}" for name, value in values.items()),
    ]
    return "\n".join(lines) + "\n"


def flags_of(settings: SchedulingSettings, resolution: int | None) -> dict[str, Any]:
    """By the names of `serve`'s flags."""
    flags: dict[str, Any] = {
        "scheduling-policy": settings.policy,
        "ttft-slo": f"{(settings.ttft_slo_s or 0) * 1e3:g}ms",
        "tpot-slo": f"{settings.tpot_slo_s * 1e3:g}ms" if settings.tpot_slo_s else 0,
        "step-share": "{:g}-{:g}".format(*settings.step_share),
        "max-num-seqs": settings.max_num_seqs,
        "max-num-batched-tokens": settings.max_num_batched_tokens,
        "long-prompt-share": settings.long_prompt_share,
    }
    if resolution is not None:
        flags["image-resolution-limit"] = resolution
    return flags


def _yaml(value: Any) -> str:
    """A scalar, or a list of them. Text is quoted as JSON, which YAML contains."""
    from orjson import dumps

    return dumps(value, default=str).decode()


# -- JSON ---------------------------------------------------------------------------------------


def as_json(result: Result) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": result.model,
        "promise": {"ttft_s": result.promise.ttft_s, "tpot_s": result.promise.tpot_s},
        "traffic": result.traffic,
        "requests": result.requests,
        "possible": result.impossible is None,
        "kept": result.kept,
        "calibration": result.calibration,
        "phases_s": {name: round(s, 1) for name, s in result.phases_s.items()},
    }
    if result.impossible is not None:
        return body | {"impossible": asdict(result.impossible)}
    found = result.found
    assert found is not None
    assert result.choice is not None
    return body | {
        "choice": _verified(result.choice, found.resolution),
        "verified": [_verified(one, found.resolution) for one in result.verified],
        "binding": result.binding,
        "idle": {"ttft_p95_s": found.idle.ttft_s.value, "tpot_p95_s": found.idle.tpot_s.value},
        "sensitivities": [asdict(one) for one in found.sensitivities],
        "image_resolutions": [
            {"limit": limit, "goodput": s.goodput, "strain": s.strain}
            for limit, s in found.resolutions
        ],
        "simulations": found.trials,
        "points": [
            {"family": one.family, "settings": asdict(one.settings), **_trial(one)}
            for one in found.everything
        ],
    }


def _verified(one: Verified, resolution: int | None) -> dict[str, Any]:
    report = one.report.as_json()
    return {
        "family": one.candidate.family,
        "settings": {**asdict(one.candidate.settings), "image_resolution_limit": resolution},
        "flags": flags_of(one.candidate.settings, resolution),
        "predicted": {
            "goodput": asdict(predicted(one.candidate)),
            "excerpts": len(one.candidate.standing.trials),
            "first_excerpt": _trial(one.candidate),
        },
        "verified": {
            "goodput": asdict(one.goodput),
            "ttft_p95_s": asdict(one.reached.ttft_s),
            "tpot_p95_s": asdict(one.reached.tpot_s),
            "gap_p99_s": report["max_gap_s"]["p99"],
            "missed": report["missed"],
            "errors": report["errors"],
        },
    }


def _trial(candidate: Candidate) -> dict[str, float]:
    first = candidate.standing.trials[0]
    return {
        "goodput": first.goodput,
        "ttft_p95_s": first.ttft_p95_s,
        "tpot_p95_s": first.tpot_p95_s,
        "gap_p99_s": first.gap_p99_s,
    }


# -- words --------------------------------------------------------------------------------------


def lines(result: Result) -> Iterator[str]:
    """Most important first."""
    promised = f"TTFT {ms(result.promise.ttft_s)} and TPOT {ms(result.promise.tpot_s)} at p95"
    if result.impossible is not None:
        yield f"impossible    {promised}: {result.impossible.why}"
        for text in result.impossible.achievable:
            yield f"achievable    {text}"
        return
    choice, found = result.choice, result.found
    assert choice is not None
    assert found is not None
    broken = choice.reached.broken(result.promise)
    verdict = "is broken" if broken else "holds"
    yield f"promise       {promised} {verdict} on the running server: {choice.reached}"
    yield f"settings      {described(choice.candidate.settings)}"
    yield (
        f"goodput       {percent(choice.goodput)} verified, "
        f"{percent(predicted(choice.candidate))} predicted (95 % intervals over requests)"
    )
    yield f"binding       {result.binding}"
    for one in result.verified[1:]:
        yield (
            f"next best     {percent(one.goodput)} verified, {percent(predicted(one.candidate))} "
            f"predicted: {described(one.candidate.settings)}"
        )
    static = [c for c in found.everything if c.family == "static"]
    if static:
        best = max(static, key=lambda c: c.standing.goodput)
        yield (
            f"static        {best.standing.goodput:.1%} predicted for the best static budget: "
            f"{described(best.settings)}"
        )
    for step in found.sensitivities:
        yield (
            f"sensitivity   {step.knob} {_shown(step.best)} -> {_shown(step.value)}: "
            f"{step.goodput * 100:+.1f} points, strain {step.strain:+.2f}"
        )
    if len(found.resolutions) == 1:
        yield "images        no limit makes these smaller: the model sees them at one size"
        return
    for limit, standing in found.resolutions:
        name = "no limit" if limit is None else f"{limit:,} pixels"
        used = " (used)" if limit == found.resolution else ""
        yield f"images        {name}: {standing.goodput:.1%} predicted{used}"


def percent(share: Interval) -> str:
    return f"{share.value:.1%} [{share.low:.1%}, {share.high:.1%}]"


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return "-".join(f"{part:g}" for part in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
