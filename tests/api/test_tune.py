"""`longlens tune`: its configuration, its words, and whole runs against scripted engines."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.bench_cli import seconds
from api.cli import main
from api.config import ConfigError, load
from api.tune_cli import TuneFlags
from api.tune_images import PlannedImages, limits_worth_trying
from api.tune_plot import draw, pareto
from api.tune_report import Result, Verified, as_json, configuration, lines, share
from api.tune_run import read_excerpts
from api.tune_search import Candidate, Found
from api.tune_server import OwnServer, TuneError
from chunked_prefill.encode_time import EncodeTimeModel
from chunked_prefill.goodput import Interval, Promise, RequestTimes
from chunked_prefill.settings import SchedulingSettings
from chunked_prefill.simulator import Outcome
from chunked_prefill.trace import TraceRequest, read_trace, write_trace
from chunked_prefill.tuner import Sensitivity, Standing, Trial
from chunked_prefill.tuner_verdict import Impossible, Reached
from lm_engine.outputs import RequestError
from tests import checkpoints
from tests.api.fakes import FakeEngine
from vision_encoder.grid import planner

ROOT = Path(__file__).resolve().parents[2]
TRAFFIC = ("--workload", "chat:rate=30,input=60,output=4,spread=0.3", "--duration", "500ms")
OWN = SchedulingSettings(
    ttft_slo_s=0.25,
    tpot_slo_s=0.0375,
    step_share=(0.3, 0.6),
    max_num_seqs=12,
    max_num_batched_tokens=96,
    long_prompt_share=0.25,
)
STATIC = SchedulingSettings(
    policy="fcfs", ttft_slo_s=0.25, max_num_seqs=32, max_num_batched_tokens=256
)


def times(ttft_s: float = 0.2, tpot_s: float = 0.02, count: int = 40) -> list[RequestTimes]:
    return [
        RequestTimes(str(i), float(i), (i + ttft_s, i + ttft_s + 9 * tpot_s), 10)
        for i in range(count)
    ]


def candidate(settings: SchedulingSettings, goodput: float, strain: float = 0.8) -> Candidate:
    kept = tuple(i < goodput * 40 for i in range(40))
    made = Trial(kept, strain, 0.25 * strain, 0.0375 * strain, 0.05)
    family = "static" if settings.policy == "fcfs" else "deadline"
    return Candidate(family, settings, Standing((0, len(family)), (made,)))


def result(**more: Any) -> Result:
    promise = Promise(0.25, 0.0375)
    own, static = candidate(OWN, 0.95), candidate(STATIC, 0.7, 1.6)
    found = Found(
        (own, static),
        (own, static, candidate(replace(OWN, max_num_seqs=4), 0.5, 9.0)),
        (
            Sensitivity("max_num_seqs", 6, 12, -0.25, 0.4),
            Sensitivity("step_share", (0.3, 0.9), (0.3, 0.6), 0.0, -0.01),
        ),
        Outcome(),
        Reached.of(times()),
        ((None, own.standing), (262_144, own.standing)),
        262_144,
        99,
    )
    verified = (
        Verified.of(own, times(), promise),
        Verified.of(static, times(0.2, 0.05), promise),
    )
    values: dict[str, Any] = {
        "model": "some/model",
        "promise": promise,
        "traffic": {"workload": "chat"},
        "requests": 40,
        "phases_s": {"simulating": 3.21},
        "calibration": "40 steps",
        "found": found,
        "verified": verified,
        "binding": "TTFT-bound: 71% queueing.",
    }
    return Result(**(values | more))


# -- forms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [OWN, STATIC])
def test_serve_takes_the_configuration_and_means_the_same(
    settings: SchedulingSettings, tmp_path: Path
) -> None:
    found = result()
    chosen = replace(found.verified[0], candidate=candidate(settings, 0.9))
    base = {"model": "some/model", "host_kv_gib": 0.5, "allowed_media_domains": ["a.example"]}
    file = tmp_path / "tuned.yaml"
    file.write_text(configuration(replace(found, verified=(chosen,)), base))
    config = load({}, file).config
    options = config.engine_options("folder")
    assert config.model == "some/model"
    assert config.allowed_media_domains == ("a.example",)
    assert config.image_resolution_limit == 262_144
    assert options.host_kv_bytes == 1 << 29
    assert settings == SchedulingSettings(
        policy=options.scheduling_policy,
        ttft_slo_s=options.ttft_slo_s,
        tpot_slo_s=options.tpot_slo_s or 0.0,
        step_share=options.step_share,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        long_prompt_share=options.long_prompt_share,
    )
    assert "71% queueing" in file.read_text()


def test_a_file_with_an_unknown_setting_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text("max-num-seq: 3\n")
    with pytest.raises(ConfigError, match=r"did you mean max-num-seqs\?"):
        load({}, file)
    file.write_text("zebra: 3\n")
    with pytest.raises(ConfigError) as caught:
        load({}, file)
    assert "did you mean" not in str(caught.value)


def test_the_report_is_json_and_says_what_was_predicted_and_verified() -> None:
    body = json.loads(json.dumps(as_json(result()), allow_nan=False))
    choice = body["choice"]
    assert choice["settings"]["max_num_seqs"] == 12
    assert choice["predicted"]["goodput"]["value"] == pytest.approx(0.95)
    assert choice["verified"]["goodput"]["value"] == 1.0
    assert choice["verified"]["goodput"]["low"] < 1.0, "40 requests prove no 100 %"
    assert body["verified"][1]["verified"]["missed"] == {"tpot": 40}
    assert body["possible"]
    assert body["kept"]
    assert len(body["points"]) == 3
    assert body["promise"] == {"ttft_s": 0.25, "tpot_s": 0.0375}


def test_words_name_the_promise_the_settings_and_what_a_step_costs() -> None:
    text = "\n".join(lines(result()))
    assert "promise       TTFT 250 ms and TPOT 38 ms at p95 holds" in text
    assert "max_num_seqs 12 -> 6: -25.0 points" in text
    assert "step_share 0.3-0.6 -> 0.3-0.9: +0.0 points" in text
    assert "262,144 pixels: 95.0% predicted (used)" in text
    one = replace(result().found, resolutions=((None, candidate(OWN, 0.9).standing),))  # type: ignore[type-var]
    assert "at one size" in "\n".join(lines(result(found=one)))
    broken = result(verified=(Verified.of(candidate(OWN, 0.9), times(9.0), Promise(0.25, 0.05)),))
    assert "is broken" in "\n".join(lines(broken))
    assert not broken.kept
    impossible = result(impossible=Impossible("too fast.", ("less.",)), found=None, verified=())
    assert next(iter(lines(impossible))).endswith("too fast.")
    assert as_json(impossible)["possible"] is False


def test_a_share_has_an_interval_by_resampling() -> None:
    some = share([True] * 90 + [False] * 10)
    assert some.value == pytest.approx(0.9)
    assert 0.8 < some.low < 0.9 < some.high < 0.97
    assert share([True] * 90 + [False] * 10) == some
    assert share([False] * 10) == Interval(0.0, 0.0, pytest.approx(0.277, abs=0.01))


def test_the_pareto_front_is_what_nothing_beats_in_both() -> None:
    assert pareto([(1, 9), (2, 5), (3, 7), (4, 5), (5, 1), (2, 8)]) == [(1, 9), (2, 5), (5, 1)]


@pytest.mark.parametrize("name", ["tune.png", "tune.html"])
def test_the_picture_stands_alone(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(result(), tmp_path / name)
    body = (tmp_path / name).read_bytes()
    assert body.startswith(b"\x89PNG" if name.endswith("png") else b"<!doctype html>")
    if name.endswith("html"):
        text = body.decode()
        assert "<svg" in text
        assert "max_num_seqs" in text
        assert 'src="' not in text
    draw(result(found=replace(result().found, sensitivities=())), tmp_path / name)  # type: ignore[type-var]


# -- traffic -------------------------------------------------------------------------------------


def test_excerpts_of_a_recording_follow_one_another(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, [TraceRequest(float(second), 10 + second, 4) for second in range(65)])
    flags = TuneFlags(
        ttft_p95=seconds("1s"), tpot_p95=seconds("1s"), trace=trace, duration=seconds("20s")
    )
    excerpts = read_excerpts(flags)
    assert [e[0].prompt_tokens for e in excerpts] == [10, 30, 50]
    assert [len(e) for e in excerpts] == [20, 20, 20], "the last five seconds say too little"
    assert all(e[0].arrival_s == 0 and e[-1].arrival_s == 19 for e in excerpts)
    doubled = read_excerpts(replace(flags, speed=2.0))
    assert [(e[0].prompt_tokens, len(e)) for e in doubled] == [(10, 40), (50, 25)]


def test_excerpts_of_a_workload_are_other_draws_of_it() -> None:
    flags = TuneFlags(
        ttft_p95=seconds("1s"),
        tpot_p95=seconds("1s"),
        workload="chat:rate=5,input=60,output=4",
        duration=seconds("9s"),
    )
    excerpts = read_excerpts(flags)
    assert len(excerpts) == 9
    assert len({tuple(e) for e in excerpts}) == 9
    assert read_excerpts(flags) == excerpts


# -- images --------------------------------------------------------------------------------------


def test_limits_worth_trying_make_a_difference() -> None:
    pictures = planner({"model_type": "qwen2_vl", "vision_config": {}})

    def images(limit: int | None) -> PlannedImages:
        return PlannedImages(pictures, EncodeTimeModel(patch_s=1e-3), limit)

    requests = [TraceRequest(0.0, 10, 1, images=((640, 640), (300, 200))), TraceRequest(1.0, 9, 1)]
    limits = limits_worth_trying(images, requests)
    assert limits[0] is None
    assert limits[1:] == sorted(limits[1:], reverse=True)  # type: ignore[type-var]
    tokens = [sum(c.tokens for c in images(limit)(requests[0].images)) for limit in limits]
    assert tokens == sorted(set(tokens), reverse=True)
    assert len(limits) > 2
    took = [cost.encode_s for cost in images(limits[-1])(requests[0].images)]
    assert 0 < took[0] < images(None)(requests[0].images)[0].encode_s


# -- whole runs ----------------------------------------------------------------------------------


def tune(capsys: pytest.CaptureFixture[str], model: Path, *flags: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["tune", str(model), *TRAFFIC, *flags])
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


def test_a_running_server_is_tuned_and_left_as_it_was(
    live: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Watched(FakeEngine):
        async def scheduling(self, change: SchedulingSettings | None = None) -> Any:
            if change is not None:
                tried.append(change)
            return await super().scheduling(change)

    monkeypatch.setattr("api.tune_search._MOST_POINTS", 6)
    monkeypatch.setattr("api.tune_run._EXCERPTS", 2)
    tried: list[SchedulingSettings] = []
    engine = Watched()
    before = engine.settings
    with live(engine, allow_tuning=True) as url:
        flags = ("--url", url, "--ttft-p95", "2s", "--tpot-p95", "500ms", "--out", str(tmp_path))
        code, out, err = tune(capsys, Path("tiny"), *flags)
    assert code == 0, err
    for phase in ("calibrating", "probing", "simulating", "verifying"):
        assert f"{phase}: done in" in err
    body = json.loads((tmp_path / "tune.json").read_text())
    assert body["kept"]
    assert len(body["verified"]) in (1, 2, 3)
    assert body["requests"] == len(list(read_trace(tmp_path / "traffic.jsonl")))
    assert len(engine.seen) >= body["requests"] * len(body["verified"])
    verified = {one["settings"]["max_num_batched_tokens"] for one in body["verified"]}
    assert verified == {settings.max_num_batched_tokens for settings in tried[:-1]}
    assert tried[-1] == before, "left as it was"
    assert load({}, tmp_path / "tuned.yaml").config.model == "tiny"
    assert "use it        longlens serve --config" in out


def test_a_server_that_cannot_be_calibrated_is_tuned_by_what_it_learns(
    live: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Noisy(FakeEngine):
        async def calibrate(self, seconds: float) -> Any:
            yield RequestError("overloaded", "other programs use this machine")

    monkeypatch.setattr("api.tune_search._MOST_POINTS", 4)
    monkeypatch.setattr("api.tune_run._EXCERPTS", 1)
    monkeypatch.setattr("api.tune_search.VERIFIED", 1)
    with live(Noisy(), allow_tuning=True) as url:
        flags = ("--url", url, "--ttft-p95", "2s", "--tpot-p95", "500ms", "--out", str(tmp_path))
        code, _, err = tune(capsys, Path("tiny"), *flags)
    assert code == 0
    assert "warning: The server could not be calibrated: other programs" in err
    assert "this traffic" in json.loads((tmp_path / "tune.json").read_text())["calibration"]


def test_an_impossible_promise_is_told_before_anything_is_verified(
    live: Callable[..., Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    engine = FakeEngine()
    with live(engine, allow_tuning=True) as url:
        flags = ("--url", url, "--ttft-p95", "5ms", "--tpot-p95", "500ms", "--out", str(tmp_path))
        code, out, _ = tune(capsys, Path("tiny"), *flags)
    assert code == 3
    assert "impossible    TTFT 5.0 ms" in out
    assert "achievable    Idle, this server reaches" in out
    assert not engine.seen, "no request was needed to know"
    assert not (tmp_path / "tuned.yaml").exists()
    assert json.loads((tmp_path / "tune.json").read_text())["possible"] is False


def test_a_rate_beyond_the_server_is_impossible_and_the_one_that_holds_is_named(
    live: Callable[..., Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with live(FakeEngine(), allow_tuning=True) as url:
        flags = ("--url", url, "--ttft-p95", "90ms", "--tpot-p95", "30ms", "--out", str(tmp_path))
        crowd = ("--workload", "chat:rate=60,input=300,output=20,spread=0")
        with pytest.raises(SystemExit) as ended:
            main(["tune", "tiny", *crowd, "--duration", "1s", *flags])
    assert ended.value.code == 3
    assert "times this rate with these settings" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "flags", "said"),
    [
        ({}, (), "--allow-tuning"),
        ({"allow_tuning": True, "api_key": "s"}, (), "--api-key"),
        ({"allow_tuning": True}, ("--ttft-p95", "0"), "above 0"),
        ({"allow_tuning": True}, ("--trace", "no.csv"), "one of --trace"),
    ],
)
def test_what_cannot_be_tuned_is_said(
    live: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    settings: dict[str, Any],
    flags: tuple[str, ...],
    said: str,
) -> None:
    with live(FakeEngine(), **settings) as url:
        promise = () if "--ttft-p95" in flags else ("--ttft-p95", "1s")
        given = ("--url", url, *promise, "--tpot-p95", "1s", "--out", str(tmp_path), *flags)
        code, _, err = tune(capsys, Path("tiny"), *given)
    assert code == 1
    assert said in err


def test_images_need_a_model_that_sees(
    live: Callable[..., Any], folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "blind"
    shutil.copytree(folders("llama"), folder)
    (folder / "model.safetensors").touch()
    with live(FakeEngine(), allow_tuning=True) as url, pytest.raises(SystemExit) as ended:
        main(
            [
                *("tune", str(folder), "--workload", "images:rate=5", "--duration", "1s"),
                *("--url", url, "--ttft-p95", "1s", "--tpot-p95", "1s", "--out", str(tmp_path)),
            ]
        )
    assert ended.value.code == 1


@pytest.mark.slow
def test_the_resolution_of_images_is_swept_and_applied(
    live: Callable[..., Any],
    folders: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("api.tune_images._EDGES", (224, 112, 56))
    monkeypatch.setattr("api.tune_search._MOST_POINTS", 6)
    monkeypatch.setattr("api.tune_run._EXCERPTS", 2)
    folder = tmp_path / "seeing"
    shutil.copytree(folders("qwen2_5_vl"), folder)
    (folder / "model.safetensors").touch()
    engine = FakeEngine()
    with live(engine, family="qwen2_5_vl", allow_tuning=True) as url:
        with pytest.raises(SystemExit) as ended:
            main(
                [
                    *("tune", str(folder), "--duration", "800ms", "--url", url),
                    *("--workload", "images:rate=10,input=20,output=3,images=1x1,size=224x224"),
                    *("--ttft-p95", "2s", "--tpot-p95", "1s", "--out", str(tmp_path)),
                ]
            )
        assert ended.value.code == 0, capsys.readouterr().err
    body = json.loads((tmp_path / "tune.json").read_text())
    tried = [one["limit"] for one in body["image_resolutions"]]
    assert tried[0] is None
    assert len(tried) > 1
    assert body["choice"]["settings"]["image_resolution_limit"] is None, "the largest is no worse"


# -- a server of its own -------------------------------------------------------------------------


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    server = OwnServer({"model": str(tmp_path)}, tmp_path / "server.log")
    with server, pytest.raises(TuneError, match="did not start"):
        server.start(lambda done, total, what: None)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_server_ends_with_the_tuning_however_that_ends(
    sign: signal.Signals, tmp_path: Path
) -> None:
    model = checkpoints.checkpoint("llama", tmp_path)
    environment = {n: v for n, v in os.environ.items() if n != "LONGLENS_TRACES"}
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "api.cli", "tune", str(model), *TRAFFIC),
            *("--ttft-p95", "9s", "--tpot-p95", "9s", "--out", str(tmp_path / "out")),
        ],
        cwd=ROOT,
        env=environment | {"LONGLENS_CACHE": str(tmp_path / "cache")},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("calibrating:"):
            break
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert children
    process.send_signal(sign)
    process.wait(30)
    process.stderr.close()
    if sign is not signal.SIGKILL:
        assert process.returncode == 130
    deadline = time.monotonic() + 30
    while any(_alive(int(child)) for child in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(_alive(int(child)) for child in children)


@pytest.mark.slow
def test_a_tiny_model_is_tuned_from_the_command_line(tmp_path: Path) -> None:
    model = checkpoints.checkpoint("llama", tmp_path)
    out = tmp_path / "out"
    environment = {n: v for n, v in os.environ.items() if n != "LONGLENS_TRACES"}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "api.cli", "tune", str(model), *TRAFFIC, "--out", str(out)),
            *("--ttft-p95", "30s", "--tpot-p95", "10s"),
        ],
        cwd=ROOT,
        env=environment | {"LONGLENS_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    body = json.loads((out / "tune.json").read_text())
    assert body["kept"]
    assert body["choice"]["verified"]["errors"] == {}
    assert load({}, out / "tuned.yaml").config.model == str(model)
    with pytest.raises(httpx.ConnectError):
        httpx.get(_address(out / "server.log"))


def _address(log: Path) -> str:
    rows = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return str(next(row["url"] for row in rows if "url" in row))
