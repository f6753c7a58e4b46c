"""What all tests share.

Owns: one torch thread per test process (tiny models lose time to thread hand-over, and pytest-xdist
already uses the cores). Does not own: any fixture of a folder's own tests.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
