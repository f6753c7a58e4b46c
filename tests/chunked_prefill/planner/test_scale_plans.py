"""Published figures of splits, links, adapters, images and fleets: integers exactly, ratios within
1 %."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chunked_prefill.planner.deployment import Deployment
from chunked_prefill.planner.devices import DEVICES, PlanError
from chunked_prefill.planner.disaggregate import (
    plan_disaggregate,
    prefill_duty,
    transfer_bytes,
    transfer_share,
)
from chunked_prefill.planner.fleet import (
    attention_share,
    decode_batch,
    plan_fleet,
    prefill_servers,
)
from chunked_prefill.planner.images import PlannedImage, image_flops, plan_images, tower_flops
from chunked_prefill.planner.lora import adapted_linears, adapter_parameters, added_reads, plan_lora
from chunked_prefill.planner.shapes import SHAPES, ModelShape
from chunked_prefill.planner.users import (
    Split,
    device_load,
    plan_users,
    splits,
    token_seconds,
    users_of_split,
)
from chunked_prefill.planner.vision_shapes import VISION_FILES, read_vision_shape
from tests.chunked_prefill.planner.reports import check, rows, value

H100, H200 = DEVICES["h100"], DEVICES["h200"]
BIG = Deployment(SHAPES["llama-3.1-70b"], H100, 8)
V3 = Deployment(SHAPES["deepseek-v3"], H200, 16, "fp8")
K128 = 131_072


@pytest.mark.parametrize(("formats", "at_128k", "at_8k"), [("bf16", 9, 156), ("fp8", 22, 364)])
def test_users_of_eight_h100(formats: str, at_128k: int, at_8k: int) -> None:
    deployment = replace(BIG, weights=formats, kv=formats)
    split = Split(tensor=8)
    assert users_of_split(deployment, split, K128) == at_128k
    # One device's share of a context is not a whole number of bytes less than all devices' sum.
    assert users_of_split(deployment, split, 8192) == pytest.approx(at_8k, abs=1)
    assert deployment.users(K128) == at_128k
    assert deployment.users(8192) == at_8k


def test_splits_cover_all_devices_once() -> None:
    found = list(splits(BIG.shape, 8))
    assert len(found) == len(set(found)) == 10
    assert all(s.tensor * s.pipeline * s.data == 8 for s in found)
    assert not any(s.expert for s in found)
    assert any(s.expert for s in splits(V3.shape, 8))
    # 9 heads divide over 3, not over 2; 30 layers give no more than 30 stages.
    small = SHAPES["smollm2-135m"]
    assert {s.tensor for s in splits(small, 6)} == {1, 3}
    assert max(s.pipeline for s in splits(small, 60)) == 30


def test_what_one_device_holds() -> None:
    weights = BIG.weight_bytes
    assert device_load(BIG, Split(tensor=8)).weight_bytes == weights / 8
    assert device_load(BIG, Split(tensor=8)).kv_bytes_per_token == 327_680 / 8
    assert device_load(BIG, Split(tensor=16)).kv_bytes_per_token == 327_680 / 8  # 8 KV heads
    assert device_load(BIG, Split(pipeline=8)).kv_bytes_per_token == 327_680 / 8
    assert device_load(BIG, Split(data=8)).weight_bytes == weights
    # 80 layers over 3 stages: the fullest has 27.
    assert device_load(BIG, Split(pipeline=3)).weight_bytes == pytest.approx(weights * 27 / 80)
    # Latents are repeated by tensor parallelism, and divided with their layers by a pipeline.
    assert device_load(V3, Split(tensor=16)).kv_bytes_per_token == 70_272
    assert device_load(V3, Split(pipeline=16)).kv_bytes_per_token == 70_272 * 4 / 61
    dealt = device_load(V3, Split(data=16, expert=True)).weight_bytes
    experts = V3.shape.expert_parameters
    assert dealt == V3.shape.num_parameters - experts + experts / 16


def test_latents_want_users_split_not_heads() -> None:
    by_heads = users_of_split(V3, Split(tensor=16), K128)
    by_users = users_of_split(V3, Split(data=16, expert=True), K128)
    assert by_users > 10 * by_heads


def test_a_token_of_all_users_takes_the_reading_of_one_device() -> None:
    users = users_of_split(BIG, Split(tensor=8), 4096)
    assert token_seconds(BIG, Split(tensor=8), 4096, users) == pytest.approx(
        BIG.step(users, 4096).total_s
    )
    # All stages one after the other read the weights of one device each, and KV of their group.
    piped = token_seconds(BIG, Split(pipeline=8), 4096, users)
    kv = users / 8 * 4096 * 327_680 / 8
    assert piped == pytest.approx(8 * (BIG.weight_bytes / 8 + kv) / 3.35e12)
    one = token_seconds(V3, Split(data=16, expert=True), 1024, 16)
    moe = V3.shape.expert_parameters
    read = V3.shape.num_parameters - moe + moe / 16 * (1 - (1 - 8 / 256) ** 16)
    assert one == pytest.approx((read + 1024 * 70_272) / 4.8e12)


def test_users_plan() -> None:
    report = plan_users(BIG)
    check(report)
    first = rows(report)[0]
    assert (first["split"], first["users at 128k"], first["users at 8k"]) == ("tp8", 9, 156)
    assert {row["split"] for row in rows(report)} >= {"tp8", "pp8", "tp4 dp2"}
    assert "dp8" not in {row["split"] for row in rows(report)}  # 141 GB do not fit one
    report = plan_users(V3)
    check(report)
    assert any("repeats latents" in turn for turn in report.reverses)
    assert [c.name for c in report.tables[0].columns][3:6] == [
        *("users at 8k", "users at 32k", "users at 128k")
    ]
    # 16 devices repeat 8 KV heads, so that two copies hold as many, and say where it turns.
    sixteen = plan_users(replace(BIG, count=16))
    assert any("Beyond 8 devices" in turn for turn in sixteen.reverses)
    small = plan_users(Deployment(SHAPES["smollm2-135m"], H100))
    assert "per device" in rows(small)[0]
    with pytest.raises(PlanError, match=r"811\.7 GB of bf16 weights do not fit 1 x H100.*12 or"):
        plan_users(Deployment(SHAPES["llama-3.1-405b"], H100))
    with pytest.raises(PlanError, match="context is 200,000"):
        plan_users(BIG, contexts=(200_000,))
    with pytest.raises(PlanError, match="lists no length"):
        plan_users(BIG, contexts=())


def test_where_another_split_holds_more() -> None:
    """Heads that cannot be shared out: of 16 devices tensor parallelism holds each KV head twice,
    so long contexts go to two copies once their weights are paid for."""
    assert users_of_split(replace(BIG, count=16), Split(16), 8192) < users_of_split(
        replace(BIG, count=16), Split(8, 2), 8192
    )


@pytest.mark.parametrize(
    ("gbit", "devices", "share"),
    [(400, 1, 0.018), (100, 1, 0.074), (25, 8, 2.35)],  # 25 Gbit/s: of a node of eight
)
def test_sending_against_computing(gbit: float, devices: int, share: float) -> None:
    """70B on H100 at 40 %: kv · F / (2 N · BW)."""
    found = transfer_share(BIG.shape, 2, 0.4 * devices * 989.5e12, gbit / 8 * 1e9)
    assert found == pytest.approx(share, rel=0.025 if share < 0.02 else 0.01)
    assert round(found, 3 if share < 0.1 else 2) == share


def test_distserve() -> None:
    """512 tokens of OPT-66B are 1.125 GiB, ten such requests per second 90 Gib/s (arXiv
    2401.09670, section 3.3)."""
    opt = ModelShape("opt-66b", 64, 9216, 4 * 9216, 72, 72, 128, 50_272)
    sent = transfer_bytes(opt, 512, 2)
    assert sent == 1.125 * 2**30
    assert 10 * sent * 8 / 2**30 == 90


def test_disaggregate_plan() -> None:
    report = plan_disaggregate(BIG, link_gbit=400)
    check(report)
    assert value(report, "transfer / prefill") == pytest.approx(0.0184, rel=0.01)
    by_link = {row["link per device, Gbit/s"]: row for row in rows(report)}
    assert by_link[100.0]["of prefill, 0% cached"] == pytest.approx(0.074, rel=0.01)
    assert by_link[100.0]["of prefill, 90% cached"] == pytest.approx(0.74, rel=0.01)
    # At the break-even link both ways take as long; at the other the transfer is the prefill.
    even = plan_disaggregate(BIG, link_gbit=value(report, "break-even link"))
    assert value(even, "TTFT apart") == pytest.approx(value(even, "TTFT together"))
    equal = plan_disaggregate(BIG, link_gbit=value(report, "transfer equals prefill at"))
    assert value(equal, "transfer / prefill") == pytest.approx(1)
    assert "saves" in report.binds
    assert "together is faster" in plan_disaggregate(BIG, link_gbit=20).binds
    assert "The link" in plan_disaggregate(BIG, link_gbit=25 / 8).binds


def test_what_decodes_leave_of_a_step() -> None:
    assert prefill_duty(0.02, 0.05) == pytest.approx(0.6)
    assert prefill_duty(0.06, 0.05) == 0
    with pytest.raises(PlanError, match=r"tpot is 5 ms, but a step of 32 sequences takes"):
        plan_disaggregate(BIG, tpot_s=0.005)
    with pytest.raises(PlanError, match="link_gbit is 0"):
        plan_disaggregate(BIG, link_gbit=0)


def test_parameters_of_adapters() -> None:
    """Llama-2-7B, all linears, rank 64: 159,907,840; PEFT prints the same for QLoRA's setting."""
    shape = SHAPES["llama-2-7b"]
    assert adapter_parameters(shape, 64) == 159_907_840
    assert adapter_parameters(shape, 8, "qv") == 4_194_304  # LoRA's usual start for a 7B
    assert adapter_parameters(shape, 16, "attention") == 32 * 16 * 4 * 8192


