"""VisionStage with a fake tower: order, packing, joining, cancelling, faults that stay alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from vision_encoder.link import EncodeJob, EncodeResult
from vision_encoder.plan import ImagePlan
from vision_encoder.stage import (
    BYTES_GONE,
    CANCELLED,
    INTERNAL,
    Pass,
    UnreadableImageError,
    VisionStage,
)


def plan(rows: int) -> ImagePlan:
    return ImagePlan("fake", 8, 8, (), (rows,), num_rows=rows, num_patches=rows)


def job(
    name: bytes,
    rows: tuple[tuple[int, int], ...],
    urgency: tuple[int, int] = (0, 0),
    epoch: int = 0,
) -> EncodeJob:
    total = sum(count for _, count in rows)
    return EncodeJob(name, epoch, plan(total), rows, urgency, data=name)


class Tower:
    """Encodes an image as rows of its first byte's value + row number; records each pass."""

    def __init__(self, layers: int = 0) -> None:
        self.layers = layers
        self.prepared: list[bytes] = []
        self.passes: list[list[bytes]] = []

    def prepare(self, data: bytes, image: ImagePlan) -> tuple[bytes, int]:
        self.prepared.append(data)
        if data.startswith(b"broken"):
            raise UnreadableImageError("image is truncated")
        if data.startswith(b"trap"):
            raise RuntimeError("secret /usr/lib 0x7f00deadbeef")
        return data, image.num_rows

    def encode(self, images: Sequence[tuple[bytes, int]]) -> Pass:
        self.passes.append([data for data, _ in images])
        for _ in range(self.layers):
            yield
        if any(data.startswith(b"crash") for data, _ in images):
            raise RuntimeError("secret")
        return [self.rows(data, count) for data, count in images]

    @staticmethod
    def rows(data: bytes, count: int) -> Tensor:
        rows = torch.arange(count, dtype=torch.float32)[:, None, None].expand(count, 2, 4)
        if data.startswith(b"nan"):
            return rows / 0
        return rows + data[0]


Vision = VisionStage[tuple[bytes, int]]


def stage(tower: Tower, budget: float = 10.0, rows: int = 32) -> tuple[Vision, Tensor]:
    storage = torch.full((rows, 2, 4), -1.0)
    built = VisionStage(
        prepare=tower.prepare,
        encode=tower.encode,
        cost=lambda image: float(image.num_rows),
        storage=storage,
        flop_budget=budget,
    )
    return built, storage


def drain(vision: Vision) -> list[EncodeResult]:
    results: list[EncodeResult] = []
    for _ in range(100):
        if not vision.busy():
            return results
        results += vision.poll()
    raise AssertionError("the stage never came to an end")


def test_rows_land_in_their_runs_and_nowhere_else() -> None:
    tower = Tower()
    vision, storage = stage(tower)
    vision.submit(job(b"a", ((4, 2), (10, 3))))
    (result,) = vision.poll()
    assert result.error is None
    assert result.encode_s > 0
    assert storage[[4, 5, 10, 11, 12], 0, 0].tolist() == [97 + i for i in range(5)]
    untouched = [i for i in range(32) if i not in (4, 5, 10, 11, 12)]
    assert storage[untouched].eq(-1.0).all()
    assert not vision.busy()
    assert vision.poll() == []


def test_jobs_are_packed_in_urgency_order_up_to_the_budget() -> None:
    tower = Tower()
    vision, _ = stage(tower, budget=10)
    for name, first, count, urgency in (
        (b"late", 0, 4, (2, 0)),
        (b"first", 4, 6, (1, 0)),
        (b"second", 10, 4, (1, 50)),
        (b"big", 14, 18, (3, 0)),
    ):
        vision.submit(job(name, ((first, count),), urgency))
    order = [[result.key for result in vision.poll()] for _ in range(3)]
    assert order == [[b"first", b"second"], [b"late"], [b"big"]]
    assert tower.passes == order


def test_a_more_urgent_job_goes_first_even_when_another_was_prepared() -> None:
    tower = Tower()
    vision, _ = stage(tower, budget=4)
    vision.submit(job(b"a", ((0, 4),), (1, 0)))
    assert vision.in_hand() == [b"a"]
    assert vision.advance() == []
    vision.submit(job(b"b", ((4, 4),), (0, 0)))
    assert [result.key for result in drain(vision)] == [b"b", b"a"]
    assert tower.prepared == [b"a", b"b"]


