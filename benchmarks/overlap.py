"""Do the two stages work at once, and what does having two processes cost?

Owns: the checkpoint whose stages take comparable time, and three measurements of one server:
eight pictures in one prompt (encode alone, prefill alone, both); one picture through HTTP and
processes against the engine used directly; a repeated picture. Does not own: servers, requests.

Every prompt begins with another text, so that no prefix of it can have been computed before.
Encode alone runs in this process, with the thread that the vision stage has in the server;
prefill alone is the same pictures again, whose rows are cached.

python -m benchmarks.overlap [--model FOLDER] [--rounds 5] [--pairs 30]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
import transformers as tf

from api.frontend import Frontend, load_frontend
from api.prompt import PlannedImage, Turn
from benchmarks import servers
from benchmarks.chat import (
    MODEL,
    Answer,
    Verdict,
    all_hold,
    chat,
    encoded,
    message,
    picture,
    table,
)
from chunked_prefill.request import Request, SamplingParams
from lm_engine.assembly import build_vision, vision_dtype, vision_shape
from lm_engine.client import MediaItem
from lm_engine.engine import Engine
from lm_engine.models.checkpoint import open_checkpoint
from lm_engine.options import EngineOptions
from lm_engine.process.messages import Supervision
from tests.checkpoints import randomise, tokenizer
from vision_encoder.embedding_storage import allocate_storage
from vision_encoder.link import EncodeJob
from vision_encoder.media import content_key, read_header

EDGE = 448
IMAGES = 8
QUESTION = "What do these pictures have in common?"
Result = dict[str, float]


@dataclass(frozen=True, slots=True)
class Bench:
    server: servers.Server
    folder: Path
    budget_tokens: int
    seeds: Iterator[int]
    """Each picture and each prompt's beginning is used once."""

    def fresh(self, number: int) -> list[bytes]:
        return [encoded(picture(next(self.seeds), (EDGE, EDGE))) for _ in range(number)]

    def ask(self, pictures: list[bytes], max_tokens: int = 1) -> Answer:
        parts: tuple[str | bytes, ...] = (f"Number {next(self.seeds)}:", *pictures, QUESTION)
        answer = chat(self.server.port, _body(parts, max_tokens))
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {answer.body}")
        if answer.body["usage"]["prompt_tokens_details"]["cached_tokens"]:
            raise RuntimeError("a prompt that was never sent before was found in the cache")
        return answer


def _body(parts: tuple[str | bytes, ...], max_tokens: int) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": message(*parts),
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
    }


def build_checkpoint(folder: Path) -> None:
    """A Qwen2.5-VL whose tower (12 M parameters, 1,024 patches per picture) and decoder (46 M
    parameters, 256 tokens per picture) need about the same arithmetic for a picture."""
    fast = tokenizer("qwen2_5_vl")
    config = tf.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 384,
            "hidden_size": 640,
            "intermediate_size": 1792,
            "num_hidden_layers": 10,
            "num_attention_heads": 10,
            "num_key_value_heads": 5,
            "max_position_embeddings": 4096,
            "bos_token_id": None,
            "eos_token_id": fast.eos_token_id,
            "pad_token_id": fast.pad_token_id,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [8, 12, 12],
            },
        },
        vision_config={
            "depth": 6,
            "hidden_size": 384,
            "intermediate_size": 1152,
            "num_heads": 6,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "out_hidden_size": 640,
            "window_size": 112,
            "fullatt_block_indexes": [2, 5],
        },
        image_token_id=fast.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=fast.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=fast.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=fast.convert_tokens_to_ids("<|vision_end|>"),
    )
    images = tf.Qwen2VLImageProcessor(
        size={"shortest_edge": 56 * 56, "longest_edge": EDGE * EDGE}, patch_size=14, merge_size=2
    )
    processor = tf.Qwen2_5_VLProcessor(images, fast, tf.Qwen2VLVideoProcessor())
    processor.chat_template = fast.chat_template
    processor.save_pretrained(folder)
    model = tf.AutoModelForImageTextToText.from_config(config)
    randomise(model, seed=5)
    model.save_pretrained(folder)


# -- the stages alone ------------------------------------------------------------------------------


