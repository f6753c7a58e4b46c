"""Figures as files, for whoever has something to show.

Owns: the way to matplotlib, which is an optional package and imported only here, PNG and HTML
files, and one set of colours. Does not own: what is drawn.
"""

from __future__ import annotations

import html
import importlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#4b5563")
"""In the order in which series take them; told apart in grey as well."""
MUTED = "#9ca3af"

_SUFFIXES = (".png", ".html")
_STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#e5e7eb",
    "legend.frameon": False,
    "figure.dpi": 110,
}
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.45 system-ui, sans-serif; color: #111827; margin: 2rem auto; max-width: 72rem;
  padding: 0 1rem; }}
svg {{ max-width: 100%; height: auto; }}
table {{ border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }}
td, th {{ padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #e5e7eb; }}
td:first-child, th:first-child {{ text-align: left; }}
</style></head><body><h1>{title}</h1>{notes}{table}{figure}</body></html>
"""


class PlotError(Exception):
    """The figure cannot be made; the message says what to do."""


def check(path: Path) -> None:
    """Before any work is done for it. Raises PlotError unless a figure can be saved as `path`."""
    if path.suffix.lower() not in _SUFFIXES:
        raise PlotError(f"--plot {path}: the name must end in {' or '.join(_SUFFIXES)}.")
    if not path.parent.is_dir():
        raise PlotError(f"--plot {path}: there is no folder {path.parent}.")
    _library("figure")


def figure(rows: int = 1, columns: int = 1, *, width: float = 11.0, height: float = 4.0) -> Any:
    """A matplotlib Figure with `rows` x `columns` axes (`figure.axes`, row by row); `height` inches
    each row. Raises PlotError without matplotlib."""
    with _library("rc").rc_context(_STYLE):
        made = _library("figure").Figure(figsize=(width, height * rows), layout="constrained")
        made.subplots(rows, columns)
    return made


def save(
    made: Any,
    path: Path,
    *,
    title: str,
    notes: Sequence[str] = (),
    table: Sequence[Sequence[str]] = (),
) -> None:
    """Writes the figure as PNG, or as one HTML file without references to others, in which
    `notes` (paragraphs) and `table` (its first row is the head) stand above it."""
    if path.suffix.lower() == ".png":
        made.suptitle(title, fontweight="bold")
        made.savefig(path, format="png")
        return
    file = io.StringIO()
    made.savefig(file, format="svg", metadata={"Date": None})
    picture = file.getvalue()
    picture = picture[picture.index("<svg") :]
    paragraphs = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    page = _PAGE.format(
        title=html.escape(title), notes=paragraphs, table=_table(table), figure=picture
    )
    path.write_text(page, encoding="utf-8")


def _table(rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = [
        "<tr>" + "".join(f"<{cell}>{html.escape(text)}</{cell}>" for text in row) + "</tr>"
        for cell, row in zip(("th", *["td"] * (len(rows) - 1)), rows, strict=True)
    ]
    return f"<table>{''.join(lines)}</table>"


def _library(name: str) -> Any:
    """matplotlib itself ("rc") or one of its modules; nothing of it needs a screen."""
    try:
        return importlib.import_module("matplotlib" if name == "rc" else f"matplotlib.{name}")
    except ImportError as error:
        raise PlotError(
            "--plot needs matplotlib; install it by `pip install matplotlib`, or leave out --plot."
        ) from error
