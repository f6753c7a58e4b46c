"""Measure how the assembled demo reads unseen printed numbers, through its language model.

Owns: the held-out images, the questions, the exact-string criterion and its confidence interval.
Answers come either from transformers in this process or from a server's OpenAI-compatible HTTP
interface. Does not own training or assembly, nor any other benchmark.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import math
import random
import re
import urllib.request
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from demo_model import data

QUESTIONS = (
    "What number is written in the image?",
    "Which number do you see in this picture?",
    "Read the number in the image.",
    "What is the number shown here?",
)
Answer = Callable[[Image.Image, str], str]


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
        return (
            f"{self.right}/{self.total} = {self.share:.1%} (95 % interval {low:.1%} to {high:.1%})"
        )


def contains(answer: str, number: str) -> bool:
    """Whether the answer holds exactly this digit string, as a run of digits of its own."""
    return number in re.findall(r"\d+", answer)


def unseen(count: int, seed: int) -> list[data.Sample]:
    """Images in held-out faces of held-out strings (shorter than 3 digits: unseen looks only)."""
    rng = random.Random(seed)
    fonts = data.faces(held_out=True)
    return [
        data.render(rng, data.draw_digits(rng, held_out=True), fonts, longest_px=(64, 512))
        for _ in range(count)
    ]


def measure(samples: list[data.Sample], answer: Answer, show: int = 0) -> dict[str, Score]:
    """Ask one question per image, in turn; scores in all, per question and per length."""
    right: dict[str, int] = defaultdict(int)
    total: dict[str, int] = defaultdict(int)
    for i, sample in enumerate(samples):
        question = QUESTIONS[i % len(QUESTIONS)]
        said = answer(sample.image, question)
        hit = contains(said, sample.text)
        if not hit and show > 0:
            show -= 1
            print(f"  {sample.text!r} ({question}): {said!r}", flush=True)
        for key in ("all", question, f"{len(sample.text)} digits"):
            right[key] += hit
            total[key] += 1
    return {key: Score(right[key], total[key]) for key in total}


def in_process(folder: Path, threads: int = 1, new_tokens: int = 24) -> Answer:
    """Greedy answers from transformers."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    torch.set_num_threads(threads)
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()

    def answer(image: Image.Image, question: str) -> str:
        content = [{"type": "image"}, {"type": "text", "text": question}]
        text = processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True
        )
        inputs = processor(text=text, images=[image], return_tensors="pt")
        with torch.no_grad():
            out = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
        return str(
            processor.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        )

    return answer


def over_http(base_url: str, model: str = "demo", new_tokens: int = 24) -> Answer:
    """Greedy answers from a running server, e.g. http://127.0.0.1:8000/v1."""

    def answer(image: Image.Image, question: str) -> str:
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
        body: dict[str, Any] = {
            "model": model,
            "temperature": 0,
            "max_tokens": new_tokens,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": url}},
                        {"type": "text", "text": question},
                    ],
                }
            ],
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
    parser.add_argument("--folder", type=Path, help="assembled folder; default: assemble one")
    parser.add_argument("--cache", type=Path, default=Path(".cache/longlens"))
    parser.add_argument("--url", help="measure a server instead, e.g. http://127.0.0.1:8000/v1")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=2024)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--show", type=int, default=10, help="print this many wrong answers")
    args = parser.parse_args()
    if args.url:
        answer = over_http(args.url)
    else:
        from demo_model.assemble import assemble

        answer = in_process(args.folder or assemble(args.cache), args.threads)
    scores = measure(unseen(args.count, args.seed), answer, args.show)
    for key in sorted(scores, key=lambda k: (k != "all", k)):
        print(f"{key:45} {scores[key]}")


if __name__ == "__main__":
    main()
