"""Recorded traffic from its file to a served model and back as a report: `longlens bench` over
HTTP, in the formats of the public traces. With LONGLENS_TRACES the recordings themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import checkpoint
from tests.e2e.server import ROOT, Served, environment

pytestmark = pytest.mark.slow
TRACES = os.environ.get("LONGLENS_TRACES")
recorded = pytest.mark.skipif(TRACES is None, reason="LONGLENS_TRACES names no folder of traces")
BLOCK = 512


@pytest.fixture(scope="module")
def long_context(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A tiny model with room for 131,200 tokens."""
    logs = tmp_path_factory.mktemp("traces")
    server = Served(checkpoint("llama_long", models), logs, "--max-num-seqs", "16")
    yield server
    server.stop()


def bench(server: Served, folder: Path, trace: Path, *flags: str) -> dict[str, Any]:
    """The report's file, of a run in which all was answered."""
    file = folder / "measured.json"
    command = [sys.executable, "-m", "api.cli", "bench", "--url", server.url]
    command += ["--trace", str(trace), "--output", str(file), *flags]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, env=environment()
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(file.read_text())
    assert found["report"]["errors"] == {}, found["error_messages"]
    assert found["lengths"]["prompt"]["exact"] == found["report"]["requests"]
    return found


def mooncake_line(at_ms: int, tokens: int, output: int, blocks: list[int]) -> str:
    row = {
        "timestamp": at_ms,
        "input_length": tokens,
        "output_length": output,
        "hash_ids": blocks,
    }
    return json.dumps(row) + "\n"


def test_mooncake_prompts_of_tens_of_thousands_of_tokens_find_what_they_share(
    long_context: Served, tmp_path: Path
) -> None:
    """A conversation that grows: each turn begins with all of the one before."""
    turns = [20 * BLOCK, 30 * BLOCK, 64 * BLOCK]
    own = [8_000_000, 8_000_001, 8_000_002]
    lines = [
        mooncake_line(400 * n, size, 4, list(range(size // BLOCK))) for n, size in enumerate(turns)
    ]
    lines.append(mooncake_line(900, 2 * BLOCK + 7, 2, own))
    trace = tmp_path / "mooncake.jsonl"
    trace.write_text("".join(lines))
    found = bench(long_context, tmp_path, trace, "--endpoint", "completions")
    rows = found["requests"]
    # To the token where words of one token are known; this vocabulary's cannot add up to any sum.
    for row, wanted in zip(rows, [*turns, 2 * BLOCK + 7], strict=True):
        assert 0 <= wanted - row["prompt_tokens"] <= 2
    assert [row["output_tokens"] for row in rows] == [4, 4, 4, 2]
    cached = [row["cached_tokens"] for row in rows]
    for found_tokens, before in zip(cached[1:3], turns, strict=False):
        # The last blocks of a turn may be cut where the next turn's words continue otherwise.
        assert before - BLOCK <= found_tokens <= before + BLOCK
    assert cached[0] < BLOCK
    assert cached[3] < BLOCK


def test_azure_lengths_and_times_are_kept(long_context: Served, tmp_path: Path) -> None:
    start = datetime(2023, 11, 16, 18, 15, 46, 680590)
    sizes = [(4808, 10), (110, 27), (1155, 21), (40, 3)]
    rows = [
        f"{start + timedelta(seconds=0.35 * n)}0,{prompt},{output}"
        for n, (prompt, output) in enumerate(sizes)
    ]
    trace = tmp_path / "azure.csv"
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    found = bench(long_context, tmp_path, trace, "--endpoint", "completions", "--speed", "0.5")
    requests = found["requests"]
    assert [(r["prompt_tokens"], r["output_tokens"]) for r in requests] == sizes
    arrivals = [row["arrival_s"] for row in requests]
    assert arrivals[-1] - arrivals[0] == pytest.approx(0.7 * (len(sizes) - 1), abs=0.5)


@recorded
@pytest.mark.parametrize("name", ["conv", "code"])
def test_an_excerpt_of_the_azure_recordings(
    long_context: Served, tmp_path: Path, name: str
) -> None:
    trace = Path(TRACES or "") / f"AzureLLMInferenceTrace_{name}.csv"
    found = bench(long_context, tmp_path, trace, "--start", "60s", "--requests", "40")
    assert found["report"]["requests"] == 40


@recorded
def test_an_excerpt_of_the_mooncake_recording(long_context: Served, tmp_path: Path) -> None:
    trace = Path(TRACES or "") / "mooncake_conversation_trace.jsonl"
    flags = ("--endpoint", "completions", "--requests", "8", "--natural-end")
    found = bench(long_context, tmp_path, trace, *flags)
    assert max(row["prompt_tokens"] for row in found["requests"]) > 8_000
