"""The import directions of the design, read from the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
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
API_ONLY = {
    "fastapi",
    "pydantic",
    "pydantic_settings",
    "starlette",
    "uvicorn",
    "cyclopts",
    "prometheus_client",
    "structlog",
    "rich",
    "httpx",
}
NO_TORCH_FOLDERS = ("chunked_prefill", "api")
REPORTS_ON_TORCH = "api/doctor.py"
"""Imports torch when it is asked about it, in a process that serves nothing."""


def _modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def _imports(path: Path) -> Iterator[str]:
    """Top-level names of everything that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_import_in_one_direction(folder: str) -> None:
    others = set(FOLDERS) - {folder}
    for path in _modules(folder):
        wrong = (set(_imports(path)) & others) - MAY_IMPORT[folder]
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


@pytest.mark.parametrize("folder", [f for f in FOLDERS if f not in ("api", "demo_model")])
def test_only_the_api_needs_web_libraries(folder: str) -> None:
    for path in _modules(folder):
        wrong = set(_imports(path)) & API_ONLY
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


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
        "chunked_prefill.scheduler",
        "kv_offload.kv_manager",
        "kv_offload.layout",
        "lm_engine.client",
        "lm_engine.admission",
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
            assert "not own" in doc, f"{path.relative_to(ROOT)} does not say what it does not own"
