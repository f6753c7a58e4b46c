"""Steps that nobody asked for, to see how long they take.

Owns: Probe, which runs one step of a given shape with the engine's own parts and leaves the engine
as it was. Does not own: which shapes are worth running, or what follows from their times
(calibration.py).

A context of 8,000 tokens costs seconds to compute and nothing to pretend: its blocks are reserved
and hold random numbers, for the time of a step does not depend on them. Only blocks that are free
are taken, so the prefix cache loses nothing; what is not committed is found by nobody.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from chunked_prefill.request import Request, SamplingParams
from chunked_prefill.sequence import Sequence
from chunked_prefill.step_plan import ScheduledChunk, StepPlan
from lm_engine import batch as batches
from lm_engine.sampler import History, SamplingRow, sample_each

if TYPE_CHECKING:
    from lm_engine.engine import Engine

Chunks = tuple[tuple[int, int], ...]
"""(start, length) of what each sequence of a step computes, as in StepLoad.of."""

_FILL_TOKENS = 1024
"""Written at a time."""
_SAMPLING = SamplingParams(1, temperature=0.0)


class Probe:
    """Steps over free blocks of one engine, between two of its own. Close it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._kv = engine.scheduler.kv
        self._mrope = engine.runner.decoder.config.rope.axes is not None
        self._filled: set[int] = set()
        """Blocks that hold numbers: memory that nobody has written yet is not there to be read."""
        self._owners = 0

    @property
    def free_tokens(self) -> int:
        return self._kv.pool.num_free * self._kv.block_size

    def fits(self, chunks: Chunks) -> bool:
        """Whether a step of this shape takes nothing from anybody."""
        ends = [start + length for start, length in chunks]
        blocks = sum(self._kv.blocks_for(end) for end in ends)
        resident = all(self._kv.device_bound(end) is None for end in ends)
        return resident and blocks <= self._kv.pool.num_free

    def run(self, chunks: Chunks) -> float:
        """Seconds of one step, measured as the engine measures its own."""
        if not self.fits(chunks):
            raise ValueError(f"{len(chunks)} sequences do not fit into {self.free_tokens} tokens")
        try:
            plan = self._plan(chunks)
            return self._time(plan)
        finally:
            self.close()

    def give_memory_back(self) -> None:
        """Contexts that nobody had took memory that may not be needed for long: where nobody else
        has blocks, it goes back to the system."""
        if self._kv.pool.num_used == 0:
            self._engine.runner.cache.forget()
            self._filled.clear()

    def close(self) -> None:
        """Gives back every block."""
        for owner in range(1, self._owners + 1):
            self._kv.free(-owner)
        self._owners = 0

    def _plan(self, chunks: Chunks) -> StepPlan:
        scheduled = []
        for start, length in chunks:
            self._owners += 1
            owner, end = -self._owners, start + length
            request = Request(f"calibration-{owner}", (0,) * end, _SAMPLING)
            copies = self._kv.reserve(owner, 0, end, reach_tokens=end, known_tokens=end)
            assert copies == (), "a new owner of free blocks has nothing to copy"
            self._fill(owner)
            scheduled.append(ScheduledChunk(Sequence(request, owner, 0), start, length))
        return StepPlan(0, tuple(scheduled), (), ())

    def _fill(self, owner: int) -> None:
        blocks = [
            block
            for first, count in self._kv.runs(owner)
            for block in range(first, first + count)
            if block not in self._filled
        ]
        size, cache = self._kv.block_size, self._engine.runner.cache
        step = max(1, _FILL_TOKENS // size)
        for i in range(0, len(blocks), step):
            some = torch.tensor(blocks[i : i + step], device=cache.device)
            slots = (some[:, None] * size + torch.arange(size, device=cache.device)).reshape(-1)
            shape = (len(slots), cache.layout.num_kv_heads, cache.layout.head_dim)
            rows = torch.randn(shape, dtype=cache.dtype, device=cache.device)
            for layer in range(cache.layout.num_layers):
                cache.write(layer, slots, rows, rows)
        self._filled.update(blocks)

    def _time(self, plan: StepPlan) -> float:
        engine = self._engine
        device = engine.runner.decoder.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        batch = batches.build(
            plan, self._kv, _no_rows, lambda _: False, mrope=self._mrope, device=device
        )
        logits = engine.runner.forward(batch)
        rows = [_row(chunk.sequence) for chunk in batch.sampled]
        if rows:
            sample_each(logits[: len(rows)], rows, lambda _: b"")
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started


def _row(sequence: Sequence) -> SamplingRow:
    ids = sequence.request.token_ids
    return SamplingRow(_SAMPLING, 0, 0, ids, History(sequence.token_ids, len(ids)))


def _no_rows(key: bytes) -> tuple[tuple[int, int], ...]:
    raise AssertionError("calibration computes no image tokens")
