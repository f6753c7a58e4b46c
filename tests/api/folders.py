"""Model folders without weights: what the API reads of a model."""

from __future__ import annotations

import json
from pathlib import Path

from tests import checkpoints


def text_folder(family: str, folder: Path) -> None:
    tokenizer = checkpoints.tokenizer(family)
    folder.mkdir(parents=True)
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": family}))


def vision_folder(family: str, folder: Path) -> None:
    tokenizer = checkpoints.tokenizer(family)
    config, processor = checkpoints._VISION_BUILDERS[family](family, tokenizer)
    processor.chat_template = tokenizer.chat_template
    folder.mkdir(parents=True)
    processor.save_pretrained(folder)
    config.save_pretrained(folder)
