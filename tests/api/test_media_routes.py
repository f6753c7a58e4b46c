"""Images on their way in: data URIs, files, guarded URLs, limits, errors that name the part."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import re
import struct
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from api.urlguard import FetchLimits, UrlFetcher, is_global
from lm_engine.outputs import RequestError
from tests.api.conftest import ClientFactory, events
from tests.api.fakes import FakeEngine

CHAT = "/v1/chat/completions"
LEAKS = re.compile(r"0x[0-9a-f]{6,}| object at |/usr/|/tmp/|Traceback|127\.0\.0\.1|10\.0\.0\.7")


def encoded(size: tuple[int, int] = (100, 80), kind: str = "PNG", colour: str = "red") -> bytes:
    data = io.BytesIO()
    Image.new("RGB", size, colour).save(data, kind)
    return data.getvalue()


def uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def ask(*urls: str, part: dict[str, Any] | None = None, **extra: Any) -> dict[str, Any]:
    images = [{"type": "image_url", "image_url": {"url": url}, **(part or {})} for url in urls]
    content = [{"type": "text", "text": "look"}, *images]
    return {"messages": [{"role": "user", "content": content}], **extra}


async def refused(http: httpx.AsyncClient, body: dict[str, Any], part: int = 1) -> dict[str, Any]:
    """The error, equal in both modes, naming the part and nothing of the machine."""
    answers = []
    for streamed in (False, True):
        response = await http.post(CHAT, json={**body, "stream": streamed})
        assert response.status_code == 400, response.text
        assert not LEAKS.search(response.text), response.text
        answers.append(response.json()["error"])
    assert answers[0] == answers[1]
    assert answers[0]["type"] == "invalid_request_error"
    assert answers[0]["param"] == f"messages.0.content.{part}"
    return dict(answers[0])


async def test_an_image_reaches_the_engine_and_its_file_is_removed(client: ClientFactory) -> None:
    engine = FakeEngine()
    http = await client(engine, family="qwen2_5_vl")
    data = encoded()
    response = await http.post(CHAT, json=ask(uri(data)))
    assert response.status_code == 200, response.text
    seen = engine.seen[0]
    assert seen.media_bytes == (data,)
    assert seen.media[0].param == "messages.0.content.1"
    assert {span.key for span in seen.request.image_spans} == {seen.media[0].key}
    assert seen.request.positions is not None
    assert not Path(seen.media[0].path or "").exists()
    details = response.json()["usage"]["prompt_tokens_details"]
    rows = sum(span.length for span in seen.request.image_spans)
    assert details["image_tokens"] == rows
    assert response.headers["x-image-tokens"] == str(rows)
    http.server.admission.check_invariants()


async def test_files_live_as_long_as_the_stream(client: ClientFactory) -> None:
    engine = FakeEngine()
    http = await client(engine, family="qwen2_5_vl")
    response = await http.post(CHAT, json=ask(uri(encoded()), stream=True))
    assert events(response.text)[-1] == "[DONE]"
    assert not Path(engine.seen[0].media[0].path or "").exists()


async def test_equal_images_have_equal_keys_and_tenants_do_not_share(
    client: ClientFactory, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# key tenant\nk1 alice\nk2 bob\n")
    engine = FakeEngine()
    http = await client(engine, family="qwen2_5_vl", api_key_file=keys)
    for key in ("k1", "k1", "k2"):
        body = ask(uri(encoded()), uri(encoded(colour="blue")))
        response = await http.post(CHAT, json=body, headers={"authorization": f"Bearer {key}"})
        assert response.status_code == 200
    alice, again, bob = ([item.key for item in seen.media] for seen in engine.seen)
    assert alice == again
    assert len({*alice, *bob}) == 4
    assert [seen.request.tenant for seen in engine.seen] == ["alice", "alice", "bob"]


async def test_large_images_bypass_the_json_parser(client: ClientFactory) -> None:
    engine = FakeEngine()
    http = await client(engine, family="qwen2_5_vl")
    noise = Image.effect_noise((300, 300), 90).convert("RGB")
    data = io.BytesIO()
    noise.save(data, "PNG")
    assert len(data.getvalue()) > 100_000
    # A text that looks like a long data URI must arrive as text.
    decoy = 'he said: "url": "data:image/png;base64,' + "A" * 40_000
    body = ask(uri(data.getvalue()))
    body["messages"][0]["content"][0]["text"] = decoy
    body["max_tokens"] = 1
    rendered = await http.post("/v1/render", json=body)
    assert rendered.status_code == 400  # too long for this model, but read as text
    assert "context" in rendered.json()["error"]["message"]
    assert (await http.post(CHAT, json=ask(uri(data.getvalue())))).status_code == 200
    assert engine.seen[0].media_bytes[0] == data.getvalue()


def _bomb(width: int, height: int) -> bytes:
    """A PNG whose header claims a size that its data does not have."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = b"IDAT" + zlib.compress(b"\0" * 100)
    chunks = (header, body, b"IEND")
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in chunks
    )


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello, this is text",
        b"\x89PNG\r\n\x1a\n" + b"\xff" * 100,
        _bomb(0, 10),
        b"GIF89a",
        b"\xff\xd8\xff\xe0\x00\x10JFIF" + b"\x00" * 50,
        b"RIFF\x10\x00\x00\x00WEBPVP8X" + b"\xff" * 20,
        b"BM" + b"\xff" * 60,
        b"II*\x00" + b"\xff" * 40,
    ],
)
async def test_img_05_img_07_broken_headers_are_400(client: ClientFactory, data: bytes) -> None:
    engine = FakeEngine()
    http = await client(engine, family="qwen2_5_vl")
    await refused(http, ask(uri(data)))
    assert engine.seen == []
    assert (await http.post(CHAT, json=ask(uri(encoded())))).status_code == 200


