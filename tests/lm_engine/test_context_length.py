"""How long a context may be, and what a server says when it may not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lm_engine.engine import Engine
from lm_engine.kv_sizing import ContextTooLongError
from lm_engine.models.rope import inverse_frequencies
from lm_engine.options import EngineOptions
from tests.lm_engine.models.ropes import LONGROPE_8, ORIGINAL, YARN, with_rope


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def _engine(folder: Path, max_model_len: int | None) -> Engine:
    block_bytes = 2 * 3 * 2 * 16 * 16 * 4
    options = EngineOptions(
        str(folder),
        max_model_len=max_model_len,
        max_num_seqs=2,
        kv_memory_bytes=300 * block_bytes,
        device="cpu",
    )
    return Engine.load(options)


def test_more_than_a_model_was_made_for_is_refused_with_a_way_out(
    root: Path, tmp_path: Path
) -> None:
    folder = with_rope("llama", root, tmp_path, {"rope_type": "default"})
    with pytest.raises(ContextTooLongError) as caught:
        _engine(folder, 5000)
    message = str(caught.value)
    assert "--max-model-len 5000 exceeds the 2048 positions" in message
    assert "use --max-model-len 2048 or less" in message
    assert (
        '"rope_scaling": {"rope_type": "yarn", "factor": 3.0, '
        '"original_max_position_embeddings": 2048} in config.json'
    ) in message


@pytest.mark.parametrize(
    ("rope", "positions", "asked", "allowed"),
    [
        (YARN | {"original_max_position_embeddings": 512}, 512, 2048, 2048),
        (YARN | {"original_max_position_embeddings": 512}, 512, None, 2048),
        (YARN | {"original_max_position_embeddings": 512}, 512, 2049, None),
        ({"rope_type": "linear", "factor": 4.0}, 512, 2048, 2048),
        ({"rope_type": "linear", "factor": 4.0}, 512, None, 512),
        ({"rope_type": "linear", "factor": 4.0}, 512, 2049, None),
    ],
)
def test_scaling_allows_more(
    rope: dict[str, Any],
    positions: int,
    asked: int | None,
    allowed: int | None,
    root: Path,
    tmp_path: Path,
) -> None:
    folder = with_rope("llama", root, tmp_path, rope, max_position_embeddings=positions)
    if allowed is None:
        with pytest.raises(ContextTooLongError, match="exceeds the 2048 positions") as caught:
            _engine(folder, asked)
        assert "rope_scaling" not in str(caught.value)
    else:
        assert _engine(folder, asked).info.max_model_len == allowed


@pytest.mark.parametrize(
    ("asked", "long"), [(32, False), (ORIGINAL, False), (ORIGINAL + 1, True), (None, True)]
)
def test_longropes_regime_follows_the_servers_context(
    asked: int | None, long: bool, root: Path, tmp_path: Path
) -> None:
    """Not the prompt's length: KV that is cached for one prompt must be right for every other."""
    folder = with_rope("llama", root, tmp_path, LONGROPE_8)
    decoder = _engine(folder, asked).runner.decoder
    wanted = LONGROPE_8["long_factor" if long else "short_factor"]
    assert decoder.config.rope.divisors == tuple(wanted)
    assert torch.equal(decoder.frequencies, inverse_frequencies(decoder.config.rope, 16))
