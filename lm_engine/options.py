"""What the operator chose for the language and vision stages.

Owns: EngineOptions, frozen. Does not own: where a value came from (api/config.py), or what
"auto" resolves to (assembly.py, which reports it in ModelInfo). Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineOptions:
    model: str
    """A Hugging Face folder, a GGUF file, or a hub id."""
    tokenizer: str | None = None
    """A folder with the tokenizer; None: the model's own, or the one beside or in a GGUF file."""
    served_name: str | None = None
    dtype: str = "auto"
    """auto, float32, bfloat16 or float16; auto is the checkpoint's own on CUDA, float32 on CPU."""
    device: str = "auto"
    max_model_len: int | None = None
    """None: the model's own limit, or what the KV memory holds if that is less."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    tpot_slo_s: float | None = None
    """Promised time per output token, which a step that also prefills is kept under; 0: none, the
    token budget alone; None: 0.2 on the CPU, 0.05 elsewhere."""
    block_size: int = 16
    prefix_caching: bool = True
    """Whether a prompt that begins as an earlier one of its tenant starts from that one's KV."""
    kv_memory_bytes: int | None = None
    """Hard limit of the device's KV pool; None takes a share of what is free."""
    host_kv_bytes: int | None = None
    """Memory of the host tier, which holds the beginnings of contexts that the pool cannot hold;
    None: no such tier."""
    embedding_rows: int | None = None
    """Rows of the embedding arena; None takes 8192, or the largest image if that is more."""
    threads: int | None = None
    """Torch threads of a stage that works alone; None takes all cores that this process may use."""
    vision_process: bool = True
    """Whether the vision stage of a served model has a process of its own (the default topology);
    an Engine used directly always has it in its own process."""
