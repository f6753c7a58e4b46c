"""What the processes say to each other.

Owns: the messages and their numbers on the wire, and the limits that the supervisor applies.
Does not own: framing (wire.py), or the values inside (request.py, outputs.py, link.py). Imports no
torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from chunked_prefill.calibration_file import Calibration, CalibrationProgress
from chunked_prefill.request import Request
from chunked_prefill.settings import SchedulingSettings
from kv_offload.kv_events import KVEvent
from lm_engine.client import EngineStats, MediaItem, ModelInfo, Phase
from lm_engine.options import EngineOptions
from lm_engine.outputs import Estimate, RequestError, RequestOutput
from lm_engine.reconfiguration import SchedulingState
from vision_encoder.link import EncodeJob, EncodeResult


@dataclass(frozen=True, slots=True)
class Factories:
    """Dotted names ("package.module:function") of what builds the stages. The supervisor imports
    the modules once, before it forks."""

    plan: str = "lm_engine.process.factories:plan"
    """(EngineOptions, report) -> Plan; runs in a process of its own, so it may start threads."""
    language: str = "lm_engine.process.factories:language"
    """(Plan, report, VisionLink | None, mmap | None) -> LanguageEngine."""
    vision: str = "lm_engine.process.factories:vision"
    """(Plan, report, mmap) -> VisionWorker."""


@dataclass(frozen=True, slots=True)
class Supervision:
    """When a stage counts as dead, and how often it is brought back."""

    max_restarts: int = 5
    """Restarts within `restart_window_s` before the supervisor gives up."""
    restart_window_s: float = 300.0
    stopped_grace_s: float = 1.0
    """A stage stopped by a signal for this long is killed."""
    idle_bound_s: float = 20.0
    """An idle stage wakes every 0.5 s; older than this, it is stuck."""
    step_floor_s: float = 600.0
    """Least bound of one step or one layer of a pass. Large, as one chunk of a deep prompt may take
    minutes on a CPU; a frozen process is noticed at once by its state, not by this bound."""
    step_factor: float = 10.0
    """The bound of a step is at least this many times the slowest step so far."""
    load_bound_s: float = 1800.0
    """Most seconds between two signs of progress while loading."""
    term_grace_s: float = 2.0
    """Between asking a stage to end and killing it."""
    drain_s: float = 30.0
    """How long running requests may go on after SIGTERM to the supervisor."""
    niceness: int = 5
    """Added to the stages' niceness, so that the API process answers at once."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What must be known of a model before the stages are forked."""

    options: EngineOptions
    """With the model resolved to files on disk."""
    has_vision: bool = False
    """Whether the vision stage is a process of its own."""
    region_bytes: int = 0
    """Shared memory for embedding rows."""
    num_rows: int = 0
    row_shape: tuple[int, int] = (1, 0)
    """(1 + deepstack levels, text width)."""


# -- API process -> language stage, and back -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submission:
    request: Request
    media: tuple[MediaItem, ...]


@dataclass(frozen=True, slots=True)
class Submit:
    """A Submission as encoded bytes, so that one that cannot be read back still has a name to
    answer to."""

    request_id: str
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Requests that follow find no KV which the tenant's earlier ones left."""

    tenant: str


@dataclass(frozen=True, slots=True)
class Ask:
    """What could the Submission in `body` expect if it came now? Answered by Foreseen, in the
    middle of a step if need be; nothing is admitted."""

    request_id: str
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Foreseen:
    request_id: str
    estimate: Estimate | None = None
    error: RequestError | None = None
    """Why there is no estimate."""


@dataclass(frozen=True, slots=True)
class Configure:
    """Schedule by these `settings` from the next step on, or say by what; answered by Configured,
    in order."""

    settings: SchedulingSettings | None = None


@dataclass(frozen=True, slots=True)
class Configured:
    state: SchedulingState | None = None
    error: RequestError | None = None
    """Why nothing was changed."""


@dataclass(frozen=True, slots=True)
class Calibrate:
    """Measure how long steps take, for about so many `seconds`, while nobody is served; answered by
    some Calibrated, the last of which has a result or an error. A request that comes meanwhile ends
    it."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Calibrated:
    progress: CalibrationProgress | None = None
    result: Calibration | None = None
    error: RequestError | None = None


@dataclass(frozen=True, slots=True)
class StepEvents:
    """What one step brought, in one write."""

    outputs: tuple[RequestOutput, ...] = ()
    aborted: tuple[str, ...] = ()
    """Requests that are gone after an Abort: no event follows, the name is free."""
    stats: EngineStats | None = None
    kv_events: tuple[KVEvent, ...] = ()
    """What the prefix cache got and lost, where the options ask for it."""


# -- language stage -> vision stage, and back -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class CancelJob:
    key: bytes
    epoch: int


@dataclass(frozen=True, slots=True)
class Replies:
    results: tuple[EncodeResult, ...]


# -- control: API process <-> supervisor <-> stages -----------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    options: EngineOptions
    factories: Factories
    supervision: Supervision
    path: tuple[str, ...]
    """Added to the module search path."""


@dataclass(frozen=True, slots=True)
class Report:
    """State of the whole, supervisor to API process."""

    phase: Phase
    detail: str = ""
    done: float = 0.0
    total: float = 0.0
    epoch: int = 0
    pid: int | None = None
    """Of the language stage."""
    vision_pid: int | None = None
    model: ModelInfo | None = None


@dataclass(frozen=True, slots=True)
class Channel:
    """Comes with a descriptor: the socket to the language stage of this epoch."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End now, in order."""


@dataclass(frozen=True, slots=True)
class NewLink:
    """Comes with a descriptor: the neighbour stage is a new process, reached over this socket."""

    suspects: tuple[bytes, ...] = ()
    """Images that were in hand when the former vision stage died; empty when nobody knows."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Stage to supervisor, while loading."""

    detail: str
    done: float = 0.0
    total: float = 0.0


@dataclass(frozen=True, slots=True)
class Planned:
    plan: Plan


@dataclass(frozen=True, slots=True)
class Ready:
    model: ModelInfo | None = None


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """Loading cannot succeed; a restart would not help. `message` is for the operator."""

    message: str


Message = (
    Submit
    | Abort
    | StepEvents
    | EncodeJob
    | CancelJob
    | Replies
    | Start
    | Report
    | Channel
    | Stop
    | NewLink
    | Progress
    | Planned
    | Ready
    | LoadFailed
    | ResetPrefixCache
    | Ask
    | Foreseen
    | Configure
    | Configured
    | Calibrate
    | Calibrated
)
KINDS: tuple[type[Message], ...] = (
    Submit,
    Abort,
    StepEvents,
    EncodeJob,
    CancelJob,
    Replies,
    Start,
    Report,
    Channel,
    Stop,
    NewLink,
    Progress,
    Planned,
    Ready,
    LoadFailed,
    ResetPrefixCache,
    Ask,
    Foreseen,
    Configure,
    Configured,
    Calibrate,
    Calibrated,
)
"""A message's place here is its number on the wire; both ends are the same release."""