class EncodeAlone:
    """The vision stage of the checkpoint in this process, with one thread."""

    def __init__(self, folder: Path) -> None:
        options = EngineOptions(str(folder), device="cpu", prefix_caching=False)
        checkpoint = open_checkpoint(options.model)
        shape = vision_shape(checkpoint, options)
        if shape is None:
            raise SystemExit(f"{folder} is a text model; overlap needs one that takes images")
        self._storage = allocate_storage(
            shape.num_rows, shape.depth, shape.dim, vision_dtype(options)
        )
        self._stage = build_vision(checkpoint, options, self._storage)
        checkpoint.close()
        self._frontend = load_frontend(folder, tokenizer=None, template=None)

    def seconds(self, pictures: list[bytes]) -> float:
        """From files to rows, one after the other as the server's stage does it."""
        planner = self._frontend.prompts.planner
        assert planner is not None
        begin = time.perf_counter()
        headers = [read_header(data) for data in pictures]
        plans = planner.plan([(h.width, h.height) for h in headers])
        row = 0
        for place, (data, plan) in enumerate(zip(pictures, plans, strict=True)):
            rows = ((row, plan.num_rows),)
            key = content_key(data, plan.fingerprint, b"bench")
            self._stage.submit(EncodeJob(key, 0, plan, rows, (0, place), data=data))
            row += plan.num_rows
        while self._stage.busy():
            for result in self._stage.poll():
                if result.error is not None:
                    raise RuntimeError(result.error)
        return time.perf_counter() - begin


class Direct:
    """The same model as an Engine in this process: no HTTP, no other process."""

    def __init__(self, folder: Path, budget_tokens: int) -> None:
        self._engine = Engine.load(
            EngineOptions(
                str(folder),
                device="cpu",
                max_num_batched_tokens=budget_tokens,
                threads=1,
                vision_process=False,
            )
        )
        self._frontend: Frontend = load_frontend(folder, tokenizer=None, template=None)
        self._names = count()

    def seconds(self, beginning: str, data: bytes, max_tokens: int) -> float:
        """From an encoded picture and texts to the last token."""
        prompts = self._frontend.prompts
        planner = prompts.planner
        assert planner is not None
        begin = time.perf_counter()
        header = read_header(data)
        (plan,) = planner.plan([(header.width, header.height)])
        key = content_key(data, plan.fingerprint, b"bench")
        turn = Turn("user", (beginning, 0, QUESTION))
        prompt = prompts.chat([turn], [PlannedImage(key, plan)], add_generation_prompt=True)
        sampling = SamplingParams(max_tokens, temperature=0.0, ignore_eos=True)
        request = Request(
            f"direct-{next(self._names)}",
            prompt.token_ids,
            sampling,
            prompt.spans,
            prompt.positions,
            prompt.position_delta,
        )
        self._engine.generate([(request, (MediaItem(key, plan, "picture", data=data),))])
        return time.perf_counter() - begin


# -- measurements ----------------------------------------------------------------------------------


def overlap(bench: Bench, rounds: int) -> list[Verdict]:
    """Eight pictures in one prompt."""
    alone = EncodeAlone(bench.folder)
    alone.seconds(bench.fresh(1))
    bench.ask(bench.fresh(1))
    results: list[Result] = []
    for number in range(rounds):
        pictures = bench.fresh(IMAGES)
        encode_s = alone.seconds(pictures)
        both = bench.ask(pictures)
        prefill = bench.ask(pictures)
        if prefill.timing_s["encode"]:
            raise RuntimeError("a repeated picture was encoded again; give --embedding-rows")
        usage = both.body["usage"]
        per_image = usage["prompt_tokens_details"]["image_tokens"] // IMAGES
        results.append(
            {
                "encode": encode_s,
                "prefill": prefill.elapsed_s,
                "both": both.elapsed_s,
                "tokens": usage["prompt_tokens"],
                "image": per_image,
                "ahead": both.ahead_tokens,
            }
        )
        print(f"round {number + 1}: { ({k: round(v, 3) for k, v in results[-1].items()}) }")
    middle = {name: statistics.median(r[name] for r in results) for name in results[0]}
    image_s = middle["encode"] / IMAGES
    chunk_s = middle["prefill"] * min(1.0, bench.budget_tokens / middle["tokens"])
    allowed = 1.15 * max(middle["encode"], middle["prefill"]) + image_s + chunk_s
    serial = middle["encode"] + middle["prefill"]
    ahead = min(r["ahead"] for r in results)
    return [
        Verdict(f"encode alone, {IMAGES} x {EDGE} x {EDGE}", f"{middle['encode']:.3f} s"),
        Verdict(f"prefill alone, {middle['tokens']:.0f} tokens", f"{middle['prefill']:.3f} s"),
        Verdict("one after the other", f"{serial:.3f} s"),
        Verdict(
            "both at once: TTFT",
            f"{middle['both']:.3f} s",
            f"{allowed:.3f} s = 1.15 x max + image {image_s:.3f} + chunk {chunk_s:.3f}",
            middle["both"] <= allowed,
        ),
        Verdict(
            "tokens prefilled before the last image was encoded",
            f"{ahead:.0f}",
            f"at least one image, {middle['image']:.0f}",
            ahead >= middle["image"],
        ),
    ]


