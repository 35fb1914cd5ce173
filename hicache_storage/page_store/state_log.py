"""Log when the state of a store changes: full, unavailable, timing out, avoided, back to normal.

A line with figures appears when failures begin, when another kind of failure joins them, at growing
intervals while they last, and when they end. Failures that come and go are logged less and less
often. No line repeats an answer of the store, because that may contain a secret.
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

# Failures that ended this long ago are forgotten; failures that last this long are logged again.
_REMINDER_S = 60.0
_MIN_GAP_S = 1.0
_MAX_REMINDER_S = 3600.0

_FAILURES = {  # for each verdict a clause about the store, and a word about the pages
    Verdict.UNAVAILABLE: ("is unavailable", "unavailable"),
    Verdict.TIMEOUT: ("does not answer before its callers' deadlines", "timed out"),
    Verdict.ERROR: ("fails with errors", "failed"),
    Verdict.BREAKER_OPEN: ("keeps failing, so it gets no calls for a while", "not tried"),
    Verdict.REFUSED: ("refuses pages, because it is full or another write came first", "refused"),
}


class StateLog:
    """The state of a store in one direction. Thread-safe, without a lock while nothing fails."""

    def __init__(self, label: str, logger: logging.Logger) -> None:
        """Log to `logger`, under a `label` such as "reads from FileStorage"."""
        self._label = label
        self._logger = logger
        self._lock = threading.Lock()
        self._failing = False
        self._pages: Counter[Verdict] = Counter()
        self._logged: set[Verdict] = set()
        self._began_s = self._last_s = self._next_line_s = -_REMINDER_S
        self._gap_s = _MIN_GAP_S
        self._reminder_s = _REMINDER_S

    def note(self, pages: Mapping[Verdict, int], began_s: float) -> None:
        """Record how many pages had each verdict, in a call that began at `began_s` and has ended."""
        failures = {verdict: pages[verdict] for verdict in _FAILURES if pages.get(verdict)}
        if not failures and not self._failing:
            return
        with self._lock:
            now_s = time.monotonic()
            if failures:
                self._record_failures(failures, now_s)
            elif self._failing and any(pages.values()) and began_s >= self._last_s:
                self._record_recovery(now_s)

    def _record_failures(self, pages: Mapping[Verdict, int], now_s: float) -> None:
        if not self._failing and now_s - self._last_s >= _REMINDER_S:
            self._gap_s = _MIN_GAP_S
            self._pages.clear()
        if not self._pages:
            self._began_s = now_s
        self._failing = True
        self._last_s = now_s
        self._pages.update(pages)
        due = now_s >= self._next_line_s
        if due or (self._logged and pages.keys() - self._logged):
            if due:
                self._next_line_s = now_s + self._reminder_s
                self._reminder_s = min(2 * self._reminder_s, _MAX_REMINDER_S)
            self._logged.update(pages)
            states = (state for verdict, (state, _) in _FAILURES.items() if verdict in pages)
            self._write_line(" and ".join(states))

    def _record_recovery(self, now_s: float) -> None:
        self._failing = False
        if self._logged:
            self._write_line("is back to normal")
            self._logged.clear()
            self._pages.clear()
            self._reminder_s = _REMINDER_S
            self._next_line_s = now_s + self._gap_s
            self._gap_s = min(2 * self._gap_s, _REMINDER_S)

    def _write_line(self, state: str) -> None:
        counts = [
            f"{self._pages[verdict]} {result}"
            for verdict, (_, result) in _FAILURES.items()
            if self._pages[verdict]
        ]
        self._logger.warning(
            "%s: the store %s; pages in the last %.1f s: %s",
            self._label,
            state,
            max(0.1, time.monotonic() - self._began_s),
            ", ".join(counts),
        )
