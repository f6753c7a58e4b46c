"""Loading: layouts, names, progress, and every way in which it can fail."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lm_engine.models.checkpoint import available_bytes, open_checkpoint
from lm_engine.models.errors import (
    CorruptFileError,
    LoadError,
    MissingFileError,
    ModelNotFoundError,
    OutOfMemoryError,
    PickleWeightsError,
    TruncatedFileError,
    UnsupportedModelError,
    WeightMismatchError,
)
from lm_engine.models.loader import LoadProgress, load_decoder
from lm_engine.models.weights import SafetensorsSource
from tests.checkpoints import checkpoint, hf_model


def same_weights(first: Any, second: Any) -> bool:
    a, b = first.decoder.state_dict(), second.decoder.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    """A llama checkpoint that a test may damage."""
    return Path(shutil.copytree(checkpoint("llama", root), tmp_path / "copy"))


def change_weights(folder: Path, **changes: Tensor | None) -> None:
    """Replaces tensors by name, dots written as double underscores; None removes one."""
    tensors = load_file(folder / "model.safetensors")
    for key, value in changes.items():
        name = key.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, folder / "model.safetensors")


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def shard(folder: Path, target: Path) -> Path:
    model = hf_model(folder)
    model.save_pretrained(target, max_shard_size="60KB")
    assert not (target / "model.safetensors").exists()
    return target


# What loads


def test_shards_equal_one_file(root: Path, tmp_path: Path) -> None:
    folder = checkpoint("qwen3", root)
    sharded = shard(folder, tmp_path / "sharded")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert same_weights(load_decoder(folder), load_decoder(sharded))


@pytest.mark.parametrize(
    ("family", "prefix", "head"),
    [
        ("llava", "model.language_model.", "lm_head.weight"),
        ("llava", "language_model.model.", "language_model.lm_head.weight"),
        ("smolvlm", "model.text_model.", "lm_head.weight"),
        ("qwen2_5_vl", "model.", "lm_head.weight"),
        ("qwen2_5_vl", "model.language_model.", "lm_head.weight"),
        ("qwen3_vl", "model.language_model.", "lm_head.weight"),
    ],
)
def test_names_of_hub_and_of_newer_files(
    family: str, prefix: str, head: str, root: Path, tmp_path: Path
) -> None:
    folder = checkpoint(family, root)
    source = SafetensorsSource(folder)
    own = next(n for n in source.names() if n.endswith("embed_tokens.weight"))
    own = own.removesuffix("embed_tokens.weight")
    renamed = {}
    for name in source.names():
        tensor = source.get(name).clone()
        if name.endswith("lm_head.weight"):
            renamed[head] = tensor
        elif name.startswith((f"{own}layers.", f"{own}norm.", f"{own}embed_tokens.")):
            renamed[prefix + name.removeprefix(own)] = tensor
        else:
            renamed[f"vision.{name}"] = tensor
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    save_file(renamed, other / "model.safetensors")
    assert same_weights(load_decoder(folder), load_decoder(other))


def test_what_comes_with_a_decoder(root: Path) -> None:
    loaded = load_decoder(checkpoint("smolvlm", root))
    assert loaded.eos_ids == (270, 268)
    assert loaded.vocab_size == 384
    assert loaded.name == "smolvlm"
    assert not any(p.requires_grad for p in loaded.decoder.parameters())
    assert not loaded.decoder.training
    assert "model.connector.modality_projection.proj.weight" in loaded.checkpoint.source.names()


def test_eos_without_generation_config_comes_from_the_text_part(root: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("smolvlm", root), tmp_path / "copy"))
    (folder / "generation_config.json").unlink()
    assert open_checkpoint(folder).eos_ids == (270,)


def test_a_stored_head_beats_a_tied_configuration(copy: Path) -> None:
    change_config(copy, tie_word_embeddings=True)
    loaded = load_decoder(copy)
    assert not loaded.config.tied
    stored = load_file(copy / "model.safetensors")
    assert torch.equal(loaded.decoder.head.weight, stored["lm_head.weight"])
    change_weights(copy, lm_head__weight=stored["model.embed_tokens.weight"].clone())
    assert load_decoder(copy).config.tied


def test_dtypes(copy: Path) -> None:
    change_config(copy, dtype="bfloat16")
    stored = {k: v.bfloat16() for k, v in load_file(copy / "model.safetensors").items()}
    save_file(stored, copy / "model.safetensors")
    assert load_decoder(copy).decoder.dtype == torch.float32
    assert load_decoder(copy, device="meta").decoder.dtype == torch.bfloat16
    half = load_decoder(copy, dtype="bfloat16").decoder
    assert torch.equal(half.norm.weight, stored["model.norm.weight"])
    with pytest.raises(UnsupportedModelError, match=r"'int3'.*auto, float32, bfloat16"):
        load_decoder(copy, dtype="int3")


def test_old_rotary_buffers_are_ignored(copy: Path) -> None:
    change_weights(copy, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    load_decoder(copy)


def test_progress_counts_every_byte(root: Path) -> None:
    seen: list[LoadProgress] = []
    loaded = load_decoder(checkpoint("llama", root), progress=seen.append)
    assert list(dict.fromkeys(p.phase for p in seen)) == ["open", "check", "weights", "ready"]
    done = [p.done_bytes for p in seen]
    assert done == sorted(done)
    weights = sum(p.nbytes for p in loaded.decoder.parameters())
    assert seen[-1].done_bytes == seen[-1].total_bytes == weights
    assert seen[0].eta_s is None
    middle = seen[len(seen) // 2]
    assert middle.eta_s is not None
    assert middle.eta_s > 0
    assert seen[-1].eta_s == 0


def test_a_path_makes_no_network_call(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    load_decoder(checkpoint("llama", root))
    for name in ("/no/such/folder", "./owner/name", "missing", "owner/model.gguf"):
        with pytest.raises(ModelNotFoundError, match="does not exist"):
            load_decoder(name)


def test_a_hub_id_fetches_no_pickles(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: dict[str, Any] = {}

    def fetch(hub_id: str, **options: Any) -> str:
        asked.update(options, hub_id=hub_id)
        return str(checkpoint("llama", root))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    loaded = load_decoder("owner/name")
    assert loaded.name == asked["hub_id"] == "owner/name"
    assert "*.safetensors" in asked["allow_patterns"]
    assert not any(p.endswith((".bin", ".pt", "*")) for p in asked["allow_patterns"])


def test_an_unknown_hub_id_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match=r"owner/no-such-model.*HF_HUB_OFFLINE=1"):
        load_decoder("owner/no-such-model")


# What does not


def test_every_error_is_a_load_error() -> None:
    assert all(issubclass(kind, LoadError) for kind in (TruncatedFileError, WeightMismatchError))


def test_missing_config(copy: Path) -> None:
    (copy / "config.json").unlink()
    with pytest.raises(MissingFileError, match=r"config\.json is missing"):
        load_decoder(copy)


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_broken_config(copy: Path, text: str) -> None:
    (copy / "config.json").write_text(text)
    with pytest.raises(CorruptFileError, match=r"config\.json"):
        load_decoder(copy)


def test_missing_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(MissingFileError, match=r"neither model\.safetensors nor"):
        load_decoder(copy)


def test_missing_shard(root: Path, tmp_path: Path) -> None:
    sharded = shard(checkpoint("llama", root), tmp_path / "sharded")
    lost = sorted(sharded.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(MissingFileError, match=f"1 missing: {lost.name}"):
        load_decoder(sharded)


def test_index_that_promises_too_much(root: Path, tmp_path: Path) -> None:
    sharded = shard(checkpoint("llama", root), tmp_path / "sharded")
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.ghost"] = sorted(index["weight_map"].values())[0]
    path.write_text(json.dumps(index))
    with pytest.raises(CorruptFileError, match=r"1 tensor\(s\).*model\.ghost"):
        load_decoder(sharded)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickles_are_refused(copy: Path, name: str) -> None:
    (copy / "model.safetensors").rename(copy / name)
    with pytest.raises(PickleWeightsError, match=rf"{name}.*Convert them to safetensors"):
        load_decoder(copy)


@pytest.mark.parametrize("kept", [0.5, 0.0005, 0.00001])
def test_truncated_file(copy: Path, kept: float) -> None:
    """Cut within the data, within the header, and within the header's length."""
    path = copy / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(TruncatedFileError, match=r"model\.safetensors is truncated") as caught:
        load_decoder(copy)
    assert caught.value.actual_bytes == int(len(whole) * kept)
    assert caught.value.expected_bytes > caught.value.actual_bytes
    if kept == 0.5:
        assert caught.value.expected_bytes == len(whole)