async def test_img_05_undecodable_images_are_the_engines_400(client: ClientFactory) -> None:
    fault = RequestError("media", "the image is damaged", "messages.0.content.1")
    http = await client(FakeEngine(error=fault), family="qwen2_5_vl")
    error = await refused(http, ask(uri(encoded())))
    assert error["code"] == "invalid_image"


@pytest.mark.parametrize("size", [(1, 1), (27, 257), (257, 27), (640, 1), (2, 2)])
async def test_img_08_tiny_images_are_equal_in_both_modes(
    client: ClientFactory, size: tuple[int, int]
) -> None:
    engine = FakeEngine()
    http = await client(engine, family="qwen2_5_vl")
    answers = [
        await http.post(CHAT, json=ask(uri(encoded(size)), stream=streamed))
        for streamed in (False, True)
    ]
    assert answers[0].status_code == answers[1].status_code
    assert answers[0].status_code in (200, 400)


@pytest.mark.parametrize(("width", "height"), [(60000, 60000), (12000, 12000), (30000, 10)])
async def test_img_16_bombs_are_refused_by_their_header(
    client: ClientFactory, width: int, height: int
) -> None:
    engine = FakeEngine()
    http = await client(engine, family="qwen2_5_vl")
    error = await refused(http, ask(uri(_bomb(width, height))))
    assert f"{width} x {height}" in error["message"]
    assert engine.seen == []


async def test_img_14_an_image_that_never_fits_is_refused(client: ClientFactory) -> None:
    from dataclasses import replace

    from tests.api.fakes import INFO

    engine = FakeEngine()
    engine.current = replace(engine.current, model=replace(INFO, embedding_rows=4))
    http = await client(engine, family="qwen2_5_vl")
    error = await refused(http, ask(uri(encoded((600, 600)))))
    assert "embedding-rows" in error["message"]


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64,@@@@",
        "data:image/png;base64,QUJD=QUJD",
        "data:image/png,plain",
        "data:text/html;base64,QUJD",
        "data:image/png;base64,QUJ",
        "data:image/png;base64,Ünïcode",
        "data:",
        "ftp://example.com/x.png",
        "javascript:alert(1)",
        "//example.com/x.png",
        "file:///etc/passwd",
        "http://",
        "http://[::1",
        "http://user:secret@example.com/x.png",
        "http://example.com:99999/",
        "\u0000",
    ],
)
async def test_img_06_addresses_that_cannot_be_used(client: ClientFactory, url: str) -> None:
    http = await client(FakeEngine(), family="qwen2_5_vl")
    error = await refused(http, ask(uri(encoded()), url), part=2)
    assert error["code"] == "invalid_image_url"
    assert "secret" not in error["message"]


