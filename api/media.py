"""A request's images, from what the client sent to files with known sizes.

Owns: ImageSource (what a part asked for), reading data URIs, guarded URLs and local files into
private spool files, and RequestMedia, which removes them. Does not own: what a header or a size
means (vision_encoder), which hosts may be contacted (urlguard.py), or pixels: nothing here decodes
an image.

Work that scales with bytes happens in the server's small thread pool in short slices, because
base64 decoding holds Python's lock and /health has to answer meanwhile. Bytes that are not part of
the request's body are charged to it (`Charge`) before they are kept.
"""

from __future__ import annotations

import asyncio
import binascii
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, TypeVar
from urllib.parse import unquote, urlsplit

from api.errors import MediaError
from api.urlguard import UrlFetcher
from lm_engine.client import MediaItem
from vision_encoder import media as images
from vision_encoder.grid import limit_for_detail
from vision_encoder.media import ImageHeader, MediaLimits
from vision_encoder.plan import ImagePlan, ImagePlanner, PlanError, ResolutionLimit

_SLICE = 96 * 2**10
"""Base64 characters decoded at a time; a multiple of 4."""
_COPY = 2**20

T = TypeVar("T")
Charge = Callable[[int], None]
"""Called with bytes that a request is about to hold, or less than 0 for those that it gives back;
raises when the server has no room for them. Not thread-safe: the event loop calls it."""


@dataclass(frozen=True, slots=True)
class ImageSource:
    """One image part: where it is, what its user calls it, and its cost limits."""

    url: str
    param: str
    detail: str = "auto"
    limit: ResolutionLimit = field(default_factory=ResolutionLimit)


@dataclass(frozen=True, slots=True)
class SpooledImage:
    source: ImageSource
    path: str
    num_bytes: int
    header: ImageHeader


class RequestMedia:
    """The images of one request and the folder that holds them. `close` removes it."""

    def __init__(
        self,
        folder: Path | None,
        spooled: Sequence[SpooledImage] = (),
        resolution_limit: int | None = None,
    ):
        """`resolution_limit`: most pixels of an image that the tower sees, if the server says."""
        self._folder = folder
        self.spooled = tuple(spooled)
        self._resolution_limit = resolution_limit

    @property
    def num_bytes(self) -> int:
        return sum(image.num_bytes for image in self.spooled)

    def plans(self, planner: ImagePlanner) -> list[ImagePlan]:
        """Plans for all images together. Raises MediaError naming the part at fault."""
        sizes = [(image.header.width, image.header.height) for image in self.spooled]
        limits = [
            capped(_limit(image.source, planner), self._resolution_limit, planner.floor_pixels)
            for image in self.spooled
        ]
        try:
            return planner.plan(sizes, limits)
        except PlanError as error:
            param = self.spooled[error.index].source.param
            raise MediaError(
                f"The image at {param} cannot be served: {error}.", param=param
            ) from None

    def items(self, plans: Sequence[ImagePlan], scope: tuple[bytes, ...]) -> list[MediaItem]:
        """What the engine is given. `scope`: model and tenant, which keys are never shared
        across. Reads every file once; CPU work."""
        items = []
        for image, plan in zip(self.spooled, plans, strict=True):
            data = Path(image.path).read_bytes()
            key = images.content_key(data, plan.fingerprint, *scope)
            items.append(MediaItem(key, plan, image.source.param, path=image.path))
        return items

    def close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _limit(source: ImageSource, planner: ImagePlanner) -> ResolutionLimit:
    """Explicit pixel bounds win over what `detail` implies."""
    implied = limit_for_detail(planner.family, source.detail, planner.floor_pixels)
    explicit = source.limit
    limit = replace(
        implied,
        min_pixels=explicit.min_pixels or implied.min_pixels,
        max_pixels=explicit.max_pixels or implied.max_pixels,
    )
    if limit.min_pixels and limit.max_pixels and limit.min_pixels > limit.max_pixels:
        return replace(limit, max_pixels=None) if explicit.min_pixels else limit
    return limit


def capped(limit: ResolutionLimit, most: int | None, floor_pixels: int) -> ResolutionLimit:
    """No more pixels than `most`, where it is given and the model can do with so few."""
    if most is None:
        return limit
    most = max(most, floor_pixels)
    return ResolutionLimit(
        min_pixels=None if limit.min_pixels is None else min(limit.min_pixels, most),
        max_pixels=most if limit.max_pixels is None else min(limit.max_pixels, most),
    )


