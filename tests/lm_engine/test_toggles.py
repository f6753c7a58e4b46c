"""A token's logits depend on what stands before it alone - whatever happens to its request.

Each test runs a request in one pass and then under one kind of disturbance, and compares the logits
of every position (|difference of log-probabilities| <= 1e-4) and the tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
from torch import Tensor

from chunked_prefill.request import SamplingParams
from lm_engine.engine import Engine
from tests.checkpoints import TEXT_FAMILIES, VISION_FAMILIES
from tests.lm_engine.harness import (
    TEXT,
    Lab,
    Prompt,
    Recorder,
    Result,
    assert_same_answer,
    assert_same_distribution,
    check_idle,
    evict_rows,
    greedy,
    picture,
    preempt,
    recording,
    run,
    run_one,
    set_budget,
    teacher_forced,
    warm,
)

Labs = Callable[[str], Lab]
FAST = ("llama", "qwen3_vl")
"""One plain text model, and the one with the most special ways: M-RoPE, deepstack, qk-norm."""
NEW_TOKENS = 6


def _families(fast: tuple[str, ...] = FAST) -> list[object]:
    others = [f for f in (*TEXT_FAMILIES, *VISION_FAMILIES) if f not in fast]
    return [*fast, *(pytest.param(f, marks=pytest.mark.slow) for f in others)]


class Setting(NamedTuple):
    lab: Lab
    engine: Engine
    prompt: Prompt
    answer: Result
    """Of a single pass."""
    logits: Tensor
    """[prompt + answer - 1, vocab], of that single pass."""


def _prompt(this: Lab) -> Prompt:
    if not this.takes_images:
        return this.prompt(TEXT[:40])
    return this.prompt("see ", picture(64, 40, 1), " or ", picture(40, 64, 2), " ok")


@pytest.fixture
def setting(lab: Labs, family: str) -> Setting:
    this = lab(family)
    engine = this.engine()
    prompt = _prompt(this)
    warm(engine, prompt)
    answer, recorder = _observe(engine, prompt)
    count = len(prompt) + NEW_TOKENS - 1
    logits = recorder.matrix(count)
    # The decoded positions agree with a pass that has the answer as part of its prompt.
    forced = teacher_forced(engine, prompt, answer.tokens()[:-1])
    assert_same_distribution(forced, logits, note="decode against prefill")
    return Setting(this, engine, prompt, answer, logits)


def _observe(
    engine: Engine,
    prompt: Prompt,
    mates: dict[str, tuple[Prompt, SamplingParams]] | None = None,
    **how: object,
) -> tuple[Result, Recorder]:
    """The request with its logits recorded, in the company of `mates`."""
    jobs = {"one": (prompt, greedy(NEW_TOKENS, prompt_logprobs=0))} | (mates or {})
    with recording(engine, "one") as recorder:
        results = run(engine, jobs, **how)  # type: ignore[arg-type]
    for name, result in results.items():
        assert result.error is None, f"{name}: {result.error}"
        assert result.finished == 1
    return results["one"], recorder


def _compare(setting: Setting, seen: tuple[Result, Recorder], note: str) -> None:
    result, recorder = seen
    assert_same_answer(result, setting.answer, note=note)
    assert_same_distribution(recorder.matrix(len(setting.logits)), setting.logits, note=note)


@pytest.mark.parametrize("family", _families())
def test_every_cut_position(setting: Setting) -> None:
    engine, prompt = setting.engine, setting.prompt
    for cut in range(1, len(prompt)):

        def two_chunks(step: int, cut: int = cut) -> None:
            if step == 1:
                (sequence,) = engine.scheduler.running
                assert sequence.num_computed_tokens == cut
            set_budget(engine, cut if step == 0 else 512)

        _compare(setting, _observe(engine, prompt, before_step=two_chunks), f"cut at {cut}")


@pytest.mark.parametrize("family", _families())
def test_every_chunk_size(setting: Setting) -> None:
    engine, prompt = setting.engine, setting.prompt
    for size in range(1, len(prompt) + 1):
        set_budget(engine, size)
        steps = engine.scheduler.step
        seen = _observe(engine, prompt)
        assert engine.scheduler.step - steps == -(-len(prompt) // size) + NEW_TOKENS - 1
        _compare(setting, seen, f"chunks of {size}")


@pytest.mark.parametrize("family", _families())
def test_cold_images_in_chunks(setting: Setting) -> None:
    """The same with rows that arrive while the text before them is computed."""
    engine, prompt = setting.engine, setting.prompt
    for size in (1, 3, 8, 64):
        set_budget(engine, size)
        if engine.images is not None:
            evict_rows(engine)
        _compare(setting, _observe(engine, prompt), f"cold, chunks of {size}")
    if engine.images is not None:
        assert engine.stats().images_encoded == 2 + 4 * 2


def _mate(this: Lab, index: int) -> tuple[Prompt, SamplingParams]:
    draw = random.Random(index)
    text = TEXT[: draw.randint(1, 30)]
    parts = [text]
    if this.takes_images and index % 3 == 0:
        parts += [picture(40 + index, 60, index), "?"]  # type: ignore[list-item]
    sampling = SamplingParams(
        draw.randint(1, 12),
        temperature=draw.choice((0.0, 0.7, 1.3)),
        top_p=draw.choice((1.0, 0.8)),
        repetition_penalty=draw.choice((1.0, 1.3)),
        seed=index,
        logprobs=draw.choice((None, 3)),
        n=draw.choice((1, 1, 2)),
        ignore_eos=True,
    )
    return this.prompt(*parts), sampling


@pytest.mark.parametrize("family", _families())
def test_one_to_sixteen_batch_mates(setting: Setting) -> None:
    engine = setting.engine
    for count in range(1, 17):
        mates = {f"mate{i}": _mate(setting.lab, i) for i in range(count)}
        set_budget(engine, 48 if count % 2 else 20)
        draw = random.Random(count)
        arrivals = {name: draw.randint(0, 6) for name in (*mates, "one")}
        seen = _observe(engine, setting.prompt, mates, arrivals=arrivals)
        _compare(setting, seen, f"{count} mates")


# -- arrival orders -----------------------------------------------------------------------------


@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", FAST)
@pytest.mark.parametrize(
    "seeds", [range(10), pytest.param(range(10, 200), marks=pytest.mark.slow)], ids=str
)
def test_arrival_orders(lab: Labs, family: str, seeds: range) -> None:
    """Eight requests at random times, with random budgets, and little KV and few rows."""
    this = lab(family)
    jobs = {}
    for index in range(8):
        prompt, sampling = _mate(this, index)
        jobs[f"r{index}"] = (prompt, greedy(sampling.max_tokens, n=sampling.n))
    roomy = this.engine()
    alone = {name: run_one(roomy, *job) for name, job in jobs.items()}
    longest = max(len(prompt) + sampling.max_tokens for prompt, sampling in jobs.values())
    preemptions = evictions = 0
    for seed in seeds:
        draw = random.Random(seed)
        block_size = draw.choice((1, 3, 4))
        engine = this.engine(
            budget=draw.choice((3, 8, 17, 40)),
            block_size=block_size,
            blocks=(longest + draw.choice((0, 4, 15, 40))) // block_size + 1,
            seats=draw.choice((2, 4, 16)),
            rows=draw.choice((32, 48, 300)),
        )
        order = {name: draw.randint(0, 25) for name in jobs}
        names = draw.sample(sorted(jobs), len(jobs))
        results = run(engine, {name: jobs[name] for name in names}, arrivals=order)
        for name, result in results.items():
            for choice in range(jobs[name][1].n):
                assert_same_answer(result, alone[name], choice, f"seed {seed}, {name}#{choice}")
        preemptions += engine.stats().preemptions
        evictions += engine.images.arena.stats().evictions if engine.images else 1
    assert preemptions > 0
    assert evictions > 0


# -- preemption and memory ----------------------------------------------------------------------


@pytest.mark.parametrize("family", _families())
def test_preemption_before_every_step(setting: Setting) -> None:
    """Also while prefilling, while images wait, and twice in a row; rows are encoded again."""
    engine, prompt = setting.engine, setting.prompt
    set_budget(engine, 7)
    mates = {"mate": (setting.lab.prompt("another one"), greedy(9))}
    start = engine.scheduler.step
    _observe(engine, prompt, mates)
    steps = engine.scheduler.step - start
    assert steps > NEW_TOKENS
    encoded = engine.stats().images_encoded
    for when in range(1, steps):
        hit: list[int] = []

        def disturb(step: int, when: int = when, hit: list[int] = hit) -> None:
            if step not in (when, when + 1):
                return
            for sequence in engine.scheduler.running:
                if sequence.request.request_id == "one":
                    hit.append(step)
                    preempt(engine, sequence)
                    if engine.images is not None:
                        evict_rows(engine)

        seen = _observe(engine, prompt, mates, before_step=disturb)
        _compare(setting, seen, f"preempted before step {when}")
        if when < len(prompt) // 7:
            assert hit == [when, when + 1]
    if engine.images is not None:
        assert engine.stats().images_encoded > encoded + steps


@pytest.mark.parametrize("family", ["llava", "smolvlm", "qwen2_5_vl"])
def test_an_arena_that_holds_one_image(lab: Labs, family: str) -> None:
    """Two requests of three images each, one that repeats its first image at its end."""
    this = lab(family)
    a, b, c = (picture(60 + 10 * i, 50, i) for i in range(3))
    jobs = {
        "abc": (this.prompt("x ", a, " y ", b, " z ", c, "?"), greedy(5)),
        "aba": (this.prompt(a, " and ", b, " and ", a, "?"), greedy(5)),
        "text": (this.prompt("ten cats"), greedy(5)),
    }
    roomy = this.engine()
    alone = {name: run_one(roomy, *job) for name, job in jobs.items()}
    largest = max(item.plan.num_rows for prompt, _ in jobs.values() for item in prompt.media)
    engine = this.engine(rows=largest, budget=16)
    for arrivals in ({}, {"abc": 3}, {"aba": 2, "text": 4}, {"abc": 9}):
        results = run(engine, jobs, arrivals=arrivals)
        for name, result in results.items():
            assert_same_answer(result, alone[name], note=f"{name} {arrivals}")
            assert result.media_checked == (name != "text")


@pytest.mark.parametrize("family", FAST)
def test_aborts_at_random_points(lab: Labs, family: str) -> None:
    this = lab(family)
    engine = this.engine(budget=13, blocks=60, rows=48, seats=6)
    canary = this.prompt("the cat in the tin")
    before = run_one(engine, canary, greedy(8))
    for seed in range(15):
        draw = random.Random(seed)
        jobs = {f"r{i}": _mate(this, i) for i in range(6)}
        jobs["canary"] = (canary, greedy(8))
        ends = {draw.randint(0, 25): f"r{draw.randint(0, 5)}" for _ in range(8)}

        def cut_off(step: int, ends: dict[int, str] = ends) -> None:
            if step in ends:
                engine.abort(ends[step])
                engine.check_invariants()

        arrivals = {name: draw.randint(0, 10) for name in jobs}
        results = run(engine, jobs, arrivals=arrivals, before_step=cut_off)
        assert_same_answer(results["canary"], before, note=f"seed {seed}")
    check_idle(engine)


# -- forks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAST)
@pytest.mark.parametrize("block_size", [1, 4, 7])
def test_forks_equal_separate_passes(lab: Labs, family: str, block_size: int) -> None:
    """Every choice of n = 4 is what the sampler draws from a pass of its own over its history,
    which penalties look at too."""
    from lm_engine.sampler import SamplingRow, sample

    this = lab(family)
    prompt = _prompt(this)
    engine = this.engine(block_size=block_size, budget=11)
    sampling = SamplingParams(
        10,
        temperature=1.1,
        seed=5,
        n=4,
        presence_penalty=2.0,
        frequency_penalty=2.0,
        repetition_penalty=1.3,
        logit_bias=((65, 3.0), (66, 3.0)),
        ignore_eos=True,
        logprobs=0,
    )
    result = run_one(engine, prompt, sampling)
    set_budget(engine, 512)
    drawn = set()
    for choice in range(4):
        tokens = result.tokens(choice)
        assert len(tokens) == 10
        forced = teacher_forced(engine, prompt, tokens)[len(prompt) - 1 :]
        for index, token in enumerate(tokens):
            history = tuple(tokens[:index])
            row = SamplingRow(sampling, 5, choice, prompt.token_ids, history)
            (found,) = sample(forced[index][None], [row], lambda _: b"")
            assert found.token_id == token, f"choice {choice}, token {index}"
        drawn.add(tuple(tokens))
    assert len(drawn) == 4


@pytest.mark.parametrize("family", FAST)
def test_forks_survive_preemption(lab: Labs, family: str) -> None:
    this = lab(family)
    prompt = _prompt(this)
    sampling = SamplingParams(12, temperature=1.0, seed=9, n=3, ignore_eos=True, logprobs=0)
    alone = run_one(this.engine(), prompt, sampling)
    blocks = -(-(len(prompt) + 12) // 4) + 4
    engine = this.engine(blocks=blocks, rows=64)
    result = run_one(engine, prompt, sampling)
    assert engine.stats().preemptions > 0
    for choice in range(3):
        assert result.tokens(choice) == alone.tokens(choice)
        assert result.text(choice) == alone.text(choice)


# -- the embedding cache ------------------------------------------------------------------------


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_cached_evicted_and_encoded_again_are_the_same(lab: Labs, family: str) -> None:
    this = lab(family)
    prompt = _prompt(this)
    engine = this.engine()
    cold = teacher_forced(engine, prompt)
    encoded = engine.stats().images_encoded
    assert encoded == 2
    cached = teacher_forced(engine, prompt)
    assert engine.stats().images_encoded == encoded
    assert_same_distribution(cached, cold)
    evict_rows(engine)
    again = teacher_forced(engine, prompt)
    assert engine.stats().images_encoded == 2 * encoded
    assert_same_distribution(again, cold)


def test_two_requests_for_one_image_share_one_encoding(lab: Labs) -> None:
    this = lab("llava")
    engine = this.engine()
    shown = picture(50, 50, 3)
    jobs = {
        name: (this.prompt(text, shown, "?"), greedy(4)) for name, text in (("a", "x "), ("b", ""))
    }
    results = run(engine, jobs)
    assert engine.stats().images_encoded == 1
    assert engine.stats().image_cache_hits == 1
    assert all(result.media_checked == 1 for result in results.values())
