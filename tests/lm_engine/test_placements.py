"""Where KV lies changes no answer, for every family.

Each test puts a request's KV somewhere else (on the host, in the ring, lost and brought back, on
disk, found by an earlier prompt, ending inside an image) and compares the logits of *every* row
that was computed, of the prompt and of the answer, with a run whose KV all lies on the device;
that run is compared with transformers.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kv_offload.kv_manager import BlockCopy, BlockStore
from kv_offload.superblock import SUPERBLOCK_TOKENS
from lm_engine.batch import ForwardBatch
from lm_engine.engine import Engine
from lm_engine.options import ColdKV
from tests.checkpoints import FAMILIES
from tests.lm_engine.harness import (
    Lab,
    Prompt,
    Result,
    assert_follows,
    assert_same_answer,
    assert_same_distribution,
    evict_prefixes,
    evict_rows,
    greedy,
    picture,
    preempt,
    run,
)

GetLab = Callable[[str], Lab]
FAST = ("llama", "qwen3_vl")
CHUNK, BLOCK, NEW_TOKENS = 64, 4, 6
SHORT, LONG = (700, 512), (1200, 1024)
"""Tokens of a prompt, and its last whole superblock's end, where a picture lies."""
DEVICE_TOKENS, HOST_TOKENS = 640, 4096
"""The least device that serves a larger context; SHORT is brought back to one of 800."""
A, B = picture(56, 56, 1), picture(64, 40, 2)


@dataclasses.dataclass(slots=True)
class Seen:
    result: Result
    rows: list[tuple[int, Tensor]] = dataclasses.field(default_factory=list)
    """(position, logits [vocab]) of every row of choice 0 that was computed, also twice."""

    @property
    def cached(self) -> int:
        assert self.result.usage is not None
        return self.result.usage.cached_tokens


@contextmanager
def every_row(engine: Engine, seen: Seen) -> Iterator[None]:
    plain = engine.runner.forward

    def forward(batch: ForwardBatch, copies: Iterable[BlockCopy | BlockStore] = ()) -> Tensor:
        every = torch.arange(len(batch.token_ids))
        logits = plain(dataclasses.replace(batch, logits_rows=every), copies)
        assert engine._computing is not None
        row = 0
        for chunk in engine._computing[0].chunks:
            if chunk.sequence.request.request_id == "one":
                seen.rows += [(chunk.start + i, logits[row + i]) for i in range(chunk.length)]
            row += chunk.length
        return logits[batch.logits_rows]

    engine.runner.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del engine.runner.forward


def observe(
    engine: Engine,
    prompt: Prompt,
    before_step: Callable[[int], None] | None = None,
    mates: dict[str, Prompt] | None = None,
) -> Seen:
    seen = Seen(Result())
    jobs = {"one": prompt} | (mates or {})
    with every_row(engine, seen):
        done = run(
            engine,
            {name: (job, greedy(NEW_TOKENS)) for name, job in jobs.items()},
            before_step=before_step,
        )
    seen.result = done["one"]
    return seen


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    lab: Lab
    short: Prompt
    long: Prompt
    want: dict[int, Seen]
    """By length of the prompt: without any cache, all KV on the device."""

    def engine(self, tokens: int, host: int = HOST_TOKENS, **options: object) -> Engine:
        options = {"budget": CHUNK, "block_size": BLOCK, "max_model_len": 2048} | options
        blocks = tokens // BLOCK
        return self.lab.engine(blocks=blocks, host_tokens=host, **options)  # type: ignore[arg-type]

    def check(self, seen: Seen, prompt: Prompt, note: str, *, exact: bool = False) -> None:
        """The answer, and each row's distribution over the whole vocabulary."""
        want = self.want[len(prompt)]
        assert_same_answer(seen.result, want.result, note=note)
        ours, theirs = seen.result.tokens(), want.result.tokens()
        alike = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), 99)
        known = dict(want.rows)
        rows = [(p, row) for p, row in seen.rows if p < len(prompt) + alike]
        assert {p for p, _ in rows} >= set(range(seen.cached, len(prompt))), note
        got = torch.stack([row for _, row in rows])
        expected = torch.stack([known[p] for p, _ in rows])
        assert_same_distribution(got, expected, note=note)
        assert not exact or torch.equal(got, expected), note


def _prompt(lab: Lab, tokens: int, last: int) -> Prompt:
    """Of about so many tokens. With pictures: one lies across the first superblock's end, one
    across position `last`."""
    draw = random.Random(tokens)

    def digits(count: int) -> str:
        """One token each."""
        return "".join(draw.choice("0123456789") for _ in range(count))

    if not lab.takes_images:
        return lab.prompt(digits(tokens))
    spans = lab.prompt(A, B).spans
    first, second = spans[0], next(s for s in spans if s.key != spans[0].key)
    before = SUPERBLOCK_TOKENS - first.length // 2 - first.offset
    between = last - second.length // 2 - second.offset - before
    prompt = lab.prompt(digits(before), A, digits(between), B, digits(tokens - last - 90))
    for position in (SUPERBLOCK_TOKENS, last):
        assert any(s.offset < position < s.end for s in prompt.spans), position
    assert last + 40 < len(prompt) < last + SUPERBLOCK_TOKENS
    return prompt


@pytest.fixture(scope="module")
def cases(lab: GetLab) -> Callable[[str], Case]:
    known: dict[str, Case] = {}

    def get(family: str) -> Case:
        if family not in known:
            this = lab(family)
            case = Case(this, _prompt(this, *SHORT), _prompt(this, *LONG), {})
            for prompt in (case.short, case.long):
                engine = case.engine(2400, 0, caching=False)
                case.want[len(prompt)] = observe(engine, prompt)
            known[family] = case
        return known[family]

    return get


