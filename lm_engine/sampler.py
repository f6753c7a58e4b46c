"""From logits to the next token of each row.

Owns: penalties, biases, truncation, the draw, log-probabilities, and the verdict that a row cannot
be sampled, which touches no other row. Does not own: when a sequence ends (finish.py), which rows
are sampled (batch.py), or what becomes of a request whose row failed (engine.py).

A draw depends on (seed, choice, position) alone - one uniform number from a counter-based hash,
used by inverting the cumulative distribution - so a seeded answer is the same in any batch, after
a preemption, and on any number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from chunked_prefill.request import SamplingParams
from lm_engine.outputs import TokenLogprob

_TOPK_FIRST = 1024
"""Nucleus sampling sorts this many candidates first, and the vocabulary only if they fall short."""


class History(Sequence[int]):
    """The generated ids of one choice: a view of its token list, and counts that grow with it.

    A choice keeps one History for its life and hands it to every row, so that a token costs the
    same after 100,000 others as after one. `token_ids` (the prompt, then what was generated) is
    shared, not copied, and only ever appended to.
    """

    __slots__ = ("_counted", "_first", "_seen", "_times", "_token_ids")

    def __init__(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        self._token_ids = token_ids
        self._first = num_prompt_tokens
        self._counted = 0
        self._seen: Tensor | None = None
        self._times: Tensor | None = None

    def __len__(self) -> int:
        return len(self._token_ids) - self._first

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            return self._token_ids[self._first :][index]
        place = range(self._first, len(self._token_ids))[index]
        return self._token_ids[place]

    def counts(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """(ids that occur in prompt or output, [V] bool; how often each was generated, [V]), of
        the dtype and device of `like` [V]. Valid until the next call; not to be modified."""
        if self._seen is None or self._times is None:
            self._seen = torch.zeros_like(like, dtype=torch.bool)
            self._times = torch.zeros_like(like)
        assert self._counted <= len(self._token_ids), "tokens were taken back"
        fresh = torch.tensor(self._token_ids[self._counted :], dtype=torch.long, device=like.device)
        generated = fresh[max(0, self._first - self._counted) :]
        self._counted = len(self._token_ids)
        self._seen[fresh] = True
        self._times.index_add_(0, generated, torch.ones_like(generated, dtype=like.dtype))
        return self._seen, self._times


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What the sampler needs to know about one row of logits."""

    params: SamplingParams
    seed: int
    choice: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    """Generated so far. A History is read without a copy; any other sequence is counted anew."""
    banned_ids: tuple[int, ...] = ()
    """Ids that would end the sequence while min_tokens is not reached."""


@dataclass(frozen=True, slots=True)
class Sampled:
    token_id: int
    logprob: TokenLogprob | None


class SamplingError(Exception):
    """A row has no next token: its logits are no numbers, or nothing may follow."""


def sample(
    logits: Tensor, rows: list[SamplingRow], token_bytes: Callable[[int], bytes]
) -> list[Sampled]:
    """`sample_each` for callers that need every row: raises the first row's fault."""
    found = []
    for one in sample_each(logits, rows, token_bytes):
        if isinstance(one, Exception):
            raise one
        found.append(one)
    return found


def sample_each(
    logits: Tensor, rows: list[SamplingRow], token_bytes: Callable[[int], bytes]
) -> list[Sampled | Exception]:
    """One token per row, or what went wrong in that row alone.

    logits: [R, V] float32; not modified. Log-probabilities are those of the unmodified logits, the
    ones that the model gives, before temperature and penalties.
    """
    best, best_ids = logits.max(dim=-1)
    found: list[int | Exception] = []
    for i, (top, token_id) in enumerate(zip(best.tolist(), best_ids.tolist(), strict=True)):
        row = rows[i]
        try:
            if not math.isfinite(top):
                raise SamplingError(f"the largest logit is {top}")
            found.append(token_id if _plain_greedy(row) else _sample_row(logits[i], row))
        except Exception as fault:
            found.append(fault)
    reports = _reports(logits, rows, found, token_bytes)
    return [
        one if isinstance(one, Exception) else Sampled(one, reports.get(i))
        for i, one in enumerate(found)
    ]


def _reports(
    logits: Tensor,
    rows: list[SamplingRow],
    found: list[int | Exception],
    token_bytes: Callable[[int], bytes],
) -> dict[int, TokenLogprob]:
    """Log-probabilities by row, for sound rows that ask for them."""
    ids = {
        i: one
        for i, one in enumerate(found)
        if not isinstance(one, Exception) and rows[i].params.logprobs is not None
    }
    if not ids:
        return {}
    tops = [rows[i].params.logprobs or 0 for i in ids]
    reports = logprobs_of(logits[list(ids)], list(ids.values()), tops, token_bytes)
    return dict(zip(ids, reports, strict=True))


