"""Ways to draft tokens, by what they cost and what they yield.

Owns: the expected number of tokens per verification, DraftMethod, the usual methods and their
published numbers. Does not own: the speed-up they
bring (speculate.py). Imports no torch.

Tokens per step depend on text and training. The defaults are those of Spec-Bench's leaderboard
(Xia et al. 2024, arXiv 2401.07851: Vicuna-7B-v1.3, greedy, batch 1, mean accepted tokens per
step): measure your own and give them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from chunked_prefill.planner.devices import PlanError, require
from chunked_prefill.planner.shapes import ModelShape

_SPEC_BENCH = "Spec-Bench, Vicuna-7B"
_HEADS = 4
"""Medusa's heads for Vicuna (arXiv 2401.10774, section 3)."""


def expected_tokens(acceptance: float, drafted: int) -> float:
    """E = (1 − α^(γ+1)) / (1 − α): tokens that one verification of γ drafted ones yields.

    Each is accepted with chance α, the first refusal ends it, and one token comes from the target
    itself (Leviathan et al. 2022, arXiv 2211.17192, equation 1).
    """
    if acceptance == 1:
        return drafted + 1.0
    return float((1 - acceptance ** (drafted + 1)) / (1 - acceptance))


def tree_tokens(acceptance: float, further: float, widths: tuple[int, ...]) -> float:
    """Tokens that one verification of a tree yields: 1 + Σ_depth Π a(width).

    a(w) = 1 − (1 − α)(1 − β)^(w−1): the first candidate is right with chance α, each further one
    catches a share β of what is still wrong. Widths of 1 give `expected_tokens`. Trees of drafts:
    SpecInfer, arXiv 2305.09781. Medusa (arXiv 2401.10774, section 2.1.2) reports 60 % for the first
    candidate and over 80 % for five, which is β = 0.16.
    """
    total = reached = 1.0
    for width in widths:
        reached *= 1 - (1 - acceptance) * (1 - further) ** (width - 1)
        total += reached
    return total


@dataclass(frozen=True, slots=True)
class Draft:
    """What the speed-up needs to know of a method on one target."""

    accepted: float
    """E: tokens per verification, the target's own included."""
    verified: float
    """Rows per sequence of a verification."""
    cost: float
    """Of drafting for one verification, in steps of the target."""


@dataclass(frozen=True, slots=True)
class DraftMethod:
    name: str
    accepted: float
    """E: tokens per verification, the target's own included."""
    passes: float
    """Draft passes one after the other per verification."""
    verified: int
    """Rows per sequence of a verification, the last accepted token's included."""
    source: str
    pass_cost: float | None = None
    """Of one draft pass in steps of the target; None: from `parameters`."""
    heads: int = 0
    """Medusa's heads, read once per pass."""
    layers: int = 0
    """EAGLE's decoder layers, with the target's own output head."""

    def on(self, shape: ModelShape) -> Draft:
        return Draft(self.accepted, self.verified, self.cost(shape))

    def cost(self, shape: ModelShape) -> float:
        """All draft passes of a verification, in steps of the target: bytes read of the one by
        those of the other, as drafting is bound by reading (Leviathan et al. 2022, arXiv
        2211.17192, definition 3.7, whose c is `pass_cost`).

        A Medusa head is a d x d layer and an output head (arXiv 2401.10774, section 2.1.1); EAGLE
        joins feature and embedding by 2d x d, and has one decoder layer and the target's head
        (arXiv 2401.15077, section 4.1).
        """
        if self.pass_cost is not None:
            return self.passes * self.pass_cost
        width, head = shape.hidden_size, shape.hidden_size * shape.vocab_size
        numbers = self.heads * (width**2 + head)
        if self.layers:
            numbers += self.layers * shape.layer_parameters + 2 * width**2 + head
        return self.passes * numbers / shape.active_parameters


def usual_methods(
    *,
    acceptance: float = 0.7,
    drafted: int = 4,
    draft_cost: float = 0.05,
    tree: tuple[int, ...] = (3, 2, 1, 1),
    further: float = 0.16,
    measured: Mapping[str, float] | None = None,
) -> tuple[DraftMethod, ...]:
    """Draft model, its tree, n-grams of the prompt, Medusa's heads, EAGLE and EAGLE-2.

    `measured` replaces tokens per step by name (draft, tree, ngram, medusa, eagle, eagle2). Raises
    PlanError for chances outside 0 to 1, for empty trees, and for names that are none.
    """
    require("acceptance", acceptance, 0, 1, "the chance that a drafted token is accepted")
    require("further", further, 0, 1, "the share of misses that a further candidate catches")
    require("drafted", drafted, 1, 64, "tokens per draft")
    require("draft_cost", draft_cost, 0, 10, "one draft pass in steps of the target")
    if not tree or not all(1 <= width <= 64 for width in tree) or len(tree) > 16:
        raise PlanError(f"tree {tree} needs 1 to 16 widths from 1 to 64, such as 3,2,1,1")
    nodes, level = 1, 1
    for width in tree:
        level *= width
        nodes += level
    require("tree", nodes, 1, 4096, "rows that one verification takes")
    chance = f"α = {acceptance:g}, given"
    methods = {
        "draft": DraftMethod(
            f"draft model, {drafted} tokens",
            expected_tokens(acceptance, drafted),
            drafted,
            drafted + 1,
            chance,
            pass_cost=draft_cost,
        ),
        "tree": DraftMethod(
            f"draft model, tree {'-'.join(map(str, tree))}",
            tree_tokens(acceptance, further, tree),
            len(tree),
            nodes,
            f"{chance}; β = {further:g}",
            pass_cost=draft_cost,
        ),
        "ngram": DraftMethod("n-grams of the prompt", 1.74, 0, 11, _SPEC_BENCH, pass_cost=0.0),
        "medusa": DraftMethod("Medusa, 4 heads", 2.32, 1, 64, _SPEC_BENCH, heads=_HEADS),
        "eagle": DraftMethod("EAGLE", 3.57, 5, 26, _SPEC_BENCH, layers=1),
        "eagle2": DraftMethod("EAGLE-2", 4.36, 6, 60, _SPEC_BENCH, layers=1),
    }
    for name, tokens in (measured or {}).items():
        if name not in methods:
            raise PlanError(f"accepted names {name!r}; the methods are {', '.join(methods)}")
        most = methods[name].verified
        require(f"accepted {name}", tokens, 1, most, "tokens per verification")
        methods[name] = replace(methods[name], accepted=tokens, source="given")
    return tuple(methods.values())
