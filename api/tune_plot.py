"""The picture of a tuning: what could be had, what was chosen, what it costs to turn a knob.

Owns: its three panels. Does not own: files and colours (plots.py), or any figure in them
(tune_report.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from api import plots
from api.tune_report import Result, as_json, lines, percent, predicted
from api.tune_search import Candidate
from chunked_prefill.tuner_space import STATIC

_OWN, _STATIC, _CHOICE, _PROMISE = (plots.COLOURS[0], plots.MUTED, plots.COLOURS[1], "#dc2626")
_MOST_BARS = 10
_LONGEST = 4.0
"""Times the promise: what lies further out stands at the edge of the picture."""


def draw(result: Result, path: Path) -> None:
    """Raises PlotError. There has to be a choice."""
    assert result.found is not None
    assert result.choice is not None
    figure = plots.figure(1, 2, width=13.0, height=5.8)
    front, cost = figure.axes
    _pareto(front, result, result.found.everything)
    _sensitivities(cost, result)
    good = result.choice.goodput
    name = Path(result.model).name
    title = f"{name}: {percent(good)} of the requests keep the promise (verified)"
    notes = [": ".join((n[:14].strip(), n[14:].strip())) for n in lines(result)]
    plots.save(figure, path, title=title, notes=notes, table=_table(result))


def _pareto(axes: Any, result: Result, tried: Sequence[Candidate]) -> None:
    """p95 TTFT against p95 TPOT of all points, in ms; the better ones are at the lower left."""
    promise = result.promise
    right, top = _LONGEST * promise.ttft_s * 1e3, _LONGEST * promise.tpot_s * 1e3
    for name, static, colour, marker in (
        ("time budgets, by deadline", False, _OWN, "o"),
        ("static token budgets, by arrival", True, _STATIC, "s"),
    ):
        points = [c.standing.trials[0] for c in tried if (c.family == STATIC) is static]
        if points:
            axes.scatter(
                [min(t.ttft_p95_s * 1e3, right) for t in points],
                [min(t.tpot_p95_s * 1e3, top) for t in points],
                s=[12 + 60 * t.goodput**4 for t in points],
                color=colour,
                marker=marker,
                alpha=0.7,
                linewidths=0,
                label=f"simulated: {name}",
            )
    edge = pareto([(t.ttft_p95_s, t.tpot_p95_s) for t in (c.standing.trials[0] for c in tried)])
    axes.plot(
        [min(x * 1e3, right) for x, _ in edge],
        [min(y * 1e3, top) for _, y in edge],
        color=_OWN,
        linewidth=1.2,
        alpha=0.6,
        label="simulated: nothing is better in both",
    )
    for number, one in enumerate(result.verified):
        axes.plot(
            min(one.reached.ttft_s.value * 1e3, right),
            min(one.reached.tpot_s.value * 1e3, top),
            marker="*",
            linestyle="",
            markersize=16 if number == 0 else 10,
            color=_CHOICE,
            markeredgecolor="black",
            markeredgewidth=0.6,
            label=("verified: the choice", "verified: others", None)[min(number, 2)],
        )
    axes.axvline(promise.ttft_s * 1e3, color=_PROMISE, linestyle="--", linewidth=1.2)
    axes.axhline(
        promise.tpot_s * 1e3, color=_PROMISE, linestyle="--", linewidth=1.2, label="promised"
    )
    axes.set_xscale("log")
    axes.xaxis.get_major_locator().set_params(subs=(1.0, 2.0, 5.0))
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.xaxis.set_minor_formatter("")
    axes.set(
        title=f"What settings can reach, up to {_LONGEST:g} x the promise (larger: more goodput)",
        xlabel="p95 time to first token, ms (logarithmic)",
        ylabel="p95 time per output token, ms",
        ylim=(0, None),
    )
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, fontsize=8)


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that no other is better than in both, by the first value."""
    edge: list[tuple[float, float]] = []
    for x, y in sorted(set(points)):
        if not edge or y < edge[-1][1]:
            edge.append((x, y))
    return edge


def _sensitivities(axes: Any, result: Result) -> None:
    """One bar per step away from the best settings."""
    assert result.found is not None
    steps = sorted(result.found.sensitivities, key=lambda s: s.goodput)[:_MOST_BARS]
    names = [f"{s.knob}\n{_value(s.best)} → {_value(s.value)}" for s in steps]
    places = range(len(steps))
    points = [s.goodput * 100 for s in steps]
    axes.barh(places, points, color=_OWN, height=0.6)
    axes.set_yticks(list(places), names, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(0, color="black", linewidth=0.8)
    low = min([*points, -1.0])
    axes.set_xlim(low * 1.25, max([*points, 0.0]) + abs(low) * 0.12)
    for place, value in zip(places, points, strict=True):
        side = "right" if value < 0 else "left"
        axes.annotate(
            f"{value:+.1f}",
            (value, place),
            xytext=(-4 if value < 0 else 4, 0),
            textcoords="offset points",
            ha=side,
            va="center",
            fontsize=8,
        )
    title = "One step of a knob" if steps else "One step of a knob: none was simulated in time"
    axes.set(title=title, xlabel="points of predicted goodput")
    axes.grid(axis="y", visible=False)


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return "-".join(f"{part:g}" for part in value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _table(result: Result) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("verified settings", "goodput", "predicted", "p95 TTFT, ms", "p95 TPOT, ms")
    ]
    for one, row in zip(result.verified, as_json(result)["verified"], strict=True):
        rows.append(
            (
                ", ".join(f"{name} {value}" for name, value in row["flags"].items()),
                percent(one.goodput),
                percent(predicted(one.candidate)),
                f"{one.reached.ttft_s.value * 1e3:,.0f}",
                f"{one.reached.tpot_s.value * 1e3:,.1f}",
            )
        )
    return rows
