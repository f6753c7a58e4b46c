"""Long prompts do not fill the KV pool while short ones come, and are not starved either."""

from __future__ import annotations

import random

import pytest

from chunked_prefill.long_prompts import LongPrompts
from kv_offload.kv_manager import KVManager
from tests.chunked_prefill.test_scheduler import Driver

BLOCKS, SIZE = 64, 4


def driver(share: float = 0.5, **how: int) -> Driver:
    made = Driver(**({"blocks": BLOCKS, "block_size": SIZE, "budget": 64, "seats": 16} | how))
    made.scheduler.long_prompts.share = share
    return made


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_short_requests_run_beside_long_ones_that_wait_for_each_other(share: float) -> None:
    """Four prompts of 16 to 20 blocks want the pool of 64 for themselves; each runs for 60 steps.
    A short one that comes after them is admitted at once, if half of the pool is kept."""
    bench = driver(share)
    bench.add(4, 1)
    longs = [bench.add(60, 20) for _ in range(4)]
    for _ in range(4):
        bench.step()
    running = [s for s in longs if s in bench.scheduler.running]
    shorts = [bench.add(12, 8) for _ in range(4)]
    bench.step()
    admitted = sum(s.num_computed_tokens > 0 for s in shorts)
    if share == 0.5:
        assert len(running) == 2
        assert admitted == 4
    else:
        assert len(running) >= 3
        assert admitted < 4
    bench.run()
    assert len(bench.finished) == 9


def test_a_long_one_that_is_alone_may_have_the_whole_pool() -> None:
    bench = driver()
    bench.add(4, 1)
    whole = bench.add(BLOCKS * SIZE - 20, 16)
    bench.run()
    assert whole in bench.finished
    assert whole.num_preemptions == 0


def test_nothing_is_kept_for_short_ones_that_do_not_come() -> None:
    bench = driver()
    for _ in range(3):
        bench.add(60, 20)
    bench.step()
    bench.step()
    bench.step()
    assert len(bench.scheduler.running) == 3
    bench.run()


def test_a_stream_of_short_ones_does_not_starve_the_long_ones_that_wait() -> None:
    """Two short ones come in every step, of which ten fit beside a long one."""
    bench = driver()
    bench.add(4, 1)
    longs = [bench.add(100, 10) for _ in range(4)]
    for _ in range(600):
        for _ in range(2):
            bench.add(12, 8)
        bench.step()
        if all(s in bench.finished for s in longs):
            break
    assert all(s in bench.finished for s in longs)


def test_questions_about_one_document_share_it() -> None:
    """What was found on the device counts for nobody."""
    kv = KVManager(BLOCKS, SIZE, prefix_caching=True)
    bench = driver()
    bench.scheduler.kv = kv
    bench.scheduler._prefixes.kv = kv
    bench.scheduler.long_prompts = LongPrompts(kv, 0.5)
    bench.scheduler.victims._kv = kv
    bench.add(4, 1)
    # The prompts of this driver begin alike: 100 tokens are the document.
    bench.add(100, 1)
    bench.run()
    for question in range(4):
        bench.add(104 + question, 6)
    most = 0
    for _ in range(6):
        bench.step()
        most = max(most, len(bench.scheduler.running))
    assert most >= 3
    bench.run()


@pytest.mark.parametrize("priority", [-1, 0])
def test_an_urgent_long_one_is_let_in_when_room_was_made_for_it(priority: int) -> None:
    """Whoever loses KV to it must not have lost it for nothing."""
    bench = driver()
    bench.add(4, 1)
    bench.add(60, 30)
    bench.add(60, 30)
    bench.step()
    bench.step()
    urgent = bench.add(100, 4, priority=priority)
    plan = bench.step()
    if plan.preempted:
        assert urgent in {chunk.sequence for chunk in plan.chunks}
    assert (urgent in bench.scheduler.running) == (priority < 0)
    bench.run()


@pytest.mark.parametrize("prompt", [31, 32, 33, 1000])
def test_prompts_around_the_limit_end_as_without_it(prompt: int) -> None:
    """SCH-07: beside running decodes, prompts just under, at and over what counts as long (8 blocks
    of 64 here; 32 tokens and one to come take 9), and one far over it, get exactly the tokens that
    they get when nobody asks how long they are."""
    ends = []
    for share in (0.5, 1.0):
        blocks = 8 * 8 if prompt < 1000 else 8 * 40
        bench = driver(share, blocks=blocks)
        decodes = [bench.add(3, 120) for _ in range(4)]
        while any(s.num_output_tokens == 0 for s in decodes):
            bench.step()
        asked = [bench.add(prompt, 8) for _ in range(3 if prompt < 1000 else 1)]
        bench.run()
        assert all(s.num_output_tokens == 8 for s in asked)
        ends.append(sorted((s.num_prompt_tokens, s.num_output_tokens) for s in bench.finished))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("seed", range(40))
def test_any_mix_ends(seed: int) -> None:
    """No deadlock with the guarantee that the oldest ends: random lengths, priorities and shares
    in small pools."""
    rng = random.Random(seed)
    blocks = rng.randint(24, 96)
    bench = driver(
        rng.choice([0.1, 0.3, 0.5, 1.0]),
        blocks=blocks,
        budget=rng.choice([4, 32]),
        seats=rng.randint(2, 9),
    )
    for _ in range(30):
        outputs = rng.randint(1, 20)
        longest = blocks * SIZE - outputs
        prompt = rng.choice([rng.randint(1, 12), rng.randint(1, longest)])
        bench.add(prompt, outputs, priority=rng.choice([0, 0, 1]))
        for _ in range(rng.randint(0, 4)):
            if bench.scheduler.running or bench.scheduler.waiting:
                assert bench.step().chunks
    bench.run()
    assert len(bench.finished) == 30
