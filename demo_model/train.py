"""Train the demo's vision tower on generated images; resumable, bounded by wall-clock time.

Owns the optimisation: the losses, their schedule, checkpoints and the export of
`vision.safetensors`. Does not own the drawing (`scenes`, `shapes`, `data`), the tower's mathematics
(`tower`) or the measurement through the language model (`evaluate`).

Everything is supervised where it stands. Half patches name the character they lie on, patches the
characters beside it, their word, and the cell that is to say it; cells say, each thing once and
the filler elsewhere, what a reader would say (`examples.place`). The language model itself is not
needed while training.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo_model import data, examples, lexicon, mixture
from demo_model.examples import Draft, Example
from demo_model.tower import Tower, TowerConfig

QUIET = 1.0  # how far below the filler every unit stays that is not meant
POOL_BATCHES = 16  # examples drawn at a time, so that equal sizes can be batched


@dataclass(frozen=True)
class Weights:
    """Of the losses' parts; each is a mean over what it concerns."""

    glyph: float = 1.0
    mates: float = 0.5
    spots: float = 0.5
    word: float = 0.5
    tag: float = 1.0
    aims: float = 0.5
    said: float = 6.0
    loud: float = 0.2


def collate(group: list[Example]) -> dict[str, Tensor]:
    """Stack examples with equal numbers of kept cells, field by field."""
    names = (field.name for field in fields(Example))
    return {n: torch.from_numpy(np.stack([getattr(e, n) for e in group])) for n in names}


def pool(seed: int, index: int, mix: dict[str, float], patches: int) -> list[dict[str, Tensor]]:
    """The `index`-th group of batches, each of about `patches` patches; a pure function."""
    rng = random.Random(seed * 1_000_003 + index)
    goal = POOL_BATCHES * patches // 4
    made: list[tuple[int, Draft]] = []
    cells = 0
    while cells < goal:
        draft, count = mixture.draw(rng, mix)
        made.append((count, draft))
        cells += count
    made.sort(key=lambda m: m[0])
    batches = []
    while made:
        # As many as fit, all with as many cells as the largest of them.
        group = [made.pop()]
        most = group[0][0]
        while made and (len(group) + 1) * most * 4 <= patches:
            group.append(made.pop())
        batches.append(collate([d.with_cells(rng, most) for _, d in group]))
    rng.shuffle(batches)
    return batches


def normalise(pixels: Tensor) -> Tensor:
    """Bytes to -1..1, as the image processor does."""
    return pixels.float() / 127.5 - 1.0


