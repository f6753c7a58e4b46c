"""What the API process knows of a model: its tokenizer, template and image arithmetic.

Owns: Frontend and how it is loaded from a model folder. Does not own: weights, or finding the
folder (model_folder.py). Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from api.model_folder import gguf_tokenizer
from api.prompt import PromptBuilder
from api.sampling import SamplingDefaults
from api.template import ChatTemplate, find_template
from api.tokenizer import TextTokenizer, TokenizerFolderError, read_json
from vision_encoder.grid import FAMILIES, planner, read_processor_files
from vision_encoder.plan import ImagePlanner


@dataclass(frozen=True, slots=True)
class Frontend:
    prompts: PromptBuilder
    defaults: SamplingDefaults

    @property
    def tokenizer(self) -> TextTokenizer:
        return self.prompts.tokenizer


def load_frontend(model: Path, *, tokenizer: str | None, template: Path | None) -> Frontend:
    """Reads the small files of a model folder. A GGUF file's tokenizer lies in `tokenizer`, beside
    the file, or in its own metadata, in this order.

    Raises TokenizerFolderError, ModelFolderError or ProcessorConfigError with the file and the
    remedy.
    """
    folder = Path(tokenizer).expanduser() if tokenizer else model
    if folder.is_file():
        beside = folder.parent / "tokenizer.json"
        folder = folder.parent if beside.is_file() else gguf_tokenizer(folder)
    if not (folder / "tokenizer.json").is_file() and not tokenizer:
        raise TokenizerFolderError(
            f"{folder} holds no tokenizer.json. Pass --tokenizer FOLDER, a folder saved by "
            "transformers for this model."
        )
    config = read_json(model / "config.json") if model.is_dir() else {}
    images = _planner(config, model)
    placeholder = images.placeholder if images else None
    image_token = images.image_token if images else None
    source = find_template(folder, template)
    text = TextTokenizer(
        folder,
        template=source or "",
        extra_control=tuple({placeholder, image_token} - {None}),  # type: ignore[arg-type]
    )
    rendered = None if source is None else ChatTemplate(source, text.special_tokens, placeholder)
    return Frontend(
        PromptBuilder(text, rendered, images, placeholder=placeholder, image_token=image_token),
        _defaults(read_json(model / "generation_config.json") if model.is_dir() else {}),
    )


def _planner(config: dict[str, Any], model: Path) -> ImagePlanner | None:
    if config.get("model_type") not in FAMILIES or "vision_config" not in config:
        return None
    return planner(config, read_processor_files(model))


def _defaults(generation: dict[str, Any]) -> SamplingDefaults:
    """generation_config.json's advice, as other servers take it; absurd values are left out."""

    def value(name: str, low: float, high: float, default: float) -> float:
        found = generation.get(name)
        usable = isinstance(found, int | float) and low <= found <= high
        return float(found) if usable else default  # type: ignore[arg-type]

    plain = SamplingDefaults()
    if generation.get("do_sample") is False:
        return SamplingDefaults(temperature=0.0)
    return SamplingDefaults(
        temperature=value("temperature", 0.0, 2.0, plain.temperature),
        top_p=value("top_p", 1e-6, 1.0, plain.top_p),
        top_k=int(value("top_k", 0, 2**31, plain.top_k)),
        min_p=value("min_p", 0.0, 1.0, plain.min_p),
        repetition_penalty=value("repetition_penalty", 0.01, 10.0, plain.repetition_penalty),
    )
