"""Write pages to a store before a load, and remove them after it. They have their own key space."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

from hicache_storage.cli.operations.batches import (
    PageMemory,
    batches,
    pages_per_batch,
    run_batches,
    threads_for,
    trial_space,
)
from hicache_storage.errors import HiCacheError
from hicache_storage.page import Page
from hicache_storage.page_store import PageStore, PageStoreSettings, Transfer, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from hicache_storage.cli.progress import Meter
    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import HiCacheStorage

MODEL = "hicache-bench"
"""The model in a load's key spaces. No engine uses it."""


def bench_space(page_nbytes: int, page_tokens: int) -> KeySpace:
    """Return the key space for a load's pages."""
    return trial_space(MODEL, "bench", page_nbytes, page_tokens)


class Hashes:
    """New page hashes that no other run has. Thread-safe."""

    def __init__(self) -> None:
        self._seed = os.urandom(16)
        self._taken = 0
        self._lock = threading.Lock()

    def take(self, pages: int) -> list[str]:
        """Return hashes that were not returned before."""
        with self._lock:
            first, self._taken = self._taken, self._taken + pages
        return [
            hashlib.sha256(self._seed + number.to_bytes(8, "little")).hexdigest()
            for number in range(first, first + pages)
        ]


class PageBuffers:
    """Memory for the pages of one call, for each thread. The bytes are random.

    Every payload begins with the hash of its page. If a page comes back with the bytes of another
    page, it is wrong, whatever its frame says.
    """

    def __init__(self, store: PageStore, space: KeySpace, pages: int) -> None:
        self._space = space
        self._framed = store.framed(space)
        self._memory = PageMemory(self._framed, pages, store.storage.capabilities.alignment)
        self._random = os.urandom(space.page_nbytes)

    def to_write(self, hashes: Sequence[str]) -> Transfer:
        """Return pages with new bytes. The next call of this thread reuses their memory."""
        views = self._payloads(hashes)
        for view, page_hash in zip(views, hashes, strict=True):
            if not any(view[-8:]):  # memory that was not written yet
                view[:] = self._random
            self._stamp(view, page_hash)
        return self._transfer(hashes)

    def to_read(self, hashes: Sequence[str]) -> Transfer:
        """Return pages whose bytes a read replaces."""
        return self._transfer(hashes)

    def proved(self, hashes: Sequence[str], verdicts: Sequence[Verdict]) -> list[Verdict]:
        """Return the verdicts of a read. A page with the bytes of another page is CORRUPT."""
        return [
            Verdict.CORRUPT if verdict is Verdict.OK and not self._is(view, page_hash) else verdict
            for view, page_hash, verdict in zip(
                self._payloads(hashes), hashes, verdicts, strict=True
            )
        ]

    def _transfer(self, hashes: Sequence[str]) -> Transfer:
        views = self._payloads(hashes)
        return Transfer(self._space, hashes, [Page(view) for view in views])

    def _payloads(self, hashes: Sequence[str]) -> list[memoryview]:
        frame = self._framed.frame_nbytes
        return [view[frame:] for view in self._memory.views(len(hashes))]

    def _stamp(self, view: memoryview, page_hash: str) -> None:
        stamp = bytes.fromhex(page_hash)[: len(view)]
        view[: len(stamp)] = stamp

    def _is(self, view: memoryview, page_hash: str) -> bool:
        stamp = bytes.fromhex(page_hash)[: len(view)]
        return view[: len(stamp)].tobytes() == stamp


def fill(
    store: PageStore,
    space: KeySpace,
    hashes: Sequence[str],
    meter: Meter,
    stop: threading.Event,
) -> tuple[list[str], Counter[Verdict]]:
    """Write pages. Return the hashes of the stored ones, and the count of each verdict."""
    pages = pages_per_batch(store.framed(space), store.storage)
    buffers = PageBuffers(store, space, pages)

    def write(batch: list[str]) -> tuple[list[str], list[Verdict]]:
        outcome = store.save([buffers.to_write(batch)])
        return batch, outcome.verdicts[0]

    meter.begin(len(hashes) * space.page_nbytes)
    stored: list[str] = []
    verdicts: Counter[Verdict] = Counter()
    todo = _until(stop.is_set, batches(hashes, pages))
    for batch, found in run_batches(write, todo, threads_for(store.storage)):
        verdicts.update(found)
        stored += [one for one, is_ok in zip(batch, found, strict=True) if is_ok is Verdict.OK]
        meter.advance(len(batch), len(batch) * space.page_nbytes)
    return stored, verdicts


def remove(
    storage: HiCacheStorage,
    space: KeySpace,
    hashes: Sequence[str],
    meter: Meter,
    timeout_s: float,
) -> int:
    """Delete pages, then the key space if it is empty. Return how many pages may be left.

    The calls use a new page store, so its breaker does not remember earlier failures.
    """
    with PageStore(storage, PageStoreSettings(timeout_s=timeout_s)) as store:
        try:
            store.open_space(space)
        except HiCacheError:  # the store is down, as the figures show
            return len(hashes)

        def delete(batch: list[str]) -> tuple[int, int]:
            store.delete(space, batch)
            return len(batch), len(batch) - store.present(space, batch).count(False)

        meter.begin(len(hashes) * space.page_nbytes)
        left = 0
        pages = pages_per_batch(store.framed(space), storage)
        for done, may_be_left in run_batches(delete, batches(hashes, pages), threads_for(storage)):
            left += may_be_left
            meter.advance(done, done * space.page_nbytes)
        if not left:
            _remove_empty(storage, store.framed(space))
    return left


def _remove_empty(storage: HiCacheStorage, space: KeySpace) -> None:
    """Remove a key space, unless another run has pages in it."""
    with suppress(HiCacheError):  # an empty key space does no harm
        if not any(True for _ in storage.scan(space)):
            storage.remove_space(space.id)


def _until(ended: Callable[[], bool], items: Iterable[list[str]]) -> Iterator[list[str]]:
    for item in items:
        if ended():
            return
        yield item
