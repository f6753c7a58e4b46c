"""The geometry of a model's keys and values, and how many bytes they take.

Owns: KVLayout. Does not own: storage (kv_cache.py), which blocks are in use (block_pool.py), or
attention. Imports no torch, so planners and the simulator can use it anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


class LayoutError(ValueError):
    """A KVLayout that no cache can have; the message names the field, its value and the remedy."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of the keys and values of one model. Every token takes a key and a value vector of
    `head_dim` numbers per KV head and layer."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    """Tokens per block; slot = block * block_size + offset."""
    dtype: str = "float32"
    """Name of the stored number type: "float32", "bfloat16", "float16" or "float64"."""
    windows: tuple[int | None, ...] = ()
    """Sliding window of each layer in tokens (a query sees itself and the window - 1 tokens before
    it), None for a layer that sees everything. Empty means None for all layers."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            value = getattr(self, name)
            if value < 1:
                raise LayoutError(f"{name} is {value}; it must be at least 1")
        if self.dtype not in _DTYPE_BYTES:
            raise LayoutError(
                f"dtype is {self.dtype!r}; KV can be stored as {', '.join(sorted(_DTYPE_BYTES))}"
            )
        if self.windows and len(self.windows) != self.num_layers:
            raise LayoutError(
                f"windows has {len(self.windows)} entries for {self.num_layers} layers; "
                "give one per layer, or none at all"
            )
        for layer, window in enumerate(self.windows):
            if window is not None and window < 1:
                raise LayoutError(
                    f"windows[{layer}] is {window}; it must be at least 1, or None for no window"
                )

    @property
    def dtype_bytes(self) -> int:
        return _DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """2 * L * n_kv * d * s: one key and one value (2) for each of L layers and n_kv KV heads,
        d numbers of s bytes each."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens, or None."""
        return self.windows[layer] if self.windows else None

    def blocks_for(self, num_tokens: int) -> int:
        """Fewest blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def blocks_in(self, num_bytes: int) -> int:
        """Most blocks whose keys and values fit into `num_bytes`."""
        return num_bytes // self.bytes_per_block
