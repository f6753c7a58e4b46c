"""What the supervisor and the stages write, and that they obey the server's level."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
from typing import Any

import pytest

from lm_engine.process.logs import LineFormatter
from tests.lm_engine.process.harness import ROOT, running, until


def lines(capfd: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Every line of stderr is one JSON object: programs read it."""
    return [json.loads(line) for line in capfd.readouterr().err.splitlines()]


@pytest.mark.parametrize(
    ("level", "seen"), [("debug", {"debug", "error"}), ("info", {"error"}), ("error", {"error"})]
)
async def test_the_supervisor_obeys_the_level(
    capfd: pytest.CaptureFixture[str], level: str, seen: set[str]
) -> None:
    async with running("vision", log_level=level) as client:
        pid = client.status().pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(client, lambda s: s.epoch == 1 and s.alive)
    found = lines(capfd)
    assert {line["level"] for line in found} == seen
    (fault,) = (line for line in found if line["level"] == "error")
    assert fault["process"] == "supervisor"
    assert fault["event"].startswith(f"the language stage (pid {pid}) was killed by SIGKILL")
    started = [line["event"].split()[1] for line in found if line["level"] == "debug"]
    assert started in ([], ["planner", "vision", "language", "language"])


async def test_a_stage_names_itself_and_its_fault(capfd: pytest.CaptureFixture[str]) -> None:
    async with running("load-fault", wait=False, log_level="error") as client:
        await until(client, lambda s: s.phase == "failed")
    (line,) = lines(capfd)
    assert (line["process"], line["level"]) == ("language", "error")
    assert line["exception"].endswith("RuntimeError: tensor x is odd")


CODE = """
import logging, sys, warnings
from lm_engine.process import logs
logs.configure(sys.argv[1], "supervisor")
logs.configure(sys.argv[1], "vision")
for name in ("vision_encoder.stage", "urllib3"):
    for level in logs.LEVELS:
        logging.getLogger(name).log(logging.getLevelName(level.upper()), "%s of %s", level, name)
warnings.warn("a library's advice")
"""


@pytest.mark.parametrize(
    ("level", "own", "others"),
    [
        ("debug", ["debug", "info", "warning", "error"], ["warning", "error", "warning"]),
        ("info", ["info", "warning", "error"], ["warning", "error", "warning"]),
        ("warning", ["warning", "error"], ["warning", "error", "warning"]),
        ("error", ["error"], ["error"]),
    ],
)
def test_libraries_speak_from_warnings_on(level: str, own: list[str], others: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, level], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = [json.loads(line) for line in done.stderr.splitlines()]
    assert {line["process"] for line in found} == {"vision"}
    ours = [line["level"] for line in found if line["logger"].startswith("vision_encoder")]
    assert ours == own
    rest = [line for line in found if not line["logger"].startswith("vision_encoder")]
    assert [line["level"] for line in rest] == others
    assert any("a library's advice" in line["event"] for line in rest) == (level != "error")


def test_lines_on_a_terminal_are_for_people() -> None:
    record = logging.LogRecord("lm_engine.x", logging.ERROR, "x.py", 1, "step %d", (7,), None)
    line = LineFormatter("language", terminal=True).format(record)
    assert re.fullmatch(r"\d\d:\d\d:\d\d \[error    \] step 7 process=language", line)
