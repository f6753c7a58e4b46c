"""GGUF files as checkpoints: Hugging Face names, layouts and configuration.

Owns: GGUFSource, a WeightSource over a GGUF file of the llama, qwen2 or qwen3 architecture, and the
config.json that its metadata amount to.
Does not own: the container (gguf_file.py), the tokenizer (gguf_tokenizer.py).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lm_engine.models.errors import CorruptFileError, UnsupportedModelError
from lm_engine.models.gguf_file import GGUFFile

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TOP = re.compile(r"(\w+)\.(weight|bias)")
_ROPE_DIVISORS = "rope_freqs.weight"


class GGUFSource:
    """A GGUF file's weights under Hugging Face names, in Hugging Face's layout, dequantised."""

    def __init__(self, path: Path) -> None:
        self.file = GGUFFile(path)
        self.architecture = str(self.file.metadata.get("general.architecture"))
        if self.architecture not in _ARCHITECTURES:
            raise UnsupportedModelError(
                f"{path}: GGUF architecture {self.architecture!r} is not supported. Supported are: "
                f"{', '.join(_ARCHITECTURES)}."
            )
        self._stored = {
            _hugging_face_name(name): name for name in self.file.tensors if name != _ROPE_DIVISORS
        }
        self.config = self._read_config()
        self.generation_config = self._read_generation_config()

    @property
    def where(self) -> str:
        return str(self.file.path)

    def names(self) -> frozenset[str]:
        return frozenset(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.file.tensors[self._stored[name]].shape

    def dtype(self, name: str) -> torch.dtype:
        kind = self.file.tensors[self._stored[name]].format
        return kind.dtype if kind.weights == 1 else torch.bfloat16

    def stored_bytes(self, name: str) -> int:
        return self.file.tensors[self._stored[name]].num_bytes

    def get(self, name: str) -> Tensor:
        tensor = self.file.get(self._stored[name])
        if not self._heads_interleaved(name):
            return tensor
        key = "num_attention_heads" if ".q_proj." in name else "num_key_value_heads"
        return _halves_together(tensor, int(self.config[key]))

    def _heads_interleaved(self, name: str) -> bool:
        return self.architecture == "llama" and (".q_proj." in name or ".k_proj." in name)

    def copy_to(self, name: str, target: Tensor) -> None:
        if self._heads_interleaved(name):
            target.copy_(self.get(name))
        else:
            self.file.copy_to(self._stored[name], target)
        self.file.release(self._stored[name])

    def close(self) -> None:
        self.file.close()

    def _field(self, name: str, default: Any = None) -> Any:
        value = self.file.metadata.get(f"{self.architecture}.{name}", default)
        if value is None:
            raise CorruptFileError(f"{self.where} lacks the key {self.architecture}.{name}.")
        return value

    def _read_config(self) -> dict[str, Any]:
        """What config.json would say."""
        heads, width = (
            int(self._field("attention.head_count")),
            int(self._field("embedding_length")),
        )
        table = self.file.tensors.get("token_embd.weight")
        if table is None:
            raise CorruptFileError(f"{self.where} lacks the tensor token_embd.weight.")
        head_dim = int(self._field("attention.key_length", width // heads))
        rotated = int(self._field("rope.dimension_count", head_dim))
        bias = "blk.0.attn_q.bias" in self.file.tensors
        config = {
            "model_type": self.architecture,
            "vocab_size": table.shape[0],
            "hidden_size": width,
            "intermediate_size": int(self._field("feed_forward_length")),
            "num_hidden_layers": int(self._field("block_count")),
            "num_attention_heads": heads,
            "num_key_value_heads": int(self._field("attention.head_count_kv", heads)),
            "head_dim": head_dim,
            "rms_norm_eps": float(self._field("attention.layer_norm_rms_epsilon")),
            "max_position_embeddings": int(self._field("context_length")),
            "rope_parameters": self._rope(),
            "tie_word_embeddings": "output.weight" not in self.file.tensors,
            "eos_token_id": self.file.metadata.get("tokenizer.ggml.eos_token_id"),
            "bos_token_id": self.file.metadata.get("tokenizer.ggml.bos_token_id"),
        }
        if rotated != head_dim:
            config["partial_rotary_factor"] = rotated / head_dim
        if bias and self.architecture == "llama":
            config["attention_bias"] = True
        return config

    def _rope(self) -> dict[str, Any]:
        theta = float(self._field("rope.freq_base", 10_000.0))
        kind = str(self._field("rope.scaling.type", "none"))
        if _ROPE_DIVISORS in self.file.tensors:
            divisors = self.file.get(_ROPE_DIVISORS).float().tolist()
            return {"rope_type": "divided", "rope_theta": theta, "divisors": divisors}
        if kind == "none":
            return {"rope_type": "default", "rope_theta": theta}
        factor = float(self._field("rope.scaling.factor", 1.0))
        length = self._field("rope.scaling.original_context_length", self._field("context_length"))
        return {
            "rope_type": kind,
            "rope_theta": theta,
            "factor": factor,
            "original_max_position_embeddings": int(length),
        }

    def _read_generation_config(self) -> dict[str, Any]:
        """End tokens: the file's eos, and its end-of-turn token where it names one."""
        keys = ("eos_token_id", "eot_token_id")
        found = [self.file.metadata.get(f"tokenizer.ggml.{key}") for key in keys]
        ids = list(dict.fromkeys(int(value) for value in found if value is not None))
        return {"eos_token_id": ids} if ids else {}


def _hugging_face_name(name: str) -> str:
    layer = _LAYER.fullmatch(name)
    if layer and layer[2] in _NAMES:
        return f"model.layers.{layer[1]}.{_NAMES[layer[2]]}.{layer[3]}"
    top = _TOP.fullmatch(name)
    if top and top[1] in _NAMES:
        return f"{_NAMES[top[1]]}.{top[2]}"
    # An unknown tensor of a layer keeps its place in the tree, so that the loader refuses it.
    return f"model.layers.{layer[1]}.{name}" if layer else name


def _halves_together(rows: Tensor, heads: int) -> Tensor:
    """GGUF's llama files order each head's rows x0 y0 x1 y1 ... for a rotation of neighbours; the
    rotation here pairs x0 x1 ... with y0 y1 ..."""
    pairs = rows.shape[0] // heads // 2
    return rows.view(heads, pairs, 2, -1).transpose(1, 2).reshape(rows.shape)
