"""Published figures of speculative decoding, and what drafts gain by batch and context."""

from __future__ import annotations

import random

import pytest

from chunked_prefill.planner.deployment import Deployment
from chunked_prefill.planner.devices import DEVICES, PlanError
from chunked_prefill.planner.drafts import (
    Draft,
    DraftMethod,
    expected_tokens,
    tree_tokens,
    usual_methods,
)
from chunked_prefill.planner.shapes import SHAPES
from chunked_prefill.planner.speculate import break_even, plan_speculate, speedup
from tests.chunked_prefill.planner.reports import check, rows

BIG = Deployment(SHAPES["llama-3.1-70b"], DEVICES["h100"], 8)
CHAIN = Draft(expected_tokens(0.7, 4), verified=5, cost=4 * 0.05)


@pytest.mark.parametrize(
    ("acceptance", "drafted", "tokens"),
    [
        # Leviathan et al. 2022, arXiv 2211.17192, table 1.
        (0.6, 2, 1.96),
        (0.7, 3, 2.53),
        (0.8, 2, 2.44),
        (0.8, 5, 3.69),
        (0.9, 2, 2.71),
        (0.9, 10, 6.86),
    ],
)
def test_expected_tokens(acceptance: float, drafted: int, tokens: float) -> None:
    assert round(expected_tokens(acceptance, drafted), 2) == tokens


def test_expected_tokens_at_the_ends() -> None:
    assert expected_tokens(0, 5) == 1
    assert expected_tokens(1, 5) == 6


@pytest.mark.parametrize(("context", "batch"), [(0, 115), (1024, 137), (2048, 171), (8192, None)])
def test_the_batch_from_which_a_draft_costs(context: int, batch: int | None) -> None:
    """70B on H100, α = 0.7, γ = 4, c = 0.05, MFU 0.6, MBU 0.8."""
    assert break_even(BIG, CHAIN, context) == batch
    if batch is not None:
        assert speedup(BIG, CHAIN, batch - 1, context) >= 1 > speedup(BIG, CHAIN, batch, context)


def test_the_answer_does_not_depend_on_how_many_devices_share_the_model() -> None:
    four = Deployment(BIG.shape, BIG.device, 4)
    assert speedup(four, CHAIN, 64, 1024) == pytest.approx(speedup(BIG, CHAIN, 64, 1024))


def test_alone_it_is_theorem_3_8() -> None:
    """E / (γc + 1) while reading binds."""
    assert speedup(BIG, CHAIN, 1, 0) == pytest.approx(expected_tokens(0.7, 4) / (4 * 0.05 + 1))


def test_a_tree_of_one_candidate_is_a_chain() -> None:
    assert tree_tokens(0.7, 0.16, (1,) * 4) == pytest.approx(expected_tokens(0.7, 4))


def test_five_candidates_reach_what_medusa_reports() -> None:
    """60 % for the first, over 80 % for five (arXiv 2401.10774, section 2.1.2)."""
    assert tree_tokens(0.6, 0.16, (5,)) - 1 == pytest.approx(0.8, rel=0.01)


def test_trees_against_draws() -> None:
    """The formula against verification played out: at each depth the first candidate is right with
    chance α, each further one catches β of what is still wrong."""
    draw, widths, total, games = random.Random(5), (3, 2, 1), 0, 20_000
    for _ in range(games):
        total += 1
        for width in widths:
            right = draw.random() < 0.6
            for _ in range(width - 1):
                right = right or draw.random() < 0.3
            if not right:
                break
            total += 1
    assert total / games == pytest.approx(tree_tokens(0.6, 0.3, widths), rel=0.01)


