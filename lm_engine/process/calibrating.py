"""A calibration between the turns of the language stage's loop.

Owns: CalibrationTurns: one measured step per turn, what is said of it, and its end. Does not own:
the measurement (lm_engine/calibration.py), or the loop (language.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Protocol

from chunked_prefill.calibration_file import (
    CALIBRATION_S,
    Calibration,
    CalibrationError,
    CalibrationProgress,
)
from lm_engine.outputs import RequestError
from lm_engine.process.messages import Calibrated

logger = logging.getLogger(__name__)

_AT_START = "measuring step times"
_INTERRUPTED = RequestError("overloaded", "a request came while step times were measured")
_FAILED = RequestError("internal", "the engine failed while its step times were measured")


class Calibratable(Protocol):
    def calibrate(self, seconds: float) -> Iterator[CalibrationProgress | Calibration]: ...

    @property
    def num_requests(self) -> int: ...


def calibrate_before_serving(
    engine: Calibratable, report: Callable[[str, float, float], None], settle: Callable[[], object]
) -> None:
    """`settle` is called before every step, for the number of threads. An engine that cannot be
    calibrated serves nevertheless, with what its first steps teach."""
    try:
        for item in engine.calibrate(CALIBRATION_S):
            if isinstance(item, CalibrationProgress):
                report(_AT_START, min(item.done_s, item.total_s), item.total_s)
            settle()
    except CalibrationError as error:
        logger.warning("Step times were not measured: %s", error)


class CalibrationTurns:
    """At most one calibration. `send` takes what its asker should hear."""

    def __init__(self, engine: Calibratable, send: Callable[[Calibrated], object]) -> None:
        self._engine = engine
        self._send = send
        self._items: Iterator[CalibrationProgress | Calibration] | None = None

    @property
    def running(self) -> bool:
        return self._items is not None

    def start(self, seconds: float) -> None:
        if self._items is not None:
            self._send(Calibrated(error=RequestError("overloaded", "a calibration is under way")))
            return
        self._items = self._engine.calibrate(seconds)

    def advance(self) -> None:
        """One step of it, unless somebody wants to be served."""
        if self._items is None:
            return
        if self._engine.num_requests:
            self._end(Calibrated(error=_INTERRUPTED))
            return
        try:
            item = next(self._items)
        except CalibrationError as error:
            self._end(Calibrated(error=RequestError("overloaded", str(error))))
        except Exception:
            logger.exception("the calibration failed")
            self._end(Calibrated(error=_FAILED))
        else:
            if isinstance(item, Calibration):
                self._end(Calibrated(result=item))
            else:
                self._send(Calibrated(progress=item))

    def _end(self, message: Calibrated) -> None:
        self._items = None
        self._send(message)
