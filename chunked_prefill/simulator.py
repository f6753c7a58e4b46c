"""The scheduler that serves, on a clock that does not wait.

Owns: the loop of a simulated language stage - arrivals, readiness of images, steps, endings - and
what its users see. Does not own: any decision (scheduler.py, the class that serves), the time of a
step (simulator_executor.py), the vision stage (simulator_vision.py), or books of KV. Imports no
torch.

The loop is the engine's: poll images -> schedule -> execute -> commit -> append tokens -> finish.
What is missing is the model: a step takes the seconds that the Executor says, and an answer ends
after the tokens that its trace says. The same trace, seed and scheduler give the same run.
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf, nextafter

from chunked_prefill.goodput import Promise, RequestTimes
from chunked_prefill.request import ImageSpan, Request, SamplingParams
from chunked_prefill.scheduler import Scheduler
from chunked_prefill.sequence import Sequence
from chunked_prefill.simulator_decodes import TOKEN, decode_on, only_decodes
from chunked_prefill.simulator_executor import Executor
from chunked_prefill.simulator_vision import ImageCost, ImageModel, VisionStage
from chunked_prefill.step_plan import StepPlan
from chunked_prefill.step_time import StepLoad
from chunked_prefill.trace import TraceRequest
from chunked_prefill.vision_share import VisionShare

_FEWEST_STEPS = 2
"""Fewer decode steps are taken one by one."""


class VirtualClock:
    """Seconds that pass when somebody says so; give it to the scheduler as its clock."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


@dataclass(frozen=True, slots=True)
class Delays:
    """What happens outside of steps, in seconds."""

    ingress_s: float = 0.0
    """From a request's last byte to the scheduler."""
    between_steps_s: float = 0.0
    """From a step's tokens to the next step's start."""
    egress_s: float = 0.0
    """From a step's tokens to the user."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One request of a simulation."""

    times: RequestTimes
    queue_s: float
    """From arrival to the first step with a chunk of it, less waits for images."""
    image_s: float
    """How long it waited for an image, with nothing to compute, before its first token."""
    preemptions: int

    @property
    def prefill_s(self) -> float:
        """Of TTFT, what was neither queue nor image."""
        return max(0.0, self.times.ttft_s - self.queue_s - self.image_s)


@dataclass(slots=True)
class Outcome:
    """A simulation's end; times are those of its clock."""

    answers: list[Answer] = field(default_factory=list)
    """In the order in which they ended."""
    end_s: float = 0.0
    steps: int = 0
    step_s: float = 0.0
    """Seconds that steps took."""
    vision_s: float = 0.0
    preemptions: int = 0
    output_tokens: int = 0
    computed_tokens: int = 0
    """Of prompts and answers, again after preemptions."""

    kv_peak_blocks: int = 0
    """Most blocks that sequences held at the start of a step."""

    @property
    def times(self) -> list[RequestTimes]:
        return [answer.times for answer in self.answers]

    def ttft_parts(self, late: Promise | None = None) -> dict[str, float]:
        """Shares of "queue", "image" and "prefill" in the answered requests' TTFT, or of those
        only that are late by the promise; 0 each without any."""
        parts = {"queue": 0.0, "image": 0.0, "prefill": 0.0}
        for answer in self.answers:
            missed = None if late is None else late.missed(answer.times)
            if answer.times.error or (late and missed not in ("ttft", "both")):
                continue
            parts["queue"] += answer.queue_s
            parts["image"] += answer.image_s
            parts["prefill"] += answer.prefill_s
        total = sum(parts.values())
        return {name: seconds / total if total else 0.0 for name, seconds in parts.items()}


class StuckError(RuntimeError):
    """Requests wait, and neither a step, an image nor an arrival will change that."""


@dataclass(slots=True)
class _Live:
    sequence: Sequence
    trace: TraceRequest
    image_keys: tuple[bytes, ...]
    isolated_s: float | None
    delivered_s: array[float]
    left_tokens: int
    queue_s: float | None = None
    image_s: float = 0.0
    cached_tokens: int = 0


