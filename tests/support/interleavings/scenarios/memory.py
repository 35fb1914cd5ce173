"""The memory backend under calls of several threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hicache_backends.memory import MemoryStorage
from pages import hash_of, space

from hicache_storage.errors import StorageClosed
from hicache_storage.page import Page
from interleavings.scenario import Scenario
from interleavings.scenarios.storage import content

_NBYTES = 64
_SPACE = space(page_nbytes=_NBYTES)
_HASHES = [hash_of(number) for number in range(4)]
_CAPACITY_PAGES = 3


class MemoryScenario(Scenario):
    """A page that is read has the bytes of its hash, and the byte count is the sum of the pages."""

    name = "memory"

    def set_up(self) -> None:
        capacity = _CAPACITY_PAGES * _SPACE.stored_nbytes
        self.storage = MemoryStorage.from_config({"capacity_nbytes": capacity})
        self.storage.open_space(_SPACE)
        self.closed = False

    def threads(self) -> Mapping[str, Callable[[], None]]:
        return {f"user-{number}": self._use for number in range(3)}

    def finish(self) -> None:
        found = list(self.storage.scan(_SPACE))
        counted = self.storage.stats()
        self.require(counted.pages == len(found), "the counted pages are not those of a scan")
        self.require(counted.nbytes == sum(each.nbytes for each in found), "bytes do not add up")
        self.require(len(found) <= _CAPACITY_PAGES, "the capacity is exceeded")
        self.storage.clear(_SPACE)
        self.require(self.storage.stats().nbytes == 0, "bytes are left after a clear")
        self.storage.close()

    def _use(self) -> None:
        for _ in range(4):
            hashes = _HASHES[self.pick((0, 1)) :][: self.pick((1, 2, 3))]
            self.pick((self._set, self._set, self._get, self._delete, self._list))(hashes)

    def _set(self, hashes: list[str]) -> None:
        pages = [Page(bytearray(content("kv", _NBYTES, each))) for each in hashes]
        self.storage.batch_set(_SPACE, hashes, pages)

    def _get(self, hashes: list[str]) -> None:
        pages = [Page(bytearray(_NBYTES)) for _ in hashes]
        answers = self.storage.batch_get(_SPACE, hashes, pages)
        for page_hash, page, hit in zip(hashes, pages, answers, strict=True):
            right = page.tobytes() == content("kv", _NBYTES, page_hash)
            self.require(right or not hit, "a page that was read has other bytes")

    def _delete(self, hashes: list[str]) -> None:
        self.storage.batch_delete(_SPACE, hashes)

    def _list(self, hashes: list[str]) -> None:
        try:
            for info in self.storage.scan(_SPACE):
                self.require(info.nbytes == _NBYTES, "a listed page has another size")
        except StorageClosed:
            self.fail("the storage is closed")
