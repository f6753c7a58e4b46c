"""Measure how the assembled demo sees unseen images, through its language model.

Owns: the held-out images by kind, one question for each, and scores with confidence intervals.
Answers come from a server's OpenAI-compatible HTTP interface, from transformers in this process,
or, as the language model's own ceiling, from transformers with the true caption's tokens in the
image's place. Does not own training, assembly, or the criterion of a right answer (`questions`).
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import math
import random
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from demo_model import data, examples, lexicon, mixture, questions, scenes, shapes
from demo_model.assemble import VISION_FILE, assemble
from demo_model.questions import Question

NEW_TOKENS = 48


@dataclass(frozen=True)
class Case:
    """One image with a question; `cells` are the classes that 64 ideal image tokens would say,
    None where the tower has no class for what is written."""

    kind: str
    image: Image.Image
    question: Question
    cells: tuple[int, ...] | None


Answer = Callable[[Case], str]


@dataclass(frozen=True)
class Score:
    """Right answers out of all, with a 95 % Wilson interval."""

    right: int
    total: int

    @property
    def share(self) -> float:
        return self.right / self.total if self.total else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        if not self.total:
            return 0.0, 1.0
        z, n, p = 1.96, self.total, self.share
        middle = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        return max(0.0, middle - half), min(1.0, middle + half)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.right}/{self.total} = {self.share:.1%} [{low:.1%}, {high:.1%}]"


def _text_case(rng: random.Random, kind: str) -> Case:
    if kind == "unseen word":
        lines = [[rng.choice(lexicon.UNSEEN)]]
        layout = scenes.lay_out(rng, lines, data.faces(held_out=True))
    elif kind == "capitals":
        word = rng.choice(lexicon.WORDS)
        lines = [[word.capitalize() if rng.random() < 0.5 else word.upper()]]
        layout = scenes.lay_out(rng, lines, data.faces(held_out=True))
    else:
        layout = mixture.lay_out(rng, "receipt" if kind == "field" else kind, True)
    asked = "word" if kind in ("capitals", "unseen word") else kind
    question = questions.about_text(rng, asked, layout)
    cells = None if kind == "unseen word" else tuple(examples.captions(layout.items).tolist())
    return Case(kind, scenes.draw_whole(rng, layout), question, cells)


def _shape_case(rng: random.Random, kind: str) -> Case:
    if kind == "count":
        scene = shapes.equal_shapes(rng)
        question = questions.how_many(scene)
    elif kind == "shape":
        scene = shapes.equal_shapes(rng, 1)
        question = questions.about_count(rng, scene)
    else:
        scene = shapes.two_shapes(rng)
        question = questions.where(rng, scene) if kind == "relation" else questions.both(rng, scene)
    return Case(kind, shapes.draw(rng, scene), question, tuple(shapes.captions(scene).tolist()))


COUNTS = {
    "word": 200,
    "number": 150,
    "words": 200,
    "receipt": 150,
    "shapes": 100,
    "shape": 50,
    "relation": 100,
    "count": 120,
    "price": 50,
    "field": 40,
    "capitals": 40,
    "unseen word": 20,
}
SHAPE_KINDS = ("shapes", "shape", "relation", "count")


def cases(kind: str, count: int, seed: int) -> Iterator[Case]:
    """`count` images of a kind: held-out faces, strings (from three characters) and phrases."""
    rng = random.Random(f"{seed} {kind}")
    for _ in range(count):
        yield _shape_case(rng, kind) if kind in SHAPE_KINDS else _text_case(rng, kind)


def measure(asked: list[Case], answer: Answer, at_once: int = 1, show: int = 0) -> Score:
    """Ask one question per image; prints the first `show` wrong answers."""
    with ThreadPoolExecutor(at_once) as pool:
        said = list(pool.map(answer, asked))
    right = 0
    for case, words in zip(asked, said, strict=True):
        hit = case.question.met_by(words)
        right += hit
        if not hit and show > 0:
            show -= 1
            print(f"  {case.question.wanted} ({case.question.text}): {words!r}", flush=True)
    return Score(right, len(asked))


def _conversation(question: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]


def in_process(
    folder: Path, threads: int = 1, ideal: bool = False, vision: Path = VISION_FILE
) -> Answer:
    """Greedy answers from transformers; with `ideal`, without looking: the tokens are what the
    tower says of each class when it is sure, at the true places."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from demo_model.codes import captions

    torch.set_num_threads(threads)
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    table = model.get_input_embeddings().weight
    said = captions(load_file(vision))

    @torch.no_grad()
    def answer(case: Case) -> str:
        text = processor.apply_chat_template(
            _conversation(case.question.text), add_generation_prompt=True
        )
        inputs = processor(text=text, images=[case.image], return_tensors="pt")
        if ideal:
            tokens = inputs["input_ids"][0]
            embeddings = table[tokens].clone()
            embeddings[tokens == model.config.image_token_id] = said[list(case.cells or ())]
            inputs = {"inputs_embeds": embeddings[None]}
            skip = 0
        else:
            skip = inputs["input_ids"].shape[1]
        out = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        return str(processor.decode(out[0, skip:], skip_special_tokens=True))

    return answer


def over_http(base_url: str, model: str = "demo") -> Answer:
    """Greedy answers from a running server, e.g. http://127.0.0.1:8000/v1."""

    def answer(case: Case) -> str:
        buffer = io.BytesIO()
        case.image.save(buffer, "PNG")
        url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
        content = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": case.question.text},
        ]
        body = {
            "model": model,
            "temperature": 0,
            "max_tokens": NEW_TOKENS,
            "messages": [{"role": "user", "content": content}],
        }
        request = urllib.request.Request(
            base_url.rstrip("/") + "/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as reply:
            return str(json.load(reply)["choices"][0]["message"]["content"])

    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="a running server, e.g. http://127.0.0.1:8000/v1")
    parser.add_argument("--ceiling", action="store_true", help="true captions instead of the tower")
    parser.add_argument("--cache", type=Path, default=Path(".cache/longlens"))
    parser.add_argument("--vision", type=Path, default=VISION_FILE, help="the tower to assemble")
    parser.add_argument("--kinds", default=",".join(COUNTS))
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of images")
    parser.add_argument("--seed", type=int, default=2024)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=2, help="requests in flight")
    parser.add_argument("--show", type=int, default=3, help="wrong answers to print per kind")
    args = parser.parse_args()
    at_once = args.at_once
    if args.url:
        answer = over_http(args.url)
    else:
        folder = assemble(args.cache, vision=args.vision)
        answer = in_process(folder, args.threads, args.ceiling, args.vision)
        at_once = 1
    for kind in args.kinds.split(","):
        begin = time.perf_counter()
        asked = list(cases(kind, max(1, round(COUNTS[kind] * args.scale)), args.seed))
        if args.ceiling and asked[0].cells is None:
            continue
        score = measure(asked, answer, at_once, args.show)
        print(f"{kind:12} {score}  {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
