"""Starting the servers that are compared, each in its own environment.

Owns: one Server per peer (command, port, readiness, memory) and their clean end. Does not own:
workloads (peers.py). Only processes started here are ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(slots=True)
class Server:
    """A peer's server; `command` contains {port} and {model}."""

    name: str
    command: list[str]
    model: str
    served_name: str
    env: dict[str, str] = field(default_factory=dict)
    port: int = 0
    process: subprocess.Popen[bytes] | None = None
    start_s: float = 0.0
    """Seconds from the start of the process to the first good /health."""

    def start(self, log_folder: Path, timeout_s: float = 600.0) -> None:
        self.port = _free_port()
        command = [part.format(port=self.port, model=self.model) for part in self.command]
        begin = time.perf_counter()
        with (log_folder / f"{self.name}.log").open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.env},
                start_new_session=True,
                cwd=ROOT,
            )
        while time.perf_counter() - begin < timeout_s:
            if self.process.poll() is not None:
                raise RuntimeError(
                    f"{self.name} ended with {self.process.returncode}; see {log.name}"
                )
            if _healthy(self.port):
                self.start_s = time.perf_counter() - begin
                return
            time.sleep(0.1)
        self.stop()
        raise RuntimeError(f"{self.name} was not ready after {timeout_s} s; see {log.name}")

    def stop(self) -> None:
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self.pause(False)
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(5)
        self.process = None

    def pause(self, paused: bool) -> None:
        """Stops or continues a server's processes: some spin while they are idle. Ours do not, and
        its supervisor would take a stop for a fault."""
        if self.process is None or self.name == "longlens":
            return
        for pid in family(self):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP if paused else signal.SIGCONT)

    def memory_bytes(self) -> int:
        """Proportional set size of the server's processes together."""
        return sum(pss_bytes(pid) for pid in family(self))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _family(pid: int) -> Iterator[int]:
    """The process and all its descendants."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in task.read_text().split():
                yield from _family(int(child))


def family(server: Server) -> list[int]:
    """Process ids of a running server and all its descendants."""
    return [] if server.process is None else list(_family(server.process.pid))


def pss_bytes(pid: int) -> int:
    """Proportional set size of one process; 0 when it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def longlens(model: str, threads: int, *extra: str) -> Server:
    command = [
        *(sys.executable, "-m", "api.cli", "serve", "{model}", "--port", "{port}"),
        *("--threads", str(threads), "--served-model-name", "m", *extra),
    ]
    return Server("longlens", command, model, "m")


def transformers(model: str, threads: int, mode: str) -> Server:
    """`mode` is generate or continuous; the HTTP shell is benchmarks/transformers_server.py."""
    command = [
        *(sys.executable, "-m", "benchmarks.transformers_server", "{model}", "{port}", mode),
        str(threads),
    ]
    return Server(f"transformers-{mode}", command, model, "m")


def vllm(python: str, model: str, threads: int, *extra: str) -> Server:
    command = [
        *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", "{model}"),
        *("--port", "{port}", "--host", "127.0.0.1", "--served-model-name", "m"),
        *("--dtype", "float32", "--no-enable-prefix-caching", *extra),
    ]
    binding = "0" if threads == 1 else f"0-{threads - 1}"
    env = {
        "VLLM_CPU_OMP_THREADS_BIND": binding,
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "OMP_NUM_THREADS": str(threads),
    }
    return Server("vllm-cpu", command, model, "m", env)


def llama(python: str, gguf: str, threads: int, name: str = "llama.cpp") -> Server:
    command = [
        python,
        str(ROOT / "benchmarks" / "llama_server.py"),
        "{model}",
        "{port}",
        str(threads),
    ]
    return Server(name, command, gguf, "m")
