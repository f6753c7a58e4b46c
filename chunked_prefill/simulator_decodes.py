"""Simulated steps in which nothing happens but that every answer gets its next token.

Owns: `decode_on`, which takes such steps many at a time, with what each would have decided,
reserved, committed and taught. Does not own: other steps (simulator.py), decisions (scheduler.py),
or blocks (kv_offload). Imports no torch.

With nobody waiting and nothing but decodes, a scheduler has no choice: each running sequence gets
one token, and asks for a block when its last is full. A test holds the steps taken here equal to
those of Scheduler.schedule and commit, one by one; they are most of a simulated server's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from chunked_prefill.scheduler import Scheduler
from chunked_prefill.sequence import Sequence
from chunked_prefill.simulator_executor import Executor
from chunked_prefill.step_time import StepLoad
from kv_offload.kv_manager import KVManager

TOKEN = -1
"""What is sampled; no prompt has it, so no later prompt finds an answer's KV."""


@dataclass(slots=True)
class DecodeRun:
    """Steps that were taken, and the seconds at which they ended."""

    ends_s: list[float] = field(default_factory=list)
    step_s: float = 0.0
    """Their lengths together."""
    peak_blocks: int = 0
    now_s: float = 0.0
    """When the next may start."""


def only_decodes(scheduler: Scheduler) -> bool:
    """Whether the next step is one of these."""
    running = scheduler.running
    if not running or scheduler.waiting or scheduler.kv.cold is not None:
        return False
    last = running[0].last_step
    if not all(s.decodes and s.last_step == last for s in running):
        return False
    return scheduler.budget.decodes(len(running), False, scheduler.step + 1) == len(running)


def decode_on(
    scheduler: Scheduler,
    executor: Executor,
    now_s: float,
    *,
    most_steps: int,
    until_s: float,
    between_s: float,
) -> DecodeRun:
    """At most so many steps, none of which starts at `until_s` or later; fewer, or none, when there
    is no block for a token. Call it when `only_decodes`, with as many steps as no sequence ends
    in."""
    kv, budget, running = scheduler.kv, scheduler.budget, scheduler.running
    size, width = kv.block_size, len(running)
    run = DecodeRun(now_s=now_s)
    budget.begin({s.request.tpot_s for s in running})
    rows = [_Row(s) for s in running]
    # By the step, modulo a block, in which the sequence's next token needs a new block.
    full_at: list[list[_Row]] = [[] for _ in range(size)]
    for row in rows:
        full_at[-row.start % size].append(row)
    context = sum(row.start for row in rows) + width
    for taken in range(most_steps):
        if run.now_s >= until_s:
            break
        if not all(row.reserve(kv, taken) for row in full_at[taken % size]):
            break
        load = StepLoad(width, width, context, 0.0)
        seconds = executor.execute(load, run.now_s)
        context += width
        run.step_s += seconds
        run.now_s += seconds
        run.ends_s.append(run.now_s)
        run.peak_blocks = max(run.peak_blocks, kv.pool.num_used - kv.cache.num_idle)
        scheduler.step += 1
        for row in full_at[(taken + 1) % size]:
            row.advance(taken + 1)
            kv.commit(row.sequence.seq_id, row.sequence.cache_ids, row.start + taken + 1)
        budget.observe(load, seconds)
        run.now_s += between_s
    if run.ends_s:
        for row in rows:
            row.advance(len(run.ends_s))
            row.sequence.last_step = scheduler.step
    return run


class _Row:
    """A sequence that is brought up to date when somebody looks."""

    __slots__ = ("done", "sequence", "start")

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.start = sequence.num_computed_tokens
        self.done = 0

    def advance(self, steps: int) -> None:
        """To what it is after so many steps of the run."""
        sequence, count = self.sequence, steps - self.done
        tokens = [TOKEN] * count
        if sequence.cache_ids is not sequence.token_ids:
            sequence.cache_ids += tokens
        sequence.token_ids += tokens
        sequence.num_ready_tokens += count
        sequence.num_computed_tokens += count
        self.done = steps

    def reserve(self, kv: KVManager, steps: int) -> bool:
        """A place for its token in the next step, after so many."""
        self.advance(steps)
        sequence, place = self.sequence, self.start + steps
        copies = kv.reserve(
            sequence.seq_id,
            place,
            place + 1,
            reach_tokens=sequence.max_tokens,
            known_tokens=sequence.num_tokens,
            choices=sequence.width,
        )
        return copies is not None
