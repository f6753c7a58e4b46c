"""A context of 131,072 tokens with a sixteenth of its KV on the device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lm_engine.attention.native import NativeAttention
from lm_engine.engine import Engine
from lm_engine.options import ColdKV
from tests.lm_engine.harness import Lab, Prompt, assert_same_distribution, greedy, recording
from tests.lm_engine.test_large_contexts import generated, ids

GetLab = Callable[[str], Lab]
DEVICE_TOKENS = 131_072 // 16
CONTEXT = 131_072


def cold(lab: Lab, way: ColdKV = "auto") -> Engine:
    return lab.engine(
        budget=1024,
        block_size=16,
        blocks=DEVICE_TOKENS // 16,
        host_tokens=CONTEXT + 256,
        max_model_len=CONTEXT + 64,
        cold_kv=way,
    )


def last_logits(
    engine: Engine, prompt: Prompt, count: int, after_step: Callable[[], None] = lambda: None
) -> torch.Tensor:
    """[count, vocab] of the generated tokens. Memory is not poisoned: at this length that would
    take longer than the run."""
    with recording(engine, "one") as recorder:
        engine.add(prompt.request("one", greedy(count)))
        while engine.has_work():
            for output in engine.step():
                assert output.error is None, output.error
            after_step()
    engine.check_invariants()
    return generated(recorder)


@pytest.fixture(scope="module")
def resident_128k(lab: GetLab) -> torch.Tensor:
    engine = lab("llama_long").engine(
        budget=1024, block_size=16, blocks=(CONTEXT + 64) // 16, max_model_len=CONTEXT + 64
    )
    return last_logits(engine, ids(CONTEXT), 4)


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
def test_128k_with_a_sixteenth_resident(lab: GetLab, resident_128k: torch.Tensor) -> None:
    engine = cold(lab("llama_long"))
    assert engine.runner.cache.num_slots == DEVICE_TOKENS
    assert torch.equal(last_logits(engine, ids(CONTEXT), 4), resident_128k)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_peak_is_one_budget_and_the_ring_at_32k_and_at_128k(
    lab: GetLab, resident_128k: torch.Tensor
) -> None:
    """Streamed, after every step: blocks in use, the ring's buffers and the threads' own."""
    engine = cold(lab("llama_long"), "stream")
    cache, ring, attention = engine.runner.cache, engine.runner.ring, engine.runner.attention
    assert ring is not None
    assert isinstance(attention, NativeAttention)
    budget = DEVICE_TOKENS * cache.layout.bytes_per_token
    peak = 0

    def measure() -> None:
        nonlocal peak
        blocks = engine.scheduler.kv.pool.num_used * cache.layout.bytes_per_block
        buffers = (*ring._buffers, ring._spare, attention._staging)
        staged = sum(buffer.nbytes for buffer in buffers if buffer is not None)
        assert staged <= ring.num_bytes
        peak = max(peak, blocks + staged)

    peaks = []
    for context, seed in ((CONTEXT // 4, 5), (CONTEXT, 0)):
        peak = 0
        logits = last_logits(engine, ids(context, seed), 4, measure)
        peaks.append(peak)
    assert torch.equal(logits, resident_128k)
    assert all(budget // 2 < peak <= budget + ring.num_bytes for peak in peaks)
    assert cache._by_head.untyped_storage().nbytes() == budget == cache.num_bytes
    assert ring.bytes_staged > 8 * budget
