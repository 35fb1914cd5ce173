"""The pages that this process may evict next, oldest first, and the thread that scans for more."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_backends.file.victims_file import Victim
    from hicache_storage.backend_support.deadline import Deadline

logger = logging.getLogger(__name__)

# A scan that found no victim is not repeated at once: the next one would find none either.
_PAUSE_PER_SCAN_S = 10
_LEAST_PAUSE_S = 0.05
# Nobody waits for a scan that takes longer. Meanwhile victims come from samples.
_GRACE_S = 0.25
# A batch that fails or is late has claimed no more than this.
_MOST_TAKEN = 256


class VictimQueue:
    """Victims in the order of their age. Thread-safe; no lock is held during I/O.

    `scan` runs in a thread of its own and returns the first victims of a new list. `take_more` gets
    the number of wanted victims, and returns the next ones and whether a new list is needed soon.
    `sample` returns some victims in time while there is no list.
    """

    def __init__(
        self,
        scan: Callable[[], list[Victim]],
        take_more: Callable[[int], tuple[list[Victim], bool]],
        sample: Callable[[Deadline], list[Victim]],
    ) -> None:
        self._scan, self._take_more, self._sample = scan, take_more, sample
        self._changed = threading.Condition()
        self._queue: deque[Victim] = deque()
        self._wanted = self._closed = self._failing = False
        self._wanted_s = 0.0
        self._begun = self._ended = 0
        self._took_s = self._empty_until_s = 0.0
        self._page_nbytes = 0
        """The size of the page that was handed out last."""
        self._thread: threading.Thread | None = None

    def next(self, deadline: Deadline, count: int = 1) -> Victim | None:
        """Return the oldest page not yet handed out; None when there is none, or none in time.

        `count` is the number of pages for which the caller will ask in turn.
        """
        victim = self._poll(count)
        if victim is not None or time.monotonic() < self._empty_until_s:
            return victim
        number = self.request_scan()
        grace_s = max(0.0, self._wanted_s + _GRACE_S - time.monotonic())
        self._await_victim(number, min(grace_s, deadline.remaining_s()))
        victim = self._poll()
        if victim is None and self._ended < number:
            self._put(self._sample(deadline))
            victim = self._poll()
        if victim is None:
            self._await_victim(number, deadline.remaining_s())
            victim = self._poll()
        if victim is None and self._ended >= number:
            pause_s = max(_LEAST_PAUSE_S, _PAUSE_PER_SCAN_S * self._took_s)
            self._empty_until_s = time.monotonic() + pause_s
        return victim

    def take(self, nbytes: int, deadline: Deadline) -> list[Victim]:
        """Return the oldest pages not yet handed out, of `nbytes` together or fewer.

        The list is empty when there is no page, or none in time. It waits for the first page alone.
        """
        victims: list[Victim] = []
        victim = self.next(deadline, self._count_of(nbytes))
        while victim is not None:
            victims.append(victim)
            nbytes -= victim.nbytes
            self._page_nbytes = victim.nbytes
            is_enough = nbytes <= 0 or len(victims) == _MOST_TAKEN
            victim = None if is_enough else self._poll(self._count_of(nbytes))
        return victims

    def put_back(self, victims: list[Victim]) -> None:
        """Return victims that were not needed. They are handed out again."""
        with self._changed:
            self._queue.extendleft(reversed(victims))

    @property
    def scans(self) -> int:
        """The number of scans that have ended."""
        return self._ended

    def request_scan(self) -> int:
        """Have the thread scan; return the number of a scan that begins from now on."""
        with self._changed:
            if not self._wanted and not self._closed:
                if self._thread is None:
                    thread = threading.Thread(
                        target=self._run, name="hicache-file-scan", daemon=True
                    )
                    thread.start()
                    self._thread = thread  # there may be no more threads just now
                self._wanted, self._wanted_s = True, time.monotonic()
                self._changed.notify_all()
            return self._begun + 1

    def await_scan(self, number: int, timeout_s: float) -> bool:
        """Wait until scan `number` has ended; return False when it does not end in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ended >= number or self._closed, timeout_s)

    def await_condition(self, is_true: Callable[[], bool], timeout_s: float) -> None:
        """Wait for a scan after which `is_true` returns True."""
        with self._changed:
            self._changed.wait_for(lambda: is_true() or self._closed, timeout_s)

    def note_new_pages(self) -> None:
        """Allow scans again, since pages were added after a scan that found none."""
        self._empty_until_s = 0.0

    def close(self, deadline: Deadline) -> None:
        """End the thread. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(deadline.remaining_s())

    def _count_of(self, nbytes: int) -> int:
        """Return the number of pages that have `nbytes`, if they are of the size of the last one."""
        return min(-(-nbytes // self._page_nbytes), _MOST_TAKEN) if self._page_nbytes else 1

    def _poll(self, count: int = 1) -> Victim | None:
        victim = self._pop()
        if victim is None and not self._closed:
            victims, is_low = self._take_more(count)
            self._put(victims)
            if is_low and victims:
                self.request_scan()
            victim = self._pop()
        return victim

    def _pop(self) -> Victim | None:
        with self._changed:
            return self._queue.popleft() if self._queue else None

    def _put(self, victims: list[Victim]) -> None:
        with self._changed:
            self._queue.extend(victims)
            self._changed.notify_all()

    def _await_victim(self, number: int, timeout_s: float) -> None:
        """Wait until scan `number` has ended, or an earlier one has found a victim."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._ended >= number or self._queue or self._closed, timeout_s
            )

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._closed)
                if self._closed:
                    return
                self._wanted = False
                self._begun += 1
            begun_s = time.monotonic()
            found = self._scan_once()
            with self._changed:
                self._queue.extend(found)
                self._ended = self._begun
                self._took_s = time.monotonic() - begun_s
                self._wanted = self._wanted and not found
                self._changed.notify_all()

    def _scan_once(self) -> list[Victim]:
        try:
            found = self._scan()
        except Exception as error:  # noqa: BLE001 - the thread outlives every error of a file system
            level = logging.DEBUG if self._failing else logging.WARNING
            logger.log(level, "the pages cannot be scanned: %s", error)
            self._failing = True
            return []
        self._failing = False
        return found
