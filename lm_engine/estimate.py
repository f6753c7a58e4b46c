"""When a prompt's first token will come, from what is known before anything of it is computed.

Owns: Outlook, which reads the queue, and the walk through the steps to come until the prompt's last
token is computed. Does not own: the order of prompts (chunked_prefill/policy.py), how much a step
takes (budget.py), or how long that lasts (step_time.py): the walk asks the same objects as the
steps themselves do. Imports no torch.

KV that a prompt brings from a lower tier takes as long as copies have taken so far, and a copy that
is under way counts as if it began now. What it cannot know: who arrives later, how long running
answers become (recent ones stand for them), and evictions of what the cache has now.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from chunked_prefill.budget import Budget
from chunked_prefill.request import Request
from chunked_prefill.scheduler import Scheduler
from chunked_prefill.sequence import Sequence as Progress
from chunked_prefill.spending import Spending
from chunked_prefill.step_plan import StepPlan
from chunked_prefill.step_time import StepLoad, StepTimeModel
from lm_engine.client import MediaItem
from lm_engine.outputs import Estimate, RequestError

_MOST_STEPS = 64
"""Steps walked one by one; what is further away is told from their pace."""
_CALIBRATED_STEPS = 16


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt that is or will be computed."""

    depth: int
    """Tokens with KV."""
    length: int
    ready: tuple[tuple[float, int], ...] = ()
    """(second, token): from `second` of the walk on, tokens before `token` may be computed;
    ascending. Empty where all may be."""
    running: bool = False
    blocks: int = 0
    """KV blocks that it takes when it starts."""
    answer: int = 1
    """Tokens it is expected to generate."""
    last_step: int = -1

    def advanceable(self, now_s: float) -> int:
        end = self.length
        if self.ready:
            end = max((token for at, token in self.ready if at <= now_s), default=self.depth)
        return min(end, self.length) - self.depth

    def next_ready_s(self, now_s: float) -> float | None:
        return min((at for at, _ in self.ready if at > now_s), default=None)


@dataclass(slots=True, eq=False)
class Answer:
    """An answer that is being generated."""

    context: int
    left: int
    blocks: int = 0
    """Given back at its end."""


