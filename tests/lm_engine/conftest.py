"""Fixtures of the engine's tests: one lab per family and session, one torch thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.lm_engine.harness import Lab


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Lab]:
    """lab(family): built at the first call, then shared."""
    root = tmp_path_factory.mktemp("engine_checkpoints")
    known: dict[str, Lab] = {}

    def get(family: str) -> Lab:
        if family not in known:
            known[family] = Lab(family, root)
        return known[family]

    return get


@pytest.fixture(autouse=True)
def _one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tiny matrices lose by threads. The folders below decide for themselves."""
    before = torch.get_num_threads()
    if request.path.parent != Path(__file__).parent:
        yield
        return
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
