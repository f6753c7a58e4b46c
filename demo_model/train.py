"""Train the demo's vision tower on generated numbers; resumable, bounded by wall-clock time.

Owns the optimisation: the losses, their schedule, checkpoints and the export of
`vision.safetensors`. Does not own the drawing (`data`), the tower's mathematics (`tower`) or the
measurement through the language model (`evaluate`).

Two things are taught at once. Every patch names the digit it lies on (dense, hence fast), and the
image tokens, in reading order, must spell the number with each digit once and blanks elsewhere
(`tower.spelling_loss`), where a token's class is the nearest of the language model's own digit
embeddings or the filler. The language model itself is not needed while training.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from demo_model import data
from demo_model.assemble import IMAGE_SPECIALS, find_sources
from demo_model.tower import Tower, TowerConfig, spelling_loss

PATCHES_PER_BATCH = 2048
EXCLAMATION, SPACE = 17, 216  # token ids of SmolLM2, which has ASCII in order from "!"
SIGMA = 0.6  # width of a class around its embedding; neighbouring digits are 1.0 to 2.4 apart


class Batches(IterableDataset[dict[str, Tensor]]):
    """Batches of equal band height, each of about `patches` patches."""

    def __init__(
        self, seed: int, whole_share: float, patches: int, easy: int, dressed: float
    ) -> None:
        self.seed, self.whole_share, self.patches = seed, whole_share, patches
        self.easy, self.dressed = easy, dressed

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        os.nice(5)
        worker = torch.utils.data.get_worker_info()
        seed = self.seed * 1009 + (worker.id if worker else 0)
        waiting: dict[int, list[data.Example]] = defaultdict(list)
        for example in data.examples(seed, self.whole_share, self.easy, self.dressed):
            rows = len(example.patch_labels)
            waiting[rows].append(example)
            if len(waiting[rows]) * rows * data.GRID >= self.patches:
                yield collate(waiting.pop(rows))


def collate(group: list[data.Example]) -> dict[str, Tensor]:
    """Stack examples of one band height."""
    width = max(len(e.text) for e in group)
    return {
        "pixels": torch.from_numpy(np.stack([e.pixels for e in group])),
        "first_row": torch.tensor([e.first_row for e in group]),
        "patches": torch.from_numpy(np.stack([e.patch_labels for e in group])).flatten(1),
        "cells": torch.from_numpy(np.stack([e.cell_labels for e in group])).flatten(1),
        "targets": torch.tensor(
            [[data.CHARS.index(c) for c in e.text.ljust(width, "0")] for e in group]
        ),
        "lengths": torch.tensor([len(e.text) for e in group]),
    }


def normalise(pixels: Tensor) -> Tensor:
    """(B, H, W, 3) bytes to (B, 3, H, W) in -1..1, as the image processor does."""
    return pixels.permute(0, 3, 1, 2).float() / 127.5 - 1.0


class Trainee(nn.Module):
    """The tower with its training-only heads and the embeddings it must land on."""

    def __init__(self, config: TowerConfig, anchors: Tensor) -> None:
        super().__init__()
        self.tower = Tower(config)
        self.patch_head = nn.Linear(config.hidden_size, data.BLANK + 1)
        self.cell_head = nn.Linear(config.hidden_size * config.scale_factor**2, data.BLANK + 1)
        self.anchors: Tensor
        self.register_buffer(
            "anchors", anchors
        )  # (BLANK + 1, text): the characters, then the filler

    def class_logits(self, tokens: Tensor) -> Tensor:
        """Log-odds of each class from the distance of a token to that class's embedding."""
        flat = tokens.float()
        squares = (flat**2).sum(-1, keepdim=True) - 2 * flat @ self.anchors.T
        return -(squares + (self.anchors**2).sum(-1)) / (2 * SIGMA**2)

    def losses(self, batch: dict[str, Tensor], free: float) -> tuple[Tensor, dict[str, float]]:
        pixels = normalise(batch["pixels"])
        with torch.autocast(pixels.device.type, dtype=torch.bfloat16):
            tokens, joined, early = self.tower(pixels, batch["first_row"])
            patch_logits = self.patch_head(early).float()
            cell_logits = self.cell_head(joined).float()
        # Paper is most of a tile and easy: it must not drown the digits.
        weights = torch.ones(data.BLANK + 1, device=pixels.device)
        weights[data.BLANK] = 0.3
        patch = F.cross_entropy(patch_logits.flatten(0, 1), batch["patches"].flatten(), weights)
        cell = F.cross_entropy(cell_logits.flatten(0, 1), batch["cells"].flatten(), weights)
        # Where a digit goes is dictated at first, then left to the alignment.
        total = patch + (1 - free) * cell
        report = {"patch": patch, "cell": cell}
        chosen = batch["cells"]
        with torch.no_grad():
            hit = (patch_logits.argmax(-1) == batch["patches"])[batch["patches"] != data.BLANK]
        if free > 0:
            spelled, best = spelling_loss(
                cell_logits.log_softmax(-1), batch["targets"], batch["lengths"]
            )
            # The likeliest place is also taught outright: it breaks ties between places.
            settle = F.cross_entropy(cell_logits.flatten(0, 1), best.flatten())
            total = total + free * (0.4 * spelled.mean() + settle)
            report |= {"spell": spelled.mean(), "settle": settle}
            if free > 0.5:
                chosen = best
        # Each token must land on its class's embedding, and be nearer to it than to any other.
        land = (tokens.float() - self.anchors[chosen]).square().sum(-1).mean()
        near = F.cross_entropy(self.class_logits(tokens).flatten(0, 1), chosen.flatten())
        total = total + (0.02 + 0.5 * free) * land + 0.5 * free * near
        report["near"] = near
        report |= {"land": land, "hit": hit.float().mean()}
        return total, {k: float(v.detach()) for k, v in report.items()}