def logprobs_of(
    logits: Tensor, token_ids: list[int], tops: list[int], token_bytes: Callable[[int], bytes]
) -> list[TokenLogprob]:
    """Log-probability of `token_ids[i]` under `logits[i]`, with the `tops[i]` best alternatives.

    logits: [R, V] float32.
    """
    logprobs = logits.log_softmax(dim=-1)
    chosen = torch.tensor(token_ids, device=logits.device)
    own = logprobs.gather(1, chosen[:, None])
    ranks = (logprobs > own).sum(dim=-1).add_(1).tolist()
    own_list = own[:, 0].tolist()
    best_values, best_ids = logprobs.topk(max(1, *tops), dim=-1)
    values, ids = best_values.tolist(), best_ids.tolist()
    return [
        TokenLogprob(
            token_ids[i],
            token_bytes(token_ids[i]),
            own_list[i],
            ranks[i],
            tuple((ids[i][j], token_bytes(ids[i][j]), values[i][j]) for j in range(tops[i])),
        )
        for i in range(len(token_ids))
    ]


def _plain_greedy(row: SamplingRow) -> bool:
    return row.params.greedy and not row.banned_ids and not _modifies(row.params)


def _modifies(params: SamplingParams) -> bool:
    return bool(params.logit_bias or _counts(params))


def _counts(params: SamplingParams) -> bool:
    """Whether earlier tokens matter."""
    return bool(
        params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
    )


def _sample_row(logits: Tensor, row: SamplingRow) -> int:
    params = row.params
    if _modifies(params) or row.banned_ids:
        logits = _modified(logits, row)
        if not math.isfinite(top := float(logits.max())):
            raise SamplingError(f"the largest logit after penalties and bans is {top}")
    if params.greedy:
        return int(logits.argmax())
    position = len(row.output_ids)
    return _draw(logits, params, uniform(row.seed, row.choice, position))


def _modified(logits: Tensor, row: SamplingRow) -> Tensor:
    """Repetition penalty over prompt and output (Keskar et al. 2019, arXiv:1909.05858), then
    presence and frequency penalties over the output as OpenAI defines them, then biases, then
    bans."""
    params = row.params
    logits = logits.clone()
    if _counts(params):
        history = row.output_ids
        if not isinstance(history, History):
            history = History([*row.prompt_ids, *row.output_ids], len(row.prompt_ids))
        seen, times = history.counts(logits)
        if (factor := params.repetition_penalty) != 1.0:
            penalised = torch.where(logits > 0, logits / factor, logits * factor)
            logits = torch.where(seen, penalised, logits)
        logits -= params.presence_penalty * (times > 0) + params.frequency_penalty * times
    for token_id, bias in params.logit_bias:
        logits[token_id] += bias
    if row.banned_ids:
        logits[list(row.banned_ids)] = float("-inf")
    return logits


def _draw(logits: Tensor, params: SamplingParams, u: float) -> int:
    scaled = (logits.double() / params.temperature).float()
    scaled -= scaled.max()
    if params.top_p >= 1.0 and params.min_p <= 0.0 and params.top_k <= 0:
        return _invert(scaled.softmax(dim=-1), u)
    values, ids = _candidates(scaled, params)
    probs = values.softmax(dim=-1)
    keep = torch.ones_like(probs, dtype=torch.bool)
    if params.top_p < 1.0:
        keep &= probs.cumsum(-1) - probs < params.top_p
    if params.min_p > 0.0:
        keep &= probs >= params.min_p * probs[0]
    keep[0] = True
    return int(ids[_invert(torch.where(keep, probs, 0.0), u)])


def _candidates(scaled: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Logits and ids, best first, of a set that contains everything that truncation keeps."""
    vocab = scaled.shape[-1]
    if 0 < params.top_k < vocab:
        return scaled.topk(params.top_k)
    if params.min_p <= 0.0 and vocab > _TOPK_FIRST:
        values, ids = scaled.topk(_TOPK_FIRST)
        weights = scaled.exp().sum()
        kept = values.exp().sum()
        if params.top_p < float(kept / weights):
            # The rest of the vocabulary becomes one last candidate, so that probabilities stay
            # those of the whole; top_p cuts it off.
            rest = (weights - kept).clamp_min(1e-30).log()[None]
            return torch.cat((values, rest)), torch.cat((ids, ids[-1:]))
    return scaled.sort(descending=True)


def _invert(weights: Tensor, u: float) -> int:
    """The index at which the normalised cumulative sum of `weights` first exceeds `u`."""
    cumulative = weights.double().cumsum(-1)
    index = int(torch.searchsorted(cumulative, u * float(cumulative[-1]), right=True))
    last = int(weights.nonzero()[-1])
    return min(index, last)


_MASK = (1 << 64) - 1


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) from a counter: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) applied
    to the three values in turn."""
    state = 0
    for value in (seed, choice, position):
        state = _mix((state ^ (value & _MASK)) + 0x9E3779B97F4A7C15 & _MASK)
    return (state >> 11) / (1 << 53)


def _mix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)