def test_reads_that_adapters_add() -> None:
    """32 different ones of rank 16: 19 %."""
    assert added_reads(SHAPES["llama-2-7b"], 16, 32) == pytest.approx(0.19, rel=0.01)


def test_linears_of_latents_and_experts() -> None:
    """DeepSeek-V3's projections down and up; experts have none."""
    found = adapted_linears(SHAPES["deepseek-v3"])
    assert found == ((7168, 1536), (1536, 24_576), (7168, 576), (512, 32_768), (16_384, 7168))
    with pytest.raises(PlanError, match="no value projection of its own"):
        adapted_linears(SHAPES["deepseek-v3"], "qv")
    with pytest.raises(PlanError, match="must be one of all, attention, qv"):
        adapted_linears(SHAPES["llama-2-7b"], "mlp")


def test_lora_plan() -> None:
    report = plan_lora(Deployment(SHAPES["llama-2-7b"], H100))
    check(report)
    assert value(report, "reads added by all") == pytest.approx(0.19, rel=0.01)
    by_count = {row["adapters"]: row for row in rows(report)}
    assert by_count[32]["added reads"] == by_count[128]["added reads"]  # 32 sequences
    assert by_count[128]["users left"] < by_count[1]["users left"]
    with pytest.raises(PlanError, match="rank is 0"):
        plan_lora(BIG, rank=0)


