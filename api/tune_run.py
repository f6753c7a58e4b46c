"""The order of a tuning: server, calibration, simulations, verification, results.

Owns: `run`, its phases and what is checked before the first of them. Does not own: any of the parts
(tune_server.py, tune_calibration.py, tune_search.py, tune_report.py, tune_plot.py), flags
(tune_cli.py), or the load (bench_load.py).

Phases are synchronous, each with an event loop of its own where it sends requests, so that Ctrl-C
ends the simulations as well as the loads, and the server that was started here in any case.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from json import dumps
from pathlib import Path
from typing import Any

from api import plots, tune_screen
from api.bench_http import Address, AddressError
from api.bench_load import Load, State
from api.bench_run import BenchError, read_requests
from api.bench_screen import say
from api.bench_target import Target, TargetClient, TargetError
from api.bench_words import PromptMaker, Vocabulary, WordsError, learn
from api.config import ConfigError, ServeConfig, load
from api.model_folder import ModelFolderError, resolve_model
from api.tune_calibration import calibrated, delays
from api.tune_cli import TuneFlags
from api.tune_images import PlannedImages, find_planner, limits_worth_trying
from api.tune_report import Result, Verified, as_json, configuration, lines
from api.tune_search import Candidate, Found, Simulations
from api.tune_server import Control, OwnServer, Scheduling, TuneError
from chunked_prefill.calibration_file import Calibration
from chunked_prefill.encode_time import EncodeTimeModel
from chunked_prefill.goodput import Promise, RequestTimes
from chunked_prefill.simulator import Delays
from chunked_prefill.simulator_vision import VisionStage
from chunked_prefill.trace import TraceError, TraceRequest, write_trace
from chunked_prefill.tuner_evaluation import Served
from chunked_prefill.tuner_verdict import Impossible, binding
from vision_encoder.plan import ImagePlanner

USER_ERRORS = (
    *(TuneError, BenchError, AddressError, TargetError, WordsError, plots.PlotError),
    *(TraceError, ConfigError, ModelFolderError),
)
NOT_KEPT = 3
"""Exit code where the promise cannot be kept."""
_EXCERPTS = 9
_TIMEOUT_S = 60.0
_OWN_SEATS, _OWN_TOKENS = 64, 1024
"""With which a server is started here: settings are tried up to these."""
_HASTY_S = 0.5
"""Between the end of one load and the next settings: the last events are on their way."""


def run(model: str, flags: TuneFlags) -> int:
    """The exit code: 0 where the promise holds, 3 where it does not. Raises one of USER_ERRORS."""
    if not 0 < flags.ttft_p95 < float("inf") or not 0 < flags.tpot_p95 < float("inf"):
        raise TuneError("--ttft-p95 and --tpot-p95 have to be above 0.")
    excerpts = read_excerpts(flags)
    flags.out.mkdir(parents=True, exist_ok=True)
    write_trace(flags.out / "traffic.jsonl", excerpts[0])
    base = load({"model": model}, flags.config)
    values = base.config.model_dump(mode="json")
    given = {name: values[name] for name, o in base.origins.items() if o.startswith("file ")}
    has_images = any(r.images for excerpt in excerpts for r in excerpt)
    planner = find_planner(resolve_model(model)) if has_images else None
    if has_images and planner is None:
        raise TuneError(f"The traffic has images, but {model} sees none.")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_ended_in_order())
        tuning = Tuning(flags, model, planner, excerpts)
        if flags.url is None:
            server = stack.enter_context(_own_server(model, flags, base.config))
            with tuning.phase("starting") as advance:
                server.start(advance)
            tuning.address = server.address
            tuning.api_key = base.config.api_key
        else:
            tuning.address = Address.parse(flags.url)
        with Control(tuning.address, tuning.api_key) as control:
            before = control.show()
            try:
                result = tuning.result(control, before)
            finally:
                _restore(control, before)
    return _write(result, flags.out, {"model": model, **given})


def read_excerpts(flags: TuneFlags) -> list[list[TraceRequest]]:
    """The one that is verified, then others of the same traffic: a recording may end before there
    are many, and one that has far fewer requests says nothing of the first."""
    excerpts = [read_requests(flags.traffic())]
    for replication in range(1, _EXCERPTS):
        try:
            following = read_requests(flags.traffic(replication))
        except BenchError:
            break
        if len(following) < len(excerpts[0]) / 2:
            break
        excerpts.append(following)
    return excerpts


@dataclass
class Tuning:
    """One run's phases, in their order."""

    flags: TuneFlags
    model: str
    planner: ImagePlanner | None
    """None where the traffic has no images."""
    excerpts: list[list[TraceRequest]]
    address: Address = field(default_factory=lambda: Address("http", "127.0.0.1", 8000))
    api_key: str | None = None
    phases_s: dict[str, float] = field(default_factory=dict)
    source: str = ""
    """Of the calibration."""

    def __post_init__(self) -> None:
        self.api_key = self.flags.api_key
        self.promise = Promise(self.flags.ttft_p95, self.flags.tpot_p95)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[tune_screen.Advance]:
        began_s = time.monotonic()
        with tune_screen.phase(name) as advance:
            yield advance
        self.phases_s[name] = time.monotonic() - began_s

    def result(self, control: Control, server: Scheduling) -> Result:
        with self.phase("words"):
            target, vocabulary = asyncio.run(self._learn())
        traffic = Traffic(target, vocabulary)
        with self.phase("calibrating") as advance:
            calibration, self.source = calibrated(control, traffic, self.excerpts[0], advance)
        simulations = self._simulations(server, calibration, Delays())
        with self.phase("first look") as advance:
            impossible = simulations.first_look(advance)
        if impossible is not None:
            return self._result(impossible=impossible)
        with self.phase("probing") as advance:
            outside = delays(control, traffic, simulations.served, self.excerpts[0], advance)
        simulations = self._simulations(server, calibration, outside)
        with self.phase("simulating") as advance:
            found = simulations.search(advance)
        if isinstance(found, Impossible):
            return self._result(impossible=found)
        with self.phase("verifying") as advance:
            verified = self._verify(control, traffic, found, advance)
        words = binding(found.outcome, self.promise, server.kv_blocks)
        return self._result(found=found, verified=verified, binding=words)

    async def _learn(self) -> tuple[Target, Vocabulary]:
        async with TargetClient(self.address, self.api_key, _TIMEOUT_S) as client:
            target = await client.find(None)
            count, _ = await client.counter(target, "chat")
            return target, await learn(count)

    def _simulations(
        self, server: Scheduling, calibration: Calibration, outside: Delays
    ) -> Simulations:
        images: Callable[[int | None], PlannedImages] | None = None
        resolutions: list[int | None] = []
        if self.planner is not None:
            images = partial(PlannedImages, self.planner, calibration.encode or EncodeTimeModel())
            resolutions = limits_worth_trying(images, self.excerpts[0])
        served = Served(
            calibration.model,
            server.kv_blocks,
            server.block_size,
            server.prefix_caching,
            calibration.residuals,
            outside,
            images,
            lambda: VisionStage(own_process=server.own_process, slowdown=server.slowdown),
        )
        seed = self.flags.seed
        return Simulations(served, server, self.excerpts, self.promise, resolutions, seed)

    def _verify(
        self,
        control: Control,
        traffic: Traffic,
        found: Found,
        advance: tune_screen.Advance,
    ) -> tuple[Verified, ...]:
        """The best first."""
        requests = self.excerpts[0]
        verified: list[Verified] = []
        count = len(found.candidates)
        for number, candidate in enumerate(found.candidates):

            def told(state: State, number: int = number) -> None:
                what = f"{number + 1} of {count}: {state.sent}/{state.total} sent"
                advance(number + state.ended / state.total, count, what)

            _apply(control, candidate, found.resolution)
            times = traffic.replay(requests, told)
            verified.append(Verified.of(candidate, times, self.promise))
            time.sleep(_HASTY_S)
        # Of equals, the one that was predicted to be better.
        return tuple(sorted(verified, key=lambda one: -one.goodput.value))

    def _result(self, **parts: Any) -> Result:
        flags = self.flags.traffic()
        return Result(
            self.model,
            self.promise,
            flags.settings(),
            len(self.excerpts[0]),
            self.phases_s,
            self.source,
            **parts,
        )


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests in words that the server has not seen."""

    target: Target
    vocabulary: Vocabulary

    def replay(
        self, requests: Sequence[TraceRequest], on_change: Callable[[State], None]
    ) -> list[RequestTimes]:
        """What its users saw, in the order of the requests. Raises KeyboardInterrupt, with
        everything in flight aborted."""
        load = Load(
            self.target,
            PromptMaker(self.vocabulary, secrets.token_hex(8)),
            endpoint="chat",
            timeout_s=_TIMEOUT_S,
        )
        state = asyncio.run(load.run(requests, on_change))
        if state.interrupted:
            raise KeyboardInterrupt
        return [outcome.times(state.started_s) for outcome in state.outcomes]


def _own_server(model: str, flags: TuneFlags, config: ServeConfig) -> OwnServer:
    own = {"max_num_seqs": _OWN_SEATS, "max_num_batched_tokens": _OWN_TOKENS}
    settings = {name: str(max(least, getattr(config, name))) for name, least in own.items()}
    settings["model"] = model
    if flags.config is not None:
        settings["config"] = str(flags.config)
    return OwnServer(settings, flags.out / "server.log")


def _apply(control: Control, candidate: Candidate, resolution: int | None) -> None:
    settings = asdict(candidate.settings)
    control.change({**settings, "image_resolution_limit": resolution})


def _restore(control: Control, before: Scheduling) -> None:
    """A server that others use goes on as it was."""
    with contextlib.suppress(TuneError):
        settings = asdict(before.settings)
        control.change({**settings, "image_resolution_limit": before.resolution})


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """SIGTERM is heard as Ctrl-C is."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _write(result: Result, out: Path, base: dict[str, Any]) -> int:
    (out / "tune.json").write_text(dumps(as_json(result), indent=1) + "\n")
    for line in lines(result):
        print(line)
    if result.impossible is not None:
        print(f"written       {out / 'tune.json'}")
        return NOT_KEPT
    (out / "tuned.yaml").write_text(configuration(result, base))
    written = ["tuned.yaml", "tune.json"]
    from api.tune_plot import draw

    for name in ("tune.png", "tune.html"):
        try:
            draw(result, out / name)
        except plots.PlotError as error:
            say(f"no {name}: {error}")
            break
        written.append(name)
    print(f"written       {', '.join(str(out / name) for name in written)}")
    print(f"use it        longlens serve --config {out / 'tuned.yaml'}")
    return 0 if result.kept else NOT_KEPT
