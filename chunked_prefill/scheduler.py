"""Which sequences advance in the next step, and by how much.

Owns: the waiting and running lists, admission to the running list, chunk sizes under the step's
budget, preemption by recompute, and how long vision may work beside a step. Does not own: the plan
itself (step_plan.py), KV while a plan is made (draft.py), what a sequence need not compute
(prefixes.py), tensors, clocks, sampling or rows of images - readiness arrives as a counter on the
sequence. Imports no torch.

Order within a step: decodes, then prompts as the policy wants them, running or waiting. Both kinds
get something in every step (budget.py), and a sequence that cannot advance is skipped rather than
waited for. A sequence loses its KV only to one that ranks before it; of several such, the one whose
KV is cheapest to bring back (victims.py).

A prefix is computed once: a waiting sequence whose next block a running one is about to compute is
held back until that block is in the cache. It waits only for one that ranks before it, runs and
can advance, so nobody waits in a circle; when that one ends, loses its KV or gets stuck, the
waiting one goes on in its place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING

from chunked_prefill.budget import Budget
from chunked_prefill.draft import Draft
from chunked_prefill.forecast import Growth, OutputForecast, peak_blocks
from chunked_prefill.long_prompts import LongPrompts
from chunked_prefill.policy import Fcfs, Policy
from chunked_prefill.prefixes import Leaders, Prefixes
from chunked_prefill.request import Request
from chunked_prefill.sequence import Sequence
from chunked_prefill.spending import Pass, Spending
from chunked_prefill.step_plan import NeverFits, ScheduledChunk, StepPlan
from chunked_prefill.step_time import StepLoad, StepTimeModel
from chunked_prefill.victims import Victims
from chunked_prefill.vision_share import VisionShare
from kv_offload.kv_manager import KVManager
from kv_offload.radix_cache import CacheKey

if TYPE_CHECKING:
    from chunked_prefill.settings import SchedulingSettings

_UNKNOWN_S = 1e-3
"""What decodes are taken to cost where nobody learns it."""
_MAX_BYPASSES = 64
"""How often a waiting sequence that lacks KV is passed over by smaller ones before admission
stops for its sake."""


class Scheduler:
    """What is computed next is for `policy` to say, whose KV stays for `Request.priority` and
    arrival: so whoever came first is certain to end."""

    def __init__(
        self,
        kv: KVManager,
        budget: Budget,
        max_num_seqs: int,
        cache_key: CacheKey | None = None,
        *,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`cache_key`: what all requests' KV depends on; the tenant is each request's own. `clock`:
        seconds, that of `Request.arrival_s`; it is read once per step and once per request."""
        self.kv = kv
        self.budget = budget
        self.max_num_seqs = max_num_seqs
        self._most_seats = max_num_seqs
        """Seats that may be taken: more than `max_num_seqs` after these were lowered."""
        self.policy = policy or Fcfs()
        self.vision = VisionShare()
        """How the vision stage, where there is one, shares the cores."""
        self.long_prompts = LongPrompts(kv)
        self.victims = Victims(kv, self._compute_s)
        self.settings: SchedulingSettings | None = None
        """What it was built from, or was changed to."""
        self.cold_chunk: Callable[[int], int] | None = None
        """Tokens whose compute takes as long as bringing so many cold ones before them to the
        device; None where each step does not bring them."""
        self._clock = clock
        self._prefixes = Prefixes(kv, cache_key or CacheKey())
        self.forecast = OutputForecast()
        self.step = 0
        self.num_preemptions = 0
        self._running: list[Sequence] = []
        self._waiting: list[Sequence] = []
        self._bypasses: dict[int, int] = {}
        self._seeing: dict[int, Sequence] = {}
        """Those with images, by id."""

    # -- membership ---------------------------------------------------------------------------

    @property
    def running(self) -> tuple[Sequence, ...]:
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        return tuple(self._waiting)

    def in_order(self) -> Iterator[Sequence]:
        """Every sequence, the one that is served first first."""
        yield from sorted((*self._running, *self._waiting), key=_rank)

    def never_fits(self, request: Request) -> NeverFits | None:
        """Whether the request's longest possible sequence exceeds the whole pool."""
        need = request.num_prompt_tokens + request.sampling.max_tokens - 1
        have = self.kv.capacity_tokens
        if need > have:
            return NeverFits(need, have, f"shorten the prompt or max_tokens to {have} in all")
        cold, choices = self.kv.cold, request.sampling.n
        if cold is not None and cold.is_large(need + 1):
            prompt = request.num_prompt_tokens
            if not cold.ever_fits(need, prompt, choices):
                wanted = cold.room_tokens(need, prompt, choices)
                remedy = "ask for fewer choices of a context this long, or for shorter ones"
                return NeverFits(wanted, cold.capacity_tokens, remedy)
        return None

    def add(self, sequence: Sequence) -> None:
        self.policy.admit(sequence, self._clock())
        self.long_prompts.arrived(sequence)
        if sequence.request.image_spans:
            self._seeing[sequence.seq_id] = sequence
        self._wait(sequence)

    def _wait(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)
        self._waiting.sort(key=_rank)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Adds `child` as a running sequence that shares the parent's KV."""
        self.kv.fork(parent.seq_id, child.seq_id)
        self._running.append(child)
        self._running.sort(key=_rank)

    def finish(self, sequence: Sequence) -> None:
        """Ends a running sequence whose last step was committed; all its KV can be found."""
        self.forecast.observe(sequence.num_output_tokens)
        self.kv.seal(sequence.seq_id, sequence.cache_ids, sequence.num_computed_tokens)
        self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Ends a sequence, wherever it is, and frees its KV."""
        if sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self._bypasses.pop(sequence.seq_id, None)
        self._seeing.pop(sequence.seq_id, None)
        self.kv.free(sequence.seq_id)

    def look_up(self, sequence: Sequence) -> None:
        """Brings what the cache has of a sequence that does not run up to date; nothing is held.
        One that is not added afterwards is forgotten by `kv.free`."""
        self._prefixes.look_up(sequence)

    def look_up_images(self) -> None:
        """Brings what the cache has of waiting sequences up to date, for whoever provides rows of
        their images."""
        for sequence in self._waiting:
            if sequence.request.image_spans:
                self._prefixes.look_up(sequence)

    def take_loaded(self) -> None:
        """Hears of copies between the tiers that ended: sequences whose KV was brought to the
        device go on, from where it reaches."""
        for loaded in self.kv.poll():
            sequence = next(s for s in self._running if s.seq_id == loaded.owner)
            sequence.loading = False
            sequence.found(loaded.tokens)
            self.kv.commit(sequence.seq_id, sequence.cache_ids, loaded.tokens)

    def calibrated(self, model: StepTimeModel, residuals: Collection[float]) -> None:
        """Steps were measured, and take what `model` says times one of the `residuals`."""
        if self.budget.estimator is not None:
            self.budget.estimator.calibrated(model, tuple(residuals))

    def reconfigure(self, settings: SchedulingSettings) -> None:
        """Puts the settings in force; call it between two steps. What was learnt of step times
        stays, and nobody is dropped: if more run than there are seats now, they go on, and nobody
        is admitted until there is a seat. Those without a first token are due as if they had come
        under these settings. Raises SettingsError, and changes nothing, when a request that is here
        wants more choices than there would be seats."""
        settings.check_choices(max((s.request.sampling.n for s in self.in_order()), default=1))
        estimator = self.budget.estimator
        if estimator is None:
            raise AssertionError("this scheduler does not learn how long its steps take")
        self.settings = settings
        self.budget = settings.build_budget(estimator)
        self.policy = settings.build_policy(estimator)
        self.long_prompts.share = settings.long_prompt_share
        self.max_num_seqs = settings.max_num_seqs
        self._most_seats = max(self.max_num_seqs, sum(s.width for s in self._running))
        now_s = self._clock()
        for sequence in self.in_order():
            if not sequence.num_output_tokens:
                self.policy.admit(sequence, now_s)

    # -- one step -----------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Reserves KV and says what to compute. An empty plan means that nothing can advance."""
        self.step += 1
        now_s = self._clock()
        draft = Draft(self.kv)
        self._make_way(draft)
        decodes, prompts = self._divided()
        order = self.policy.order(prompts, now_s, self.step) if prompts else []
        first = self.budget.decodes(len(decodes), any(s.advanceable > 0 for s in order), self.step)
        self.budget.begin({s.request.tpot_s for s in decodes})
        spending = Spending(self.budget, self._passes())
        context = 0
        for sequence in decodes[:first]:
            context += sequence.num_computed_tokens + 1
            if draft.preempted or not draft.try_add(sequence, 1):
                self._place(draft, sequence, 1)
        spending.decodes(first, context)
        answers = spending.load
        vision_s = self._share_with_vision(order, answers, now_s)
        if order:
            self._compute_prompts(draft, order, spending)
        for sequence in decodes[first:]:
            if draft.num_tokens < self.budget.max_num_batched_tokens:
                self._place(draft, sequence, 1)
        if not draft.chunks:
            self._unblock(draft)
        if not draft.chunks:
            vision_s = inf
        elif vision_s <= 0 and not any(_is_rival(chunk) for chunk in draft.chunks):
            # It rested for prompts that got nothing for want of a seat or of KV.
            vision_s = self._share_with_vision([], answers, now_s)
        return StepPlan(
            self.step,
            tuple(draft.chunks),
            tuple(draft.copies),
            tuple(draft.preempted),
            vision_s,
        )

    def commit(self, plan: StepPlan) -> None:
        """The step was computed: its KV is valid. Call before tokens are appended."""
        kv, size, tiers = self.kv, self.kv.block_size, self.kv.cold is not None
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.advance(chunk.length, plan.step)
            end = sequence.num_computed_tokens
            # One token inside a block makes nothing findable.
            if chunk.length > 1 or end % size == 0 or tiers:
                kv.commit(sequence.seq_id, sequence.cache_ids, end)

    def _divided(self) -> tuple[list[Sequence], list[Sequence]]:
        """Sequences that decode, and those with a prompt to compute: running ones with more than
        one token to compute, and all that wait, since what the cache has of those may be more than
        what they know of."""
        decodes: list[Sequence] = []
        prompts: list[Sequence] = []
        for sequence in self._running:
            if sequence.decodes:
                decodes.append(sequence)
            elif sequence.remaining > 1 and sequence.advanceable > 0:
                prompts.append(sequence)
        # Stable, and those that run stand in the order of their rank.
        decodes.sort(key=_last_step)
        prompts += self._waiting
        return decodes, prompts

    def _share_with_vision(self, order: list[Sequence], answers: StepLoad, now_s: float) -> float:
        """How long the vision stage may work beside this step, of which `answers` are the decodes;
        tells the budget what that costs."""
        awaiting = [s for s in self._seeing.values() if s.awaits_image]
        if not awaiting:
            return inf
        seats = self.max_num_seqs - sum(s.width for s in self._running)
        waiting = {s.seq_id for s in self._waiting}
        able = [
            s
            for s in order
            if s.advanceable > 0
            and not s.awaits_image
            and (s.seq_id not in waiting or s.width <= seats)
        ]
        first = self.policy.order([*awaiting, *able], now_s, self.step)[0].awaits_image
        estimator = self.budget.estimator
        answers_s = 0.0
        if answers.tokens:
            answers_s = _UNKNOWN_S if estimator is None else estimator.predict_s(answers)
        vision_s = self.vision.grant_s(
            self.step,
            first=first,
            prompts=bool(able),
            decode_s=answers_s,
            limit_s=self.budget.limit_s,
        )
        if vision_s and self.vision.own_process:
            self.budget.beside(self.vision.slowdown, 0.0)
        elif 0 < vision_s < inf:
            self.budget.beside(1.0, vision_s)
        return vision_s

    def _passes(self) -> dict[int, Pass]:
        """Of running prompts whose cold beginnings are brought to the device in each step."""
        if self.cold_chunk is None:
            return {}
        cold = [(s, self.kv.cold_tokens(s.seq_id)) for s in self._running if not s.decodes]
        return {
            s.seq_id: Pass(self.cold_chunk(tokens), self.step - s.last_step)
            for s, tokens in cold
            if tokens
        }

    def _compute_prompts(self, draft: Draft, order: list[Sequence], spending: Spending) -> None:
        """Chunks of prompts in the given order: of running ones, and of waiting ones for which
        there are seats and memory."""
        running = {s.seq_id for s in self._running}
        behind = [s for s in order[1:] if s.seq_id in running]
        behind.sort(key=lambda s: (s.last_step, _rank(s)))
        spending.keep((s.seq_id, s.num_computed_tokens, s.advanceable) for s in behind)
        leaders = Leaders(self.kv, self._running if self._waiting else ())
        admitting = True
        for sequence in order:
            if sequence.seq_id not in running:
                if admitting and not draft.out_of_memory:
                    admitting = self._admit(draft, sequence, leaders, spending)
                continue
            start = sequence.num_computed_tokens
            length = spending.most(sequence.seq_id, start, sequence.advanceable)
            if length:
                self._place(draft, sequence, length)
                spending.spend(sequence.seq_id, start, length)

    def _place(self, draft: Draft, sequence: Sequence, length: int) -> None:
        """Adds a chunk of a running sequence, taking KV from lower ranks if it must, the cheapest
        to bring back first."""
        if draft.preempted and sequence not in self._running:
            return
        while not draft.try_add(sequence, length):
            draft.out_of_memory = True
            below = [
                s for s in self._running if s.rank > sequence.rank and self.kv.held_blocks(s.seq_id)
            ]
            victim = self.victims.cheapest(below) if below else sequence
            self._preempt(victim, draft)
            if victim is sequence:
                return

    def _preempt(self, victim: Sequence, draft: Draft) -> None:
        draft.drop(victim)
        self._running.remove(victim)
        self.kv.free(victim.seq_id)
        victim.rewind()
        self.num_preemptions += 1
        draft.preempted.append(victim)
        self._wait(victim)

    def _make_way(self, draft: Draft) -> None:
        """A waiting request takes seat and memory from running ones of a lower priority class."""
        if not self._running or not self._waiting:
            return
        lowest = max(s.request.priority for s in self._running)
        above = [s for s in self._waiting if s.request.priority < lowest and s.advanceable > 0]
        for sequence in above:
            below = [s for s in self._running if s.request.priority > sequence.request.priority]
            if not below:
                continue
            self._prefixes.look_up(sequence)
            if not Leaders(self.kv, self._running).hold_back(sequence):
                self._clear(draft, sequence, below)

    def _unblock(self, draft: Draft) -> None:
        """When all that runs waits for images whose rows a waiting sequence of a higher rank may
        hold, and that one waits for their KV, the circle is cut in its favour."""
        first = next((s for s in self._waiting if s.advanceable > 0), None)
        if first is not None and all(_rank(s) > _rank(first) for s in self._running):
            self._prefixes.look_up(first)
            self._clear(draft, first, list(self._running))
            self._compute_prompts(draft, list(self._waiting), Spending(self.budget))

    def _clear(self, draft: Draft, sequence: Sequence, below: list[Sequence]) -> None:
        """Preempts of `below`, the cheapest to bring back first, until `sequence` has seat and
        memory; nobody if it would lack them even then."""
        if not self._fits(sequence, without=below):
            return
        while below and not self._fits(sequence):
            victim = self.victims.cheapest(below)
            below.remove(victim)
            self._preempt(victim, draft)

    def _fits(self, sequence: Sequence, without: Iterable[Sequence] = ()) -> bool:
        """Whether there is a seat and room for the sequence beside the running ones, `without` some
        of them: for what all of them know now, and for the most that they are likely to hold at one
        time later. The only one is never refused: it is promised all that it may become."""
        gone = {s.seq_id for s in without}
        stay = [s for s in self._running if s.seq_id not in gone]
        if sum(s.width for s in stay) + sequence.width > self.max_num_seqs:
            return False
        if not stay:
            return True
        if self.long_prompts.crowds_out(sequence, stay):
            return False
        now = sum(self.kv.lacking_blocks(s.seq_id, s.num_tokens + 1, s.max_tokens) for s in stay)
        peak = peak_blocks([self._growth(s) for s in (*stay, sequence)], self.kv.block_size)
        own = self.kv.lacking_blocks(sequence.seq_id, sequence.num_tokens + 1, sequence.max_tokens)
        return self.kv.can_start(
            sequence.seq_id,
            sequence.num_tokens + 1,
            promised_blocks=max(now, peak - own),
            without=gone,
            reach_tokens=sequence.max_tokens,
            choices=sequence.width,
        )

    def _compute_s(self, start: int, end: int) -> float:
        """What computing tokens [start, end) of a prompt takes alone; tokens where nobody learns
        how long they take."""
        estimator = self.budget.estimator
        if estimator is None:
            return float(end - start)
        return estimator.model.prefill_s(start, end, self.budget.max_num_batched_tokens)

    def _growth(self, sequence: Sequence) -> Growth:
        left = sequence.max_tokens - sequence.num_tokens
        return Growth(
            sequence.num_tokens,
            self.kv.held_blocks(sequence.seq_id),
            self.forecast.remaining(sequence.num_output_tokens, max(1, left)),
            sequence.width,
            self.kv.device_bound(sequence.max_tokens),
        )

    def _has_seat(self, sequence: Sequence) -> bool:
        return sum(s.width for s in self._running) + sequence.width <= self.max_num_seqs

    def _admit(
        self, draft: Draft, sequence: Sequence, leaders: Leaders, spending: Spending
    ) -> bool:
        """Lets the waiting sequence run, if there is room for it; whether those after it may be
        asked as well."""
        if spending.spent:
            return False
        # What a victim's counters say of its images holds only until it lost its KV. Of the others,
        # a long line of followers is not looked up again in each step.
        if sequence in draft.preempted or leaders.hold_back(sequence):
            return True
        self._prefixes.look_up(sequence)
        if sequence.advanceable <= 0 or leaders.hold_back(sequence):
            return True
        if not self._has_seat(sequence):
            return False
        if self.long_prompts.crowds_out(sequence, self._running):
            return True
        loads, start = self.kv.wants_load(sequence.seq_id), sequence.num_computed_tokens
        # What has to be brought to the device first is computed in a later step.
        most = spending.most(sequence.seq_id, start, sequence.advanceable)
        length = 0 if loads else most
        if not most:
            return True
        if not self._fits(sequence) or not draft.try_add(sequence, length):
            bypasses = self._bypasses.get(sequence.seq_id, 0) + 1
            self._bypasses[sequence.seq_id] = bypasses
            return bypasses <= _MAX_BYPASSES
        if length:
            spending.spend(sequence.seq_id, start, length)
        self._bypasses.pop(sequence.seq_id, None)
        self._waiting.remove(sequence)
        self._running.append(sequence)
        self._running.sort(key=_rank)
        sequence.loading = loads
        leaders.add(sequence)
        return True

    def check_invariants(self) -> None:
        self.kv.check_invariants()
        if set(self._running) & set(self._waiting):
            raise AssertionError("a sequence both runs and waits")
        if sum(s.width for s in self._running) > self._most_seats:
            raise AssertionError("more sequences run than max_num_seqs")
        for sequence in self._waiting:
            if self.kv.held_blocks(sequence.seq_id):
                raise AssertionError(f"{sequence} waits but holds KV")
            if sequence.num_computed_tokens != sequence.num_cached_tokens:
                raise AssertionError(f"{sequence} waits but has computed something")
        for sequence in self._running:
            have = self.kv.held_tokens(sequence.seq_id)
            if have < sequence.num_computed_tokens and not sequence.loading:
                raise AssertionError(f"{sequence} has KV for {have} tokens only")
            if sequence.num_computed_tokens < sequence.num_cached_tokens:
                raise AssertionError(f"{sequence} found more than it has")


def _is_rival(chunk: ScheduledChunk) -> bool:
    """Whether the chunk is of a prompt that has no image to wait for."""
    sequence = chunk.sequence
    return not sequence.awaits_image and sequence.remaining > 1


_rank = attrgetter("rank")
_last_step = attrgetter("last_step")
