"""A calibration on disk is believed only if it is whole and was measured of the same thing."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chunked_prefill.calibration_file import (
    Calibration,
    CalibrationFile,
    CalibrationFileError,
    from_json,
    to_json,
)
from chunked_prefill.encode_time import EncodeTimeModel
from chunked_prefill.step_time import StepTimeModel

MODEL = StepTimeModel(0.01, 1e-4, 1e-3, 1e-6, 1e-7, 2e-6, 5e-4, 16)
FOUND = Calibration(MODEL, (0.8, 1.0, 1.3), 0.02, 200, 44.5, EncodeTimeModel(0.01, 1e-4, 1e-8))
OF: dict[str, str | int] = {"model": "ab", "threads": 2}


@pytest.mark.parametrize("calibration", [FOUND, replace(FOUND, encode=None)])
def test_it_comes_back_as_it_was(tmp_path: Path, calibration: Calibration) -> None:
    file = CalibrationFile(tmp_path / "new", OF)
    assert file.load() is None
    file.save(calibration)
    assert CalibrationFile(tmp_path / "new", OF).load() == calibration
    assert [p.name for p in (tmp_path / "new").iterdir()] == [file.path.name]


def test_another_configuration_has_another_place(tmp_path: Path) -> None:
    CalibrationFile(tmp_path, OF).save(FOUND)
    assert CalibrationFile(tmp_path, {**OF, "threads": 3}).load() is None


def damaged(body: dict[str, Any], *path: str, value: object) -> bytes:
    place = body
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    return json.dumps(body).encode()


def body() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        json.dumps({"format": 1, "of": OF, "calibration": to_json(FOUND)})
    )
    return found


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        damaged(body(), "format", value=0),
        damaged(body(), "of", value={"model": "other", "threads": 2}),
        damaged(body(), "calibration", value=None),
        damaged(body(), "calibration", "model", "token_s", value=-1.0),
        damaged(body(), "calibration", "model", "token_s", value=float("nan")),
        damaged(body(), "calibration", "model", "token_s", value="1"),
        damaged(body(), "calibration", "model", "more", value=1.0),
        damaged(body(), "calibration", "residuals", value=[1.2, 0.8]),
        damaged(body(), "calibration", "residuals", value=[]),
        damaged(body(), "calibration", "encode", value={"image_s": 1.0}),
    ],
)
def test_a_damaged_file_is_named_and_counts_as_none(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    file = CalibrationFile(tmp_path, OF)
    file.path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert file.load() is None
    assert str(file.path) in caplog.text


def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "taken").write_text("a file")
    with caplog.at_level(logging.WARNING):
        CalibrationFile(tmp_path / "taken", OF).save(FOUND)
    assert "could not be kept" in caplog.text


def test_the_fault_is_named() -> None:
    with pytest.raises(CalibrationFileError, match="expected an object with"):
        from_json({"model": 1})
    with pytest.raises(CalibrationFileError, match="spread is -1"):
        from_json({**to_json(FOUND), "spread": -1})
