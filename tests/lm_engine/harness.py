"""What the engine's tests share: engines over tiny checkpoints, prompts with pictures, the oracle.

Owns: `Lab` (one family: transformers' model and processor beside our engine), `Prompt`, `run`
(steps an engine to idle, checks invariants and poisons unused memory after every step), the
recording of logits, disturbances, and the comparison rules of the promise (DESIGN chapter 1: a
token's logits depend only on what stands before it).
Does not own: any assertion about one feature; those are in the test modules.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from chunked_prefill.budget import TokenBudget
from chunked_prefill.draft import Draft
from chunked_prefill.request import ImageSpan, Request, SamplingParams
from chunked_prefill.sequence import Sequence
from kv_offload.kv_manager import BlockCopy, BlockStore
from kv_offload.superblock import SUPERBLOCK_TOKENS
from lm_engine.batch import ForwardBatch
from lm_engine.client import MediaItem
from lm_engine.engine import Engine
from lm_engine.options import ColdKV, EngineOptions
from lm_engine.outputs import (
    RequestError,
    RequestOutput,
    SequenceDelta,
    TokenLogprob,
    Usage,
)
from tests.checkpoints import checkpoint, hf_model, hf_processor
from vision_encoder.embedding_arena import Acquired
from vision_encoder.grid import mrope_positions, planner, read_processor_files
from vision_encoder.media import content_key

LOGPROB_TOLERANCE = 1e-4
"""Largest |difference of log-probabilities| that the promise allows in fp32."""
MARGIN = 1e-3
"""Greedy choices must agree wherever the best two candidates are further apart than this."""
MROPE_FAMILIES = ("qwen2_5_vl", "qwen3_vl")
TEXT = "the thing in the rain: a tin ring, another one, then ten more and a cat"


@dataclass(frozen=True, slots=True)
class Picture:
    data: bytes
    """PNG."""
    width: int
    height: int

    def image(self) -> Image.Image:
        return Image.open(io.BytesIO(self.data)).convert("RGB")


@functools.cache
def picture(width: int, height: int, seed: int = 0) -> Picture:
    """Random blocks of 8 x 8 pixels, so that resizing keeps some of the contrast."""
    rng = np.random.default_rng((seed, width, height))
    coarse = rng.integers(0, 256, (-(-height // 8), -(-width // 8), 3), dtype=np.uint8)
    pixels = coarse.repeat(8, axis=0).repeat(8, axis=1)[:height, :width]
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return Picture(file.getvalue(), width, height)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt: what the engine gets, and what transformers gets."""

    token_ids: tuple[int, ...]
    spans: tuple[ImageSpan, ...] = ()
    media: tuple[MediaItem, ...] = ()
    positions: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None = None
    position_delta: int = 0
    hf_inputs: dict[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.token_ids)

    def request(self, request_id: str, sampling: SamplingParams, **fields: Any) -> Request:
        return Request(
            request_id,
            self.token_ids,
            sampling,
            image_spans=self.spans,
            positions=self.positions,
            position_delta=self.position_delta,
            **fields,
        )


def greedy(max_tokens: int, **fields: Any) -> SamplingParams:
    """Greedy, reports its log-probabilities, runs to max_tokens."""
    fields = {"ignore_eos": True, "logprobs": 5} | fields
    return SamplingParams(max_tokens, temperature=0.0, **fields)


class Dear:
    """CostModel: computing is never cheaper."""

    def compute_s(self, start: int, end: int) -> float:
        return 1e9