class Trainee(nn.Module):
    """The tower with its training-only heads."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.tower = Tower(config)
        width, glyphs = config.hidden_size, lexicon.NO_GLYPH + 1
        self.glyph_head = nn.Linear(width, 2 * glyphs)
        self.mate_head = nn.Linear(width, 4 * glyphs)
        self.spot_head = nn.Linear(width, 2 * examples.SPOTS)
        self.aim_head = nn.Linear(width, 2 * data.CELLS)
        self.tag_head = nn.Linear(width, mixture.TAGS)
        classify = self.tower.last.mlp.fc1
        nn.init.zeros_(classify.weight)
        nn.init.constant_(classify.bias, -5.0)  # nearly all cells say nothing

    def name(self, features: Tensor) -> Tensor:
        """Each class's logit from features as the last layer's units read them."""
        out: Tensor = self.tower.last.mlp.fc1(features)
        return out

    def losses(self, batch: dict[str, Tensor], weights: Weights) -> tuple[Tensor, dict[str, float]]:
        """The loss to minimise, and its parts with two shares of right answers."""
        pixels = normalise(batch["pixels"])
        spelled, inside = batch["spots"][..., 0] >= 0, batch["words"] >= 0
        aimed, tagged = batch["aims"][..., 0] >= 0, batch["tags"] >= 0
        with torch.autocast(pixels.device.type, dtype=torch.bfloat16):
            seen = self.tower(pixels, batch["cells"])
            glyph_logits = self.glyph_head(seen.early).float().unflatten(-1, (2, -1)).flatten(0, 3)
            known = seen.middle[spelled]
            mate_logits = self.mate_head(known).float().unflatten(-1, (4, -1)).flatten(0, 1)
            spot_logits = self.spot_head(known).float().unflatten(-1, (2, -1)).flatten(0, 1)
            aim_logits = (
                self.aim_head(seen.late[aimed]).float().unflatten(-1, (2, -1)).flatten(0, 1)
            )
            word_logits = self.name(seen.named[inside]).float()
            tag_logits = self.tag_head(seen.early[tagged]).float()
        # Paper is most of a tile and easy: it must not drown the characters.
        shares = torch.ones(lexicon.NO_GLYPH + 1, device=pixels.device)
        shares[lexicon.NO_GLYPH] = 0.3
        glyphs = batch["glyphs"].flatten()
        report = {"glyph": F.cross_entropy(glyph_logits, glyphs, shares)}
        if len(mate_logits):
            report["mates"] = F.cross_entropy(mate_logits, batch["mates"][spelled].flatten())
            report["spots"] = F.cross_entropy(spot_logits, batch["spots"][spelled].flatten())
        if len(aim_logits):
            report["aims"] = F.cross_entropy(aim_logits, batch["aims"][aimed].flatten())
        if len(word_logits):
            report["word"] = F.cross_entropy(word_logits, batch["words"][inside])
        if len(tag_logits):
            report["tag"] = F.cross_entropy(tag_logits, batch["tags"][tagged])
        logits = with_filler(seen.units.float())  # (B, N, 4, classes and the filler)
        # Every patch is taught its cell's class, and to keep all others quiet: what the language
        # model reads is the sum of all units that fire.
        targets = batch["classes"][:, :, None].expand(-1, -1, 4)
        report["said"] = F.cross_entropy(logits.flatten(0, 2), targets.flatten())
        loud = F.relu(logits[..., :-1] + QUIET).square()
        own = loud.gather(-1, targets[..., None].clamp(max=lexicon.FILLER - 1))[..., 0]
        said = targets != lexicon.FILLER
        report["loud"] = (loud.sum(-1) - own * said).mean()
        total = sum((getattr(weights, k) * v for k, v in report.items()), torch.zeros(()))
        with torch.no_grad():
            real = glyphs != lexicon.NO_GLYPH
            report["hit"] = (glyph_logits.argmax(-1) == glyphs)[real].float().mean().nan_to_num()
            right = logits.argmax(-1) == targets
            report["right"] = right[said].float().mean().nan_to_num()
        return total, {k: float(v.detach()) for k, v in report.items()}


def with_filler(units: Tensor) -> Tensor:
    """Class logits: a unit's class stands against the filler, which is what no unit says."""
    return F.pad(units, (0, 1))


def spell(logits: Tensor) -> list[list[int]]:
    """What each image's tokens say: the classes in order, fillers dropped."""
    best = logits.argmax(-1).tolist()
    return [[c for c in row if c != lexicon.FILLER] for row in best]


@torch.no_grad()
def accuracy(model: Trainee, tiles: list[Example]) -> float:
    """Share of whole tiles whose tokens say exactly what stands there, in reading order."""
    right = 0
    for at in range(0, len(tiles), 25):
        batch = collate(tiles[at : at + 25])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            seen = model.tower(normalise(batch["pixels"]), batch["cells"])
        logits = with_filler(seen.units.float().mean(2))
        for said, tile in zip(spell(logits), tiles[at : at + 25], strict=True):
            right += said == mixture.truth(tile)
    return right / len(tiles)


def make_optimisers(model: Trainee, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for everything else, the classes' matrix among it."""
    encoder = model.tower.vision_model.encoder
    silent = {id(p) for p in model.tower.last.mlp.fc2.parameters()}  # set by `codes`
    silent |= {id(p) for p in model.tower.vision_model.post_layernorm.parameters()}
    silent |= {id(p) for p in model.tower.connector.parameters()}
    classify = model.tower.last.mlp.fc1.weight
    hidden = [
        p for p in encoder.parameters() if p.ndim == 2 and p is not classify and id(p) not in silent
    ]
    taken = silent | {id(p) for p in hidden}
    rest = [p for p in model.parameters() if id(p) not in taken]
    return [
        torch.optim.Muon(
            hidden, lr=rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw", ns_steps=4
        ),
        torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.98), weight_decay=0.01),
    ]


Batches = Iterator[tuple[dict[str, Tensor], int, int]]


def stream(
    seed: int, begin: tuple[int, int], mix: dict[str, float], patches: int, drawers: int = 0
) -> Batches:
    """Batches from the given pool on, the given number of its batches left out; beside each, where
    to go on after it. With `drawers`, that many processes draw the pools ahead."""
    index, used = begin
    if drawers:
        with ProcessPoolExecutor(drawers, initializer=_anywhere) as workers:
            ahead = [
                workers.submit(pool, seed, index + i, mix, patches) for i in range(1 + drawers)
            ]
            while True:
                batches = ahead.pop(0).result()
                ahead.append(workers.submit(pool, seed, index + 1 + drawers, mix, patches))
                for i in range(used, len(batches)):
                    yield batches[i], index, i + 1
                index, used = index + 1, 0
    while True:
        batches = pool(seed, index, mix, patches)
        for i in range(used, len(batches)):
            yield batches[i], index, i + 1
        index, used = index + 1, 0


