"""From logits to the next token of each row.

Owns: penalties, biases, truncation, the draw, and log-probabilities. Does not own: when a sequence
ends (finish.py) or which rows are sampled (batch.py).

A draw depends on (seed, choice, position) alone - one uniform number from a counter-based hash,
used by inverting the cumulative distribution - so a seeded answer is the same in any batch, after
a preemption, and on any number of threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from chunked_prefill.request import SamplingParams
from lm_engine.outputs import TokenLogprob

_TOPK_FIRST = 1024
"""Nucleus sampling sorts this many candidates first, and the vocabulary only if they fall short."""


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What the sampler needs to know about one row of logits."""

    params: SamplingParams
    seed: int
    choice: int
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    banned_ids: tuple[int, ...] = ()
    """Ids that would end the sequence while min_tokens is not reached."""


@dataclass(frozen=True, slots=True)
class Sampled:
    token_id: int
    logprob: TokenLogprob | None


def sample(
    logits: Tensor, rows: list[SamplingRow], token_bytes: Callable[[int], bytes]
) -> list[Sampled]:
    """One token per row.

    logits: [R, V] float32; not modified. Log-probabilities are those of the unmodified logits, the
    ones that the model gives, before temperature and penalties.
    """
    if all(_plain_greedy(row) for row in rows):
        ids = logits.argmax(dim=-1).tolist()
    else:
        ids = [_sample_row(logits[i], row) for i, row in enumerate(rows)]
    wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    reports: dict[int, TokenLogprob] = {}
    if wanted:
        tops = [rows[i].params.logprobs or 0 for i in wanted]
        found = logprobs_of(logits[wanted], [ids[i] for i in wanted], tops, token_bytes)
        reports = dict(zip(wanted, found, strict=True))
    return [Sampled(token_id, reports.get(i)) for i, token_id in enumerate(ids)]


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
    return bool(
        params.logit_bias
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
    )


def _sample_row(logits: Tensor, row: SamplingRow) -> int:
    params = row.params
    if _modifies(params) or row.banned_ids:
        logits = _modified(logits, row)
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
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*row.prompt_ids, *row.output_ids}), device=logits.device)
        values = logits[seen]
        factor = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / factor, values * factor)
    if (params.presence_penalty or params.frequency_penalty) and row.output_ids:
        counts = Counter(row.output_ids)
        ids = torch.tensor(list(counts), device=logits.device)
        times = torch.tensor(list(counts.values()), dtype=logits.dtype, device=logits.device)
        logits[ids] -= params.presence_penalty + params.frequency_penalty * times
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
