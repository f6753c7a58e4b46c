"""Which calibration belongs to an engine, and where it is kept.

Owns: what the times of steps depend on, in words. Does not own: the file
(chunked_prefill/calibration_file.py), or the measurement (calibration.py).
"""

from __future__ import annotations

import hashlib
import os
import platform
from importlib.metadata import version
from pathlib import Path

import torch

from chunked_prefill.calibration_file import CalibrationFile
from kv_offload.radix_cache import CacheKey
from lm_engine.native.library import cache_folder
from lm_engine.options import EngineOptions


def calibration_file(
    options: EngineOptions, key: CacheKey, device: torch.device, *, kernels: str
) -> CalibrationFile:
    """`key` stands for the model and the type of its KV, `kernels` for what computes with them."""
    of: dict[str, str | int] = {
        "model": key.model.hex(),
        "kv": key.kv_dtype,
        "rope": hashlib.sha256(repr(key.rope).encode()).hexdigest()[:16],
        "dtype": options.dtype,
        "device": _device_name(device),
        "cores": len(os.sched_getaffinity(0)) if device.type == "cpu" else 0,
        "threads": options.threads or 0,
        "block_size": options.block_size,
        "kernels": kernels,
        "vision_process": int(options.vision_process),
        "torch": torch.__version__,
        "longlens": version("longlens"),
    }
    return CalibrationFile(cache_folder() / "calibrations", of)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _cpu_name() or platform.machine()


def _cpu_name() -> str:
    """Model and what else the kernel says about the first core that is the same for all."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return platform.processor()
    told = dict(part.split(":", 1) for part in lines if ":" in part)
    words = {name.strip(): value.strip() for name, value in told.items()}
    return " ".join(words.get(n, "") for n in ("model name", "cpu family", "model", "stepping"))
