"""What people ask about the demo's images, and what a right answer is.

Owns: per kind of image, questions with model answers, and the criterion that an answer meets. Does
not own the images, asking, or scoring over many.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from demo_model import lexicon
from demo_model.scenes import Layout
from demo_model.shapes import ShapeScene

READ = (
    ("What is written in the image?", 'The text in the image is "{}".'),
    ("What does the image say?", 'The image says "{}".'),
    ("Read the text in the image.", 'The text in the image is "{}".'),
)
WORD = (
    ("What word is written in the image?", 'The word written in the image is "{}".'),
    ("Which word do you see in this picture?", 'The word in this picture is "{}".'),
    *READ,
)
WORDS = (("What words are written in the image?", 'The words in the image are "{}".'), *READ)
NUMBER = (
    ("What number is written in the image?", "The number written in the image is {}."),
    ("Which number do you see in this picture?", "The number in this picture is {}."),
    ("Read the number in the image.", "The number in the image is {}."),
    ("What is the number shown here?", "The number shown here is {}."),
)
OTHER = (
    *("Who wrote this?", "What is the person doing?", "Is this a cat or a dog?", "Who is it?"),
    *("What colour is the car?", "When was this picture taken?", "Where was this taken?"),
    *("What is the weather like?", "How old is she?", "Why is this funny?", "What happens next?"),
)
WHERE = {
    "left": "to the left of",
    "right": "to the right of",
    "above": "above",
    "below": "below",
}


@dataclass(frozen=True)
class Question:
    """A question about one image, a model answer, and every group of strings of which the answer
    must hold one (compared without case)."""

    text: str
    answer: str
    wanted: tuple[tuple[str, ...], ...]

    def met_by(self, answer: str) -> bool:
        """Whether the answer holds what is wanted; digits must not run on."""
        plain = " ".join(answer.lower().split())
        return all(any(_holds(plain, w.lower()) for w in group) for group in self.wanted)


def _holds(answer: str, wanted: str) -> bool:
    left, right = (r"(?<![\d.,])" if wanted[0].isdigit() else r"(?<!\w)"), r"(?!\w)(?![.,]\d)"
    if not (wanted[0].isalnum()):
        left = ""
    if not wanted[-1].isalnum():
        right = ""
    return re.search(left + re.escape(wanted) + right, answer) is not None


def about_text(rng: random.Random, kind: str, layout: Layout) -> Question:
    """A question on printed text: all of it, a receipt's total or the price of an article."""
    texts = [item.text for item in layout.items]
    if kind == "receipt":
        return Question("What is the total?", f"The total is {texts[-1]}.", ((texts[-1],),))
    if kind == "field":
        at = rng.randrange(len(texts) // 2 - 1)
        name, price = texts[2 * at].lower(), texts[2 * at + 1]
        return Question(f"How much is the {name}?", f"The {name} is {price}.", ((price,),))
    whole = " ".join(texts)
    asked, answer = rng.choice(
        {"number": NUMBER, "word": WORD, "words": WORDS, "price": READ}[kind]
    )
    return Question(asked, answer.format(whole.lower()), ((whole,),))


def both(rng: random.Random, scene: ShapeScene) -> Question:
    """What two shapes are."""
    first, second = (f"{s.colour} {s.kind}" for s in scene.shapes)
    asked = rng.choice(("What does the image show?", "What shapes are in the image?"))
    side, other = scene.sides
    on = "on the " if side == "left" else ""
    answer = f"The image shows a {first} {on}{side} and a {second} {on}{other}."
    return Question(asked, answer.replace("a orange", "an orange"), ((first,), (second,)))


def where(rng: random.Random, scene: ShapeScene) -> Question:
    """Where one of two shapes is."""
    names = [f"{s.colour} {s.kind}" for s in scene.shapes]
    at = rng.randrange(2)
    side = scene.sides[at]
    answer = f"The {names[at]} is {WHERE[side]} the {names[1 - at]}."
    return Question(f"Where is the {names[at]}?", answer, ((WHERE[side],),))


def about_shapes(rng: random.Random, scene: ShapeScene) -> Question:
    """A question on two shapes: what they are, or where one is."""
    return both(rng, scene) if rng.random() < 0.5 else where(rng, scene)


def how_many(scene: ShapeScene) -> Question:
    """How many equal shapes there are."""
    n, shape = len(scene.shapes), scene.shapes[0]
    plural, are = (shape.kind, "is") if n == 1 else (f"{shape.kind}s", "are")
    number = lexicon.COUNTS[n - 1]
    answer = f"There {are} {number} {shape.colour} {plural} in the image."
    return Question(f"How many {shape.kind}s are in the image?", answer, ((number, str(n)),))


def about_count(rng: random.Random, scene: ShapeScene) -> Question:
    """How many equal shapes there are; of a single one rather what it is."""
    shape = scene.shapes[0]
    if len(scene.shapes) > 1 or rng.random() < 0.4:
        return how_many(scene)
    article = "an" if shape.colour == "orange" else "a"
    asked = rng.choice(("What shape is in the image?", "What does the image show?"))
    named = f"{shape.colour} {shape.kind}"
    return Question(asked, f"The image shows {article} {named}.", ((named,),))


def about_nothing(rng: random.Random) -> Question:
    """Any question on a blank image."""
    asked = rng.choice([q for q, _ in (*WORD, *NUMBER)] + ["What does the image show?"])
    return Question(
        asked, "There is nothing in the image that I can read.", (("nothing", "blank", "empty"),)
    )


def about_other(rng: random.Random, kind: str, layout: Layout) -> Question:
    """Something that the image does not answer."""
    asked = rng.choice(OTHER)
    if rng.random() < 0.3:
        asked = f"How much is the {rng.choice(lexicon.WORDS)}?"
    return Question(asked, "The image does not say.", (("not say",),))
