"""What the operator chose for the language and vision stages.

Owns: EngineOptions, frozen. Does not own: where a value came from (api/config.py), or what
"auto" resolves to (assembly.py, which reports it in ModelInfo). Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from chunked_prefill.settings import LONG_PROMPT_SHARE, STEP_SHARE, PolicyName

ColdKV = Literal["auto", "cpu", "stream"]


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
    ttft_slo_s: float | None = None
    """Promised time from a request's arrival to its first token, three times what it takes alone if
    that is more; None: four times what 512 tokens take on this machine."""
    scheduling_policy: PolicyName = "deadline"
    """deadline: prompts by when their first token is due; fcfs: by arrival."""
    step_share: tuple[float, float] = STEP_SHARE
    """Least and most of the time per output token that a step which also prefills may plan for."""
    long_prompt_share: float = LONG_PROMPT_SHARE
    """Of the KV pool, what long prompts together may hold while short ones wait."""
    block_size: int = 16
    prefix_caching: bool = True
    """Whether a prompt that begins as an earlier one of its tenant starts from that one's KV."""
    kv_memory_bytes: int | None = None
    """Hard limit of the device's KV pool; None takes a share of what is free."""
    host_kv_bytes: int | None = None
    """Memory of the host tier, which holds the beginnings of contexts that the pool cannot hold,
    and with prefix caching what the pool has to give up; None: no such tier."""
    disk_kv_path: str | None = None
    """Folder of the disk tier, which keeps the KV of prompts when the host tier gives it up, and
    over a restart; None: no such tier. It needs a host tier."""
    disk_kv_bytes: int = 16 << 30
    """Bytes that the disk tier may take."""
    kv_events: bool = False
    """Whether the engine tells which blocks its prefix cache holds (kv_offload/kv_events.py)."""
    calibrate: bool = False
    """Whether a served engine measures its step times before it serves, if it never did."""
    record: str | None = None
    """A file for what the scheduler is told and decides (chunked_prefill/record.py); one that is
    there stays, the name gets a number. Not with a host tier."""
    cold_kv: ColdKV = "auto"
    """How KV in the host tier is attended: stream brings it to the device piece by piece, cpu lets
    the CPU attend it where it lies; auto is cpu on the CPU, and the cheaper of both on CUDA."""
    embedding_rows: int | None = None
    """Rows of the embedding arena; None takes 8192, or the largest image if that is more."""
    threads: int | None = None
    """Torch threads of a stage that works alone; None takes all cores that this process may use."""
    vision_process: bool = True
    """Whether the vision stage of a served model has a process of its own (the default topology);
    an Engine used directly always has it in its own process."""