@pytest.mark.parametrize(
    "data",
    [
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        b"\x02\0\0\0\0\0\0\0[]",
        b"\x05\0\0\0\0\0\0\0{nono",
        b'\x39\0\0\0\0\0\0\0{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,4]}}     0000',
    ],
)
def test_other_files_in_the_weights_place(copy: Path, data: bytes) -> None:
    (copy / "model.safetensors").write_bytes(data)
    with pytest.raises(CorruptFileError, match="is not a safetensors file"):
        load_decoder(copy)


def test_wrong_shapes_are_listed(copy: Path) -> None:
    change_weights(
        copy,
        model__norm__weight=torch.ones(63),
        model__layers__1__self_attn__k_proj__weight=torch.ones(16, 64),
        model__layers__2__mlp__up_proj__weight=None,
    )
    with pytest.raises(WeightMismatchError) as caught:
        load_decoder(copy)
    text = str(caught.value)
    assert "3 tensor(s)" in text
    assert "model.norm.weight: expected [64], found [63]" in text
    assert "model.layers.1.self_attn.k_proj.weight: expected [32, 64], found [16, 64]" in text
    assert "model.layers.2.mlp.up_proj.weight: expected [96, 64], missing" in text


def test_a_long_list_of_wrong_shapes_is_cut(copy: Path) -> None:
    change_config(copy, hidden_size=32)
    with pytest.raises(WeightMismatchError, match=r"and \d+ more") as caught:
        load_decoder(copy)
    assert len(str(caught.value).splitlines()) == WeightMismatchError.SHOWN + 2
    assert len(caught.value.mismatches) > WeightMismatchError.SHOWN


