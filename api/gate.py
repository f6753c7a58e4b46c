"""What every HTTP request passes before a route sees it.

Owns: request ids, arrival times, API keys on every route but /health, the request's line in the
log, the answer to whatever exception nobody else turned into one. Does not own: body limits
(body.py, admission.py), or which fields of a body are labels (schemas.py).

Plain ASGI: a middleware that wraps the body in between would hide the client's leaving.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from typing import Any

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import ApiError, ServerError, UnauthorizedError, from_engine
from api.events import SHUTDOWN
from api.server import Server

OPEN_PATHS = frozenset({"/health"})
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
log = structlog.get_logger("longlens.http")


def _printable(value: Any) -> Any:
    """Without the control characters by which a client could write to the operator's terminal."""
    if isinstance(value, dict):
        return {_printable(key): _printable(one) for key, one in value.items()}
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(value))


class Gate:
    def __init__(self, app: ASGIApp, server: Server):
        self._app = app
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        state = scope.setdefault("state", {})
        state["arrival_s"] = time.monotonic()
        state["request_id"] = self._request_id(headers)
        status = 0

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                out = MutableHeaders(scope=message)
                out["x-request-id"] = state["request_id"]
                self._server.metrics.responded(status)
            await send(message)

        try:
            state["tenant"] = self._tenant(scope["path"], headers)
            await self._app(scope, receive, tagged)
        except ClientDisconnect:
            status = status or 499
        except asyncio.CancelledError:
            # Nothing but the end of the event loop cancels a request: a second signal, which does
            # not wait for what still runs.
            if status == 0:
                await from_engine(SHUTDOWN).response()(scope, receive, tagged)
        except ApiError as error:
            response = error.response()
            if isinstance(error, UnauthorizedError):
                # A browser asks for the key, as the password, only when Basic is offered.
                scheme = "Basic" if scope["path"] == "/" else "Bearer"
                response.headers["www-authenticate"] = f'{scheme} realm="longlens"'
            await response(scope, receive, tagged)
        except Exception:
            log.exception("unforeseen error", path=scope["path"], request_id=state["request_id"])
            if status == 0:
                error_response = ServerError(
                    "The server failed on this request. The operator's log has the details under "
                    f"{state['request_id']}."
                ).response()
                await error_response(scope, receive, tagged)
        finally:
            self._note(scope, status)

    @staticmethod
    def _note(scope: Scope, status: int) -> None:
        """The request's line in the log. One that carries labels has it at `info`: whoever sent
        them (an application, for its own users) wants to be able to find it again."""
        state = scope["state"]
        labels = state.get("labels") or {}
        write = log.info if labels else log.debug
        write(
            "request",
            method=scope["method"],
            path=scope["path"],
            status=status,
            request_id=state["request_id"],
            seconds=round(time.monotonic() - state["arrival_s"], 4),
            **{name: _printable(value) for name, value in labels.items()},
        )

    @staticmethod
    def _request_id(headers: Headers) -> str:
        """The client's own, where it is harmless; a new one otherwise."""
        given = headers.get("x-request-id", "")
        return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

    def _tenant(self, path: str, headers: Headers) -> str:
        tenant = self._server.keyring.tenant(headers.get("authorization", ""))
        if tenant is None and path not in OPEN_PATHS:
            raise UnauthorizedError("Missing or wrong API key. Send `Authorization: Bearer KEY`.")
        return tenant or ""