@pytest.fixture
def case(cases: Callable[[str], Case], family: str) -> Case:
    return cases(family)


every_family = pytest.mark.parametrize(
    "family",
    [*FAST, *(pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES if f not in FAST)],
)


@every_family
def test_resident_is_transformers(case: Case) -> None:
    for prompt in (case.short, case.long):
        want = case.want[len(prompt)]
        tokens = want.result.tokens()
        oracle = case.lab.oracle(prompt, tokens)
        assert [p for p, _ in want.rows] == list(range(len(prompt) + NEW_TOKENS - 1))
        assert_same_distribution(torch.stack([row for _, row in want.rows]), oracle[:-1])
        assert_follows(tokens, oracle[len(prompt) - 1 : -1])


@every_family
@pytest.mark.parametrize("way", ["cpu", "stream"])
def test_most_of_it_cold(case: Case, way: ColdKV) -> None:
    """To the bit: the device holds half of the prompt, the host the rest."""
    engine = case.engine(DEVICE_TOKENS, cold_kv=way, caching=False)
    most = 0

    def watch(_: int) -> None:
        nonlocal most
        for sequence in engine.scheduler.running:
            most = max(most, len(engine.scheduler.kv.cold_slots(sequence.seq_id)))

    seen = observe(engine, case.long, watch)
    assert most >= (len(case.long) - DEVICE_TOKENS) // SUPERBLOCK_TOKENS
    case.check(seen, case.long, way, exact=True)


@every_family
@pytest.mark.parametrize("seed", range(2))
def test_random_mixes(case: Case, seed: int) -> None:
    """Device, chunks, way and mates at random; it loses its KV now and then."""
    draw = random.Random(seed)
    for way in ("cpu", "stream"):
        engine = case.engine(
            draw.randrange(DEVICE_TOKENS, 1000, 4), budget=draw.choice((17, 40, 64)), cold_kv=way
        )
        losses = {draw.randrange(2, 30) for _ in range(2)}

        def disturb(step: int, engine: Engine = engine, losses: set[int] = losses) -> None:
            if step in losses:
                for sequence in engine.scheduler.running:
                    preempt(engine, sequence)
                evict_rows(engine) if engine.images is not None else None

        mates = {"short": case.short, "small": case.lab.prompt("0123")}
        seen = observe(engine, case.long, disturb, mates)
        assert engine.stats().preemptions >= len(losses)
        case.check(seen, case.long, f"seed {seed}, {way}")


@every_family
@pytest.mark.parametrize("at", [10, 12])
def test_lost_and_brought_back(case: Case, at: int) -> None:
    """Swapped out by write-through, swapped in by a recall; once within the prompt, once in the
    answer."""
    engine = case.engine(800)

    def disturb(step: int) -> None:
        if step == at:
            while engine.scheduler.kv.copying:
                engine.scheduler.take_loaded()
                engine.scheduler.kv.wait(0.01)
            (victim,) = engine.scheduler.running
            preempt(engine, victim)
            evict_prefixes(engine)

    seen = observe(engine, case.short, disturb)
    tiers = engine.stats().tiers
    assert tiers is not None
    per_token = engine.runner.cache.layout.bytes_per_token
    assert dict(tiers.bytes_copied)["load"] == 2 * SUPERBLOCK_TOKENS * per_token
    case.check(seen, case.short, f"lost before step {at}")


@every_family
def test_a_hit_on_the_device(case: Case) -> None:
    """Warm, and evicted so that it ends before, inside and behind the pictures."""
    engine = case.engine(2400, 0)
    ends = [*range(0, len(case.short), 97), *range(500, 524, 4), len(case.short) - 1]
    found = {observe(engine, case.short).cached}
    for end in ends:
        cache = engine.scheduler.kv.cache
        cache.evict(max(0, cache.num_idle - end // BLOCK) if end < len(case.short) - 1 else 0)
        if engine.images is not None:
            evict_rows(engine)
        seen = observe(engine, case.short)
        found.add(seen.cached)
        case.check(seen, case.short, f"{seen.cached} tokens found")
    assert len(found) == len({end // BLOCK for end in ends})
    assert max(found) == len(case.short) - 1
    assert 0 in found
    if case.short.spans:
        assert any(s.offset < end < s.end for s in case.short.spans for end in found)


@every_family
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_hit_below_the_device_ends_inside_an_image(case: Case, tmp_path: Path, tier: str) -> None:
    """A small prompt's KV is brought up, a large one's used on the host."""
    disk = tmp_path if tier == "disk" else None
    for prompt, device, last in ((case.short, 800, SHORT[1]), (case.long, DEVICE_TOKENS, LONG[1])):
        engine = case.engine(device, disk=disk)
        observe(engine, prompt)
        if tier == "disk":
            engine.close()
            engine = case.engine(device, disk=disk)
        evict_prefixes(engine)
        if engine.images is not None:
            evict_rows(engine)
        seen = observe(engine, prompt)
        assert seen.cached == last
        stats = engine.stats()
        assert stats.prompt_tokens_from_disk == (last if tier == "disk" else 0)
        case.check(seen, prompt, f"{len(prompt)} tokens, {tier}")
        if prompt.spans:
            assert any(s.offset < seen.cached < s.end for s in prompt.spans)
            encodes = 1 if tier == "disk" else 3
            assert stats.images_encoded == encodes, "only what the hit's end cuts, and no other"
        engine.close()