def test_tensors_without_a_place(copy: Path) -> None:
    """A bias that config.json does not mention would otherwise be dropped in silence."""
    change_weights(copy, model__layers__0__self_attn__q_proj__bias=torch.ones(64))
    with pytest.raises(UnsupportedModelError, match=r"1 tensor.*q_proj\.bias"):
        load_decoder(copy)


def test_no_token_table(copy: Path) -> None:
    change_weights(copy, model__embed_tokens__weight=None)
    with pytest.raises(UnsupportedModelError, match="no token table"):
        load_decoder(copy)


def test_integer_weights(copy: Path) -> None:
    change_weights(copy, model__norm__weight=torch.ones(64, dtype=torch.int8))
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight.*int8"):
        load_decoder(copy)


def test_quantised_safetensors(copy: Path) -> None:
    change_config(copy, quantization_config={"quant_method": "awq"})
    with pytest.raises(UnsupportedModelError, match="'awq'"):
        load_decoder(copy)


def test_not_enough_memory(root: Path) -> None:
    folder = checkpoint("llama_tied", root)
    need = load_decoder(folder).config.num_parameters * 4
    load_decoder(folder, free_bytes=need)
    with pytest.raises(OutOfMemoryError, match=r"need .* bytes on cpu.*--dtype bfloat16") as caught:
        load_decoder(folder, free_bytes=need - 1)
    assert (caught.value.need_bytes, caught.value.available_bytes) == (need, need - 1)
    load_decoder(folder, free_bytes=need - 1, dtype="bfloat16")
    with pytest.raises(OutOfMemoryError, match=f"Even --dtype bfloat16 needs {need // 2:,}"):
        load_decoder(folder, free_bytes=need // 2 - 1)


def test_parameter_count_is_what_is_allocated(root: Path) -> None:
    for name in ("llama", "llama_bias", "llama_tied", "qwen2"):
        loaded = load_decoder(checkpoint(name, root))
        allocated = sum(p.numel() for p in loaded.decoder.parameters())
        assert allocated == loaded.config.num_parameters


def test_free_memory_is_known_here() -> None:
    free = available_bytes(torch.device("cpu"))
    assert free is not None
    assert 2**20 < free < 2**50


def test_source_views_outlive_it(root: Path) -> None:
    source = SafetensorsSource(checkpoint("llama", root))
    norm = source.get("model.norm.weight")
    before = norm.clone()
    source.close()
    assert torch.equal(norm, before)
    with pytest.raises(ValueError, match="is closed"):
        source.get("model.norm.weight")