async def test_count_bytes_and_text_models(client: ClientFactory) -> None:
    http = await client(
        FakeEngine(), family="qwen2_5_vl", limit_mm_per_prompt=2, max_image_bytes=2000
    )
    small = uri(encoded((8, 8)))
    error = await refused(http, ask(small, small, small), part=3)
    assert "at most 2" in error["message"]
    noise = io.BytesIO()
    Image.effect_noise((80, 80), 90).save(noise, "PNG")
    error = await refused(http, ask(uri(noise.getvalue())))
    assert "2000" in error["message"].replace(",", "")
    http = await client(FakeEngine(), family="llama")
    error = await refused(http, ask(small))
    assert "does not take images" in error["message"]


async def test_resolution_limits_and_detail_change_the_cost(client: ClientFactory) -> None:
    engine = FakeEngine()
    http = await client(engine, family="qwen2_5_vl")
    data = uri(encoded((600, 600)))

    async def tokens(body: dict[str, Any]) -> int:
        answer = (await http.post("/v1/render", json=body)).json()
        return int(answer["images"][0]["tokens"])

    full = await tokens(ask(data))
    part = await tokens(ask(data, part={"max_pixels": 28 * 28 * 16}))
    request = await tokens(ask(data, mm_processor_kwargs={"max_pixels": 28 * 28 * 16}))
    assert part == request <= 16 < full
    both = ask(data, part={"max_pixels": 28 * 28 * 4}, mm_processor_kwargs={"max_pixels": 10**6})
    assert await tokens(both) <= 4
    bad = ask(data, part={"min_pixels": 100, "max_pixels": 50})
    response = await http.post(CHAT, json=bad)
    assert response.status_code == 400
    await refused(http, ask(data, part={"max_pixels": 1}))
    detail = ask(data)
    detail["messages"][0]["content"][1]["image_url"]["detail"] = "blurry"
    response = await http.post(CHAT, json=detail)
    assert response.json()["error"]["param"] == "messages.0.content.1.image_url.detail"


async def test_img_15_interleaving_survives_the_way_in(client: ClientFactory) -> None:
    engine = FakeEngine()
    http = await client(engine, family="qwen2_5_vl")
    red, blue = uri(encoded()), uri(encoded(colour="blue"))
    parts = [
        {"type": "text", "text": "one"},
        {"type": "image_url", "image_url": {"url": red}},
        {"type": "text", "text": "two"},
        {"type": "image_url", "image_url": {"url": blue}},
        {"type": "text", "text": "three"},
    ]
    body = {"messages": [{"role": "user", "content": parts}]}
    pieces = (await http.post("/v1/render", json=body)).json()["pieces"]
    assert [piece["type"] for piece in pieces] == ["text", "image", "text", "image", "text"]
    assert "one" in pieces[0]["text"]
    assert "two" in pieces[2]["text"]
    assert "three" in pieces[4]["text"]
    await http.post(CHAT, json=body)
    seen = engine.seen[0]
    first, second = (span.key for span in seen.request.image_spans)
    assert [item.key for item in seen.media] == [first, second]
    assert base64.b64decode(red.partition(",")[2]) == seen.media_bytes[0]


# -- local files ----------------------------------------------------------------------------------


