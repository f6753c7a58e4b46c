"""The language stage's loop: one step at a time, tokens in, tokens out.

Owns: the requests in flight and the order of a step's parts. Does not own: any of those parts -
order and KV (scheduler), rows (images.py), tensors (batch.py, runner.py), the draw (sampler.py),
text (live.py, finish.py) - nor threads, sockets or processes (process), nor how it is put together
from files (assembly.py).

A step: poll images -> schedule -> build -> forward -> commit -> sample -> deltas out. The engine
never dies of a request: a fault in a forward pass fails the requests of that pass and frees what
they hold. Not thread-safe; one loop calls it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer

from chunked_prefill.calibration_file import (
    CALIBRATION_S,
    Calibration,
    CalibrationFile,
    CalibrationProgress,
)
from chunked_prefill.request import Request, SamplingParams
from chunked_prefill.scheduler import Scheduler
from chunked_prefill.sequence import Sequence
from chunked_prefill.settings import SchedulingSettings
from chunked_prefill.step_plan import ScheduledChunk, StepPlan
from chunked_prefill.step_time import StepLoad
from chunked_prefill.step_time_estimator import StepTimeEstimator
from kv_offload.event_recorder import EventRecorder
from kv_offload.kv_events import KVEvent
from lm_engine import batch as batches
from lm_engine import reconfiguration
from lm_engine.admission import check
from lm_engine.batch import ForwardBatch
from lm_engine.client import EngineStats, Histogram, MediaItem, ModelInfo
from lm_engine.estimate import Outlook, too_late
from lm_engine.evidence import Watch
from lm_engine.finish import token_bytes_table
from lm_engine.images import ImageFailure, ImageFeed, ImageWork
from lm_engine.kv_tiers import tier_stats
from lm_engine.live import LiveRequest
from lm_engine.options import EngineOptions
from lm_engine.outputs import Estimate, RequestError, RequestOutput
from lm_engine.reconfiguration import SchedulingState
from lm_engine.runner import Runner
from lm_engine.sampler import logprobs_of, sample_each
from vision_encoder.link import VisionLink
from vision_encoder.plan import ImagePlan

if TYPE_CHECKING:
    from lm_engine.offline import Completion, Prompt

logger = logging.getLogger(__name__)

_STEPS_AHEAD = 16
"""Steps that an estimate on arrival walks one by one: everybody waits for it meanwhile."""
_COPY_WAIT_S = 0.005
"""Longest sleep for a copy between tiers: who comes meanwhile waits as long."""
_ITERATION_BOUNDS = tuple(float(1 << i) for i in range(15))
PlanImages = Callable[[list[tuple[int, int]]], list[ImagePlan]]
INTERNAL = RequestError("internal", "the engine failed while computing this request")


class Engine:
    """Requests in, events out, `step` by `step`.

    `images` is None for a text model. `tokenizer` decides texts and stop strings.
    """

    def __init__(
        self,
        info: ModelInfo,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer,
        images: ImageFeed | None = None,
        *,
        mrope: bool = False,
        kv_events: EventRecorder | None = None,
        calibration: Calibration | None = None,
        calibration_file: CalibrationFile | None = None,
        plan_images: PlanImages | None = None,
    ) -> None:
        self.info = info
        self.scheduler = scheduler
        self.runner = runner
        runner.after_copies = scheduler.kv.start_loads
        self.tokenizer = tokenizer
        self.images = images
        self._mrope = mrope
        self._kv_events = kv_events
        self.calibration_file = calibration_file
        """Where a calibration is kept for later starts."""
        self.calibration = calibration
        """The one in force; None: what steps take is learnt from them."""
        self.plan_images = plan_images
        """What the model makes of images of these (width, height), where it takes some."""
        self._device = runner.decoder.device
        self._eos = frozenset(info.eos_token_ids)
        self._token_bytes = token_bytes_table(tokenizer)
        self._live: dict[str, LiveRequest] = {}
        self._orders, self._seq_ids = count(), count()
        self._prompt_tokens = self._generation_tokens = 0
        self._cached = self._uncached = self._looked_up = 0
        """Prompt tokens by where their KV came from, and those that the cache was asked for."""
        self._from_host = self._from_disk = 0
        """Of those that were cached."""
        self._outlook = Outlook(scheduler, images)
        self._computing: tuple[StepPlan, float] | None = None
        """The step under way, and when it began (time.perf_counter)."""
        self._iterations = [0] * (len(_ITERATION_BOUNDS) + 1)
        self._iteration_total = 0

    @classmethod
    def load(
        cls,
        options: EngineOptions,
        *,
        progress: Callable[[str, float, float, float | None], None] | None = None,
        vision: VisionLink | None = None,
        storage: torch.Tensor | None = None,
    ) -> Engine:
        """Builds an engine from a model's files; see assembly.build_engine."""
        from lm_engine.assembly import build_engine

        return build_engine(options, progress=progress, vision=vision, storage=storage)

    def generate(
        self,
        prompts: SequenceOf[Prompt],
        sampling: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Completion]:
        """Answers many prompts without a server; see offline.generate."""
        from lm_engine.offline import generate

        return generate(self, prompts, sampling, progress=progress)

    # -- requests -----------------------------------------------------------------------------

    def add(self, request: Request, media: tuple[MediaItem, ...] = ()) -> list[RequestOutput]:
        """Admits a request, or refuses it before any compute with an event that says why."""
        error = self.refusal(request, media)
        if error is None and request.request_id in self._live:
            error = RequestError("invalid", "a request with this id is running", "request_id")
        if error is not None:
            return [RequestOutput(request.request_id, finished=True, error=error)]
        live = LiveRequest(request, next(self._orders), next(self._seq_ids))
        live.watch = Watch.of(request, self.runner.decoder.config.windows)
        first = live.sequences[0]
        if self.images is not None:
            first.encode_s = self.images.encode_s(media)
        estimate = None
        if request.wants_estimate or request.must_meet_ttft:
            estimate = self._outlook.of(first, media, most_steps=_STEPS_AHEAD)
            if late := too_late(request, estimate):
                self.scheduler.kv.free(first.seq_id)
                return [RequestOutput(request.request_id, finished=True, error=late)]
        self._live[request.request_id] = live
        if self.images is not None:
            self.images.add(request.request_id, media)
        self.scheduler.add(first)
        return [] if estimate is None else [RequestOutput(request.request_id, estimate=estimate)]

    def estimate(
        self,
        request: Request,
        media: tuple[MediaItem, ...] = (),
        arrived: SequenceOf[Request] = (),
    ) -> Estimate | RequestError:
        """What the request could expect if it came now, after those that have `arrived` and are
        still to be added; nothing is held or computed. May be called while a step is computed (see
        `between_layers`)."""
        if error := self.refusal(request, media):
            return error
        before = [self._nobody(one) for one in arrived]
        sequence = self._nobody(request)
        if self.images is not None:
            sequence.encode_s = self.images.encode_s(media)
        try:
            return self._outlook.of(sequence, media, before, computing=self._computing)
        finally:
            for one in (*before, sequence):
                self.scheduler.kv.free(one.seq_id)

    def _nobody(self, request: Request) -> Sequence:
        """A sequence that is not served."""
        return Sequence(request, next(self._seq_ids), next(self._orders))

    def between_layers(self, call: Callable[[], None] | None) -> None:
        """`call` is called by each layer of each step, on this thread. It may ask for estimates,
        and nothing else of the engine."""
        self.runner.between_layers = call

    def refusal(self, request: Request, media: tuple[MediaItem, ...]) -> RequestError | None:
        """Why this engine can never serve the request; asked in the middle of a step, too."""
        error = check(request, media, self.info)
        if error is None and request.image_spans and self.images is None:
            error = RequestError("invalid", "this model takes no images", media[0].param)
        seats = self.scheduler.max_num_seqs
        if error is None and request.sampling.n > seats:
            error = RequestError("invalid", f"at most {seats} choices run at once now", "n")
        if error is None and (never := self.scheduler.never_fits(request)):
            error = RequestError(
                "never_fits",
                f"the request needs KV for {never.need_tokens} tokens, this server holds "
                f"{never.have_tokens}; {never.remedy}",
                "max_tokens",
            )
        return error

    def abort(self, request_id: str) -> None:
        """Ends a request without further events and frees everything it holds."""
        if live := self._live.get(request_id):
            self._forget(live)

    def reset_prefix_cache(self, tenant: str) -> None:
        """Forgets the KV that the tenant's requests have left; those that run keep theirs."""
        self.scheduler.kv.clear(tenant)

    def scheduling(
        self, change: SchedulingSettings | None = None
    ) -> SchedulingState | RequestError:
        """What is scheduled by, after the `change` if there is one. Call it between two steps."""
        if change is None:
            state = reconfiguration.state(self.scheduler, self.info)
        else:
            state = reconfiguration.change(self.scheduler, self.info, change)
        if isinstance(state, RequestError):
            return state
        return replace(state, calibration=self.calibration)

    def calibrate(
        self, seconds: float = CALIBRATION_S
    ) -> Iterator[CalibrationProgress | Calibration]:
        """See calibration.calibrate."""
        from lm_engine.calibration import calibrate

        return calibrate(self, seconds)

    def take_kv_events(self) -> tuple[KVEvent, ...]:
        """What the prefix cache got and lost since the last call. With EngineOptions.kv_events,
        whoever steps the engine calls this now and then: events are kept until they are taken."""
        return () if self._kv_events is None else self._kv_events.take()

    @property
    def num_requests(self) -> int:
        """In flight."""
        return len(self._live)

    def has_work(self) -> bool:
        seeing = self.images is not None and self.images.busy()
        return bool(self._live) or seeing or self.scheduler.kv.copying

    def close(self) -> None:
        """Ends copies between tiers, and leaves the disk tier's folder; no step after this."""
        self.scheduler.kv.close()

    def vision_restarted(self, suspects: Iterable[bytes] | None = None) -> list[RequestOutput]:
        """The vision stage is a new process; its jobs in flight are submitted again."""
        return [] if self.images is None else self._fail(self.images.restarted(suspects))

    # -- one step -----------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Advances whatever can advance. When nothing can, returns at once, or when a copy between
        tiers ended, if some are under way."""
        self.scheduler.take_loaded()
        outputs = self._pump_images()
        plan = self.scheduler.schedule()
        if self.images is not None:
            self.images.link.allow(plan.vision_s)
        for sequence in plan.preempted:
            self._drop_rows(sequence)
        if not plan.chunks:
            if not outputs and not plan.preempted:
                self.scheduler.kv.wait(_COPY_WAIT_S)
            return outputs
        live = {c.sequence.request.request_id: None for c in plan.chunks}
        started = time.perf_counter()
        self._computing = (plan, started)
        try:
            batch = self._build(plan)
            logits = self.runner.forward(batch, plan.copies)
            self._commit(plan)
            failed = self._take_tokens(batch, logits)
            if self._device.type == "cuda":
                # A chunk in the middle of a prompt samples nothing that would wait for it.
                torch.cuda.synchronize(self._device)
        except Exception:
            logger.exception("step %d failed with %d chunks", plan.step, len(plan.chunks))
            return outputs + self._fail(ImageFailure(name, INTERNAL) for name in live)
        finally:
            self._computing = None
        load = StepLoad.of((chunk.start, chunk.length) for chunk in plan.chunks)
        self.scheduler.budget.observe(load, time.perf_counter() - started)
        outputs += self._fail(ImageFailure(name, INTERNAL) for name in failed)
        for request_id in live:
            if request_id not in failed:
                outputs += self._report(self._live[request_id])
        return outputs

    def _pump_images(self) -> list[RequestOutput]:
        if self.images is None:
            return []
        self.scheduler.look_up_images()
        outputs = self._fail(self.images.pump(self.scheduler.in_order()))
        checked = self.images.take_checked()
        return outputs + [RequestOutput(r, media_checked=True) for r in checked]

    def _build(self, plan: StepPlan) -> ForwardBatch:
        def wants(chunk: ScheduledChunk) -> bool:
            sequence = chunk.sequence
            return sequence.choice == 0 and self._owner(sequence).wants_prompt_logprobs

        def watch_of(chunk: ScheduledChunk) -> Watch | None:
            return self._owner(chunk.sequence).watch

        for chunk in plan.chunks:
            self._count_prompt(chunk.sequence)
        rows_of = self.images.arena.rows if self.images else _no_rows
        return batches.build(
            plan,
            self.scheduler.kv,
            rows_of,
            wants,
            watch_of,
            mrope=self._mrope,
            device=self._device,
        )

    def _count_prompt(self, sequence: Sequence) -> None:
        live = self._owner(sequence)
        if not live.scheduled(sequence):
            return
        prompt = live.request.num_prompt_tokens
        self._cached += live.cached_tokens
        sources = self.scheduler.kv.sources(sequence.seq_id)
        self._from_host += sources.host
        self._from_disk += sources.disk
        self._uncached += prompt - live.cached_tokens
        if self.scheduler.kv.prefix_caching and live.request.sampling.prompt_logprobs is None:
            self._looked_up += prompt

    def _commit(self, plan: StepPlan) -> None:
        self.scheduler.commit(plan)
        for chunk in plan.chunks:
            prompt = chunk.sequence.num_prompt_tokens
            self._prompt_tokens += max(0, min(chunk.end, prompt) - chunk.start)
            if self.images is not None:
                self.images.consumed(chunk.sequence)
        tokens = plan.num_tokens
        self._iterations[sum(tokens > bound for bound in _ITERATION_BOUNDS)] += 1
        self._iteration_total += tokens

    def _take_tokens(self, batch: ForwardBatch, logits: torch.Tensor) -> set[str]:
        """Samples every sequence that the step brought to its end, forking first samples. Returns
        the requests that have no next token; the others are not touched by their fault."""
        for part in batch.prompt_rows:
            live = self._owner(part.chunk.sequence)
            targets = live.request.token_ids[part.first_target : part.first_target + part.count]
            rows = logits[part.first_row : part.first_row + part.count]
            tops = [live.request.sampling.prompt_logprobs or 0] * part.count
            found = logprobs_of(rows, list(targets), tops, self._bytes_of)
            live.add_prompt_logprobs(part.first_target, found)
        samples = [
            (row, sequence)
            for row, chunk in enumerate(batch.sampled)
            for sequence in self._forked(chunk.sequence)
        ]
        failed: set[str] = set()
        if not samples:
            return failed
        picked = logits[: len(batch.sampled)]
        if len(samples) != len(picked):
            picked = logits[[row for row, _ in samples]]
        params = [self._owner(sequence).row(sequence, self._eos) for _, sequence in samples]
        masses = {} if batch.evidence is None else batch.evidence.masses()
        for (row, sequence), found_token in zip(
            samples, sample_each(picked, params, self._bytes_of), strict=True
        ):
            name = sequence.request.request_id
            if isinstance(found_token, Exception):
                logger.error("request %s has no next token", name, exc_info=found_token)
                failed.add(name)
                continue
            self._generation_tokens += 1
            if row in masses:
                self._owner(sequence).saw(sequence, masses[row])
            if self._owner(sequence).push(sequence, found_token, self.tokenizer, self._eos):
                self._drop_rows(sequence)
                self.scheduler.finish(sequence)
        return failed

    def _forked(self, first: Sequence) -> list[Sequence]:
        """The sequence and, at the end of its prompt, the other samples that start from it."""
        family = [first]
        live = self._owner(first)
        for choice in range(1, first.width):
            child = first.fork(next(self._seq_ids), choice)
            live.sequences[choice] = child
            self.scheduler.fork(first, child)
            family.append(child)
        return family

    def _report(self, live: LiveRequest) -> list[RequestOutput]:
        output = live.step_output(self._image_work(live))
        if output is not None and output.finished:
            self._forget(live)
        return [] if output is None else [output]

    # -- endings ------------------------------------------------------------------------------

    def _fail(self, failures: Iterable[ImageFailure]) -> list[RequestOutput]:
        outputs = []
        for failure in failures:
            live = self._live.get(failure.request_id)
            if live is not None:
                outputs.append(live.failed(failure.error, self._image_work(live)))
                self._forget(live)
        return outputs

    def _forget(self, live: LiveRequest) -> None:
        for sequence in live.sequences.values():
            self._drop_rows(sequence)
            self.scheduler.remove(sequence)
        if self.images is not None:
            self.images.forget(live.request.request_id)
        del self._live[live.request.request_id]

    def _drop_rows(self, sequence: Sequence) -> None:
        if self.images is not None:
            self.images.drop(sequence)

    def _image_work(self, live: LiveRequest) -> ImageWork:
        return self.images.work(live.request.request_id) if self.images else ImageWork()

    def _owner(self, sequence: Sequence) -> LiveRequest:
        return self._live[sequence.request.request_id]

    def _bytes_of(self, token_id: int) -> bytes:
        """Ids past the tokenizer's end exist in padded vocabularies and have no bytes."""
        return self._token_bytes[token_id] if token_id < len(self._token_bytes) else b""

    # -- state --------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        pool, cache = self.scheduler.kv.pool, self.scheduler.kv.cache
        arena = self.images.arena.stats() if self.images else None
        estimator = self.scheduler.budget.estimator
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            kv_blocks_total=pool.num_blocks,
            kv_blocks_used=pool.num_used - cache.num_idle,
            kv_blocks_cached=cache.num_idle,
            embedding_rows_total=arena.rows_total if arena else 0,
            embedding_rows_used=arena.rows_used if arena else 0,
            embedding_rows_cached=arena.rows_cached if arena else 0,
            steps=self.scheduler.step,
            prompt_tokens=self._prompt_tokens,
            prompt_tokens_cached=self._cached,
            prompt_tokens_uncached=self._uncached,
            prefix_cache_queries=self._looked_up,
            prompt_tokens_from_host=self._from_host,
            prompt_tokens_from_disk=self._from_disk,
            kv_evictions=cache.num_evicted,
            kv_cleared=cache.num_cleared,
            generation_tokens=self._generation_tokens,
            preemptions=self.scheduler.num_preemptions,
            image_cache_queries=arena.queries if arena else 0,
            image_cache_hits=arena.hits if arena else 0,
            images_encoded=arena.encodes if arena else 0,
            iteration_tokens=Histogram(
                _ITERATION_BOUNDS, tuple(self._iterations), float(self._iteration_total)
            ),
            step_ratio=_ratios(estimator),
            predicted_s=estimator.predicted_s if estimator else 0.0,
            measured_s=estimator.measured_s if estimator else 0.0,
            tiers=tier_stats(self.scheduler.kv),
        )

    def check_invariants(self) -> None:
        """Raises AssertionError when the parts disagree; at idle every block is free or cached."""
        self.scheduler.check_invariants()
        if self.images is not None:
            self.images.arena.check_invariants()
        known = {s.seq_id for live in self._live.values() for s in live.sequences.values()}
        held = {s.seq_id for s in self.scheduler.in_order()}
        if known != held:
            raise AssertionError(f"requests own sequences {known}, the scheduler {held}")
        kv = self.scheduler.kv
        copied, idle = kv.cache.num_held, kv.cache.num_idle
        if not known and kv.pool.num_used != idle + copied:
            raise AssertionError(
                f"at idle {kv.pool.num_free} blocks are free, {idle} cached and {copied} copied, "
                f"of {kv.pool.num_blocks}"
            )


def _ratios(estimator: StepTimeEstimator | None) -> Histogram | None:
    if estimator is None:
        return None
    ratios = estimator.ratios
    return Histogram(ratios.BOUNDS, tuple(ratios.counts), ratios.total)


def _no_rows(key: bytes) -> tuple[tuple[int, int], ...]:
    raise AssertionError("a text model has no image rows")
