"""`longlens bench` against servers that are scripted here, and against our own application."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api import bench_report, plots
from api.bench_cli import BenchFlags, factor, long_prompts, seconds
from api.bench_http import Address, AddressError, Connections, Exchange, ExchangeError
from api.bench_load import Lateness, Load, Outcome, State
from api.bench_run import read_requests, warnings
from api.bench_stream import Answer, EventReader
from api.bench_target import Target, parse_counters
from api.bench_words import WORDS, PromptMaker, Vocabulary, WordsError, learn
from api.cli import main
from chunked_prefill.goodput import Promise
from chunked_prefill.trace import TraceRequest
from tests.api.fakes import FakeEngine, served

ROOT = Path(__file__).resolve().parents[2]
UNIFORM = Vocabulary(5, WORDS, (1,) * len(WORDS))


def bench(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *flags])
    code = ended.value.code
    printed = capsys.readouterr()
    return int(code or 0), printed.out, printed.err


def measured(
    capsys: pytest.CaptureFixture[str], folder: Path, *flags: str
) -> tuple[int, dict[str, Any]]:
    """What --output has: our own server logs to the same standard output."""
    file = folder / "measured.json"
    code, _, err = bench(capsys, *flags, "--output", str(file))
    assert file.exists(), err
    return code, json.loads(file.read_text())


def own_trace(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# -- our own server -----------------------------------------------------------------------------


def test_a_trace_is_replayed_and_reported(
    live: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = own_trace(
        tmp_path / "t.jsonl",
        {"arrival_s": 0.0, "prompt_tokens": 300, "output_tokens": 5},
        {"arrival_s": 0.1, "prompt_tokens": 400, "output_tokens": 40},
        {"arrival_s": 0.2, "prompt_tokens": 301, "output_tokens": 1},
    )
    file = tmp_path / "out.json"
    engine = FakeEngine(prefill_s=0.02)
    with live(engine, api_key="secret") as url:
        flags = ("--url", url, "--trace", trace, "--ttft-slo", "9s", "--output", str(file))
        code, out, _ = bench(capsys, *flags, "--api-key", "secret")
    assert code == 0
    found = json.loads(file.read_text())
    assert found["server"]["kind"] == "longlens"
    assert found["lengths"]["counted_by"] == "/tokenize"
    report = found["report"]
    assert (report["requests"], report["answered"], report["errors"]) == (3, 3, {})
    assert report["goodput"]["value"] == 1.0
    # The engine's script has 28 characters: only ignore_eos makes it go on to 40.
    assert [row["output_tokens"] for row in found["requests"]] == [5, 40, 1]
    assert found["lengths"]["output"]["exact"] == 3
    submitted = [len(seen.request.token_ids) for seen in engine.seen]
    assert submitted == [row["prompt_tokens"] for row in found["requests"]]
    # The tiny tokenizer has few words of one token; sums still come out to the token.
    assert submitted == [300, 400, 301]
    assert report["ttft_s"]["p50"] >= 0.02
    assert found["prompt_token_sources"] == {"cached": 48, "computed": 953}
    assert "secret" not in file.read_text()
    for words in ("3 sent, 3 answered", "goodput       100.0% kept TTFT <= 9,000 ms", "TTFT"):
        assert words in out


def test_equal_hash_ids_become_equal_beginnings(
    live: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case: prefix hits of a trace must be those of its blocks, not of repeated texts."""
    row = {"arrival_s": 0.0, "prompt_tokens": 500, "output_tokens": 1, "block_tokens": 100}
    trace = own_trace(
        tmp_path / "t.jsonl",
        row | {"hash_ids": [1, 2, 3]},
        row | {"hash_ids": [1, 2, 4]},
        row | {"hash_ids": [5]},
        row,
    )
    engine = FakeEngine()
    with live(engine) as url:
        assert bench(capsys, "--url", url, "--trace", trace)[0] == 0
        once = {tuple(seen.request.token_ids) for seen in engine.seen}
        assert bench(capsys, "--url", url, "--trace", trace)[0] == 0
        again = {tuple(seen.request.token_ids) for seen in engine.seen[4:]}
        assert bench(capsys, "--url", url, "--trace", trace, "--same-texts")[0] == 0
        assert bench(capsys, "--url", url, "--trace", trace, "--same-texts")[0] == 0
    assert len(once) == 4
    assert not once & again
    assert len({tuple(seen.request.token_ids) for seen in engine.seen[8:]}) == 4
    by_number = sorted(engine.seen[:4], key=lambda seen: seen.request.arrival_s)
    ids = [seen.request.token_ids for seen in by_number]
    head = _common(ids[2], ids[3])  # the template
    # Words that differ may begin with the same tokens.
    assert 200 <= _common(ids[0], ids[1]) - head + 10 <= 220
    assert _common(ids[0], ids[2]) - head <= 10


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))


