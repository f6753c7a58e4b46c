"""A real `longlens serve` in processes of its own, for tests that talk HTTP to it.

Owns: Served (start, readiness, what /metrics and /proc say of it, its end) and `until`, waiting
with a deadline. Does not own: requests (client.py) or assertions.

Every server is ended through the process id that was started here; its stages end with it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).parents[2]
MODEL_NAME = "tiny"
_START_S = 90.0
"""Generous: a loaded CI machine imports torch slowly. A healthy start takes about 4 s."""
_METRIC = re.compile(r"^vllm:(\w+)\{[^}]*\} ([-+0-9.e]+)$", re.MULTILINE)

T = TypeVar("T")


def until(look: Callable[[], T | None], what: str, *, within_s: float = 20.0) -> T:
    """The first true value of `look`. Raises AssertionError when none came in time."""
    deadline = time.monotonic() + within_s
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {within_s} s")
        time.sleep(0.02)


def environment() -> dict[str, str]:
    """Ours without what only tests know: a server refuses settings that it does not."""
    return {name: value for name, value in os.environ.items() if name != "LONGLENS_TRACES"}


class Served:
    """A server that is ready when the constructor returns. `model` is a checkpoint folder."""

    def __init__(self, model: Path, folder: Path, *flags: str) -> None:
        self.port = _free_port()
        self._log = folder / f"server-{self.port}.log"
        command = [
            *(sys.executable, "-m", "api.cli", "serve", str(model)),
            *("--port", str(self.port), "--threads", "1", "--served-model-name", MODEL_NAME),
            *flags,
        ]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(),
            )
        try:
            until(self._ready_or_dead, "the server is ready", within_s=_START_S)
        except BaseException:
            self.stop()
            raise

    def _ready_or_dead(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"the server ended: {self.log()}")
        return self.health() == 200

    # -- what it says --------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def health(self) -> int | None:
        """Status of /health; None when nobody answers."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except OSError:
            return None

    def metrics(self) -> dict[str, float]:
        """Plain gauges and counters, without the prefix."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        return {name: float(value) for name, value in _METRIC.findall(text)}

    def rest(self, within_s: float = 60.0) -> None:
        """Waits until nothing runs or waits, and nothing is held: blocks, rows, or requests.
        Raises AssertionError with what is still held."""
        deadline = time.monotonic() + within_s
        while held := self._held():
            if time.monotonic() > deadline:
                raise AssertionError(f"still held after {within_s} s: {held}")
            time.sleep(0.02)

    def _held(self) -> dict[str, float]:
        names = (
            *("num_requests_running", "num_requests_waiting", "http_requests_in_flight"),
            *("kv_blocks_used", "embedding_rows_used"),
        )
        found = self.metrics()
        return {name: found[name] for name in names if found[name]}

    def log(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]

    # -- its processes -------------------------------------------------------------------------

    def family(self) -> dict[int, str]:
        """Process ids and names of the stages and the supervisor."""
        found: dict[int, str] = {}
        todo = [self.process.pid]
        while todo:
            for child in _children(todo.pop()):
                with contextlib.suppress(OSError):
                    found[child] = Path(f"/proc/{child}/comm").read_text().strip()
                    todo.append(child)
        return found

    def stage(self, name: str) -> int | None:
        """Process id of the stage `name` (language or vision); None while there is none."""
        return next((pid for pid, comm in self.family().items() if comm == f"ll-{name}"), None)

    # -- its end -------------------------------------------------------------------------------

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float) -> int:
        return self.process.wait(timeout_s)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)


def alive(pid: int) -> bool:
    """Whether the process exists and is more than an entry that its parent has not read yet."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def kill(pid: int, sig: signal.Signals) -> None:
    os.kill(pid, sig)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text().split())
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
