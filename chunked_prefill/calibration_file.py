"""What was measured of a model on a machine, as a value and as a file.

Owns: Calibration, its JSON, and the folder that keeps it for the next start. Does not own: the
measurement (lm_engine/calibration.py), or what tells one machine and configuration from another
(lm_engine/calibration_cache.py). Imports no torch.

A file says what it was measured of, so that one under a wrong name is not believed; it is replaced
as a whole or not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Any

from chunked_prefill.encode_time import EncodeTimeModel
from chunked_prefill.step_time import StepTimeModel

_log = logging.getLogger(__name__)

CALIBRATION_S = 45.0
"""Usual length of a calibration."""
_FORMAT = 1


class CalibrationFileError(ValueError):
    """Not a calibration; the message says what is wrong with it."""


class CalibrationError(RuntimeError):
    """An engine cannot be calibrated now; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Times of one model in one configuration on one machine."""

    model: StepTimeModel
    residuals: tuple[float, ...]
    """Measured over predicted at evenly spaced quantiles, ascending."""
    spread: float
    """Median |time / median time of the same step - 1|: what no model can foretell."""
    steps: int
    seconds: float
    """That the measurement took."""
    encode: EncodeTimeModel | None = None
    """Of images, where the model takes some."""


@dataclass(frozen=True, slots=True)
class CalibrationProgress:
    """Of one that is under way."""

    detail: str
    done_s: float
    total_s: float


def to_json(calibration: Calibration) -> dict[str, Any]:
    return asdict(calibration)


def from_json(body: object) -> Calibration:
    """Raises CalibrationFileError."""
    given = _fields_of(body, Calibration)
    encode = given["encode"]
    residuals = given["residuals"]
    if not isinstance(residuals, list | tuple) or len(residuals) < 2:
        raise CalibrationFileError("residuals is not a list of quantiles")
    quantiles = tuple(_number("residuals", value) for value in residuals)
    if list(quantiles) != sorted(quantiles) or quantiles[0] <= 0:
        raise CalibrationFileError("residuals are not ascending and above 0")
    model: dict[str, Any] = _numbers(given["model"], StepTimeModel)
    return Calibration(
        StepTimeModel(**{**model, "knee_tokens": int(model["knee_tokens"])}),
        quantiles,
        _number("spread", given["spread"]),
        int(_number("steps", given["steps"])),
        _number("seconds", given["seconds"]),
        None if encode is None else EncodeTimeModel(**_numbers(encode, EncodeTimeModel)),
    )


def _fields_of(body: object, kind: type[Any]) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    if not isinstance(body, dict) or set(body) != names:
        raise CalibrationFileError(f"expected an object with {', '.join(sorted(names))}")
    return body


def _numbers(body: object, kind: type[Any]) -> dict[str, Any]:
    return {name: _number(name, value) for name, value in _fields_of(body, kind).items()}


def _number(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise CalibrationFileError(f"{name} is {value!r}, expected a number")
    if not isfinite(value) or value < 0:
        raise CalibrationFileError(f"{name} is {value!r}, expected a number from 0 on")
    return value


class CalibrationFile:
    """The place of one calibration. `of`: what its times depend on, in plain words and numbers."""

    def __init__(self, folder: Path, of: Mapping[str, str | int]) -> None:
        self._of = dict(of)
        name = hashlib.sha256(json.dumps(self._of, sort_keys=True).encode()).hexdigest()[:32]
        self.path = folder / f"{name}.json"

    def load(self) -> Calibration | None:
        """None when there is none; one that is damaged is named in the log and counts as none."""
        try:
            body = json.loads(self.path.read_bytes())
            if not isinstance(body, dict) or body.get("format") != _FORMAT:
                raise CalibrationFileError(f"its format is not {_FORMAT}")
            if body.get("of") != self._of:
                raise CalibrationFileError("it was measured of something else")
            return from_json(body.get("calibration"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            _log.warning("The calibration %s is not used: %s", self.path, error)
            return None

    def save(self, calibration: Calibration) -> None:
        """A folder that cannot be written is named in the log: the next start measures again."""
        body = {"format": _FORMAT, "of": self._of, "calibration": to_json(calibration)}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.path.parent, suffix=".part")
            try:
                with os.fdopen(handle, "w") as file:
                    json.dump(body, file, indent=1)
                os.replace(name, self.path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name)
                raise
        except OSError as error:
            _log.warning("The calibration could not be kept at %s: %s", self.path, error)
