"""What one API process holds, and its way from ready to drained.

Owns: Server - the engine client, the model's frontend, admission, metrics, media - and the
readiness that /health reports. Does not own: routes (app.py) or signals (serve.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from api.admission import Admission, AdmissionLimits
from api.auth import Keyring, read_keys
from api.body import BodyReader
from api.config import ServeConfig
from api.errors import NotFoundError, OverloadedError
from api.events import SHUTDOWN, EventFeed
from api.frontend import Frontend, load_frontend
from api.media import MediaLoader
from api.metrics import Metrics
from api.urlguard import FetchLimits, UrlFetcher
from lm_engine.client import EngineClient, EngineStatus, ModelInfo


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model as the API needs it."""

    info: ModelInfo
    frontend: Frontend


class Server:
    def __init__(
        self,
        config: ServeConfig,
        client: EngineClient,
        model_path: Path,
        *,
        fetcher: UrlFetcher | None = None,
    ):
        self.config = config
        self.client = client
        self.started_s = time.time()
        self.model_name = config.public_name
        self.keyring = Keyring(_keys(config))
        self.admission = Admission(
            AdmissionLimits(
                max_requests=config.max_num_seqs + config.max_queued_requests,
                max_tokens=config.max_queued_tokens,
                max_media_bytes=config.max_queued_media_bytes,
                max_tenant_requests=config.max_tenant_requests,
            )
        )
        self.metrics = Metrics(config.metrics_prefix, self.model_name, client.status)
        self._model_path = model_path
        self._fetcher = fetcher or UrlFetcher(
            FetchLimits(
                config.max_image_bytes,
                config.media_timeout_s,
                tuple(domain.lower() for domain in config.allowed_media_domains),
            )
        )
        # Two threads: more would only stand between the event loop and Python's lock.
        self.pool = ThreadPoolExecutor(2, thread_name_prefix="longlens")
        self.bodies = BodyReader(config.max_body_bytes, self.pool)
        self._media: MediaLoader | None = None
        self._frontend: asyncio.Task[Frontend] | None = None
        self._feeds: set[EventFeed] = set()

    async def start(self) -> None:
        """Begins to load the frontend; /health answers meanwhile."""
        self._media = MediaLoader(
            self.config.media_limits(),
            self._fetcher,
            pool=self.pool,
            local_root=self.config.allowed_local_media_path,
            resolution_limit=self.config.image_resolution_limit,
        )
        self._frontend = asyncio.create_task(
            asyncio.to_thread(
                load_frontend,
                self._model_path,
                tokenizer=self.config.tokenizer,
                template=self.config.chat_template,
            )
        )

    async def stop(self) -> None:
        if self._frontend is not None:
            self._frontend.cancel()
            await asyncio.gather(self._frontend, return_exceptions=True)
        if self._media is not None:
            await self._media.close()
        self.pool.shutdown(wait=False, cancel_futures=True)

    @property
    def media(self) -> MediaLoader:
        assert self._media is not None, "the server has not started"
        return self._media

    # -- readiness ----------------------------------------------------------------------------

    def status(self) -> EngineStatus:
        status = self.client.status()
        if self.admission.draining:
            return EngineStatus("draining", "finishing what runs", alive=status.alive)
        frontend = self._frontend
        if status.phase == "ready" and (frontend is None or not frontend.done()):
            return EngineStatus("loading", "reading the tokenizer", alive=status.alive)
        if frontend is not None and frontend.done() and frontend.exception() is not None:
            return EngineStatus("failed", str(frontend.exception()))
        return status

    def ready_model(self) -> Model:
        """Raises OverloadedError (503) unless requests can be served now."""
        status = self.status()
        if status.phase != "ready" or not status.alive or status.model is None:
            phase = status.phase if status.phase != "ready" else "not responding"
            wait = 5 if status.eta_s is None else max(1, round(status.eta_s))
            raise OverloadedError(
                f"The server is {phase}. See /health.", code="not_ready", retry_after_s=wait
            )
        assert self._frontend is not None
        return Model(status.model, self._frontend.result())

    def check_model_name(self, name: str | None) -> None:
        if name not in (None, "", self.model_name):
            raise NotFoundError(
                f"The model '{name}' does not exist. This server has '{self.model_name}'.",
                param="model",
                code="model_not_found",
            )

    # -- requests in flight -------------------------------------------------------------------

    def follow(self, feed: EventFeed) -> Callable[[], None]:
        """Lets a drain that runs out of time end this feed; call the result when it is over."""
        self._feeds.add(feed)
        self.metrics.in_flight(len(self._feeds))

        def forget() -> None:
            self._feeds.discard(feed)
            self.metrics.in_flight(len(self._feeds))

        return forget

    async def drain(self, timeout_s: float) -> None:
        """New requests get 503; returns when running ones have ended, the last ones by an error
        event after `timeout_s`."""
        self.admission.draining = True
        if self.client.kv_log is not None:
            self.client.kv_log.end()
        deadline = time.monotonic() + timeout_s
        while self.admission.requests and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        for feed in list(self._feeds):
            feed.fail(SHUTDOWN)
        grace = time.monotonic() + 1.0
        while self.admission.requests and time.monotonic() < grace:
            await asyncio.sleep(0.02)


def _keys(config: ServeConfig) -> dict[str, str]:
    if config.api_key_file is not None:
        return read_keys(config.api_key_file)
    return {} if config.api_key is None else {config.api_key: "default"}
