"""From a StepPlan to tensors: the one place that knows block tables, slots and positions.

Owns: ForwardBatch and `build`. Does not own: what is computed (scheduler) or how (runner.py).
Everything is collected in lists and arrays first and becomes a tensor once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from chunked_prefill.step_plan import ScheduledChunk, StepPlan
from kv_offload.kv_manager import KVManager
from kv_offload.superblock import SUPERBLOCK_TOKENS
from lm_engine.attention.base import AttentionBatch, SequenceSlice
from lm_engine.evidence import Recorder, Watch, Watched

Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of the logits that predict prompt tokens [first_target, first_target + count)."""

    chunk: ScheduledChunk
    first_row: int
    first_target: int
    count: int


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One forward pass over T tokens of some sequences; all tensors on the runner's device."""

    token_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64, or [3, T] for M-RoPE (t, h, w)."""
    attention: AttentionBatch
    image_tokens: Tensor | None
    """[M] int64: rows of the batch that take an embedding from the arena; None without images."""
    image_rows: Tensor | None
    """[M] int64: the arena rows that they take."""
    logits_rows: Tensor
    """[R] int64: rows of the batch that become logits, the sampled ones first."""
    sampled: tuple[ScheduledChunk, ...]
    """Chunks whose last token is row i of the logits."""
    prompt_rows: tuple[PromptRows, ...]
    evidence: Recorder | None = None
    """Filled in by the forward pass, when a sampled row's attention is watched."""


def build(
    plan: StepPlan,
    kv: KVManager,
    rows_of: Callable[[bytes], Runs],
    wants_prompt_logprobs: Callable[[ScheduledChunk], bool],
    watch_of: Callable[[ScheduledChunk], Watch | None] = lambda _: None,
    *,
    mrope: bool,
    device: torch.device,
) -> ForwardBatch:
    """Tensors for `plan`, whose KV is reserved.

    `rows_of(key)` gives an image's arena rows as (first, count) runs, valid during the step.
    """
    token_ids: list[int] = []
    positions: list[np.ndarray] = []
    slots: list[np.ndarray] = []
    slices: list[SequenceSlice] = []
    image_tokens: list[np.ndarray] = []
    image_rows: list[np.ndarray] = []
    last_rows: list[int] = []
    for chunk in plan.chunks:
        sequence, first = chunk.sequence, len(token_ids)
        token_ids += sequence.token_ids[chunk.start : chunk.end]
        positions.append(_positions(chunk, mrope))
        runs, cold = kv.runs(sequence.seq_id), kv.cold_slots(sequence.seq_id)
        before = len(cold) * SUPERBLOCK_TOKENS
        slots.append(_slots(runs, kv.block_size, chunk.start - before, chunk.end - before))
        numbers = kv.cold_superblocks(sequence.seq_id)
        slices.append(SequenceSlice(first, chunk.length, chunk.end, runs, cold, numbers))
        for tokens, rows in _image_rows(chunk, rows_of):
            image_tokens.append(tokens + (first - chunk.start))
            image_rows.append(rows)
        last_rows.append(first + chunk.length - 1)

    sampled = [(c, row) for c, row in zip(plan.chunks, last_rows, strict=True) if c.samples]
    logits_rows = [row for _, row in sampled]
    prompt_rows: list[PromptRows] = []
    for chunk, last in zip(plan.chunks, last_rows, strict=True):
        count = min(chunk.end, chunk.sequence.num_prompt_tokens - 1) - chunk.start
        if count > 0 and wants_prompt_logprobs(chunk):
            prompt_rows.append(PromptRows(chunk, len(logits_rows), chunk.start + 1, count))
            start = last - chunk.length + 1
            logits_rows += range(start, start + count)

    pieces = [piece for chunk, piece in zip(plan.chunks, slices, strict=True) if chunk.samples]
    watched = [
        Watched(sample, piece, watch)
        for sample, ((chunk, _), piece) in enumerate(zip(sampled, pieces, strict=True))
        if (watch := watch_of(chunk)) is not None
    ]

    def move(array: np.ndarray | list[int]) -> Tensor:
        return torch.as_tensor(np.asarray(array, dtype=np.int64)).to(device, non_blocking=True)

    return ForwardBatch(
        token_ids=move(token_ids),
        positions=move(np.concatenate(positions, axis=-1)),
        attention=AttentionBatch(tuple(slices), move(np.concatenate(slots))),
        image_tokens=move(np.concatenate(image_tokens)) if image_tokens else None,
        image_rows=move(np.concatenate(image_rows)) if image_rows else None,
        logits_rows=move(logits_rows),
        sampled=tuple(chunk for chunk, _ in sampled),
        prompt_rows=tuple(prompt_rows),
        evidence=Recorder(watched) if watched else None,
    )


def _positions(chunk: ScheduledChunk, mrope: bool) -> np.ndarray:
    """[length], or [3, length] with M-RoPE; generated tokens continue at index + delta."""
    request = chunk.sequence.request
    plain = np.arange(chunk.start, chunk.end, dtype=np.int64)
    if not mrope:
        return plain
    if request.positions is None:
        return np.broadcast_to(plain, (3, chunk.length))
    in_prompt = min(chunk.end, request.num_prompt_tokens)
    given = np.array(
        [axis[chunk.start : in_prompt] for axis in request.positions], dtype=np.int64
    ).reshape(3, -1)
    generated = plain[max(0, in_prompt - chunk.start) :] + request.position_delta
    return np.concatenate((given, np.broadcast_to(generated, (3, len(generated)))), axis=1)


def _slots(runs: Runs, block_size: int, start: int, end: int) -> np.ndarray:
    """Slots of token positions [start, end)."""
    pieces: list[np.ndarray] = []
    offset = 0
    for first, count in runs:
        length = count * block_size
        low, high = max(start, offset), min(end, offset + length)
        if low < high:
            base = first * block_size - offset
            pieces.append(np.arange(base + low, base + high, dtype=np.int64))
        offset += length
        if offset >= end:
            break
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _image_rows(
    chunk: ScheduledChunk, rows_of: Callable[[bytes], Runs]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(token positions in the sequence, arena rows) for each image span that the chunk meets."""
    found = []
    for span in chunk.sequence.request.image_spans:
        low, high = max(chunk.start, span.offset), min(chunk.end, span.end)
        if low >= high:
            continue
        skip = low - span.offset + span.row_offset
        rows = _slots(rows_of(span.key), 1, skip, skip + high - low)
        found.append((np.arange(low, high, dtype=np.int64), rows))
    return found
