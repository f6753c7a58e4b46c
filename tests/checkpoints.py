"""Tiny random checkpoints of every family, as Hugging Face folders.

Owns: `checkpoint(name, root)`, which writes a folder once per root (weights, config, generation
config, byte-level tokenizer with the family's special tokens, chat template, processor config),
and `hf_model` / `hf_processor`, which load it with transformers as the oracle.
Does not own: any assertion.

The sizes are toys, the structure is the real one: grouped heads, head sizes that differ from
hidden / heads (Qwen3), sliding windows, deepstack layers, windowed vision attention, pixel
shuffle, anyres tiles with a patch size that does not divide the tile. Weights are drawn wide
enough that logits spread over several nats, so that greedy choices have real margins.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 384
"""Rows of every embedding table; larger than the tokenizer, as in many hub checkpoints."""

TEXT_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
VISION_FAMILIES = ("smolvlm", "idefics3", "qwen2_5_vl", "qwen3_vl", "llava", "llava_onevision")
FAMILIES = TEXT_FAMILIES + VISION_FAMILIES

VARIANTS = ("llama_rope3", "llama_linear", "llama_tied", "llama_bias", "qwen2_window")
"""Further text checkpoints that `checkpoint` builds: the same families, other flags."""

_MERGES = (
    ("t", "h"),
    ("Ġ", "t"),
    ("i", "n"),
    ("e", "r"),
    ("Ġ", "a"),
    ("Ġt", "h"),
    ("o", "n"),
    ("r", "e"),
    ("Ġth", "e"),
    ("a", "t"),
    ("in", "g"),
    ("Ġ", "i"),
)
_ROW_COL = tuple(f"<row_{r}_col_{c}>" for r in range(1, 7) for c in range(1, 7))
_IDEFICS_TOKENS = (
    "<|im_start|>",
    "<end_of_utterance>",
    "<fake_token_around_image>",
    "<image>",
    "<global-img>",
    *_ROW_COL,
)
_QWEN_TOKENS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
_SPECIALS = {
    "smolvlm": _IDEFICS_TOKENS,
    "idefics3": _IDEFICS_TOKENS,
    "qwen2_5_vl": _QWEN_TOKENS,
    "qwen3_vl": _QWEN_TOKENS,
    "llava": ("<|im_end|>", "<image>"),
    "llava_onevision": (*_CHATML_TOKENS, "<image>", "<video>"),
}
_END_OF_TURN = {"smolvlm": "<end_of_utterance>", "idefics3": "<end_of_utterance>"}

_CHATML_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}IMAGE{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_IDEFICS_TEMPLATE = (
    "<|im_start|>{% for m in messages %}{{ m['role'] | capitalize }}:"
    "{% if m['content'] is string %} {{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %} {{ part['text'] }}{% else %}<image>{% endif %}"
    "{% endfor %}{% endif %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
_LLAVA_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] | upper }}: "
    "{% if m['content'] is string %}{{ m['content'] }} {% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }} {% else %}<image>\n{% endif %}"
    "{% endfor %}{% endif %}{% if m['role'] == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
_QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_TEMPLATES = {
    "smolvlm": _IDEFICS_TEMPLATE,
    "idefics3": _IDEFICS_TEMPLATE,
    "qwen2_5_vl": _CHATML_TEMPLATE.replace("IMAGE", _QWEN_IMAGE),
    "qwen3_vl": _CHATML_TEMPLATE.replace("IMAGE", _QWEN_IMAGE),
    "llava": _LLAVA_TEMPLATE,
    "llava_onevision": _CHATML_TEMPLATE.replace("IMAGE", "<image>\n"),
}


def tokenizer(family: str) -> tf.PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: 256 bytes, a dozen merges, the family's special tokens."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet())]
    pieces += [left + right for left, right in _MERGES]
    bpe = models.BPE(
        vocab={piece: index for index, piece in enumerate(pieces)},
        merges=list(_MERGES),
    )
    inner = Tokenizer(bpe)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    names = ("<|endoftext|>", *_SPECIALS.get(family, _CHATML_TOKENS))
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    fast = tf.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=_END_OF_TURN.get(family, "<|im_end|>"),
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    template = _TEMPLATES.get(family, _CHATML_TEMPLATE.replace("IMAGE", ""))
    fast.chat_template = template
    return fast


def _text(fast: tf.PreTrainedTokenizerFast, **changes: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "bos_token_id": None,
        "eos_token_id": fast.eos_token_id,
        "pad_token_id": fast.pad_token_id,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return sizes | changes


_VIT = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_TEXT_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama_rope3": ("LlamaConfig", {"rope_parameters": _LLAMA3}),
    "llama_linear": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}},
    ),
    "llama_long": (
        "LlamaConfig",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 131_200,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    ),
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama_bias": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "mistral": ("MistralConfig", {"sliding_window": 16}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2_window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 24}),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
}


def _text_model(name: str, fast: tf.PreTrainedTokenizerFast) -> Any:
    config_class, changes = _TEXT_CONFIGS[name]
    return tf.AutoModelForCausalLM.from_config(getattr(tf, config_class)(**_text(fast, **changes)))


def _idefics(family: str, fast: tf.PreTrainedTokenizerFast) -> tuple[Any, Any]:
    patch = 16 if family == "smolvlm" else 14
    edge = 4 * patch
    prefix = "SmolVLM" if family == "smolvlm" else "Idefics3"
    config = getattr(tf, f"{prefix}Config")(
        text_config=tf.LlamaConfig(**_text(fast)).to_dict(),
        vision_config={**_VIT, "num_hidden_layers": 3, "image_size": edge, "patch_size": patch},
        scale_factor=2,
        image_token_id=fast.convert_tokens_to_ids("<image>"),
        pad_token_id=fast.pad_token_id,
    )
    images = getattr(tf, f"{prefix}ImageProcessor")(
        size={"longest_edge": 4 * edge}, max_image_size={"longest_edge": edge}
    )
    if family == "smolvlm":
        processor: Any = _smolvlm_processor()(images, fast, tf.SmolVLMVideoProcessor(), 4)
    else:
        processor = tf.Idefics3Processor(images, fast, image_seq_len=4)
    return config, processor


def _qwen_vl(family: str, fast: tf.PreTrainedTokenizerFast) -> tuple[Any, Any]:
    three = family == "qwen3_vl"
    patch = 16 if three else 14
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    vision: dict[str, Any] = {
        "depth": 4,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": patch,
        "spatial_merge_size": 2,
        "out_hidden_size": 64,
    }
    if three:
        text = _text(
            fast,
            head_dim=24,
            rope_parameters={**rope, "mrope_section": [6, 3, 3], "mrope_interleaved": True},
        )
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2]}
    else:
        text = _text(fast, rope_parameters={**rope, "mrope_section": [2, 3, 3]})
        vision |= {"window_size": 4 * patch, "fullatt_block_indexes": [1, 3]}
    prefix = "Qwen3VL" if three else "Qwen2_5_VL"
    config = getattr(tf, f"{prefix}Config")(
        text_config=text,
        vision_config=vision,
        image_token_id=fast.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=fast.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=fast.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=fast.convert_tokens_to_ids("<|vision_end|>"),
    )
    unit = (2 * patch) ** 2
    mean = [0.5] * 3 if three else [0.48145466, 0.4578275, 0.40821073]
    std = [0.5] * 3 if three else [0.26862954, 0.26130258, 0.27577711]
    images = tf.Qwen2VLImageProcessor(
        size={"shortest_edge": 4 * unit, "longest_edge": 64 * unit},
        patch_size=patch,
        merge_size=2,
        image_mean=mean,
        image_std=std,
    )
    videos = tf.Qwen3VLVideoProcessor() if three else tf.Qwen2VLVideoProcessor()
    processor = getattr(tf, f"{prefix}Processor")(images, fast, videos)
    return config, processor


def _llava(family: str, fast: tf.PreTrainedTokenizerFast) -> tuple[Any, Any]:
    if family == "llava":
        config: Any = tf.LlavaConfig(
            vision_config=tf.CLIPVisionConfig(
                **_VIT, num_hidden_layers=3, image_size=56, patch_size=14
            ),
            text_config=tf.LlamaConfig(**_text(fast)),
            image_token_index=fast.convert_tokens_to_ids("<image>"),
            image_seq_length=16,
        )
        images: Any = tf.CLIPImageProcessor(
            size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}
        )
        processor: Any = tf.LlavaProcessor(
            images,
            fast,
            patch_size=14,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        )
        return config, processor
    # 72 / 14 is 5.14: like the 384 / 14 of the real model, the last pixels make no patch and the
    # grid's edge is odd.
    tile = 72
    pinpoints = [[tile * i, tile * j] for i in range(1, 5) for j in range(1, 5)]
    config = tf.LlavaOnevisionConfig(
        vision_config=tf.SiglipVisionConfig(
            **_VIT, num_hidden_layers=3, image_size=tile, patch_size=14, vision_use_head=False
        ),
        text_config=tf.Qwen2Config(**_text(fast)),
        image_token_index=fast.convert_tokens_to_ids("<image>"),
        video_token_index=fast.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=pinpoints,
    )
    images = tf.LlavaOnevisionImageProcessor(
        size={"height": tile, "width": tile},
        image_grid_pinpoints=pinpoints,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    processor = tf.LlavaOnevisionProcessor(
        images,
        fast,
        tf.LlavaOnevisionVideoProcessor(),
        num_image_tokens=25,
        vision_feature_select_strategy="full",
    )
    return config, processor


_VISION_BUILDERS: dict[str, Callable[[str, Any], tuple[Any, Any]]] = {
    "smolvlm": _idefics,
    "idefics3": _idefics,
    "qwen2_5_vl": _qwen_vl,
    "qwen3_vl": _qwen_vl,
    "llava": _llava,
    "llava_onevision": _llava,
}


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Redraws every parameter: matrices with unit gain, norms near 1, biases near 0, the output
    head (or a tied table) so that logits have a standard deviation of a few nats."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "embed_tokens" in name or "lm_head" in name or parameter.ndim == 1:
                scale = 0.3 if parameter.ndim > 1 else 0.1
                near_one = parameter.ndim == 1 and name.endswith("weight")
                parameter.copy_(noise * scale + (1.0 if near_one else 0.0))
            elif "embed" in name and parameter.ndim == 2:
                parameter.copy_(noise * 0.3)
            else:
                parameter.copy_(noise * (1.2 / math.sqrt(parameter[0].numel())))


def checkpoint(name: str, root: Path) -> Path:
    """The folder of a tiny checkpoint, one of FAMILIES or VARIANTS; written on the first call.

    Safe under pytest-xdist with a shared root: a folder appears complete or not at all.
    """
    folder = root / name
    if folder.exists():
        return folder
    draft = root / f".{name}.{os.getpid()}"
    draft.mkdir(parents=True)
    fast = tokenizer(name)
    if name in _TEXT_CONFIGS:
        model = _text_model(name, fast)
        fast.save_pretrained(draft)
    else:
        config, processor = _VISION_BUILDERS[name](name, fast)
        processor.chat_template = fast.chat_template
        processor.save_pretrained(draft)
        model = tf.AutoModelForImageTextToText.from_config(config)
    randomise(model, seed=sum(name.encode()))
    eos = [fast.eos_token_id, fast.pad_token_id]
    model.generation_config = tf.GenerationConfig(eos_token_id=eos, pad_token_id=fast.pad_token_id)
    model.save_pretrained(draft)
    try:
        draft.rename(folder)
    except OSError:
        if not folder.exists():
            raise
    return folder


def hf_model(folder: Path, attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own model of a checkpoint, evaluation mode, on the CPU."""
    config = json.loads((folder / "config.json").read_text())
    auto = tf.AutoModelForImageTextToText if "vision_config" in config else tf.AutoModelForCausalLM
    model = auto.from_pretrained(folder, attn_implementation=attention, dtype=dtype)
    return model.eval().requires_grad_(False)


def hf_processor(folder: Path) -> Any:
    """transformers' own processor of a vision checkpoint."""
    if folder.name == "smolvlm":
        return _smolvlm_processor().from_pretrained(folder)
    return tf.AutoProcessor.from_pretrained(folder)


def _smolvlm_processor() -> Any:
    """SmolVLM's processor class. It refuses to exist without num2words, which only its video
    prompts call; any callable in its place leaves images as they are."""
    from transformers.models.smolvlm import processing_smolvlm

    if processing_smolvlm.num2words is None:
        processing_smolvlm.num2words = str
    return processing_smolvlm.SmolVLMProcessor
