"""The library is compiled once, and its absence has a reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lm_engine.native import library


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Each test loads anew, and keeps what it compiles in a folder of its own."""
    monkeypatch.setenv("LONGLENS_CACHE", str(tmp_path))
    library.load.cache_clear()
    yield
    library.load.cache_clear()


def compiled(folder: Path) -> list[Path]:
    return sorted((folder / "native").iterdir())


def test_it_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        library.load()
    except library.NativeUnavailableError as error:
        pytest.skip(str(error))
    (first,) = compiled(tmp_path)
    library.load.cache_clear()

    def never(*_: object) -> None:
        raise AssertionError("compiled twice")

    monkeypatch.setattr(library, "_compile", never)
    assert library.load().longlens_panel() > 0
    assert compiled(tmp_path) == [first]


def test_no_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    with pytest.raises(library.NativeUnavailableError, match=r"install g\+\+"):
        library.load()


def test_a_failing_compiler_says_what_it_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho no such flag >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(library.NativeUnavailableError, match="no such flag"):
        library.load()
    assert compiled(tmp_path) == []


def test_an_unwritable_cache_is_passed_by(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(
        library, "_folders", lambda: (tmp_path / "file" / "native", tmp_path / "native")
    )
    try:
        library.load()
    except library.NativeUnavailableError as error:
        pytest.skip(str(error))
    assert len(compiled(tmp_path)) == 1
    library.load.cache_clear()
    monkeypatch.setattr(library, "_folders", lambda: (tmp_path / "file" / "native",))
    with pytest.raises(library.NativeUnavailableError, match="set LONGLENS_CACHE"):
        library.load()


def test_a_folder_that_others_can_write_to_is_passed_by(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setattr(library, "_folders", lambda: (shared,))
    with pytest.raises(library.NativeUnavailableError, match="a folder of your own"):
        library.load()
    assert list(shared.iterdir()) == []


def test_a_damaged_library_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def damaged(compiler: str, sources: list[Path], target: Path) -> None:
        target.write_bytes(b"no library")

    monkeypatch.setattr(library, "_compile", damaged)
    monkeypatch.setattr(library, "_folders", lambda: (tmp_path / "native",))
    with pytest.raises(library.NativeUnavailableError, match="can be kept in none of"):
        library.load()
    assert compiled(tmp_path) == []
