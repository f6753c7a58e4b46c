"""Where a model's files lie.

Owns: turning `--model` (demo, a path, a hub id) into a local path, and the start errors of doing
so, in the order in which a person looks: is it there, is it a model, has it weights. Does not own:
reading weights (lm_engine), or what the files mean. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

DEMO = "demo"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")

Progress = Callable[[str, float], None]


class ModelFolderError(Exception):
    """The model cannot be found; the message says what would work."""


def cache_dir() -> Path:
    """LONGLENS_CACHE, or `longlens` under the user's cache folder."""
    own = os.environ.get("LONGLENS_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "longlens"


def resolve_model(model: str, progress: Progress | None = None) -> Path:
    """A folder or a GGUF file. Whatever exists on disk makes no network call."""
    path = Path(model).expanduser()
    if path.exists():
        return _checked(path)
    if model == DEMO:
        return _demo(progress)
    if _HUB_ID.fullmatch(model) and not model.endswith(".gguf"):
        return _checked(_download(model))
    raise ModelFolderError(
        f"{model} does not exist. Give a folder with config.json and safetensors weights, a .gguf "
        "file, a hub id such as HuggingFaceTB/SmolLM2-135M-Instruct, or nothing for the demo."
    )


def gguf_tokenizer(model: Path) -> Path:
    """The folder of a tokenizer written from a GGUF file's own metadata, made once per file.

    Another process writes it, because reading the container needs torch, which this one does
    without. Raises ModelFolderError.
    """
    stat = model.stat()
    folder = cache_dir() / "tokenizers" / f"{model.stem}-{stat.st_size}-{stat.st_mtime_ns}"
    if (folder / "tokenizer.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / "tokenizer"
        command = [sys.executable, "-m", "lm_engine.models.gguf_tokenizer", str(model), str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            cause = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise ModelFolderError(
                f"No tokenizer can be read from {model}: {cause} Pass --tokenizer FOLDER, a "
                "folder saved by transformers for this model."
            )
        with contextlib.suppress(OSError):  # another server was faster
            made.rename(folder)
    return folder


def _checked(path: Path) -> Path:
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelFolderError(f"{path} is a file but not .gguf. Give its folder instead.")
        return path
    configured = (path / "config.json").is_file()
    if configured and _names(path, "*.safetensors"):
        return path
    files = _names(path, "*.gguf")
    if len(files) == 1:
        return path / files[0]
    if files:
        raise ModelFolderError(
            f"{path} holds {len(files)} GGUF files; name one of them: {', '.join(files[:5])}."
        )
    if not configured:
        raise ModelFolderError(
            f"{path} holds neither config.json nor a .gguf file, so it is not a model. Give the "
            "folder that directly contains config.json."
        )
    raise ModelFolderError(_no_weights(path))


def _names(folder: Path, pattern: str) -> list[str]:
    return sorted(file.name for file in folder.glob(pattern))


def _no_weights(folder: Path) -> str:
    pickled = [name for suffix in _PICKLED for name in _names(folder, f"*{suffix}")]
    if pickled:
        return (
            f"{folder} has only pickled weights ({', '.join(pickled[:3])}), which can run code "
            "when they are read. Load the model with transformers somewhere safe and save it again "
            "(save_pretrained writes safetensors)."
        )
    return (
        f"{folder} has a config.json but no weights: no *.safetensors and no .gguf file. Download "
        "the model whole, or give the folder that holds its weights."
    )


def _demo(progress: Progress | None) -> Path:
    from demo_model.assemble import DemoUnavailable, assemble

    try:
        return assemble(cache_dir(), progress)
    except DemoUnavailable as error:
        raise ModelFolderError(f"The demo model cannot be assembled: {error}") from error
    except OSError as error:
        raise ModelFolderError(
            f"The demo model cannot be written to {cache_dir()} ({error.strerror}). Set "
            "LONGLENS_CACHE to a writable folder."
        ) from error


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            hub_id,
            allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"],
            ignore_patterns=["consolidated*", "original/*", "onnx/*", "*/*.safetensors"],
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelFolderError(
            f"{hub_id} is neither a local path nor could it be fetched from the hub "
            f"({type(error).__name__}). Check the name, the network, and HF_TOKEN for gated "
            "models; with HF_HUB_OFFLINE=1 it must be in the cache."
        ) from error
    return Path(folder)
