"""Read-only storages. They pass on calls that read, and refuse calls that change the store.

with open_storage("file", {"path": "/mnt/snapshot"}, read_only=True) as storage:
    for space in storage.spaces(): ...
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from hicache_storage.backend_support.wrapper import WrapperStorage
from hicache_storage.errors import UnsupportedOperation
from hicache_storage.scalars import format_nbytes
from hicache_storage.storage import Diagnosis, HiCacheStorage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page


class Reader(HiCacheStorage):
    """The part of a backend's storage that only reads. A subclass adds the calls that write."""

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        del space, hashes, pages
        self.ensure_open()
        raise _refusal("set", self)

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        del space, hashes
        self.ensure_open()
        raise _refusal("delete", self)


def over_capacity(used_nbytes: int, capacity_nbytes: int, evicted_nbytes: int) -> Diagnosis:
    """Return the diagnosis for a store that holds more than the capacity in the config."""
    return Diagnosis(
        "capacity",
        f"the store holds {format_nbytes(used_nbytes)}, more than capacity_nbytes"
        f" ({format_nbytes(capacity_nbytes)}): an engine"
        f" with this config would evict {format_nbytes(evicted_nbytes)}",
        "raise capacity_nbytes, or start no engine with this config",
        is_full=True,
        free_nbytes=0,
    )


class ReadOnlyStorage(WrapperStorage):
    """The storage that `open_storage(..., read_only=True)` returns. It wraps the backend's own."""

    def open_space(self, space: KeySpace) -> None:
        """Do nothing. A key space that does not exist is not made, and reads of it miss."""
        del space
        self.ensure_open()

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        del space, hashes, pages
        self._refuse("set")

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        del space, hashes
        self._refuse("delete")

    def clear(self, space: KeySpace) -> int:
        del space
        self._refuse("clear")

    def remove_space(self, space_id: str) -> int:
        del space_id
        self._refuse("remove_space")

    def parts(self) -> Mapping[str, HiCacheStorage]:
        """Return the parts, read-only."""
        return {name: ReadOnlyStorage(part) for name, part in self.inner.parts().items()}

    def _refuse(self, call: str) -> NoReturn:
        self.ensure_open()
        raise _refusal(call, self.inner)


def _refusal(call: str, storage: HiCacheStorage) -> UnsupportedOperation:
    return UnsupportedOperation(
        f"{call}: this {type(storage).__name__} was opened read-only: open it without read_only"
    )
