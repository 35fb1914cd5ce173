"""Shorten the time that a storage thread waits for a busy scheduler.

Storage threads run in the scheduler's process, and share Python's interpreter lock with the scheduler. A
scheduler that runs Python without a pause releases the lock only after the switch interval, which is 5
ms by default. Each store call waits for the lock several times.
"""

from __future__ import annotations

import logging
import sys

from hicache_storage.settings import PositiveSeconds, Settings

logger = logging.getLogger(__name__)


class SwitchIntervalSettings(Settings):
    """The setting for the switch interval of the engine's process."""

    switch_interval_s: PositiveSeconds | None = 0.0001
    """The longest switch interval (`sys.setswitchinterval`) of the whole process. It stays set when the
    adapter is closed. None: the interval is not changed."""

    def shorten_switch_interval(self) -> None:
        """Set the switch interval of this process, unless it is already shorter."""
        shortest_s, now_s = self.switch_interval_s, sys.getswitchinterval()
        if shortest_s is not None and shortest_s < now_s:
            sys.setswitchinterval(shortest_s)
            logger.info(
                "Python's switch interval in this process is now %g ms instead of %g ms, so that"
                " threads of the store wait less for the engine's scheduler (switch_interval_s)",
                1000 * shortest_s,
                1000 * now_s,
            )
