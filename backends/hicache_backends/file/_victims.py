"""The queue of pages that may be evicted, oldest first, filled by a thread of its own."""

from __future__ import annotations

import heapq
import logging
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

# A survey that found nothing to evict is not repeated at once: it would find nothing again.
_REST_PER_SURVEY_S = 10
_LEAST_REST_S = 0.05
# A long survey begins while a quarter of the queue is left, in the thread. A short one is made by
# whoever needs it: that costs less than a thread that competes with writers.
_RESERVE = 4
_LONG_SURVEY_S = 0.05


class Victim(NamedTuple):
    """A page file as a survey saw it. Victims sort by age."""

    modified_ns: int
    nbytes: int
    path: str


class Victims:
    """Victims in the order of their age. Thread-safe.

    `survey` lists the oldest page files, as a heap. It runs once at the start, then whenever what it
    found is used up, or before that where it takes long.
    """

    def __init__(self, survey: Callable[[], list[Victim]]) -> None:
        self._survey = survey
        self._changed = threading.Condition()
        self._queue: list[Victim] = []
        self._low = 0
        self._wanted = True
        self._closed = False
        self._begun = self._ended = 0
        self._took_s = self._barren_until_s = 0.0
        self._thread = threading.Thread(target=self._work, name="hicache-file-survey", daemon=True)
        self._thread.start()

    def next(self, deadline_s: float) -> Victim | None:
        """The oldest page not yet handed out; None where there is none, or not in time."""
        with self._changed:
            if not self._queue and not self._filled(deadline_s):
                return None
            victim = heapq.heappop(self._queue)
            if len(self._queue) < self._low:
                self._want()
            return victim

    def await_first(self, deadline_s: float) -> None:
        """Wait for the survey that every queue begins with."""
        if not self._ended:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._ended or self._closed, max(0.0, deadline_s - time.monotonic())
                )

    def added(self) -> None:
        """There are new pages: a survey that found none is no longer true."""
        self._barren_until_s = 0.0

    def close(self) -> None:
        """End the thread. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(10)

    @property
    def closed(self) -> bool:
        """Whether a running survey had better stop."""
        return self._closed

    def _filled(self, deadline_s: float) -> bool:
        if time.monotonic() >= self._barren_until_s:
            if self._ended == self._begun and 0 < self._took_s < _LONG_SURVEY_S:
                self._begun += 1
                self._fill()
            else:
                self._await_survey(self._begun + 1, deadline_s)
            if not self._queue:
                rest_s = max(_LEAST_REST_S, _REST_PER_SURVEY_S * self._took_s)
                self._barren_until_s = time.monotonic() + rest_s
        return bool(self._queue)

    def _await_survey(self, number: int, deadline_s: float) -> None:
        """Wait until survey `number` has ended, or an earlier one has found something."""
        self._want()
        self._changed.wait_for(
            lambda: self._ended >= number or self._queue or self._closed,
            max(0.0, deadline_s - time.monotonic()),
        )

    def _want(self) -> None:
        self._wanted = True
        self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._closed)
                if self._closed:
                    return
                self._wanted = False
                self._begun += 1
            self._fill()

    def _fill(self) -> None:
        begun_s = time.monotonic()
        oldest = self._surveyed()
        with self._changed:
            self._queue = oldest
            self._ended = self._begun
            self._took_s = time.monotonic() - begun_s
            self._low = len(oldest) // _RESERVE if self._took_s > _LONG_SURVEY_S else 0
            self._changed.notify_all()

    def _surveyed(self) -> list[Victim]:
        try:
            return self._survey()
        except OSError as error:
            logger.warning("the pages cannot be surveyed: %s", error)
            return []
