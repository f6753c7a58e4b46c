"""All disturbances at once, at random: what survives answers as if it had been alone.

Priorities, choices, pictures that several requests share, broken pictures, aborts, forced
preemptions, evictions, restarts of the vision stage, failing passes - with KV and rows for little
more than the largest request. Whoever is neither aborted nor at fault must end, with its own
answer.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from torch import Tensor

from chunked_prefill.request import Request, SamplingParams
from lm_engine.client import MediaItem
from lm_engine.engine import Engine
from tests.lm_engine.harness import (
    TEXT,
    Lab,
    Picture,
    Prompt,
    Result,
    assert_same_answer,
    check_idle,
    evict_rows,
    greedy,
    picture,
    poison_unused,
    preempt,
    run_one,
)

Labs = Callable[[str], Lab]
KINDS = 14
REQUESTS = 24
LAST_ARRIVAL = 60
MOST_STEPS = 3000


@dataclass(frozen=True, slots=True)
class Kind:
    prompt: Prompt
    sampling: SamplingParams
    answer: Result
    broken: bool = False


@pytest.fixture(scope="module")
def kinds(lab: Labs) -> dict[str, list[Kind]]:
    """Per family, requests with the answers that they get alone; the last two have a picture that
    cannot be decoded."""
    return {family: _kinds(lab(family)) for family in ("llava", "qwen2_5_vl")}


def _kinds(this: Lab) -> list[Kind]:
    engine = this.engine()
    found = []
    shown = [picture(40 + 12 * i, 50, i) for i in range(4)]
    for index in range(KINDS):
        draw = random.Random(index)
        parts: list[str | Picture] = [TEXT[: draw.randint(1, 25)]]
        for _ in range(draw.choice((0, 1, 1, 2, 3))):
            parts += [draw.choice(shown), TEXT[: draw.randint(1, 4)]]
        prompt = this.prompt(*parts)
        sampling = greedy(draw.randint(1, 14), n=draw.choice((1, 1, 1, 2, 3)))
        found.append(Kind(prompt, sampling, run_one(engine, prompt, sampling)))
    for index in range(2):
        prompt = this.prompt("see ", shown[index], " or ", picture(60, 60, 90 + index), "?")
        bad = prompt.media[1]
        assert bad.data is not None
        cut = replace(prompt, media=(prompt.media[0], replace(bad, data=bad.data[:-30])))
        found.append(Kind(cut, greedy(5), Result(), broken=True))
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
@pytest.mark.parametrize(
    "seeds", [range(2), pytest.param(range(2, 40), marks=pytest.mark.slow)], ids=str
)
def test_everything_at_once(
    lab: Labs,
    kinds: dict[str, list[Kind]],
    family: str,
    seeds: range,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)
    for seed in seeds:
        _soak(lab(family), kinds[family], seed)


def _soak(this: Lab, kinds: list[Kind], seed: int) -> None:
    draw = random.Random(seed)
    longest = max(len(k.prompt) + k.sampling.max_tokens for k in kinds)
    most_rows = max(item.plan.num_rows for k in kinds for item in k.prompt.media)
    block_size = draw.choice((1, 4, 5))
    engine = this.engine(
        budget=draw.choice((2, 9, 33, 100)),
        block_size=block_size,
        blocks=(longest + draw.choice((0, 10, 60))) // block_size + 1,
        seats=draw.choice((3, 5, 12)),
        rows=-(-most_rows // 16) * 16 + draw.choice((0, 16, 48)),
    )
    chosen = {f"r{i}": draw.choice(kinds) for i in range(REQUESTS)}
    arrivals: dict[int, list[tuple[Request, tuple[MediaItem, ...]]]] = {}
    for name, kind in chosen.items():
        request = kind.prompt.request(name, kind.sampling, priority=draw.choice((0, 0, 0, 1, 2)))
        arrivals.setdefault(draw.randint(0, LAST_ARRIVAL), []).append((request, kind.prompt.media))
    results = {name: Result() for name in chosen}
    spoilt: set[str] = set()
    """Requests that were aborted or were part of a pass that failed."""
    for step in range(MOST_STEPS):
        for request, media in arrivals.pop(step, ()):
            assert engine.add(request, media) == []
        if step < 2 * LAST_ARRIVAL:
            _disturb(engine, draw, results, spoilt)
        if not arrivals and not engine.has_work():
            break
        plain = engine.runner.forward
        outputs = engine.step()
        failed_pass = engine.runner.forward != plain
        for output in outputs:
            results[output.request_id].take(output)
            if failed_pass and output.error is not None and output.error.kind == "internal":
                spoilt.add(output.request_id)
        engine.check_invariants()
        poison_unused(engine)
    else:
        raise AssertionError(f"seed {seed}: hangs with {list(engine.scheduler.in_order())}")
    check_idle(engine)
    for name, kind in chosen.items():
        result, note = results[name], f"seed {seed}, {name}"
        if name in spoilt:
            continue
        assert result.finished == 1, note
        if kind.broken:
            assert result.error is not None, note
            assert (result.error.kind, result.error.param) == ("media", "messages.0.content.1")
            continue
        for choice in range(kind.sampling.n):
            assert_same_answer(result, kind.answer, choice, f"{note}#{choice}")


def _disturb(
    engine: Engine, draw: random.Random, results: dict[str, Result], spoilt: set[str]
) -> None:
    event = draw.random()
    running = engine.scheduler.running
    if event < 0.04:
        name = draw.choice(sorted(results))
        if name in engine._live:
            spoilt.add(name)
            engine.abort(name)
    elif event < 0.12 and running:
        preempt(engine, draw.choice(running))
    elif event < 0.18:
        evict_rows(engine)
    elif event < 0.22:
        assert engine.images is not None
        engine.images.link.reset()  # type: ignore[attr-defined]
        for output in engine.vision_restarted([]):
            results[output.request_id].take(output)
    elif event < 0.24 and running:
        plain = engine.runner.forward

        def fail(*arguments: object) -> Tensor:
            engine.runner.forward = plain  # type: ignore[method-assign]
            raise RuntimeError("a pass that fails")

        engine.runner.forward = fail  # type: ignore[assignment, method-assign]