def test_images_are_sent(
    live: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"arrival_s": 0, "prompt_tokens": 300, "output_tokens": 2}
    trace = own_trace(
        tmp_path / "t.jsonl",
        row | {"images": [[56, 84], [28, 28]]},
        row | {"images": [[56, 56]], "hash_ids": [1], "block_tokens": 50},
    )
    engine = FakeEngine()
    with live(engine, "qwen2_5_vl") as url:
        code, found = measured(capsys, tmp_path, "--url", url, "--trace", trace)
    assert code == 0
    sizes = [[(i.plan.width, i.plan.height) for i in seen.media] for seen in engine.seen]
    assert sorted(sizes) == [[(56, 56)], [(56, 84), (28, 28)]]
    assert len({data for seen in engine.seen for data in seen.media_bytes}) == 3
    assert found["report"]["image_tokens"] > 0
    assert found["lengths"]["prompt"]["compared"] == 0
    shared = next(seen for seen in engine.seen if len(seen.media) == 1)
    assert shared.request.image_spans[0].offset > 50  # after what others may share


def test_a_late_server_is_not_waited_for(
    live: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"arrival_s": n / 20, "prompt_tokens": 200, "output_tokens": 1, "priority": 0}
        for n in range(10)
    ]
    engine = FakeEngine(prefill_s=2.0)
    with live(engine) as url:
        trace = own_trace(tmp_path / "t.jsonl", *rows)
        started = time.monotonic()
        code, found = measured(
            capsys, tmp_path, "--url", url, "--trace", trace, "--ttft-slo", "10ms"
        )
        took = time.monotonic() - started
    assert code == 0
    assert took < 15  # one after the other would take twenty seconds
    arrivals = [row["arrival_s"] for row in found["requests"]]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] < min(row["arrival_s"] + row["ttft_s"] for row in found["requests"])
    assert found["report"]["missed"] == {"ttft": 10}


