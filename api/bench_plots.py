"""The picture of a load: latencies against promises, and what happened when.

Owns: the four panels. Does not own: files and colours (plots.py), or any figure (bench_report.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from api import plots
from api.bench_report import NAME_WIDTH as _NAME
from api.bench_report import Summary

_LEGEND = {"frameon": True, "framealpha": 0.85, "facecolor": "white", "edgecolor": "none"}
_KEPT, _MISSED, _FAILED = plots.COLOURS[0], plots.COLOURS[1], plots.COLOURS[3]


def draw(summary: Summary, path: Path) -> None:
    """Raises PlotError."""
    figure = plots.figure(2, 2, width=12, height=4.2)
    first, pace, when, load = figure.axes
    promise = summary.report.promise
    answered = [t for t in summary.times if t.error is None]
    _share_under(
        first, "Time to first token", [("TTFT", [t.ttft_s for t in answered])], promise.ttft_s
    )
    _share_under(
        pace,
        "Time per output token, and each answer's largest gap",
        [
            ("TPOT", [t.tpot_s for t in answered if t.output_tokens > 1]),
            ("largest gap", [t.max_gap_s for t in answered if len(t.delivered_s) > 1]),
        ],
        promise.tpot_s,
    )
    _over_time(when, summary)
    _in_flight(load, summary)
    good = summary.report.goodput
    # Some servers call a model by the path of its file.
    model = Path(summary.target.model).name
    title = f"{model} ({summary.target.kind}): {good.value:.1%} goodput"
    notes = [": ".join(part.strip() for part in (n[:_NAME], n[_NAME:])) for n in summary.lines()]
    plots.save(figure, path, title=title, notes=notes, table=summary.latency_rows())


def _share_under(
    axes: Any, title: str, series: list[tuple[str, list[float]]], promised_s: float
) -> None:
    """Empirical distributions on a logarithmic axis."""
    for (name, values), colour in zip(series, plots.COLOURS, strict=False):
        if values:
            ordered = np.maximum(np.sort(values) * 1e3, 1e-2)
            shares = np.arange(1, len(ordered) + 1) / len(ordered) * 100
            axes.step(ordered, shares, where="post", color=colour, label=name, linewidth=1.8)
    if np.isfinite(promised_s):
        label = f"promised {promised_s * 1e3:,g} ms"
        axes.axvline(promised_s * 1e3, color=_FAILED, linestyle="--", linewidth=1.2, label=label)
    axes.set_xscale("log")
    _round_ticks(axes.xaxis)
    axes.set(title=title, xlabel="ms (logarithmic)", ylabel="% of requests at most", ylim=(0, 101))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best", **_LEGEND)


def _round_ticks(axis: Any) -> None:
    """1, 2, 5, 10, ... written out, on a logarithmic axis."""
    axis.get_major_locator().set_params(subs=(1.0, 2.0, 5.0))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_formatter("")


def _over_time(axes: Any, summary: Summary) -> None:
    promise = summary.report.promise
    kinds: dict[str, list[tuple[float, float]]] = {"kept": [], "missed": []}
    failed = []
    for times in summary.times:
        if times.error is not None or not times.delivered_s:
            failed.append(times.arrival_s)
            continue
        kind = "kept" if promise.missed(times) is None else "missed"
        kinds[kind].append((times.arrival_s, times.ttft_s * 1e3))
    for (name, points), colour, marker in zip(
        kinds.items(), (_KEPT, _MISSED), ("o", "D"), strict=True
    ):
        if points:
            x, y = zip(*points, strict=True)
            axes.scatter(x, y, s=14, color=colour, marker=marker, alpha=0.75, label=name)
    axes.set_yscale("log")
    _round_ticks(axes.yaxis)
    for number, at in enumerate(failed):
        axes.axvline(at, color=_FAILED, alpha=0.4, linewidth=1, label=None if number else "failed")
    if np.isfinite(promise.ttft_s):
        label = f"promised {promise.ttft_s * 1e3:,g} ms"
        axes.axhline(
            promise.ttft_s * 1e3, color=_FAILED, linestyle="--", linewidth=1.2, label=label
        )
    axes.set(
        title="Each request: promise kept or missed",
        xlabel="arrival, s",
        ylabel="TTFT, ms (logarithmic)",
    )
    if axes.get_legend_handles_labels()[0]:
        # Above everything that is drawn.
        low, high = axes.get_ylim()
        axes.set_ylim(low, high * (high / low) ** 0.15)
        axes.legend(loc="upper left", ncols=4, columnspacing=1.2, **_LEGEND)


def _in_flight(axes: Any, summary: Summary) -> None:
    changes = sorted(
        change
        for times in summary.times
        for change in (
            (times.arrival_s, 1),
            (times.delivered_s[-1] if times.delivered_s else times.arrival_s, -1),
        )
    )
    if changes:
        at, steps = zip(*changes, strict=True)
        axes.step(at, np.cumsum(steps), where="post", color=plots.COLOURS[0], linewidth=1.5)
        axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set(title="Load and output", xlabel="time, s", ylabel="requests in flight", ylim=(0, None))
    axes.yaxis.label.set_color(plots.COLOURS[0])
    arrivals = np.concatenate([np.asarray(t.delivered_s) for t in summary.times] or [np.zeros(0)])
    if not len(arrivals):
        return
    width = max(0.25, float(arrivals.max()) / 60)
    bins = np.arange(0, float(arrivals.max()) + width, width)
    counts, edges = np.histogram(arrivals, bins)
    right = axes.twinx()
    right.step(edges[:-1], counts / width, where="post", color=plots.COLOURS[2], linewidth=1.2)
    right.set(ylabel="deliveries a second", ylim=(0, None))
    right.yaxis.label.set_color(plots.COLOURS[2])
    right.grid(False)
