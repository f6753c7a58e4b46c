"""Requests inside the engine: budgets, pools, priorities, sampling in company, endings, refusals.

The names in brackets are those of failures that other serving systems had.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from chunked_prefill.request import SamplingParams
from lm_engine.engine import Engine
from tests.lm_engine.harness import (
    TEXT,
    Lab,
    Prompt,
    Result,
    assert_same_answer,
    assert_same_distribution,
    check_idle,
    evict_prefixes,
    greedy,
    run,
    run_one,
    set_budget,
    teacher_forced,
)

Labs = Callable[[str], Lab]


@pytest.fixture
def this(lab: Labs) -> Lab:
    return lab("llama")


@pytest.fixture
def engine(this: Lab) -> Engine:
    return this.engine()


def _ids(count: int, seed: int = 0) -> Prompt:
    draw = random.Random(seed)
    return Prompt(tuple(draw.randrange(250) for _ in range(count)))


def _plain(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens, **({"ignore_eos": True, "logprobs": 2} | fields))


# -- budgets and pools --------------------------------------------------------------------------


def test_a_thousand_tokens_under_any_budget(this: Lab) -> None:
    """SCH-05."""
    engine = this.engine(budget=8192, blocks=70, block_size=16)
    prompt = _ids(1000)
    whole = teacher_forced(engine, prompt)
    answer = run_one(engine, prompt, greedy(4))
    for budget in (7, 16, 17, 64, 255, 256, 257):
        set_budget(engine, budget)
        # Poisoning a pool of this size before each of 143 steps takes longer than the steps.
        forced = teacher_forced(engine, prompt, poison=False)
        assert_same_distribution(forced, whole, note=f"budget {budget}")
        got = run_one(engine, prompt, greedy(4), poison=False)
        assert_same_answer(got, answer, note=f"budget {budget}")


@pytest.mark.slow
def test_a_thousand_tokens_one_by_one(this: Lab) -> None:
    """SCH-05."""
    engine = this.engine(budget=8192, blocks=70, block_size=16)
    prompt = _ids(1000)
    whole = teacher_forced(engine, prompt)
    set_budget(engine, 1)
    assert_same_distribution(teacher_forced(engine, prompt, poison=False), whole)


def test_a_prompt_larger_than_the_pool_is_refused_at_once(this: Lab) -> None:
    """SCH-01: short requests behind it are served."""
    engine = this.engine(blocks=64, block_size=16)
    assert engine.info.kv_capacity_tokens == 1024
    jobs = {
        "over": (_ids(1025), greedy(1)),
        "far over": (_ids(2000), greedy(1)),
        "by its answer": (_ids(1000), greedy(30)),
        "fits": (_ids(1020), greedy(4)),
        "short": (_ids(5), greedy(4)),
    }
    results = run(engine, jobs, poison=False)
    for name in ("over", "far over", "by its answer"):
        error = results[name].error
        assert error is not None
        assert "1024" in error.message
        assert error.param == "max_tokens"
    assert len(results["fits"].tokens()) == len(results["short"].tokens()) == 4


def test_priorities_under_a_small_pool(this: Lab) -> None:
    """SCH-08: 15 requests in 10 seats, then 5 urgent ones. All end as alone, urgent ones sooner."""
    jobs = {f"normal{i}": (_ids(12 + i, i), greedy(16)) for i in range(15)}
    jobs |= {f"urgent{i}": (_ids(14, 100 + i), greedy(16)) for i in range(5)}
    roomy = this.engine()
    alone = {name: run_one(roomy, *job) for name, job in jobs.items()}
    engine = this.engine(blocks=40, seats=10, budget=32)
    results = {name: Result() for name in jobs}
    first_token: dict[str, int] = {}
    for step in range(2000):
        wanted = "normal" if step == 0 else "urgent" if step == 6 else None
        for name, (prompt, sampling) in jobs.items():
            if wanted and name.startswith(wanted):
                request = prompt.request(name, sampling, priority=int(wanted == "normal"))
                assert engine.add(request) == []
        for output in engine.step():
            results[output.request_id].take(output)
            if output.deltas:
                first_token.setdefault(output.request_id, step)
        engine.check_invariants()
        if not engine.has_work():
            break
    check_idle(engine)
    for name, result in results.items():
        assert_same_answer(result, alone[name], note=name)
    assert engine.stats().preemptions > 0
    urgent = [step for name, step in first_token.items() if name.startswith("urgent")]
    normal = [step for name, step in first_token.items() if name.startswith("normal")]
    assert max(urgent) < sorted(normal)[-5]


def test_answers_are_whole_after_preemptions(this: Lab) -> None:
    """KVO-07: a pool for 2.5 requests, 6 requests of 200 new tokens."""
    jobs = {f"r{i}": (_ids(20, i), greedy(200, logprobs=0)) for i in range(6)}
    roomy = this.engine(blocks=60)
    alone = {name: run_one(roomy, *job, poison=False) for name, job in jobs.items()}
    engine = this.engine(blocks=220 * 5 // 2 // 4)
    results = run(engine, jobs)
    assert engine.stats().preemptions > 0
    for name, result in results.items():
        assert len(result.tokens()) == 200
        assert_same_tokens(result, alone[name], 0, name)


def assert_same_tokens(got: Result, want: Result, choice: int, note: str) -> None:
    """For draws, which have no margin: everything must agree."""
    assert got.error is None, note
    assert got.tokens(choice) == want.tokens(choice), note
    assert got.text(choice) == want.text(choice), note
    assert got.finish(choice) == want.finish(choice), note


def test_choices_with_penalties_survive_preemption(this: Lab) -> None:
    """KVO-08: the same with n = 3, seeds and penalties."""
    sampling = _plain(
        40, n=3, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2, logprobs=None
    )
    jobs = {f"r{i}": (_ids(20, i), replace(sampling, seed=i)) for i in range(6)}
    roomy = this.engine()
    alone = {name: run_one(roomy, *job) for name, job in jobs.items()}
    engine = this.engine(blocks=60 * 5 // 2 // 4)
    results = run(engine, jobs)
    assert engine.stats().preemptions > 0
    for name, result in results.items():
        for choice in range(3):
            assert len(result.tokens(choice)) == 40
            assert_same_tokens(result, alone[name], choice, f"{name}#{choice}")


# -- sampling in company ------------------------------------------------------------------------


def test_a_seed_decides_in_any_company(this: Lab, engine: Engine) -> None:
    """SMP-01: ten times alone and ten times among requests without a seed."""
    job = (_ids(15, 1), _plain(20, seed=42, temperature=0.8))
    alone = [run_one(engine, *job).tokens() for _ in range(10)]
    company = []
    for round_ in range(10):
        mates = {f"m{i}": (_ids(5 + i, i), _plain(9 + i, temperature=1.0)) for i in range(round_)}
        company.append(run(engine, {**mates, "r": job})["r"].tokens())
    assert all(tokens == alone[0] for tokens in alone + company)
    other = run_one(engine, job[0], replace(job[1], seed=43)).tokens()
    assert other != alone[0]
    unseeded = {tuple(run_one(engine, job[0], replace(job[1], seed=None)).tokens()) for _ in "abc"}
    assert len(unseeded) == 3


def test_penalties_do_not_depend_on_the_order_of_the_batch(engine: Engine) -> None:
    """SMP-02."""
    jobs = {
        "a": (_ids(15, 1), greedy(20, repetition_penalty=2.0)),
        "b": (_ids(10, 2), _plain(12, seed=7, top_k=1)),
        "c": (_ids(10, 2), greedy(16, presence_penalty=1.5, frequency_penalty=0.5)),
    }
    alone = {name: run_one(engine, *job) for name, job in jobs.items()}
    for order in ("abc", "cba", "bac"):
        results = run(engine, {name: jobs[name] for name in order})
        for name in jobs:
            assert_same_answer(results[name], alone[name], note=f"{name} in {order}")
    plain = run_one(engine, jobs["a"][0], greedy(20))
    assert plain.tokens() != alone["a"].tokens()


_NAN = math.nan
_REFUSED: dict[str, dict[str, Any]] = {
    "bias past the end": {"logit_bias": ((384, 1.0),)},
    "bias below zero": {"logit_bias": ((-1, 1.0),)},
    "bias far out": {"logit_bias": ((2**40, 1.0),)},
    "huge bias": {"logit_bias": ((1, 1e9),)},
    "bias is no number": {"logit_bias": ((1, _NAN),)},
    "stop past the end": {"stop_token_ids": (384,), "min_tokens": 2},
    "stop below zero": {"stop_token_ids": (-1,), "min_tokens": 2},
    "temperature": {"temperature": _NAN},
    "top_p": {"top_p": _NAN},
    "top_k": {"top_k": -1},
    "min_p": {"min_p": 1.5},
    "repetition": {"repetition_penalty": 0.0},
    "n": {"n": 0},
    "n above the seats": {"n": 33},
    "logprobs": {"logprobs": 21},
    "prompt_logprobs": {"prompt_logprobs": -1},
    "min_tokens": {"min_tokens": 6},
    "empty stop": {"stop": ("",)},
    "max_tokens": {"max_tokens": 0},
}


def test_what_cannot_be_served_is_refused_and_leaves_no_trace(this: Lab, engine: Engine) -> None:
    """SMP-05, SMP-06: the canary that runs meanwhile keeps every bit."""
    job = (_ids(12, 3), greedy(len(_REFUSED) + 8))
    before = run_one(engine, *job)
    evict_prefixes(engine)
    bad = {
        name: _ids(4).request(name, SamplingParams(**({"max_tokens": 5} | fields)))
        for name, fields in _REFUSED.items()
    }
    sound = _ids(4).request("sound", greedy(2))
    bad |= {
        "ids past the end": replace(sound, request_id="ids past the end", token_ids=(1, 384)),
        "ids below zero": replace(sound, request_id="ids below zero", token_ids=(1, -1)),
        "no ids": replace(sound, request_id="no ids", token_ids=()),
        "the canary's own name": replace(sound, request_id="canary"),
    }
    queue = list(bad.items())

    def refuse(step: int) -> None:
        if step and queue:
            name, request = queue.pop()
            (output,) = engine.add(request)
            assert output.finished, name
            assert output.error is not None, name
            assert output.error.kind == "invalid", name
            assert output.error.param, name
            assert output.error.message, name

    during = run(engine, {"canary": job}, before_step=refuse)["canary"]
    assert not queue
    assert [d.logprobs for d in during.deltas] == [d.logprobs for d in before.deltas]
    assert during.text() == before.text()


@pytest.mark.parametrize("stop", [(5,), (7, 250), tuple(range(250))])
def test_allowed_stop_ids_with_min_tokens(engine: Engine, stop: tuple[int, ...]) -> None:
    """SMP-06: banned ids of one row do not touch the rows beside it."""
    job = (_ids(12, 3), greedy(12))
    alone = run_one(engine, *job)
    mate = (_ids(12, 4), greedy(12, min_tokens=5, stop_token_ids=stop))
    results = run(engine, {"mate": mate, "canary": job})
    assert_same_answer(results["canary"], alone)
    assert len(results["mate"].tokens()) > 5
    assert not set(results["mate"].tokens()[:5]) & set(stop)


# -- choices and streams ------------------------------------------------------------------------


def test_three_choices_are_counted_once(this: Lab, engine: Engine) -> None:
    """API-09."""
    prompt = this.prompt(TEXT)
    result, again = (run_one(engine, prompt, _plain(12, n=3, seed=3)) for _ in "ab")
    assert sorted({delta.index for delta in result.deltas}) == [0, 1, 2]
    assert [result.finish(choice) for choice in range(3)] == ["length"] * 3
    assert len({tuple(result.tokens(choice)) for choice in range(3)}) == 3
    assert all(result.tokens(choice) == again.tokens(choice) for choice in range(3))
    assert result.usage is not None
    assert result.usage.prompt_tokens == len(prompt)
    assert result.usage.completion_tokens == 36
    assert result.usage.cached_tokens <= len(prompt)
    one = run_one(engine, prompt, _plain(12, n=1, seed=3))
    assert one.tokens() == result.tokens(0)


def test_streams_under_concurrency_join_to_the_text(this: Lab) -> None:
    """API-11: 40 streams, byte-level tokens that rarely make whole characters, stop strings."""
    jobs = {}
    for index in range(40):
        stop = ("e",) if index % 3 == 0 else ("\ufffd\ufffd", "a") if index % 3 == 1 else ()
        sampling = SamplingParams(32, seed=index, temperature=1.2, stop=stop, logprobs=0)
        jobs[f"s{index}"] = (_ids(3 + index % 11, index), sampling)
    alone = {}
    roomy = this.engine()
    for name, job in jobs.items():
        alone[name] = run_one(roomy, *job)
    engine = this.engine(budget=24, blocks=90, seats=12)
    results = run(engine, jobs)
    for name, result in results.items():
        assert_same_tokens(result, alone[name], 0, name)
        tokens = result.tokens()
        stopped = result.finish() == "stop"
        reason = result.deltas[-1].stop_reason
        whole = engine.tokenizer.decode(
            tokens[:-1] if stopped and reason is None else tokens, skip_special_tokens=True
        )
        if isinstance(reason, str):
            assert result.text() == whole[: whole.index(reason)]
        else:
            assert result.text() == whole
    assert {result.finish() for result in results.values()} == {"stop", "length"}


def test_every_ending_has_its_reason(this: Lab) -> None:
    """CTX-05: max_tokens, the end of the window, a stop string, an end token as the last one."""
    engine = this.engine(max_model_len=64)
    (eos, *_) = engine.info.eos_token_ids
    towards_eos = ((eos, 100.0),)
    letter = this.encode("q")[0]
    jobs = {
        "max_tokens": (_ids(5), greedy(5)),
        "window": (_ids(40), greedy(24)),
        "stop string": (_ids(5), greedy(9, stop=("qq",), logit_bias=((letter, 100.0),))),
        "stop id": (_ids(5), greedy(9, stop_token_ids=(letter,), logit_bias=((letter, 100.0),))),
        "end": (_ids(5), greedy(9, ignore_eos=False, logit_bias=towards_eos)),
        "end at max_tokens": (
            _ids(5),
            greedy(5, ignore_eos=False, min_tokens=4, logit_bias=towards_eos),
        ),
        "ignored end": (_ids(5), greedy(5, logit_bias=towards_eos)),
    }
    results = run(engine, jobs)
    endings = {
        name: (result.finish(), result.deltas[-1].stop_reason, len(result.tokens()))
        for name, result in results.items()
    }
    assert endings == {
        "max_tokens": ("length", None, 5),
        "window": ("length", None, 24),
        "stop string": ("stop", "qq", 2),
        "stop id": ("stop", letter, 1),
        "end": ("stop", None, 1),
        "end at max_tokens": ("stop", None, 5),
        "ignored end": ("length", None, 5),
    }
    assert results["stop string"].text() == results["end"].text() == ""
    (over,) = engine.add(_ids(40).request("over", greedy(25)))
    assert over.error is not None
    assert over.error.param == "max_tokens"


def test_prompt_progress_and_timing(this: Lab) -> None:
    engine = this.engine(budget=8)
    prompt = _ids(30)
    assert engine.add(prompt.request("r", greedy(3))) == []
    progress, last = [], None
    while engine.has_work():
        for output in engine.step():
            if output.prompt_progress:
                progress.append(output.prompt_progress)
            last = output
    assert progress == [(8, 30), (16, 30), (24, 30)]
    assert last is not None
    assert last.timing is not None
    timing = last.timing
    assert min(timing.queue_s, timing.prefill_s, timing.decode_s) >= 0
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generation_tokens) == (30, 3)
    assert stats.iteration_tokens is not None
    assert sum(stats.iteration_tokens.counts) == 6
    assert stats.iteration_tokens.total == 32
