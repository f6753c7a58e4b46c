"""`--cold-kv stream`: cold KV through staging buffers, to the bit what it is on the device."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from chunked_prefill.request import Request, SamplingParams
from lm_engine.attention.cpu import CpuAttention
from lm_engine.attention.native import NativeAttention
from lm_engine.attention.staging import StagingRing
from lm_engine.engine import Engine
from lm_engine.native.library import NativeUnavailableError
from tests.lm_engine.attention.staged import RandomEngine
from tests.lm_engine.harness import (
    Lab,
    Prompt,
    assert_same_answer,
    assert_same_distribution,
    check_idle,
    greedy,
    run,
    run_one,
)
from tests.lm_engine.test_large_contexts import (
    CHUNK,
    HOST_TOKENS,
    ids,
    logits_of,
    resident,
    small_device,
)

GetLab = Callable[[str], Lab]


def ring_of(engine: Engine) -> StagingRing:
    assert engine.runner.ring is not None
    return engine.runner.ring


def bytes_streamed(engine: Engine) -> int:
    attention = engine.runner.attention
    own = attention.bytes_staged if isinstance(attention, NativeAttention) else 0
    return ring_of(engine).bytes_staged + own


def stream_by(engine: Engine, copier: Any) -> None:
    lane = ring_of(engine).transfers._stream_lane
    assert lane is not None
    lane.engine = copier


@contextmanager
def poisoned(engine: Engine) -> Iterator[None]:
    """What the ring gave out holds NaN once it is given back, and its books are checked."""
    ring = ring_of(engine)
    take, release, given = ring.take, ring.release, []

    def take_noted(*args: Any) -> torch.Tensor:
        ring.check_invariants()
        given.append(take(*args))
        return given[-1]

    def release_poisoned() -> None:
        given.pop().fill_(torch.nan)
        release()
        ring.check_invariants()

    ring.take, ring.release = take_noted, release_poisoned  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        del ring.take, ring.release


@pytest.mark.parametrize("family", ["llama", "qwen3", "smollm3"])
def test_streamed_and_resident_give_the_same_bits(lab: GetLab, family: str) -> None:
    tiny = lab(family)
    prompt = ids(1500)
    want, want_logits = logits_of(resident(tiny), prompt, 20)
    engine = small_device(tiny, cold_kv="stream")
    with poisoned(engine):
        got, logits = logits_of(engine, prompt, 20)
    assert got.tokens() == want.tokens()
    assert torch.equal(logits, want_logits)
    ring = ring_of(engine)
    assert 0 < ring.bytes_staged < bytes_streamed(engine), "chunks and single tokens differ"
    assert ring.retries == 0
    assert ring.transfers.num_open == 0


def test_a_window_streams_what_it_shows(lab: GetLab, tmp_path: Path) -> None:
    """The window is no property of the weights: the same checkpoint with other ones."""
    tiny = lab("mistral")
    plain = tiny.folder
    streamed = []
    try:
        for window in (16, 900):
            tiny.folder = tmp_path / str(window)
            shutil.copytree(plain, tiny.folder)
            config = json.loads((plain / "config.json").read_text()) | {"sliding_window": window}
            (tiny.folder / "config.json").write_text(json.dumps(config))
            want, want_logits = logits_of(resident(tiny), ids(1500), 8)
            engine = small_device(tiny, cold_kv="stream")
            with poisoned(engine):
                got, logits = logits_of(engine, ids(1500), 8)
            assert got.tokens() == want.tokens()
            assert torch.equal(logits, want_logits)
            streamed.append(bytes_streamed(engine))
    finally:
        tiny.folder = plain
    assert streamed[0] == 0, "keys on the device are all that a window of 16 shows"
    assert streamed[1] > 0


@pytest.mark.parametrize("chunk", [16, 48])
def test_chunks_of_any_size_stream(lab: GetLab, chunk: int) -> None:
    tiny = lab("llama")
    engines = [
        tiny.engine(
            budget=chunk,
            block_size=4,
            blocks=blocks,
            host_tokens=host,
            max_model_len=HOST_TOKENS,
            cold_kv="stream",
        )
        for blocks, host in ((600, 0), (160, HOST_TOKENS))
    ]
    assert engines[0].runner.ring is None
    want, got = (logits_of(engine, ids(1100), 6)[1] for engine in engines)
    assert torch.equal(got, want)
    assert bytes_streamed(engines[1]) > 0


def test_mates_and_samples_share_the_ring(lab: GetLab) -> None:
    tiny = lab("llama")
    jobs = {"large": (ids(1400), greedy(12)), "twice": (ids(1500, 3), greedy(12, n=2))}
    jobs |= {f"small{i}": (ids(20 + 9 * i, i + 1), greedy(20)) for i in range(3)}
    alone = resident(tiny)
    want = {name: run_one(alone, *job) for name, job in jobs.items()}
    engine = tiny.engine(
        budget=CHUNK,
        block_size=4,
        blocks=340,
        host_tokens=4 * HOST_TOKENS,
        max_model_len=HOST_TOKENS,
        cold_kv="stream",
    )
    together = 0

    def watch(_: int) -> None:
        nonlocal together
        cold = [engine.scheduler.kv.cold_slots(s.seq_id) for s in engine.scheduler.running]
        together = max(together, sum(len(slots) > 0 for slots in cold))

    with poisoned(engine):
        got = run(engine, jobs, before_step=watch)
    assert together > 1
    for name, answer in want.items():
        for choice in range(2 if name == "twice" else 1):
            assert_same_answer(got[name], answer, choice, note=name)


class Urgent(Prompt):
    def request(self, request_id: str, sampling: SamplingParams, **fields: Any) -> Request:
        return Prompt.request(self, request_id, sampling, priority=-1, **fields)


def test_chunks_that_are_worth_their_pass_stream_less(lab: GetLab) -> None:
    """A large prompt that has a part of each step goes on beside an urgent one, in fewer steps."""
    tiny = lab("llama")
    urgent = Urgent(ids(1600).token_ids)
    jobs = {"far": (ids(1500, 3), greedy(4)), "near": (urgent, greedy(4))}
    alone = resident(tiny)
    want = {name: run_one(alone, *job) for name, job in jobs.items()}
    streamed = []
    for least in (None, 48):
        engine = tiny.engine(
            budget=CHUNK,
            block_size=4,
            blocks=340,
            host_tokens=2 * HOST_TOKENS,
            max_model_len=HOST_TOKENS,
            cold_kv="stream",
        )
        engine.scheduler.cold_chunk = None if least is None else lambda _: 48
        engine.scheduler.long_prompts.share = 1.0
        got = run(engine, jobs, arrivals={"near": 18})
        assert engine.stats().preemptions == 0
        for name, answer in want.items():
            assert_same_answer(got[name], answer, note=f"{name}, at least {least}")
        streamed.append(bytes_streamed(engine))
    assert streamed[1] < 0.8 * streamed[0]


@pytest.mark.parametrize("seed", range(3))
def test_failing_copies_change_nothing(lab: GetLab, seed: int) -> None:
    """KVO: a copy that fails leaves the KV where it is; the step reads it again."""
    tiny = lab("llama")
    want, want_logits = logits_of(resident(tiny), ids(1300, seed), 6)
    engine = small_device(tiny, cold_kv="stream")
    stream_by(engine, RandomEngine(seed, 0.3))
    with poisoned(engine):
        got, logits = logits_of(engine, ids(1300, seed), 6)
    assert got.tokens() == want.tokens()
    assert torch.equal(logits, want_logits)
    assert ring_of(engine).retries > 0
    assert ring_of(engine).transfers.num_open == 0


@pytest.mark.parametrize("at", [13, 17])
def test_an_abort_while_others_stream(lab: GetLab, at: int) -> None:
    tiny = lab("llama")
    want = run_one(resident(tiny), ids(700, 5), greedy(10))
    engine = small_device(tiny, cold_kv="stream")

    def stop(step: int) -> None:
        if step == at:
            assert ring_of(engine).bytes_staged > 0
            engine.abort("one")

    with poisoned(engine):
        got = run(
            engine,
            {"one": (ids(1200), greedy(12)), "two": (ids(700, 5), greedy(10))},
            before_step=stop,
        )
    assert_same_answer(got["two"], want)


def test_a_step_that_breaks_while_it_streams_fails_its_request_only(
    lab: GetLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = lab("llama")
    want = run_one(resident(tiny), ids(1200), greedy(5))
    engine = small_device(tiny, cold_kv="stream")
    ring = ring_of(engine)
    take = ring.take

    def broken(*args: Any) -> torch.Tensor:
        take(*args)
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(ring, "take", broken)
        result = run(engine, {"one": (ids(1200), greedy(5))})["one"]
    assert result.error is not None
    ring.check_invariants()
    assert_same_answer(run_one(engine, ids(1200), greedy(5)), want)
    check_idle(engine)


def test_torch_kernels_stream_within_the_promise(
    lab: GetLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable() -> None:
        raise NativeUnavailableError("no compiler here")

    tiny = lab("llama")
    _, want = logits_of(resident(tiny), ids(1200), 6)
    monkeypatch.setattr("lm_engine.assembly.load_kernels", unavailable)
    engine = small_device(tiny, cold_kv="stream")
    assert isinstance(engine.runner.attention, CpuAttention)
    with poisoned(engine):
        _, got = logits_of(engine, ids(1200), 6)
    assert_same_distribution(got, want)
    assert ring_of(engine).bytes_staged > 0


def test_the_device_holds_its_budget_and_the_ring(lab: GetLab) -> None:
    """However long the context is."""
    tiny = lab("llama")
    taken = []
    for length in (800, 1900):
        engine = small_device(tiny, cold_kv="stream")
        run_one(engine, ids(length), greedy(2))
        cache, ring = engine.runner.cache, ring_of(engine)
        held = sum(buffer.nbytes for buffer in (*ring._buffers, ring._spare) if buffer is not None)
        assert held <= ring.num_bytes
        taken.append(cache.num_bytes + held)
    assert taken[0] == taken[1]


def test_auto_attends_where_the_kv_lies_on_a_machine_without_a_device(lab: GetLab) -> None:
    for mode in ("auto", "cpu"):
        engine = small_device(lab("llama"), cold_kv=mode)
        assert engine.runner.ring is None
        run_one(engine, ids(1000), greedy(2))
        assert CHUNK < 1000
