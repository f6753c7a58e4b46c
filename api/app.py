"""The HTTP application: which path leads where.

Owns: `create_app` and the small routes (models, health, version, metrics, the chat page).
Does not own: what a generating route does (completions.py), keys and request ids (gate.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, Response

from api import completions, kv_events, tokens, tune_routes
from api import estimate as estimates
from api.config import ServeConfig
from api.errors import (
    ApiError,
    BadRequestError,
    MethodNotAllowedError,
    NotFoundError,
    OverloadedError,
    json_response,
)
from api.estimate import EstimateRequest
from api.gate import Gate
from api.metrics import CONTENT_TYPE
from api.model_folder import resolve_model
from api.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from api.server import Server
from api.tune_routes import CalibrationRequest, SchedulingChange
from api.urlguard import UrlFetcher
from lm_engine.client import EngineClient

_PAGE = Path(__file__).with_name("dashboard") / "index.html"
_PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {
        "description": what,
        "content": {"application/json": {"schema": _ERROR_SCHEMA}},
    }
    for status, what in (
        (400, "The request is wrong; `param` names the field."),
        (401, "The API key is missing or wrong."),
        (403, "The operator has not allowed it."),
        (404, "There is no such model or path."),
        (413, "The body is too large."),
        (429, "This caller has too much in flight, or x-ttft-deadline-ms cannot be met."),
        (500, "The server failed."),
        (503, "The server is loading, full or draining."),
    )
}


def version() -> str:
    try:
        return importlib.metadata.version("longlens")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"


def create_app(
    config: ServeConfig,
    client: EngineClient,
    *,
    model_path: Path | None = None,
    fetcher: UrlFetcher | None = None,
) -> FastAPI:
    """The application; `app.state.server` is its Server.

    `model_path` is what `config.model` was resolved to (resolved here when absent, which for a
    hub id may mean a download). `fetcher` replaces the guarded fetcher in tests.
    """
    server = Server(config, client, model_path or resolve_model(config.model), fetcher=fetcher)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await server.start()
        try:
            # At a second signal uvicorn leaves out the goodbye and cancels this in mid-sentence:
            # the same end, and no fault that a traceback should tell of.
            with contextlib.suppress(asyncio.CancelledError):
                yield
        finally:
            await server.stop()

    app = FastAPI(
        title="longlens", version=version(), lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.state.server = server
    _handle_errors(app)
    _generating_routes(app, server)
    _small_routes(app, server)
    app.add_middleware(Gate, server=server)
    return app


def _handle_errors(app: FastAPI) -> None:
    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response()

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        kinds = {404: NotFoundError, 405: MethodNotAllowedError}
        kind = kinds.get(error.status_code, BadRequestError)
        message = {
            404: f"There is no route {request.url.path}.",
            405: f"{request.method} is not allowed on {request.url.path}.",
        }.get(error.status_code, "The request is not valid HTTP for this server.")
        response = kind(message).response()
        for name, value in (error.headers or {}).items():
            response.headers[name] = value
        return response

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)


def _body(schema: type[BaseModel]) -> dict[str, Any]:
    """The route reads its own body, under limits; this is what /openapi.json says of it."""
    described = schema.model_json_schema(ref_template="#/components/schemas/{model}")
    described.pop("$defs", None)
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": described}}}
    }


def _generating_routes(app: FastAPI, server: Server) -> None:
    @app.post("/v1/chat/completions", responses=_ERRORS, openapi_extra=_body(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        return await completions.chat_completions(server, request)

    @app.post("/v1/completions", responses=_ERRORS, openapi_extra=_body(CompletionRequest))
    async def text_completions(request: Request) -> Response:
        return await completions.completions(server, request)

    @app.post("/v1/estimate", responses=_ERRORS, openapi_extra=_body(EstimateRequest))
    async def estimate(request: Request) -> Response:
        return await estimates.estimate(server, request)

    @app.post("/v1/render", responses=_ERRORS, openapi_extra=_body(ChatRequest))
    async def render(request: Request) -> Response:
        return await tokens.render(server, request)

    @app.post("/tokenize", responses=_ERRORS, openapi_extra=_body(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        return await tokens.tokenize(server, request)

    @app.post("/detokenize", responses=_ERRORS, openapi_extra=_body(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        return await tokens.detokenize(server, request)


def _small_routes(app: FastAPI, server: Server) -> None:
    def model_card() -> dict[str, Any]:
        info = server.client.status().model
        return {
            "id": server.model_name,
            "object": "model",
            "created": int(server.started_s),
            "owned_by": "longlens",
            "max_model_len": None if info is None else info.max_model_len,
        }

    @app.get("/v1/models", responses=_ERRORS)
    async def models() -> Response:
        return json_response({"object": "list", "data": [model_card()]})

    @app.get("/v1/models/{name:path}", responses=_ERRORS)
    async def model(name: str) -> Response:
        server.check_model_name(name)
        return json_response(model_card())

    @app.get("/health")
    async def health() -> Response:
        status = server.status()
        well = status.phase == "ready" and status.alive
        body = {
            "status": "ok" if well else "unavailable",
            "phase": status.phase,
            "detail": status.detail,
            "done": status.done,
            "total": status.total,
            "eta_s": status.eta_s,
        }
        if status.phase == "ready" and not status.alive:
            body["detail"] = f"no step for {status.heartbeat_age_s:.1f} s"
        return json_response(body, status=200 if well else 503)

    @app.post("/reset_prefix_cache", responses=_ERRORS)
    async def reset_prefix_cache(request: Request) -> Response:
        """Of the caller's tenant. Requests sent after the answer find nothing of those before."""
        server.ready_model()
        if not server.client.reset_prefix_cache(request.state.tenant):
            raise OverloadedError("The server is not ready. See /health.", retry_after_s=5)
        return json_response({})

    @app.get("/v1/kv/events", responses=_ERRORS)
    async def kv_changes(request: Request) -> Response:
        """Server-sent events: which blocks of the caller's tenant the prefix cache holds."""
        return kv_events.kv_events(server, request)

    @app.get("/v1/scheduling", responses=_ERRORS)
    async def scheduling() -> Response:
        return await tune_routes.show(server)

    @app.post("/v1/scheduling", responses=_ERRORS, openapi_extra=_body(SchedulingChange))
    async def change_scheduling(request: Request) -> Response:
        return await tune_routes.change(server, request)

    @app.post(
        "/v1/scheduling/calibrate", responses=_ERRORS, openapi_extra=_body(CalibrationRequest)
    )
    async def calibrate(request: Request) -> Response:
        return await tune_routes.calibrate(server, request)

    @app.get("/version")
    async def show_version() -> Response:
        return json_response({"version": version()})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(server.metrics.render(), headers={"content-type": CONTENT_TYPE})

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(
            _PAGE.read_text(encoding="utf-8"),
            headers={"content-security-policy": _PAGE_POLICY, "x-content-type-options": "nosniff"},
        )
