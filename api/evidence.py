"""`return_evidence`: which parts of a prompt an answer looked at, as a client gets it.

Owns: what an interval shows, and EvidenceReport - the evidence of one HTTP request while its events
arrive, and its JSON. Does not own: how attention is recorded (lm_engine/evidence.py), the neutral
question (neutral.py), the fields' types (schemas.py), or when a report is sent.

A position draws attention for what it is (a heading, a name, the end of a line) whatever is asked,
so a mass says little alone. The baseline is the same prompt with its question replaced by a neutral
one; its KV up to the question is the prompt's own and comes from the prefix cache. Both prompts are
equal up to the question, and intervals up to there are compared. Where no interval ends before the
question, as in a text of one paragraph, there is nothing to compare and no baseline; the report's
`note` then names the field that helps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from api.errors import BadRequestError
from api.neutral import NEUTRAL_QUESTION, Asked, options
from api.prompt import Prompt
from api.tokenizer import TextTokenizer
from chunked_prefill.request import EvidenceParams, ImageSpan, Request, SamplingParams
from lm_engine.outputs import Evidence, RequestOutput, Usage

JSON = dict[str, Any]

BASELINE_TOKENS = 16
"""Most tokens of the answer to the neutral question, whose rows the baseline is the mean of."""
_DIGITS = 6
_NOTHING_COMMON = (
    "No interval lies before the question, which is taken to be the last paragraph, so there is "
    "nothing to compare with: name the question in return_evidence.question, or ask for shorter "
    "intervals in return_evidence.interval."
)


def evidence_params(asked: Asked, num_layers: int) -> EvidenceParams | None:
    """Raises BadRequestError for a layer that the model lacks."""
    chosen = options(asked)
    if chosen is None:
        return None
    layers = tuple(sorted(set(chosen.layers or ())))
    if layers and not 0 <= layers[0] <= layers[-1] < num_layers:
        raise BadRequestError(
            f"This model has layers 0 to {num_layers - 1}; return_evidence.layers names "
            f"{layers[0] if layers[0] < 0 else layers[-1]}.",
            param="return_evidence.layers",
        )
    return EvidenceParams(layers, chosen.interval, chosen.sinks)


# -- what an interval shows -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Interval:
    """Prompt tokens [start, end)."""

    start: int
    end: int
    text: str
    """Detokenised; an image's tokens as "[image 0]"."""
    images: tuple[int, ...]
    """Which of the prompt's images it meets, counted from 0 in the order of the prompt."""


def intervals(prompt: Prompt, tokenizer: TextTokenizer, length: int) -> tuple[Interval, ...]:
    """All of the prompt. A character that an interval's border cuts is in neither text."""
    places = _image_places(prompt.spans)
    total = len(prompt.token_ids)
    return tuple(
        _interval(prompt, tokenizer, places, start, min(start + length, total))
        for start in range(0, total, length)
    )


def _image_places(spans: Sequence[ImageSpan]) -> list[tuple[ImageSpan, int]]:
    """Each span with the number of its image: a new one begins with its first row."""
    places: list[tuple[ImageSpan, int]] = []
    image = -1
    for span in spans:
        image += span.row_offset == 0
        places.append((span, image))
    return places


def _interval(
    prompt: Prompt,
    tokenizer: TextTokenizer,
    places: list[tuple[ImageSpan, int]],
    start: int,
    end: int,
) -> Interval:
    texts: list[str] = []
    images: list[int] = []
    at = start
    for span, image in places:
        low, high = max(start, span.offset), min(end, span.end)
        if low < high:
            texts.append(_decoded(prompt, tokenizer, at, low))
            if image not in images:
                texts.append(f"[image {image}]")
                images.append(image)
            at = high
    texts.append(_decoded(prompt, tokenizer, at, end))
    return Interval(start, end, "".join(texts), tuple(images))


def _decoded(prompt: Prompt, tokenizer: TextTokenizer, start: int, end: int) -> str:
    if start == end:
        return ""
    return tokenizer.decode(list(prompt.token_ids[start:end])).strip("\ufffd")


# -- the report -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Described:
    """One prompt of a request, its intervals, and the prompt that it is compared with."""

    intervals: tuple[Interval, ...]
    baseline: Prompt | None
    note: str | None
    """Why there is no baseline, where the client can change that."""
    common_tokens: int
    """Tokens that the prompt and its baseline begin with alike."""
    baseline_tokens: int
    """Most tokens of the baseline's answer."""


def _describe(
    prompt: Prompt,
    baseline: Prompt | None,
    tokenizer: TextTokenizer,
    length: int,
    max_model_len: int,
) -> Described:
    common = tokens = 0
    if baseline is not None:
        pairs = zip(prompt.token_ids, baseline.token_ids, strict=False)
        unlike = (place for place, (a, b) in enumerate(pairs) if a != b)
        common = next(unlike, min(len(prompt.token_ids), len(baseline.token_ids)))
        tokens = min(BASELINE_TOKENS, max_model_len - len(baseline.token_ids))
    shown = intervals(prompt, tokenizer, length)
    note = None
    if baseline is not None and all(one.end > common for one in shown):
        baseline, note = None, _NOTHING_COMMON
    return Described(shown, baseline, note, common, tokens)


