"""Log lines when a store's state changes: full, unavailable, timing out, left alone, and back to normal.

Trouble is told when it begins, when another kind joins it, at growing intervals while it lasts, and when
it is over, with figures. Trouble that comes and goes is told less and less often. Nothing that a store
said is repeated: it may hold a secret.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

from hicache_storage.page_store.results import Verdict

if TYPE_CHECKING:
    import logging
    from collections.abc import Mapping

# What is over for so long is over; what lasts for so long is told again.
_CALM_S = 60.0
_LEAST_GAP_S = 1.0
_MOST_REMINDER_S = 3600.0

_TROUBLES = {  # what is said of the store, and of the pages
    Verdict.UNAVAILABLE: ("is unavailable", "unavailable"),
    Verdict.TIMEOUT: ("does not answer before its callers' deadlines", "timed out"),
    Verdict.ERROR: ("fails with errors", "failed"),
    Verdict.BREAKER_OPEN: ("has been failing, and is left alone for a while", "not tried"),
    Verdict.REFUSED: ("refuses pages, for want of room or in a lost race", "refused"),
}


class StateLog:
    """What one direction of traffic last saw of its store. Thread-safe; no lock while all is well."""

    def __init__(self, traffic: str, logger: logging.Logger) -> None:
        """Log to `logger`, of `traffic` such as "reads from FileStorage"."""
        self._traffic = traffic
        self._logger = logger
        self._lock = threading.Lock()
        self._troubled = False
        self._pages: Counter[Verdict] = Counter()
        self._told: set[Verdict] = set()
        self._began_s = self._last_s = self._next_line_s = -_CALM_S
        self._gap_s = _LEAST_GAP_S
        self._reminder_s = _CALM_S

    def note(self, pages: Mapping[Verdict, int], began_s: float) -> None:
        """Learn how many pages had each verdict in a call that has ended, and when the call began."""
        troubles = {verdict: pages[verdict] for verdict in _TROUBLES if pages.get(verdict)}
        if not troubles and not self._troubled:
            return
        with self._lock:
            now_s = time.monotonic()
            if troubles:
                self._suffer(troubles, now_s)
            elif self._troubled and any(pages.values()) and began_s >= self._last_s:
                self._recover(now_s)

    def _suffer(self, pages: Mapping[Verdict, int], now_s: float) -> None:
        if not self._troubled and now_s - self._last_s >= _CALM_S:
            self._gap_s = _LEAST_GAP_S
            self._pages.clear()
        if not self._pages:
            self._began_s = now_s
        self._troubled = True
        self._last_s = now_s
        self._pages.update(pages)
        due = now_s >= self._next_line_s
        if due or (self._told and pages.keys() - self._told):
            if due:
                self._next_line_s = now_s + self._reminder_s
                self._reminder_s = min(2 * self._reminder_s, _MOST_REMINDER_S)
            self._told.update(pages)
            self._tell(" and ".join(said for kind, (said, _) in _TROUBLES.items() if kind in pages))

    def _recover(self, now_s: float) -> None:
        self._troubled = False
        if self._told:
            self._tell("is back to normal")
            self._told.clear()
            self._pages.clear()
            self._reminder_s = _CALM_S
            self._next_line_s = now_s + self._gap_s
            self._gap_s = min(2 * self._gap_s, _CALM_S)

    def _tell(self, said: str) -> None:
        counts = [
            f"{self._pages[kind]} {what}"
            for kind, (_, what) in _TROUBLES.items()
            if self._pages[kind]
        ]
        self._logger.warning(
            "%s: the store %s; pages in the last %.1f s: %s",
            self._traffic,
            said,
            time.monotonic() - self._began_s,
            ", ".join(counts),
        )
