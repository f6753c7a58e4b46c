"""The server that is tuned: one that runs, or one of our own.

Owns: OwnServer, a child process that ends with this one, and Control, the few requests to
/v1/scheduling. Does not own: what is tried (tune_run.py), or the load (bench_load.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from json import loads
from pathlib import Path
from typing import Any

import httpx

from api.bench_http import Address
from chunked_prefill.calibration_file import Calibration, from_json
from chunked_prefill.settings import SchedulingSettings
from chunked_prefill.step_time import StepTimeModel

_PATIENCE_S = 300.0
"""Without any progress of a server that starts; importing takes long on a busy machine."""
_END_S = 15.0
_ANSWER_S = 60.0
"""A change waits for the end of the step under way."""


class TuneError(Exception):
    """Tuning cannot go on; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Scheduling:
    """What /v1/scheduling tells."""

    settings: SchedulingSettings
    resolution: int | None
    """image_resolution_limit."""
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_blocks: int
    block_size: int
    prefix_caching: bool
    learnt: StepTimeModel
    """From the steps so far."""
    guard: float
    """Factor on its predictions under which nine steps in ten stay."""
    observed: int
    """Steps that `learnt` comes from."""
    calibration: Calibration | None
    """What the server knew of its step times from its start, or was told to measure."""
    own_process: bool
    """Whether the vision stage is a process of its own."""
    slowdown: float
    """Of steps and encoding while both go on."""

    @classmethod
    def of(cls, body: dict[str, Any]) -> Scheduling:
        settings = dict(body["settings"])
        resolution = settings.pop("image_resolution_limit")
        settings["step_share"] = tuple(settings["step_share"])
        kv, known, steps = body["kv"], body["calibration"], body["step_time"]
        return cls(
            SchedulingSettings(**settings),
            resolution,
            **body["limits"],
            kv_blocks=kv["blocks"],
            block_size=kv["block_size"],
            prefix_caching=kv["prefix_caching"],
            learnt=StepTimeModel(**steps["model"]),
            guard=steps["guard"],
            observed=steps["observed"],
            calibration=None if known is None else from_json(known),
            **body["vision"],
        )


class CalibrationRefusedError(TuneError):
    """The server has measured its step times, and does not believe them."""


class Control:
    """Asks and changes a server's settings. Raises TuneError."""

    def __init__(self, address: Address, api_key: str | None) -> None:
        self._address = address
        self._http = httpx.Client(
            base_url=str(address),
            headers={} if api_key is None else {"authorization": f"Bearer {api_key}"},
            timeout=_ANSWER_S,
            verify=address.scheme == "https",  # loading certificates takes a while
            trust_env=False,
        )

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *details: object) -> None:
        self._http.close()

    def show(self) -> Scheduling:
        return Scheduling.of(self._ask("GET", None))

    def change(self, settings: Mapping[str, Any]) -> Scheduling:
        """Any of the settings' fields, and `image_resolution_limit`."""
        return Scheduling.of(self._ask("POST", dict(settings)))

    def calibrate(
        self, seconds: float, on_progress: Callable[[float, float, str], None]
    ) -> Calibration:
        """Lets the server measure its step times; nobody should use it meanwhile. Raises
        CalibrationRefusedError."""
        found: dict[str, Any] = {}
        try:
            with self._http.stream(
                "POST", "/v1/scheduling/calibrate", json={"seconds": seconds}, timeout=10 * seconds
            ) as answer:
                if answer.status_code != 200:
                    found = loads(answer.read())
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        found = loads(line.removeprefix("data: "))
                        if step := found.get("progress"):
                            on_progress(step["done_s"], step["total_s"], step["detail"])
        except (httpx.HTTPError, ValueError) as error:
            raise TuneError(f"The calibration was cut short ({type(error).__name__}).") from error
        if "calibration" not in found:
            said = found.get("error", {}).get("message", "the server said nothing")
            raise CalibrationRefusedError(f"The server could not be calibrated: {said}")
        return from_json(found["calibration"])

    def _ask(self, method: str, body: Any) -> dict[str, Any]:
        try:
            answer = self._http.request(method, "/v1/scheduling", json=body)
            found = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise TuneError(
                f"No answer from {self._address}/v1/scheduling ({type(error).__name__}). Is a "
                "longlens server running there?"
            ) from error
        if answer.status_code == 200 and isinstance(found, dict):
            return found
        told = found.get("error") if isinstance(found, dict) else None
        message = told.get("message") if isinstance(told, dict) else str(found)
        if answer.status_code == 401:
            message = f"{message} Use --api-key."
        if answer.status_code == 404:
            message = "it has no /v1/scheduling: only longlens servers can be tuned."
        raise TuneError(f"{self._address} ({answer.status_code}): {message}")


class OwnServer:
    """`longlens serve` as a child. It is ended by `stop`, on the way out of a `with`, and by the
    kernel when this process dies."""

    def __init__(self, flags: Mapping[str, str], log: Path) -> None:
        """`flags`: by the names of settings; the address is added."""
        self._flags, self._log = dict(flags), log
        self._process: subprocess.Popen[bytes] | None = None
        self.address = Address("http", "127.0.0.1", _free_port())

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self, on_progress: Callable[[float, float, str], None]) -> None:
        """Returns when the server is ready. `on_progress(done, total, what)`; 0 is unknown. Raises
        TuneError with the end of the server's log."""
        flags = {**self._flags, "host": self.address.host, "port": str(self.address.port)}
        command = [sys.executable, "-m", "api.cli", "serve"]
        command += [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
        with self._log.open("wb") as log:
            # In a session of its own: Ctrl-C is for us to hear, and for it to be told of.
            self._process = subprocess.Popen(
                [*command, "--allow-tuning"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": _module_path()},
                preexec_fn=_end_with_parent,
            )
        moved_s, said = time.monotonic(), ""
        while time.monotonic() - moved_s < _PATIENCE_S:
            if self._process.poll() is not None:
                raise TuneError(f"The server did not start. {self._last_words()}")
            answer = self._health()
            if answer.get("status") == "ok":
                return
            on_progress(answer.get("done", 0.0), answer.get("total", 0.0), answer["detail"])
            # A loaded server that takes no step is not on its way.
            state = "stuck" if answer["phase"] == "ready" else str(answer)
            if state != said:
                moved_s, said = time.monotonic(), state
            time.sleep(0.1)
        self.stop()
        raise TuneError(
            f"The server made no progress for {_PATIENCE_S:.0f} s ({answer['detail']}); see "
            f"{self._log}."
        )

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        for sign in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S / 2)
                return

    def __enter__(self) -> OwnServer:
        return self

    def __exit__(self, *details: object) -> None:
        self.stop()

    def _health(self) -> dict[str, Any]:
        try:
            answer = httpx.get(f"{self.address}/health", timeout=5, trust_env=False)
            body: dict[str, Any] = answer.json()
        except (httpx.HTTPError, ValueError):
            return {"phase": "starting", "detail": "starting"}
        return body

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return "\n".join(lines[-5:]) or f"It said nothing; see {self._log}."


def _end_with_parent() -> None:
    """The kernel ends the child, and its own children with it, when we are killed."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _module_path() -> str:
    root = str(Path(__file__).resolve().parents[1])
    known = os.environ.get("PYTHONPATH")
    return root if not known else os.pathsep.join((root, known))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
