"""The base class for storages that wrap another storage, change some calls and pass the others on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from hicache_storage.errors import UnsupportedOperation
from hicache_storage.storage import HiCacheStorage

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import HostBuffer, Page
    from hicache_storage.storage import (
        Capabilities,
        Diagnosis,
        PageFault,
        PageInfo,
        PageTimes,
        StorageStats,
        UnreadableSpace,
    )


class WrapperStorage(HiCacheStorage):
    """A storage that passes every call on to `inner`. Thread-safe.

    A wrapper has the capabilities of `inner`, and works in a forked child if `inner` does. A wrapper
    that accesses pages itself does so within accesses, or gives up `revocable`. Closing a wrapper
    closes `inner`, too. `clear` calls `inner.clear`, not the wrapper's `batch_delete`.
    """

    def __init__(self, inner: HiCacheStorage) -> None:
        self.inner = inner
        vars(self)["capabilities"] = inner.capabilities
        vars(self)["usable_after_fork"] = inner.usable_after_fork

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:  # noqa: ARG003
        """Refuse, because a wrapper is constructed around an open storage.

        Raises:
            UnsupportedOperation: Always.
        """
        raise UnsupportedOperation(f"{cls.__name__} has no config: construct it around a storage")

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        return self.inner.batch_exists(space, hashes)

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        """Pass the call on. Drop the pages' digests, because a subclass may change the pages later."""
        verdicts = self.inner.batch_get(space, hashes, pages)
        for page in pages:
            page.digest = None
        return verdicts

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        return self.inner.batch_set(space, hashes, pages)

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        return self.inner.batch_delete(space, hashes)

    def open_space(self, space: KeySpace) -> None:
        self.inner.open_space(space)

    def spaces(self) -> Iterator[KeySpace]:
        return self.inner.spaces()

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        return self.inner.scan(space)

    def faults(self, space: KeySpace, hashes: Sequence[str] | None = None) -> Iterator[PageFault]:
        return self.inner.faults(space, hashes)

    def unreadable_spaces(self) -> Iterator[UnreadableSpace]:
        return self.inner.unreadable_spaces()

    def remove_space(self, space_id: str) -> int:
        return self.inner.remove_space(space_id)

    def page_times(self, space: KeySpace, hashes: Sequence[str]) -> list[PageTimes]:
        return self.inner.page_times(space, hashes)

    def clear(self, space: KeySpace) -> int:
        return self.inner.clear(space)

    def diagnose(self) -> list[Diagnosis]:
        return self.inner.diagnose()

    def register_buffer(self, buffer: HostBuffer) -> None:
        self.inner.register_buffer(buffer)

    def unregister_buffer(self, buffer: HostBuffer) -> None:
        self.inner.unregister_buffer(buffer)

    def parts(self) -> Mapping[str, HiCacheStorage]:
        """Return the parts of `inner`. Override this if the wrapper changes pages, names or rights."""
        return self.inner.parts()

    def page_shares(self) -> Mapping[str, float]:
        return self.inner.page_shares()

    def page_parts(self, space: KeySpace, hashes: Sequence[str]) -> list[Collection[str]]:
        return self.inner.page_parts(space, hashes)

    def stats(self) -> StorageStats:
        return self.inner.stats()

    @property
    def _widest_capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def ensure_open(self) -> None:
        super().ensure_open()
        self.inner.ensure_open()

    def close(self) -> None:
        self.inner.close()
        super().close()