class Simulator:
    """One language stage. `scheduler` was made with `clock`, whose start is the trace's second 0.

    `images` is needed for traces with images. The scheduler is told how `vision` shares the
    machine, and that works when the scheduler says so. `alone_s` gives each request the seconds
    that so many prompt tokens take on an idle server. `on_step` sees each plan that has chunks,
    before it is executed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        clock: VirtualClock,
        executor: Executor,
        *,
        images: ImageModel | None = None,
        vision: VisionStage | None = None,
        delays: Delays | None = None,
        alone_s: Callable[[int], float] | None = None,
        on_step: Callable[[StepPlan, float], None] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.clock = clock
        self.executor = executor
        self.images = images
        self.vision = vision or VisionStage()
        scheduler.vision = VisionShare(self.vision.own_process, self.vision.slowdown)
        self.delays = delays or Delays()
        self.alone_s = alone_s
        self.on_step = on_step
        self._live: dict[int, _Live] = {}
        self._new: dict[int, _Live] = {}
        """Those of which nothing has been computed."""
        self._with_images: dict[int, _Live] = {}
        self._outcome = Outcome()
        self._count = 0

    def run(self, requests: Iterable[TraceRequest], *, until_s: float = inf) -> Outcome:
        """Until all have ended, or no step starts before `until_s` any more; what arrived until
        then and has no end has the error "unfinished". Call it once."""
        # A hundred thousand nodes of a prefix cache, and no circles that are given up: looking for
        # them would take a fifth of the time.
        looking = gc.isenabled()
        gc.disable()
        try:
            return self._run(requests, until_s)
        finally:
            if looking:
                gc.enable()

    def _run(self, requests: Iterable[TraceRequest], until_s: float) -> Outcome:
        arrivals = iter(requests)
        following = next(arrivals, None)
        clock, ingress_s = self.clock, self.delays.ingress_s
        while clock.now_s <= until_s:
            while following is not None and following.arrival_s + ingress_s <= clock.now_s:
                self._add(following)
                following = next(arrivals, None)
            if not self._live:
                if following is None:
                    break
                clock.now_s = max(clock.now_s, following.arrival_s + ingress_s)
                continue
            arrival_s = inf if following is None else following.arrival_s + ingress_s
            if not self._decode_on(min(arrival_s, nextafter(until_s, inf))) and not self._step():
                self._idle(arrival_s)
        for live in list(self._live.values()):
            self.scheduler.remove(live.sequence)
            self._end(live, "unfinished")
        while following is not None and following.arrival_s <= until_s:
            self._refuse(following, self._count, "unfinished")
            self._count += 1
            following = next(arrivals, None)
        self._outcome.end_s = clock.now_s
        self._outcome.vision_s = self.vision.busy_s
        self._outcome.preemptions = self.scheduler.num_preemptions
        return self._outcome

    # -- requests -----------------------------------------------------------------------------

    def _add(self, trace: TraceRequest) -> None:
        number = self._count
        self._count += 1
        costs = self._image_costs(trace)
        request = as_request(trace, number, costs)
        if self.scheduler.never_fits(request) is not None:
            self._refuse(trace, number, "never_fits")
            return
        isolated_s = None
        if self.alone_s is not None:
            isolated_s = self.alone_s(request.num_prompt_tokens)
            isolated_s += sum(cost.encode_s for cost in costs)
        keys = tuple(span.key for span in request.image_spans)
        sequence = Sequence(request, number, number)
        sequence.encode_s = sum(cost.encode_s for cost in costs)
        live = _Live(
            sequence,
            trace,
            keys,
            isolated_s,
            array("d"),
            trace.output_tokens,
        )
        self._live[number] = self._new[number] = live
        if keys:
            self._with_images[number] = live
            self.vision.add({k: c.encode_s for k, c in zip(keys, costs, strict=True)})
        self.scheduler.add(live.sequence)

    def _image_costs(self, trace: TraceRequest) -> list[ImageCost]:
        if not trace.images:
            return []
        if self.images is None:
            raise ValueError("the trace has images, but nothing was said of what they cost")
        return list(self.images(trace.images))

    def _refuse(self, trace: TraceRequest, number: int, error: str) -> None:
        times = RequestTimes(
            str(number), trace.arrival_s, (), 0, prompt_tokens=trace.prompt_tokens, error=error
        )
        self._outcome.answers.append(Answer(times, 0.0, 0.0, 0))

    def _end(self, live: _Live, error: str | None = None) -> None:
        sequence = live.sequence
        del self._live[sequence.seq_id]
        self._new.pop(sequence.seq_id, None)
        if live.image_keys:
            del self._with_images[sequence.seq_id]
            self.vision.forget(live.image_keys)
        times = RequestTimes(
            sequence.request.request_id,
            live.trace.arrival_s,
            live.delivered_s,
            sequence.num_output_tokens,
            prompt_tokens=sequence.num_prompt_tokens,
            cached_tokens=live.cached_tokens,
            image_tokens=sum(span.length for span in sequence.request.image_spans),
            isolated_s=live.isolated_s,
            error=error,
        )
        queue_s = live.queue_s
        if queue_s is None:
            queue_s = self.clock.now_s - live.trace.arrival_s - live.image_s
        answer = Answer(times, queue_s, live.image_s, sequence.num_preemptions)
        self._outcome.answers.append(answer)

    # -- steps --------------------------------------------------------------------------------

    def _decode_on(self, until_s: float) -> bool:
        """Takes steps in which nothing can happen but decodes, before one in which an answer ends;
        whether there were any. Who wants to see every plan gets every plan."""
        if self._new or self._with_images or self.on_step or type(self.scheduler) is not Scheduler:
            return False
        steps = min(live.left_tokens for live in self._live.values()) - 1
        if steps < _FEWEST_STEPS or not only_decodes(self.scheduler):
            return False
        run = decode_on(
            self.scheduler,
            self.executor,
            self.clock.now_s,
            most_steps=steps,
            until_s=until_s,
            between_s=self.delays.between_steps_s,
        )
        taken, outcome = len(run.ends_s), self._outcome
        self.clock.now_s = run.now_s
        outcome.steps += taken
        outcome.step_s += run.step_s
        outcome.kv_peak_blocks = max(outcome.kv_peak_blocks, run.peak_blocks)
        outcome.computed_tokens += taken * len(self._live)
        outcome.output_tokens += taken * len(self._live)
        delivered = array("d", (end_s + self.delays.egress_s for end_s in run.ends_s))
        for live in self._live.values():
            live.delivered_s += delivered
            live.left_tokens -= taken
        return taken > 0

    def _step(self) -> bool:
        """False when nothing could be computed."""
        if self._with_images:
            self._pump_images()
        scheduler, clock, outcome = self.scheduler, self.clock, self._outcome
        start_s = clock.now_s
        plan = scheduler.schedule()
        if not plan.chunks:
            return False
        if self.on_step is not None:
            self.on_step(plan, start_s)
        load = StepLoad.of([(c.start, c.length) for c in plan.chunks])
        seconds = self.executor.execute(load, start_s)
        vision = self.vision if plan.vision_s > 0 and self.vision.busy else None
        if vision is not None and vision.own_process:
            seconds = vision.beside(seconds)
        clock.now_s = start_s + seconds
        kv = scheduler.kv
        outcome.kv_peak_blocks = max(outcome.kv_peak_blocks, kv.pool.num_used - kv.cache.num_idle)
        outcome.steps += 1
        outcome.step_s += seconds
        if self._with_images:
            self._count_image_wait(seconds)
        if self._new:
            self._count_starts(plan, start_s)
        self._take_tokens(plan)
        scheduler.budget.observe(load, seconds)
        if vision is not None and not vision.own_process:
            clock.now_s += vision.alone(plan.vision_s)
        clock.now_s += self.delays.between_steps_s
        return True

    def _count_starts(self, plan: StepPlan, now_s: float) -> None:
        for chunk in plan.chunks:
            live = self._new.pop(chunk.sequence.seq_id, None)
            if live is not None:
                live.queue_s = now_s - live.trace.arrival_s - live.image_s
                live.cached_tokens = chunk.sequence.num_cached_tokens

    def _take_tokens(self, plan: StepPlan) -> None:
        """This runs once per token, in a loop that is to be faster than a GPU."""
        self.scheduler.commit(plan)
        delivered_s = self.clock.now_s + self.delays.egress_s
        ended: list[_Live] = []
        computed = sampled = 0
        for chunk in plan.chunks:
            sequence, length = chunk.sequence, chunk.length
            computed += length
            if chunk.start + length == len(sequence.token_ids):
                sampled += 1
                live = self._live[sequence.seq_id]
                sequence.append(TOKEN)
                live.delivered_s.append(delivered_s)
                live.left_tokens -= 1
                if live.left_tokens == 0:
                    ended.append(live)
        self._outcome.computed_tokens += computed
        self._outcome.output_tokens += sampled
        for live in ended:
            self.scheduler.finish(live.sequence)
            self._end(live)

    def _pump_images(self) -> None:
        self.scheduler.look_up_images()
        line = [s for s in self.scheduler.in_order() if s.seq_id in self._with_images]
        self.vision.pump(line)

    def _idle(self, arrival_s: float) -> None:
        """Nothing can be computed until an image is ready or a request arrives."""
        now_s = self.clock.now_s
        wait_s = min(self.vision.next_done_s(), arrival_s - now_s)
        if wait_s == inf:
            raise StuckError(
                f"{len(self._live)} requests wait at {now_s:g} s and nothing will change that: "
                f"{list(self.scheduler.in_order())[:4]}"
            )
        self._count_image_wait(wait_s)
        self.vision.alone(wait_s)
        self.clock.now_s = now_s + wait_s if wait_s < arrival_s - now_s else arrival_s

    def _count_image_wait(self, seconds: float) -> None:
        for live in self._with_images.values():
            sequence = live.sequence
            if not sequence.num_output_tokens and sequence.advanceable <= 0:
                live.image_s += seconds


def as_request(trace: TraceRequest, number: int, costs: Iterable[ImageCost] = ()) -> Request:
    """The request of a trace's line `number`, its images in place of `costs`: after the part of the
    prompt that others share, before what is its own."""
    text = trace.prompt_ids(number)
    first = min(len(trace.hash_ids) * trace.block_tokens, len(text) - 1) if trace.hash_ids else 0
    spans: list[ImageSpan] = []
    offset = first
    for place, cost in enumerate(costs):
        spans.append(ImageSpan(offset, cost.tokens, f"{number}.{place}".encode()))
        offset += cost.tokens
    if spans:
        text = (*text[:first], *([TOKEN] * (offset - first)), *text[first:])
    return Request(
        str(number),
        text,
        SamplingParams(trace.output_tokens),
        image_spans=tuple(spans),
        tenant=trace.tenant,
        priority=trace.priority,
        arrival_s=trace.arrival_s,
    )