@dataclass
class EvidenceReport:
    """Evidence of the choices of one HTTP request, `n` for each prompt."""

    params: EvidenceParams
    n: int
    prompts: tuple[Described, ...]
    _planned: dict[int, Request] = field(default_factory=dict)
    _choices: dict[int, Evidence] = field(default_factory=dict)
    _baselines: dict[int, Evidence] = field(default_factory=dict)
    _usages: dict[int, Usage] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        params: EvidenceParams,
        n: int,
        prompts: Sequence[Prompt],
        baselines: Sequence[Prompt | None],
        tokenizer: TextTokenizer,
        *,
        max_model_len: int,
        required: bool,
    ) -> EvidenceReport:
        """CPU work: some 25 µs per interval. `baselines` is empty, or has an entry per prompt; one
        that the context has no room for is left out.

        Raises BadRequestError when a baseline is `required` and there is none.
        """
        described = []
        for prompt, baseline in zip(prompts, baselines or [None] * len(prompts), strict=True):
            if baseline is not None and len(baseline.token_ids) >= max_model_len:
                baseline = None
            if baseline is None and required:
                raise BadRequestError(
                    "A baseline needs a question that a neutral one can replace: the text of a "
                    "user message or of the prompt, with room for the other in the context. Leave "
                    "return_evidence.baseline out.",
                    param="return_evidence.baseline",
                )
            one = _describe(prompt, baseline, tokenizer, params.interval, max_model_len)
            if one.note is not None and required:
                raise BadRequestError(one.note, param="return_evidence.baseline")
            described.append(one)
        return cls(params, n, tuple(described))

    def plan_baselines(self, requests: Sequence[Request]) -> None:
        """`requests` are those of the prompts."""
        for place in self._places():
            prompt, tokens = self.prompts[place].baseline, self.prompts[place].baseline_tokens
            assert prompt is not None
            self._planned[place] = replace(
                requests[place],
                request_id=f"{requests[place].request_id}-baseline",
                token_ids=prompt.token_ids,
                sampling=SamplingParams(tokens, temperature=0.0, evidence=self.params),
                image_spans=prompt.spans,
                positions=prompt.positions,
                position_delta=prompt.position_delta,
            )

    def next_baseline(self, place: int) -> Request | None:
        """The neutral question of a prompt, once; None when it has none."""
        return self._planned.pop(place, None)

    def _places(self) -> list[int]:
        return [i for i, one in enumerate(self.prompts) if one.baseline is not None]

    def add(self, choice: int, evidence: Evidence) -> None:
        self._choices[choice] = evidence

    def take_baseline(self, place: int, output: RequestOutput) -> None:
        """An event of a prompt's baseline. Its failure leaves the answer as it is: the report then
        has no baseline."""
        for delta in output.deltas:
            if delta.evidence is not None:
                self._baselines[place] = delta.evidence
        if output.usage is not None:
            self._usages[place] = output.usage

    def json(self) -> JSON:
        """Complete once every request has ended."""
        known = next(iter(self._choices.values()), None)
        return {
            "settings": {
                "layers": list(known.layers if known else self.params.layers),
                "interval": self.params.interval,
                "sinks": self.params.sinks,
                "neutral_question": NEUTRAL_QUESTION if self._places() else None,
            },
            "choices": [self._choice(index) for index in sorted(self._choices)],
        }

    def _choice(self, index: int) -> JSON:
        place = index // self.n
        described, evidence = self.prompts[place], self._choices[index]
        baseline = self._baselines.get(place)
        shares = _shares(evidence)
        usual = None if baseline is None else _shares(baseline)
        entries = []
        for interval, share, number in zip(
            described.intervals, shares, range(len(shares)), strict=True
        ):
            known = usual is not None and interval.end <= described.common_tokens
            before = usual[number] if usual is not None and known else None
            entries.append(
                {
                    "start": interval.start,
                    "end": interval.end,
                    "mass": round(share, _DIGITS),
                    "baseline_mass": None if before is None else round(before, _DIGITS),
                    "lift": None if before is None else round(share - before, _DIGITS),
                    "text": interval.text,
                    "images": list(interval.images),
                }
            )
        return {
            "index": index,
            "tokens": evidence.rows,
            "sink_mass": round(evidence.sink_mass, _DIGITS),
            "answer_mass": round(evidence.answer_mass, _DIGITS),
            "baseline": self._baseline(place),
            **({} if described.note is None else {"note": described.note}),
            "intervals": entries,
        }

    def _baseline(self, place: int) -> JSON | None:
        evidence, usage = self._baselines.get(place), self._usages.get(place)
        if evidence is None or usage is None:
            return None
        return {
            "tokens": evidence.rows,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "common_tokens": self.prompts[place].common_tokens,
        }


def _shares(evidence: Evidence) -> list[float]:
    """Masses renormalised: of the attention on the prompt without its sinks."""
    total = sum(evidence.masses)
    return [mass / total if total else 0.0 for mass in evidence.masses]
