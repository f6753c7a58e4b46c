"""Signs of life in shared memory, and the number of threads that follows from them."""

from __future__ import annotations

import os
import socket
import time

import pytest

from lm_engine.process.board import MAX_SUSPECTS, Board, Slot
from lm_engine.process.language import StepBound
from lm_engine.process.messages import Supervision
from lm_engine.process.threads import ThreadShare
from lm_engine.process.waiting import wait
from lm_engine.process.wire import Codec, Control


@pytest.fixture
def boards() -> tuple[Board, Board]:
    fd = Board.create()
    pair = Board(fd), Board(fd)
    os.close(fd)
    return pair


def test_a_beat_holds_for_its_bound(boards: tuple[Board, Board]) -> None:
    mine, theirs = boards
    mine["language"].beat(0.02)
    seen = theirs["language"]
    assert not seen.late
    assert seen.bound_s == 0.02
    time.sleep(0.03)
    assert seen.late
    assert seen.age_s >= 0.03
    mine["language"].beat(5.0)
    assert not seen.late


def test_slots_do_not_touch_each_other(boards: tuple[Board, Board]) -> None:
    mine, theirs = boards
    mine["vision"].beat(5.0)
    mine["vision"].busy = True
    mine["language"].stopped = True
    assert theirs["vision"].busy
    assert not theirs["vision"].stopped
    assert theirs["language"].stopped
    assert not theirs["language"].busy
    assert theirs["language"].late
    mine["vision"].clear()
    assert not theirs["vision"].busy
    assert theirs["language"].stopped


def test_suspects_are_seen_by_the_other_side(boards: tuple[Board, Board]) -> None:
    mine, theirs = boards
    keys = [bytes([i]) * 32 for i in range(MAX_SUSPECTS)]
    mine.note_suspects(keys)
    assert theirs.suspects() == tuple(keys)
    mine.note_suspects(keys[:1])
    assert theirs.suspects() == (keys[0],)
    for unknown in ([*keys, keys[0]], [b"short"], [keys[0], b"short"]):
        mine.note_suspects(unknown)
        assert theirs.suspects() == ()
    mine["planner"].beat(1.0)
    mine.note_suspects(())
    assert theirs.suspects() == ()


def test_suspects_survive_the_death_of_the_process_that_noted_them(
    boards: tuple[Board, Board],
) -> None:
    child = os.fork()
    if child == 0:
        boards[0].note_suspects([b"k" * 32])
        os._exit(1)
    os.waitpid(child, 0)
    assert boards[1].suspects() == (b"k" * 32,)


def test_two_busy_stages_share_the_threads(
    boards: tuple[Board, Board], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr("lm_engine.process.threads._set_num_threads", lambda: calls.append)
    other: Slot = boards[0]["vision"]
    share = ThreadShare(boards[1]["vision"], alone=4)
    assert share.settle() == 4
    other.busy = True
    assert share.settle() == 2
    assert share.settle() == 2
    other.busy = False
    assert share.settle() == 4
    assert calls == [4, 2, 4]
    other.busy = True
    assert ThreadShare(boards[1]["vision"], alone=1).settle() == 1
    assert ThreadShare(None, alone=3).settle() == 3
    assert ThreadShare(None, alone=None).settle() == len(os.sched_getaffinity(0))


def test_who_wants_all_cores_says_so_until_it_sleeps_or_dies(boards: tuple[Board, Board]) -> None:
    mine, theirs = boards
    mine["language"].alone = True
    assert theirs["language"].alone
    assert not theirs["vision"].alone
    mine["language"].clear()
    assert not theirs["language"].alone
    mine["language"].alone = mine["language"].busy = True
    ours, other = socket.socketpair()
    with ours, other:
        control = Control(ours, Codec())
        wait((), control, mine["language"], 0.0, 1.0)
        assert theirs["language"].alone
        wait((), control, mine["language"], 0.001, 1.0)
    assert not theirs["language"].alone
    assert not theirs["language"].busy


def test_the_bound_of_a_step_grows_with_the_slowest_one() -> None:
    bound = StepBound(Supervision(step_floor_s=10.0, step_factor=4.0))
    assert bound.bound_s == 10.0
    bound.observe(2.0)
    assert bound.bound_s == 10.0
    bound.observe(5.0)
    bound.observe(0.1)
    assert bound.bound_s == 20.0
