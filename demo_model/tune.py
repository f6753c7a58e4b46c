"""Tune how captions are said: the classes' codes and what surrounds them, nothing else.

Owns: fitting the codes, the filler's among them, the matrix that makes them embeddings, and the
image's special tokens through the frozen language model, so that it answers questions from the
captions that a perfect tower would say. SmolLM2 itself takes empty cells for endless spaces and
loses the one word among them; it is these vectors that make it look. Does not own the tower, which
is trained to name the classes (`train`), or the questions (`questions`).
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections import defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from demo_model import data, examples, lexicon, mixture, questions, shapes
from demo_model.assemble import AFTER_IMAGE, BEFORE_IMAGE, IMAGE_SPECIALS, assemble
from demo_model.codes import Codes, fit_codes
from demo_model.questions import Question

SHARES = {
    "word": 16,
    "words": 40,
    "number": 7,
    "price": 7,
    "receipt": 7,
    "field": 6,
    "shapes": 20,
    "count": 6,
    "blank": 4,
    "clutter": 4,
    "other": 4,
}
SYSTEM = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\n"
)
ANSWER = "<|im_end|>\n<|im_start|>assistant\n"
SPACE = 216  # its token id
QUIET = 4.0  # how far every special token's row points against all final states
NOISE = 0.04  # the most per channel that a caption is off
BLENDED, BLEND = 0.15, 0.4  # share of captions with something else in them, and the most of that


class Prompt(nn.Module):
    """The vectors: `before` and `after` the image, its two markers, and the codes of all classes.

    Every row holds a fixed part that lies against a direction which all final states share. The
    unused rows are nothing else: `assemble` makes them all special tokens' rows of the head, so
    that none is ever sampled, in text as little as about images.
    """

    def __init__(self, table: Tensor, tokenizer: Any, quiet: Tensor, codes: Codes) -> None:
        super().__init__()
        self.quiet: Tensor
        self.register_buffer("quiet", quiet)
        before = tokenizer.encode('Here is a picture. Image text: "')[-BEFORE_IMAGE.count("<") :]
        after = tokenizer.encode('"\nCopy what it says.\n')[: AFTER_IMAGE.count("<")]
        self.before = nn.Parameter(table[before].clone())
        self.after = nn.Parameter(table[after].clone())
        self.around = nn.Parameter(0.5 * table[[SPACE]])
        self.tile = nn.Parameter(0.5 * table[[SPACE]])
        self.codes = nn.Parameter(codes.codes.clone())
        self.matrix = nn.Parameter(codes.matrix.clone())
        self.middle = nn.Parameter(codes.middle.clone())

    def said(self) -> Codes:
        """The codes as they stand, of mean 0 and variance 1."""
        return Codes(F.layer_norm(self.codes, self.codes.shape[-1:]), self.matrix, self.middle)

    def row(self, vectors: Tensor) -> Tensor:
        """Vectors as rows of the embedding table."""
        return vectors - (vectors @ self.quiet)[:, None] * self.quiet - QUIET * self.quiet

    def image(self, cells: Tensor) -> Tensor:
        """The embeddings (T, width) of an image whose tokens are `cells` (64, width)."""
        around = self.row(self.around)
        before, after = self.row(self.before), self.row(self.after)
        return torch.cat([before, around, self.row(self.tile), cells, around, after])

    def classes(self) -> Tensor:
        """The rows that compete with the vocabulary."""
        parts = (self.before, self.after, self.around, self.tile)
        return torch.cat([self.row(p) for p in parts])

    def special_rows(self) -> Tensor:
        """Rows (40, width) of all special tokens; the unused are quiet."""
        rows = -QUIET * self.quiet[None].repeat(len(IMAGE_SPECIALS), 1)
        names = {"<global-img>": self.tile[0], "<fake_token_around_image>": self.around[0]}
        for text, vectors in ((BEFORE_IMAGE, self.before), (AFTER_IMAGE, self.after)):
            marks = [f"<{m}" for m in text.split("<")[1:]]
            names |= dict(zip(marks, vectors, strict=True))
        for name, vector in names.items():
            rows[IMAGE_SPECIALS.index(name)] = self.row(vector[None])[0]
        return rows


@dataclass(frozen=True)
class Lesson:
    """An ideal caption (64 classes) and a question about it."""

    kind: str
    cells: tuple[int, ...]
    question: Question


def lesson(rng: random.Random, kind: str) -> Lesson:
    """What a perfect tower would say about a random image."""
    cells = [lexicon.FILLER] * data.CELLS**2
    if kind == "clutter":  # what a tower may say of a photograph
        for at in rng.sample(range(len(cells)), rng.randint(6, 40)):
            cells[at] = rng.randrange(lexicon.FILLER)
    if kind in ("blank", "clutter"):
        return Lesson(kind, tuple(cells), questions.about_nothing(rng))
    if kind in ("shapes", "count"):
        two = kind == "shapes"
        scene = shapes.two_shapes(rng) if two else shapes.equal_shapes(rng)
        said = shapes.captions(scene)
        ask = questions.about_shapes if two else questions.about_count
        question = ask(rng, scene)
    else:
        drawn = {"field": "receipt", "other": rng.choice(("word", "words", "number"))}
        layout = mixture.lay_out(rng, drawn.get(kind, kind), held_out=False)
        said = examples.captions(layout.items)
        ask_text = questions.about_other if kind == "other" else questions.about_text
        question = ask_text(rng, kind, layout)
    return Lesson(kind, tuple(said.tolist()), question)


class Tutor:
    """The frozen language model, with the system prompt's keys and values computed once."""

    def __init__(self, cache: Path) -> None:
        from transformers import AutoModelForImageTextToText, AutoTokenizer

        # The tower in that folder, whichever it is, is not used.
        folder = assemble(cache)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16)
        self.model = whole.model.text_model.eval().requires_grad_(False)
        vocabulary = self.tokenizer.convert_ids_to_tokens(range(len(self.tokenizer)))
        self.table: Tensor = self.model.embed_tokens.weight.detach()[: -len(IMAGE_SPECIALS)]
        self.own = self.table[torch.tensor(lexicon.vocabulary_ids(vocabulary))].float()
        with torch.no_grad():
            ids = torch.tensor([self.tokenizer.encode(SYSTEM)])
            start = self.model(input_ids=ids, use_cache=True).past_key_values
        self.start = [(layer.keys, layer.values) for layer in start.layers]

    def embed(self, ids: list[int]) -> Tensor:
        return self.table[torch.tensor(ids)].float()

    def quiet_direction(self, texts: list[str]) -> Tensor:
        """The unit direction along which the least of all final states of `texts` is largest.

        Learned-by-heart text (licences) has states that are far from the mean of all others, so the
        mean's direction would not do.
        """
        found = []
        with torch.no_grad():
            for text in texts:
                ids = torch.tensor([self.tokenizer.encode(text[:4000])[:300]])
                found.append(self.model(input_ids=ids).last_hidden_state[0, 1:].float())
            states = torch.cat(found)
            direction = F.normalize(states.mean(0), dim=0)
            for _ in range(3000):
                weights = (-2 * states @ direction).softmax(0)
                push = F.normalize(weights @ states, dim=0)
                direction = F.normalize(direction + 0.002 * push, dim=0)
            print(f"quiet: least state {float((states @ direction).min()):.1f} of {len(states)}")
        return direction

    def states(self, embeddings: Tensor) -> Tensor:
        """Final states (B, T, width) of what follows the system prompt."""
        from transformers import DynamicCache

        cache = DynamicCache()
        for i, (keys, values) in enumerate(self.start):
            shape = (len(embeddings), -1, -1, -1)
            cache.update(keys.expand(shape), values.expand(shape), i)
        out = self.model(inputs_embeds=embeddings.bfloat16(), past_key_values=cache, use_cache=True)
        states: Tensor = out.last_hidden_state
        return states

    def loss(self, prompt: Prompt, lessons: list[Lesson], rng: random.Random) -> Tensor:
        """Cross-entropy of each model answer (B,), over its tokens and the one that ends it."""
        inputs, answers = [], []
        captions = prompt.said().embeddings()
        for given in lessons:
            classes = torch.tensor(given.cells)
            cells = captions[classes]
            if rng.random() < BLENDED:  # as patches that do not agree say it
                others = captions[torch.randint(len(captions), classes.shape)]
                share = BLEND * torch.rand(classes.shape) * (classes != lexicon.FILLER)
                cells = torch.lerp(cells, others, share[:, None])
            image = prompt.image(cells + rng.uniform(0, NOISE) * torch.randn(cells.shape))
            asked = self.tokenizer.encode(given.question.text)
            answer = self.tokenizer.encode(given.question.answer + "<|im_end|>")
            parts = [image, self.embed(asked)]
            if rng.random() < 0.12:  # some clients send the image after the question
                parts.reverse()
            ends = self.embed(self.tokenizer.encode(ANSWER) + answer)
            inputs.append(torch.cat([*parts, ends]))
            answers.append(torch.tensor(answer))
        longest = max(map(len, inputs))
        states = self.states(torch.stack([F.pad(x, (0, 0, 0, longest - len(x))) for x in inputs]))
        rivals = torch.cat([self.table, prompt.classes().bfloat16()])
        losses = []
        for row, given_input, answer in zip(states, inputs, answers, strict=True):
            at = len(given_input) - len(answer) - 1
            logits = row[at : at + len(answer)] @ rivals.T
            losses.append(F.cross_entropy(logits.float(), answer))
        return torch.stack(losses)