def _anywhere() -> None:
    """Let a drawing process run on every core, whichever this one is bound to."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    runs: Path = args.runs
    runs.mkdir(parents=True, exist_ok=True)
    mix = {k: float(v) for k, v in (pair.split("=") for pair in args.mix.split(","))}
    config = TowerConfig(
        num_hidden_layers=args.layers,
        hidden_size=args.hidden,
        intermediate_size=lexicon.FILLER,
        num_attention_heads=args.hidden // 32,
    )
    model, average = Trainee(config), Trainee(config)
    optimisers = make_optimisers(model, args.lr)
    step, spent_s, index, used = 0, 0.0, 0, 0
    checkpoint = runs / "last.pt"
    if checkpoint.exists():
        state: dict[str, Any] = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        average.load_state_dict(state["average"])
        for optimiser, saved in zip(optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        step, spent_s = state["step"], state["spent_s"]
        index, used = state["pool"], state["used"]
    elif args.start_from:
        print(model.load_state_dict(torch.load(args.start_from)["average"], strict=False))
        average.load_state_dict(model.state_dict())
    tiles = {kind: mixture.validation(kind, args.validation) for kind in mix}
    # The processor's time, not the clock's: a stopped or crowded run loses none of its schedule.
    started = time.process_time() - spent_s
    next_report = time.process_time() + args.report_s
    sums: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    images = patches = 0
    for batch, index, used in stream(  # noqa: B020
        args.seed, (index, used), mix, args.patches, args.drawers
    ):
        elapsed = time.process_time() - started
        progress = elapsed / args.seconds
        if progress >= 1.0:
            break
        rate = args.lr * min(1.0, (step + 1) / 50)
        rate *= min(1.0, max(0.02, (1 - progress) / args.cooldown))
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate
        loss, parts = model.losses(batch, Weights())
        model.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
        step += 1
        keep = min(0.998, 1 - 1 / (1 + step / 10))
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - keep)
        images += len(batch["cells"])
        patches += batch["cells"].numel() * 4
        for key, value in parts.items():
            sums[key] += value
            counts[key] += 1
        if time.process_time() >= next_report:
            means = " ".join(f"{k} {v / counts[k]:.3f}" for k, v in sums.items())
            scores = " ".join(f"{k} {accuracy(average, t):.3f}" for k, t in tiles.items())
            pace = patches / (elapsed - spent_s)
            print(
                f"{elapsed:6.0f} s step {step} images {images} patches/s {pace:.0f} "
                f"lr {rate:.1e} | {means} | held out: {scores}",
                flush=True,
            )
            sums.clear()
            counts.clear()
            save(runs, model, average, optimisers, step, elapsed, index, used)
            next_report = time.process_time() + args.report_s
    save(runs, model, average, optimisers, step, time.process_time() - started, index, used)


def save(
    runs: Path,
    model: Trainee,
    average: Trainee,
    optimisers: list[torch.optim.Optimizer],
    step: int,
    spent_s: float,
    index: int,
    used: int,
) -> None:
    """Write everything needed to go on exactly, atomically."""
    state = {
        "model": model.state_dict(),
        "average": average.state_dict(),
        "optimisers": [o.state_dict() for o in optimisers],
        "config": model.tower.config.as_dict(),
        "step": step,
        "spent_s": spent_s,
        "pool": index,
        "used": used,
    }
    torch.save(state, runs / "part.pt")
    os.replace(runs / "part.pt", runs / "last.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--start-from", type=Path, help="start from this run's weights only")
    parser.add_argument("--runs", type=Path, default=Path("runs/demo"))
    parser.add_argument("--seconds", type=float, default=7200)
    parser.add_argument("--cooldown", type=float, default=0.4, help="share with a falling rate")
    parser.add_argument("--report-s", type=float, default=120)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--validation", type=int, default=100)
    parser.add_argument("--patches", type=int, default=4096)
    parser.add_argument("--drawers", type=int, default=0, help="processes that draw images ahead")
    parser.add_argument("--mix", default=mixture.DEFAULT)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