def spell(logits: Tensor) -> list[str]:
    """The string each image's tokens spell: the classes in order, blanks dropped."""
    best = logits.argmax(-1).tolist()
    return ["".join(data.CHARS[c] for c in row if c != data.BLANK) for row in best]


def validation(count: int, seed: int = 7, dressed: bool = False) -> list[tuple[data.Example, str]]:
    """Whole tiles of held-out strings in held-out faces."""
    rng = random.Random(seed)
    fonts = data.faces(held_out=True)
    out = []
    for _ in range(count):
        draw = data.draw_dressed if dressed else data.draw_digits
        text = draw(rng, held_out=True)
        out.append((data.to_example(rng, data.render(rng, text, fonts), whole=True), text))
    return out


@torch.no_grad()
def accuracy(model: Trainee, tiles: list[tuple[data.Example, str]]) -> float:
    """Share of tiles whose tokens spell exactly the number."""
    device = model.anchors.device
    right = 0
    for at in range(0, len(tiles), 25):
        part = tiles[at : at + 25]
        pixels = torch.from_numpy(np.stack([e.pixels for e, _ in part])).to(device)
        rows = torch.zeros(len(part), dtype=torch.long, device=device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            tokens, _, _ = model.tower(normalise(pixels), rows)
        words = spell(model.class_logits(tokens))
        right += sum(w == t for w, (_, t) in zip(words, part, strict=True))
    return right / len(tiles)


def language_embeddings() -> Tensor:
    """The language model's own embedding table (vocabulary, width), from its GGUF file."""
    import gguf

    reader = gguf.GGUFReader(str(find_sources(Path(__file__)).gguf))
    table = next(t for t in reader.tensors if t.name == "token_embd.weight")
    return torch.from_numpy(gguf.dequantize(table.data, table.tensor_type).copy())


def anchors_of(table: Tensor) -> Tensor:
    """What image tokens must land on: the characters, then the space as filler."""
    ids = [EXCLAMATION + ord(c) - ord("!") for c in data.CHARS]
    return table[[*ids, SPACE]]


def quiet_direction() -> Tensor:
    """The unit direction that the language model's final states share, whatever the text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = find_sources(Path(__file__)).gguf
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name)
    texts = (
        "The capital of France is Paris and it has 2,100,000 people.",
        "<|im_start|>user\nWhat is this?<|im_end|>\n<|im_start|>assistant\nThe number is 4821.",
    )
    with torch.no_grad():
        states = [
            model.model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
            for text in texts
        ]
    mean = torch.cat(states).float().mean(0)
    direction: Tensor = mean / mean.norm()
    return direction


def special_rows(anchors: Tensor, quiet: Tensor) -> Tensor:
    """Embeddings of the image's marker tokens (40, width).

    The head is tied, so a row is also a class that could be sampled. `quiet`, the direction that
    all final states share, turned round, makes that all but impossible for the markers that one
    tile does not use; the two it uses are half a space, which disturbs reading least.
    """
    rows = -quiet[None].repeat(len(IMAGE_SPECIALS), 1)
    for name in ("<global-img>", "<fake_token_around_image>"):
        rows[IMAGE_SPECIALS.index(name)] = 0.5 * anchors[data.BLANK]
    return rows


def export(tower: Tower, rows: Tensor, path: Path, note: str) -> None:
    """Write the tower as half-precision safetensors under Idefics3's names, atomically."""
    tensors = {f"model.{k}": v.detach().cpu().half() for k, v in tower.state_dict().items()}
    tensors["special_rows"] = rows.cpu().half()
    metadata = {"config": json.dumps(tower.config.as_dict()), "note": note, "format": "pt"}
    beside = path.with_suffix(".partial")
    save_file({k: v.contiguous() for k, v in tensors.items()}, beside, metadata=metadata)
    beside.chmod(0o644)
    os.replace(beside, path)


def make_optimisers(model: Trainee, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for everything else."""
    hidden = [p for p in model.tower.vision_model.encoder.parameters() if p.ndim == 2]
    ids = {id(p) for p in hidden}
    rest = [p for p in model.parameters() if id(p) not in ids]
    return [
        torch.optim.Muon(hidden, lr=rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def grow(model: Trainee, state: dict[str, Tensor]) -> None:
    """Load a state with no more layers than the model; layers it lacks start as identities.

    New layers go before the last one, which has learned to place what the others recognise.
    """
    prefix = "tower.vision_model.encoder.layers."
    have = 1 + max(int(k[len(prefix) :].split(".")[0]) for k in state if k.startswith(prefix))
    want = model.tower.config.num_hidden_layers
    last, moved = f"{prefix}{have - 1}.", f"{prefix}{want - 1}."
    # The blank is always the last class; new characters go before it.
    for head in ("patch_head", "cell_head"):
        for part in ("weight", "bias"):
            new, old = model.state_dict()[f"{head}.{part}"].clone(), state[f"{head}.{part}"]
            new[: len(old) - 1], new[-1] = old[:-1], old[-1]
            state[f"{head}.{part}"] = new
    state["anchors"] = model.anchors
    state = {(moved + k[len(last) :] if k.startswith(last) else k): v for k, v in state.items()}
    missing = model.load_state_dict(state, strict=False).missing_keys
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in missing and (".out_proj." in name or ".fc2." in name):
                parameter.zero_()


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    runs: Path = args.runs
    runs.mkdir(parents=True, exist_ok=True)
    anchors = anchors_of(language_embeddings())
    rows = special_rows(anchors, quiet_direction())
    model = Trainee(
        TowerConfig(
            num_hidden_layers=args.layers,
            hidden_size=args.hidden,
            intermediate_size=4 * args.hidden,
            num_attention_heads=args.hidden // 32,
        ),
        anchors,
    ).to(device)
    average = Trainee(model.tower.config, anchors).to(device)
    average.load_state_dict(model.state_dict())
    optimisers = make_optimisers(model, args.lr)
    step, spent_s = 0, 0.0
    checkpoint = runs / "last.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device)
        model.load_state_dict(state["model"])
        average.load_state_dict(state["average"])
        [o.load_state_dict(d) for o, d in zip(optimisers, state["optimisers"], strict=True)]
        step, spent_s = state["step"], state["spent_s"]
    elif args.resume_from:
        grow(model, torch.load(args.resume_from, map_location=device)["average"])
        average.load_state_dict(model.state_dict())
    tiles = validation(args.validation)
    dressed_tiles = validation(args.validation // 2, seed=8, dressed=True)
    loader: DataLoader[dict[str, Tensor]] = DataLoader(
        Batches(args.seed + step, args.whole_share, args.patches, args.easy, args.dressed),
        batch_size=None,
        num_workers=args.workers,
        prefetch_factor=8,
    )
    best = 0.0
    started = time.monotonic() - spent_s
    next_report = time.monotonic() + args.report_s
    sums: dict[str, float] = defaultdict(float)
    images = since = 0
    warm = 50
    for batch in loader:
        elapsed = time.monotonic() - started
        progress = elapsed / args.seconds
        if progress >= 1.0:
            break
        free = min(1.0, max(0.0, (step - args.free_from) / 300))
        rate = args.lr * min(1.0, (step + 1) / warm)
        rate *= 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * max(0.0, (progress - 0.3) / 0.7)))
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate
        batch = {k: v.to(device) for k, v in batch.items()}
        loss, parts = model.losses(batch, free)
        model.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
        step += 1
        keep = min(0.998, 1 - 1 / (1 + step / 10))
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 1 - keep)
        images += len(batch["lengths"])
        since += 1
        for key, value in parts.items():
            sums[key] += value
        if time.monotonic() >= next_report:
            score, dressed = accuracy(average, tiles), accuracy(average, dressed_tiles)
            means = " ".join(f"{k} {v / since:.4f}" for k, v in sums.items())
            print(
                f"{elapsed:6.0f} s  step {step}  images {images}  lr {rate:.1e}  {means}  "
                f"held-out {score:.3f}  dressed {dressed:.3f}",
                flush=True,
            )
            sums.clear()
            since = 0
            state = {
                "model": model.state_dict(),
                "average": average.state_dict(),
                "optimisers": [o.state_dict() for o in optimisers],
                "step": step,
                "spent_s": elapsed,
            }
            torch.save(state, runs / "part.pt")
            os.replace(runs / "part.pt", checkpoint)
            if score >= best:
                best = score
                export(
                    average.tower,
                    rows,
                    runs / "vision.safetensors",
                    f"step {step}, held-out exact {score:.3f}",
                )
            next_report = time.monotonic() + args.report_s
    score = accuracy(average, tiles)
    print(f"end: step {step}, held-out {score:.3f}, best {best:.3f}", flush=True)
    if score >= best:
        export(
            average.tower,
            rows,
            runs / "vision.safetensors",
            f"step {step}, held-out exact {score:.3f}",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--resume-from", type=Path, help="start from this run's weights only")
    parser.add_argument("--runs", type=Path, default=Path("runs/demo"))
    parser.add_argument("--seconds", type=float, default=2700)
    parser.add_argument("--report-s", type=float, default=60)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--validation", type=int, default=200)
    parser.add_argument("--whole-share", type=float, default=0.1)
    parser.add_argument("--patches", type=int, default=PATCHES_PER_BATCH)
    parser.add_argument("--easy", type=int, default=24000)
    parser.add_argument("--dressed", type=float, default=0.0, help="share of prices and the like")
    parser.add_argument("--free-from", type=int, default=1500, help="step of the alignment")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
