"""The storage tensor: shape, bounds, and rows written by a forked child seen by the parent."""

from __future__ import annotations

import os

import pytest
import torch

from vision_encoder.embedding_storage import allocate_storage, shared_memory, storage_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shared_rows_have_the_shape_and_start_at_zero(dtype: torch.dtype) -> None:
    region = shared_memory(storage_bytes(10, 2, 8, dtype))
    rows = allocate_storage(10, 2, 8, dtype, region)
    assert rows.shape == (10, 2, 8)
    assert rows.dtype is dtype
    assert not rows.any()


def test_rows_written_by_a_child_are_seen_by_its_parent() -> None:
    region = shared_memory(storage_bytes(4, 1, 8, torch.float32))
    rows = allocate_storage(4, 1, 8, torch.float32, region)
    child = os.fork()
    if child == 0:
        rows[2] = 7.0
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert rows[2].eq(7.0).all()
    assert not rows[[0, 1, 3]].any()


def test_a_region_that_is_too_small_is_refused_with_both_sizes() -> None:
    region = shared_memory(4096)
    with pytest.raises(ValueError, match="need 8192 bytes, the shared memory has 4096"):
        allocate_storage(64, 1, 32, torch.float32, region)


def test_shared_memory_is_for_the_cpu_alone() -> None:
    with pytest.raises(ValueError, match="rows on cuda"):
        allocate_storage(1, 1, 8, torch.float32, shared_memory(4096), device="cuda")
