"""Stretched positions against transformers: frequencies, rotation, and logits beyond the original
length."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

from lm_engine.models.config import DecoderConfig, RopeConfig
from lm_engine.models.errors import DynamicRopeError, LoadError, UnsupportedModelError
from lm_engine.models.loader import load_decoder
from lm_engine.models.rope import inverse_frequencies, rotate, rotation
from tests.checkpoints import checkpoint
from tests.lm_engine.models.ropes import LONGROPE_8, ORIGINAL, YARN, phi3, with_rope
from tests.lm_engine.models.test_decoder import logits_of, prompt, reference

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3,
    "yarn of Qwen2.5": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    },
    "yarn of DeepSeek": {
        "rope_type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
    },
    "yarn of gpt-oss": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "yarn with its own scale": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 8192,
        "attention_factor": 0.5,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "yarn without factor": {
        "rope_type": "yarn",
        "factor": None,
        "original_max_position_embeddings": 32768,
    },
    "yarn that stretches nothing": {
        "rope_type": "yarn",
        "factor": 1.0,
        "original_max_position_embeddings": 131072,
    },
}


def _config(rope: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "hidden_size": 512,
        "num_attention_heads": 4,
        "max_position_embeddings": 131072,
        "rope_parameters": {"rope_theta": 500000.0, **rope},
        **changes,
    }


@pytest.mark.parametrize("title", KINDS)
@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
def test_frequencies_are_transformers(
    title: str, theta: float, caplog: pytest.LogCaptureFixture
) -> None:
    """To the last bit: see `inverse_frequencies`."""
    raw = _config({**KINDS[title], "rope_theta": theta})
    wanted, scale = ROPE_INIT_FUNCTIONS[KINDS[title]["rope_type"]](tf.LlamaConfig(**raw))
    rope = DecoderConfig.from_hf({"model_type": "llama", **raw}).rope
    assert torch.equal(inverse_frequencies(rope, 128), wanted)
    assert rope.attention_factor == scale


@pytest.mark.parametrize("factor", [None, 16.0])
@pytest.mark.parametrize("attention", [None, 1.25])
@pytest.mark.parametrize("partial", [1.0, 0.75])
@pytest.mark.parametrize("long", [False, True])
def test_longrope_frequencies_are_transformers(
    long: bool, partial: float, attention: float | None, factor: float | None
) -> None:
    count = int(128 * partial) // 2
    rope = {
        "rope_type": "longrope",
        "short_factor": [1 + 0.01 * i for i in range(count)],
        "long_factor": [1 + 0.5 * i for i in range(count)],
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": partial,
    }
    rope |= {} if factor is None else {"factor": factor}
    rope |= {} if attention is None else {"attention_factor": attention}
    raw = _config(rope, original_max_position_embeddings=4096, partial_rotary_factor=partial)
    wanted, scale = ROPE_INIT_FUNCTIONS["longrope"](
        tf.Phi3Config(**raw), seq_len=4097 if long else 4096
    )
    config = DecoderConfig.from_hf({"model_type": "phi3", **raw})
    fixed = config.for_context(4097 if long else 4096).rope
    assert torch.equal(inverse_frequencies(fixed, 128), wanted)
    assert fixed.attention_factor == pytest.approx(scale, rel=1e-15)
    assert config.max_positions == 131072


def test_a_part_of_each_head_is_rotated() -> None:
    """As Phi-4-mini does, at positions where an ulp would show."""
    positions = torch.tensor([0, 1, 4097, 131_071])
    heads = torch.randn(4, 3, 128, generator=torch.Generator().manual_seed(1))
    frequencies = inverse_frequencies(RopeConfig(10_000.0, rotated=96), 128)
    got = rotate(heads, rotation(positions, frequencies, None, torch.float32, 1.19))
    angles = positions[:, None] * frequencies
    cos, sin = (torch.cat((f, f), -1)[None] * 1.19 for f in (angles.cos(), angles.sin()))
    wanted, _ = apply_rotary_pos_emb(
        heads[None].transpose(1, 2), heads[None].transpose(1, 2), cos, sin
    )
    torch.testing.assert_close(got, wanted[0].transpose(0, 1), atol=1e-5, rtol=0)
    assert torch.equal(got[..., 96:], heads[..., 96:])


LONG = 160
"""Two and a half times the original length."""


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen2_5_vl", "qwen3_vl"])
def test_yarn_beyond_its_original_length(name: str, root: Path, tmp_path: Path) -> None:
    rope = dict(YARN)
    folder = with_rope(name, root, tmp_path, rope)
    ids = prompt(length=LONG)
    got = logits_of(load_decoder(folder), ids)
    torch.testing.assert_close(got, reference(folder, ids), atol=1e-4, rtol=0)
    plain = logits_of(load_decoder(with_rope(name, root, tmp_path, {"rope_type": "default"})), ids)
    assert (got - plain).abs().max() > 1e-2


@pytest.mark.parametrize(
    "changes",
    [
        {"mscale": 1.0, "mscale_all_dim": 0.5},
        {"attention_factor": 1.3},
        {"truncate": False, "beta_fast": 8.0},
    ],
)
def test_yarns_details_reach_the_logits(
    changes: dict[str, Any], root: Path, tmp_path: Path
) -> None:
    folder = with_rope("llama", root, tmp_path, YARN | changes)
    ids = prompt(length=LONG)
    got = logits_of(load_decoder(folder), ids)
    torch.testing.assert_close(got, reference(folder, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama_rope3", "llama_linear"])
def test_older_kinds_beyond_their_original_length(name: str, root: Path) -> None:
    folder = checkpoint(name, root)
    ids = prompt(length=LONG)
    got = logits_of(load_decoder(folder), ids)
    torch.testing.assert_close(got, reference(folder, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "phi3", "phi3 in part"])
@pytest.mark.parametrize(("length", "context"), [(ORIGINAL, ORIGINAL), (LONG, 2048)])
def test_longrope_on_both_sides_of_its_original_length(
    family: str, length: int, context: int, root: Path, tmp_path: Path
) -> None:
    if family == "llama":
        folder = with_rope("llama", root, tmp_path, LONGROPE_8)
    elif family == "phi3":
        folder = phi3(tmp_path, LONGROPE_8, 1.0)
    else:
        rope = LONGROPE_8 | {key: LONGROPE_8[key][:6] for key in ("short_factor", "long_factor")}
        folder = phi3(tmp_path, rope, 0.75, sliding_window=48)
    loaded = load_decoder(folder)
    loaded.decoder.fix_context(context)
    ids = prompt(length=length)
    got = logits_of(loaded, ids)
    torch.testing.assert_close(got, reference(folder, ids), atol=1e-4, rtol=0)
    loaded = load_decoder(folder)
    loaded.decoder.fix_context(2048 if context == ORIGINAL else ORIGINAL)
    assert (logits_of(loaded, ids) - got).abs().max() > 1e-2


def test_ctx_01_dynamic_ntk_is_refused_with_a_way_out(root: Path, tmp_path: Path) -> None:
    """CTX-01: a server that caches keys cannot serve it; a constant in its place would be wrong."""
    rope = {"rope_type": "dynamic", "factor": 2.0}
    folder = with_rope("llama", root, tmp_path, rope, max_position_embeddings=128)
    with pytest.raises(DynamicRopeError) as caught:
        load_decoder(folder)
    assert isinstance(caught.value, LoadError)
    message = str(caught.value)
    assert "change with the length of each prompt" in message
    way_out = '{"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}'
    assert way_out in message
    assert "stay within 128 positions" in message


@pytest.mark.parametrize(
    ("rope", "says"),
    [
        ({"rope_type": "linear"}, "'linear' has factor = None"),
        ({"rope_type": "llama3", "factor": 8.0}, "'llama3' has low_freq_factor = None"),
        ({"rope_type": "yarn", "factor": 0}, "'yarn' has factor = 0"),
        ({"rope_type": "yarn", "factor": float("nan")}, "'yarn' has factor = nan"),
        ({"rope_type": "yarn", "factor": True}, "'yarn' has factor = True"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "short_factor has 1 numbers.*64 freq"),
        (
            {"rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": [0.0] * 64},
            "long_factor has 64 numbers.*one positive number",
        ),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "0.5 is not supported"),
    ],
)
def test_what_makes_no_sense_is_named(rope: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModelError, match=says):
        DecoderConfig.from_hf({"model_type": "llama", **_config(rope)})


@pytest.mark.parametrize("partial", [0.1, 1.5])
def test_a_part_that_has_no_pairs_is_refused(partial: float) -> None:
    raw = _config({"rope_type": "default"}, head_dim=50, partial_rotary_factor=partial)
    with pytest.raises(UnsupportedModelError, match=f"rotates {int(50 * partial)} of 50 numbers"):
        DecoderConfig.from_hf({"model_type": "phi3", **raw})


CHANGED: dict[str, Any] = {
    "theta": 20_000.0,
    "kind": "linear",
    "factor": 2.0,
    "low_freq_factor": 2.0,
    "high_freq_factor": 2.0,
    "original_max_positions": 64,
    "divisors": (2.0,),
    "axes": (0, 1),
    "rotated": 8,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "truncate": False,
    "attention_factor": 1.1,
    "long_divisors": (2.0,),
}


@pytest.mark.parametrize("field", [field.name for field in fields(RopeConfig)])
def test_every_field_is_in_the_fingerprint(field: str) -> None:
    plain = RopeConfig(10_000.0)
    changed = replace(plain, **{field: CHANGED[field]})
    layers = (True, True)
    assert plain.fingerprint(16, layers) != changed.fingerprint(16, layers)


def test_fingerprints_of_the_same_keys_are_equal() -> None:
    plain = RopeConfig(10_000.0)
    layers = (True, True)
    assert len(plain.fingerprint(16, layers)) == 32
    assert plain.fingerprint(16, layers) == replace(plain, rotated=16).fingerprint(16, layers)
    assert plain.fingerprint(16, layers) != plain.fingerprint(32, layers)
    assert plain.fingerprint(16, layers) != plain.fingerprint(16, (True, False))


def test_the_regime_is_in_the_fingerprint() -> None:
    raw = _config(LONGROPE_8, head_dim=16, original_max_position_embeddings=ORIGINAL)
    config = DecoderConfig.from_hf({"model_type": "phi3", **raw})
    prints = [config.for_context(n).rope_fingerprint for n in (32, ORIGINAL, ORIGINAL + 1, 4096)]
    assert prints[0] == prints[1]
    assert prints[2] == prints[3]
    assert prints[1] != prints[2]
    again = config.for_context(ORIGINAL).for_context(4096)
    assert again.rope_fingerprint == prints[0]
    yarn = DecoderConfig.from_hf({"model_type": "llama", **_config(YARN)})
    assert yarn.for_context(32) == yarn.for_context(100_000) == yarn


@pytest.mark.parametrize(
    ("rope", "made_for", "most"),
    [
        ({"rope_type": "default"}, 32768, 32768),
        ({"rope_type": "linear", "factor": 4.0}, 32768, 131072),
        ({**LLAMA3, "original_max_position_embeddings": 8192}, 32768, 32768),
        ({"rope_type": "yarn", "factor": 4.0}, 131072, 131072),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192},
            32768,
            32768,
        ),
    ],
)
def test_how_long_a_context_may_be(rope: dict[str, Any], made_for: int, most: int) -> None:
    """Qwen's cards add a yarn and leave max_position_embeddings as it was."""
    raw = _config(rope, max_position_embeddings=32768)
    config = DecoderConfig.from_hf({"model_type": "llama", **raw})
    assert (config.max_positions, config.most_positions) == (made_for, most)
