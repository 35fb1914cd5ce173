"""A storage whose calls are points of a scheduler, and which checks each page that it gets."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TypeVar

import numpy as np
from hicache_backends.memory import MemoryStorage

from hicache_storage.backend_support.copies import private_copy
from hicache_storage.errors import StorageTimeout, StorageUnavailable
from hicache_storage.keys import KeySpace
from hicache_storage.page import Page
from hicache_storage.storage import Capabilities
from hicache_storage.testing import WrapperStorage
from interleavings.scenario import Scenario

T = TypeVar("T")

WORKS, SLOW, FAILS, REFUSES = "works", "slow", "fails", "refuses"
LATE, LINGERS = "late", "lingers"
"""The call takes effect, and fails, or is slow."""


@cache
def content(pool: str, page_nbytes: int, page_hash: str) -> bytes:
    """Return the bytes of a page, which depend only on its pool and hash."""
    seed = hashlib.sha256(f"{pool} {page_hash}".encode()).digest()
    return (seed * (page_nbytes // len(seed) + 1))[:page_nbytes]


class ExploredStorage(WrapperStorage):
    """A storage in memory. Each call begins and ends with a point, and behaves as the seed chooses.

    A page to write must have the content of its hash, and nothing may change it during the call. A
    page to read into may be changed by nothing else. With `behaviours` a call can be slow or fail.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        behaviours: Mapping[str, Sequence[str]] | None = None,
        slow_s: float = 12.0,
        bounded: bool = False,
        revocable: bool = False,
        parallelism: int = 1,
    ) -> None:
        super().__init__(MemoryStorage())
        vars(self)["capabilities"] = Capabilities(
            parallelism=parallelism,
            enumerable=True,
            overwrites=True,
            bounded=bounded,
            revocable=revocable,
        )
        self.calls: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.succeeded: Counter[str] = Counter()
        self.behaviours: Mapping[str, Sequence[str]] = behaviours or {}
        """What calls of each operation may do. For each call, one of these is chosen."""
        self.in_use: Counter[int] = Counter()
        """The addresses of the memory that calls use now."""
        self._scenario = scenario
        self._slow_s = slow_s

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        return self._call("exists", hashes, (), lambda: self.inner.batch_exists(space, hashes))

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        def answer() -> list[bool]:
            own = [page if page.revocable is None else _private(page) for page in pages]
            answers = self.inner.batch_get(space, hashes, own)
            read = [page.tobytes() for page in own]
            self._scenario.scheduler.point("a get has filled its pages")
            for page, before in zip(own, read, strict=True):
                self._scenario.require(
                    page.tobytes() == before, "a page is changed while a get fills it"
                )
            moved = zip(pages, own, answers, strict=True)
            return [hit and _has_filled(page, copy) for page, copy, hit in moved]

        return self._call("get", hashes, pages, answer)

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        def answer() -> list[bool]:
            own = [private_copy(page) for page in pages]
            taken = [copy for copy in own if copy is not None]
            wanted = [each for each, copy in zip(hashes, own, strict=True) if copy is not None]
            self._check_written(space, wanted, taken)
            stored = iter(self.inner.batch_set(space, wanted, taken))
            return [copy is not None and next(stored) for copy in own]

        if not self.capabilities.revocable:
            self._check_written(space, hashes, pages)
        return self._call("set", hashes, pages, answer)

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        return self._call("delete", hashes, (), lambda: self.inner.batch_delete(space, hashes))

    def open_space(self, space: KeySpace) -> None:
        self._scenario.scheduler.point("opens a key space")
        super().open_space(space)

    def stored(self, pool: str) -> list[str]:
        """Return the hashes of the stored pages of a pool. The call is not a point."""
        assert isinstance(self.inner, MemoryStorage)
        return [
            page_hash
            for space, pages in self.inner._spaces.items()
            if space.pool == pool
            for page_hash in pages
        ]

    def _call(
        self,
        operation: str,
        hashes: Sequence[str],
        pages: Sequence[Page],
        answer: Callable[[], list[bool]],
    ) -> list[bool]:
        scheduler = self._scenario.scheduler
        self.calls[operation] += 1
        used = [address(page) for page in pages if page.revocable is None]
        self.in_use.update(used)
        try:
            scheduler.point(f"storage: {operation} of {len(hashes)} pages")
            behaviour = self._scenario.pick(self.behaviours.get(operation, (WORKS,)))
            if behaviour == FAILS:
                self.failed[operation] += 1
                raise StorageUnavailable(f"{operation} was told to fail")
            if behaviour == SLOW:
                self._sleep()
            if behaviour == REFUSES:
                self.failed[operation] += 1
                return [False] * len(hashes)
            answers = answer()
            if behaviour == LATE:
                self.failed[operation] += 1
                raise StorageTimeout(f"{operation} was told to fail at its end")
            if behaviour == LINGERS:
                self._sleep()
            self.succeeded[operation] += 1
            scheduler.point(f"storage: {operation} ends")
            return answers
        finally:
            self.in_use.subtract(used)

    def _sleep(self) -> None:
        time.sleep(self._slow_s)

    def _check_written(self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]) -> None:
        if space.dtype == "json":  # completions
            return
        for page_hash, page in zip(hashes, pages, strict=True):
            payload = page.tobytes()[space.frame_nbytes :]
            self._scenario.require(
                payload == content(space.pool, space.page_nbytes, page_hash),
                f"a page of {space.pool!r} is written under a hash that is not its own",
            )


def _private(page: Page) -> Page:
    return Page(bytearray(page.nbytes))


def _has_filled(page: Page, copy: Page) -> bool:
    """Fill a revocable page with `copy`. Return False if the page has been revoked."""
    if page.revocable is not None:
        if not page.revocable.enter():
            return False
        page.copy_from(copy.tobytes())
        page.revocable.leave()
    return True


def address(page: Page) -> int:
    """Return the address of a page's last segment, which is its payload, with or without a frame."""
    return int(np.frombuffer(page.segments[-1], np.uint8).ctypes.data)
