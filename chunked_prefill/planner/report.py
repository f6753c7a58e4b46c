"""A plan's answer as a value: formulas, numbers with units, what binds, where it turns.

Owns: Report and its parts. Does not own: the arithmetic (one module per planner), or how a report
is shown (api/plan_show.py, api/plan_plot.py). Imports no torch.

A unit is one of `bytes`, `s`, `tokens`, `tokens/s`, `flop`, `flop/s`, `bytes/s`, `share` (1 is
all), `times`, `steps`, or empty for plain numbers. Values are in that unit, never scaled.
"""

from __future__ import annotations

from dataclasses import dataclass

Value = int | float | str | None
"""None: this device or model has no such number."""


@dataclass(frozen=True, slots=True)
class Fact:
    name: str
    value: Value
    unit: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Mark:
    """A point with words at it."""

    x: float
    y: float
    text: str


@dataclass(frozen=True, slots=True)
class Level:
    """A horizontal line that a curve is held against."""

    y: float
    text: str


@dataclass(frozen=True, slots=True)
class Curve:
    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    marks: tuple[Mark, ...] = ()
    levels: tuple[Level, ...] = ()
    log_x: int = 0
    """Base of a logarithmic axis; 0: linear."""
    log_y: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    planner: str
    title: str
    formulas: tuple[str, ...]
    facts: tuple[Fact, ...]
    tables: tuple[Table, ...]
    binds: str
    """Which resource sets the answer, in words with numbers."""
    reverses: tuple[str, ...]
    """Where the answer turns into its opposite, in words with numbers."""
    curve: Curve | None = None