def tune(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    tutor = Tutor(args.cache)
    checkpoint = args.out.with_suffix(".pt")
    begin = checkpoint if checkpoint.exists() else args.start_from
    state: dict[str, Any] = torch.load(begin) if begin else {}
    if begin:
        quiet = state["prompt"]["quiet"]
    else:
        root = Path(__file__).parents[1]
        papers = [*root.glob("*.md"), root / "LICENSE", *root.glob("lm_engine/*.py")]
        quiet = tutor.quiet_direction([p.read_text(encoding="utf-8") for p in sorted(papers)])
    codes = fit_codes(tutor.own, args.hidden)
    prompt = Prompt(tutor.table.float(), tutor.tokenizer, quiet, codes)
    pace = {"codes": 0.3, "matrix": 0.03, "middle": 0.1}  # of the rate: each has its own size
    groups = [{"params": [p], "pace": pace.get(k, 1.0)} for k, p in prompt.named_parameters()]
    optimiser = torch.optim.Adam(groups, lr=args.lr, betas=(0.9, 0.98))
    step, spent_s = 0, 0.0
    if begin:
        prompt.load_state_dict(state["prompt"])
    if checkpoint.exists():
        optimiser.load_state_dict(state["optimiser"])
        step, spent_s = state["step"], state["spent_s"]
    started = time.process_time() - spent_s
    recent: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=12))
    while (spent_s := time.process_time() - started) < args.seconds:
        rng = random.Random(args.seed * 1_000_003 + step)
        torch.manual_seed(args.seed * 1_000_003 + step)
        left = 1 - spent_s / args.seconds
        rate = args.lr * min(1.0, (step + 1) / 5) * (0.05 + 0.95 * min(1.0, left / 0.6))
        for group in optimiser.param_groups:
            group["lr"] = rate * group["pace"]
        kinds = rng.choices(list(SHARES), list(SHARES.values()), k=args.batch)
        losses = tutor.loss(prompt, [lesson(rng, kind) for kind in kinds], rng)
        optimiser.zero_grad()
        losses.mean().backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(prompt.parameters(), 1.0)
        optimiser.step()
        step += 1
        for kind, value in zip(kinds, losses.tolist(), strict=True):
            recent[kind].append(value)
        if step % 10 == 0:
            means = " ".join(f"{k} {sum(v) / len(v):.3f}" for k, v in sorted(recent.items()))
            print(f"{spent_s:6.0f} s step {step} lr {rate:.1e} | {means}", flush=True)
            save(prompt, optimiser, step, spent_s, args.out)
    save(prompt, optimiser, step, spent_s, args.out)


def save(
    prompt: Prompt, optimiser: torch.optim.Optimizer, step: int, spent_s: float, out: Path
) -> None:
    """Write the state to go on from, and the vectors that `train` and the demo take."""
    state = {
        "prompt": prompt.state_dict(),
        "optimiser": optimiser.state_dict(),
        "step": step,
        "spent_s": spent_s,
    }
    beside = out.with_suffix(".partial")
    torch.save(state, beside)
    os.replace(beside, out.with_suffix(".pt"))
    said = prompt.said()
    tensors = {"codes": said.codes, "matrix": said.matrix, "middle": said.middle}
    tensors["special_rows"] = prompt.special_rows()
    save_file({k: v.detach().contiguous() for k, v in tensors.items()}, beside)
    os.replace(beside, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo/prompt.safetensors"))
    parser.add_argument("--start-from", type=Path, help="start from this run's vectors only")
    parser.add_argument("--cache", type=Path, default=Path(".cache/longlens"))
    parser.add_argument("--hidden", type=int, default=192, help="channels of the tower")
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=11)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    tune(args)


if __name__ == "__main__":
    main()
