"""What `longlens tune` says while it works.

Owns: one bar per phase with the time left, and lines where there is no terminal; all on stderr.
Does not own: the phases (tune_run.py), or the printed result (tune_report.py).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from api.bench_screen import say

Advance = Callable[[float, float, str], None]
"""(done, total, what is done now); a total of 0 is unknown."""
_LINE_EVERY_S = 5.0


@contextlib.contextmanager
def phase(name: str) -> Iterator[Advance]:
    console = Console(stderr=True)
    if not console.is_terminal:
        lines = _Lines(name)
        yield lines
        lines.end()
        return
    columns = (
        TextColumn(f"{name:<11}"),
        BarColumn(bar_width=30),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, refresh_per_second=4) as bar:
        task = bar.add_task("", total=None)

        def advance(done: float, total: float, what: str) -> None:
            bar.update(task, completed=done, total=total or None, description=what)

        yield advance


class _Lines:
    def __init__(self, name: str) -> None:
        self._name = name
        self._began_s = self._last_s = time.monotonic()

    def __call__(self, done: float, total: float, what: str) -> None:
        now_s = time.monotonic()
        if now_s - self._last_s < _LINE_EVERY_S:
            return
        self._last_s = now_s
        left = ""
        if 0 < done <= total:
            left = f", {(now_s - self._began_s) * (total - done) / done:.0f} s left"
        share = f"{done / total:.0%} " if total else ""
        say(f"{self._name}: {share}{what}{left}")

    def end(self) -> None:
        say(f"{self._name}: done in {time.monotonic() - self._began_s:.0f} s")
