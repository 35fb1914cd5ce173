"""Waiting for leases: the master keeps what was looked at for some seconds, for whoever reads it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_FIRST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 0.1


def tries(timeout_s: float) -> Iterator[float]:
    """The seconds left at each try: one at once, others after growing pauses, the last in the end."""
    until_s = time.monotonic() + timeout_s
    pause_s = _FIRST_PAUSE_S
    yield timeout_s
    while (left_s := until_s - time.monotonic()) > 0:
        time.sleep(min(pause_s, left_s))
        pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
        yield max(_LONGEST_PAUSE_S, until_s - time.monotonic())