async def test_local_files_stay_inside_their_folder(client: ClientFactory, tmp_path: Path) -> None:
    root, outside = tmp_path / "media", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "a b.png").write_bytes(encoded())
    (outside / "secret.png").write_bytes(encoded())
    (root / "link.png").symlink_to(outside / "secret.png")
    (root / "folder").symlink_to(outside)
    http = await client(FakeEngine(), family="qwen2_5_vl", allowed_local_media_path=root)
    good = ask(f"file://{root}/a%20b.png")
    assert (await http.post(CHAT, json=good)).status_code == 200
    for bad in (
        f"file://{outside}/secret.png",
        f"file://{root}/link.png",
        f"file://{root}/folder/secret.png",
        f"file://{root}/../outside/secret.png",
        f"file://{root}/%2e%2e/outside/secret.png",
        f"file://{root}/missing.png",
        f"file://{root}",
        f"file://elsewhere{root}/a%20b.png",
        f"file://{root}/a%20b.png%00.txt",
        "file:///dev/zero",
    ):
        error = await refused(http, ask(bad))
        assert str(tmp_path) not in error["message"]


# -- remote images --------------------------------------------------------------------------------

Handler = Callable[[httpx.Request], httpx.Response]


class Streamed(httpx.AsyncByteStream):
    """A body that is read as from a socket."""

    def __init__(self, data: bytes):
        self.data = data

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for start in range(0, len(self.data), 65536):
            yield self.data[start : start + 65536]


def fetcher(handler: Handler, addresses: dict[str, list[str]], **limits: Any) -> UrlFetcher:
    async def resolver(host: str, port: int) -> list[str]:
        if host not in addresses:
            raise OSError("no such host as 10.0.0.7")
        return addresses[host]

    merged = {"max_bytes": 100_000, "timeout_s": 5.0, **limits}
    return UrlFetcher(
        FetchLimits(**merged), resolver=resolver, transport=httpx.MockTransport(handler)
    )


PUBLIC = {"pics.example": ["93.184.216.34"], "inner.example": ["10.0.0.7"]}


async def test_a_public_image_is_fetched_from_the_checked_address(client: ClientFactory) -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, stream=Streamed(encoded()))

    http = await client(FakeEngine(), family="qwen2_5_vl", fetcher=fetcher(handler, PUBLIC))
    response = await http.post(CHAT, json=ask("https://pics.example/a.png?x=1"))
    assert response.status_code == 200, response.text
    assert seen[0].url.host == "93.184.216.34"  # pinned: no second look-up can differ
    assert seen[0].headers["host"] == "pics.example"
    assert seen[0].extensions["sni_hostname"] == "pics.example"


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(404, text="nope"),
        httpx.Response(200, text="<html>", headers={"content-type": "text/html"}),
        httpx.Response(200, content=b""),
        httpx.Response(500, text="Traceback at 0xdeadbeef1"),
        httpx.Response(200, content=b"x" * 200_000),
        httpx.Response(200, content=b"x", headers={"content-length": "999999999"}),
        httpx.Response(302, headers={"location": "http://inner.example/"}),
        httpx.Response(302, headers={"location": "file:///etc/passwd"}),
        httpx.Response(302, headers={"location": "http://pics.example/again"}),
        httpx.Response(302),
    ],
)
async def test_img_06_img_17_bad_origins_are_400(
    client: ClientFactory, answer: httpx.Response
) -> None:
    hosts = []

    def handler(request: httpx.Request) -> httpx.Response:
        hosts.append(request.url.host)
        stream = Streamed(answer.content)
        return httpx.Response(answer.status_code, headers=answer.headers, stream=stream)

    http = await client(FakeEngine(), family="qwen2_5_vl", fetcher=fetcher(handler, PUBLIC))
    await refused(http, ask("http://pics.example/a.png"))
    assert set(hosts) == {"93.184.216.34"}


@pytest.mark.parametrize(
    "url",
    ["http://inner.example/", "http://unknown.example/", "http://pics.example:notaport/"],
)
async def test_img_17_private_hosts_are_never_contacted(client: ClientFactory, url: str) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise AssertionError(f"contacted {request.url}")

    http = await client(FakeEngine(), family="qwen2_5_vl", fetcher=fetcher(handler, PUBLIC))
    await refused(http, ask(url))


async def test_img_17_one_private_address_among_public_ones_is_enough(
    client: ClientFactory,
) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise AssertionError

    addresses = {"mixed.example": ["93.184.216.34", "127.0.0.1"]}
    http = await client(FakeEngine(), family="qwen2_5_vl", fetcher=fetcher(handler, addresses))
    await refused(http, ask("http://mixed.example/"))