def topology(bench: Bench, pairs: int, max_tokens: int) -> list[Verdict]:
    """One picture: server and direct engine in turns, each picture new to both."""
    direct = Direct(bench.folder, bench.budget_tokens)
    overheads, directs, served = [], [], []
    for number in range(pairs + 1):
        (data,) = bench.fresh(1)

        def one(data: bytes = data) -> float:
            return bench.ask([data], max_tokens).elapsed_s

        def other(data: bytes = data) -> float:
            return direct.seconds(f"Number {next(bench.seeds)}:", data, max_tokens)

        if number % 2:
            through, straight = one(), other()
        else:
            straight = other()
            through = one()
        if number:
            # The first pair warms both up.
            overheads.append(through - straight)
            directs.append(straight)
            served.append(through)
    overhead_s, direct_s = statistics.median(overheads), statistics.median(directs)
    allowed_s = 0.005 + 0.02 * direct_s
    return [
        Verdict(f"engine used directly, 1 image, {max_tokens} tokens", f"{direct_s * 1e3:.1f} ms"),
        Verdict("through HTTP and processes", f"{statistics.median(served) * 1e3:.1f} ms"),
        Verdict(
            f"overhead, median of {pairs} pairs",
            f"{overhead_s * 1e3:.1f} ms",
            f"{allowed_s * 1e3:.1f} ms = 5 ms + 2 %",
            overhead_s <= allowed_s,
        ),
    ]


def repeated(bench: Bench) -> list[Verdict]:
    """A picture that was seen before."""
    pictures = bench.fresh(1)
    bench.ask(pictures)
    spans = [bench.ask(pictures).timing_s for _ in range(5)]
    vision_s = max(s["image_decode"] + s["encode"] for s in spans)
    queue_s = statistics.median(s["queue"] for s in spans)
    return [
        Verdict(
            "repeated image: decode + encode", f"{vision_s * 1e3:.2f} ms", "0 ms", vision_s == 0
        ),
        Verdict(
            "repeated image: receipt to first chunk",
            f"{queue_s * 1e3:.2f} ms",
            "5 ms",
            queue_s < 0.005,
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a vision checkpoint instead of the built one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--max-tokens", type=int, default=8, help="answers of the pairs")
    parser.add_argument("--budget", type=int, default=512, help="--max-num-batched-tokens")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.model or Path(temporary) / "model"
        if args.model is None:
            build_checkpoint(folder)
        budget = ("--max-num-batched-tokens", str(args.budget))
        server = servers.longlens(str(folder), 1, "--no-enable-prefix-caching", *budget)
        server.start(Path(temporary))
        # From here on this process stands behind the same things as the server's stages.
        os.nice(Supervision().niceness)
        try:
            bench = Bench(server, folder, args.budget, count(1))
            verdicts = overlap(bench, args.rounds)
            verdicts += topology(bench, args.pairs, args.max_tokens)
            verdicts += repeated(bench)
        finally:
            server.stop()
    print(table(verdicts))
    return 0 if all_hold(verdicts) else 1


if __name__ == "__main__":
    raise SystemExit(main())
