"""Fetching an image from an address that a client named.

Owns: which hosts may be contacted (global addresses only, an optional allow-list, re-checked at
each redirect), pinning of the checked address, and caps on bytes, time, hops and fetches at once.
Does not own: what the bytes are (media.py).

The name is resolved once per hop; every address it resolves to must be global, and the connection
goes to the first of them by number. The host name appears only in the Host header and in TLS, so
there is no second look-up that could answer differently. Messages never repeat an address.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urljoin

import httpx

from api.errors import MediaError, OverloadedError

Resolver = Callable[[str, int], Awaitable[list[str]]]

MAX_HOPS = 3
_REDIRECTS = (301, 302, 303, 307, 308)
# IPv6 ranges that carry an IPv4 address: what counts is the address inside.
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


@dataclass(frozen=True, slots=True)
class FetchLimits:
    max_bytes: int
    timeout_s: float
    allowed_domains: tuple[str, ...] = ()
    """Empty: any public host. Otherwise the hosts that may be contacted, exactly as named."""
    max_fetches: int = 32
    """At once; more wait for their turn, up to `timeout_s`."""


class Sink(Protocol):
    """Where a fetched file goes."""

    def expect(self, most_bytes: int) -> None:
        """Once, before the first byte: this many will follow, or fewer."""
        ...

    def write(self, chunk: bytes) -> object: ...


class _RefusedError(Exception):
    """Carries a message for the user; `fetch` adds the part's name."""


async def resolve(host: str, port: int) -> list[str]:
    """All addresses of a host, by the system's resolver, off the event loop."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_global(address: str) -> bool:
    """Whether an address is public, unicast, and not an IPv6 wrapping of a private IPv4."""
    try:
        ip = ipaddress.ip_address(address.split("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is None and ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_global(str(inner))
        if ip.is_site_local:
            return False
    return ip.is_global and not ip.is_multicast and not ip.is_reserved and not ip.is_unspecified


class UrlFetcher:
    """Fetches under `FetchLimits`; `resolver` and `transport` are replaced in tests."""

    def __init__(
        self,
        limits: FetchLimits,
        *,
        resolver: Resolver = resolve,
        transport: httpx.AsyncBaseTransport | None = None,
        allow: Callable[[str], bool] = is_global,
    ):
        self._limits = limits
        self._resolver = resolver
        self._allow = allow
        self._turns = asyncio.Semaphore(limits.max_fetches)
        # trust_env would send the request through a proxy that resolves the name again.
        self._client = httpx.AsyncClient(
            transport=transport,
            trust_env=False,
            follow_redirects=False,
            timeout=limits.timeout_s,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            headers={"user-agent": "longlens", "accept": "image/*", "accept-encoding": "identity"},
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def fetch(self, url: str, sink: Sink, param: str) -> int:
        """Passes the response's bytes to `sink` and returns their number.

        Raises MediaError (400) naming `param` for every refusal and failure, OverloadedError (503)
        when other fetches left no turn in time, and any ApiError that the sink raises.
        """
        async with self._turn():
            return await self._fetch(url, sink, param)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Waiting for other clients' slow origins is not the fault of this one's."""
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                await self._turns.acquire()
        except TimeoutError:
            raise OverloadedError(
                f"{self._limits.max_fetches} images are being fetched, as many as this server "
                f"fetches at once, and none ended within {self._limits.timeout_s:g} s. Try again "
                "later, or send the image as a data: URL.",
                retry_after_s=2,
            ) from None
        try:
            yield
        finally:
            self._turns.release()

    async def _fetch(self, url: str, sink: Sink, param: str) -> int:
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                return await self._follow(url, sink)
        except TimeoutError:
            message = f"the server did not deliver it within {self._limits.timeout_s:g} s"
        except _RefusedError as refusal:
            message = str(refusal)
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError, ValueError):
            message = "the address could not be fetched"
        raise MediaError(
            f"The image at {param} was not loaded: {message}.",
            param=param,
            code="invalid_image_url",
        )

    async def _follow(self, url: str, sink: Sink) -> int:
        for _ in range(MAX_HOPS + 1):
            target = httpx.URL(url)
            address = await self._checked_address(target)
            async with self._open(target, address) as response:
                if response.status_code in _REDIRECTS:
                    url = urljoin(url, response.headers.get("location", ""))
                    continue
                if response.status_code != 200:
                    raise _RefusedError(f"its server answered {response.status_code}")
                return await self._read(response, sink)
        raise _RefusedError(f"it redirects more than {MAX_HOPS} times")

    def _open(self, target: httpx.URL, address: str) -> _Opened:
        port = "" if target.port is None else f":{target.port}"
        host = f"[{target.host}]" if ":" in target.host else target.host
        request = self._client.build_request(
            "GET",
            target.copy_with(host=address, fragment=None),
            headers={"host": f"{host}{port}"},
            extensions={"sni_hostname": target.host},
        )
        return _Opened(self._client, request)

    async def _checked_address(self, target: httpx.URL) -> str:
        if target.scheme not in ("http", "https") or not target.host:
            raise _RefusedError("only http and https addresses are fetched")
        if target.userinfo:
            raise _RefusedError("an address must not carry a user name or password")
        domains = self._limits.allowed_domains
        if domains and target.host.lower().rstrip(".") not in domains:
            raise _RefusedError("its host is not on this server's list of allowed hosts")
        port = target.port or (443 if target.scheme == "https" else 80)
        addresses = await self._resolver(target.host, port)
        # One private address among public ones is an attack on whoever picks at random.
        if not addresses or not all(map(self._allow, addresses)):
            raise _RefusedError("its host is not a public one")
        return addresses[0]

    async def _read(self, response: httpx.Response, sink: Sink) -> int:
        limit = self._limits.max_bytes
        declared = response.headers.get("content-length", "")
        total = 0
        if declared.isdecimal():
            if int(declared) > limit:
                raise _RefusedError(f"it has {int(declared)} bytes; at most {limit} are fetched")
            limit = int(declared)
        sink.expect(limit)
        async for chunk in response.aiter_raw():
            total += len(chunk)
            if total > limit:
                raise _RefusedError(f"it has more than the {limit} bytes that are fetched")
            sink.write(chunk)
        if total == 0:
            raise _RefusedError("its server sent nothing")
        return total


class _Opened:
    """`async with` over a streamed response."""

    def __init__(self, client: httpx.AsyncClient, request: httpx.Request):
        self._client = client
        self._request = request
        self._response: httpx.Response | None = None

    async def __aenter__(self) -> httpx.Response:
        self._response = await self._client.send(self._request, stream=True)
        return self._response

    async def __aexit__(self, *exc: object) -> None:
        assert self._response is not None
        await self._response.aclose()
