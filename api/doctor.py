"""`longlens doctor`: whether this machine can serve, and what it would use.

Owns: the checks and their remedies. Does not own: repairing anything.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from api.model_folder import cache_dir

Verdict = Literal["ok", "warn", "fail"]
_GIB = 2**30
_CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")


@dataclass(frozen=True, slots=True)
class Finding:
    verdict: Verdict
    name: str
    what: str
    remedy: str = ""


def examine() -> list[Finding]:
    findings = [_python(), _cpu(), _memory(), *_packages(), *_torch(), _cache(), _demo()]
    return [finding for finding in findings if finding is not None]


def _python() -> Finding:
    found = f"Python {platform.python_version()} on {platform.platform(terse=True)}"
    if sys.platform != "linux":
        return Finding("warn", "python", found, "serving needs Linux (process supervision)")
    return Finding("ok", "python", found)


def _cpu() -> Finding:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    flags: set[str] = set()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        match = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", info.read_text(), re.MULTILINE)
        flags = set(match[1].split()) if match else set()
    fast = [name for name in _CPU_FEATURES if name in flags]
    what = f"{usable} cores usable; {', '.join(fast) or 'no wide vector unit found'}"
    if not fast:
        return Finding("warn", "cpu", what, "expect slow decoding on this CPU")
    return Finding("ok", "cpu", what)


def _memory() -> Finding:
    info = Path("/proc/meminfo")
    if not info.is_file():
        return Finding("warn", "memory", "unknown on this system")
    kib = {
        name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+)", info.read_text(), re.M)
    }
    free, total = kib.get("MemAvailable", 0) / 2**20, kib.get("MemTotal", 0) / 2**20
    limit = _cgroup_limit_bytes()
    what = f"{free:.1f} GiB available of {total:.1f} GiB"
    if limit is not None and limit / _GIB < total:
        what += f"; this container may use {limit / _GIB:.1f} GiB"
        free = min(free, limit / _GIB)
    if free < 2:
        return Finding("warn", "memory", what, "the demo needs about 2 GiB; close other programs")
    return Finding("ok", "memory", what)


def _cgroup_limit_bytes() -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdecimal() and int(text) < 2**60:
            return int(text)
    return None


def _packages() -> Iterator[Finding]:
    """Each declared dependency that is missing or older than declared, or one line for all."""
    try:
        declared = importlib.metadata.requires("longlens") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding("warn", "packages", "longlens is not installed", "pip install -e .")
        return
    wrong = 0
    for line in declared:
        if "extra ==" in line:
            continue
        match = re.match(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*>=\s*([0-9.]+)", line)
        if match is None:
            continue
        name, least = match.groups()
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            wrong += 1
            yield Finding("fail", name, "not installed", f"pip install '{name}>={least}'")
            continue
        if _numbers(found) < _numbers(least):
            wrong += 1
            yield Finding(
                "fail", name, f"{found}, older than {least}", f"pip install -U '{name}>={least}'"
            )
    if not wrong:
        yield Finding("ok", "packages", f"{len(declared)} dependencies present and new enough")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except ImportError:
        return  # named by _packages already
    yield Finding(
        "ok", "torch", f"{torch.__version__}, {torch.get_num_threads()} threads by default"
    )
    if not torch.cuda.is_available():
        yield Finding("ok", "gpu", "none; the CPU path is used")
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        yield Finding("ok", "gpu", f"{name}: {free / _GIB:.1f} of {total / _GIB:.1f} GiB free")


def _cache() -> Finding:
    folder = cache_dir()
    present = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    free = shutil.disk_usage(present).free / _GIB
    what = f"{folder}, {free:.1f} GiB free"
    if not os.access(present, os.W_OK):
        return Finding("fail", "cache", f"{folder} is not writable", "set LONGLENS_CACHE")
    if free < 1:
        return Finding("warn", "cache", what, "the demo model needs about 0.6 GiB")
    return Finding("ok", "cache", what)


def _demo() -> Finding | None:
    from demo_model.assemble import DemoUnavailable, find_sources

    try:
        find_sources()
    except DemoUnavailable as error:
        return Finding("warn", "demo model", "not available", str(error))
    return Finding("ok", "demo model", "its files are present")
