"""A context of 131,072 tokens with a sixteenth of its KV on the device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lm_engine.engine import Engine
from tests.lm_engine.harness import Lab, Prompt, assert_same_distribution, greedy, recording
from tests.lm_engine.test_large_contexts import generated, ids

GetLab = Callable[[str], Lab]
DEVICE_TOKENS = 131_072 // 16
CONTEXT = 131_072


def cold(lab: Lab) -> Engine:
    return lab.engine(
        budget=1024,
        block_size=16,
        blocks=DEVICE_TOKENS // 16,
        host_tokens=CONTEXT + 256,
        max_model_len=CONTEXT + 64,
    )


def last_logits(engine: Engine, prompt: Prompt, count: int) -> torch.Tensor:
    """[count, vocab] of the generated tokens. Memory is not poisoned: at this length that would
    take longer than the run."""
    with recording(engine, "one") as recorder:
        engine.add(prompt.request("one", greedy(count)))
        while engine.has_work():
            for output in engine.step():
                assert output.error is None, output.error
    engine.check_invariants()
    return generated(recorder)


@pytest.mark.slow
def test_16k_cold_equals_transformers(lab: GetLab) -> None:
    tiny = lab("llama_long")
    prompt = ids(16_384)
    engine = tiny.engine(
        budget=512, block_size=16, blocks=128, host_tokens=16_640, max_model_len=16_400
    )
    assert engine.scheduler.kv.pool.num_blocks * 16 == 2048
    got = last_logits(engine, prompt, 1)
    with torch.no_grad():
        hidden = tiny.hf.model(torch.tensor([prompt.token_ids])).last_hidden_state[:, -1]
        want = tiny.hf.lm_head(hidden)
    assert_same_distribution(got, want.float())


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_128k_with_a_sixteenth_resident(lab: GetLab) -> None:
    tiny = lab("llama_long")
    prompt = ids(CONTEXT)
    engine = cold(tiny)
    assert engine.runner.cache.num_slots == DEVICE_TOKENS
    got = last_logits(engine, prompt, 4)
    resident = tiny.engine(
        budget=1024, block_size=16, blocks=(CONTEXT + 64) // 16, max_model_len=CONTEXT + 64
    )
    assert torch.equal(got, last_logits(resident, prompt, 4))
