"""Servers that tests share: they are started once, and tests leave them idle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.checkpoints import checkpoint
from tests.e2e.server import Served

Starter = Callable[..., Served]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `checkpoint(name, models)` writes."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def serve(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    """`serve("qwen2_5_vl", "--flag", "value")`; all are ended after the module."""
    started: list[Served] = []
    logs = tmp_path_factory.mktemp("logs")

    def start(family: str, *flags: str) -> Served:
        started.append(Served(checkpoint(family, models), logs, *flags))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def served(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server of a tiny Qwen2.5-VL for every test that leaves it as it found it."""
    server = Served(checkpoint("qwen2_5_vl", models), tmp_path_factory.mktemp("served"))
    yield server
    server.stop()