async def test_allow_list_holds_at_every_hop(client: ClientFactory) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        if request.headers["host"] == "pics.example":
            return httpx.Response(302, headers={"location": "http://other.example/"})
        raise AssertionError("contacted a host off the list")

    addresses = {**PUBLIC, "other.example": ["93.184.216.35"]}
    listed = fetcher(handler, addresses, allowed_domains=("pics.example",))
    http = await client(FakeEngine(), family="qwen2_5_vl", fetcher=listed)
    error = await refused(http, ask("http://pics.example/"))
    assert "allowed hosts" in error["message"]
    await refused(http, ask("http://other.example/"))


async def test_img_17_loopback_in_default_configuration(client: ClientFactory) -> None:
    connections = 0

    async def inner(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        writer.close()

    server = await asyncio.start_server(inner, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    http = await client(FakeEngine(), family="qwen2_5_vl")
    for host in ("127.0.0.1", "localhost", "[::1]", "2130706433", "0x7f.1", "0.0.0.0"):
        await refused(http, ask(f"http://{host}:{port}/a.png"))
    server.close()
    await server.wait_closed()
    assert connections == 0


async def test_img_19_slow_origins_end_in_time(client: ClientFactory) -> None:
    async def slow(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(30)
        return httpx.Response(200)

    slowly: Callable[[httpx.Request], Awaitable[httpx.Response]] = slow
    limited = fetcher(slowly, PUBLIC, timeout_s=0.2)  # type: ignore[arg-type]
    http = await client(FakeEngine(), family="qwen2_5_vl", fetcher=limited)
    slow_body, text = ask("http://pics.example/"), ask()
    waiting = [asyncio.create_task(http.post(CHAT, json=slow_body)) for _ in range(20)]
    await asyncio.sleep(0.02)
    assert (await http.post(CHAT, json=text)).status_code == 200
    assert (await http.get("/health")).status_code == 200
    assert not any(task.done() for task in waiting)
    for response in await asyncio.gather(*waiting):
        assert response.status_code == 400
        assert "0.2 s" in response.json()["error"]["message"]


async def test_img_19_a_dripping_origin_stalls_nobody(client: ClientFactory) -> None:
    """A real origin that sends a byte now and then, so that no read ever times out."""

    dripping = 0

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal dripping
        dripping += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.02)
        writer.close()
        dripping -= 1

    origin = await asyncio.start_server(drip, "127.0.0.1", 0)
    port = origin.sockets[0].getsockname()[1]
    open_to_all = UrlFetcher(FetchLimits(100_000, timeout_s=0.5), allow=lambda address: True)
    http = await client(FakeEngine(), family="qwen2_5_vl", fetcher=open_to_all)
    slow = ask(f"http://127.0.0.1:{port}/a.png")
    waiting = [asyncio.create_task(http.post(CHAT, json=slow)) for _ in range(20)]
    await asyncio.sleep(0.1)
    assert (await http.post(CHAT, json=ask())).status_code == 200
    assert (await http.get("/health")).status_code == 200
    assert not any(task.done() for task in waiting)
    assert http.server.admission.media_bytes > 0
    for response in await asyncio.gather(*waiting):
        assert response.status_code == 400
        assert "0.5 s" in response.json()["error"]["message"]
    assert http.server.admission.media_bytes == 0
    async with asyncio.timeout(5):
        while dripping:
            await asyncio.sleep(0.01)
    origin.close()
    await origin.wait_closed()


class Watched(Streamed):
    """Yields to other requests after each piece, and notes what lies in the spool then."""

    def __init__(self, data: bytes, look: Callable[[], None]):
        super().__init__(data)
        self.look = look

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for start in range(0, len(self.data), 4096):
            yield self.data[start : start + 4096]
            self.look()
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("kind", ["http", "http without a length", "file"])
async def test_a_flood_of_addresses_stays_within_the_media_bound(
    client: ClientFactory, tmp_path: Path, kind: str
) -> None:
    bound = 400_000
    noise = io.BytesIO()
    Image.effect_noise((250, 150), 90).convert("RGB").save(noise, "PNG")
    data = noise.getvalue()
    assert 50_000 < len(data) < bound / 2
    (tmp_path / "a.png").write_bytes(data)
    most_spooled = most_charged = 0

    def look() -> None:
        nonlocal most_spooled, most_charged
        spool = http.server.media._spool  # type: ignore[attr-defined]
        files = [path.stat().st_size for path in spool.rglob("*") if path.is_file()]
        most_spooled = max(most_spooled, sum(files))
        most_charged = max(most_charged, http.server.admission.media_bytes)  # type: ignore[attr-defined]

    def handler(request: httpx.Request) -> httpx.Response:
        length = {} if kind == "http without a length" else {"content-length": str(len(data))}
        return httpx.Response(200, headers=length, stream=Watched(data, look))

    http = await client(
        FakeEngine(delay_s=0.002),
        family="qwen2_5_vl",
        fetcher=fetcher(handler, PUBLIC, max_bytes=bound // 3),
        allowed_local_media_path=tmp_path,
        max_queued_media_bytes=bound,
    )
    url = f"file://{tmp_path}/a.png" if kind == "file" else "http://pics.example/a.png"
    tasks = [asyncio.create_task(http.post(CHAT, json=ask(url))) for _ in range(20)]
    while not all(task.done() for task in tasks):
        look()
        await asyncio.sleep(0.002)
    answers = [task.result() for task in tasks]
    statuses = Counter(answer.status_code for answer in answers)
    assert set(statuses) == {200, 503}
    assert statuses[200] >= 2
    refused = [answer for answer in answers if answer.status_code == 503]
    assert all(answer.headers["retry-after"] for answer in refused)
    assert all("exceed" in answer.json()["error"]["message"] for answer in refused)
    assert 0 < most_spooled <= most_charged <= bound
    http.server.admission.check_invariants()  # type: ignore[attr-defined]
    assert http.server.admission.media_bytes == 0  # type: ignore[attr-defined]
    assert list(http.server.media._spool.iterdir()) == []  # type: ignore[attr-defined]
    assert (await http.post(CHAT, json=ask(url))).status_code == 200


async def test_fetches_wait_for_their_turn_and_are_not_blamed_for_others(
    client: ClientFactory,
) -> None:
    held = asyncio.Event()
    running = most = 0

    async def slow(request: httpx.Request) -> httpx.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            if request.url.path == "/slow":
                await held.wait()
        finally:
            running -= 1
        return httpx.Response(200, stream=Streamed(encoded()))

    slowly: Callable[[httpx.Request], Awaitable[httpx.Response]] = slow
    limited = fetcher(slowly, PUBLIC, timeout_s=0.4, max_fetches=2)  # type: ignore[arg-type]
    http = await client(FakeEngine(), family="qwen2_5_vl", fetcher=limited)
    blockers = [
        asyncio.create_task(http.post(CHAT, json=ask("http://pics.example/slow"))) for _ in range(2)
    ]
    await asyncio.sleep(0.1)
    # Waits 0.3 s for a turn, and then has its own time.
    late = asyncio.create_task(http.post(CHAT, json=ask(*["http://pics.example/a"] * 3)))
    for blocker in blockers:
        assert (await blocker).status_code == 400
    assert (await late).status_code == 200
    assert most == 2
    async with limited._turns, limited._turns:
        full = await http.post(CHAT, json=ask("http://pics.example/a"))
    assert full.status_code == 503
    assert full.headers["retry-after"]
    assert "as many as this server fetches" in full.json()["error"]["message"]
    held.set()


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("192.168.1.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1%eth0", False),
        ("fc00::1", False),
        ("fec0::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:93.184.216.34", True),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::a00:1", False),
        ("2002:7f00:1::", False),
        ("ff02::1", False),
        ("not an address", False),
    ],
)
def test_which_addresses_are_public(address: str, public: bool) -> None:
    assert is_global(address) is public
