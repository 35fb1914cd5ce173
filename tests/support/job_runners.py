"""Job runners for tests, with their stores, their pages, and waits for their results."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from hicache_backends.memory import MemoryStorage
from pages import blank, hash_of, page, space

from hicache_storage.integrations._jobs import JobRunner, JobSettings
from hicache_storage.page_store import PageStore, PageStoreSettings, Transfer
from hicache_storage.testing import FaultyStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from hicache_storage.integrations._jobs import JobKind, JobResult
    from hicache_storage.keys import KeySpace
    from hicache_storage.page_store import Observer
    from hicache_storage.storage import HiCacheStorage
    from hicache_storage.testing import Odds, Strike

R = TypeVar("R")

SPACE = space()
OTHER = space(pool="draft", page_nbytes=1000)


class Engine:
    """A job runner over a storage, and the results that were fetched."""

    def __init__(
        self,
        storage: HiCacheStorage,
        *,
        owner: KeySpace | None = None,
        observers: Sequence[Observer] = (),
        **settings: Any,
    ) -> None:
        self.storage = storage
        self.notified: list[JobKind] = []
        self._changed = threading.Condition()
        limits = JobSettings(**settings)
        self.store = PageStore(
            storage,
            PageStoreSettings(timeout_s=5, parallelism=4, private_nbytes=limits.queued_nbytes),
            observers=observers,
        )
        self.runner = JobRunner(
            self.store,
            limits,
            on_finished=self._on_finished,
            owner=owner,
        )

    def lookup(self, *queries: tuple[KeySpace, Sequence[str]]) -> list[list[bool]]:
        """Look pages up, and return the answers."""
        self.runner.submit_lookup(1, queries)
        (result,) = self.fetch(self.runner.finished_lookups)
        return result.present

    def load(self, *batches: Transfer) -> JobResult:
        """Load pages, and return the result."""
        self.runner.submit_load(2, batches)
        (result,) = self.fetch(self.runner.finished_loads)
        return result

    def save(self, *batches: Transfer) -> JobResult:
        """Store pages, and return the result."""
        self.runner.submit_store(3, batches)
        (result,) = self.fetch(self.runner.finished_stores)
        return result

    def fetch(self, finished: Callable[[], list[R]], count: int = 1) -> list[R]:
        """Wait until `count` results were fetched, and return them."""
        results: list[R] = []
        with self._changed:

            def fetch_more() -> bool:
                results.extend(finished())
                return len(results) >= count

            assert self._changed.wait_for(fetch_more, 30), f"{len(results)} of {count} results"
        return results

    def close(self) -> None:
        """Close the runner first, then its store."""
        if isinstance(self.storage, FaultyStorage):
            self.storage.release()
        self.runner.close()
        self.store.close()
        self.storage.close()

    def _on_finished(self, kind: JobKind) -> None:
        with self._changed:
            self.notified.append(kind)
            self._changed.notify_all()


@contextmanager
def engine(plan: Iterable[Strike | Odds] = (), **settings: Any) -> Generator[Engine]:
    """Run jobs over a faulty storage in memory."""
    storage = FaultyStorage(MemoryStorage.from_config({}), plan)
    opened = Engine(storage, **settings)
    try:
        yield opened
    finally:
        opened.close()


def batch(numbers: Iterable[int], of: KeySpace = SPACE, *, filled: bool = True) -> Transfer:
    """Return pages whose bytes depend on their numbers, or blank pages to load into."""
    numbers = list(numbers)
    nbytes = of.page_nbytes
    pages = [page(nbytes, number) if filled else blank(nbytes) for number in numbers]
    return Transfer(of, [hash_of(number) for number in numbers], pages)


def target(numbers: Iterable[int], of: KeySpace = SPACE) -> Transfer:
    """Return blank pages to load into."""
    return batch(numbers, of, filled=False)


def contents(of: Transfer) -> list[bytes]:
    """Return the bytes of each page."""
    return [each.tobytes() for each in of.pages]
