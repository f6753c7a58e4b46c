"""What the supervisor and the stages write to stderr.

Owns: their level (the server's --log-level) and their lines, which look like those of the API
process: JSON, or text on a terminal. Does not own: the API process's own log, or what is logged.

Our loggers follow the level; those of libraries speak from warnings on, so that `debug` is not
drowned in theirs. Python's warnings are log lines here, so that `error` silences them as well.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

OWN = ("lm_engine", "vision_encoder", "chunked_prefill", "kv_offload")
LEVELS = ("debug", "info", "warning", "error")


def configure(level: str, process: str) -> None:
    """Call it anew in a forked child, with the child's name."""
    wanted = logging.getLevelNamesMapping()[level.upper()]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(process, terminal=sys.stderr.isatty()))
    logging.basicConfig(level=max(wanted, logging.WARNING), handlers=[handler], force=True)
    for name in OWN:
        logging.getLogger(name).setLevel(wanted)
    logging.captureWarnings(True)


class LineFormatter(logging.Formatter):
    def __init__(self, process: str, *, terminal: bool) -> None:
        super().__init__()
        self._process = process
        self._terminal = terminal

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC)
        level = record.levelname.lower()
        fault = self.formatException(record.exc_info) if record.exc_info else None
        if self._terminal:
            head = f"{when.astimezone():%H:%M:%S} [{level:<9}] {record.getMessage()}"
            line = f"{head} process={self._process}"
            return line if fault is None else f"{line}\n{fault}"
        fields = {"process": self._process, "pid": record.process, "logger": record.name}
        if fault is not None:
            fields["exception"] = fault
        fields |= {
            "event": record.getMessage(),
            "level": level,
            "timestamp": when.isoformat().replace("+00:00", "Z"),
        }
        return json.dumps(fields)
