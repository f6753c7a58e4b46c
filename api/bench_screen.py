"""What `longlens bench` says while it works and in the end.

Owns: the progress bar, lines where there is no terminal, and the printed report. Does not own: what
is reported (bench_report.py).
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from api.bench_load import State
from api.bench_report import Summary

OnChange = Callable[[State], None]
_LINE_EVERY_S = 10.0
_WIDTH = 120
"""Of a table that goes into a file."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress(total: int, span_s: float) -> Iterator[OnChange]:
    """A bar on a terminal, a line every ten seconds elsewhere; both on stderr."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(span_s)
        return
    columns = (
        TimeElapsedColumn(),
        TextColumn(f"of {span_s:.0f} s"),
        BarColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, refresh_per_second=4) as bar:
        task = bar.add_task("building the first prompts", total=total)

        def show_state(state: State) -> None:
            bar.update(task, completed=state.ended, description=_text(state))

        yield show_state


class _Lines:
    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._last_s = time.monotonic()

    def __call__(self, state: State) -> None:
        now = time.monotonic()
        if now - self._last_s >= _LINE_EVERY_S:
            self._last_s = now
            elapsed = time.perf_counter() - state.started_s
            say(f"{elapsed:.0f} s of {self._span_s:.0f} s: {_text(state)}")


def _text(state: State) -> str:
    failed = f", {state.failed:,} failed" if state.failed else ""
    return (
        f"{state.sent:,}/{state.total:,} sent, {state.sent - state.ended:,} running{failed}, "
        f"{state.tokens:,} tokens"
    )


def show(summary: Summary) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    for line in summary.lines():
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    head, *rows = summary.latency_rows()
    table = Table(*head, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    console.print()
    console.print(table)
    if summary.interrupted:
        console.print("Interrupted: this is what was sent until then.", markup=False)
