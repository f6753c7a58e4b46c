"""What users saw: formulas by hand, intervals by simulation, JSON without surprises."""

from __future__ import annotations

import json
from array import array
from math import inf, isnan

import numpy as np
import pytest

from chunked_prefill.goodput import (
    Distribution,
    Promise,
    Report,
    RequestTimes,
    bootstrap,
    goodput_over_time,
    percentile,
    request_json,
    wilson,
)


def _request(*delivered_s: float, tokens: int | None = None, **fields: object) -> RequestTimes:
    count = len(delivered_s) if tokens is None else tokens
    return RequestTimes("r", 10.0, delivered_s, count, **fields)  # type: ignore[arg-type]


def test_times_are_the_formulas() -> None:
    request = _request(10.5, 10.6, 11.0, 11.1)
    assert request.ttft_s == pytest.approx(0.5)
    assert request.e2e_s == pytest.approx(1.1)
    assert request.tpot_s == pytest.approx((1.1 - 0.5) / 3)
    assert request.max_gap_s == pytest.approx(0.4)


def test_deliveries_of_several_tokens_count_tokens_for_tpot_and_deliveries_for_gaps() -> None:
    request = _request(10.5, 11.0, 11.5, tokens=11)
    assert request.tpot_s == pytest.approx(0.1)
    assert request.max_gap_s == pytest.approx(0.5)


def test_one_token_has_no_tpot_and_breaks_no_such_promise() -> None:
    request = _request(10.5)
    assert request.tpot_s == 0.0
    assert request.max_gap_s == 0.0
    assert Promise(1.0, 0.001).missed(request) is None


def test_promises_are_kept_at_their_limit_and_broken_by_name() -> None:
    promise = Promise(0.5, 0.25)
    assert promise.missed(_request(10.5, 10.75)) is None
    assert promise.missed(_request(10.75, 10.8)) == "ttft"
    assert promise.missed(_request(10.5, 11.0)) == "tpot"
    assert promise.missed(_request(11.0, 12.0)) == "both"
    assert promise.missed(_request()) == "failed"
    assert promise.missed(_request(10.1, 10.2, error="timeout")) == "failed"


def test_a_long_prompt_is_promised_a_multiple_of_its_time_alone() -> None:
    promise = Promise(0.5, 1.0, isolated_factor=3.0)
    assert promise.missed(_request(12.9, 13.0, isolated_s=1.0)) is None
    assert promise.missed(_request(13.1, 13.2, isolated_s=1.0)) == "ttft"
    assert promise.missed(_request(10.5, 10.6, isolated_s=0.01)) is None
    assert promise.missed(_request(13.0, 13.1)) == "ttft"


# -- intervals ----------------------------------------------------------------------------------


def test_wilsons_interval_is_the_published_one() -> None:
    # Newcombe 1998, Statistics in Medicine 17, table I, method 3: 81 of 263; 15 of 148; 0 of 20.
    for hits, total, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605)):
        found = wilson(hits, total)
        assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)
    assert wilson(0, 20).low == 0.0
    assert wilson(0, 20).high == pytest.approx(0.1611, abs=1e-4)
    assert wilson(20, 20).high == 1.0
    assert (wilson(0, 0).low, wilson(0, 0).high) == (0.0, 1.0)


def test_a_percentiles_interval_holds_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    truth = -np.log(0.05)
    held = 0
    for _ in range(400):
        found = percentile(rng.exponential(size=300), 95)
        held += found.low <= truth <= found.high
    assert 0.92 <= held / 400 <= 1.0


def test_bootstrap_is_as_wide_as_the_standard_error_says() -> None:
    values = np.random.default_rng(2).normal(5.0, 2.0, 400)
    found = bootstrap(values, lambda v: float(v.mean()))
    assert found.value == pytest.approx(float(values.mean()))
    assert (found.high - found.low) == pytest.approx(2 * 1.96 * 2.0 / 20, rel=0.15)
    assert bootstrap(values, lambda v: float(v.mean())) == found
    assert isnan(bootstrap([], lambda v: float(v.mean())).value)


# -- reports ------------------------------------------------------------------------------------


def _mixed() -> list[RequestTimes]:
    return [
        RequestTimes("a", 0.0, (0.1, 0.2, 0.3), 3, prompt_tokens=10, cached_tokens=4),
        RequestTimes("b", 1.0, array("d", [1.9, 2.0]), 2, prompt_tokens=20, image_tokens=16),
        RequestTimes("c", 2.0, (), 0, error="timeout"),
        RequestTimes("d", 3.0, (3.1, 4.1), 2, prompt_tokens=5),
        RequestTimes("e", 4.0, (), 0),
    ]


def test_a_report_counts_every_request_once() -> None:
    report = Report.of(_mixed(), Promise(0.5, 0.5))
    assert (report.requests, report.answered) == (5, 3)
    assert report.errors == {"no output": 1, "timeout": 1}
    assert report.missed == {"failed": 2, "tpot": 1, "ttft": 1}
    assert report.goodput.value == pytest.approx(1 / 5)
    assert report.duration_s == pytest.approx(4.1)
    assert report.ttft_s.count == 3
    assert report.ttft_s.max == pytest.approx(0.9)
    assert report.itl_s.count == 4
    assert report.max_gap_s.max == pytest.approx(1.0)
    tokens = (report.prompt_tokens, report.cached_tokens, report.image_tokens, report.output_tokens)
    assert tokens == (35, 4, 16, 7)


def test_json_has_no_number_that_json_cannot_say() -> None:
    for requests, promise in (
        ([], Promise()),
        (_mixed(), Promise()),
        (_mixed(), Promise(0.5, 0.5)),
    ):
        text = json.dumps(Report.of(requests, promise).as_json(), allow_nan=False)
        row = json.loads(text)
        assert row["promise"]["ttft_s"] == (None if promise.ttft_s == inf else 0.5)
    assert row["requests_per_s"] == pytest.approx(3 / 4.1)
    assert row["good_requests_per_s"] == pytest.approx(1 / 4.1)
    assert row["output_tokens_per_s"] == pytest.approx(7 / 4.1)
    lines = [json.dumps(request_json(r, Promise(0.5, 0.5)), allow_nan=False) for r in _mixed()]
    assert [json.loads(line)["missed"] for line in lines] == [
        None,
        "ttft",
        "failed",
        "tpot",
        "failed",
    ]
    assert json.loads(lines[2])["ttft_s"] is None


def test_goodput_over_time_puts_a_request_where_it_arrives() -> None:
    windows = goodput_over_time(_mixed(), Promise(0.5, 0.5), 2.0)
    assert [(start, kept.value, count) for start, kept, count in windows] == [
        (0.0, 0.5, 2),
        (2.0, 0.0, 2),
        (4.0, 0.0, 1),
    ]
    assert goodput_over_time([], Promise(), 1.0) == []


def test_percentiles_are_those_of_the_values() -> None:
    found = Distribution.of([float(i) for i in range(101)])
    assert (found.p50, found.p90, found.p95, found.p99) == (50.0, 90.0, 95.0, 99.0)
    assert (found.mean, found.max, found.count) == (50.0, 100.0, 101)
