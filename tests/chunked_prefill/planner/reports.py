"""Reading reports in tests."""

from __future__ import annotations

from typing import Any

from chunked_prefill.planner.report import Report


def value(report: Report, name: str) -> Any:
    (found,) = (fact.value for fact in report.facts if fact.name == name)
    return found


def rows(report: Report, table: int = 0) -> list[dict[str, Any]]:
    chosen = report.tables[table]
    names = [column.name for column in chosen.columns]
    return [dict(zip(names, row, strict=True)) for row in chosen.rows]


def check(report: Report) -> None:
    """What every report has, so that it can be shown."""
    assert report.formulas
    assert report.binds
    assert report.reverses
    for table in report.tables:
        assert table.rows
        names = [column.name for column in table.columns]
        assert len(set(names)) == len(names)
        assert all(len(row) == len(table.columns) for row in table.rows)
    if report.curve is not None:
        assert report.curve.lines
        for line in report.curve.lines:
            assert len(line.x) == len(line.y) > 1
            assert list(line.x) == sorted(line.x)
