"""Waiting for leases: the master keeps what was looked at for some seconds, for whoever reads it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache_storage.backend_support.deadline import Deadline

_FIRST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 0.1
_LEAST_S = 0.2
"""What a try needs: one that is cut short would leave it open what was removed."""


def tries(deadline: Deadline) -> Iterator[None]:
    """Let the caller try at once, then after growing pauses, as long as there is time for one more."""
    pause_s = _FIRST_PAUSE_S
    yield
    while deadline.remaining_s() > pause_s + _LEAST_S:
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
        yield
