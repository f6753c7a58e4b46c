"""Train the demo's vision tower on generated images; resumable, bounded by wall-clock time.

Owns the optimisation: the losses, their schedule, checkpoints and the export of
`vision.safetensors`. Does not own the drawing (`scenes`, `shapes`, `data`), the tower's mathematics
(`tower`) or the measurement through the language model (`evaluate`).

Everything is supervised where it stands. Half patches name the character they lie on, patches name
their word, and the image tokens say, each thing once and the filler elsewhere, what a reader would
say there (`tower.placing_loss`); a token's class is the nearest of the language model's own
embeddings. The language model itself is not needed while training.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from demo_model import data, lexicon, mixture
from demo_model.assemble import VISION_FILE, find_sources
from demo_model.examples import Draft, Example
from demo_model.tower import Tower, TowerConfig, placing_loss

# Classes are told apart by angle: the language model normalises what it reads, and a distance lets
# tokens overshoot the embeddings of a thousand neighbours.
SHARPNESS = 20.0
POOL_BATCHES = 16  # examples drawn at a time, so that equal sizes can be batched


def collate(group: list[Example]) -> dict[str, Tensor]:
    """Stack examples with equal numbers of kept cells; starts become positions among those."""
    pixels = np.stack([e.pixels for e in group])
    cells = np.stack([e.cells for e in group])
    b, n = cells.shape
    position = np.full((b, data.CELLS**2 + 1), -1, dtype=np.int64)
    np.put_along_axis(position, cells, np.arange(n)[None].repeat(b, 0), 1)
    where = np.concatenate([np.full(len(e.starts), i) for i, e in enumerate(group)])
    starts = np.concatenate([e.starts for e in group])
    # An unused start (-1) picks the last column, which is -1 as well.
    starts = position[where[:, None], starts]
    return {
        "pixels": torch.from_numpy(pixels),
        "cells": torch.from_numpy(cells),
        "glyphs": torch.from_numpy(np.stack([e.glyphs for e in group])),
        "mates": torch.from_numpy(np.stack([e.mates for e in group])),
        "words": torch.from_numpy(np.stack([e.words for e in group])),
        "tags": torch.from_numpy(np.stack([e.tags for e in group])),
        "where": torch.from_numpy(where),
        "starts": torch.from_numpy(starts),
        "tokens": torch.from_numpy(np.concatenate([e.tokens for e in group])),
    }


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
    """The tower with its training-only heads and the embeddings it must land on."""

    def __init__(self, config: TowerConfig, anchors: Tensor) -> None:
        super().__init__()
        self.tower = Tower(config)
        self.glyph_head = nn.Linear(config.hidden_size, 2 * (lexicon.NO_GLYPH + 1))
        self.mate_head = nn.Linear(config.hidden_size, 4 * (lexicon.NO_GLYPH + 1))
        self.word_head = nn.Linear(config.hidden_size, len(lexicon.CLASSES))
        self.tag_head = nn.Linear(config.hidden_size, mixture.TAGS)
        self.anchors: Tensor
        self.register_buffer("anchors", anchors.clone())  # (classes, text), the filler last

    def class_logits(self, tokens: Tensor) -> Tensor:
        """Log-odds of each class from the angle between a token and that class's embedding."""
        tokens, anchors = (F.normalize(x.float(), dim=-1) for x in (tokens, self.anchors))
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
            products = tokens @ anchors.T
        return SHARPNESS * products.float()

    def losses(
        self,
        batch: dict[str, Tensor],
        aux_weight: float = 1.0,
        place_weight: float = 0.4,
        land_weight: float = 0.3,
    ) -> tuple[Tensor, dict[str, float]]:
        pixels = normalise(batch["pixels"])
        with torch.autocast(pixels.device.type, dtype=torch.bfloat16):
            tokens, late, middle, early = self.tower(pixels, batch["cells"])
            glyph_logits = self.glyph_head(early).float().unflatten(-1, (2, -1)).flatten(0, 3)
            spelled = batch["mates"][..., 0] >= 0
            mate_logits = self.mate_head(middle[spelled]).float().unflatten(-1, (4, -1))
            inside = batch["words"] >= 0
            word_logits = self.word_head(late[inside]).float()
            tagged = batch["tags"] >= 0
            tag_logits = self.tag_head(early[tagged]).float()
        # Paper is most of a tile and easy: it must not drown the characters.
        weights = torch.ones(lexicon.NO_GLYPH + 1, device=pixels.device)
        weights[lexicon.NO_GLYPH] = 0.3
        glyphs = batch["glyphs"].flatten()
        glyph = F.cross_entropy(glyph_logits, glyphs, weights)
        report = {"glyph": glyph}
        total = aux_weight * glyph
        if len(mate_logits):
            mates = batch["mates"][spelled]
            report["mates"] = F.cross_entropy(mate_logits.flatten(0, 1), mates.flatten())
            total = total + aux_weight * report["mates"]
        if len(word_logits):
            report["word"] = F.cross_entropy(word_logits, batch["words"][inside])
            total = total + 0.5 * aux_weight * report["word"]
        if len(tag_logits):
            report["tag"] = F.cross_entropy(tag_logits, batch["tags"][tagged])
            total = total + aux_weight * report["tag"]
        logits = self.class_logits(tokens)
        placed, chosen = placing_loss(
            logits.log_softmax(-1), batch["where"], batch["starts"], batch["tokens"]
        )
        # The likeliest place is also taught outright: it breaks ties between places.
        settle = F.cross_entropy(logits.flatten(0, 1), chosen.flatten())
        said = chosen != lexicon.FILLER
        off = (tokens.float() - self.anchors[chosen]).square().sum(-1)
        # The language model reads a token only close to its embedding, however near the class is.
        land = 0.3 * off[~said].mean().nan_to_num() + off[said].mean().nan_to_num()
        items = max(1, len(batch["where"])) / len(batch["cells"])
        total = total + place_weight * placed / items + settle + land_weight * land
        with torch.no_grad():
            real = glyphs != lexicon.NO_GLYPH
            hit = (glyph_logits.argmax(-1) == glyphs)[real].float().mean().nan_to_num()
            right = (logits.argmax(-1) == chosen)[said].float().mean().nan_to_num()
        report |= {"place": placed / items, "settle": settle, "land": land}
        report |= {"hit": hit, "right": right}
        return total, {k: float(v.detach()) for k, v in report.items()}


def spell(logits: Tensor, cells: int = data.CELLS**2) -> list[list[int]]:
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
            tokens, *_ = model.tower(normalise(batch["pixels"]), batch["cells"])
        logits = model.class_logits(tokens)
        for said, tile in zip(spell(logits), tiles[at : at + 25], strict=True):
            right += said == mixture.truth(tile)
    return right / len(tiles)


def language_embeddings() -> Tensor:
    """The language model's own embeddings of the classes (classes, width), from its GGUF file."""
    import gguf

    reader = gguf.GGUFReader(str(find_sources(Path(__file__)).gguf))
    vocabulary = reader.fields["tokenizer.ggml.tokens"].contents()
    table = next(t for t in reader.tensors if t.name == "token_embd.weight")
    full = gguf.dequantize(table.data, table.tensor_type)
    return torch.from_numpy(full[lexicon.vocabulary_ids(vocabulary)].copy())


def subspace(anchors: Tensor, rank: int) -> Tensor:
    """The projector (width, width) onto the `rank` directions in which the classes differ most.

    A token is 768 numbers of four patches that know much the same, which do not reach every one of
    a thousand embeddings in 576 dimensions; the language model reads their images in 192 as well.
    Characters, the few words of shapes and the filler are kept nearly exact.
    """
    weights = torch.ones(len(anchors))
    weights[len(lexicon.WORDS) :] = 5.0
    *_, directions = torch.linalg.svd(anchors * weights[:, None], full_matrices=False)
    projector: Tensor = directions[:rank].T @ directions[:rank]
    return projector


def read_prompt(path: Path) -> tuple[Tensor, Tensor]:
    """The tuned filler (width,) and the rows of the image's special tokens, from `tune` or from
    an exported tower."""
    with safe_open(path, framework="pt") as file:
        return file.get_tensor("filler").float(), file.get_tensor("special_rows").float()


def export(tower: Tower, filler: Tensor, rows: Tensor, path: Path, note: str) -> None:
    """Write the tower as half-precision safetensors under Idefics3's names, atomically."""
    tensors = {f"model.{k}": v.detach().cpu().half() for k, v in tower.state_dict().items()}
    tensors["special_rows"] = rows.half()
    tensors["filler"] = filler.half()
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
        torch.optim.Muon(
            hidden, lr=rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw", ns_steps=4
        ),
        torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def stream(
    seed: int, begin: tuple[int, int], mix: dict[str, float], patches: int
) -> Iterator[tuple[dict[str, Tensor], int, int]]:
    """Batches from the given pool on, the given number of its batches left out; beside each, where
    to go on after it."""
    index, used = begin
    while True:
        batches = pool(seed, index, mix, patches)
        for i in range(used, len(batches)):
            yield batches[i], index, i + 1
        index, used = index + 1, 0


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    runs: Path = args.runs
    runs.mkdir(parents=True, exist_ok=True)
    mix = {k: float(v) for k, v in (pair.split("=") for pair in args.mix.split(","))}
    filler, rows = read_prompt(args.prompt)
    anchors = language_embeddings()
    anchors[lexicon.FILLER] = filler
    anchors = anchors @ subspace(anchors, args.rank)
    config = TowerConfig(
        num_hidden_layers=args.layers,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_attention_heads=args.hidden // 32,
    )
    model, average = Trainee(config, anchors), Trainee(config, anchors)
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
    for part in (model, average):
        part.anchors.copy_(anchors)
    tiles = {kind: mixture.validation(kind, args.validation) for kind in mix}
    started = time.monotonic() - spent_s
    next_report = time.monotonic() + args.report_s
    sums: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    images = patches = 0
    for batch, index, used in stream(args.seed, (index, used), mix, args.patches):  # noqa: B020
        elapsed = time.monotonic() - started
        progress = elapsed / args.seconds
        if progress >= 1.0:
            break
        rate = args.lr * min(1.0, (step + 1) / 50)
        rate *= min(1.0, max(0.02, (1 - progress) / args.cooldown))
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate
        loss, parts = model.losses(batch, args.aux, args.place, args.land)
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
        if time.monotonic() >= next_report:
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
            next_report = time.monotonic() + args.report_s
    save(runs, model, average, optimisers, step, time.monotonic() - started, index, used)
    export(average.tower, filler, rows, runs / "vision.safetensors", f"step {step}")


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
    parser.add_argument("--prompt", type=Path, default=VISION_FILE, help="filler and special rows")
    parser.add_argument("--runs", type=Path, default=Path("runs/demo"))
    parser.add_argument("--seconds", type=float, default=7200)
    parser.add_argument("--cooldown", type=float, default=0.4, help="share with a falling rate")
    parser.add_argument("--report-s", type=float, default=120)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--rank", type=int, default=192, help="of the embeddings to land on")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--validation", type=int, default=100)
    parser.add_argument("--patches", type=int, default=4096)
    parser.add_argument("--aux", type=float, default=1.0, help="weight of the patches' labels")
    parser.add_argument("--place", type=float, default=0.4, help="weight of the alignment")
    parser.add_argument("--land", type=float, default=0.3, help="weight of the exact embedding")
    parser.add_argument("--mix", default=mixture.DEFAULT)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
