"""Host and disk behind the prefix cache: the same answers wherever KV comes from, and no leak.

The accounting is tested without a model in tests/kv_offload; here real KV goes down and comes back.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from chunked_prefill.request import SamplingParams
from kv_offload.copy_manual import ManualCopyEngine
from lm_engine.engine import Engine
from lm_engine.kv_sizing import HostTierError
from tests.checkpoints import TEXT_FAMILIES
from tests.lm_engine.harness import (
    Lab,
    Prompt,
    Result,
    assert_same_answer,
    evict_prefixes,
    evict_rows,
    greedy,
    picture,
    preempt,
    run,
    run_one,
)

GetLab = Callable[[str], Lab]
CHUNK = 64
HOST_TOKENS = 4096
NEW_TOKENS = 6


def small(lab: Lab, **options: object) -> Engine:
    """800 tokens on the device."""
    options = {"blocks": 200, "host_tokens": HOST_TOKENS, "max_model_len": 2048} | options
    return lab.engine(budget=CHUNK, block_size=4, **options)  # type: ignore[arg-type]


def plain(lab: Lab) -> Engine:
    return lab.engine(budget=CHUNK, block_size=4, blocks=600, max_model_len=2048, caching=False)


def ids(count: int, seed: int = 0) -> Prompt:
    rng = random.Random(seed)
    return Prompt(tuple(rng.randrange(5, 60) for _ in range(count)))


def cached(result: Result) -> int:
    assert result.usage is not None
    return result.usage.cached_tokens


def sources(engine: Engine) -> tuple[int, int, int, int]:
    """Prompt tokens from the device, the host, the disk, and computed."""
    stats = engine.stats()
    below = stats.prompt_tokens_from_host, stats.prompt_tokens_from_disk
    return stats.prompt_tokens_cached - sum(below), *below, stats.prompt_tokens_uncached


# -- hits ---------------------------------------------------------------------------------------


def _families() -> list[object]:
    fast = ("llama", "mistral")
    others = [f for f in TEXT_FAMILIES if f not in fast]
    return [*fast, *(pytest.param(f, marks=pytest.mark.slow) for f in others)]


@pytest.mark.parametrize("family", _families())
def test_cold_device_flood_host_and_host_again(lab: GetLab, family: str) -> None:
    """KVO-04: all five answers are the same."""
    tiny, prompt = lab(family), ids(600)
    want = run_one(plain(tiny), prompt, greedy(NEW_TOKENS))
    engine = small(tiny)
    found = []
    strangers = iter(range(7, 20))
    for kind in ("cold", "device", "flood", "host", "flood", "host again"):
        if kind == "flood":
            for _ in range(2):
                run_one(engine, ids(700, next(strangers)), greedy(2))
            continue
        got = run_one(engine, prompt, greedy(NEW_TOKENS))
        assert_same_answer(got, want, note=kind)
        found.append(cached(got))
    assert found == [0, 599, 512, 512]
    assert sources(engine)[:3] == (599, 1024, 0)
    assert sum(sources(engine)) == 4 * 600 + 4 * 700


def test_a_hit_on_the_device_is_continued_from_the_host(lab: GetLab) -> None:
    tiny, prompt = lab("llama"), ids(700)
    want = run_one(plain(tiny), prompt, greedy(NEW_TOKENS))
    engine = small(tiny)
    run_one(engine, prompt, greedy(NEW_TOKENS))
    cache = engine.scheduler.kv.cache
    for keep in (0, 3, 64, 70, 100):
        cache.evict(cache.num_idle - keep)
        got = run_one(engine, prompt, greedy(NEW_TOKENS))
        assert_same_answer(got, want, note=f"{keep} blocks on the device")
        assert cached(got) == 512
        evict_prefixes(engine)
        run_one(engine, prompt, greedy(NEW_TOKENS))
    assert sources(engine)[0] == 4 * (3 + 64 + 70 + 100)


def test_a_hit_from_the_host_may_end_inside_an_image(lab: GetLab) -> None:
    tiny = lab("qwen2_5_vl")
    text = "the thing in the rain: a tin ring, another one, then ten more and a cat "
    for pad in range(0, 60, 20):
        prompt = tiny.prompt(text * 4, "x" * pad, picture(200, 200), text * 3)
        span = prompt.spans[0]
        if span.offset < 256 < span.end:
            break
    else:
        raise AssertionError("no prompt has its picture there")
    want = run_one(plain(tiny), prompt, greedy(NEW_TOKENS))
    engine = small(tiny)
    run_one(engine, prompt, greedy(NEW_TOKENS))
    encoded = engine.stats().images_encoded
    for turn in (1, 2):
        evict_prefixes(engine)
        evict_rows(engine)
        got = run_one(engine, prompt, greedy(NEW_TOKENS))
        assert_same_answer(got, want)
        assert cached(got) == len(prompt) // 256 * 256
        assert engine.stats().images_encoded == encoded + turn * (cached(got) < span.end)


def test_a_victim_comes_back_from_the_host(lab: GetLab) -> None:
    tiny, prompt = lab("llama"), ids(600)
    want = run_one(plain(tiny), prompt, greedy(20))
    engine = small(tiny)
    computed = []

    def disturb(step: int) -> None:
        computed.append(engine.stats().prompt_tokens)
        if step == 16:
            (victim,) = engine.scheduler.running
            preempt(engine, victim)
            evict_prefixes(engine)

    got = run_one(engine, prompt, greedy(20), before_step=disturb)
    assert_same_answer(got, want)
    assert cached(got) == 0, "what it computed itself was not a hit"
    assert engine.stats().prompt_tokens == 600 + 600 - 512
    assert engine.stats().preemptions == 1


def test_followers_wait_for_what_is_brought(lab: GetLab) -> None:
    """Eight requests with a prefix that lies on the host: it comes once."""
    tiny, head = lab("llama"), ids(520).token_ids
    prompts = [Prompt((*head, *ids(9, seed).token_ids)) for seed in range(1, 9)]
    alone = plain(tiny)
    want = [run_one(alone, prompt, greedy(4)) for prompt in prompts]
    engine = small(tiny)
    run_one(engine, Prompt(head), greedy(1))
    evict_prefixes(engine)
    jobs = {f"r{i}": (prompt, greedy(4)) for i, prompt in enumerate(prompts)}
    got = run(engine, jobs)
    for index, answer in enumerate(want):
        assert_same_answer(got[f"r{index}"], answer)
        assert cached(got[f"r{index}"]) >= 512
    assert sources(engine)[1] == 512
    stats = engine.stats().tiers
    assert stats is not None
    per_token = engine.runner.cache.layout.bytes_per_token
    assert dict(stats.bytes_copied)["load"] == 512 * per_token


def test_choices_of_a_prompt_on_the_host(lab: GetLab) -> None:
    tiny, prompt = lab("llama"), ids(530)
    sampling = SamplingParams(9, temperature=1.0, seed=3, n=3, ignore_eos=True, logprobs=0)
    want = run_one(plain(tiny), prompt, sampling)
    engine = small(tiny)
    run_one(engine, prompt, sampling)
    evict_prefixes(engine)
    got = run_one(engine, prompt, sampling)
    assert cached(got) == 512
    for choice in range(3):
        assert got.tokens(choice) == want.tokens(choice)


def test_log_probabilities_of_the_prompt_bypass_all_tiers(lab: GetLab) -> None:
    tiny, prompt = lab("llama"), ids(600)
    engine = small(tiny)
    run_one(engine, prompt, greedy(1))
    evict_prefixes(engine)
    got = run_one(engine, prompt, greedy(1, prompt_logprobs=0))
    assert cached(got) == 0


# -- large contexts -----------------------------------------------------------------------------


def test_a_large_context_is_found_in_place(lab: GetLab) -> None:
    tiny, prompt = lab("llama"), ids(1500)
    want = run_one(plain(tiny), prompt, greedy(NEW_TOKENS))
    engine = small(tiny)
    run_one(engine, prompt, greedy(NEW_TOKENS))
    for _ in range(2):
        got = run_one(engine, prompt, greedy(NEW_TOKENS))
        assert_same_answer(got, want)
        assert cached(got) == 1280
    stats = engine.stats().tiers
    assert stats is not None
    assert "load" not in dict(stats.bytes_copied)
    longer = Prompt((*prompt.token_ids, *want.tokens(), *ids(50, 3).token_ids))
    turn = run_one(engine, longer, greedy(NEW_TOKENS))
    assert cached(turn) >= 1280
    assert_same_answer(turn, run_one(plain(tiny), longer, greedy(NEW_TOKENS)))


def test_a_small_prompt_is_found_by_a_large_one_and_the_other_way(lab: GetLab) -> None:
    tiny, long = lab("llama"), ids(1500)
    short = Prompt(long.token_ids[:600])
    alone = plain(tiny)
    want = {len(p): run_one(alone, p, greedy(NEW_TOKENS)) for p in (short, long)}
    for first, second, hit in ((short, long, 512), (long, short, 512)):
        engine = small(tiny)
        run_one(engine, first, greedy(NEW_TOKENS))
        evict_prefixes(engine)
        got = run_one(engine, second, greedy(NEW_TOKENS))
        assert cached(got) == hit
        assert_same_answer(got, want[len(second)])


def test_choices_of_a_large_context_share_its_beginning(lab: GetLab) -> None:
    tiny, prompt = lab("llama"), ids(1300)
    sampling = SamplingParams(40, temperature=1.0, seed=3, n=3, ignore_eos=True, logprobs=0)
    want = run_one(plain(tiny), prompt, sampling)
    engine = small(tiny)
    most = 0

    def watch(_: int) -> None:
        nonlocal most
        assert engine.scheduler.kv.cold is not None
        most = max(most, engine.scheduler.kv.cold.host.num_used)

    got = run_one(engine, prompt, sampling, before_step=watch)
    for choice in range(3):
        assert got.tokens(choice) == want.tokens(choice)
    assert most < 3 * 5


# -- many at once -------------------------------------------------------------------------------


def test_eight_prompts_take_turns_on_a_small_device(lab: GetLab) -> None:
    """KVO-01: each goes out and comes back, and every repetition equals the first."""
    tiny = lab("llama")
    engine = tiny.engine(
        budget=CHUNK, block_size=16, blocks=48, host_tokens=HOST_TOKENS, max_model_len=700
    )
    prompts = [ids(300, seed) for seed in range(8)]
    first = [run_one(engine, prompt, greedy(4), poison=False) for prompt in prompts]
    for turn in range(2):
        jobs = {f"r{i}": (prompt, greedy(4)) for i, prompt in enumerate(prompts)}
        results = run(engine, jobs, poison=turn == 0)
        for index, want in enumerate(first):
            assert_same_answer(results[f"r{index}"], want, note=f"turn {turn}, prompt {index}")
    device, host, _, computed = sources(engine)
    assert host >= 16 * 256 - device
    assert computed <= 8 * 300 + 16 * 44


def test_two_loads_that_do_not_fit_together_both_end(lab: GetLab) -> None:
    """KVO-02: prefixes of 400 tokens come from the host, with 400 and 200 tokens after them."""
    tiny = lab("llama")
    engine = tiny.engine(
        budget=CHUNK, block_size=16, blocks=64, host_tokens=HOST_TOKENS, max_model_len=1000
    )
    heads = [ids(400, seed).token_ids for seed in (1, 2)]
    for head in heads:
        run_one(engine, Prompt(head), greedy(1))
    evict_prefixes(engine)
    prompts = {
        "a": Prompt((*heads[0], *ids(400, 3).token_ids)),
        "b": Prompt((*heads[1], *ids(200, 4).token_ids)),
    }
    results = run(engine, {name: (prompt, greedy(4)) for name, prompt in prompts.items()})
    alone = plain(tiny)
    for name, prompt in prompts.items():
        assert_same_answer(results[name], run_one(alone, prompt, greedy(4)), note=name)
        assert cached(results[name]) == 256


@pytest.mark.parametrize(
    "seeds", [range(1), pytest.param(range(1, 30), marks=pytest.mark.slow)], ids=str
)
@pytest.mark.timeout(1800)
def test_random_mixes_of_everything(lab: GetLab, tmp_path: Path, seeds: range) -> None:
    """Prompts with common beginnings, small and large, arrive, lose their KV and are aborted, and
    caches are evicted and reset meanwhile."""
    tiny = lab("llama")
    heads = [ids(300, 1).token_ids, ids(560, 1).token_ids, ids(1000, 2).token_ids]
    jobs = {
        f"r{i}": (Prompt((*heads[i % 3], *ids(5 + 9 * i, 10 + i).token_ids)), greedy(3 + i, n=n))
        for i, n in enumerate((1, 2, 1, 1, 1, 2, 1))
    }
    alone = plain(tiny)
    want = {name: run_one(alone, *job) for name, job in jobs.items()}
    brought = 0
    for seed in seeds:
        draw = random.Random(seed)
        engine = small(
            tiny, host_tokens=draw.choice((2048, 4096)), disk=tmp_path / f"{seed}", seats=4
        )

        def disturb(step: int, engine: Engine = engine, draw: random.Random = draw) -> None:
            if draw.random() < 0.04 and engine.scheduler.running:
                preempt(engine, draw.choice(engine.scheduler.running))
            if draw.random() < 0.06:
                evict_prefixes(engine)
            if draw.random() < 0.01:
                engine.reset_prefix_cache("")
            if step == 60:
                engine.abort("r6")

        for turn in range(2):
            arrivals = {name: draw.randint(0, 30) for name in jobs}
            results = run(engine, jobs, arrivals=arrivals, before_step=disturb)
            for name, result in results.items():
                if not result.finished:
                    assert name == "r6"
                    continue
                for choice in range(jobs[name][1].n):
                    note = f"seed {seed}, turn {turn}, {name}#{choice}"
                    assert_same_answer(result, want[name], choice, note)
        brought += sum(sources(engine)[1:3])
        engine.close()
    assert brought > 0


# -- room ---------------------------------------------------------------------------------------


def test_what_is_kept_makes_way_for_a_large_context(lab: GetLab) -> None:
    tiny = lab("llama")
    engine = small(tiny, host_tokens=1536, max_model_len=1536)
    for seed in range(4):
        run_one(engine, ids(700, seed), greedy(1))
    assert engine.stats().tiers.host_cached == 6  # type: ignore[union-attr]
    prompt = ids(1500, 9)
    got = run_one(engine, prompt, greedy(NEW_TOKENS))
    assert_same_answer(got, run_one(plain(tiny), prompt, greedy(NEW_TOKENS)))


def test_a_prompt_larger_than_the_host_keeps_its_beginning(lab: GetLab) -> None:
    """A tree whose leaves push out its roots would find nothing."""
    tiny, prompt = lab("llama"), ids(790)
    engine = small(tiny, host_tokens=512, max_model_len=800)
    run_one(engine, prompt, greedy(1))
    evict_prefixes(engine)
    assert cached(run_one(engine, prompt, greedy(1))) == 512


def test_a_reset_clears_every_tier_of_the_tenant(lab: GetLab, tmp_path: Path) -> None:
    tiny, prompt = lab("llama"), ids(600)
    engine = small(tiny, disk=tmp_path)
    requests = [prompt.request(t, greedy(1), tenant=t) for t in ("one", "two")]
    run(engine, requests)
    engine.reset_prefix_cache("one")
    evict_prefixes(engine)
    again = [prompt.request(t, greedy(1), tenant=t) for t in ("one", "two")]
    results = run(engine, again)
    assert [cached(results[t]) for t in ("one", "two")] == [0, 512]
    engine.close()


# -- disk ---------------------------------------------------------------------------------------


def test_a_restart_finds_it_on_disk(lab: GetLab, tmp_path: Path) -> None:
    tiny, prompt = lab("llama"), ids(790)
    first = small(tiny, disk=tmp_path)
    want = run_one(first, prompt, greedy(NEW_TOKENS))
    first.close()
    engine = small(tiny, disk=tmp_path)
    got = run_one(engine, prompt, greedy(NEW_TOKENS))
    assert_same_answer(got, want)
    assert cached(got) == 768
    assert sources(engine) == (0, 0, 768, 22)
    evict_prefixes(engine)
    assert cached(run_one(engine, prompt, greedy(NEW_TOKENS))) == 768
    assert sources(engine)[1] == 768, "it stayed on the host"
    engine.close()


def test_a_prefix_of_4k_tokens_is_a_hit_after_a_restart(lab: GetLab, tmp_path: Path) -> None:
    tiny, prefix = lab("llama_long"), ids(4096).token_ids

    def started() -> Engine:
        return tiny.engine(
            budget=512,
            block_size=16,
            blocks=320,
            host_tokens=4096,
            max_model_len=5000,
            disk=tmp_path,
        )

    first = started()
    run_one(first, Prompt((*prefix, *ids(30, 1).token_ids)), greedy(1), poison=False)
    first.close()
    engine = started()
    asked = Prompt((*prefix, *ids(50, 2).token_ids))
    got = run_one(engine, asked, greedy(NEW_TOKENS), poison=False)
    assert cached(got) == 4096
    assert sources(engine) == (0, 0, 4096, 50)
    alone = tiny.engine(budget=512, block_size=16, blocks=320, max_model_len=5000, caching=False)
    assert_same_answer(got, run_one(alone, asked, greedy(NEW_TOKENS), poison=False))
    engine.close()


def test_a_large_context_is_fetched_from_disk_and_used_where_it_lies(
    lab: GetLab, tmp_path: Path
) -> None:
    tiny, prompt = lab("llama"), ids(1500)
    first = small(tiny, disk=tmp_path)
    want = run_one(first, prompt, greedy(NEW_TOKENS))
    first.close()
    engine = small(tiny, disk=tmp_path, host_tokens=1536, max_model_len=1536)
    got = run_one(engine, prompt, greedy(NEW_TOKENS))
    assert_same_answer(got, want)
    assert cached(got) == 1280
    assert sources(engine) == (0, 0, 1280, 220)
    engine.close()


@pytest.mark.parametrize("how", ["truncated", "changed", "removed"])
def test_a_damaged_file_is_a_miss_with_a_reason(
    lab: GetLab, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    tiny, prompt = lab("llama"), ids(790)
    first = small(tiny, disk=tmp_path)
    want = run_one(first, prompt, greedy(NEW_TOKENS))
    keys = first.scheduler.kv.cold.cache  # type: ignore[union-attr]
    node = keys.walk(next(iter(keys._roots.values())), prompt.token_ids)
    assert node.parent is not None
    file = tmp_path / (keys.disk_key(node.parent).hex() + ".kv")
    first.close()
    content = bytearray(file.read_bytes())
    engine = small(tiny, disk=tmp_path)
    if how == "truncated":
        file.write_bytes(content[: len(content) // 2])
    elif how == "changed":
        content[-5] ^= 1
        file.write_bytes(content)
    else:
        file.unlink()
    got = run_one(engine, prompt, greedy(NEW_TOKENS))
    assert_same_answer(got, want)
    assert cached(got) == 256, "the second of three superblocks is gone"
    tiers = engine.stats().tiers
    assert tiers is not None
    if how == "removed":
        assert f"{file} is a miss: somebody else removed it" in caplog.text
        assert (tiers.disk_broken, tiers.failures) == (0, (("fetch", "missing", 1),))
    else:
        assert f"{file} is a miss, and removed" in caplog.text
        assert (tiers.disk_broken, tiers.failures) == (1, (("fetch", "broken", 1),))
    engine.close()


def test_a_disk_without_a_host_is_refused_before_the_model_is_read(
    lab: GetLab, tmp_path: Path
) -> None:
    with pytest.raises(HostTierError, match="--disk-kv-path needs host memory"):
        lab("llama").engine(disk=tmp_path)


# -- copies that fail ---------------------------------------------------------------------------


class Stubborn(ManualCopyEngine):
    """Waiting for it brings nothing."""

    waits = 0

    def wait(self, timeout_s: float) -> None:
        """Nothing ends by itself."""
        assert timeout_s <= 0.01, "who comes meanwhile should not wait longer"
        self.waits += 1


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def by_hand(engine: Engine) -> tuple[Stubborn, Clock]:
    """Copies of the engine end when the test says so."""
    tiers = engine.scheduler.kv.tiers
    assert tiers is not None
    hand, clock = Stubborn(), Clock()
    lane = tiers.transfers._memory_lane
    lane.engine = hand
    tiers.transfers._clock = clock
    return hand, clock


def warmed(lab: Lab, prompt: Prompt) -> Engine:
    engine = small(lab)
    run_one(engine, prompt, greedy(1))
    evict_prefixes(engine)
    return engine


@pytest.mark.parametrize("ends", ["backwards", "first fails", "last fails", "late", "aborted"])
def test_copies_that_end_in_any_way(lab: GetLab, ends: str) -> None:
    tiny, prompt = lab("llama"), ids(790)
    want = run_one(plain(tiny), prompt, greedy(NEW_TOKENS))
    engine = warmed(tiny, prompt)
    hand, clock = by_hand(engine)

    def act(step: int) -> None:
        tickets = sorted(hand.under_way)
        if step == 5:
            assert len(tickets) == 3
            assert engine.scheduler.running[0].loading
            assert hand.waits == 5, "a step that can do nothing sleeps for the copies"
        if step == 6 and ends == "backwards":
            for ticket in reversed(tickets):
                hand.finish(ticket)
        elif step == 6 and ends.endswith("fails"):
            bad = tickets[0 if ends == "first fails" else -1]
            hand.fail(bad)
            for ticket in tickets:
                if ticket != bad:
                    hand.finish(ticket)
        elif step == 6 and ends == "late":
            hand.finish(tickets[0])
            clock.now += 60
        elif step == 6 and ends == "aborted":
            engine.abort("one")
        elif step > 10:
            for ticket in tickets:
                hand.finish(ticket)

    results = run(engine, {"one": (prompt, greedy(NEW_TOKENS))}, before_step=act)
    if ends == "aborted":
        assert not results["one"].finished
    else:
        assert_same_answer(results["one"], want)
        expected = {"backwards": 768, "first fails": 0, "last fails": 512, "late": 256}
        assert cached(results["one"]) == expected[ends]
    while hand.under_way:
        hand.finish(next(iter(hand.under_way)))
    engine.step()
    run(engine, {})
    assert engine.scheduler.kv.tiers.transfers.num_open == 0  # type: ignore[union-attr]


def test_stores_that_stall_or_fail_cost_nothing_but_the_hit(lab: GetLab) -> None:
    tiny, prompt = lab("llama"), ids(790)
    want = run_one(plain(tiny), prompt, greedy(NEW_TOKENS))
    engine = small(tiny)
    hand, clock = by_hand(engine)

    def act(step: int) -> None:
        if step == 20:
            hand.fail(min(hand.under_way))
        if step == 25:
            clock.now += 100

    got = run_one(engine, prompt, greedy(NEW_TOKENS), before_step=act)
    assert_same_answer(got, want)
    evict_prefixes(engine)
    while hand.under_way:
        hand.finish(next(iter(hand.under_way)))
        engine.step()
    assert cached(run_one(engine, prompt, greedy(1), before_step=act)) == 0
