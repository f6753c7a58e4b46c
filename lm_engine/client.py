"""How a caller outside the language stage reaches it.

Owns: the values that go in (MediaItem) and the state that can be asked for (EngineStatus,
EngineStats, ModelInfo), and the EngineClient Protocol that the API is written against.
Does not own: transport and supervision (process/), the loop (engine.py). Imports no torch.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from chunked_prefill.request import Request
from lm_engine.kv_log import KVEventLog
from lm_engine.outputs import Estimate, RequestError, RequestOutput
from vision_encoder.plan import ImagePlan

if TYPE_CHECKING:
    from chunked_prefill.calibration_file import Calibration, CalibrationProgress
    from chunked_prefill.settings import SchedulingSettings
    from lm_engine.reconfiguration import SchedulingState


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One image of a request: its encoded bytes, by value or by a spool file, and its plan."""

    key: bytes
    """Content key; the request's ImageSpans refer to it."""
    plan: ImagePlan
    param: str
    """The user's name of the part, such as "messages.0.content.1", for error texts."""
    data: bytes | None = None
    path: str | None = None
    """A file with the encoded bytes; the submitter owns it and keeps it until the request's last
    event, so that an image can be encoded again after a preemption."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the language stage settled at start, for admission checks outside it."""

    name: str
    max_model_len: int
    """Most tokens of prompt plus completion."""
    vocab_size: int
    """Width of the logits: token ids outside [0, vocab_size) are refused."""
    kv_capacity_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    embedding_rows: int
    """Rows of the embedding arena: one image must fit."""
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    device: str = "cpu"
    num_layers: int = 0
    """Layers of the decoder; 0 where nobody said."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Cumulative observations since start: `counts[i]` fell at or under `bounds[i]`; the last
    count has no upper bound."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True)
class TierStats:
    """The tiers behind the device. Superblocks have 256 tokens; counters count since the start."""

    host_superblocks: int = 0
    host_used: int = 0
    """Superblocks that a sequence or a copy refers to."""
    host_cached: int = 0
    """Superblocks kept for reuse; they are as good as free."""
    host_evictions: int = 0
    host_cleared: int = 0
    disk_superblocks: int = 0
    """That the disk tier may hold; 0 without one."""
    disk_cached: int = 0
    disk_evictions: int = 0
    disk_cleared: int = 0
    disk_broken: int = 0
    """Files that did not check out, and were removed."""
    copies_awaited: int = 0
    """Copies between tiers whose end somebody waits for."""
    oldest_copy_age_s: float = 0.0
    stalled_s: float = 0.0
    """That the loop slept for copies with nothing else to do."""
    staging_stalled_s: float = 0.0
    """That attention waited for a piece of a cold context."""
    bytes_copied: tuple[tuple[str, int], ...] = ()
    """(direction, bytes) of copies that succeeded; directions as in kv_offload.tickets."""
    failures: tuple[tuple[str, str, int], ...] = ()
    """(direction, cause, copies)."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot after a step. Counters count since the stage started."""

    num_running: int = 0
    num_waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    """Blocks that some request holds; unreferenced cached blocks do not count."""
    kv_blocks_cached: int = 0
    """Blocks that only the prefix cache holds; they are as good as free."""
    embedding_rows_total: int = 0
    embedding_rows_used: int = 0
    """Rows that some request holds; unreferenced cached rows do not count."""
    embedding_rows_cached: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    """Computed, in every pass."""
    prompt_tokens_cached: int = 0
    """Of the prompts begun so far, what the prefix cache had."""
    prompt_tokens_uncached: int = 0
    """The rest of them."""
    prefix_cache_queries: int = 0
    """Tokens of prompts that were looked up: all but those that ask for prompt_logprobs."""
    prompt_tokens_from_host: int = 0
    """Of the cached ones, those whose KV lay on the host."""
    prompt_tokens_from_disk: int = 0
    """Of the cached ones, those whose KV lay on disk only."""
    kv_evictions: int = 0
    """Cached blocks given up for room."""
    kv_cleared: int = 0
    """Cached blocks given up on request."""
    generation_tokens: int = 0
    preemptions: int = 0
    image_cache_queries: int = 0
    image_cache_hits: int = 0
    images_encoded: int = 0
    iteration_tokens: Histogram | None = None
    step_ratio: Histogram | None = None
    """Of steps, measured over predicted time."""
    predicted_s: float = 0.0
    """Sum over steps of what each was predicted to take, before it began."""
    measured_s: float = 0.0
    """Sum of what the same steps took."""
    tiers: TierStats | None = None
    """None without a host tier."""


Phase = Literal["starting", "loading", "ready", "draining", "failed"]


@dataclass(frozen=True, slots=True)
class EngineStatus:
    phase: Phase
    detail: str = ""
    """What is being loaded, or the cause of a failure with numbers and a flag that would work."""
    done: float = 0.0
    total: float = 0.0
    eta_s: float | None = None
    heartbeat_age_s: float = 0.0
    """Seconds since the language stage last ended a step or an idle poll."""
    alive: bool = False
    """False once the heartbeat is older than the stage's own bound for a step, or it is dead."""
    pid: int | None = None
    epoch: int = 0
    """Counts restarts of the language stage."""
    model: ModelInfo | None = None
    stats: EngineStats | None = None


class EngineClient(Protocol):
    """Asynchronous face of one language stage. Methods are called on one event loop."""

    def status(self) -> EngineStatus: ...

    @property
    def kv_log(self) -> KVEventLog | None:
        """What the prefix cache holds; None unless EngineOptions.kv_events asks for it."""
        ...

    def submit(
        self, request: Request, media: tuple[MediaItem, ...]
    ) -> AsyncIterator[RequestOutput]:
        """Events of the request until the one with `finished` set. Closing the iterator early
        aborts the request and frees everything it holds."""
        ...

    async def estimate(
        self, request: Request, media: tuple[MediaItem, ...]
    ) -> Estimate | RequestError:
        """What the request could expect if it were submitted now; nothing is admitted."""
        ...

    async def scheduling(
        self, change: SchedulingSettings | None = None
    ) -> SchedulingState | RequestError:
        """What is scheduled by, after the `change` if there is one."""
        ...

    def calibrate(
        self, seconds: float
    ) -> AsyncIterator[CalibrationProgress | Calibration | RequestError]:
        """Measures how long steps take, for about `seconds`, while nobody is served: how far it is,
        and last its result, which is in force by then, or why there is none."""
        ...

    def reset_prefix_cache(self, tenant: str) -> bool:
        """Requests submitted from now on find no KV that the tenant's earlier ones left. False
        when the language stage is not there to be told."""
        ...

    async def close(self, *, drain_s: float) -> None:
        """Lets running requests finish for up to `drain_s` seconds, then ends the stages."""
        ...
