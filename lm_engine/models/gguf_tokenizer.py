"""The tokenizer inside a GGUF file.

Owns: turning byte-level BPE metadata ("gpt2" vocabularies of the smollm, qwen2 and llama-bpe kinds)
into a `tokenizers.Tokenizer`, and into tokenizer.json and tokenizer_config.json beside a model.
Does not own: chat rendering (api), the weights (gguf.py).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from lm_engine.models.errors import CorruptFileError, LoadError, UnsupportedModelError
from lm_engine.models.gguf_file import GGUFFile

_CONTROL, _USER_DEFINED = 3, 4
_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_WORDS_BY_DIGITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen2 and Llama 3 cut text into words; they differ in how many digits stay together."""


def read_tokenizer(path: Path) -> Tokenizer:
    """The file's tokenizer, with its special tokens and, where the file asks for it, the
    beginning-of-text token put in front.

    For SmolLM files this cuts digits off first, as the original tokenizer.json does; a reader that
    forgets it (transformers' does) joins "3 spaces, digit" differently.
    Raises UnsupportedModelError for other vocabularies.
    """
    file = GGUFFile(path)
    try:
        return _build(file)
    finally:
        file.close()


def write_tokenizer(path: Path, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json (special tokens, chat template), from which
    transformers' AutoTokenizer reads the same tokenizer."""
    file = GGUFFile(path)
    try:
        tokenizer, metadata = _build(file), file.metadata
    finally:
        file.close()
    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for role, key in _ROLES.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}")
        if token_id is not None:
            config[role] = tokens[token_id]
    architecture = metadata.get("general.architecture")
    context = metadata.get(f"{architecture}.context_length")
    if context is not None:
        config["model_max_length"] = int(context)
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _build(file: GGUFFile) -> Tokenizer:
    metadata = file.metadata
    model, kind = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model != "gpt2" or kind not in _PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{file.path}: tokenizer {model!r} of kind {kind!r} is not supported. Supported are "
            f"'gpt2' vocabularies of the kinds {', '.join(sorted(_PRE_TOKENIZERS))}; give a "
            "tokenizer folder of the original model instead."
        )
    try:
        tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        merges = [_pair(merge) for merge in metadata["tokenizer.ggml.merges"]]
        types: list[int] = metadata.get("tokenizer.ggml.token_type", [])
    except (KeyError, ValueError) as error:
        raise CorruptFileError(f"{file.path} has an incomplete tokenizer: {error}.") from None
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=kind == "llama-bpe",
        )
    )
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[kind]()
    tokenizer.decoder = decoders.ByteLevel()
    kinds = list(zip(tokens, types, strict=False))
    added = [t for t, n in kinds if n == _USER_DEFINED]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added])
    special = [t for t, n in kinds if n == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    _add_bos(tokenizer, metadata, kind)
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    # A piece may itself be a space only in its byte-level spelling, so one space separates.
    left, right = merge.split(" ")
    return left, right


def _add_bos(tokenizer: Tokenizer, metadata: dict[str, Any], kind: str) -> None:
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if bos is None or not metadata.get("tokenizer.ggml.add_bos_token", kind == "llama-bpe"):
        return
    name = metadata["tokenizer.ggml.tokens"][bos]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[name, "$A"], pair=[name, "$A", f"{name}:1", "$B:1"], special_tokens=[(name, bos)]
    )


def _smollm() -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _words(digits: str) -> Any:
    pattern = Regex(_WORDS_BY_DIGITS.format(digits=digits))
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "smollm": _smollm,
    "qwen2": lambda: _words(""),
    "llama-bpe": lambda: _words("{1,3}"),
}


def _main(path: str, folder: str) -> None:
    """python -m lm_engine.models.gguf_tokenizer FILE FOLDER; the last line of stderr is the cause
    of a failure."""
    try:
        write_tokenizer(Path(path), Path(folder))
    except (LoadError, OSError) as cause:
        sys.exit(str(cause).replace("\n", " "))


if __name__ == "__main__":
    _main(*sys.argv[1:])