def test_each_advance_is_one_image_or_a_part_of_a_pass() -> None:
    tower = Tower(layers=2)
    vision, _ = stage(tower)
    vision.submit(job(b"a", ((0, 2),)))
    vision.submit(job(b"b", ((2, 2),), (0, 1)))
    seen = []
    while vision.busy():
        seen.append((len(tower.prepared), len(tower.passes), len(vision.advance())))
    assert seen == [(0, 0, 0), (1, 0, 0), (2, 0, 0), (2, 1, 0), (2, 1, 2)]


def test_equal_jobs_are_joined_and_answered_once() -> None:
    tower = Tower()
    vision, _ = stage(tower, budget=1)
    vision.submit(job(b"a", ((0, 2),), (5, 0)))
    vision.submit(job(b"b", ((2, 2),), (3, 0)))
    vision.submit(job(b"a", ((0, 2),), (1, 0)))
    assert [result.key for result in drain(vision)] == [b"a", b"b"]
    assert tower.passes == [[b"a"], [b"b"]]


def test_a_job_of_a_new_epoch_replaces_the_old_one() -> None:
    vision, storage = stage(Tower())
    vision.submit(job(b"a", ((0, 2),), epoch=0))
    vision.submit(job(b"a", ((8, 2),), epoch=1))
    vision.cancel(b"a", 0)
    (result,) = drain(vision)
    assert (result.epoch, result.error) == (1, None)
    assert storage[:8].eq(-1.0).all()


def test_cancelled_before_its_pass_is_answered_without_work() -> None:
    tower = Tower()
    vision, storage = stage(tower)
    vision.submit(job(b"a", ((0, 2),)))
    vision.submit(job(b"b", ((2, 2),), (0, 1)))
    vision.cancel(b"a", 0)
    vision.cancel(b"unknown", 0)
    results = drain(vision)
    assert [(r.key, r.error, r.internal) for r in results] == [
        (b"a", CANCELLED, False),
        (b"b", None, False),
    ]
    assert tower.prepared == [b"b"]
    assert storage[:2].eq(-1.0).all()


def test_submitting_again_takes_a_cancellation_back() -> None:
    vision, _ = stage(Tower())
    vision.submit(job(b"a", ((0, 2),)))
    vision.cancel(b"a", 0)
    vision.submit(job(b"a", ((0, 2),)))
    (result,) = drain(vision)
    assert result.error is None


def test_an_unreadable_image_fails_alone_with_its_fixed_reason() -> None:
    vision, _ = stage(Tower())
    vision.submit(job(b"broken", ((0, 2),)))
    vision.submit(job(b"good", ((2, 2),), (0, 1)))
    results = {r.key: r for r in drain(vision)}
    assert results[b"broken"].error == "image is truncated"
    assert not results[b"broken"].internal
    assert results[b"good"].error is None