class Lab:
    """One family's tiny checkpoint, seen by transformers and by us."""

    def __init__(self, family: str, root: Path) -> None:
        self.family = family
        self.folder = checkpoint(family, root)
        self.config = json.loads((self.folder / "config.json").read_text())
        self.hf = hf_model(self.folder)
        self.takes_images = "vision_config" in self.config
        if self.takes_images:
            self.processor = hf_processor(self.folder)
            self.planner = planner(self.config, read_processor_files(self.folder))

    def engine(
        self,
        *,
        budget: int = 512,
        block_size: int = 4,
        blocks: int = 200,
        seats: int = 32,
        max_model_len: int | None = None,
        rows: int | None = 512,
        caching: bool = True,
        host_tokens: int = 0,
        cold_kv: ColdKV = "auto",
        disk: Path | None = None,
        kv_events: bool = False,
    ) -> Engine:
        """An engine in this process; `blocks` is the size of the KV pool. Its chunks follow from
        tokens alone, not from how long steps take here, and what a lower tier has is always brought
        rather than computed."""
        text = self.config.get("text_config", self.config)
        heads, hidden = text["num_attention_heads"], text["hidden_size"]
        head_dim = text.get("head_dim") or hidden // heads
        block_bytes = (
            2
            * text["num_hidden_layers"]
            * text["num_key_value_heads"]
            * head_dim
            * block_size
            * torch.float32.itemsize
        )
        engine = Engine.load(
            EngineOptions(
                str(self.folder),
                max_model_len=max_model_len or min(2048, blocks * block_size),
                max_num_seqs=seats,
                max_num_batched_tokens=budget,
                tpot_slo_s=0,
                block_size=block_size,
                prefix_caching=caching,
                kv_memory_bytes=blocks * block_bytes,
                host_kv_bytes=host_tokens * block_bytes // block_size or None,
                cold_kv=cold_kv,
                disk_kv_path=None if disk is None else str(disk),
                kv_events=kv_events,
                embedding_rows=rows,
                device="cpu",
            )
        )
        pool = engine.scheduler.kv.pool.num_blocks
        assert pool == blocks, f"asked for {blocks} blocks, got {pool}"
        if engine.scheduler.kv.tiers is not None:
            engine.scheduler.kv.tiers.worth.cost = Dear()
        return engine

    # -- prompts ------------------------------------------------------------------------------

    def prompt(self, *parts: str | Picture) -> Prompt:
        """Text and pictures in order. With pictures, ids are those of the HF processor."""
        pictures = [part for part in parts if isinstance(part, Picture)]
        if not self.takes_images or not pictures:
            ids = self.encode("".join(p for p in parts if isinstance(p, str)))
            return Prompt(ids, hf_inputs={"input_ids": torch.tensor([ids])})
        mark = self.planner.placeholder
        if self.family in MROPE_FAMILIES:
            # Their chat templates put every picture between these two.
            mark = f"<|vision_start|>{mark}<|vision_end|>"
        text = "".join(part if isinstance(part, str) else mark for part in parts)
        images = [part.image() for part in pictures]
        # A flat list would be as many prompts of one image each to these processors.
        nested = self.family in ("smolvlm", "idefics3", "llava_onevision")
        inputs = dict(
            self.processor(text=[text], images=[images] if nested else images, return_tensors="pt")
        )
        ids = tuple(inputs["input_ids"][0].tolist())
        plans = self.planner.plan([(p.width, p.height) for p in pictures])
        media = tuple(
            MediaItem(
                content_key(shown.data, plan.fingerprint, self.family.encode()),
                plan,
                f"messages.0.content.{index}",
                shown.data,
            )
            for index, (shown, plan) in enumerate(zip(pictures, plans, strict=True))
        )
        spans = self._spans(ids, media)
        positions, delta = None, 0
        if self.family in MROPE_FAMILIES:
            grids = [
                (span.offset, plan.merged_grid)
                for span, plan in zip(spans, plans, strict=True)
                if plan.merged_grid is not None
            ]
            positions, delta = mrope_positions(len(ids), grids)
        unique = tuple({item.key: item for item in media}.values())
        return Prompt(ids, spans, unique, positions, delta, inputs)

    def encode(self, text: str) -> tuple[int, ...]:
        tokenizer = self.processor.tokenizer if self.takes_images else _tokenizer(self.folder)
        return tuple(tokenizer(text)["input_ids"])

    def _spans(self, ids: tuple[int, ...], media: SequenceOf[MediaItem]) -> tuple[ImageSpan, ...]:
        """Image tokens in order, cut by the plans' pieces."""
        tokenizer = self.processor.tokenizer
        image_id = tokenizer.convert_tokens_to_ids(self.planner.image_token)
        spans: list[ImageSpan] = []
        cursor = 0
        for item in media:
            row = 0
            for count in (piece for piece in item.plan.pieces if isinstance(piece, int)):
                cursor = ids.index(image_id, cursor)
                assert ids[cursor : cursor + count] == (image_id,) * count
                spans.append(ImageSpan(cursor, count, item.key, row_offset=row))
                row += count
                cursor += count
            assert row == item.plan.num_rows
        assert image_id not in ids[cursor:]
        return tuple(spans)

    # -- oracle -------------------------------------------------------------------------------

    def oracle(self, prompt: Prompt, continuation: SequenceOf[int] = ()) -> Tensor:
        """transformers' logits float32 [prompt + continuation, vocab] in one pass."""
        inputs = dict(prompt.hf_inputs)
        if continuation:
            extra = torch.tensor([list(continuation)])
            inputs["input_ids"] = torch.cat((inputs["input_ids"], extra), 1)
            if "attention_mask" in inputs:
                inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            if "mm_token_type_ids" in inputs:
                kinds = inputs["mm_token_type_ids"]
                inputs["mm_token_type_ids"] = torch.cat((kinds, torch.zeros_like(extra)), 1)
        with torch.no_grad():
            logits: Tensor = self.hf(**inputs, use_cache=False).logits
        return logits[0].float()


