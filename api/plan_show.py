"""A plan's report as text for people and JSON for programs.

Owns: how numbers with units are written, tables, and the choice of text, JSON and picture.
Does not own: what a report says (chunked_prefill/planner), or drawing (plan_plot.py).
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from json import dumps
from typing import Any

from api.plan_flags import Shown
from chunked_prefill.planner.report import Column, Fact, Report, Table, Value

_WIDTH = 98
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))


def answer(report: Report, shown: Shown) -> int:
    """Prints the report, draws its curve where asked, and returns the exit code. A picture that
    cannot be drawn raises PlanError before anything is printed."""
    if shown.plot is not None:
        from api.plan_plot import draw

        draw(report, shown.plot)
    print(dumps(as_json(report), indent=1) if shown.json else "\n".join(as_lines(report)))
    return 0


def as_json(report: Report) -> dict[str, Any]:
    """Unscaled values; each key of a row ends with its unit."""
    curve = None if report.curve is None else asdict(report.curve)
    return {
        "planner": report.planner,
        "title": report.title,
        "formulas": list(report.formulas),
        "values": {_key(f.name, f.unit): f.value for f in report.facts},
        "tables": [
            {
                "title": table.title,
                "rows": [
                    {_key(c.name, c.unit): v for c, v in zip(table.columns, row, strict=True)}
                    for row in table.rows
                ],
            }
            for table in report.tables
        ],
        "binds": report.binds,
        "reverses": list(report.reverses),
        "curve": curve,
    }


def _key(name: str, unit: str) -> str:
    words = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    suffix = unit.replace("/", "_per_")
    return words if not suffix or words.endswith(suffix) else f"{words}_{suffix}"


def as_lines(report: Report) -> list[str]:
    lines = [report.title, "", *(f"  {formula}" for formula in report.formulas), ""]
    lines += _facts(report.facts)
    for table in report.tables:
        lines += ["", *([f"{table.title}:"] if table.title else []), *aligned(_cells(table))]
    lines += ["", *_wrapped("Binds: ", report.binds), *_wrapped("Turns: ", report.reverses[0])]
    for turn in report.reverses[1:]:
        lines += _wrapped("       ", turn)
    return lines


def _facts(facts: Sequence[Fact]) -> list[str]:
    width = max(len(fact.name) for fact in facts)
    lines = []
    for fact in facts:
        unit = f" {fact.unit}" if fact.unit in ("tokens", "tokens/s", "steps") else ""
        text = written(fact.value, fact.unit) + (unit if fact.value is not None else "")
        note = f" ({fact.note})" if fact.note else ""
        if isinstance(fact.value, str) or not fact.note.startswith("Gbit/s"):
            lines.append(f"{fact.name.ljust(width)}  {text}{note}")
        else:
            lines.append(f"{fact.name.ljust(width)}  {text} {fact.note}")
    return lines


def _cells(table: Table) -> list[tuple[str, ...]]:
    heads = tuple(f"{c.name} [{c.unit}]" if c.unit == "tokens/s" else c.name for c in table.columns)
    return [heads, *(_row(table.columns, row) for row in table.rows)]


def _row(columns: Sequence[Column], row: Sequence[Value]) -> tuple[str, ...]:
    return tuple(written(v, c.unit) for c, v in zip(columns, row, strict=True))


def _wrapped(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_on_hyphens=False,
    )


def written(value: Value, unit: str) -> str:
    """A value for people: scaled where its unit is bytes, operations or seconds."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if unit == "s":
        return seconds(value)
    if unit == "share":
        return f"{plain(100 * value)} %"
    if unit == "times":
        return f"{value:.2f}x"
    if unit in ("bytes", "bytes/s", "flop", "flop/s"):
        return _scaled(value, unit)
    return plain(value)


def plain(value: float) -> str:
    """Whole numbers whole, others with three digits that count."""
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def _scaled(value: float, unit: str) -> str:
    kind, _, per = unit.partition("/")
    word = "B" if kind == "bytes" else "FLOP"
    for size, prefix in _PREFIXES:
        if abs(value) >= size:
            return f"{_three(value / size)} {prefix}{word}{per and '/'}{per}"
    return f"{value:,.0f} {word}{per and '/'}{per}"


def _three(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if value >= 1:
        return f"{value:,.1f} s" if value >= 10 else f"{value:.2f} s"
    ms = value * 1e3
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.1f} ms" if ms >= 10 else f"{ms:.3g} ms"


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns of equal width, words to the left and numbers to the right."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    left = [not any(cell[:1].isdigit() or cell == "-" for cell in column[1:]) for column in columns]
    left[0] = left[0] or " " in rows[-1][0]
    return [
        "  ".join(
            cell.ljust(width) if words else cell.rjust(width)
            for cell, width, words in zip(row, widths, left, strict=True)
        ).rstrip()
        for row in rows
    ]
