"""A request whose next token cannot be found ends by itself; whoever shares its step goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from chunked_prefill.request import SamplingParams
from lm_engine import kv_sizing
from lm_engine.engine import Engine
from lm_engine.live import LiveRequest
from lm_engine.models.errors import OutOfMemoryError
from lm_engine.options import EngineOptions
from tests.lm_engine.harness import (
    TEXT,
    Lab,
    assert_same_answer,
    check_idle,
    greedy,
    run,
    run_one,
)

Labs = Callable[[str], Lab]


def spoil(engine: Engine, name: str, choice: int, after: int) -> None:
    """The model gives no numbers for one choice from its token number `after` on."""
    forward = engine.runner.forward

    def spoiled(batch: Any, copies: Any) -> torch.Tensor:
        logits = forward(batch, copies).clone()
        for row, chunk in enumerate(batch.sampled):
            sequence = chunk.sequence
            mine = (sequence.request.request_id, sequence.choice) == (name, choice)
            if mine and sequence.num_output_tokens >= after:
                logits[row] = torch.nan
        return logits

    engine.runner.forward = spoiled  # type: ignore[method-assign]


@pytest.mark.parametrize("choices", [1, 3])
def test_a_row_without_a_next_token_fails_its_request_alone(
    lab: Labs, caplog: pytest.LogCaptureFixture, choices: int
) -> None:
    this = lab("llama")
    good = (this.prompt(TEXT), greedy(12))
    drawn = SamplingParams(12, seed=3, temperature=0.9, repetition_penalty=1.2, ignore_eos=True)
    alone = [run_one(this.engine(), good[0], sampling) for sampling in (good[1], drawn)]
    engine = this.engine()
    spoil(engine, "bad", choices - 1, after=4)
    bad = SamplingParams(12, seed=1, n=choices, ignore_eos=True)
    with caplog.at_level(logging.ERROR):
        results = run(
            engine, {"good": good, "bad": (this.prompt("a cat"), bad), "drawn": (good[0], drawn)}
        )
    error = results["bad"].error
    assert error is not None
    assert error.kind == "internal"
    assert len(results["bad"].tokens(choices - 1)) == 4
    assert_same_answer(results["good"], alone[0])
    assert results["drawn"].tokens() == alone[1].tokens()
    assert "bad has no next token" in caplog.text
    check_idle(engine)
    assert run_one(engine, *good).tokens() == alone[0].tokens()


def test_rows_share_the_ids_of_their_sequence(lab: Labs, monkeypatch: pytest.MonkeyPatch) -> None:
    """One history for the life of a choice, also after preemptions, instead of a copy per token."""
    this = lab("llama")
    seen: dict[tuple[str, int], set[int]] = {}
    make = LiveRequest.row

    def watched(live: LiveRequest, sequence: Any, eos: Any) -> Any:
        row = make(live, sequence, eos)
        assert list(row.output_ids) == sequence.token_ids[sequence.num_prompt_tokens :]
        key = (sequence.request.request_id, sequence.choice)
        seen.setdefault(key, set()).add(id(row.output_ids))
        return row

    monkeypatch.setattr(LiveRequest, "row", watched)
    sampling = SamplingParams(20, seed=5, n=2, frequency_penalty=1.0, ignore_eos=True)
    jobs = {f"r{i}": (this.prompt(TEXT[i:]), sampling) for i in range(4)}
    engine = this.engine(blocks=60)
    run(engine, jobs)
    assert engine.stats().preemptions > 0
    assert {len(histories) for histories in seen.values()} == {1}
    assert len(seen) == 8


def test_a_pool_that_the_machine_cannot_hold_is_refused_with_numbers(
    lab: Labs, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(lab("llama").folder)
    options = EngineOptions(folder, device="cpu", kv_memory_bytes=1 << 40, max_num_seqs=1024)
    for free, fits in ((1 << 16, False), (1 << 40, True)):
        monkeypatch.setattr(kv_sizing, "available_bytes", lambda device, free=free: free)
        if fits:
            Engine.load(options)
            continue
        with pytest.raises(OutOfMemoryError, match=f"--kv-cache-memory-bytes {free}") as refused:
            Engine.load(options)
        assert refused.value.available_bytes == free
        assert refused.value.need_bytes > free
