"""Calibrating over the process boundary: progress, a result, and who comes first."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from chunked_prefill.calibration_file import (
    CALIBRATION_S,
    Calibration,
    CalibrationError,
    CalibrationProgress,
)
from chunked_prefill.step_time import StepTimeModel
from lm_engine.outputs import RequestError
from lm_engine.process.calibrating import CalibrationTurns, calibrate_before_serving
from lm_engine.process.messages import Calibrated
from tests.lm_engine.process.fakes import request
from tests.lm_engine.process.harness import collect, running, texts

FOUND = Calibration(StepTimeModel(0.02, 0.0, 1e-4, 0.0, 0.0), (0.9, 1.1), 0.02, 2, 0.1)


async def test_whoever_asks_sees_it_advance_and_its_result() -> None:
    async with running() as client:
        items = [item async for item in client.calibrate(7.0)]
        *progress, result = items
        assert isinstance(result, Calibration)
        assert result.seconds == 7.0
        assert len(progress) == 20
        assert all(isinstance(item, CalibrationProgress) for item in progress)
        assert texts(await collect(client, request("a"))) == "0 1 2 3 4 "


async def test_a_request_comes_first() -> None:
    async with running() as client:
        items = []
        async for item in client.calibrate(7.0):
            items.append(item)
            if len(items) == 3:
                served = asyncio.create_task(collect(client, request("a")))
        assert texts(await served) == "0 1 2 3 4 "
        assert isinstance(items[-1], RequestError)
        assert "a request came" in items[-1].message
        assert len(items) < 20


async def test_two_cannot_go_on_at_once() -> None:
    async with running() as client:
        first = client.calibrate(7.0)
        await anext(first)
        (second,) = [item async for item in client.calibrate(7.0)]
        assert isinstance(second, RequestError)
        assert "under way" in second.message
        assert [item async for item in first]


class Engine:
    def __init__(self, *items: CalibrationProgress | Calibration | Exception) -> None:
        self.items = items
        self.num_requests = 0
        self.asked: list[float] = []

    def calibrate(self, seconds: float) -> Iterator[CalibrationProgress | Calibration]:
        self.asked.append(seconds)
        for item in self.items:
            if isinstance(item, Exception):
                raise item
            yield item


STEP = CalibrationProgress("shape 1", 1.0, 45.0)


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (CalibrationError("too few blocks"), "overloaded", "too few blocks"),
        (RuntimeError("odd"), "internal", "failed"),
    ],
)
def test_a_fault_ends_it_and_nothing_else(
    fault: Exception, kind: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Calibrated] = []
    turns = CalibrationTurns(Engine(STEP, fault), told.append)
    turns.start(3.0)
    while turns.running:
        turns.advance()
    assert told[0].progress == STEP
    assert told[1].error is not None
    assert told[1].error.kind == kind
    assert words in told[1].error.message
    turns.advance()
    assert len(told) == 2


def test_a_second_start_is_refused_and_changes_nothing() -> None:
    told: list[Calibrated] = []
    turns = CalibrationTurns(Engine(STEP, FOUND), told.append)
    turns.start(3.0)
    turns.start(3.0)
    assert told[0].error is not None
    while turns.running:
        turns.advance()
    assert told[-1].result == FOUND


def test_before_serving_progress_is_reported_and_a_refusal_does_no_harm(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[tuple[str, float, float]] = []
    settled: list[int] = []
    engine = Engine(STEP, STEP, FOUND)
    calibrate_before_serving(engine, lambda *told: seen.append(told), lambda: settled.append(1))
    assert seen == [("measuring step times", 1.0, 45.0)] * 2
    assert len(settled) == 3
    assert engine.asked == [CALIBRATION_S]
    refuses = Engine(CalibrationError("too few blocks"))
    calibrate_before_serving(refuses, lambda *told: seen.append(told), lambda: None)
    assert "too few blocks" in caplog.text
