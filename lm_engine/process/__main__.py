"""`python -m lm_engine.process CONTROL_FD BOARD_FD PARENT_PID`: the supervisor, as client.py
starts it. Not meant to be run by hand."""

from __future__ import annotations

import sys

from lm_engine.process.supervisor import main

if __name__ == "__main__":
    sys.exit(main(*(int(argument) for argument in sys.argv[1:4])))