@functools.cache
def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


# -- running ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Result:
    """Everything that the events of one request said."""

    deltas: list[SequenceDelta] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    usage: Usage | None = None
    error: RequestError | None = None
    media_checked: int = 0
    finished: int = 0

    def take(self, output: RequestOutput) -> None:
        assert not self.finished, "an event after the last one"
        self.deltas += output.deltas
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.media_checked += output.media_checked
        self.finished += output.finished
        self.usage = output.usage or self.usage
        self.error = output.error or self.error

    def of(self, choice: int = 0) -> list[SequenceDelta]:
        return [delta for delta in self.deltas if delta.index == choice]

    def tokens(self, choice: int = 0) -> list[int]:
        return [token for delta in self.of(choice) for token in delta.token_ids]

    def text(self, choice: int = 0) -> str:
        return "".join(delta.text for delta in self.of(choice))

    def logprobs(self, choice: int = 0) -> list[TokenLogprob]:
        return [entry for delta in self.of(choice) for entry in delta.logprobs or ()]

    def finish(self, choice: int = 0) -> str | None:
        reasons = [d.finish_reason for d in self.of(choice) if d.finish_reason]
        assert len(reasons) <= 1, f"choice {choice} ended {len(reasons)} times"
        return reasons[0] if reasons else None


Job = tuple[Prompt, SamplingParams]
MAX_STEPS = 20_000
STUCK_STEPS = 200
"""Steps without any token computed or reply taken after which an engine is said to hang."""


def run(
    engine: Engine,
    jobs: dict[str, Job] | Iterable[Request],
    *,
    before_step: Callable[[int], None] | None = None,
    arrivals: dict[str, int] | None = None,
    media: SequenceOf[MediaItem] = (),
    poison: bool = True,
) -> dict[str, Result]:
    """Steps until idle; checks invariants after every step and that everything is free at the end.

    before_step: called with the number of the step, before it.
    arrivals: the step before which a job is added; 0 where absent.
    media: for jobs that are given as requests.
    """
    todo: list[tuple[int, Request, tuple[MediaItem, ...]]] = []
    if isinstance(jobs, dict):
        for name, (prompt, sampling) in jobs.items():
            at = (arrivals or {}).get(name, 0)
            todo.append((at, prompt.request(name, sampling), prompt.media))
    else:
        todo += [(0, request, tuple(media)) for request in jobs]
    todo.sort(key=lambda entry: entry[0])
    results = {request.request_id: Result() for _, request, _ in todo}
    still = 0
    for step in range(MAX_STEPS):
        while todo and todo[0][0] <= step:
            _, request, items = todo.pop(0)
            for output in engine.add(request, items):
                results[output.request_id].take(output)
        if before_step is not None:
            before_step(step)
        if not todo and not engine.has_work():
            break
        computed = engine._iteration_total
        outputs = engine.step()
        for output in outputs:
            results[output.request_id].take(output)
        still = 0 if outputs or engine._iteration_total != computed else still + 1
        assert still < STUCK_STEPS, f"the engine hangs: {list(engine.scheduler.in_order())}"
        engine.check_invariants()
        if poison:
            poison_unused(engine)
    else:
        raise AssertionError(f"not idle after {MAX_STEPS} steps")
    check_idle(engine)
    return results


def run_one(engine: Engine, prompt: Prompt, sampling: SamplingParams, **how: Any) -> Result:
    """One request alone, which must not fail."""
    result = run(engine, {"one": (prompt, sampling)}, **how)["one"]
    assert result.error is None, result.error
    return result


