"""Stages without a model or torch, for tests of the processes around them.

Owns: factories for `Factories`, an engine that counts, a vision stage that copies bytes.
`EngineOptions.model` is a space-separated list of words that choose what goes wrong.

A request's first token id is a command: see the constants. Every other request yields one delta per
step, whose text is its number and a space, until `max_tokens`; with images, the first delta names
what the vision stage wrote into shared memory.
"""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from chunked_prefill.calibration_file import Calibration, CalibrationProgress
from chunked_prefill.request import Request, SamplingParams
from chunked_prefill.settings import SchedulingSettings
from chunked_prefill.step_time import StepTimeModel
from kv_offload.kv_events import KVEvent
from lm_engine.client import EngineStats, MediaItem, ModelInfo
from lm_engine.options import EngineOptions
from lm_engine.outputs import Estimate, RequestError, RequestOutput, SequenceDelta, Usage
from lm_engine.process.messages import Factories, Plan
from lm_engine.reconfiguration import SchedulingState
from vision_encoder.embedding_arena import Acquired, EmbeddingArena
from vision_encoder.link import EncodeJob, EncodeResult, VisionLink
from vision_encoder.plan import ImagePlan

NORMAL, CRASH, HANG, SLOW, REFUSE, RAISE, LAYERS, ALONE = 1, 2, 3, 4, 5, 6, 7, 8
LAYERS_OF_A_STEP, LAYER_S = 60, 0.02
ROWS = 64

FACTORIES = Factories(
    plan="tests.lm_engine.process.fakes:plan",
    language="tests.lm_engine.process.fakes:language",
    vision="tests.lm_engine.process.fakes:vision",
)

Report = Callable[[str, float, float], None]


def request(
    name: str, *, command: int = NORMAL, max_tokens: int = 5, prompt: Iterable[int] = ()
) -> Request:
    return Request(name, (command, *prompt), SamplingParams(max_tokens=max_tokens))


def image(data: bytes, rows: int = 4, *, path: str | None = None) -> MediaItem:
    plan = ImagePlan("fake", 8, 8, (), (rows,), num_rows=rows, num_patches=rows)
    key = data[:32].ljust(32, b".")
    return MediaItem(key, plan, "messages.0.content.0", None if path else data, path)


def plan(options: EngineOptions, report: Report) -> Plan:
    report("finding the model", 0.0, 0.0)
    if "missing" in options.model:
        raise ValueError("the folder x has no config.json; name a folder that has")
    vision = "vision" in options.model
    return Plan(options, has_vision=vision, region_bytes=ROWS if vision else 0)


def language(
    plan: Plan, report: Report, link: VisionLink | None, region: mmap.mmap | None
) -> FakeEngine:
    words = plan.options.model.split()
    for done in range(5):
        report("weights", float(done), 4.0)
        time.sleep(0.8 if "slow-load" in words else 0.0)
    if "load-fault" in words:
        raise RuntimeError("tensor x is odd")
    if "load-crash" in words:
        os.kill(os.getpid(), signal.SIGKILL)
    return FakeEngine(link, region)


def vision(plan: Plan, report: Report, region: mmap.mmap) -> FakeVision:
    return FakeVision(region)


