"""Frames, packets and descriptors: nothing lost in pieces, nothing waits, a lost peer is seen."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunked_prefill.calibration_file import Calibration, CalibrationProgress
from chunked_prefill.encode_time import EncodeTimeModel
from chunked_prefill.request import ImageSpan, Request, SamplingParams
from chunked_prefill.settings import SchedulingSettings
from chunked_prefill.step_time import StepTimeModel
from kv_offload.kv_events import KVEvent
from lm_engine.client import EngineStats, Histogram, MediaItem, ModelInfo
from lm_engine.options import EngineOptions
from lm_engine.outputs import (
    Estimate,
    RequestError,
    RequestOutput,
    SequenceDelta,
    Timing,
    TokenLogprob,
    Usage,
)
from lm_engine.process.messages import (
    KINDS,
    Abort,
    Ask,
    Calibrate,
    Calibrated,
    CancelJob,
    Channel,
    Configure,
    Configured,
    Factories,
    Foreseen,
    LoadFailed,
    Message,
    NewLink,
    Plan,
    Planned,
    Progress,
    Ready,
    Replies,
    Report,
    ResetPrefixCache,
    Start,
    StepEvents,
    Stop,
    Submission,
    Submit,
    Supervision,
)
from lm_engine.process.wire import Codec, Control, Wire, WireError, control_pair, stream_pair
from lm_engine.reconfiguration import SchedulingState
from vision_encoder.link import EncodeJob, EncodeResult
from vision_encoder.plan import AnyresLayout, ImagePlan, Step, Tile

KEY = bytes(range(32))
PLAN = ImagePlan(
    "fake",
    640,
    480,
    (Tile((64, 64), 0, 0, 64, 64, (4, 4), (Step((64, 64), (1, 2), (3, 4, 5)),)),),
    ("<image>", 16, "\n"),
    num_rows=16,
    num_patches=16,
    merged_grid=(1, 4, 4),
    anyres=AnyresLayout(1, 1, (0, 0, 4, 4), (2, 2)),
    fingerprint=b"\x00\xff",
)
SAMPLING = SamplingParams(
    5, 0.5, seed=1 << 62, logit_bias=((3, -1.5),), stop=("é\n",), stop_token_ids=(1,), logprobs=2
)
REQUEST = Request(
    "name",
    (1, 2, 3),
    SAMPLING,
    image_spans=(ImageSpan(1, 2, KEY, 3),),
    positions=((0, 1, 2), (0, 1, 1), (0, 2, 2)),
    position_delta=-4,
    tenant="t",
    priority=-1,
    arrival_s=1.25,
)
LOGPROB = TokenLogprob(1, b"\xf0\x9f", -0.5, 2, ((1, b"a", -0.5), (2, b"", -1.0)))
OUTPUT = RequestOutput(
    "name",
    (SequenceDelta(1, "é", (1, 2), (LOGPROB,), "stop", "é\n"),),
    media_checked=True,
    prompt_progress=(3, 4),
    prompt_logprobs=(None, LOGPROB),
    finished=True,
    usage=Usage(3, 2, 1, 16),
    timing=Timing(0.1, 0.2, 0.3, 0.4, 0.5),
    error=RequestError("media", "no", "messages.0"),
)
INFO = ModelInfo("m", 1, 2, 3, 4, 5, 6, (7,), "bfloat16", "cpu")
MESSAGES: tuple[Message, ...] = (
    Submit("name", b"\x00\x01"),
    Abort("name"),
    StepEvents(
        (OUTPUT,),
        ("gone",),
        EngineStats(1, iteration_tokens=Histogram((1.0,), (1, 2), 3)),
        (KVEvent("stored", "host", "t", b"\xff" * 32, b"\x00" * 32, 256),),
    ),
    EncodeJob(KEY, 3, PLAN, ((0, 16),), (1, 2), b"\xff\x00", None),
    CancelJob(KEY, 3),
    Replies((EncodeResult(KEY, 3, "bad", True, 0.1, 0.2),)),
    Start(EngineOptions("m"), Factories(), Supervision(), ("x",)),
    Report("loading", "weights", 1.0, 2.0, 3, 4, 5, INFO),
    Channel(3),
    Stop(),
    NewLink((KEY,)),
    Progress("weights", 1.0, 2.0),
    Planned(Plan(EngineOptions("m"), True, 4096, 16, (4, 64))),
    Ready(INFO),
    LoadFailed("why"),
    ResetPrefixCache("t"),
    Ask("name", b"\x02"),
    Foreseen("name", Estimate(20, 16, 4, 0.25, 0.125, 0.0625, 2, 1, 300, True)),
    Configure(SchedulingSettings("fcfs", 0.5, 0.05, (0.25, 0.75), 4, 128, 0.5)),
    Configured(
        SchedulingState(
            SchedulingSettings(), 64, 512, 100, 16, True, StepTimeModel(1, 2, 3, 4, 5), 1.25, 99
        )
    ),
    Calibrate(45.0),
    Calibrated(CalibrationProgress("shape 1 of 9", 1.5, 45.0)),
    Calibrated(
        result=Calibration(
            StepTimeModel(1, 2, 3, 4, 5, 6, 7, 8),
            (0.5, 1.5),
            0.25,
            99,
            44.5,
            EncodeTimeModel(1, 2, 3),
        )
    ),
)


@pytest.fixture
def wires() -> Iterator[tuple[Wire, Wire]]:
    codec = Codec()
    left, right = stream_pair()
    pair = Wire(left, codec), Wire(right, codec)
    yield pair
    for wire in pair:
        wire.close()


def test_every_message_comes_back_equal() -> None:
    codec = Codec()
    assert tuple(dict.fromkeys(type(message) for message in MESSAGES)) == KINDS
    for message in MESSAGES:
        frame = codec.frame(message)
        assert codec.unframe(frame[4], frame[5:]) == message
    submission = Submission(
        REQUEST, (MediaItem(KEY, PLAN, "p", b"data"), MediaItem(KEY, PLAN, "q"))
    )
    assert codec.unpack(Submission, codec.pack(submission)) == submission


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(1, stop=("\ud800",)), SamplingParams(1, seed=1 << 64)],
)
def test_what_msgpack_cannot_carry_is_an_error_of_ours(sampling: SamplingParams) -> None:
    with pytest.raises(WireError, match="Submission cannot be encoded"):
        Codec().pack(Submission(Request("a", (1,), sampling), ()))


@given(body=st.binary(max_size=60), kind=st.integers(0, 255))
@settings(max_examples=300, deadline=None, database=None)
def test_foreign_bytes_are_an_error_of_ours(body: bytes, kind: int) -> None:
    codec = Codec()
    try:
        message = codec.unframe(kind, body)
    except WireError:
        return
    assert type(message) is KINDS[kind]


def test_frames_cut_anywhere_are_joined_again() -> None:
    codec = Codec()
    stream = b"".join(codec.frame(message) for message in MESSAGES)
    for size in (1, 2, 7, 100, len(stream)):
        left, right = stream_pair()
        wire = Wire(right, codec)
        seen: list[Message] = []
        for at in range(0, len(stream), size):
            left.sendall(stream[at : at + size])
            seen += wire.receive()
        assert tuple(seen) == MESSAGES
        left.close()
        wire.close()


def test_a_full_socket_makes_the_sender_keep_not_wait(wires: tuple[Wire, Wire]) -> None:
    sender, reader = wires
    sent = [Submit(str(i), bytes(1 << 20)) for i in range(12)]
    for message in sent:
        sender.send(message)
    assert sender.unsent_bytes > 1 << 20
    seen: list[Message] = []
    while len(seen) < len(sent):
        sender.flush()
        seen += reader.receive()
    assert seen == sent
    assert sender.unsent_bytes == 0


def test_patience_reads_a_message_that_is_still_being_written(wires: tuple[Wire, Wire]) -> None:
    sender, reader = wires
    child = os.fork()
    if child == 0:
        sender._sock.setblocking(True)
        sender._sock.sendall(sender._codec.frame(Submit("a", bytes(8 << 20))))
        os._exit(0)
    select.select([reader], [], [], 30)
    seen: list[Message] = []
    rounds = 0
    while not seen:
        rounds += 1
        seen = reader.receive(patience_s=5.0)
    assert os.waitpid(child, 0)[1] == 0
    assert seen == [Submit("a", bytes(8 << 20))]
    # Without patience, each call would end with the first look at an empty socket.
    assert rounds < 20


def test_a_lost_peer_is_seen_and_sending_to_it_is_harmless(wires: tuple[Wire, Wire]) -> None:
    sender, reader = wires
    sender.send(Stop(), Abort("a"))
    sender.close()
    assert reader.receive() == [Stop(), Abort("a")]
    assert reader.closed
    for _ in range(3):
        reader.send(Abort("b"))
    assert reader.unsent_bytes == 0
    assert reader.receive() == []


def test_an_absurd_length_is_refused_before_memory_is_taken(wires: tuple[Wire, Wire]) -> None:
    sender, reader = wires
    sender.send_frames(b"\xff\xff\xff\xff\x00")
    with pytest.raises(WireError, match="4294967295 bytes"):
        reader.receive()


def test_a_descriptor_travels_with_its_message() -> None:
    codec = Codec()
    left, right = control_pair()
    sender, reader = Control(left, codec), Control(right, codec)
    mine, given = socket.socketpair()
    number = given.fileno()
    sender.send(Progress("before"))
    sender.send(Channel(7), given)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    (first, nothing), (second, received) = reader.receive()
    assert (first, nothing, second) == (Progress("before"), None, Channel(7))
    assert received is not None
    assert not os.get_inheritable(received.fileno())
    mine.sendall(b"hello")
    assert received.recv(5) == b"hello"
    for sock in (mine, received):
        sock.close()
    sender.close()
    assert reader.receive() == []
    assert reader.closed
    reader.close()


def test_a_slow_reader_of_packets_makes_the_sender_keep_them_in_order() -> None:
    codec = Codec()
    left, right = control_pair()
    sender, reader = Control(left, codec), Control(right, codec)
    for i in range(2000):
        sender.send(Progress("x" * 1000, float(i)))
    seen: list[float] = []
    while len(seen) < 2000:
        sender.flush()
        seen += [m.done for m, _ in reader.receive() if isinstance(m, Progress)]
    assert seen == [float(i) for i in range(2000)]
    sender.close()
    reader.close()


def test_a_descriptor_for_a_lost_peer_is_closed() -> None:
    codec = Codec()
    left, right = control_pair()
    sender = Control(left, codec)
    right.close()
    mine, given = socket.socketpair()
    number = given.fileno()
    sender.send(Channel(0), given)
    sender.send(Stop())
    assert sender.closed
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    mine.close()
    sender.close()
