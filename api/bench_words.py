"""Prompts of an exact number of tokens, made of words, and pictures of an exact size.

Owns: Vocabulary (words by how many tokens they take on the server that is measured, learnt by
counting) and PromptMaker (a trace's request to the text and images of a prompt). Does not own: how
tokens are counted (bench_target.py), or the bodies that are sent (bench_load.py).

Equal blocks of a trace become equal words; everything else differs between requests, and between
runs unless the run's salt is the same, so that a prefix cache finds what the trace shares and no
more.
"""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any

from chunked_prefill.trace import TraceRequest

Count = Callable[[str], Awaitable[int]]
"""Tokens of a whole prompt with this text, template and all."""

OPENING = "Text:"
"""Every prompt begins with it, so that each word after it stands behind a space."""

_WORD_LIST = """
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work government number
night point home water room mother area money story fact month lot right study book eye job word
business issue side kind head house service friend father power hour game line end member law car
city community name president team minute idea body information back parent face others level
office door health person art war history party result change morning reason research girl guy
moment air teacher force education foot boy age policy music market sense nation plan college
interest death experience effect use class control field development role effort rate heart drug
show leader light voice wife police mind price report decision son view relationship town road
arm difference value building action season society tax director position player record paper
space ground form event official matter center couple site project activity star table need court
produce oil half cost industry figure street image phone data picture practice piece land product
doctor wall patient worker news test movie north love support technology step baby computer type
attention film tree source truth south east west letter language model energy summer winter
spring stone river island bridge garden window paint horse bird fish green blue red black white
brown gold silver iron wood glass cloud storm snow rain wind fire earth moon sun sea lake hill
valley forest desert beach coast ocean
"""
WORDS = tuple(_WORD_LIST.split())
_GROUP = 16
_ENOUGH = 64
"""Words of one token that make texts varied enough; words of other costs are then left out."""
_MEASURED_GROUPS = 3