@pytest.mark.parametrize(
    ("name", "edge", "patches", "tera"),
    [
        # Merged rows counted once: see images.image_flops.
        ("qwen2.5-vl-7b", 1024, 5476, 7.7),
        ("qwen3-vl-2b", 1024, 4096, 4.3),
        ("qwen3-vl-8b", 1024, 4096, 5.8),
    ],
)
def test_operations_of_towers(name: str, edge: int, patches: int, tera: float) -> None:
    tower = read_vision_shape(name, VISION_FILES[name][0])
    image = PlannedImage(edge, edge, (patches,), patches // 4)
    assert image_flops(tower, image) / 1e12 == pytest.approx(tera, rel=0.011)


def test_the_tower_of_qwen2_vl() -> None:
    """675e6 parameters (arXiv 2409.12191, section 2); 1024² are 74 x 74 patches: 12.3 TFLOP."""
    tower = read_vision_shape("qwen2-vl-7b", VISION_FILES["qwen2-vl-7b"][0])
    assert tower.parameters + tower.merger_parameters == pytest.approx(675e6, rel=0.01)
    assert tower_flops(675e6, 32, 1280, 74 * 74) / 1e12 == pytest.approx(12.3, rel=0.01)
    exact = image_flops(tower, PlannedImage(1024, 1024, (5476,), 1369))
    assert exact / 12.3e12 == pytest.approx(0.97, rel=0.01)


def test_tiles_do_not_see_each_other() -> None:
    tower = read_vision_shape("qwen3-vl-2b", VISION_FILES["qwen3-vl-2b"][0])
    whole = PlannedImage(1024, 1024, (4096,), 1024)
    cut = PlannedImage(1024, 1024, (1024,) * 4, 1024)
    attention = 4 * 24 * 1024 * 4096**2
    assert image_flops(tower, whole) - image_flops(tower, cut) == pytest.approx(
        attention * 3 / 4, rel=1e-6
    )


def test_images_plan() -> None:
    deployment = Deployment(SHAPES["qwen2-vl-7b"], H100)
    tower = read_vision_shape("qwen2-vl-7b", VISION_FILES["qwen2-vl-7b"][0])
    squares = [PlannedImage(28 * n, 28 * n, (4 * n * n,), n * n) for n in range(8, 100, 4)]
    report = plan_images(deployment, tower, squares[:3], squares=squares)
    check(report)
    assert "prefill of the tokens takes" in report.binds
    assert any("the tower costs more than the prefill" in turn for turn in report.reverses)
    alone = plan_images(deployment, tower, squares[-1:])
    assert "tower takes" in alone.binds
    assert alone.curve is None


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "no vision_config"),
        ({"vision_config": {"depth": 2}}, "lacks patch_size"),
        ({"vision_config": {"depth": 0, "patch_size": 14}}, "lacks depth or num_hidden_layers"),
    ],
)
def test_towers_that_are_none(config: dict[str, object], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        read_vision_shape("model", config)


FLEET = Deployment(SHAPES["llama-3.1-70b"], H100, 8, "fp8", "fp8")


def test_a_fleet() -> None:
    """10,000 requests/s of 2,000 + 300 tokens, 70B in fp8 on nodes of eight H100."""
    prefill = prefill_servers(FLEET, 10_000, 2000, 0, 0.4)
    assert round(prefill) == 446
    assert prefill_servers(FLEET, 10_000, 2000, 0.6, 0.4) == pytest.approx(446 * 0.4, rel=0.01)
    assert decode_batch(FLEET, 2300, 0.05, 0.4) == (1168, "memory")
    report = plan_fleet(FLEET, rate=10_000)
    check(report)
    assert value(report, "decode batch of a server") == 1168
    assert value(report, "decode rate of a server") == pytest.approx(23_400, rel=0.01)
    assert value(report, "its step") < 0.05
    table = {row["cached"]: row for row in rows(report)}
    assert table[0.0]["decode servers"] == pytest.approx(128, rel=0.01)
    assert table[0.0]["all, at that utilisation"] == pytest.approx(820, rel=0.01)
    assert table[0.6]["all, at that utilisation"] == pytest.approx(438, rel=0.01)
    assert attention_share(FLEET, 2000) == pytest.approx(2000 / 107_656, rel=0.001)
    assert table[0.0]["with attention's part"] > table[0.0]["all, at that utilisation"]


def test_a_short_promise_limits_the_batch() -> None:
    batch, limit = decode_batch(FLEET, 2300, 0.02, 0.4)
    assert limit == "tpot"
    assert FLEET.step(batch, 2300, 1, 0.4, 0.8).total_s <= 0.02
    assert FLEET.step(batch + 1, 2300, 1, 0.4, 0.8).total_s > 0.02
    assert "TPOT promise" in plan_fleet(FLEET, tpot_s=0.02, hit=0.9).binds
    with pytest.raises(PlanError, match=r"tpot is 1 ms, but one sequence takes"):
        plan_fleet(FLEET, tpot_s=0.001)
    with pytest.raises(PlanError, match="hit is 1"):
        plan_fleet(FLEET, hit=1.0)
    with pytest.raises(PlanError, match="rate is nan"):
        plan_fleet(FLEET, rate=float("nan"))
    tight = Deployment(SHAPES["llama-3.1-70b"], H100, 3)
    with pytest.raises(PlanError, match="no two contexts of 130,300 tokens fit"):
        plan_fleet(tight, prompt=130_000)
