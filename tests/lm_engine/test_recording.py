"""EngineOptions.record: what an engine decides is in a file, and is replayed without a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from chunked_prefill.record_replay import about, read_recording, replay
from lm_engine import calibration
from lm_engine.engine import Engine
from lm_engine.options import EngineOptions
from lm_engine.recording import RecordError
from tests.checkpoints import checkpoint
from tests.lm_engine.harness import Lab, greedy, picture


def _options(folder: Path, **fields: object) -> EngineOptions:
    options = EngineOptions(
        str(folder),
        max_num_seqs=4,
        max_num_batched_tokens=32,
        tpot_slo_s=0.004,
        ttft_slo_s=0.02,
        block_size=4,
        max_model_len=400,
        kv_memory_bytes=600_000,
        device="cpu",
    )
    return replace(options, **fields)  # type: ignore[arg-type]


def finish(engine: Engine) -> None:
    for _ in range(4000):
        if not engine.has_work():
            return
        engine.step()
    raise AssertionError("the engine does not come to its end")


@pytest.mark.parametrize("family", ["llama", "smolvlm"])
def test_a_recorded_engine_is_replayed_from_its_file_alone(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    # However busy the machine is: whether a calibration is good is not asked here.
    monkeypatch.setattr(calibration, "_MOST_OFF", float("inf"))
    folder = tmp_path_factory.mktemp("recorded")
    lab = Lab(family, folder)
    path = folder / "run.jsonl"
    engine = Engine.load(_options(lab.folder, record=str(path)))
    for number in range(20):
        if number == 14:
            finish(engine)
            for _ in engine.calibrate(0.5):
                pass
        parts: list[object] = ["rain in the north " * (1 + number % 3)]
        if lab.takes_images and number % 2:
            parts.insert(1, picture(50, 30, number))
        prompt = lab.prompt(*parts, f"and {number}")  # type: ignore[arg-type]
        estimated = number % 3 > 0
        request = prompt.request(str(number), greedy(1 + 3 * number), wants_estimate=estimated)
        assert all(output.error is None for output in engine.add(request, prompt.media))
        engine.step()
        if number == 8:
            engine.abort("6")
            engine.reset_prefix_cache("")
    finish(engine)
    engine.close()
    done = replay(path)
    assert [str(difference) for difference in done.differences] == []
    assert done.decisions == engine.scheduler.step
    calls = {line["do"] for _, line in read_recording(path)}
    assert calls >= {
        "calibrated",
        "add",
        "schedule",
        "commit",
        "observe",
        "remove",
        "finish",
        "clear",
    }
    assert about(path)["settings"]["tpot_slo_s"] == 0.004


def test_what_cannot_be_recorded_is_refused_at_the_start(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("recorded")
    model = checkpoint("llama", folder)
    missing = str(folder / "none" / "run.jsonl")
    with pytest.raises(RecordError, match=r"--record .*run.jsonl: .*No such file"):
        Engine.load(_options(model, record=missing))
    path = folder / "run.jsonl"
    with pytest.raises(RecordError, match="serve without --host-kv-gib to record"):
        Engine.load(_options(model, record=str(path), host_kv_bytes=4 << 20))
    assert not path.exists()