class MediaLoader:
    """Brings images into spool files. `close` removes the whole spool."""

    def __init__(
        self,
        limits: MediaLimits,
        fetcher: UrlFetcher,
        *,
        pool: Executor,
        local_root: Path | None = None,
        resolution_limit: int | None = None,
    ):
        self.resolution_limit = resolution_limit
        """For the requests to come; may change while serving."""
        self._limits = limits
        self._fetcher = fetcher
        self._root = None if local_root is None else local_root.resolve()
        self._pool = pool
        self._spool = Path(tempfile.mkdtemp(prefix="longlens-media-"))

    async def close(self) -> None:
        await self._fetcher.close()
        shutil.rmtree(self._spool, ignore_errors=True)

    async def load(
        self,
        sources: Sequence[ImageSource],
        attachments: Mapping[str, memoryview],
        charge: Charge,
    ) -> RequestMedia:
        """All images of a request. Raises MediaError naming the part, or what `charge` raises;
        nothing is left behind. Images inside the body are not charged: their body is."""
        if not sources:
            return RequestMedia(None)
        folder = Path(tempfile.mkdtemp(dir=self._spool))
        tasks = [
            asyncio.ensure_future(self._load_one(source, folder / str(index), attachments, charge))
            for index, source in enumerate(sources)
        ]
        try:
            spooled = await asyncio.gather(*tasks)
            _checked(
                lambda: images.check_request([s.header for s in spooled], self._limits), "messages"
            )
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return RequestMedia(folder, spooled, self.resolution_limit)

    async def in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def _load_one(
        self,
        source: ImageSource,
        path: Path,
        attachments: Mapping[str, memoryview],
        charge: Charge,
    ) -> SpooledImage:
        url = attachments.get(source.url, source.url)
        scheme = "data" if isinstance(url, memoryview) else url[:16].partition(":")[0].lower()
        if isinstance(url, memoryview) or scheme == "data":
            await self.in_thread(lambda: self._decode_data_uri(url, path, source.param))
        elif scheme in ("http", "https"):
            with path.open("wb") as file:
                spool = _Spool(file, charge)
                spool.settle(await self._fetcher.fetch(url, spool, source.param))
        elif scheme == "file":
            size = await self.in_thread(lambda: self._size_of_local(url, source.param))
            charge(size)
            await self.in_thread(lambda: self._copy_local(url, path, source.param, size))
        else:
            raise MediaError(
                f"The image at {source.param} must be a data:, http: or https: URL.",
                param=source.param,
                code="invalid_image_url",
            )
        header = await self.in_thread(lambda: self._inspect(path, source.param))
        return SpooledImage(source, str(path), path.stat().st_size, header)

    def _inspect(self, path: Path, param: str) -> ImageHeader:
        data = path.read_bytes()
        header = _checked(lambda: images.read_header(data), param)
        _checked(lambda: images.check(header, self._limits, len(data)), param)
        return header

    def _decode_data_uri(self, url: str | memoryview, path: Path, param: str) -> None:
        # A short URI arrives as text; one with other than ASCII characters is not base64.
        view = memoryview(url.encode("ascii", "replace")) if isinstance(url, str) else url
        head, comma, _ = bytes(view[:256]).partition(b",")
        fields = head[len(b"data:") :].lower().split(b";")
        if not comma or fields[-1].strip() != b"base64":
            raise _invalid(param, "a data: URL must read data:image/...;base64,...")
        if not (fields[0].startswith(b"image/") or fields[0] in (b"", b"application/octet-stream")):
            raise _invalid(param, "the data: URL does not say that it is an image")
        body = view[len(head) + 1 :]
        if len(body) // 4 * 3 > self._limits.max_bytes + 3:
            raise _invalid(
                param,
                f"it has about {len(body) // 4 * 3} bytes; at most {self._limits.max_bytes} are "
                "accepted",
            )
        with path.open("wb") as file:
            for start in range(0, len(body), _SLICE):
                part = body[start : start + _SLICE]
                try:
                    raw = binascii.a2b_base64(part, strict_mode=True)
                except binascii.Error:
                    raise _invalid(param, "its base64 is broken") from None
                if start + _SLICE < len(body) and len(raw) != _SLICE // 4 * 3:
                    raise _invalid(param, "its base64 is broken")
                file.write(raw)
                time.sleep(0)  # lets the event loop have the lock

    def _open_local(self, url: str, param: str) -> BinaryIO:
        root = self._root
        if root is None:
            raise _invalid(
                param, "file: URLs are off on this server (see --allowed-local-media-path)"
            )
        handle = _open_inside(root, url)
        if handle is None:
            raise _invalid(param, "file: URLs must name a file under the folder the server allows")
        return os.fdopen(handle, "rb")

    def _size_of_local(self, url: str, param: str) -> int:
        """Bytes that will be copied; one more than is allowed stands for all that are too many."""
        with self._open_local(url, param) as file:
            return min(os.fstat(file.fileno()).st_size, self._limits.max_bytes + 1)

    def _copy_local(self, url: str, path: Path, param: str, left: int) -> None:
        """The first `left` bytes, whatever the file has become since it was measured."""
        with self._open_local(url, param) as source, path.open("wb") as target:
            while left > 0 and (chunk := source.read(min(_COPY, left))):
                target.write(chunk)
                left -= len(chunk)


class _Spool:
    """A fetched file on its way to disk. What it may become is charged before the first byte, so
    that of many fetches some end well, where charging each byte would fail all of them halfway."""

    def __init__(self, file: BinaryIO, charge: Charge):
        self._charge = charge
        self._charged = 0
        self.write = file.write

    def expect(self, most_bytes: int) -> None:
        self._charge(most_bytes)
        self._charged = most_bytes

    def settle(self, size: int) -> None:
        """Gives back what the file did not need."""
        self._charge(size - self._charged)


def _open_inside(root: Path, url: str) -> int | None:
    """A descriptor of the regular file that a file: URL names, None unless it truly (symbolic
    links followed) lies inside `root`."""
    try:
        parts = urlsplit(url)
        real = Path(unquote(parts.path)).resolve(strict=True)
        if parts.netloc not in ("", "localhost") or parts.query or not real.is_relative_to(root):
            return None
        # O_NONBLOCK: opening a pipe must not wait for a writer.
        handle = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, ValueError, RuntimeError):
        return None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        return None
    return handle


def _invalid(param: str, message: str) -> MediaError:
    return MediaError(
        f"The image at {param} was not loaded: {message}.", param=param, code="invalid_image_url"
    )


def _checked(work: Callable[[], T], param: str) -> T:
    """Turns the vision stage's refusals into HTTP errors that name the part."""
    try:
        return work()
    except images.MediaError as error:
        raise MediaError(f"The image at {param} is refused: {error}.", param=param) from None