@pytest.mark.parametrize("bad", [b"trap", b"crash", b"nan"])
def test_our_own_faults_fail_one_image_and_leak_nothing(
    bad: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    vision, storage = stage(Tower())
    vision.submit(job(b"good", ((0, 2),)))
    vision.submit(job(bad, ((2, 2),), (0, 1)))
    vision.submit(job(b"more", ((4, 2),), (0, 2)))
    with caplog.at_level(logging.CRITICAL):
        results = {r.key: r for r in drain(vision)}
    assert (results[bad].error, results[bad].internal) == (INTERNAL, True)
    assert "0x" not in INTERNAL
    assert results[b"good"].error is None
    assert results[b"more"].error is None
    assert storage[[0, 1, 4, 5], 1, 0].tolist() == [103, 104, 109, 110]
    assert storage[2:4].eq(-1.0).all()


def test_rows_that_do_not_fit_the_job_are_an_internal_error() -> None:
    vision, storage = stage(Tower())
    wrong = EncodeJob(b"a", 0, plan(5), ((0, 4),), (0, 0), data=b"a")
    vision.submit(wrong)
    (result,) = drain(vision)
    assert result.internal
    assert storage[4:].eq(-1.0).all()


def test_bytes_come_from_the_spool_file_and_its_absence_says_so(tmp_path: Path) -> None:
    vision, storage = stage(Tower())
    spool = tmp_path / "image"
    spool.write_bytes(b"zebra")
    vision.submit(EncodeJob(b"k", 0, plan(1), ((0, 1),), (0, 0), path=str(spool)))
    vision.submit(EncodeJob(b"l", 0, plan(1), ((1, 1),), (0, 1), path=str(tmp_path / "none")))
    vision.submit(EncodeJob(b"m", 0, plan(1), ((2, 1),), (0, 2)))
    results = {r.key: r for r in drain(vision)}
    assert results[b"k"].error is None
    assert storage[0, 0, 0] == ord("z")
    assert results[b"l"].error == BYTES_GONE
    assert results[b"m"].error == INTERNAL


def test_isolated_images_have_a_pass_of_their_own_once() -> None:
    tower = Tower()
    vision, _ = stage(tower)
    vision.isolate([b"b"])
    for index, name in enumerate((b"a", b"b", b"c", b"d")):
        vision.submit(job(name, ((index, 1),), (0, index)))
    drain(vision)
    assert tower.passes == [[b"a"], [b"b"], [b"c", b"d"]]
    for index, name in enumerate((b"a", b"b")):
        vision.submit(job(name, ((index, 1),), (0, index)))
    drain(vision)
    assert tower.passes[-1] == [b"a", b"b"]


def test_reset_forgets_jobs_and_writes_nothing_more() -> None:
    vision, storage = stage(Tower())
    vision.submit(job(b"a", ((0, 2),)))
    assert vision.advance() == []
    vision.reset()
    assert not vision.busy()
    assert vision.poll() == []
    assert storage.eq(-1.0).all()


def test_a_stage_that_may_not_work_rests_in_the_middle_of_a_pass_and_goes_on() -> None:
    tower = Tower(layers=3)
    vision, _ = stage(tower)
    vision.submit(job(b"a", ((0, 2),)))
    vision.allow(0.0)
    assert vision.poll() == []
    assert not tower.prepared
    vision.advance()
    vision.advance()
    assert vision.poll() == []
    assert vision.in_hand() == [b"a"]
    vision.allow(1.0)
    (result,) = vision.poll()
    assert result.error is None
    assert len(tower.passes) == 1


def test_a_rest_is_no_time_of_the_image() -> None:
    """What is learnt of the stage's speed must not depend on what others do meanwhile."""
    vision, _ = stage(Tower(layers=2))
    vision.submit(job(b"a", ((0, 2),)))
    vision.advance()
    vision.advance()
    time.sleep(0.2)
    (result,) = drain(vision)
    assert 0 < result.encode_s < 0.1


def test_a_pass_that_nobody_wants_any_more_ends_at_once() -> None:
    tower = Tower(layers=50)
    vision, storage = stage(tower)
    vision.submit(job(b"a", ((0, 2),)))
    vision.submit(job(b"b", ((2, 2),), (0, 1)))
    for _ in range(4):
        vision.advance()
    vision.cancel(b"a", 0)
    assert vision.advance() == []
    vision.cancel(b"b", 0)
    assert {r.error for r in vision.advance()} == {CANCELLED}
    assert not vision.busy()
    assert storage.eq(-1.0).all()


def test_an_image_cancelled_and_wanted_again_in_its_pass_is_encoded_once() -> None:
    tower = Tower(layers=5)
    vision, _ = stage(tower)
    vision.submit(job(b"a", ((0, 2),)))
    vision.advance()
    vision.advance()
    vision.cancel(b"a", 0)
    vision.submit(job(b"a", ((0, 2),)))
    (result,) = drain(vision)
    assert result.error is None
    assert len(tower.passes) == 1


@pytest.mark.parametrize("forgets", [False, True])
def test_rows_of_a_former_epoch_are_not_written_by_the_pass_under_way(forgets: bool) -> None:
    vision, storage = stage(Tower(layers=3))
    vision.submit(job(b"a", ((0, 2),), epoch=0))
    vision.advance()
    vision.advance()
    if forgets:
        vision.reset()
    vision.submit(job(b"a", ((8, 2),), epoch=1))
    (result,) = drain(vision)
    assert (result.epoch, result.error) == (1, None)
    assert storage[:8].eq(-1.0).all()
    assert storage[8:10, 0, 0].tolist() == [97, 98]
