"""The import directions of the design, read from the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("api", "lm_engine", "chunked_prefill", "kv_offload", "vision_encoder", "demo_model")
MAY_IMPORT = {
    "api": {"lm_engine", "chunked_prefill", "kv_offload", "vision_encoder", "demo_model"},
    "lm_engine": {"chunked_prefill", "kv_offload", "vision_encoder"},
    "chunked_prefill": {"kv_offload"},
    "kv_offload": set(),
    "vision_encoder": set(),
    "demo_model": {"lm_engine", "vision_encoder"},
}
GPU_HOST = {
    *("torch", "triton", "transformers", "torchvision", "safetensors", "numpy", "PIL"),
    *("tokenizers", "huggingface_hub", "tqdm"),  # come with transformers
}
"""What the folders below `api` may need: GPU hosts often have just that (DESIGN, section 2)."""
OPTIONAL = {
    "lm_engine/process/wire.py": {"msgspec"},
    "vision_encoder/media.py": {"blake3"},
}
"""Imported inside a function that says what is missing, or does without."""
NO_TORCH_FOLDERS = ("chunked_prefill", "api")
REPORTS_ON_TORCH = "api/doctor.py"
"""Imports torch when it is asked about it, in a process that serves nothing."""


def _modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def _imports(path: Path) -> Iterator[str]:
    """Top-level names of everything that a file imports, also inside functions."""
    yield from _names(ast.walk(ast.parse(path.read_text())))


def _imports_at_start(path: Path) -> Iterator[str]:
    """Of the statements that run, or are checked, when the module is imported."""
    body = ast.parse(path.read_text()).body
    yield from _names(node for top in body for node in ast.walk(top) if not _defines(top))


def _defines(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


def _names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute, so that their direction can be read"
            yield (node.module or "").split(".")[0]


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_import_in_one_direction(folder: str) -> None:
    others = set(FOLDERS) - {folder}
    for path in _modules(folder):
        wrong = (set(_imports(path)) & others) - MAY_IMPORT[folder]
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


@pytest.mark.parametrize("folder", [f for f in FOLDERS if f not in ("api", "demo_model")])
def test_the_engine_runs_with_what_gpu_hosts_have(folder: str) -> None:
    known = GPU_HOST | set(FOLDERS) | sys.stdlib_module_names
    for path in _modules(folder):
        name = str(path.relative_to(ROOT))
        wrong = set(_imports(path)) - known - OPTIONAL.get(name, set())
        assert not wrong, f"{name} imports {sorted(wrong)}"
        wrong = set(_imports_at_start(path)) - known
        assert not wrong, f"{name} imports {sorted(wrong)} when it is imported"


@pytest.mark.parametrize("folder", NO_TORCH_FOLDERS)
def test_torch_free_folders_name_no_torch(folder: str) -> None:
    for path in _modules(folder):
        name = str(path.relative_to(ROOT))
        assert name == REPORTS_ON_TORCH or "torch" not in set(_imports(path)), name


@pytest.mark.parametrize(
    "module",
    [
        "api.app",
        "api.cli",
        "api.serve",
        "api.terminal_chat",
        "chunked_prefill.scheduler",
        "demo_model.assemble",
        "kv_offload.kv_manager",
        "kv_offload.layout",
        "lm_engine.admission",
        "lm_engine.client",
        "lm_engine.process.client",
        "vision_encoder.embedding_arena",
        "vision_encoder.grid",
        "vision_encoder.media",
    ],
)
def test_importing_does_not_load_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert done.returncode == 0, f"importing {module} loads torch"


@pytest.mark.parametrize("folder", [f for f in FOLDERS if f != "demo_model"])
def test_every_module_says_what_it_owns(folder: str) -> None:
    for path in _modules(folder):
        doc = ast.get_docstring(ast.parse(path.read_text()))
        assert doc, f"{path.relative_to(ROOT)} has no opening"
        if path.name != "__init__.py":
            assert "Owns:" in doc, f"{path.relative_to(ROOT)} does not say what it owns"
            assert "not own" in " ".join(doc.split()), (
                f"{path.relative_to(ROOT)} does not say what it does not own"
            )
