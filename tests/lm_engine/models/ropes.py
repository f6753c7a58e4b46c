"""Tiny checkpoints of one family with any rope.

Owns: `with_rope`, which rewrites the configuration of a tiny checkpoint, and `phi3`. Does not own:
any assertion.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import transformers as tf

from tests.checkpoints import VOCAB_SIZE, checkpoint, randomise, tokenizer

ORIGINAL = 64
"""Positions before they are stretched."""
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
LONGROPE_8 = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 32.0,
    "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1.0, 1.02, 1.05, 1.1, 1.2, 1.3, 1.5, 1.9],
    "long_factor": [1.0, 1.1, 1.4, 2.0, 3.3, 6.0, 14.0, 30.0],
}
"""For heads of which 16 numbers are rotated."""


def with_rope(name: str, root: Path, target: Path, rope: dict[str, Any], **changes: Any) -> Path:
    """A copy of the tiny checkpoint `name` whose text part has this rope and these other keys."""
    folder = target / f"{name}-{rope['rope_type']}"
    shutil.copytree(checkpoint(name, root), folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    text = config.get("text_config", config)
    text["rope_parameters"] = {**text.get("rope_parameters", {}), **rope}
    text |= changes
    file.write_text(json.dumps(config))
    return folder


def phi3(target: Path, rope: dict[str, Any], partial: float, **changes: Any) -> Path:
    """A tiny Phi-3: fused projections, part of each head rotated."""
    folder = target / "phi3"
    fast = tokenizer("phi3")
    config = tf.Phi3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        original_max_position_embeddings=ORIGINAL,
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        partial_rotary_factor=partial,
        rope_parameters={**rope, "partial_rotary_factor": partial},
        **changes,
    )
    model = tf.AutoModelForCausalLM.from_config(config)
    randomise(model, seed=7)
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder
