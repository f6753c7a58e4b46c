"""What the tower's last product says: a code per class that becomes the class's embedding.

Owns: fitting the codes to the language model's embeddings, writing them into a trained tower, and
the export of `vision.safetensors`. Does not own training, or how the embeddings' surroundings are
tuned (`tune`).

The last layer's hidden units are the classes (`tower`). A unit that fires adds its code, a column
of that layer's second matrix, so large that nothing else in the patch's state counts; the closing
layer norm takes the size away; the connector averages a token's four patches and maps codes to
embeddings. Where no unit fires the bias stands, which is the filler's code. So a token is read as
one word even where a regression onto a thousand embeddings would end between several of them.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from demo_model import lexicon
from demo_model.assemble import VISION_FILE, find_sources
from demo_model.tower import Tower, TowerConfig

SHARPNESS = 4.0  # of the units: a logit of -1 is silent through GELU
LOUDNESS = 1600.0  # of a firing unit's code, per logit, against states of a few per channel
FILLER_LOUDNESS = 100.0  # against the same states, and well below any firing unit


def language_embeddings() -> Tensor:
    """The language model's own embeddings of the classes (classes, width), from its GGUF file."""
    import gguf

    reader = gguf.GGUFReader(str(find_sources(Path(__file__)).gguf))
    vocabulary = reader.fields["tokenizer.ggml.tokens"].contents()
    table = next(t for t in reader.tensors if t.name == "token_embd.weight")
    full = gguf.dequantize(table.data, table.tensor_type)
    return torch.from_numpy(full[lexicon.vocabulary_ids(vocabulary)].copy())


@dataclass(frozen=True)
class Codes:
    """`codes` (classes, hidden), each of mean 0 and variance 1, the filler's last; `matrix` (text,
    hidden) maps them to their embeddings less `middle` (text,)."""

    codes: Tensor
    matrix: Tensor
    middle: Tensor

    def embeddings(self) -> Tensor:
        """What the language model reads for each class, (classes, text)."""
        return self.codes @ self.matrix.T + self.middle


def fit_codes(anchors: Tensor, hidden: int, rounds: int = 30) -> Codes:
    """Codes whose linear images are as close to `anchors` (classes, text) as may be.

    A layer norm's output has mean 0 and one size: `hidden` - 1 directions, of which the classes'
    principal ones are taken. Characters, the few words of shapes and the filler weigh more than the
    word list and are kept nearly exact. Matrix and codes are improved in turn.
    """
    weights = torch.ones(len(anchors), 1)
    weights[len(lexicon.WORDS) :] = 5.0
    middle = anchors.mean(0)
    centred = anchors - middle
    *_, directions = torch.linalg.svd(centred * weights, full_matrices=False)
    _, _, right = torch.linalg.svd(torch.ones(1, hidden))
    basis = right[1:]  # orthonormal rows without a mean
    size = hidden**0.5
    codes = size * F.normalize(centred @ directions[: hidden - 1].T, dim=-1)
    for _ in range(rounds):
        solved = torch.linalg.lstsq(codes * weights, centred * weights).solution  # (hidden-1, text)
        nearest = torch.linalg.lstsq(solved.T, centred.T).solution.T
        codes = size * F.normalize(0.5 * codes + 0.5 * size * F.normalize(nearest, dim=-1), dim=-1)
    solved = torch.linalg.lstsq(codes * weights, centred * weights).solution
    return Codes(codes @ basis, solved.T @ basis, middle)


@torch.no_grad()
def install(tower: Tower, codes: Codes) -> Tower:
    """A copy of a trained tower that says these codes; the filler's is the last."""
    tower = copy.deepcopy(tower).float()
    mlp = tower.last.mlp
    for part in mlp.fc1.parameters():
        part.mul_(SHARPNESS)
    mlp.fc2.weight.copy_(LOUDNESS / SHARPNESS * codes.codes[:-1].T)
    mlp.fc2.bias.copy_(FILLER_LOUDNESS * codes.codes[-1])
    norm = tower.vision_model.post_layernorm
    norm.weight.fill_(1.0)
    norm.bias.fill_(1.0)  # the direction without codes carries the embeddings' middle
    hidden = tower.config.hidden_size
    matrix = codes.matrix - codes.matrix.mean(1, keepdim=True)  # which no code has a part of
    matrix = matrix + codes.middle[:, None] / hidden
    patches = tower.config.scale_factor**2
    tower.connector.modality_projection.proj.weight.copy_(matrix.repeat(1, patches) / patches)
    return tower


def captions(tensors: Mapping[str, Tensor]) -> Tensor:
    """What an exported tower says for each class when all four patches agree, (classes, text)."""
    last = max(int(k.split(".")[4]) for k in tensors if ".layers." in k)
    second = f"model.vision_model.encoder.layers.{last}.mlp.fc2."
    states = torch.cat([tensors[second + "weight"].T, tensors[second + "bias"][None]]).float()
    norm = "model.vision_model.post_layernorm."
    said = (
        F.layer_norm(states, states.shape[-1:]) * tensors[norm + "weight"] + tensors[norm + "bias"]
    )
    matrix = tensors["model.connector.modality_projection.proj.weight"].float()
    return said.repeat(1, matrix.shape[1] // states.shape[1]) @ matrix.T


def export(tower: Tower, prompt: Path, path: Path, note: str) -> None:
    """Write a trained tower with tuned codes (from `tune`) as half-precision safetensors under
    Idefics3's names, atomically."""
    tuned = load_file(prompt)
    said = install(tower, Codes(tuned["codes"], tuned["matrix"], tuned["middle"]))
    tensors = {f"model.{k}": v for k, v in said.padded_state().items()}
    tensors["special_rows"] = tuned["special_rows"]
    metadata = {"config": json.dumps(tower.config.as_dict()), "note": note, "format": "pt"}
    beside = path.with_suffix(".partial")
    save_file({k: v.half().contiguous() for k, v in tensors.items()}, beside, metadata=metadata)
    beside.chmod(0o644)
    os.replace(beside, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/demo"), help="of `train`")
    parser.add_argument("--prompt", type=Path, default=Path("runs/demo/prompt.safetensors"))
    parser.add_argument("--out", type=Path, default=VISION_FILE)
    args = parser.parse_args()
    state = torch.load(args.runs / "last.pt")
    tower = Tower(TowerConfig(**state["config"]))
    weights = {k.removeprefix("tower."): v for k, v in state["average"].items()}
    tower.load_state_dict({k: v for k, v in weights.items() if k in tower.state_dict()})
    export(tower, args.prompt, args.out, f"step {state['step']}, {state['spent_s']:.0f} s")


if __name__ == "__main__":
    main()