class WordsError(Exception):
    """Texts of a wanted length cannot be made for this server."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    base_tokens: int
    """Of a prompt without words: the template's own and the opening's."""
    words: tuple[str, ...]
    costs: tuple[int, ...]
    """Tokens of each word, behind a space."""

    @property
    def uniform(self) -> bool:
        return set(self.costs) == {1}

    def fill(self, rng: Random, tokens: int) -> list[str]:
        """Words of so many tokens together; fewer by the least possible where the costs cannot add
        up to it."""
        if self.uniform:
            return rng.choices(self.words, k=max(0, tokens))
        return self._filled(rng, tokens)

    def _filled(self, rng: Random, tokens: int) -> list[str]:
        pairs = list(zip(self.words, self.costs, strict=True))
        largest = max(self.costs)
        found: list[str] = []
        left = tokens
        while left >= 2 * largest:
            word, cost = rng.choice(pairs)
            found.append(word)
            left -= cost
        # How the rest is made up of costs: the last cost of each sum that can be reached.
        last: dict[int, int] = {0: 0}
        for total in range(1, left + 1):
            for cost in sorted(set(self.costs)):
                if total - cost in last:
                    last[total] = cost
                    break
        total = max(last)
        while total:
            found.append(rng.choice([word for word, cost in pairs if cost == last[total]]))
            total -= last[total]
        return found

    def tokens(self, words: Iterable[str]) -> int:
        costs = dict(zip(self.words, self.costs, strict=True))
        return sum(costs[word] for word in words)


async def learn(count: Count) -> Vocabulary:
    """Which words take one token on the server, by counting groups of them; what single words take
    where too few do. Between 2 and about 70 counts. Raises WordsError."""
    base = await count(OPENING)

    async def cost(words: Sequence[str]) -> int:
        return await count(text_of(words)) - base

    if await cost(WORDS) == len(WORDS):
        return Vocabulary(base, tuple(WORDS), (1,) * len(WORDS))
    groups = [WORDS[at : at + _GROUP] for at in range(0, len(WORDS), _GROUP)]
    totals = await asyncio.gather(*map(cost, groups))
    known = list(zip(groups, totals, strict=True))
    single = [word for group, total in known if total == len(group) for word in group]
    if len(single) >= _ENOUGH:
        return Vocabulary(base, tuple(single), (1,) * len(single))
    mixed = [group for group, total in known if total != len(group)]
    measured = [word for group in mixed[:_MEASURED_GROUPS] for word in group]
    costs = [1] * len(single) + await asyncio.gather(*(cost([word]) for word in measured))
    if min(costs) < 1:
        raise WordsError(
            f"the server counts {min(costs)} tokens for one more word; prompts of a wanted length "
            "cannot be made"
        )
    return Vocabulary(base, (*single, *measured), tuple(costs))


def text_of(words: Sequence[str]) -> str:
    return " ".join((OPENING, *words))


@dataclass(frozen=True, slots=True)
class MadePrompt:
    content: str | list[dict[str, Any]]
    """A text, or content parts as /v1/chat/completions takes them."""
    text_tokens: int
    """What the prompt should take without its images."""


class PromptMaker:
    """The words and pictures of a trace's requests. `salt` decides all of them."""

    def __init__(self, vocabulary: Vocabulary, salt: str) -> None:
        self.vocabulary = vocabulary
        self._salt = salt
        self._block = lru_cache(maxsize=4096)(self._new_block)

    def make(self, request: TraceRequest, number: int) -> MadePrompt:
        """`number`: the request's place in the trace. CPU work: some ms for a long prompt."""
        wanted = max(0, request.prompt_tokens - self.vocabulary.base_tokens)
        shared = self._shared(request, wanted)
        left = wanted - self.vocabulary.tokens(shared)
        own = self.vocabulary.fill(Random(f"{self._salt} own {number}"), left)
        tokens = wanted - left + self.vocabulary.tokens(own) + self.vocabulary.base_tokens
        if not request.images:
            return MadePrompt(text_of([*shared, *own]), tokens)
        images = [
            {"type": "image_url", "image_url": {"url": picture(rng, *size)}}
            for rng, size in (
                (Random(f"{self._salt} image {number} {place}"), size)
                for place, size in enumerate(request.images)
            )
        ]
        # What is shared comes before what is the request's own.
        before = [_text(text_of(shared))] if shared else []
        after = _text(" ".join(own) or "go") if shared else _text(text_of(own))
        return MadePrompt([*before, *images, after], tokens)

    def _shared(self, request: TraceRequest, wanted: int) -> list[str]:
        """Words of the blocks that other requests may have as well, cut at `wanted` tokens."""
        if request.token_ids:
            # Equal ids become equal words: what a prefix cache finds does not depend on which.
            words = self.vocabulary.words
            mixed = Random(f"{self._salt} ids").getrandbits(32)
            ids = (((t ^ mixed) * 2654435761 >> 7) % len(words) for t in request.token_ids)
            return self._cut((words[i] for i in ids), wanted)
        words_of = (w for h in request.hash_ids for w in self._block(h, request.block_tokens))
        return self._cut(words_of, wanted)

    def _cut(self, words: Iterable[str], tokens: int) -> list[str]:
        costs = dict(zip(self.vocabulary.words, self.vocabulary.costs, strict=True))
        kept: list[str] = []
        for word in words:
            tokens -= costs[word]
            if tokens < 0:
                break
            kept.append(word)
        return kept

    def _new_block(self, block: int, tokens: int) -> list[str]:
        return self.vocabulary.fill(Random(f"{self._salt} block {block}"), tokens)


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def picture(rng: Random, width: int, height: int) -> str:
    """A data URI of a JPEG of soft shapes that no other seed gives."""
    from PIL import Image

    small = Image.frombytes("RGB", (12, 12), rng.randbytes(12 * 12 * 3))
    file = io.BytesIO()
    small.resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
