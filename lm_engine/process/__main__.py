"""The supervisor's command line, as client.py writes it: CONTROL_FD BOARD_FD PARENT_PID LOG_LEVEL.

Owns: reading these. Does not own: anything else (supervisor.py); nobody runs this by
hand.
"""

from __future__ import annotations

import sys

from lm_engine.process.supervisor import main

if __name__ == "__main__":
    sys.exit(main(*(int(argument) for argument in sys.argv[1:4]), log_level=sys.argv[4]))
