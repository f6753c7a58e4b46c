"""Finding a model and what lies beside its weights.

Owns: Checkpoint (configuration, generation configuration, weight source, folder), resolving a
path or a hub id to files, how much memory a device has free.
Does not own: the meaning of the configuration (config.py), filling models (loader.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lm_engine.models.errors import ModelNotFoundError, UnsupportedModelError
from lm_engine.models.weights import SafetensorsSource, WeightSource, read_json

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
_HUB_IGNORED = ["consolidated*", "original/*", "onnx/*", "*/*.safetensors"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened model: configuration read, weights mapped."""

    name: str
    """The hub id, or the folder's or file's name."""
    path: Path
    """The folder, or the GGUF file."""
    config: dict[str, Any]
    """config.json, or its equivalent made from GGUF metadata."""
    generation_config: dict[str, Any]
    """generation_config.json; empty when there is none."""
    source: WeightSource

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Token ids that end a generation: generation_config's, else the configuration's."""
        text = self.config.get("text_config") or {}
        for where in (self.generation_config, self.config, text):
            found = where.get("eos_token_id")
            if found is not None:
                return tuple(found) if isinstance(found, list) else (int(found),)
        return ()

    def close(self) -> None:
        """Unmaps the weights."""
        self.source.close()


def open_checkpoint(model: str | Path, *, revision: str | None = None) -> Checkpoint:
    """Opens a folder, a .gguf file, or a hub id ("owner/name", fetched unless cached).

    Whatever exists on disk, or looks like a path, makes no network call. HF_HUB_OFFLINE is
    honoured. Raises LoadError.
    """
    path = Path(model).expanduser()
    name = str(model)
    if path.exists():
        name = path.resolve().name
    elif isinstance(model, str) and _HUB_ID.fullmatch(model) and not model.endswith(".gguf"):
        path = _fetch(model, revision)
    else:
        raise ModelNotFoundError(
            f"{model} does not exist. Give a folder with config.json and safetensors weights, a "
            ".gguf file, or a hub id such as HuggingFaceTB/SmolLM2-135M-Instruct."
        )
    whole = (path / "config.json").exists() and any(path.glob("*.safetensors"))
    if path.is_dir() and not whole:
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) > 1:
            raise ModelNotFoundError(
                f"{path} holds {len(ggufs)} GGUF files; name one of them: "
                f"{', '.join(file.name for file in ggufs[:5])}."
            )
        path = ggufs[0] if ggufs else path
    if path.is_file():
        return _open_gguf(name, path)
    config = read_json(path / "config.json")
    _refuse_quantised(path, config)
    generation = path / "generation_config.json"
    return Checkpoint(
        name,
        path,
        config,
        read_json(generation) if generation.exists() else {},
        SafetensorsSource(path),
    )


def _open_gguf(name: str, path: Path) -> Checkpoint:
    from lm_engine.models.gguf import GGUFSource

    source = GGUFSource(path)
    return Checkpoint(name, path, source.config, source.generation_config, source)


def _refuse_quantised(path: Path, config: Mapping[str, Any]) -> None:
    found = config.get("quantization_config")
    if found:
        raise UnsupportedModelError(
            f"{path}/config.json has a quantization_config of method "
            f"{found.get('quant_method', 'unknown')!r}. Supported are unquantised safetensors and "
            "GGUF."
        )


def _fetch(hub_id: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelNotFoundError(
            f"{hub_id} is not a local path, and fetching it needs the package huggingface-hub: "
            "pip install huggingface-hub."
        ) from error
    try:
        folder = snapshot_download(
            hub_id,
            revision=revision,
            allow_patterns=_HUB_FILES,
            ignore_patterns=_HUB_IGNORED,
        )
    except Exception as error:
        # The hub's client lets its transport's own exceptions through, and which they are changes
        # with its version; whatever it was, the model is not here.
        raise ModelNotFoundError(
            f"{hub_id} is neither a local path nor could it be fetched from the hub "
            f"({type(error).__name__}). Check the name, the network, and HF_TOKEN for gated "
            "models; with HF_HUB_OFFLINE=1 it must be in the cache."
        ) from error
    return Path(folder)


def available_bytes(device: torch.device) -> int | None:
    """Memory that could still be allocated on a device; None when it cannot be known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    found = [value for value in (_meminfo(), _cgroup()) if value is not None]
    return min(found, default=None)


def _meminfo() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup() -> int | None:
    """What the container's limit leaves, page cache that would be given back not counted as used.
    Version 2 of the interface first, then version 1."""
    root = Path("/sys/fs/cgroup")
    for limit, used in (
        (root / "memory.max", root / "memory.current"),
        (root / "memory/memory.limit_in_bytes", root / "memory/memory.usage_in_bytes"),
    ):
        try:
            total, now = limit.read_text().strip(), int(used.read_text())
            stat = (limit.parent / "memory.stat").read_text().split()
        except (OSError, ValueError):
            continue
        if not total.isdigit():
            return None
        cache = dict(zip(stat[::2], stat[1::2], strict=False)).get("inactive_file", "0")
        return max(0, int(total) - now + int(cache))
    return None
