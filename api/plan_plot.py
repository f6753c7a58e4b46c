"""A plan's curve as a picture, or as a page with the report above it.

Owns: the drawing of a Curve. Does not own: what is drawn (chunked_prefill/planner), files and
colours (plots.py), or text output (plan_show.py). matplotlib is imported when something is drawn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from api import plots
from chunked_prefill.planner.devices import PlanError
from chunked_prefill.planner.report import Curve, Report

_STYLES = ("-", "--", "-.", ":", (0, (7, 2)), (0, (3, 1, 1, 1, 1, 1)))
_PAPER = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1}
"""Behind words, so that they are read over lines."""


def draw(report: Report, file: Path) -> None:
    """Writes FILE.png, or FILE.html with the words of the report. Raises PlanError where there is
    no curve, for another ending or folder, and without matplotlib."""
    if report.curve is None:
        raise PlanError(f"plan {report.planner} has no curve to draw here; leave out --plot")
    try:
        plots.check(file)
        figure = plots.figure(width=9.0, height=5.6)
        title, _, subject = report.curve.title.partition("\n")
        figure.axes[0].set_title(subject, fontsize=10, fontweight="normal")
        _draw(figure.axes[0], report.curve)
        plots.save(
            figure,
            file,
            title=title,
            notes=(*report.formulas, report.binds, *report.reverses),
        )
    except plots.PlotError as error:
        raise PlanError(str(error)) from error
    except OSError as error:
        raise PlanError(f"--plot {file} cannot be written: {error.strerror or error}") from error


def _draw(axes: Any, curve: Curve) -> None:
    for index, line in enumerate(curve.lines):
        axes.plot(
            line.x,
            line.y,
            label=line.name,
            color=plots.COLOURS[index % len(plots.COLOURS)],
            linestyle=_STYLES[index % len(_STYLES)],
            linewidth=2,
        )
    _scales(axes, curve)
    _notes(axes, curve)
    axes.set_xlabel(curve.x_label)
    axes.set_ylabel(curve.y_label)
    axes.legend(fontsize=9, framealpha=0.9, frameon=True)


def _scales(axes: Any, curve: Curve) -> None:
    """Logarithms where asked, with plain numbers at the ticks."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    ticks = FuncFormatter(_tick)
    values = [y for line in curve.lines for y in line.y if y > 0]
    if curve.log_x:
        axes.set_xscale("log", base=curve.log_x)
    if curve.log_y:
        axes.set_yscale("log")
        if max(values) < 300 * min(values):
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    elif min(values) < max(values) / 2:
        axes.set_ylim(bottom=0)
    if curve.log_x == 10:
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(ticks)
        axis.set_minor_formatter(NullFormatter())


def _tick(value: float, _: object = None) -> str:
    """1024-fold lengths as k, thousands with commas, small numbers with the digits they need."""
    if value >= 8192 and value % 1024 == 0:
        return f"{value / 1024:,.0f}k"
    return f"{value:,.0f}" if value >= 10 else f"{value:g}"


def _notes(axes: Any, curve: Curve) -> None:
    for level in curve.levels:
        axes.axhline(level.y, color="#777777", linewidth=1, linestyle=(0, (2, 2)))
        axes.annotate(
            level.text,
            xy=(1, level.y),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 3),
            textcoords="offset points",
            ha="right",
            fontsize=9,
            color="#555555",
            bbox=_PAPER,
        )
    for mark in curve.marks:
        axes.plot([mark.x], [mark.y], marker="o", color="#222222", markersize=5)
        axes.annotate(
            mark.text,
            xy=(mark.x, mark.y),
            xytext=(8, -12),
            textcoords="offset points",
            fontsize=9,
            bbox=_PAPER,
        )
