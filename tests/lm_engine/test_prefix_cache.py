"""The prefix cache in the engine: answers do not depend on it, and what it has is counted.

The accounting is tested without a model in tests/kv_offload and tests/chunked_prefill; here real KV
is found again, partly evicted, copied, forked and lost, and compared with an engine that has no
cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from chunked_prefill.request import SamplingParams
from lm_engine.assembly import cache_key
from lm_engine.engine import Engine
from lm_engine.models.checkpoint import open_checkpoint
from lm_engine.models.loader import load_decoder
from lm_engine.offline import Completion
from tests.checkpoints import TEXT_FAMILIES, VISION_FAMILIES
from tests.lm_engine.harness import (
    TEXT,
    Job,
    Lab,
    Prompt,
    Recorder,
    Result,
    assert_same_answer,
    assert_same_distribution,
    check_idle,
    evict_prefixes,
    evict_rows,
    greedy,
    picture,
    poison_unused,
    preempt,
    recording,
    run,
    run_one,
)

Labs = Callable[[str], Lab]
FAST = ("llama", "qwen3_vl")
NEW_TOKENS = 5


def _families() -> list[object]:
    others = [f for f in (*TEXT_FAMILIES, *VISION_FAMILIES) if f not in FAST]
    return [*FAST, *(pytest.param(f, marks=pytest.mark.slow) for f in others)]


def _prompt(this: Lab) -> Prompt:
    if not this.takes_images:
        return this.prompt(TEXT[:45])
    return this.prompt("see ", picture(64, 40, 1), " or ", picture(40, 64, 2), " ok")


def _observe(engine: Engine, prompt: Prompt) -> tuple[Result, Recorder]:
    with recording(engine, "one") as recorder:
        result = run_one(engine, prompt, greedy(NEW_TOKENS))
    return result, recorder


def _compare(got: tuple[Result, Recorder], want: tuple[Result, Recorder], note: str) -> None:
    """Answers, and all log-probabilities at every sampled position."""
    assert_same_answer(got[0], want[0], note=note)
    for position, row in want[1].rows.items():
        assert_same_distribution(got[1].rows[position][None], row[None], note=note)


def _cached(result: Result) -> int:
    assert result.usage is not None
    return result.usage.cached_tokens


# -- the same answer ----------------------------------------------------------------------------


@pytest.mark.parametrize("family", _families())
def test_cold_warm_and_evicted_to_every_length(lab: Labs, family: str) -> None:
    """Eviction ends the hit at every block boundary, so inside images too; rows of images are
    evicted as well, so what lies behind the hit is encoded again."""
    this = lab(family)
    prompt = _prompt(this)
    want = _observe(this.engine(caching=False), prompt)
    engine = this.engine(block_size=3)
    cold = _observe(engine, prompt)
    assert _cached(cold[0]) == 0
    _compare(cold, want, "cold")
    warm = _observe(engine, prompt)
    assert _cached(warm[0]) == len(prompt) - 1
    _compare(warm, want, "warm")
    cache = engine.scheduler.kv.cache
    lengths = set()
    inside = 0
    for count in range(1, cache.num_blocks + 1):
        evict_prefixes(engine)
        run_one(engine, prompt, greedy(1))
        cache.evict(min(count, cache.num_idle))
        if engine.images is not None:
            evict_rows(engine)
        found = _observe(engine, prompt)
        lengths.add(_cached(found[0]))
        inside += any(s.offset < _cached(found[0]) < s.end for s in prompt.spans)
        _compare(found, want, f"{count} blocks evicted, {_cached(found[0])} tokens found")
    assert len(lengths) >= len(prompt) // 3
    assert lengths >= {0, 3, 6}
    assert inside > 3 or not this.takes_images


@pytest.mark.parametrize("family", _families())
def test_prompts_that_share_a_beginning(lab: Labs, family: str) -> None:
    """Every cut of one prompt is another's beginning; hits end inside blocks and are copied."""
    this = lab(family)
    whole = _prompt(this)
    plain = this.engine(caching=False)
    for size in (1, 4, 16):
        engine = this.engine(block_size=size, blocks=1600 // size)
        run_one(engine, whole, greedy(NEW_TOKENS))
        least = engine.scheduler.kv.cache.least_copied_tokens
        ends = range(1, len(whole), 7)
        if whole.spans:
            ends = range(whole.spans[-1].end, len(whole) + 1)
        for end in ends:
            ids = (*whole.token_ids[:end], 77, 78)
            positions = whole.positions
            if positions is not None:
                t, h, w = (axis[:end] for axis in positions)
                rest = tuple(range(end + whole.position_delta, end + 2 + whole.position_delta))
                positions = ((*t, *rest), (*h, *rest), (*w, *rest))
            other = replace(whole, token_ids=ids, positions=positions)
            shared = end + (whole.token_ids[end : end + 1] == (77,))
            seen, want = _observe(engine, other), _observe(plain, other)
            _compare(seen, want, f"{end} tokens shared, blocks of {size}")
            assert _cached(seen[0]) > shared - size
            assert _cached(seen[0]) <= len(ids) - 1
            assert _cached(seen[0]) == shared or shared % size < least or shared < end


@pytest.mark.parametrize("family", FAST)
def test_chunks_mates_and_preemptions_with_a_cache(lab: Labs, family: str) -> None:
    """Random arrivals of prompts with common beginnings in a small pool."""
    this = lab(family)
    shown = picture(64, 40, 1)
    heads = [TEXT[:30], TEXT[:12]]
    jobs: dict[str, Job] = {}
    for index in range(8):
        parts: list[object] = [heads[index % 2]]
        if this.takes_images and index % 3:
            parts += [shown, TEXT[: index % 3 * 4]]
        jobs[f"r{index}"] = (
            this.prompt(*parts, "xyz"[index % 3] * (index % 4)),  # type: ignore[arg-type]
            greedy(3 + index, n=1 + (index == 5)),
        )
    plain = this.engine(caching=False)
    alone = {name: run_one(plain, *job) for name, job in jobs.items()}
    longest = max(len(prompt) + sampling.max_tokens for prompt, sampling in jobs.values())
    hits = preemptions = evictions = 0
    for seed in range(12):
        draw = random.Random(seed)
        size = draw.choice((1, 3, 4))
        engine = this.engine(
            budget=draw.choice((3, 9, 24, 64)),
            block_size=size,
            blocks=(longest + draw.choice((0, 5, 40))) // size + 1,
            seats=draw.choice((3, 16)),
            rows=draw.choice((48, 300)),
        )

        def disturb(step: int, engine: Engine = engine, draw: random.Random = draw) -> None:
            if draw.random() < 0.05 and engine.scheduler.running:
                preempt(engine, draw.choice(engine.scheduler.running))
            if draw.random() < 0.05 and engine.images is not None:
                evict_rows(engine)

        arrivals = {name: draw.randint(0, 40) for name in jobs}
        results = run(engine, jobs, arrivals=arrivals, before_step=disturb)
        for name, result in results.items():
            for choice in range(jobs[name][1].n):
                assert_same_answer(result, alone[name], choice, f"seed {seed}, {name}#{choice}")
        stats = engine.stats()
        hits += stats.prompt_tokens_cached
        preemptions += stats.preemptions
        evictions += stats.kv_evictions
        sum_of_prompts = sum(len(prompt) for prompt, _ in jobs.values())
        assert stats.prompt_tokens_cached + stats.prompt_tokens_uncached == sum_of_prompts
        assert stats.prefix_cache_queries == sum_of_prompts
    assert hits > 300
    assert preemptions > 0
    assert evictions > 0


def test_choices_of_a_cached_prompt(lab: Labs) -> None:
    this = lab("llama")
    prompt = this.prompt(TEXT[:33])
    sampling = SamplingParams(9, temperature=1.0, seed=3, n=3, ignore_eos=True, logprobs=0)
    want = run_one(this.engine(caching=False), prompt, sampling)
    for size in (1, 4, 7):
        engine = this.engine(block_size=size)
        for turn in range(3):
            result = run_one(engine, prompt, sampling)
            assert _cached(result) == (len(prompt) - 1 if turn else 0)
            for choice in range(3):
                assert result.tokens(choice) == want.tokens(choice)


# -- images -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "smolvlm"])
def test_rows_under_a_hit_are_never_asked_for(lab: Labs, family: str) -> None:
    this = lab(family)
    prompt = _prompt(this)
    engine = this.engine()
    cold = run_one(engine, prompt, greedy(4))
    encoded = engine.stats().images_encoded
    evict_rows(engine)
    warm = run_one(engine, prompt, greedy(4))
    assert_same_answer(warm, cold)
    assert engine.stats().images_encoded == encoded
    assert warm.media_checked == 1, "its images were decoded before"
    # A hit that ends inside the second picture needs that one alone.
    cache = engine.scheduler.kv.cache
    evict_prefixes(engine)
    run_one(engine, prompt, greedy(1))
    encoded = engine.stats().images_encoded
    evict_rows(engine)
    last = prompt.spans[-1]
    keep = (last.offset + last.end) // 2 // engine.scheduler.kv.block_size
    cache.evict(cache.num_idle - keep)
    part = run_one(engine, prompt, greedy(4))
    assert last.offset < _cached(part) < last.end
    assert engine.stats().images_encoded == encoded + 1
    assert part.media_checked == 1
    assert_same_answer(part, cold)


def test_a_hit_that_is_lost_before_admission_has_its_images_encoded(lab: Labs) -> None:
    """The rows were not asked for, as KV was there; then others took its blocks."""
    this = lab("llava")
    prompt = _prompt(this)
    engine = this.engine(blocks=60, seats=2)
    cold = run_one(engine, prompt, greedy(4))
    evict_rows(engine)
    filler = [this.prompt(c * 60) for c in "ab"]
    requests = [p.request(f"f{i}", greedy(40)) for i, p in enumerate(filler)]
    results = {name: Result() for name in ("f0", "f1", "late")}
    for request in requests:
        assert engine.add(request) == []
    lost = False
    for step in range(500):
        if step == 2:
            assert engine.add(prompt.request("late", greedy(4)), prompt.media) == []
        for output in engine.step():
            results[output.request_id].take(output)
        engine.check_invariants()
        poison_unused(engine)
        waiting = engine.scheduler.waiting
        lost |= step == 2 and bool(waiting) and waiting[0].num_cached_tokens > 0
        if step == 4:
            evict_prefixes(engine)
        if not engine.has_work():
            break
    assert lost
    assert _cached(results["late"]) == 0
    assert_same_answer(results["late"], cold)
    check_idle(engine)


# -- known faults of other servers --------------------------------------------------------------


def test_pfx_01_a_stop_string_leaves_nothing_behind_that_changes_answers(lab: Labs) -> None:
    this = lab("llama")
    engine = this.engine()
    prompts = [this.prompt(TEXT[i : i + 20]) for i in range(0, 24, 4)]
    want = [run_one(this.engine(caching=False), p, greedy(16)) for p in prompts]
    stops = tuple(text for text in (w.text()[5:8] for w in want) if text.strip())
    stopped = {f"s{i}": (p, greedy(16, stop=stops)) for i, p in enumerate(prompts)}
    results = run(engine, stopped)
    assert any(result.finish() == "stop" for result in results.values())
    for prompt, cold in zip(prompts, want, strict=True):
        warm = run_one(engine, prompt, greedy(16))
        assert _cached(warm) == len(prompt) - 1
        assert_same_answer(warm, cold)
    # What is cached of an answer ends before the token that ended it, which was never computed.
    for name, (prompt, _) in stopped.items():
        ended = results[name].tokens()
        longer = replace(prompt, token_ids=(*prompt.token_ids, *ended, 7, 8, 9))
        engine2 = this.engine()
        run_one(engine2, *stopped[name])
        assert _cached(run_one(engine2, longer, greedy(1))) == len(prompt) + len(ended) - 1


def test_pfx_02_the_first_answer_is_no_different(lab: Labs) -> None:
    this = lab("llama")
    engine = this.engine(block_size=16)
    prompt = this.prompt(TEXT)
    answers = [run_one(engine, prompt, greedy(12)) for _ in range(5)]
    engine.reset_prefix_cache("")
    answers.append(run_one(engine, prompt, greedy(12)))
    assert [_cached(a) for a in answers] == [0, *[len(prompt) - 1] * 4, 0]
    assert len({tuple(a.tokens()) for a in answers}) == 1
    for answer in answers[1:]:
        assert_same_answer(answer, answers[0])


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_pfx_03_prompt_logprobs_are_computed_not_found(lab: Labs, length: int) -> None:
    this = lab("llama")
    engine = this.engine(block_size=16)
    prompt = Prompt(tuple(random.Random(1).randrange(250) for _ in range(length)))
    run_one(engine, prompt, greedy(2))
    asked = greedy(2, prompt_logprobs=2)
    first, second = run_one(engine, prompt, asked), run_one(engine, prompt, asked)
    assert _cached(first) == _cached(second) == 0
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs == second.prompt_logprobs
    assert len(first.prompt_logprobs) == length
    assert _cached(run_one(engine, prompt, greedy(2))) > 0


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_pfx_06_nothing_is_counted_twice_or_lost(lab: Labs, block_size: int) -> None:
    """A hundred prompts with common beginnings, some aborted; at idle free + cached = total."""
    this = lab("llama")
    draw = random.Random(block_size)
    engine = this.engine(block_size=block_size, blocks=2048 // block_size, budget=128)
    base = [draw.randrange(250) for _ in range(200)]
    for wave in range(5):
        jobs: dict[str, Job] = {}
        for index in range(20):
            ids = base[: draw.randint(1, 150)] + [draw.randrange(250) for _ in range(9)]
            jobs[f"{wave}-{index}"] = (Prompt(tuple(ids)), greedy(draw.randint(1, 9)))
        ends = {draw.randint(1, 25): draw.choice(sorted(jobs)) for _ in range(8)}

        def cut_off(step: int, ends: dict[int, str] = ends) -> None:
            if step in ends:
                engine.abort(ends[step])

        run(engine, jobs, before_step=cut_off, poison=False)
        kv = engine.scheduler.kv
        assert kv.pool.num_free + kv.cache.num_idle == kv.pool.num_blocks
    stats = engine.stats()
    assert stats.prompt_tokens_cached > stats.prompt_tokens_uncached
    engine.reset_prefix_cache("")
    assert kv.pool.num_free == kv.pool.num_blocks


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_pfx_08_a_prompt_of_exactly_k_blocks(lab: Labs, blocks: int) -> None:
    this = lab("llama")
    engine = this.engine(block_size=16)
    prompt = Prompt(tuple(random.Random(2).randrange(250) for _ in range(16 * blocks)))
    results = [run_one(engine, prompt, greedy(6)) for _ in range(3)]
    assert [_cached(r) for r in results] == [0, 16 * blocks - 1, 16 * blocks - 1]
    for result in results[1:]:
        assert_same_answer(result, results[0])
    longer = replace(prompt, token_ids=(*prompt.token_ids, 5))
    want = run_one(this.engine(caching=False), longer, greedy(6))
    more = run_one(engine, longer, greedy(6))
    assert _cached(more) == 16 * blocks
    assert_same_answer(more, want)


def test_pfx_09_thirty_two_at_once_share_a_prefix(lab: Labs) -> None:
    this = lab("llama")
    draw = random.Random(9)
    prefix = tuple(draw.randrange(250) for _ in range(300))
    jobs: dict[str, Job] = {f"r{i}": (Prompt((*prefix, i, 2 * i, 7)), greedy(8)) for i in range(32)}
    plain = run(this.engine(caching=False, block_size=16, blocks=800), jobs, poison=False)
    engine = this.engine(block_size=16, blocks=800)
    results = run(engine, jobs, poison=False)
    for name, result in results.items():
        assert len(result.tokens()) == 8
        assert_same_answer(result, plain[name], note=name)
    # 18 blocks were computed once; the 12 tokens after them share a block with each one's own.
    assert engine.stats().prompt_tokens == 303 + 31 * (12 + 3)
    assert engine.stats().prompt_tokens_cached == 31 * 288


# -- what is reported ---------------------------------------------------------------------------


def test_every_answer_says_what_was_found(lab: Labs) -> None:
    this = lab("llama")
    engine = this.engine()
    text = TEXT[:40]
    first: list[Completion] = engine.generate([text, text], greedy(3))
    (second,) = engine.generate([text], greedy(3))
    size = first[0].usage.prompt_tokens
    whole_blocks = (size - 1) // 4 * 4
    assert [c.usage.cached_tokens for c in (*first, second)] == [0, whole_blocks, size - 1]
    engine.add(this.prompt(text).request("one", greedy(3)))
    usages = [output.usage for _ in range(3) for output in engine.step()]
    assert usages[0] is not None, "with the first token"
    assert usages[0].cached_tokens == size - 1
    assert usages[1] is None
    assert usages[2] is not None


def test_kv_found_after_a_preemption_does_not_count_as_cached(lab: Labs) -> None:
    this = lab("llama")
    engine = this.engine(budget=8)
    prompt = this.prompt(TEXT[:40])

    def disturb(step: int) -> None:
        if step == 3:
            (sequence,) = engine.scheduler.running
            preempt(engine, sequence)

    result = run(engine, {"one": (prompt, greedy(3))}, before_step=disturb)["one"]
    assert _cached(result) == 0
    assert engine.stats().prompt_tokens == len(prompt), "what was there was not computed again"
    assert engine.stats().prompt_tokens_cached == 0


def test_tenants_share_nothing_and_reset_their_own_cache(lab: Labs) -> None:
    this = lab("llama")
    engine = this.engine()
    prompt = this.prompt(TEXT[:40])

    def ask(tenant: str) -> int:
        request = prompt.request("one", greedy(2), tenant=tenant)
        return _cached(run(engine, [request])["one"])

    assert [ask("a"), ask("b"), ask(""), ask("a")] == [0, 0, 0, len(prompt) - 1]
    engine.reset_prefix_cache("a")
    assert [ask("b"), ask("a")] == [len(prompt) - 1, 0]
    assert engine.stats().kv_cleared > 0


def test_without_the_cache_nothing_is_kept(lab: Labs) -> None:
    this = lab("llama")
    engine = this.engine(caching=False)
    prompt = this.prompt(TEXT[:40])
    assert [_cached(run_one(engine, prompt, greedy(2))) for _ in range(2)] == [0, 0]
    stats = engine.stats()
    assert (stats.kv_blocks_cached, stats.prefix_cache_queries) == (0, 0)
    assert stats.prompt_tokens_uncached == 2 * len(prompt)
    assert engine.scheduler.kv.pool.num_free == engine.scheduler.kv.pool.num_blocks


def test_the_cache_key_tells_models_rope_and_number_types_apart(lab: Labs, tmp_path: Path) -> None:
    from kv_offload.layout import KVLayout

    keys = []
    for family, dtype in (("llama", "float32"), ("llama", "bfloat16"), ("qwen3", "float32")):
        checkpoint = open_checkpoint(lab(family).folder)
        config = load_decoder(checkpoint, dtype="float32", device="cpu").config
        layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, dtype=dtype)
        keys.append(cache_key(checkpoint, config, layout))
        other_rope = replace(config, rope=replace(config.rope, theta=config.rope.theta + 1))
        assert cache_key(checkpoint, other_rope, layout) != keys[-1]
        assert cache_key(checkpoint, config, layout) == keys[-1]
        checkpoint.close()
    assert len(set(keys)) == 3


def test_a_cut_off_leader_leaves_what_it_computed(lab: Labs) -> None:
    this = lab("llama")
    engine = this.engine(budget=16)
    prefix = this.prompt(TEXT + TEXT)
    jobs = {
        "leader": (prefix, greedy(2)),
        "next": (replace(prefix, token_ids=(*prefix.token_ids, 4)), greedy(4)),
    }

    def cut_off(step: int) -> None:
        if step == 3:
            engine.abort("leader")

    result = run(engine, jobs, before_step=cut_off)["next"]
    assert _cached(result) == 48
    want = run_one(this.engine(caching=False), *jobs["next"])
    assert_same_answer(result, want)
