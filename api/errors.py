"""What a client is told when a request cannot be served.

Owns: ApiError and its tree, OpenAI's error object, and the translation of engine errors,
validation errors and unforeseen exceptions into it. Does not own: when an error is raised.

    ApiError
    ├── BadRequestError            400  the request is wrong; `param` names the field
    │   ├── UnsupportedError       400  a known field that this server does not implement
    │   ├── ContextTooLongError    400  prompt + completion exceed the model's context
    │   └── MediaError             400  an image cannot be fetched, read or served
    ├── UnauthorizedError          401
    ├── ForbiddenError             403  the operator has not allowed it
    ├── NotFoundError              404
    ├── MethodNotAllowedError      405
    ├── BodyTooLargeError          413
    ├── TooManyRequestsError       429  too much in flight, or a deadline cannot be met
    ├── ServerError                500
    └── OverloadedError            503  the server is full, loading or draining

Messages are fixed texts with numbers from the request; nothing of the machine (addresses, paths,
stack traces) is ever part of one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import orjson
from pydantic import ValidationError
from starlette.responses import Response

from lm_engine.outputs import RequestError


class ApiError(Exception):
    """A refusal with everything that OpenAI's error object holds.

    `retry_after_s` becomes a Retry-After header.
    """

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or type(self).code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(self.retry_after_s)
        return json_response(self.body(), status=self.status, headers=headers)


class BadRequestError(ApiError):
    status = 400
    type = "invalid_request_error"


class UnsupportedError(BadRequestError):
    code = "unsupported_parameter"


class ContextTooLongError(BadRequestError):
    code = "context_length_exceeded"


class MediaError(BadRequestError):
    code = "invalid_image"


class UnauthorizedError(ApiError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class ForbiddenError(ApiError):
    status = 403
    type = "permission_error"
    code = "not_allowed"


class NotFoundError(ApiError):
    status = 404
    type = "not_found_error"


class MethodNotAllowedError(ApiError):
    status = 405
    type = "invalid_request_error"


class BodyTooLargeError(ApiError):
    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class TooManyRequestsError(ApiError):
    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class ServerError(ApiError):
    code = "internal_error"


class OverloadedError(ApiError):
    status = 503
    type = "overloaded_error"
    code = "overloaded"


def json_response(
    body: Any, *, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(
        orjson.dumps(body), status_code=status, headers=headers, media_type="application/json"
    )


def from_engine(error: RequestError) -> ApiError:
    """The engine's verdict as an HTTP error."""
    match error.kind:
        case "invalid":
            return BadRequestError(error.message, param=error.param)
        case "never_fits":
            return ContextTooLongError(error.message, param=error.param)
        case "media":
            return MediaError(error.message, param=error.param)
        case "late":
            wait = max(1, math.ceil(error.retry_after_s or 0))
            return TooManyRequestsError(
                error.message, param=error.param, code="ttft_deadline", retry_after_s=wait
            )
        case "overloaded":
            return OverloadedError(error.message, param=error.param, retry_after_s=1)
        case _:
            return ServerError(error.message, param=error.param)


def field_path(location: Sequence[int | str]) -> str:
    """`messages.0.content.1` from pydantic's location; union tags (written "@...") left out."""
    return ".".join(str(part) for part in location if not str(part).startswith("@"))


def from_validation(error: ValidationError) -> BadRequestError:
    """The first fault that pydantic found, named by its field; input values are not repeated."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = field_path(first["loc"])
    if first["type"] == "extra_forbidden":
        return BadRequestError(
            f"Unrecognized request argument: '{path}'. Remove it.",
            param=path,
            code="unknown_parameter",
        )
    if first["type"] == "missing":
        return BadRequestError(
            f"Missing required parameter: '{path}'.", param=path, code="missing_required_parameter"
        )
    message = first["msg"].removeprefix("Value error, ")
    where = f"'{path}'" if path else "the request body"
    return BadRequestError(f"Invalid value for {where}: {message}.", param=path or None)
