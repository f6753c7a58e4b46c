"""The order of a measurement: trace, server, words, load, report.

Owns: `run`, and what is checked before the first request is sent. Does not own: any of the parts
(bench_target.py, bench_words.py, bench_load.py, bench_report.py), flags (bench_cli.py), or the
terminal (bench_screen.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import secrets
import signal
from collections.abc import Iterator, Sequence
from itertools import islice
from json import dumps

from api import bench_screen as screen
from api import plots
from api.bench_cli import BenchFlags
from api.bench_http import Address, AddressError
from api.bench_load import Load, State
from api.bench_report import Summary
from api.bench_target import TargetClient, TargetError
from api.bench_words import PromptMaker, WordsError, learn
from chunked_prefill.goodput import Promise
from chunked_prefill.trace import TraceError, TraceRequest, read_trace
from chunked_prefill.workload import Changes, WorkloadError, changed, synthesize


class BenchError(Exception):
    """Flags that cannot be used together; the message names them and says what would work."""


USER_ERRORS = (
    *(BenchError, AddressError, TargetError, WordsError, plots.PlotError),
    *(TraceError, WorkloadError),
)


def run(flags: BenchFlags) -> int:
    """The exit code: 0 if anything was answered, 130 after Ctrl-C. Raises one of USER_ERRORS."""
    if flags.plot is not None:
        plots.check(flags.plot)
    if flags.output is not None and not flags.output.parent.is_dir():
        raise BenchError(f"--output {flags.output}: there is no folder {flags.output.parent}.")
    address = Address.parse(flags.url)
    requests = read_requests(flags)
    _allow_many_files()
    summary = asyncio.run(measure(flags, address, requests))
    if flags.output is not None:
        flags.output.write_text(dumps(summary.as_json(), indent=1) + "\n")
    if flags.plot is not None:
        from api.bench_plots import draw

        draw(summary, flags.plot)
    if flags.json:
        print(dumps(summary.as_json(), indent=1))
    else:
        screen.show(summary)
    if summary.interrupted:
        return 130
    return 0 if summary.report.answered else 1


def read_requests(flags: BenchFlags) -> list[TraceRequest]:
    """The trace as it will be replayed. Raises BenchError, TraceError or WorkloadError."""
    if (flags.trace is None) == (flags.workload is None):
        raise BenchError(
            "Give one of --trace FILE and --workload SPEC, such as "
            "--workload chat:rate=2,duration=30,input=200,output=50."
        )
    if flags.requests is not None and flags.requests < 1:
        raise BenchError(f"--requests is {flags.requests}, expected at least 1.")
    long_share, *long_tokens = flags.long or (0.0, 1, 1)
    changes = Changes(
        start_s=flags.start,
        duration_s=flags.duration,
        lengths=flags.scale_lengths,
        speed=flags.speed,
        poisson_rate=flags.rate,
        long_share=long_share,
        long_tokens=(long_tokens[0], long_tokens[1]),
        seed=flags.seed,
    )
    if flags.trace is not None:
        source = read_trace(flags.trace)
    else:
        source = synthesize(flags.workload or "", flags.seed)
    try:
        found = list(islice(changed(source, changes), flags.requests))
    except OSError as error:
        raise BenchError(f"--trace {flags.trace} cannot be read: {error.strerror}.") from error
    if not found:
        raise BenchError("No request arrives in the part of the trace that was asked for.")
    if flags.endpoint == "completions" and any(request.images for request in found):
        raise BenchError("--endpoint completions cannot send the trace's images; use chat.")
    return found


async def measure(flags: BenchFlags, address: Address, requests: list[TraceRequest]) -> Summary:
    """Raises TargetError or WordsError. Ctrl-C ends the load, and what was measured is told."""
    async with TargetClient(address, flags.api_key, flags.timeout) as client:
        target = await client.find(flags.model)
        count, counted_by = await client.counter(target, flags.endpoint)
        screen.say(f"{target.model} of {target.kind} at {address}: learning its words")
        vocabulary = await learn(count)
        for warning in warnings(requests, vocabulary.base_tokens, target.max_model_len):
            screen.say(f"warning: {warning}")
        # Lengths and arrivals come from the seed alone; words must differ from run to run.
        salt = f"{flags.seed}" if flags.same_texts else f"{flags.seed} {secrets.token_hex(8)}"
        load = Load(
            target,
            PromptMaker(vocabulary, salt),
            endpoint=flags.endpoint,
            full_length=not flags.natural_end,
            timeout_s=flags.timeout,
        )
        before = await client.counters()
        with screen.progress(len(requests), requests[-1].arrival_s) as on_change, _interruptible():
            state: State = await load.run(requests, on_change)
        after = await client.counters() if before else {}
    return Summary.of(
        state,
        target,
        Promise(flags.ttft_slo, flags.tpot_slo),
        settings=flags.settings(),
        counted_by=counted_by,
        before=before,
        after=after,
    )


def warnings(
    requests: Sequence[TraceRequest], base_tokens: int, most_tokens: int | None
) -> Iterator[str]:
    """What of the trace this server cannot do as it is written."""
    total = f"of {len(requests):,}"
    short = sum(r.prompt_tokens < base_tokens for r in requests)
    if short:
        yield (
            f"{short:,} {total} prompts are shorter than the {base_tokens} tokens of the chat "
            "template alone, and take these"
        )
    wanted = [max(r.prompt_tokens, base_tokens) + r.output_tokens for r in requests]
    over = 0 if most_tokens is None else sum(tokens > most_tokens for tokens in wanted)
    if over:
        yield (
            f"{over:,} {total} requests are longer than the server's {most_tokens:,} tokens (up to "
            f"{max(wanted):,}) and will be refused; see --scale-lengths"
        )
    tenants = {r.tenant for r in requests} - {""}
    if tenants:
        yield (
            f"the trace's {len(tenants)} tenants are all sent with one API key: servers tell them "
            "by keys"
        )


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C cancels this task once, instead of ending the program."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    handled = True
    try:
        loop.add_signal_handler(signal.SIGINT, task.cancel)
    except (NotImplementedError, RuntimeError, ValueError):
        handled = False  # not the main thread
    try:
        yield
    finally:
        if handled:
            loop.remove_signal_handler(signal.SIGINT)
        while task.cancelling():
            task.uncancel()


def _allow_many_files() -> None:
    """A socket for each request in flight."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