class FakeEngine:
    def __init__(self, link: VisionLink | None, region: mmap.mmap | None) -> None:
        self.info = ModelInfo("fake", 1 << 20, 1 << 20, 1 << 20, 64, 512, ROWS, (0,))
        self._link = link
        self._region = region
        self._arena = EmbeddingArena(ROWS, granule=1)
        self._live: dict[str, tuple[Request, dict[bytes, MediaItem]]] = {}
        self._sent: dict[str, int] = {}
        self._steps = 0
        self._tokens = 0
        self._resets = 0
        self._settings = SchedulingSettings()
        self.calibration: Calibration | None = None
        self._between_layers: Callable[[], None] | None = None

    def add(self, request: Request, media: tuple[MediaItem, ...]) -> list[RequestOutput]:
        if error := self.refusal(request, media):
            return [RequestOutput(request.request_id, finished=True, error=error)]
        if request.token_ids[0] == RAISE:
            raise RuntimeError("an engine's bug")
        self._live[request.request_id] = (request, {item.key: item for item in media})
        self._sent[request.request_id] = 0
        return []

    def estimate(
        self, request: Request, media: tuple[MediaItem, ...], arrived: Sequence[Request]
    ) -> Estimate | RequestError:
        """Its own numbers back, and who came before it."""
        if error := self.refusal(request, media):
            return error
        if request.token_ids[0] == RAISE:
            raise RuntimeError("an engine's bug")
        tokens, waiting = len(request.token_ids), len(self._live) + len(arrived)
        return Estimate(tokens, 0, 0, 1.5, 0.5, 1.0, self._steps, waiting, 7, True)

    def refusal(self, request: Request, media: tuple[MediaItem, ...]) -> RequestError | None:
        if request.token_ids[0] != REFUSE:
            return None
        return RequestError("never_fits", "too long", "max_tokens")

    def between_layers(self, call: Callable[[], None] | None) -> None:
        self._between_layers = call

    def abort(self, request_id: str) -> None:
        self._live.pop(request_id, None)
        self._arena.release_all(request_id)

    def scheduling(self, change: SchedulingSettings | None) -> SchedulingState | RequestError:
        """The same again, unless more seats are wanted than there are."""
        if change is not None and change.max_num_seqs > self.info.max_num_seqs:
            return RequestError("invalid", "too many", "max_num_seqs")
        self._settings = change or self._settings
        model = StepTimeModel(0.01, 0.0, 1e-4, 0.0, 0.0)
        return SchedulingState(self._settings, 64, 512, 64, 16, True, model, 1.0, self._steps)

    def calibrate(self, seconds: float) -> Iterator[CalibrationProgress | Calibration]:
        """Twenty turns of a hundredth second."""
        for turn in range(20):
            time.sleep(0.01)
            yield CalibrationProgress("shapes", turn / 100, seconds)
        model = StepTimeModel(0.02, 0.0, 1e-4, 0.0, 0.0)
        self.calibration = Calibration(model, (0.9, 1.0, 1.1), 0.02, 20, seconds)
        yield self.calibration

    @property
    def num_requests(self) -> int:
        return len(self._live)

    def reset_prefix_cache(self, tenant: str) -> None:
        self._resets += 1

    def take_kv_events(self) -> tuple[KVEvent, ...]:
        return ()

    def has_work(self) -> bool:
        return bool(self._live)

    def vision_restarted(self, suspects: Iterable[bytes] | None) -> list[RequestOutput]:
        outputs = []
        for key in self._arena.new_epoch(None if suspects is None else tuple(suspects)):
            if self._arena.is_quarantined(key):
                for holder in self._arena.mark_failed(key, self._arena.epoch):
                    outputs.append(self._fail(str(holder), "quarantined"))
            else:
                holder = next(iter(self._arena.holders(key)))
                self._encode(self._live[str(holder)][1][key])
        return outputs

    def step(self) -> list[RequestOutput]:
        outputs = []
        if self._link is not None:
            for result in self._link.poll():
                if result.error is None:
                    self._arena.mark_ready(result.key, result.epoch)
                else:
                    for holder in self._arena.mark_failed(result.key, result.epoch):
                        outputs.append(self._fail(str(holder), result.error))
            alone = any(one.token_ids[0] == ALONE for one, _ in self._live.values())
            self._link.allow(0.0 if alone else 1.0)
        for request, media in list(self._live.values()):
            command = request.token_ids[0]
            if command == CRASH:
                os.kill(os.getpid(), signal.SIGKILL)
            elif command == HANG:
                time.sleep(1000)
            elif command in (SLOW, ALONE):
                time.sleep(0.02)
            elif command == LAYERS:
                for _ in range(LAYERS_OF_A_STEP):
                    time.sleep(LAYER_S)
                    if self._between_layers is not None:
                        self._between_layers()
            ready = [self._ready(request.request_id, item) for item in media.values()]
            if all(ready):
                outputs.append(self._advance(request, media))
        self._steps += bool(outputs)
        return outputs

    def close(self) -> None:
        """Nothing to leave."""

    def stats(self) -> EngineStats:
        arena = self._arena.stats()
        return EngineStats(
            num_running=len(self._live),
            steps=self._steps,
            generation_tokens=self._tokens,
            kv_cleared=self._resets,
            embedding_rows_total=arena.rows_total,
            embedding_rows_used=arena.rows_used,
            images_encoded=arena.encodes,
        )

    def _ready(self, name: str, item: MediaItem) -> bool:
        if self._arena.acquire(item.key, item.plan.num_rows, name) is Acquired.START:
            self._encode(item)
        return self._arena.is_ready(item.key)

    def _encode(self, item: MediaItem) -> None:
        assert self._link is not None
        rows = self._arena.rows(item.key)
        self._link.submit(
            EncodeJob(
                item.key, self._arena.epoch, item.plan, rows, (0, 0), data=item.data, path=item.path
            )
        )

    def _advance(self, request: Request, media: dict[bytes, MediaItem]) -> RequestOutput:
        name = request.request_id
        number = self._sent[name]
        self._sent[name] += 1
        self._tokens += 1
        text = f"{number} "
        if number == 0 and self._region is not None:
            for key in media:
                seen = bytes(self._region[row] for row in self._arena.row_indices(key))
                text += seen.decode() + " "
        last = number + 1 == request.sampling.max_tokens
        if last:
            self.abort(name)
        usage = Usage(len(request.token_ids), number + 1) if last else None
        delta = SequenceDelta(0, text, (number,), finish_reason="length" if last else None)
        return RequestOutput(name, (delta,), finished=last, usage=usage)

    def _fail(self, name: str, why: str) -> RequestOutput:
        self.abort(name)
        return RequestOutput(name, finished=True, error=RequestError("media", why))


class FakeVision:
    """Writes an image's first byte into each of its rows; the image's first word is a command."""

    def __init__(self, region: mmap.mmap) -> None:
        self._region = region
        self._jobs: list[EncodeJob] = []

    def submit(self, job: EncodeJob) -> None:
        self._jobs.append(job)

    def cancel(self, key: bytes, epoch: int) -> None: ...

    def isolate(self, keys: Iterable[bytes]) -> None: ...

    def reset(self) -> None:
        self._jobs.clear()

    def busy(self) -> bool:
        return bool(self._jobs)

    def in_hand(self) -> list[bytes]:
        return [self._jobs[0].key]

    def advance(self) -> list[EncodeResult]:
        job = self._jobs.pop(0)
        data = job.data
        if data is None:
            assert job.path is not None
            with open(job.path, "rb") as spool:
                data = spool.read()
        if data.startswith(b"crash"):
            os.kill(os.getpid(), signal.SIGKILL)
        if data.startswith(b"slow"):
            time.sleep(0.5)
        if data.startswith(b"broken"):
            return [EncodeResult(job.key, job.epoch, error="image is truncated")]
        for first, count in job.rows:
            self._region[first : first + count] = data[:1] * count
        return [EncodeResult(job.key, job.epoch, encode_s=0.001)]