def check_idle(engine: Engine) -> None:
    """Nothing is held by anyone."""
    engine.check_invariants()
    stats = engine.stats()
    assert stats.num_running == stats.num_waiting == 0
    assert stats.kv_blocks_used == engine.scheduler.kv.cache.num_held
    assert stats.embedding_rows_used == 0
    assert not engine.scheduler._bypasses
    if engine.scheduler.kv.cold is not None:
        host, copying = engine.scheduler.kv.cold.host, engine.scheduler.kv.tiers
        assert copying is not None
        assert host.num_used == len(copying.transfers.held_superblocks())
        assert host.num_used == 0 or copying.transfers.num_open > 0
        assert host.num_free + host.num_cached + host.num_used == host.num_superblocks
        assert not engine.scheduler.kv.cold._owners
    assert (engine.scheduler.kv.pool._claims == -1).all()
    if engine.images is not None:
        feed = engine.images
        left = [feed._media, feed._holds, feed._owner_of, feed._jobs, feed._checked]
        assert not any(left), left


def poison_unused(engine: Engine) -> None:
    """NaN into free KV blocks, into slots without valid KV that someone or the prefix cache holds,
    and into rows nobody may read."""
    kv, cache = engine.scheduler.kv, engine.runner.cache
    size = kv.block_size
    stale = np.ones(kv.pool.num_blocks * size, dtype=bool)
    for sequence in engine.scheduler.running:
        position = len(kv.cold_slots(sequence.seq_id)) * SUPERBLOCK_TOKENS
        for first, count in kv.runs(sequence.seq_id):
            if sequence.loading:
                # Where a copy has begun, it may also have ended.
                stale[first * size : (first + count) * size] = False
                continue
            valid = min(count * size, max(0, sequence.num_computed_tokens - position))
            stale[first * size : first * size + valid] = False
            position += count * size
    for block, node in kv.cache._nodes.items():
        stale[block * size : block * size + len(node.ids)] = False
    if cache.host is not None and kv.cold is not None:
        cache.host.poison(kv.cold.host._free_slots)
        assert kv.tiers is not None
        for block in kv.tiers.transfers.held_blocks():
            stale[block * size : (block + 1) * size] = False
    slots = torch.from_numpy(np.flatnonzero(stale))
    cache._by_head[:, :, :, slots] = torch.nan
    if engine.images is not None:
        arena = engine.images.arena
        unread = torch.ones(arena.num_rows, dtype=torch.bool)
        for entry in arena._entries.values():
            if entry.ready:
                for first, count in entry.runs:
                    unread[first : first + count] = False
        assert engine.runner.embeddings is not None
        engine.runner.embeddings[unread] = torch.nan


# -- logits -------------------------------------------------------------------------------------


class Recorder:
    """Logits of every position of one request's choice 0, as the runner gave them."""

    def __init__(self) -> None:
        self.rows: dict[int, Tensor] = {}

    def matrix(self, count: int) -> Tensor:
        """[count, vocab]: logits at positions 0 .. count - 1."""
        return torch.stack([self.rows[position] for position in range(count)])


@contextmanager
def recording(engine: Engine, request_id: str) -> Iterator[Recorder]:
    """Records the logits of `request_id` while the block runs; ask for prompt_logprobs to have
    those of the prompt."""
    recorder = Recorder()
    plain = engine.runner.forward

    def forward(batch: ForwardBatch, copies: Iterable[BlockCopy | BlockStore] = ()) -> Tensor:
        logits = plain(batch, copies)
        for row, chunk in enumerate(batch.sampled):
            if chunk.sequence.request.request_id == request_id and chunk.sequence.choice == 0:
                recorder.rows[chunk.end - 1] = logits[row].clone()
        for part in batch.prompt_rows:
            if part.chunk.sequence.request.request_id == request_id:
                for offset in range(part.count):
                    position = part.first_target - 1 + offset
                    recorder.rows[position] = logits[part.first_row + offset].clone()
        return logits

    engine.runner.forward = forward  # type: ignore[method-assign]
    try:
        yield recorder
    finally:
        del engine.runner.forward


def teacher_forced(
    engine: Engine, prompt: Prompt, continuation: SequenceOf[int] = (), **how: Any
) -> Tensor:
    """Our logits [prompt + continuation, vocab], read while prompt and continuation are prefilled
    as one prompt; the reported prompt log-probabilities are checked against them."""
    whole = dataclasses.replace(prompt, token_ids=(*prompt.token_ids, *continuation))
    if whole.positions is not None and continuation:
        start = len(prompt) + prompt.position_delta
        more = tuple(range(start, start + len(continuation)))
        t, h, w = whole.positions
        whole = dataclasses.replace(whole, positions=((*t, *more), (*h, *more), (*w, *more)))
    with recording(engine, "one") as recorder:
        result = run_one(engine, whole, greedy(1, prompt_logprobs=3), **how)
    logits = recorder.matrix(len(whole))
    _check_reports(result, logits, whole)
    return logits


