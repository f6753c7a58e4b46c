"""Requests larger than the device's KV pool: the same answers, to the bit, and nobody hangs."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from chunked_prefill.request import Request
from lm_engine.engine import Engine
from lm_engine.kv_sizing import HostTierError
from tests.lm_engine.harness import (
    Lab,
    Prompt,
    Recorder,
    Result,
    assert_same_answer,
    assert_same_distribution,
    greedy,
    picture,
    preempt,
    recording,
    run,
    run_one,
)

GetLab = Callable[[str], Lab]
CHUNK = 64
DEVICE_TOKENS = 640
"""The least that a large sequence needs at chunks of 64: two of a chunk and a superblock."""
HOST_TOKENS = 2048


def small_device(lab: Lab, *, host_tokens: int = HOST_TOKENS, **options: object) -> Engine:
    return lab.engine(
        budget=CHUNK,
        block_size=4,
        blocks=DEVICE_TOKENS // 4,
        host_tokens=host_tokens,
        max_model_len=host_tokens,
        **options,  # type: ignore[arg-type]
    )


def resident(lab: Lab) -> Engine:
    return lab.engine(budget=CHUNK, block_size=4, blocks=600, max_model_len=HOST_TOKENS)


def ids(count: int, seed: int = 0) -> Prompt:
    rng = random.Random(seed)
    return Prompt(tuple(rng.randrange(5, 60) for _ in range(count)))


def generated(recorder: Recorder) -> torch.Tensor:
    """[tokens, vocab]: the logits that each generated token was chosen from."""
    return torch.stack([recorder.rows[position] for position in sorted(recorder.rows)])


def logits_of(engine: Engine, prompt: Prompt, count: int) -> tuple[Result, torch.Tensor]:
    with recording(engine, "one") as recorder:
        result = run_one(engine, prompt, greedy(count))
    return result, generated(recorder)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_cold_and_resident_give_the_same_bits(lab: GetLab, family: str) -> None:
    tiny = lab(family)
    prompt = ids(1500)
    want, want_logits = logits_of(resident(tiny), prompt, 20)
    engine = small_device(tiny)
    most = 0

    def watch(_: int) -> None:
        nonlocal most
        for sequence in engine.scheduler.running:
            most = max(most, len(engine.scheduler.kv.cold_slots(sequence.seq_id)))

    with recording(engine, "one") as recorder:
        got = run_one(engine, prompt, greedy(20), before_step=watch)
    assert most == (1500 + 20 - DEVICE_TOKENS) // 256 + 1
    assert got.tokens() == want.tokens()
    assert torch.equal(generated(recorder), want_logits)


def test_an_image_may_lie_in_the_cold_beginning(lab: GetLab) -> None:
    tiny = lab("qwen2_5_vl")
    text = "the thing in the rain: a tin ring, another one, then ten more and a cat " * 12
    prompt = tiny.prompt("a ", picture(200, 120), text, picture(90, 90, 1), text)
    assert len(prompt) > DEVICE_TOKENS + 200
    want, want_logits = logits_of(resident(tiny), prompt, 8)
    got, logits = logits_of(small_device(tiny), prompt, 8)
    assert got.tokens() == want.tokens()
    assert_same_distribution(logits, want_logits)


def test_mates_are_served_beside_it(lab: GetLab) -> None:
    tiny = lab("llama")
    jobs = {"large": (ids(1200), greedy(30))}
    jobs |= {f"small{i}": (ids(20 + 9 * i, i + 1), greedy(25)) for i in range(5)}
    alone = resident(tiny)
    want = {name: run_one(alone, *job) for name, job in jobs.items()}
    got = run(small_device(tiny), jobs, arrivals={"small3": 12, "small4": 25})
    for name, answer in want.items():
        assert_same_answer(got[name], answer, note=name)


def test_two_that_do_not_fit_together_take_turns(lab: GetLab) -> None:
    tiny = lab("llama")
    jobs = {name: (ids(1400, seed), greedy(10)) for seed, name in enumerate("ab")}
    assert DEVICE_TOKENS + HOST_TOKENS < 2 * 1410
    alone = resident(tiny)
    want = {name: run_one(alone, *job) for name, job in jobs.items()}
    engine = small_device(tiny)
    together = 0

    def watch(_: int) -> None:
        nonlocal together
        together = max(together, len(engine.scheduler.running))

    got = run(engine, jobs, before_step=watch)
    assert together == 1
    for name, answer in want.items():
        assert_same_answer(got[name], answer, note=name)


def test_two_that_fit_share_the_device(lab: GetLab) -> None:
    tiny = lab("llama")
    jobs = {name: (ids(700, seed), greedy(10)) for seed, name in enumerate("ab")}
    alone = resident(tiny)
    want = {name: run_one(alone, *job) for name, job in jobs.items()}
    got = run(small_device(tiny), jobs)
    for name, answer in want.items():
        assert_same_answer(got[name], answer, note=name)


@pytest.mark.parametrize("at", [3, 11, 20, 26])
def test_it_survives_losing_everything(lab: GetLab, at: int) -> None:
    tiny = lab("llama")
    job = (ids(1200), greedy(12))
    want = run_one(resident(tiny), *job)
    engine = small_device(tiny)

    def disturb(step: int) -> None:
        if step == at:
            for sequence in engine.scheduler.running:
                preempt(engine, sequence)

    assert_same_answer(run_one(engine, *job, before_step=disturb), want)


def test_an_abort_frees_the_host_too(lab: GetLab) -> None:
    engine = small_device(lab("llama"))

    def stop(step: int) -> None:
        if step == 18:
            assert any(engine.scheduler.kv.cold_slots(s.seq_id) for s in engine.scheduler.running)
            engine.abort("one")

    run(engine, {"one": (ids(1200), greedy(12))}, before_step=stop)


def test_a_warm_beginning_is_used_as_far_as_the_device_has_room(lab: GetLab) -> None:
    tiny = lab("llama")
    prompt = ids(1200)
    want = run_one(resident(tiny), prompt, greedy(6))
    engine = small_device(tiny)
    run_one(engine, Prompt(prompt.token_ids[:500]), greedy(2))
    got = run_one(engine, prompt, greedy(6))
    assert got.usage is not None
    assert 0 < got.usage.cached_tokens <= DEVICE_TOKENS // 2
    assert_same_answer(got, want)


def test_what_no_tier_holds_is_refused_with_numbers(lab: GetLab) -> None:
    """Before anything is computed for them; the two that are too large are told at `add`."""
    engine = small_device(lab("llama"))
    refused = [
        engine.add(Request("again", ids(2000).token_ids, greedy(50))),
        engine.add(Request("choices", ids(1000).token_ids, greedy(4, n=5))),
    ]
    assert all(event.finished and event.error for (event,) in refused)
    assert not engine.has_work()
    assert engine.scheduler.step == 0
    results = run(
        engine,
        [
            Request("long", ids(2000).token_ids, greedy(48)),
            Request("longer", ids(2000).token_ids, greedy(50)),
            Request("many", ids(1000).token_ids, greedy(4, n=5)),
        ],
    )
    assert results["long"].error is None
    for name, words in (("longer", "asks for 50"), ("many", "fewer choices")):
        error = results[name].error
        assert error is not None
        assert words in error.message


def test_peak_device_memory_is_the_pool_and_the_rest_is_the_hosts(lab: GetLab) -> None:
    engine = small_device(lab("llama"))
    run_one(engine, ids(1900), greedy(4))
    cache = engine.runner.cache
    assert cache.num_slots == DEVICE_TOKENS
    assert cache.host is not None
    assert cache.host.num_superblocks * 256 == HOST_TOKENS


def test_a_pool_too_small_for_it_is_refused_at_start(lab: GetLab) -> None:
    with pytest.raises(HostTierError, match=r"holds 400 tokens; .*--max-num-batched-tokens 512"):
        lab("llama").engine(budget=512, block_size=4, blocks=100, host_tokens=2048)


def test_a_host_tier_of_less_than_a_superblock_is_refused(lab: GetLab) -> None:
    with pytest.raises(HostTierError, match="256 tokens of this model's KV take"):
        lab("llama").engine(block_size=4, blocks=400, host_tokens=100)