def test_costs_of_heads_and_of_a_layer() -> None:
    """Of one pass over a 7B: four heads of 4,096² + 4,096 · 32,000; one layer, 2 · 4,096² and the
    head."""
    shape = SHAPES["llama-2-7b"]
    methods = {method.name: method for method in usual_methods()}
    heads = 4 * (4096**2 + 4096 * 32_000) / shape.num_parameters
    assert methods["Medusa, 4 heads"].cost(shape) == pytest.approx(heads)
    layer = shape.layer_parameters + 2 * 4096**2 + 4096 * 32_000
    assert methods["EAGLE"].cost(shape) == pytest.approx(5 * layer / shape.num_parameters)
    assert methods["n-grams of the prompt"].cost(shape) == 0
    assert methods["draft model, 4 tokens"].cost(shape) == pytest.approx(0.2)


def test_published_tokens_per_step() -> None:
    """Spec-Bench's leaderboard, Vicuna-7B-v1.3, greedy (arXiv 2401.07851)."""
    wanted = {"n-grams of the prompt": 1.74, "Medusa, 4 heads": 2.32, "EAGLE": 3.57}
    found = {method.name: method.accepted for method in usual_methods()}
    assert wanted.items() <= found.items()
    assert found["EAGLE-2"] == 4.36


def test_the_plan_compares_methods() -> None:
    report = plan_speculate(BIG, usual_methods(), context=1024, batch=64)
    check(report)
    table = {row["method"]: row for row in rows(report)}
    chain = table["draft model, 4 tokens"]
    assert chain["pays below"] == 137
    assert chain["on below"] < 137
    assert chain["gained per cost"] == pytest.approx((2.7731 - 1) / 0.2)
    assert table["n-grams of the prompt"]["gained per cost"] is None
    assert table["EAGLE-2"]["batch 1"] > chain["batch 1"]
    assert table["EAGLE-2"]["batch 64"] < 1 < chain["batch 64"]
    assert "Best there: draft model, 4 tokens" in report.binds
    assert "alone: EAGLE-2" in report.binds
    # Of eight sequences of 8k even large batches are bound by their KV.
    long = plan_speculate(BIG, usual_methods(), context=8192)
    check(long)
    dear = plan_speculate(BIG, usual_methods(acceptance=0.1, draft_cost=1.0))
    assert "draft model, 4 tokens never pays here" in dear.reverses[0]
    assert "draft model, 4 tokens pays at any batch" in long.reverses[0]


def test_measured_tokens_replace_published_ones() -> None:
    methods = {m.name: m for m in usual_methods(measured={"eagle": 2.9})}
    assert (methods["EAGLE"].accepted, methods["EAGLE"].source) == (2.9, "given")


def test_experts_make_verification_dear() -> None:
    """Four more tokens read further experts, so that a draft gains less than for a dense model."""
    experts = Deployment(SHAPES["deepseek-v3"], DEVICES["h200"], 8, "fp8")
    assert speedup(experts, CHAIN, 1, 1024) < 0.6 * speedup(BIG, CHAIN, 1, 1024)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"acceptance": 1.2}, "acceptance is 1.2"),
        ({"drafted": 0}, "drafted is 0"),
        ({"draft_cost": -1}, "draft_cost is -1"),
        ({"further": 2}, "further is 2"),
        ({"tree": ()}, "needs 1 to 16 widths"),
        ({"tree": (64, 64, 64)}, "tree is 266,305"),
        ({"measured": {"oracle": 3}}, "names 'oracle'; the methods are draft, tree"),
        ({"measured": {"ngram": 12}}, "accepted ngram is 12; it must be from 1 to 11"),
    ],
)
def test_nonsense_is_refused(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        usual_methods(**arguments)  # type: ignore[arg-type]


def test_plans_of_nonsense_are_refused() -> None:
    method = DraftMethod("free", 2.0, 0, 2, "given", pass_cost=0.0)
    with pytest.raises(PlanError, match="batch is 0"):
        plan_speculate(BIG, (method,), batch=0)
    with pytest.raises(PlanError, match="mbu is 0"):
        plan_speculate(BIG, (method,), mbu=0)
