"""The time for which a storage thread waits until the engine's scheduler lets it go on.

Storage threads live in the scheduler's process and share Python's interpreter lock with it. A scheduler
that runs Python without a pause gives the lock up after the switch interval, which is 5 ms by default. A
call of a store waits for the lock several times.
"""

from __future__ import annotations

import logging
import sys

from hicache_storage.settings import PositiveSeconds, Settings

logger = logging.getLogger(__name__)


class SwitchIntervalSettings(Settings):
    """The switch interval of the engine's process."""

    switch_interval_s: PositiveSeconds | None = 0.0001
    """The longest switch interval (`sys.setswitchinterval`) of the whole process, which stays when the
    adapter is closed. None: the interval stays as it is."""

    def shorten_switch_interval(self) -> None:
        """Set the interval of this process. One that is shorter already stays."""
        shortest_s, now_s = self.switch_interval_s, sys.getswitchinterval()
        if shortest_s is not None and shortest_s < now_s:
            sys.setswitchinterval(shortest_s)
            logger.info(
                "Python's switch interval of this process is now %g ms, it was %g ms: threads of the"
                " store wait less for the engine's scheduler (switch_interval_s)",
                1000 * shortest_s,
                1000 * now_s,
            )