@dataclass(slots=True)
class Walk:
    """Steps to come, with everything that decides them. `prompts` are in the order of service."""

    budget: Budget
    model: StepTimeModel
    prompts: list[Prompt]
    answers: list[Answer]
    seats: int
    """Sequences that run at once."""
    free_blocks: int
    now_s: float = 0.0
    step: int = 0
    started_s: dict[int, float] = field(default_factory=dict)
    """By id() of a prompt: when its first chunk began."""

    def until_done(self, wanted: Prompt, most_steps: int = _MOST_STEPS) -> float:
        """When the last token of `wanted` is computed, in seconds of the walk."""
        paces: list[tuple[float, int]] = []
        for _ in range(most_steps):
            before_s = self.now_s
            tokens = self._step()
            if wanted.depth >= wanted.length:
                return self.now_s
            if tokens is None:
                break
            paces.append((self.now_s - before_s, tokens))
        return self.now_s + self._rest(wanted, paces[len(paces) // 2 :])

    def _step(self) -> int | None:
        """Prompt tokens that the next step computes; None when nothing will ever advance."""
        self.step += 1
        able = list(self._able())
        if not able and not self.answers:
            times = [p.next_ready_s(self.now_s) for p in self.prompts]
            coming = [at for at in times if at is not None]
            if not coming:
                return None
            self.now_s = min(coming)
            able = list(self._able())
        count = self.budget.decodes(len(self.answers), bool(able), self.step)
        spending = Spending(self.budget)
        for answer in self.answers[:count]:
            spending.decode(answer.context)
        chunks = list(self._chunks(able, spending))
        more = self.budget.max_num_batched_tokens - spending.load.tokens
        decodes = self.answers[: count + more]
        load = StepLoad.of(
            [*((p.depth, length) for p, length in chunks), *((a.context, 1) for a in decodes)]
        )
        for prompt, _ in chunks:
            self.started_s.setdefault(id(prompt), self.now_s)
        self.now_s += self.model.predict_s(load)
        self._advance(chunks, decodes)
        return load.tokens - len(decodes)

    def _able(self) -> Iterator[Prompt]:
        """Prompts that can advance now, while there are seats and memory for those that wait."""
        seats = self.seats - len(self.answers) - sum(p.running for p in self.prompts)
        blocks = self.free_blocks
        for prompt in self.prompts:
            if prompt.advanceable(self.now_s) <= 0:
                continue
            if not prompt.running:
                if seats < 1 or prompt.blocks > blocks:
                    continue
                seats -= 1
                blocks -= prompt.blocks
            yield prompt

    def _chunks(self, able: list[Prompt], spending: Spending) -> Iterator[tuple[Prompt, int]]:
        """As Scheduler._compute_prompts gives them out."""
        behind = sorted((p for p in able[1:] if p.running), key=lambda p: p.last_step)
        spending.keep((id(p), p.depth, p.advanceable(self.now_s)) for p in behind)
        for prompt in able:
            if not prompt.running and spending.spent:
                continue
            length = spending.most(id(prompt), prompt.depth, prompt.advanceable(self.now_s))
            if length:
                spending.spend(id(prompt), prompt.depth, length)
                yield prompt, length

    def _advance(self, chunks: Iterable[tuple[Prompt, int]], decodes: Iterable[Answer]) -> None:
        for answer in decodes:
            answer.context += 1
            answer.left -= 1
            if answer.left <= 0:
                self.free_blocks += answer.blocks
        self.answers = [answer for answer in self.answers if answer.left > 0]
        for prompt, length in chunks:
            if not prompt.running:
                prompt.running = True
                self.free_blocks -= prompt.blocks
            prompt.depth += length
            prompt.last_step = self.step
            if prompt.depth >= prompt.length and prompt.answer > 1:
                # Its first token is sampled with the prompt's last.
                self.answers.append(Answer(prompt.length, prompt.answer - 1, prompt.blocks))
        self.prompts = [p for p in self.prompts if p.depth < p.length]

    def _rest(self, wanted: Prompt, paces: Sequence[tuple[float, int]]) -> float:
        """Seconds for what is left before and of `wanted`, at the pace of the last steps."""
        ahead = self.prompts[: self.prompts.index(wanted) + 1]
        left = sum(p.length - p.depth for p in ahead)
        seconds, tokens = sum(s for s, _ in paces), sum(n for _, n in paces)
        if tokens:
            return left * seconds / tokens
        return self.model.prefill_s(wanted.depth, wanted.length, self.budget.max_num_batched_tokens)


class Images(Protocol):
    """What is known of images on their way (images.py)."""

    def ready_in_s(
        self, line: Iterable[Progress], candidate: Progress, media: Sequence[MediaItem]
    ) -> dict[bytes, float]:
        """Seconds until each image that somebody waits for is ready: those of `line` in its order,
        then the candidate's, which are `media`. Images that are ready, or whose tokens have KV, are
        left out."""
        ...


class Outlook:
    """The queue of one engine, seen from a request that is not in it."""

    def __init__(
        self,
        scheduler: Scheduler,
        images: Images | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`: the scheduler's."""
        self._scheduler = scheduler
        self._clock = clock
        self._images = images

    def of(
        self,
        sequence: Progress,
        media: Sequence[MediaItem] = (),
        before: Sequence[Progress] = (),
        *,
        computing: tuple[StepPlan, float] | None = None,
        most_steps: int = _MOST_STEPS,
    ) -> Estimate:
        """What a sequence that has not been added can expect, after those `before` it, which have
        not either. They have been looked up in the cache afterwards, and hold nothing.
        `computing`: the step under way, and the time.perf_counter() at which it began."""
        scheduler = self._scheduler
        for waiting in (*scheduler.waiting, *before, sequence):
            scheduler.look_up(waiting)
        estimator = scheduler.budget.estimator
        if estimator is None:
            raise AssertionError("this engine does not learn how long its steps take")
        model = estimator.model
        line = list(scheduler.in_order())
        ready = self._ready(line, sequence, media)
        order = self._order((*before, sequence))
        ends = {} if computing is None else {c.sequence.seq_id: c.end for c in computing[0].chunks}
        running = {s.seq_id for s in scheduler.running}
        prompts = {
            s.seq_id: self._prompt(
                s, ready, ends.get(s.seq_id, s.num_computed_tokens), s.seq_id in running
            )
            for s in order
        }
        mine = prompts[sequence.seq_id]
        walk = Walk(
            scheduler.budget,
            model,
            [prompts[s.seq_id] for s in order if s is sequence or _left(prompts[s.seq_id])],
            list(self._answers(ends)),
            scheduler.max_num_seqs,
            scheduler.kv.num_available,
        )
        if computing is not None:
            plan, began_s = computing
            load = StepLoad.of((c.start, c.length) for c in plan.chunks)
            walk.now_s = max(0.0, model.predict_s(load) - (time.perf_counter() - began_s))
        ahead = sum(_left(p) for p in walk.prompts[: walk.prompts.index(mine)])
        done_s = walk.until_done(mine, most_steps)
        request, now_s = sequence.request, self._clock()
        since_s = now_s - (request.arrival_s or now_s)
        return Estimate(
            prompt_tokens=request.num_prompt_tokens,
            cached_tokens=sequence.num_cached_tokens,
            image_tokens=sum(span.length for span in request.image_spans),
            ttft_s=since_s + done_s,
            queue_s=since_s + walk.started_s.get(id(mine), done_s),
            isolated_s=self._isolated_s(sequence, media, model),
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(before),
            ahead_tokens=ahead,
            calibrated=estimator.num_observed >= _CALIBRATED_STEPS,
        )

    def _ready(
        self, line: Iterable[Progress], sequence: Progress, media: Sequence[MediaItem]
    ) -> dict[bytes, float]:
        return {} if self._images is None else self._images.ready_in_s(line, sequence, media)

    def _order(self, added: Sequence[Progress]) -> list[Progress]:
        """Prompts in the order of service, as the next step would see them. Running ones that wait
        for an image or a copy are among them."""
        scheduler = self._scheduler
        now_s = self._clock()
        for sequence in added:
            scheduler.policy.admit(sequence, now_s)
        running = [s for s in scheduler.running if s.remaining > 1]
        return scheduler.policy.order((*running, *scheduler.waiting, *added), now_s, 1)

    def _prompt(
        self, sequence: Progress, ready: dict[bytes, float], depth: int, running: bool
    ) -> Prompt:
        scheduler = self._scheduler
        need = scheduler.kv.blocks_for(sequence.num_tokens + 1)
        most = sequence.request.sampling.max_tokens - sequence.num_output_tokens
        return Prompt(
            depth,
            sequence.num_tokens,
            self._waits(sequence, ready, depth),
            running,
            min(need, scheduler.kv.pool.num_blocks),
            max(1, scheduler.forecast.remaining(sequence.num_output_tokens, most)),
            sequence.last_step,
        )

    def _waits(
        self, sequence: Progress, ready: dict[bytes, float], depth: int
    ) -> tuple[tuple[float, int], ...]:
        """See Prompt.ready: for images, and for KV that is brought from a lower tier first."""
        load_s = self._scheduler.kv.load_s(sequence.seq_id)
        steps = _readiness(sequence, ready, depth)
        if not load_s:
            return steps
        if not steps:
            return ((0.0, depth), (load_s, sequence.num_tokens))
        return ((0.0, depth), *((max(at_s, load_s), token) for at_s, token in steps))

    def _answers(self, ends: dict[int, int]) -> Iterator[Answer]:
        scheduler = self._scheduler
        for sequence in scheduler.running:
            computed = ends.get(sequence.seq_id, sequence.num_computed_tokens)
            # The step under way gives a sequence whose last token it computes one more.
            sampled = computed == sequence.num_tokens
            if not sampled and sequence.num_tokens - computed > 1:
                continue
            produced = sequence.num_output_tokens
            most = sequence.request.sampling.max_tokens - produced
            yield Answer(
                computed,
                max(1, scheduler.forecast.remaining(produced, most)),
                scheduler.kv.held_blocks(sequence.seq_id),
            )

    def _isolated_s(
        self, sequence: Progress, media: Sequence[MediaItem], model: StepTimeModel
    ) -> float:
        """On an engine that has nothing else to do, with what the cache has now."""
        budget = self._scheduler.budget
        ready = self._ready((), sequence, media)
        depth = sequence.num_computed_tokens
        alone = Prompt(depth, sequence.num_tokens, self._waits(sequence, ready, depth))
        if not alone.ready:
            return model.prefill_s(depth, alone.length, budget.max_num_batched_tokens)
        walk = Walk(budget, model, [alone], [], 1, 1)
        return walk.until_done(alone)


def too_late(request: Request, estimate: Estimate) -> RequestError | None:
    """The refusal of a request whose promise cannot be met, where it wants to be refused then."""
    if not request.must_meet_ttft or request.ttft_s is None or estimate.ttft_s <= request.ttft_s:
        return None
    expected, wanted = round(estimate.ttft_s * 1e3), round(request.ttft_s * 1e3)
    alone = round(estimate.isolated_s * 1e3)
    why = f"{estimate.running} requests run and {estimate.waiting} wait"
    if estimate.isolated_s > request.ttft_s:
        why = f"the prompt takes {alone} ms even on an idle server"
    return RequestError(
        "late",
        f"The first token is expected after {expected} ms, and {wanted} ms were asked for: {why}.",
        "x-ttft-deadline-ms",
        retry_after_s=estimate.ttft_s - request.ttft_s,
    )


def _left(prompt: Prompt) -> int:
    return prompt.length - prompt.depth


def _readiness(
    sequence: Progress, ready: dict[bytes, float], depth: int
) -> tuple[tuple[float, int], ...]:
    """How far the sequence may go from when on, from its images' times."""
    waits = [s for s in sequence.request.image_spans if s.end > depth and s.key in ready]
    if not waits:
        return ()
    steps = []
    at_s = 0.0
    for span in waits:
        steps.append((at_s, max(span.offset, depth)))
        at_s = max(at_s, ready[span.key])
    return (*steps, (at_s, sequence.num_tokens))
