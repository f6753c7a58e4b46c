"""The live comparisons: what is replayed, how the best is found, and what is concluded."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import goodput, goodput_grid, goodput_live, shares, validate
from benchmarks.goodput import PAIRS, Comparison, Pair, excerpt
from benchmarks.goodput_grid import choice, grid
from benchmarks.goodput_live import Alone, Live, serving, starved
from chunked_prefill.calibration_file import Calibration
from chunked_prefill.goodput import Promise, RequestTimes
from chunked_prefill.record_replay import replay
from chunked_prefill.settings import SchedulingSettings
from chunked_prefill.step_time import StepTimeModel
from chunked_prefill.trace import TraceRequest
from chunked_prefill.workload import synthesize
from tests.checkpoints import checkpoint

TRACE = [TraceRequest(3.0 * n, 320 + 16 * (n % 50), 160) for n in range(3000)]
KNEE = next(pair for pair in PAIRS if pair.name == "knee")


def times(number: int, tokens: int, ttft_s: float, tpot_s: float = 0.05) -> RequestTimes:
    delivered = [number + ttft_s + tpot_s * n for n in range(11)]
    return RequestTimes(str(number), float(number), delivered, 11, prompt_tokens=tokens)


class ScriptedLive:
    """First tokens after as long as `ttft_s(settings, request)` says."""

    def __init__(self, ttft_s: Callable[[SchedulingSettings, TraceRequest], float]) -> None:
        self.applied: list[SchedulingSettings] = []
        self._ttft_s = ttft_s

    def apply(self, settings: SchedulingSettings) -> None:
        self.applied.append(settings)

    def replay(self, requests: Sequence[TraceRequest]) -> list[RequestTimes]:
        settings = self.applied[-1]
        return [
            times(number, r.prompt_tokens, self._ttft_s(settings, r))
            for number, r in enumerate(requests)
        ]


def compared(live: Any, pair: Pair = KNEE, rounds: int = 2) -> Comparison:
    comparison = Comparison(live, Alone((0.0, 0.001, 0.0)), TRACE, pair)
    comparison.run(4.0, (64, 256, 1024), rounds)
    return comparison


# -- traffic ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.5, 3.2, 9.0])
def test_an_excerpt_has_its_rate_its_lengths_and_one_long_prompt_in_a_hundred(rate: float) -> None:
    found = excerpt(TRACE, 600.0, rate)
    assert len(found) == round(rate * goodput.SECONDS)
    assert found[0].arrival_s == 0
    assert found[-1].arrival_s < goodput.SECONDS
    # Equal gaps in the recording stay equal.
    assert found[1].arrival_s == pytest.approx(1 / rate, rel=0.03)
    longs = [r for r in found if r.prompt_tokens >= 2048]
    assert len(longs) == max(1, round(len(found) / 100))
    assert all(20 <= r.prompt_tokens <= 70 for r in found if r not in longs)
    assert {r.output_tokens for r in found} == {10}
    assert any(r.arrival_s < goodput.SEARCH_S for r in longs), "the search would not see one"
    assert found == excerpt(TRACE, 600.0, rate)


def test_a_trace_that_ends_too_soon_is_refused() -> None:
    with pytest.raises(SystemExit, match="no 180 requests after 8900"):
        excerpt(TRACE, 8900.0, 4.0)


def test_the_time_alone_is_the_parabola_of_what_was_measured() -> None:
    class Parabolic:
        def replay(self, requests: Sequence[TraceRequest]) -> list[RequestTimes]:
            (request,) = requests
            n = request.prompt_tokens
            return [times(0, n, 0.02 + 0.001 * n + 2e-7 * n * n)]

    alone = Alone.measured(Parabolic())  # type: ignore[arg-type]
    assert alone.seconds(4096) == pytest.approx(0.02 + 4.096 + 2e-7 * 4096**2, rel=1e-6)
    assert alone.told([times(0, 100, 1.0)])[0].isolated_s == pytest.approx(0.122, rel=1e-6)


# -- conclusions --------------------------------------------------------------------------------


def test_the_best_static_budget_is_found_and_compared() -> None:
    """256 tokens keep the promise for half of the requests, the others for none; ours for all."""

    def ttft_s(settings: SchedulingSettings, request: TraceRequest) -> float:
        if settings.policy == "deadline":
            return 0.5
        if request.prompt_tokens >= 2048:
            return 1.0
        half = request.prompt_tokens % 2 == 0
        return 0.9 if settings.max_num_batched_tokens == 256 and half else 1.6

    live = ScriptedLive(ttft_s)
    found = compared(live)
    assert found.best == "static 256"
    ahead = found.ahead()
    assert 40 < ahead.low < ahead.value < ahead.high < 60
    assert all(holds for _, holds in found.verdicts())
    assert found.long_ratio() == pytest.approx(0.5)
    # Three for the search, then two and ours, then one and ours.
    policies = [s.policy for s in live.applied]
    assert policies.count("deadline") == 2
    assert len(policies) == 3 + 3 + 2
    assert {s.tpot_slo_s for s in live.applied if s.policy == "fcfs"} == {0.0}
    written = json.loads(json.dumps(found.as_json()))
    assert written["best_static"] == "static 256"
    assert len(written["rounds"]["deadline"]) == 2


def test_what_is_not_better_does_not_hold() -> None:
    def ttft_s(settings: SchedulingSettings, request: TraceRequest) -> float:
        long = request.prompt_tokens >= 2048
        return 2.0 if long and settings.policy == "deadline" else 0.5

    found = compared(ScriptedLive(ttft_s))
    held = [holds for _, holds in found.verdicts()]
    assert held == [False, True, False, True], "equal goodput, long prompts at four times"
    assert compared(ScriptedLive(ttft_s), PAIRS[0]).verdicts()[0][1], "light may be equal"


def test_a_gap_or_a_request_without_an_answer_is_told() -> None:
    class Faulty(ScriptedLive):
        def replay(self, requests: Sequence[TraceRequest]) -> list[RequestTimes]:
            found = super().replay(requests)
            slow = found[1].delivered_s
            found[1] = replace(found[1], delivered_s=[*slow, slow[-1] + 9.0])
            found[2] = replace(found[2], delivered_s=[*slow, slow[-1] + 9.0])
            found[3] = replace(found[3], error="closed", delivered_s=())
            return found

    found = compared(Faulty(lambda settings, request: 0.1))
    held = {what.split()[0]: holds for what, holds in found.verdicts()}
    assert held["worst"] is False
    assert [holds for what, holds in found.verdicts() if "without an answer" in what] == [False]


def test_starved_is_ten_times_too_late_or_never() -> None:
    promise = Promise(0.5, isolated_factor=3.0)
    late = replace(times(0, 10, 6.0), isolated_s=0.1)
    long = replace(times(1, 3000, 6.0), isolated_s=1.0)
    assert starved([late, long, replace(long, error="closed")], promise) == 2


# -- the others' workloads ----------------------------------------------------------------------


def test_text_is_the_same_with_and_without_images() -> None:
    arms = shares.workloads(2.0, 200.0)
    plain, mixed = (list(synthesize(spec, 3)) for spec in arms.values())
    assert [r for r in mixed if not r.images] == plain
    assert (len(mixed) - len(plain)) / len(mixed) == pytest.approx(shares.SHARE, abs=0.03)
    assert {len(r.images) for r in mixed if r.images} == {4}


def test_a_comparison_holds_within_points_and_shares() -> None:
    live = validate.Figures(0.9, 1.0, 0.1)
    near = validate.Comparison("chat", 10, live, validate.Figures(0.86, 1.14, 0.09))
    assert near.holds()
    for other in (
        validate.Figures(0.84, 1.0, 0.1),
        validate.Figures(0.9, 1.16, 0.1),
        validate.Figures(0.9, 1.0, 0.08),
    ):
        assert not validate.Comparison("chat", 10, live, other).holds()
    assert "(-4.0)" in str(near)


def test_a_tuners_choice_stands_beside_nine_points() -> None:
    settings = SchedulingSettings("deadline", 1.0, 0.2, max_num_seqs=16)
    row = {"settings": {**asdict(settings), "image_resolution_limit": None}}
    assert choice(json.loads(json.dumps({"choice": row}))) == settings
    points = grid(1.0, 0.2)
    assert len({*points.values()}) == len(points) == 9


def test_an_impossible_promise_leaves_nothing_to_compare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tune.json"
    file.write_text(json.dumps({"promise": {"ttft_s": 1.0, "tpot_s": 0.2}, "impossible": {}}))
    monkeypatch.setattr("sys.argv", ["goodput_grid", "--report", str(file)])
    with pytest.raises(SystemExit, match="no choice"):
        goodput_grid.main()


# -- on a server --------------------------------------------------------------------------------


@pytest.mark.slow
def test_settings_change_on_one_server_whose_decisions_come_out_again(tmp_path: Path) -> None:
    """Also what the simulator would say of it, from a calibration before."""
    recording = tmp_path / "recording.jsonl"
    model = checkpoint("smolvlm", tmp_path)
    flags = ("--record", str(recording))
    with serving(str(model), 1, *flags, endpoint="chat") as live:
        live.apply(goodput_live.static(64))
        spec = (
            "chat:rate=4,duration=2,input=100,output=8"
            "+images:rate=2,duration=2,input=40,output=4,size=64x64"
        )
        wanted = list(synthesize(spec, 0))
        assert any(r.images for r in wanted)
        # Not measured: whether it can be depends on what else the machine does.
        calibration = Calibration(
            StepTimeModel(2e-3, 1e-4, 1e-5, 1e-7, 1e-9), (0.9, 1.1), 0.1, 0, 0.0
        )
        done = validate.Validation(live, model, calibration)
        compared = done.compare("images", spec, 1)
    assert compared.requests == len(wanted)
    assert compared.simulated.goodput == 1.0
    again = replay(recording)
    assert again.differences == ()
    assert again.decisions > 50


@pytest.mark.slow
def test_a_server_that_refuses_settings_says_why(tmp_path: Path) -> None:
    from api.tune_server import TuneError

    with serving(str(checkpoint("llama", tmp_path)), 1) as live:
        assert isinstance(live, Live)
        with pytest.raises(TuneError, match="max_num_batched_tokens"):
            live.apply(goodput_live.static(10 * goodput_live.MOST_TOKENS))