def _check_reports(result: Result, logits: Tensor, prompt: Prompt) -> None:
    reported = result.prompt_logprobs
    assert reported is not None
    assert len(reported) == len(prompt)
    assert reported[0] is None
    expected = logits[:-1].log_softmax(-1)
    for position, entry in enumerate(reported[1:]):
        assert entry is not None
        assert entry.token_id == prompt.token_ids[position + 1]
        assert abs(entry.logprob - expected[position, entry.token_id]) < 1e-6
        assert len(entry.top) == 3


# -- disturbances -------------------------------------------------------------------------------


def set_budget(engine: Engine, tokens: int) -> None:
    engine.scheduler.budget = TokenBudget(tokens)


def preempt(engine: Engine, sequence: Sequence) -> None:
    """What the scheduler and the engine do to a victim when KV runs out."""
    engine.scheduler._preempt(sequence, Draft(engine.scheduler.kv))
    engine._drop_rows(sequence)


def evict_rows(engine: Engine) -> None:
    """Forgets every encoded image that nobody holds."""
    assert engine.images is not None
    arena = engine.images.arena
    free = arena.num_rows - arena.stats().rows_used
    if free and arena.acquire(b"filler", free, "filler") is Acquired.START:
        arena.mark_failed(b"filler", arena.epoch)
    assert arena.stats().rows_cached == 0


def evict_prefixes(engine: Engine) -> None:
    """Forgets the KV of every prompt that nobody uses now."""
    cache = engine.scheduler.kv.cache
    cache.evict(cache.num_idle)


def warm(engine: Engine, prompt: Prompt) -> None:
    """Encodes the prompt's pictures, so that later runs find them ready at once."""
    run_one(engine, prompt, greedy(1))


# -- the two rules ------------------------------------------------------------------------------


def assert_same_distribution(
    got: Tensor, want: Tensor, tolerance: float = LOGPROB_TOLERANCE, note: str = ""
) -> float:
    """Largest |difference| of log-probabilities over all positions and tokens, within bounds."""
    assert got.shape == want.shape
    delta = (got.log_softmax(-1) - want.log_softmax(-1)).abs()
    worst = float(delta.max())
    where = int(delta.max(dim=-1).values.argmax())
    assert worst <= tolerance, f"{note}: off by {worst:.2e} at position {where}"
    return worst


def assert_follows(tokens: SequenceOf[int], logits: Tensor, note: str = "") -> int:
    """Each token is the oracle's argmax wherever its margin exceeds MARGIN. `logits` [n, vocab]
    are the oracle's for the same history. Returns how many had a clear margin."""
    assert len(tokens) == len(logits)
    best = logits.topk(2, dim=-1)
    clear = 0
    for index, token in enumerate(tokens):
        margin = float(best.values[index, 0] - best.values[index, 1])
        if margin > MARGIN:
            clear += 1
            expected = int(best.indices[index, 0])
            assert token == expected, f"{note}: token {index} is {token}, not {expected}"
        else:
            behind = float(best.values[index, 0] - logits[index, token])
            assert behind <= MARGIN, f"{note}: token {index} is {behind:.2e} behind the best"
    return clear


def assert_same_answer(got: Result, want: Result, choice: int = 0, note: str = "") -> None:
    """Same tokens, text, ending and reported log-probabilities. A greedy tie ends the comparison;
    ties of tiny checkpoints are rare, and a run that has one says so by its margin."""
    assert got.error is None, f"{note}: {got.error}"
    ours, theirs = got.logprobs(choice), want.logprobs(choice)
    for index, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a.token_id != b.token_id:
            margin = b.top[0][2] - b.top[1][2]
            assert margin <= MARGIN, f"{note}: token {index} differs at margin {margin:.2e}"
            return
        assert abs(a.logprob - b.logprob) <= LOGPROB_TOLERANCE, f"{note}: logprob of {index}"
    assert got.tokens(choice) == want.tokens(choice), note
    assert got.text(choice) == want.text(choice), note
    assert got.finish(choice) == want.finish(choice), note
