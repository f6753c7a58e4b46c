"""The assembled demo, once for all of this folder's tests; skipped where its package is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo_model.assemble import DemoUnavailable, assemble


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return assemble(tmp_path_factory.mktemp("demo"))
    except DemoUnavailable as error:
        pytest.skip(str(error))
