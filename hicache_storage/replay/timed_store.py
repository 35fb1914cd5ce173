"""A page store that measures busy time, counts failed writes by reason, and can undo its writes."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hicache_storage.errors import HiCacheError
from hicache_storage.page_store import PageStore
from hicache_storage.page_store.results import Verdict

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page_store import Observer, PageStoreSettings
    from hicache_storage.page_store.results import Outcome, Transfer
    from hicache_storage.storage import HiCacheStorage


_REMOVED_AT_ONCE = 256
_UNWRITTEN = frozenset({Verdict.REFUSED, Verdict.BREAKER_OPEN, Verdict.NOT_ADMITTED})


class BusyTime:
    """The time during which at least one call was running. Overlaps count once. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._began_s = 0.0
        self._ended_s = 0.0

    @property
    def total_s(self) -> float:
        """Seconds so far, including a call that still runs."""
        with self._lock:
            running_s = time.perf_counter() - self._began_s if self._running else 0.0
            return self._ended_s + running_s

    @contextmanager
    def call(self) -> Generator[None]:
        """Count the time of one call."""
        with self._lock:
            if not self._running:
                self._began_s = time.perf_counter()
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    self._ended_s += time.perf_counter() - self._began_s


class TimedPageStore(PageStore):
    """A page store that counts the time of its calls, and the pages that it could not store.

    With `undoes` it asks the storage about each page just before it writes the page. Pages that were
    absent then are its own, and `remove_own_pages` deletes them.
    """

    def __init__(
        self,
        storage: HiCacheStorage,
        settings: PageStoreSettings,
        *,
        observers: Iterable[Observer] = (),
        undoes: bool = False,
    ) -> None:
        super().__init__(storage, settings, observers=observers)
        self._undoes = undoes
        self._own_lock = threading.Lock()
        self._own_pages: dict[KeySpace, set[bytes]] = {}
        self._doubtful_pages: dict[KeySpace, set[bytes]] = {}
        """Written pages for which the storage gave no answer before the write."""
        self.busy: dict[str, BusyTime] = {"load": BusyTime(), "save": BusyTime()}
        self._unsaved_lock = threading.Lock()
        self._unsaved_pages: Counter[str] = Counter()

    def load(self, transfers: Sequence[Transfer], *, timeout_s: float | None = None) -> Outcome:
        with self.busy["load"].call():
            return super().load(transfers, timeout_s=timeout_s)

    def save(self, transfers: Sequence[Transfer], *, timeout_s: float | None = None) -> Outcome:
        before = [self._answers(each, timeout_s) for each in transfers] if self._undoes else []
        try:
            with self.busy["save"].call():
                outcome = super().save(transfers, timeout_s=timeout_s)
        except Exception:
            self._add_unsaved({page: Verdict.ERROR for each in transfers for page in each.hashes})
            raise
        self._add_unsaved(_first_failures(transfers, outcome))
        for transfer, answers, verdicts in zip(transfers, before, outcome.verdicts, strict=False):
            self._add_own(transfer, answers, verdicts)
        return outcome

    def remove_own_pages(self) -> int:
        """Delete the pages that `save` was the first to make. Return how many may be left.

        A page stays unless the storage reported, before the write, that the page was absent.
        """
        left = sum(map(len, self._doubtful_pages.values()))
        for space, own in self._own_pages.items():
            left -= len(own & self._doubtful_pages.get(space, set()))
            hashes = [page.hex() for page in own]
            for start in range(0, len(hashes), _REMOVED_AT_ONCE):
                some = hashes[start : start + _REMOVED_AT_ONCE]
                left += len(some) - self.delete(space, some)
        return left

    @property
    def unsaved(self) -> dict[str, int]:
        """How many pages `save` did not store, by reason. A page counts once for all pools together."""
        with self._unsaved_lock:
            return dict(self._unsaved_pages)

    def _answers(self, transfer: Transfer, timeout_s: float | None) -> Sequence[bool | None]:
        """Ask the storage whether it has each page. None: no answer."""
        try:
            return self.present(transfer.space, transfer.hashes, timeout_s=timeout_s)
        except HiCacheError:
            return [None] * len(transfer.hashes)

    def _add_own(
        self, transfer: Transfer, answers: Sequence[bool | None], verdicts: Sequence[Verdict]
    ) -> None:
        """Remember pages that this save has written or, if a call is late, may still write."""
        with self._own_lock:
            own = self._own_pages.setdefault(transfer.space, set())
            doubtful = self._doubtful_pages.setdefault(transfer.space, set())
            for page, there, verdict in zip(transfer.hashes, answers, verdicts, strict=True):
                if not there and verdict not in _UNWRITTEN:
                    (doubtful if there is None else own).add(bytes.fromhex(page))

    def _add_unsaved(self, failures: dict[str, Verdict]) -> None:
        with self._unsaved_lock:
            self._unsaved_pages.update(verdict.value for verdict in failures.values())


def _first_failures(transfers: Sequence[Transfer], outcome: Outcome) -> dict[str, Verdict]:
    """Return each page that at least one pool did not store, with the verdict of the first such pool."""
    failures: dict[str, Verdict] = {}
    for transfer, verdicts in zip(transfers, outcome.verdicts, strict=True):
        if verdicts.count(Verdict.OK) < len(verdicts):
            for page, verdict in zip(transfer.hashes, verdicts, strict=True):
                if verdict is not Verdict.OK:
                    failures.setdefault(page, verdict)
    return failures
