"""How a stage's loop waits for news.

Owns: `wait`. Does not own: what the news is (language.py, vision.py), or the sockets (wire.py).
"""

from __future__ import annotations

import select
from collections.abc import Iterable

from lm_engine.process.board import Slot
from lm_engine.process.link import RemoteVisionLink
from lm_engine.process.wire import Control, Wire


def wait(
    ends: Iterable[Wire | RemoteVisionLink | None],
    control: Control,
    slot: Slot,
    timeout_s: float,
    bound_s: float,
) -> None:
    """Returns when one of the ends or `control` can be read, when an end takes what is queued for
    it, or after `timeout_s`. A stage that may sleep is not busy, leaves the cores to its neighbour,
    and shows life within `bound_s`.
    """
    readers: list[Wire | Control | RemoteVisionLink] = [control]
    writers: list[Wire | RemoteVisionLink] = []
    for end in ends:
        if end is not None and not end.closed:
            readers.append(end)
            if end.unsent_bytes:
                writers.append(end)
    if timeout_s:
        slot.busy = slot.alone = False
        slot.beat(bound_s)
    select.select(readers, writers, [], timeout_s)
