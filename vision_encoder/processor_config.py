"""What a checkpoint's processor files say, in one shape.

Owns: reading preprocessor_config.json and processor_config.json of old and new checkpoints, the
typed access to their keys, and PixelConfig from them.
Does not own: what a family does with the keys (grid_*.py). Imports no torch.

Old checkpoints keep the image processor's keys flat in preprocessor_config.json and the
processor's own keys (`image_seq_len` and the like) in processor_config.json; transformers 5
writes one processor_config.json with the former nested under "image_processor". A nested one
wins over a file of its own, as in transformers. Absent keys take the defaults of the family's
image processor class.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vision_encoder.plan import Filter, Normalization, PixelConfig

RGB = tuple[float, float, float]

IMAGENET_HALF: tuple[RGB, RGB] = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
CLIP_STATISTICS: tuple[RGB, RGB] = (
    (0.48145466, 0.4578275, 0.40821073),
    (0.26862954, 0.26130258, 0.27577711),
)
BICUBIC = 3
LANCZOS = 1

_FILTERS: dict[int, Filter] = {0: "nearest", LANCZOS: "lanczos", 2: "bilinear", BICUBIC: "bicubic"}
"""Pillow's numbers, which the files use."""


class ProcessorConfigError(ValueError):
    """A checkpoint's processor files and its model configuration do not fit together, or ask for
    something that this code does not do. The message names the key and the values."""


def read_processor_files(folder: Path) -> dict[str, Any]:
    """Both processor files of a checkpoint's folder as one dictionary for `planner`: the
    processor's own keys, and the image processor's under "image_processor".

    A missing file counts as empty. Raises ProcessorConfigError for a file that is not a JSON
    object.
    """
    own = _read_object(folder / "processor_config.json")
    image = own.get("image_processor")
    if not isinstance(image, dict):
        image = _read_object(folder / "preprocessor_config.json")
    return {**own, "image_processor": image}


def _read_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ProcessorConfigError(f"{path} is not JSON; fetch the checkpoint again") from None
    if not isinstance(found, dict):
        raise ProcessorConfigError(f"{path} holds no JSON object; fetch the checkpoint again")
    return found


@dataclass(frozen=True, slots=True)
class ProcessorConfig:
    """`image`: the image processor's keys; `own`: the processor's. Both may be the same flat
    dictionary."""

    image: Mapping[str, Any]
    own: Mapping[str, Any]

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> ProcessorConfig:
        nested = found.get("image_processor")
        return cls(image=nested if isinstance(nested, Mapping) else found, own=found)

    def flag(self, key: str, default: bool) -> bool:
        """A switch of the image processor; null counts as off."""
        return bool(self.image.get(key, default))

    def edge(self, key: str, part: str, default: int | None) -> int | None:
        """One side of a size such as {"longest_edge": 512}; a bare number is every side."""
        size = self.image.get(key)
        if size is None:
            return default
        value = size.get(part) if isinstance(size, Mapping) else size
        if value is None:
            return None
        if not isinstance(value, int) or value <= 0:
            raise ProcessorConfigError(f"{key}.{part} is {value!r}; it must be a positive integer")
        return value

    def pixels(
        self, statistics: tuple[RGB, RGB], resample: int, patch_size: int, merge_size: int = 1
    ) -> PixelConfig:
        """Filter and normalisation; `statistics` (mean, std) and `resample` are the defaults."""
        number = self.image.get("resample")
        number = resample if number is None else number
        if number not in _FILTERS:
            raise ProcessorConfigError(
                f"resample is {number!r}; supported are {sorted(_FILTERS)} "
                "(nearest, lanczos, bilinear, bicubic)"
            )
        mean, std = ((0.0,) * 3, (1.0,) * 3)
        if self.flag("do_normalize", True):
            mean = self.channels("image_mean", statistics[0])
            std = self.channels("image_std", statistics[1])
        factor = self.image.get("rescale_factor")
        rescale = 1.0
        if self.flag("do_rescale", True):
            rescale = 1 / 255 if factor is None else float(factor)
        return PixelConfig(
            patch_size=patch_size,
            resample=_FILTERS[number],
            normalization=Normalization(rescale, mean, std),
            merge_size=merge_size,
        )

    def channels(self, key: str, default: RGB) -> RGB:
        """A value per channel of the image processor; one number stands for all three."""
        found = self.image.get(key)
        if found is None:
            return default
        values = [found] * 3 if isinstance(found, (int, float)) else list(found)
        if len(values) != 3:
            raise ProcessorConfigError(f"{key} has {len(values)} values; three are needed (RGB)")
        return float(values[0]), float(values[1]), float(values[2])


def square(value: Any, name: str) -> int:
    """An edge that configurations give as a number or as two equal numbers."""
    if isinstance(value, (list, tuple)) and len(value) == 2 and value[0] == value[1]:
        value = value[0]
    if not isinstance(value, int) or value <= 0:
        raise ProcessorConfigError(
            f"{name} is {value!r}; only square, positive sizes are supported"
        )
    return value