def test_refusals_and_faults_are_counted_by_kind(
    live: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = own_trace(
        tmp_path / "t.jsonl",
        {"arrival_s": 0.0, "prompt_tokens": 300, "output_tokens": 4},
        {"arrival_s": 0.1, "prompt_tokens": 3000, "output_tokens": 4},
    )
    with live(FakeEngine(crash_after=2)) as url:
        code, out, err = bench(capsys, "--url", url, "--trace", trace)
    assert code == 1
    assert "1 of 2 requests are longer than the server's 2,048 tokens (up to 3,004)" in err
    assert "1 x http 400: " in out
    assert "1 x stream error: The engine lost this request" in out


def test_a_wrong_key_and_a_wrong_model_are_told(
    live: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with live(FakeEngine(), api_key="secret") as url:
        code, _, err = bench(capsys, "--url", url, "--workload", "chat", "--api-key", "guess")
        assert code == 1
        assert "wants a key (401); use --api-key" in err
    with live(FakeEngine()) as url:
        code, _, err = bench(capsys, "--url", url, "--workload", "chat", "--model", "gpt")
        assert code == 1
        assert "--model gpt: the server has tiny" in err


def test_an_interrupted_run_reports_what_it_has(live: Callable[..., Any]) -> None:
    engine = FakeEngine(delay_s=0.05)
    flags = ("--workload", "chat:rate=10,duration=60,input=200,spread=0,output=20")
    with live(engine) as url:
        command = [sys.executable, "-m", "api.cli", "bench", "--url", url, *flags]
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        deadline = time.monotonic() + 60
        while len(engine.seen) < 5 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "Interrupted" in out
    assert re.search(r"\d+ x interrupted", out)
    assert [seen.ended for seen in engine.seen].count("running") == 0


# -- other servers ------------------------------------------------------------------------------

EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
END = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'


class Scripted:
    """A server that answers each path with what `answers` has: status and object, or, for a stream,
    pieces of the raw body; floats between them are pauses in seconds."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.bodies: list[dict[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if scope["path"].startswith("/v1/c"):
            self.bodies.append(json.loads(body))
        status, content = self.answers.get(scope["path"], (404, {"error": {"message": "no route"}}))
        if isinstance(content, list):
            asked = json.loads(body)
            pieces = content if asked.get("stream") else [json.dumps(USAGE(asked)).encode()]
        else:
            pieces = [json.dumps(content).encode()]
        head = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": status, "headers": head})
        for piece in pieces:
            if isinstance(piece, float):
                await asyncio.sleep(piece)
            else:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def USAGE(body: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
    """Counts a word as a token, and nine for a template."""
    content = body["messages"][0]["content"] if "messages" in body else body["prompt"]
    return {"choices": [], "usage": {"prompt_tokens": 9 + len(content.split())}}


def models(owner: str) -> tuple[int, Any]:
    return 200, {"data": [{"id": "m", "owned_by": owner}]}


CHAT = "/v1/chat/completions"
STANDARD = {"model", "messages", "max_tokens", "temperature", "stream", "stream_options"}


@pytest.mark.parametrize(
    ("owner", "extra", "counted_by"),
    [
        ("somebody", set(), "usage"),
        ("vllm", {"ignore_eos"}, "/tokenize"),
        ("llamacpp", {"ignore_eos"}, "/tokenize"),
    ],
)
def test_servers_get_only_what_they_say_they_are(
    owner: str, extra: set[str], counted_by: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # vLLM's answer, and llama-server's: as many tokens as a uniform vocabulary would take is not
    # needed here, only that they are asked in their own way.
    answers = {"/v1/models": models(owner), CHAT: (200, [ROLE, EVENT, EVENT, END])}
    server = Scripted(answers)
    counted: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path") in ("/tokenize", "/apply-template") and owner != "somebody":
            message = await receive()
            asked = json.loads(message["body"])
            counted.append(asked)
            text = asked.get("content") or asked["messages"][0]["content"]
            tokens = list(range(9 + len(text.split())))
            answer: dict[str, Any] = {"tokens": tokens}
            if owner == "vllm":
                answer = {"count": len(tokens), "tokens": tokens}
            if scope["path"] == "/apply-template":
                answer = {"prompt": text}
            head = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 200, "headers": head})
            await send({"type": "http.response.body", "body": json.dumps(answer).encode()})
            return
        await server(scope, receive, send)

    with served(app) as url:  # type: ignore[arg-type]
        flags = ("--workload", "chat:rate=20,duration=0.5,input=40,output=8", "--json")
        code, out, _ = bench(capsys, "--url", url, *flags)
    found = json.loads(out)
    assert code == 0
    assert found["lengths"]["counted_by"] == counted_by
    assert bool(counted) == (owner != "somebody")
    streams = [body for body in server.bodies if body.get("stream")]
    assert {frozenset(body) for body in streams} == {frozenset(STANDARD | extra)}
    if counted_by == "usage":
        assert {body["max_tokens"] for body in server.bodies if not body.get("stream")} == {1}
    # Two events with text and no usage: two tokens.
    assert found["lengths"]["output"]["got"] == 2 * found["report"]["answered"]
    assert found["prompt_token_sources"] is None


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        ((429, {"error": {"message": "slow down"}}), "http 429", "slow down"),
        ((503, {"error": "full"}), "http 503", "full"),
        ((200, [EVENT, b'data: {"error": {"message": "broke"}}\n\n']), "stream error", "broke"),
        ((200, [EVENT]), "cut short", "without a reason to finish"),
        ((200, [b"data: [DONE]\n\n"]), "no tokens", "no token"),
        ((200, [b"data: {oops\n\n"]), "stream error", "not JSON"),
        ((200, [EVENT, 5.0]), "timeout", "within 0.5 s"),
    ],
)
async def test_faults_have_kinds(answer: tuple[int, Any], kind: str, words: str) -> None:
    with served(Scripted({CHAT: answer})) as url:  # type: ignore[arg-type]
        state = await replay(url, [TraceRequest(0.0, 20, 4)], timeout_s=0.5)
    (outcome,) = state.outcomes
    assert outcome.error == kind
    assert words in outcome.message
    assert state.failed == 1


async def replay(url: str, requests: list[TraceRequest], **options: Any) -> State:
    target = Target(Address.parse(url), "m", "unknown", None, {})
    load = Load(target, PromptMaker(UNIFORM, "salt"), endpoint="chat", **options)
    return await load.run(requests, lambda state: None)


async def test_nobody_there_is_an_error_of_each_request() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    state = await replay(f"127.0.0.1:{port}", [TraceRequest(0.0, 20, 4)] * 2)
    assert [outcome.error for outcome in state.outcomes] == ["connect", "connect"]
    assert "refused" in state.outcomes[0].message


async def test_a_role_progress_and_comments_are_no_tokens() -> None:
    early = b': keep-alive\n\ndata: {"choices":[],"prompt_progress":{"processed":1}}\n\n'
    with served(Scripted({CHAT: (200, [ROLE, early, 0.3, EVENT, 0.1, EVENT, END])})) as url:  # type: ignore[arg-type]
        state = await replay(url, [TraceRequest(0.0, 20, 4)])
    times = state.outcomes[0].times(state.started_s)
    assert times.error is None
    assert times.ttft_s >= 0.3
    assert times.output_tokens == 2
    assert times.max_gap_s >= 0.09


async def test_a_fault_while_building_ends_the_load() -> None:
    class Broken(PromptMaker):
        def make(self, request: TraceRequest, number: int) -> Any:
            if number == 1:
                raise RuntimeError("no words")
            return super().make(request, number)

    with served(Scripted({CHAT: (200, [EVENT, END])})) as url:  # type: ignore[arg-type]
        target = Target(Address.parse(url), "m", "unknown", None, {})
        load = Load(target, Broken(UNIFORM, ""), endpoint="chat")
        with pytest.raises(RuntimeError, match="no words"):
            await load.run([TraceRequest(0.0, 9, 1)] * 3, lambda state: None)


# -- HTTP ---------------------------------------------------------------------------------------


class RawServer(threading.Thread):
    """Gives each accepted connection to `serve` in turn, on a thread."""

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        super().__init__(daemon=True)
        self._serve = serve
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.accepted = 0

    def run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.accepted += 1
            with connection:
                self._serve(connection)

    def __enter__(self) -> RawServer:
        self.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self.join(5)


def read_request(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(1 << 16)
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(re.search(rb"content-length: (\d+)", head)[1])  # type: ignore[index]
    pieces, got = [body], len(body)
    while got < length:
        pieces.append(connection.recv(1 << 20))
        got += len(pieces[-1])
    return b"".join(pieces)


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


async def post(connections: Connections, body: bytes = b"{}") -> tuple[Exchange, bytes]:
    exchange, pieces = Exchange(), []
    await connections.post(
        "/v1/x", body, exchange, lambda now, data: pieces.append(data), timeout_s=10
    )
    return exchange, b"".join(pieces)


async def test_the_clock_starts_with_the_last_byte_of_the_body() -> None:
    def serve(connection: socket.socket) -> None:
        time.sleep(0.3)  # a body larger than the kernel's buffers waits for this
        read_request(connection)
        connection.sendall(OK)

    with RawServer(serve) as server:
        connections = Connections(Address.parse(f"127.0.0.1:{server.port}"))
        large, _ = await post(connections, b" " * 20_000_000)
        small, _ = await post(connections)
        await connections.close()
    assert large.sent_s - large.started_s >= 0.25
    assert large.headers_s >= large.sent_s
    assert small.sent_s - small.started_s < 0.25


async def test_connections_are_kept_and_replaced_when_the_server_closed_them() -> None:
    turns = iter(range(10))

    def serve(connection: socket.socket) -> None:
        for _ in range(2):
            read_request(connection)
            next(turns)
            connection.sendall(OK)
        # Closed without a word, as an idle time-out does it.

    with RawServer(serve) as server:
        connections = Connections(Address.parse(f"127.0.0.1:{server.port}"))
        for _ in range(5):
            _, body = await post(connections)
            assert body == b"ok"
        await connections.close()
    assert server.accepted == 3


async def test_a_new_connection_that_is_closed_is_no_reason_to_try_again() -> None:
    with RawServer(lambda connection: (read_request(connection), None)[1]) as server:
        connections = Connections(Address.parse(f"127.0.0.1:{server.port}"))
        with pytest.raises(ExchangeError) as caught:
            await post(connections)
        await connections.close()
    assert caught.value.kind == "closed"
    assert server.accepted == 1


@pytest.mark.parametrize(
    ("answer", "body", "kind"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\nto the end", b"to the end", None),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", b"", "cut short"),
        (b"SSH-2.0-x\r\n", b"", "protocol"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, b"ok", None),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n1\r\nd\r\n0\r\n\r\n",
            b"abcd",
            None,
        ),
    ],
)
async def test_ways_in_which_an_answer_ends(answer: bytes, body: bytes, kind: str | None) -> None:
    def serve(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(answer)

    with RawServer(serve) as server:
        connections = Connections(Address.parse(f"127.0.0.1:{server.port}"))
        if kind is None:
            assert (await post(connections))[1] == body
        else:
            with pytest.raises(ExchangeError) as caught:
                await post(connections)
            assert caught.value.kind == kind
        await connections.close()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://host/v1", "http://host:80"),
        ("https://host/prefix/v1/", "https://host:443/prefix"),
        ("http://[::1]:9", "http://[::1]:9"),
    ],
)
def test_addresses(url: str, shown: str) -> None:
    assert str(Address.parse(url)) == shown


@pytest.mark.parametrize("url", ["ftp://host", "http://", "host:99999", ":8000"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(AddressError, match="--url"):
        Address.parse(url)


# -- streams ------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 400), max_size=8))
def test_events_do_not_depend_on_how_the_body_was_cut(cuts: list[int]) -> None:
    body = b": hi\n\ndata: 1\n\nevent: x\r\ndata:2\r\n\r\n" + EVENT + "data: {é}\n\n".encode() + END
    places = sorted(min(cut, len(body)) for cut in cuts)
    reader = EventReader()
    pieces = [body[a:b] for a, b in zip([0, *places], [*places, len(body)], strict=True)]
    found = [data for piece in pieces for data in reader.feed(piece)]
    assert found == list(EventReader().feed(body))
    assert len(found) == 6


@pytest.mark.parametrize(
    ("event", "tokens"),
    [
        ({"choices": [{"text": " a", "finish_reason": None}]}, 1),
        ({"choices": [{"delta": {"content": ""}, "token_ids": [5], "finish_reason": None}]}, 1),
        ({"choices": [{"delta": {"reasoning_content": "hm"}, "finish_reason": None}]}, 1),
        ({"choices": [{"delta": {"content": None}, "finish_reason": "length"}]}, 1),
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, 0),
        ({"choices": [], "usage": {"prompt_tokens": 3}}, 0),
    ],
)
def test_what_counts_as_a_token(event: dict[str, Any], tokens: int) -> None:
    answer = Answer()
    answer.on_data(1.0, f"data: {json.dumps(event)}\n\n".encode())
    assert len(answer.arrivals_s) == tokens


def test_usage_is_read_and_its_absence_told() -> None:
    answer = Answer()
    usage = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": None}
    answer.on_data(1.0, f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode())
    assert (answer.prompt_tokens, answer.completion_tokens) == (7, 2)
    assert answer.detail("cached_tokens") is None
    assert Answer().prompt_tokens is None


# -- words --------------------------------------------------------------------------------------


def counter(cost: Callable[[str], int], base: int = 11) -> tuple[Any, list[str]]:
    asked: list[str] = []

    async def count(text: str) -> int:
        asked.append(text)
        return base + sum(cost(word) for word in text.split()[1:])

    return count, asked


@pytest.mark.parametrize(
    ("cost", "most_counts", "uniform"),
    [
        (lambda word: 1, 2, True),
        (lambda word: 1 + (len(word) > 9), 20, True),
        (lambda word: len(word) + 1, 70, False),
    ],
)
async def test_words_are_learnt_by_counting(
    cost: Callable[[str], int], most_counts: int, uniform: bool
) -> None:
    count, asked = counter(cost)
    words = await learn(count)
    assert words.base_tokens == 11
    assert [cost(word) for word in words.words] == list(words.costs)
    assert words.uniform == uniform
    assert len(words.words) >= 48
    assert len(asked) <= most_counts


async def test_a_server_that_counts_nonsense_is_refused() -> None:
    count, _ = counter(lambda word: 0)
    with pytest.raises(WordsError, match="0 tokens for one more word"):
        await learn(count)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6, unique=True), st.integers(0, 120), st.data()
)
def test_texts_have_the_wanted_tokens(costs: list[int], tokens: int, data: st.DataObject) -> None:
    words = tuple(f"w{cost}" for cost in costs)
    vocabulary = Vocabulary(0, words, tuple(costs))
    found = vocabulary.fill(data.draw(st.randoms(use_true_random=False)), tokens)
    total = vocabulary.tokens(found)
    assert total <= tokens
    if 1 in costs:
        assert total == tokens
    reachable = {0}
    for n in range(1, tokens + 1):
        if any(n - cost in reachable for cost in costs):
            reachable.add(n)
    # Far above the costs the random part cannot step over the last sums that can be reached.
    assert total in reachable
    assert tokens - total < max(costs)


def test_known_ids_share_what_they_share() -> None:
    maker = PromptMaker(UNIFORM, "s")
    ids = tuple(range(50))
    a = maker.make(TraceRequest(0, 50, 1, token_ids=ids), 0)
    b = maker.make(TraceRequest(0, 50, 1, token_ids=(*ids[:30], *range(100, 120))), 1)
    first, second = str(a.content).split(), str(b.content).split()
    assert first[:31] == second[:31]
    assert first[31:] != second[31:]
    assert a.text_tokens == b.text_tokens == 50
    assert len(first) == 46  # five tokens are the template's, the opening's among them


def test_prompts_shorter_than_the_template_are_what_it_is() -> None:
    made = PromptMaker(UNIFORM, "s").make(TraceRequest(0, 2, 1), 0)
    assert made.content == "Text:"
    assert made.text_tokens == 5


# -- the report ---------------------------------------------------------------------------------


def summary(late_s: float = 0.0, answered: int = 30) -> bench_report.Summary:
    state = State(answered, 1.0, started_s=100.0)
    state.lateness = Lateness([0.001] * 50)
    for number in range(answered):
        outcome = Outcome(number, TraceRequest(number / 10, 50, 4), 100 + number / 10, 50)
        begin = outcome.wanted_s + late_s
        outcome.exchange = Exchange(begin, begin, begin, begin + 1, 200)
        outcome.answer = Answer([begin + 0.1 * (k + 1 + number % 5) for k in range(4)], texts=4)
        outcome.answer.finish_reason = "length"
        state.outcomes.append(outcome)
    state.outcomes[-1].error, state.outcomes[-1].message = "timeout", "no end"
    target = Target(Address.parse("host:1"), "m", "unknown", None, {})
    return bench_report.Summary.of(
        state,
        target,
        Promise(0.35, 0.2),
        settings={},
        counted_by="usage",
        before={"preemptions_total": 1.0},
        after={"preemptions_total": 4.0},
    )


def test_figures_of_a_known_load() -> None:
    found = summary()
    report = found.report
    assert report.goodput.value == pytest.approx(18 / 30)  # three of five are in time, one failed
    assert report.missed == {"failed": 1, "ttft": 11} or report.missed["ttft"] == 11
    assert report.ttft_s.max == pytest.approx(0.5)
    assert report.tpot_s.p50 == pytest.approx(0.1)
    assert report.errors == {"timeout": 1}
    assert found.counters == {"preemptions_total": 3.0}
    assert not found.client.slow
    lines = "\n".join(found.lines())
    assert "first token late 11" in lines
    assert "the server does not say" in lines
    assert "warning" not in lines


def test_a_slow_client_says_so() -> None:
    found = summary(late_s=0.02)
    assert found.client.slow
    assert "the client was late by more than 10 ms" in "\n".join(found.lines())


@pytest.mark.parametrize("name", ["figure.png", "figure.html"])
def test_pictures(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from api.bench_plots import draw

    file = tmp_path / name
    plots.check(file)
    draw(summary(), file)
    data = file.read_bytes()
    if name.endswith("png"):
        assert data.startswith(b"\x89PNG")
        return
    assert b"<svg" in data
    assert b"60.0% goodput" in data
    assert not re.search(rb'(?:src|href)="https?:', data)


def test_a_picture_of_nothing_is_drawn_too(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from api.bench_plots import draw

    found = summary(answered=1)
    assert found.report.answered == 0
    draw(found, tmp_path / "none.png")


def test_plots_say_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(plots.PlotError, match=r"end in .png or .html"):
        plots.check(tmp_path / "a.pdf")
    with pytest.raises(plots.PlotError, match="no folder"):
        plots.check(tmp_path / "none" / "a.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(plots.PlotError, match="pip install matplotlib"):
        plots.check(tmp_path / "a.png")


# -- flags --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "one of --trace FILE and --workload SPEC"),
        (("--workload", "chat", "--trace", "x"), "one of --trace FILE and --workload SPEC"),
        (("--workload", "talk"), "kind 'talk' is not known"),
        (("--trace", "/nowhere.csv"), "cannot be read: No such file"),
        (("--workload", "chat", "--requests", "0"), "--requests is 0"),
        (("--workload", "chat", "--rate", "-1"), "poisson_rate is -1"),
        (("--workload", "images", "--endpoint", "completions"), "cannot send the trace's images"),
        (("--workload", "chat", "--start", "10m"), "No request arrives"),
        (("--workload", "chat", "--output", "/nowhere/x.json"), "there is no folder /nowhere"),
        (("--workload", "chat", "--url", "127.0.0.1:1"), "Is a server running there?"),
        (("--workload", "chat", "--ttft-slo", "5"), "is no duration; write 200ms"),
        (("--workload", "chat", "--scale-lengths", "0"), "is no factor above 0"),
        (("--workload", "chat", "--long", "1%"), "such as 0.01x2048-4096"),
    ],
)
def test_errors_name_the_flag(
    flags: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = bench(capsys, *flags)
    assert code in (1, 2)
    flat = " ".join((out + err).replace("│", " ").split())
    assert words in flat
    assert "Traceback" not in flat


def test_a_malformed_trace_names_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = own_trace(tmp_path / "t.jsonl", {"arrival_s": 0, "prompt_tokens": 9}, {})
    code, _, err = bench(capsys, "--trace", trace)
    assert code == 1
    assert "t.jsonl, line 1: output_tokens is missing" in err


def test_values_as_people_write_them() -> None:
    assert [seconds(text) for text in ("200ms", "45s", "1.5m", "0")] == [0.2, 45, 90, 0]
    assert factor("1/16") == 0.0625
    assert long_prompts("0.01x2048-4096") == (0.01, 2048, 4096)
    assert long_prompts("1x7") == (1.0, 7, 7)


def test_a_trace_is_changed_as_asked() -> None:
    flags = BenchFlags(workload="chat:rate=50,duration=10,input=160,output=32", rate=5.0)
    changed = BenchFlags(
        workload=flags.workload,
        rate=5.0,
        scale_lengths=factor("1/16"),
        duration=seconds("4s"),
        long=long_prompts("0.5x2048-4096"),
    )
    plain, found = read_requests(flags), read_requests(changed)
    assert 5 < len(found) < 40
    assert all(request.arrival_s < 4 for request in found)
    lengths = [request.prompt_tokens for request in found]
    assert any(2048 <= tokens <= 4096 for tokens in lengths)
    short = [(a, b) for a, b in zip(plain, found, strict=False) if b.prompt_tokens < 2048]
    assert all(b.prompt_tokens == max(1, round(a.prompt_tokens / 16)) for a, b in short)


def test_warnings_count_what_cannot_be_as_written() -> None:
    requests = [TraceRequest(0, 3, 1), TraceRequest(0, 90, 20), TraceRequest(0, 9, 1, tenant="a")]
    found = "\n".join(warnings(requests, 5, 100))
    assert "1 of 3 prompts are shorter than the 5 tokens" in found
    assert "1 of 3 requests are longer than the server's 100 tokens (up to 110)" in found
    assert "1 tenants" in found
    assert not list(warnings([TraceRequest(0, 9, 1)], 5, None))


def test_counters_of_prometheus_text() -> None:
    text = (
        "# HELP vllm:x_total y\n"
        'vllm:kv_prompt_tokens_total{model_name="tiny",source="device"} 12.0\n'
        'vllm:preemptions_total{model_name="tiny"} 1.5e+02\n'
        'vllm:gauge{model_name="tiny"} 3\n'
        "plain_total 4\n"
    )
    assert parse_counters(text) == {
        'kv_prompt_tokens_total{source="device"}': 12.0,
        "preemptions_total": 150.0,
        "plain_total": 4.0,
    }
