"""Settings of a running server: GET and POST /v1/scheduling, POST /v1/scheduling/calibrate.

Owns: the routes' body and answer, and that they exist only where the operator allows it. Does not
own: the change (lm_engine/reconfiguration.py; api/media.py for images), or what is a good value
(api/tune_run.py asks this route for what it tries).

A change holds from the next step on, for everybody, until the next change or the end of the
language stage.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from api.errors import ApiError, BadRequestError, ForbiddenError, from_engine, json_response
from api.server import Server
from chunked_prefill.calibration_file import CalibrationProgress, to_json
from chunked_prefill.settings import PolicyName, SettingsError
from lm_engine.outputs import RequestError
from lm_engine.reconfiguration import SchedulingState


class SchedulingChange(BaseModel):
    """Any of the settings; those that are left out stay as they are."""

    model_config = ConfigDict(extra="forbid")

    policy: PolicyName | None = None
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    step_share: tuple[float, float] | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    long_prompt_share: float | None = None
    image_resolution_limit: int | None = None

    def given(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.model_fields_set}


async def show(server: Server) -> Response:
    _check_allowed(server)
    return json_response(_json(server, await _ask(server)))


async def change(server: Server, request: Request) -> Response:
    _check_allowed(server)
    wanted = (await server.bodies.receive(request, SchedulingChange))[0].given()
    limit = wanted.pop("image_resolution_limit", server.media.resolution_limit)
    if limit is not None and limit < 1:
        raise BadRequestError(
            f"image_resolution_limit is {limit}, expected at least 1, or null for none.",
            param="image_resolution_limit",
        )
    state = await _ask(server)
    if wanted:
        try:
            settings = replace(state.settings, **wanted)
        except SettingsError as error:
            raise BadRequestError(f"{error}.", param=error.name) from None
        except TypeError:
            nulls = [n for n, v in wanted.items() if v is None and n != "ttft_slo_s"]
            raise BadRequestError(f"{nulls[0]} cannot be null.", param=nulls[0]) from None
        found = await server.client.scheduling(settings)
        if isinstance(found, RequestError):
            raise from_engine(found)
        state = found
    server.media.resolution_limit = limit
    return json_response(_json(server, state))


class CalibrationRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    seconds: float = Field(default=60.0, gt=0, le=600)


async def calibrate(server: Server, request: Request) -> Response:
    """Server-sent events: `progress`, and in the end `calibration` or `error`."""
    _check_allowed(server)
    server.ready_model()
    wanted = (await server.bodies.receive(request, CalibrationRequest))[0]
    return StreamingResponse(_calibration(server, wanted.seconds), media_type="text/event-stream")


async def _calibration(server: Server, seconds: float) -> AsyncIterator[bytes]:
    async for item in server.client.calibrate(seconds):
        if isinstance(item, RequestError):
            error: ApiError = from_engine(item)
            event = error.body()
        elif isinstance(item, CalibrationProgress):
            event = {"progress": asdict(item)}
        else:
            event = {"calibration": to_json(item)}
        yield b"data: " + orjson.dumps(event) + b"\n\n"


async def _ask(server: Server) -> SchedulingState:
    server.ready_model()
    found = await server.client.scheduling()
    if isinstance(found, RequestError):
        raise from_engine(found)
    return found


def _check_allowed(server: Server) -> None:
    if not server.config.allow_tuning:
        raise ForbiddenError(
            "This server's settings are fixed. Start it with --allow-tuning to see and change them "
            "while it serves."
        )


def _json(server: Server, state: SchedulingState) -> dict[str, Any]:
    return {
        "object": "scheduling",
        "settings": {
            **asdict(state.settings),
            "image_resolution_limit": server.media.resolution_limit,
        },
        "limits": {
            "max_num_seqs": state.max_num_seqs,
            "max_num_batched_tokens": state.max_num_batched_tokens,
        },
        "kv": {
            "blocks": state.kv_blocks,
            "block_size": state.block_size,
            "prefix_caching": state.prefix_caching,
        },
        "step_time": {
            "model": asdict(state.model),
            "guard": state.guard,
            "observed": state.observed,
        },
        "vision": {
            "own_process": state.vision.own_process,
            "slowdown": state.vision.slowdown,
        },
        "calibration": None if state.calibration is None else to_json(state.calibration),
    }
