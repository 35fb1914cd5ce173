"""The pages that this process may evict next, oldest first, and the thread that looks for them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from hicache_backends.file.victims_file import Victim

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_storage.backend_support.deadline import Deadline

__all__ = ["Victim", "Victims"]

logger = logging.getLogger(__name__)

# A survey that found nothing to evict is not repeated at once: it would find nothing again.
_REST_PER_SURVEY_S = 10
_LEAST_REST_S = 0.05
# A survey that takes longer is not waited for: what is evicted meanwhile comes from samples.
_GRACE_S = 0.25


class Victims:
    """Victims in the order of their age. Thread-safe; its lock is never held while a file is touched.

    `survey` runs in a thread of its own and returns the first victims of a new list; `more` returns the
    next ones, and whether a new list is needed soon; `sample` returns some in
    time, while there is no list.
    """

    def __init__(
        self,
        survey: Callable[[], list[Victim]],
        more: Callable[[], tuple[list[Victim], bool]],
        sample: Callable[[Deadline], list[Victim]],
    ) -> None:
        self._survey, self._more, self._sample = survey, more, sample
        self._changed = threading.Condition()
        self._queue: deque[Victim] = deque()
        self._wanted = self._closed = self._failing = False
        self._wanted_s = 0.0
        self._begun = self._ended = 0
        self._took_s = self._barren_until_s = 0.0
        self._thread: threading.Thread | None = None

    def next(self, deadline: Deadline) -> Victim | None:
        """The oldest page not yet handed out; None where there is none, or not in time."""
        victim = self._poll()
        if victim is not None or time.monotonic() < self._barren_until_s:
            return victim
        number = self.want()
        grace_s = max(0.0, self._wanted_s + _GRACE_S - time.monotonic())
        self._await(number, min(grace_s, deadline.remaining_s()))
        victim = self._poll()
        if victim is None and self._ended < number:
            self._put(self._sample(deadline))
            victim = self._poll()
        if victim is None:
            self._await(number, deadline.remaining_s())
            victim = self._poll()
        if victim is None and self._ended >= number:
            rest_s = max(_LEAST_REST_S, _REST_PER_SURVEY_S * self._took_s)
            self._barren_until_s = time.monotonic() + rest_s
        return victim

    def put_back(self, victim: Victim) -> None:
        """Hand out a victim once more: it was not needed."""
        with self._changed:
            self._queue.appendleft(victim)

    @property
    def surveys(self) -> int:
        """How many surveys have ended."""
        return self._ended

    def want(self) -> int:
        """Ask for a survey; the number of one that begins from now on."""
        with self._changed:
            if not self._wanted and not self._closed:
                if self._thread is None:
                    thread = threading.Thread(
                        target=self._work, name="hicache-file-survey", daemon=True
                    )
                    thread.start()
                    self._thread = thread  # there may be no more threads just now
                self._wanted, self._wanted_s = True, time.monotonic()
                self._changed.notify_all()
            return self._begun + 1

    def await_survey(self, number: int, timeout_s: float) -> bool:
        """Wait until survey `number` has ended; False where it has not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ended >= number or self._closed, timeout_s)

    def await_count(self, is_counted: Callable[[], bool], timeout_s: float) -> None:
        """Wait for a survey after which `is_counted` is true."""
        with self._changed:
            self._changed.wait_for(lambda: is_counted() or self._closed, timeout_s)

    def added(self) -> None:
        """There are new pages: a survey that found none is no longer true."""
        self._barren_until_s = 0.0

    def close(self, deadline: Deadline) -> None:
        """End the thread. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(deadline.remaining_s())

    def _poll(self) -> Victim | None:
        victim = self._pop()
        if victim is None and not self._closed:
            victims, low = self._more()
            self._put(victims)
            if low and victims:
                self.want()
            victim = self._pop()
        return victim

    def _pop(self) -> Victim | None:
        with self._changed:
            return self._queue.popleft() if self._queue else None

    def _put(self, victims: list[Victim]) -> None:
        with self._changed:
            self._queue.extend(victims)
            self._changed.notify_all()

    def _await(self, number: int, timeout_s: float) -> None:
        """Wait until survey `number` has ended, or another one has found something."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._ended >= number or self._queue or self._closed, timeout_s
            )

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._closed)
                if self._closed:
                    return
                self._wanted = False
                self._begun += 1
            begun_s = time.monotonic()
            found = self._surveyed()
            with self._changed:
                self._queue.extend(found)
                self._ended = self._begun
                self._took_s = time.monotonic() - begun_s
                self._wanted = self._wanted and not found
                self._changed.notify_all()

    def _surveyed(self) -> list[Victim]:
        try:
            found = self._survey()
        except Exception as error:  # noqa: BLE001 - whatever a file system does, the thread lives on
            level = logging.DEBUG if self._failing else logging.WARNING
            logger.log(level, "the pages cannot be surveyed: %s", error)
            self._failing = True
            return []
        self._failing = False
        return found
