"""A calibration measures, is kept, and leaves the engine as it was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from chunked_prefill.calibration_file import Calibration, CalibrationError, CalibrationProgress
from chunked_prefill.step_time import StepLoad
from lm_engine import calibration
from lm_engine.attention.native import NativeAttention
from lm_engine.calibration import calibrate, random_steps, spread_of
from lm_engine.calibration_steps import Probe
from lm_engine.engine import Engine
from tests.lm_engine.harness import Lab, greedy, picture, run_one

SECONDS = 1.5


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No calibration of another test is found, and however busy the machine is, all are kept."""
    monkeypatch.setenv("LONGLENS_CACHE", str(tmp_path))
    monkeypatch.setattr(calibration, "_MOST_OFF", float("inf"))
    return tmp_path / "calibrations"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab("smolvlm", tmp_path_factory.mktemp("smolvlm"))


def measured(engine: Engine, seconds: float = SECONDS) -> Calibration:
    *progress, result = calibrate(engine, seconds)
    assert isinstance(result, Calibration)
    assert len(progress) >= result.steps
    done = [item.done_s for item in progress if isinstance(item, CalibrationProgress)]
    assert len(done) == len(progress)
    assert done == sorted(done)
    return result


def test_it_is_in_force_and_found_at_the_next_start(lab: Lab, cache: Path) -> None:
    engine = lab.engine(blocks=400)
    found = measured(engine)
    estimator = engine.scheduler.budget.estimator
    assert estimator is not None
    assert estimator.model == found.model
    assert engine.calibration == found
    again = lab.engine(blocks=400)
    assert again.calibration == found
    kept = again.scheduler.budget.estimator
    assert kept is not None
    assert kept.model == found.model
    assert kept.guard == estimator.guard
    assert len(list(cache.iterdir())) == 1


def test_it_knows_the_tiles_of_the_kernel_in_use(lab: Lab, cache: Path) -> None:
    engine = lab.engine(blocks=400)
    if not isinstance(engine.runner.attention, NativeAttention):
        pytest.skip("without a compiler torch's kernels attend")
    config = engine.runner.decoder.config
    assert config.num_heads > config.num_kv_heads
    assert measured(engine).model.tile_rows == 64 * config.num_kv_heads / config.num_heads


def test_another_configuration_finds_nothing(lab: Lab, cache: Path) -> None:
    measured(lab.engine(blocks=400))
    assert lab.engine(blocks=400, block_size=8).calibration is None


def test_a_damaged_file_counts_as_none(lab: Lab, cache: Path) -> None:
    measured(lab.engine(blocks=400))
    (file,) = cache.iterdir()
    file.write_text(file.read_text()[:100])
    assert lab.engine(blocks=400).calibration is None


def test_nothing_else_is_changed(lab: Lab, cache: Path) -> None:
    """Blocks, cached prefixes, counters: all as before, and answers too."""
    engine = lab.engine(blocks=400)
    prompt = lab.prompt("the thing in the rain: a tin ring, another one, then ten more and a cat")
    first = run_one(engine, prompt, greedy(6))
    stats, blocks = engine.stats(), engine.scheduler.kv.pool.num_used
    measured(engine)
    engine.check_invariants()
    assert engine.stats() == stats
    assert engine.scheduler.kv.pool.num_used == blocks
    second = run_one(engine, prompt, greedy(6))
    assert second.tokens() == first.tokens()
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.cached_tokens > first.usage.cached_tokens == 0


def test_memory_of_contexts_that_nobody_had_goes_back(lab: Lab, cache: Path) -> None:
    engine = lab.engine(blocks=400)
    storage = engine.runner.cache.storage
    for _ in zip(range(40), calibrate(engine, SECONDS)):  # noqa: B905 - ends with the first
        pass
    assert not storage.any()  # the kernel gives empty pages
    prompt = lab.prompt("the thing in the rain")
    run_one(engine, prompt, greedy(3), poison=False)
    kept = storage.clone()
    measured(engine)
    assert storage.any(), "somebody's blocks are cached"
    held = kept != 0
    assert (storage[held] == kept[held]).all()


def test_it_is_refused_while_somebody_is_served(lab: Lab, cache: Path) -> None:
    engine = lab.engine(blocks=400)
    engine.add(lab.prompt("a cat").request("a", greedy(3)))
    with pytest.raises(CalibrationError, match="being served"):
        next(calibrate(engine, SECONDS))


def test_it_is_refused_without_free_blocks(lab: Lab, cache: Path) -> None:
    engine = lab.engine(blocks=3)
    with pytest.raises(CalibrationError, match="too few to measure"):
        list(calibrate(engine, SECONDS))
    assert engine.calibration is None


def test_one_that_makes_no_sense_is_not_kept(
    lab: Lab, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = lab.engine(blocks=400)
    estimator = engine.scheduler.budget.estimator
    assert estimator is not None
    before = estimator.model
    monkeypatch.setattr(calibration, "_MOST_OFF", 0.0)
    with pytest.raises(CalibrationError, match="calibrate again when it is quiet"):
        list(calibrate(engine, SECONDS))
    assert estimator.model == before
    assert engine.calibration is None
    assert not cache.exists()


def test_one_that_ends_early_leaves_nothing(lab: Lab, cache: Path) -> None:
    engine = lab.engine(blocks=400)
    before, items = engine.stats(), calibrate(engine, SECONDS)
    for _ in range(5):
        next(items)
    assert isinstance(items, Iterator)
    del items
    engine.check_invariants()
    assert engine.stats() == before
    assert engine.calibration is None
    assert not cache.exists()


def test_images_are_measured_where_the_model_takes_some(seeing: Lab, cache: Path) -> None:
    engine = seeing.engine(blocks=400, rows=2048)
    assert engine.images is not None
    before = engine.images.arena.stats()
    found = measured(engine)
    assert found.encode is not None
    assert found.encode.seconds([256]) > 0
    assert engine.images.pace.model == found.encode
    after = engine.images.arena.stats()
    assert replace(after, queries=0, encodes=0) == replace(before, queries=0, encodes=0)
    engine.check_invariants()
    prompt = seeing.prompt("a ", picture(64, 48), " cat")
    assert len(run_one(engine, prompt, greedy(3)).tokens()) == 3


def test_steps_held_out_are_mixed_and_fit(lab: Lab, cache: Path) -> None:
    engine = lab.engine(blocks=400)
    probe, steps = Probe(engine), random_steps(engine, 40, 0)
    loads = [StepLoad.of(step) for step in steps]
    assert {load.kind for load in loads} >= {"decode", "mixed"}
    assert all(probe.fits(step) for step in steps)
    assert max(load.sequences for load in loads) <= 17
    assert steps != random_steps(engine, 40, 1)
    assert all(probe.run(step) > 0 for step in steps[:5])
    engine.check_invariants()


def test_a_step_that_does_not_fit_is_named(lab: Lab, cache: Path) -> None:
    probe = Probe(lab.engine(blocks=10))
    with pytest.raises(ValueError, match="do not fit into 40 tokens"):
        probe.run(((0, 41),))


def test_the_spread_is_that_of_equal_steps() -> None:
    times = [[1.0, 1.0, 1.1], [2.0, 2.0, 3.0], [7.0]]
    assert spread_of(times) == 0.0
    assert spread_of(times, 1.0) == pytest.approx(0.5)
    assert spread_of([[7.0]]) == 0.0
