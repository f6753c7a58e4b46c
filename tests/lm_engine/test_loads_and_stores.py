"""Device blocks that one request gives up and another's KV is loaded into, within one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from chunked_prefill.step_plan import StepPlan
from kv_offload.copy_manual import ManualCopyEngine
from kv_offload.kv_manager import BlockStore
from kv_offload.tickets import Work
from kv_offload.transfer import Transfers
from lm_engine.engine import Engine
from tests.lm_engine.harness import (
    MAX_STEPS,
    Lab,
    Prompt,
    Result,
    assert_same_answer,
    greedy,
    run_one,
)
from tests.lm_engine.test_large_contexts import ids

GetLab = Callable[[str], Lab]
LONG, SHORT = greedy(640), greedy(8)
SEEN = 100
"""Tokens of the long answer that are compared."""
QUOTA_BLOCKS = 200


class AtOnce(ManualCopyEngine):
    """The fastest thread there may be: a copy is made as it is started."""

    def start(self, ticket: int, work: Work, after: Any) -> None:
        super().start(ticket, work, after)
        self.finish(ticket)


def served_together(tiny: Lab, long: Prompt, short: Prompt) -> tuple[Result, Result, set[int]]:
    """`short`, a beginning of `long`, comes as that one is about to send 64 of its blocks to the
    host. Returns the answers, and the blocks that went to the host and were loaded into."""
    engine = tiny.engine(budget=64, block_size=4, blocks=400, host_tokens=1792, max_model_len=1792)
    tiers = engine.scheduler.kv.tiers
    assert tiers is not None
    tiers.transfers._memory_lane.engine = AtOnce()
    # Fills the rest of the device; the whole host is promised to the long one.
    run_one(engine, ids(780, 2), greedy(1))
    results = {"long": Result(), "short": Result()}
    overwritten: set[int] = set()
    schedule = engine.scheduler.schedule

    def watched() -> StepPlan:
        plan = schedule()
        for copy in plan.copies:
            if isinstance(copy, BlockStore):
                overwritten.update(filter(tiers.transfers.is_being_written, copy.blocks))
        return plan

    engine.scheduler.schedule = watched  # type: ignore[method-assign]
    engine.add(long.request("long", LONG))
    came = False
    for _ in range(MAX_STEPS):
        if len(results["long"].tokens()) >= SEEN and results["short"].finished:
            break
        if not came and _gives_up_blocks(engine):
            came = True
            engine.add(short.request("short", SHORT))
        for output in engine.step():
            results[output.request_id].take(output)
        engine.check_invariants()
    else:
        raise AssertionError(f"{list(engine.scheduler.in_order())} do not come to an end")
    engine.abort("long")
    engine.close()
    return results["long"], results["short"], overwritten


def _gives_up_blocks(engine: Engine) -> bool:
    """Whether the next token of the long one sends its oldest superblock to the host."""
    kv = engine.scheduler.kv
    return any(
        kv.held_blocks(s.seq_id) == QUOTA_BLOCKS
        and s.num_computed_tokens == kv.held_tokens(s.seq_id)
        for s in engine.scheduler.running
    )


@pytest.mark.parametrize("early", [False, True], ids=["after the stores", "as asked for"])
def test_a_load_waits_for_the_stores_of_its_step(
    lab: GetLab, monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    """And were it started as it is asked for, this test would see it."""
    tiny = lab("llama")
    long = ids(1050, 1)
    short = Prompt((*long.token_ids[:256], 7))
    resident = tiny.engine(budget=64, block_size=4, blocks=600, max_model_len=2048)
    want_long, want_short = run_one(resident, long, greedy(SEEN)), run_one(resident, short, SHORT)
    if early:
        load = Transfers.load

        def at_once(self: Transfers, *args: Any, **kwargs: Any) -> int:
            ticket = load(self, *args, **kwargs)
            self.start_loads()
            return ticket

        monkeypatch.setattr(Transfers, "load", at_once)
    got_long, got_short, overwritten = served_together(tiny, long, short)
    assert overwritten
    assert_same_answer(got_short, want_short)
    same = got_long.tokens()[:SEEN] == want_long.tokens()
    assert same != early
