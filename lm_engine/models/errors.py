"""Why a model cannot be loaded, as types.

Owns: the LoadError tree. Every message names the file or field at fault, the numbers, and what
would help. Does not own: when they are raised. Imports no torch.

    LoadError
    ├── ModelNotFoundError          no such folder, file or hub id
    ├── MissingFileError            a file that the checkpoint needs is not there
    ├── TruncatedFileError          a file ends before its own header says
    ├── CorruptFileError            a file's header or JSON cannot be read
    ├── PickleWeightsError          only .bin / .pt weights
    ├── UnsupportedModelError       architecture, rope, activation or storage format unknown
    │   └── DynamicRopeError        frequencies that change with the prompt's length
    ├── WeightMismatchError         tensors missing or of other shapes
    └── OutOfMemoryError            the weights do not fit
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class LoadError(Exception):
    """A model cannot be loaded."""


class ModelNotFoundError(LoadError):
    """Neither a folder, nor a file, nor a hub id that can be fetched."""


class MissingFileError(LoadError):
    """A file that the checkpoint needs is not there."""


class TruncatedFileError(LoadError):
    """A file ends before its own header says it should."""

    def __init__(self, file: str, expected_bytes: int, actual_bytes: int) -> None:
        super().__init__(
            f"{file} is truncated: its header describes {expected_bytes:,} bytes, the file has "
            f"{actual_bytes:,} ({expected_bytes - actual_bytes:,} missing). Download it again."
        )
        self.file = file
        self.expected_bytes = expected_bytes
        self.actual_bytes = actual_bytes


class CorruptFileError(LoadError):
    """A file cannot be read as what its name says it is."""


class PickleWeightsError(LoadError):
    """The checkpoint has only pickled weights, which can run code when they are read."""


class UnsupportedModelError(LoadError):
    """A part of the configuration or of the file that this loader has no code for."""


class DynamicRopeError(UnsupportedModelError):
    """Dynamic NTK scaling: a longer prompt would change the keys that are cached for its start."""

    def __init__(self, factor: float, positions: int) -> None:
        static = (
            f'{{"rope_type": "yarn", "factor": {factor}, '
            f'"original_max_position_embeddings": {positions}}}'
        )
        super().__init__(
            "rope type 'dynamic' is not supported: its frequencies change with the length of each "
            "prompt, so that cached keys of a beginning would be wrong in a longer prompt. Put a "
            f"static scaling into config.json instead, such as {static}, or remove the scaling and "
            f"stay within {positions} positions."
        )


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One tensor that is not as the configuration says; `actual` None means absent."""

    name: str
    expected: tuple[int, ...]
    actual: tuple[int, ...] | None

    def __str__(self) -> str:
        found = "missing" if self.actual is None else f"found {list(self.actual)}"
        return f"{self.name}: expected {list(self.expected)}, {found}"


class WeightMismatchError(LoadError):
    """Tensors are missing or have other shapes than config.json implies."""

    SHOWN = 8

    def __init__(self, where: str, mismatches: Sequence[Mismatch]) -> None:
        lines = [f"  {item}" for item in mismatches[: self.SHOWN]]
        if len(mismatches) > self.SHOWN:
            lines.append(f"  and {len(mismatches) - self.SHOWN} more")
        super().__init__(
            f"{where}: {len(mismatches)} tensor(s) do not match config.json; the weights and the "
            "configuration are of different models.\n" + "\n".join(lines)
        )
        self.mismatches = tuple(mismatches)


class OutOfMemoryError(LoadError):
    """The weights, or `what` else, need more memory than the device has free."""

    def __init__(
        self,
        need_bytes: int,
        available_bytes: int,
        device: str,
        remedy: str,
        what: str = "the weights need",
    ) -> None:
        super().__init__(
            f"{what} {need_bytes:,} bytes on {device}, {available_bytes:,} are available. {remedy}"
        )
        self.need_bytes = need_bytes
        self.available_bytes = available_bytes
        self.remedy = remedy
