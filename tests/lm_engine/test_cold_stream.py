"""`--cold-kv stream`: cold KV through the staging ring, to the bit what it is on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from lm_engine.engine import Engine
from tests.lm_engine.harness import Lab
from tests.lm_engine.test_large_contexts import (
    ids,
    logits_of,
    resident,
    small_device,
)

GetLab = Callable[[str], Lab]


def streaming(lab: Lab, **options: object) -> Engine:
    engine = small_device(lab, cold_kv="stream", **options)
    assert engine.runner.ring is not None
    return engine


@contextmanager
def poisoned(engine: Engine) -> Iterator[None]:
    """What the ring gave out holds NaN once it is given back, and its books are checked."""
    ring = engine.runner.ring
    assert ring is not None
    take, release = ring.take, ring.release

    def take_noted(*args: object) -> torch.Tensor:
        ring.check_invariants()
        ring.given = take(*args)  # type: ignore[attr-defined,arg-type]
        return ring.given  # type: ignore[attr-defined,no-any-return]

    def release_poisoned() -> None:
        ring.given.fill_(torch.nan)  # type: ignore[attr-defined]
        release()
        ring.check_invariants()

    ring.take, ring.release = take_noted, release_poisoned  # type: ignore[method-assign]
    try:
        yield
    finally:
        del ring.take, ring.release


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_streamed_cold_and_resident_give_the_same_bits(lab: GetLab, family: str) -> None:
    tiny = lab(family)
    prompt = ids(1500)
    want, want_logits = logits_of(resident(tiny), prompt, 20)
    engine = streaming(tiny)
    with poisoned(engine):
        got, logits = logits_of(engine, prompt, 20)
    assert got.tokens() == want.tokens()
    assert torch.equal(logits, want_logits)
    ring = engine.runner.ring
    assert ring is not None
    assert ring.bytes_staged > 0
    assert ring.retries == 0
