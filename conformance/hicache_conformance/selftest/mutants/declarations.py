"""Stores that make false claims, or do half of what they do not claim."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from hicache_conformance.selftest.mutants import caught_by, own
from hicache_conformance.selftest.references.dict_store import DictStore
from hicache_conformance.selftest.references.evicting import EvictingStore
from hicache_conformance.selftest.references.first_wins import FirstWins
from hicache_conformance.selftest.references.narrow import FewBytes
from hicache_storage.storage import Durability

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from hicache_conformance.selftest.references.dict_store import DictSettings, Stored
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page
    from hicache_storage.storage import PageInfo

_MAX_BATCH = 16
_MAX_PAGE_NBYTES = 8192


# --- KV-901: claims that are untrue ----------------------------------------------------------------


@caught_by("KV-901:what_is_kept_until_deleted_is_kept")
class KeepsAThousand(DictStore):
    """The store claims UNTIL_DELETED, but keeps only the last thousand pages."""

    def _put(self, key: Hashable, stored: Stored) -> None:
        super()._put(key, stored)
        while len(self._pages) > 1000:
            self._drop(next(iter(self._pages)))


@caught_by("KV-901:what_is_kept_until_pressure_is_kept_without_any")
class DropsWhatIsRead(EvictingStore):
    """The store claims UNTIL_PRESSURE, but drops a page after it was read twenty times."""

    _reads: dict[Hashable, int] = own(dict)

    def _touch(self, key: Hashable) -> None:
        self._reads[key] = self._reads.get(key, 0) + 1
        if self._reads[key] > 20:
            with self._lock:
                self._drop(key)
        super()._touch(key)


@caught_by("KV-901:what_is_durable_survives_reopening")
class DiesWithItsHandle(DictStore):
    """The store claims to survive a crash, but keeps its pages in memory."""

    capabilities = replace(DictStore.capabilities, durability=Durability.CRASH)


@caught_by("KV-901:what_is_shared_is_seen_by_another_handle")
class KeepsToItself(DictStore):
    """The store claims to be shared, but every handle has its own pages."""

    capabilities = replace(DictStore.capabilities, shared=True)


@caught_by("KV-901:what_is_enumerable_is_listed_and_cleared")
class ListsNothing(DictStore):
    """The store claims to be enumerable, but its listings are empty."""

    def _names(self, space: KeySpace) -> list[PageInfo]:  # noqa: ARG002 - that is the fault
        return []


@caught_by("KV-901:without_overwrites_the_first_bytes_stay")
class OverwritesAnyway(FirstWins):
    """The store claims not to overwrite, but does."""

    def _put(self, key: Hashable, stored: Stored) -> None:
        super(FirstWins, self)._put(key, stored)


@caught_by("KV-901:pages_in_segments_are_taken")
class FillsFirstSegmentOnly(DictStore):
    """The store claims scatter/gather, but fills only the first segment of a page."""

    def _filled(self, page: Page, data: bytes | None) -> bool:
        if data is None or len(data) != page.nbytes:
            return False
        first = page.segments[0]
        first[:] = data[: first.nbytes]
        return True


@caught_by("KV-901:an_instance_claims_no_more_than_its_class")
class LiftsItsLimit(DictStore):
    """The class has a limit for pages, but an instance has none."""

    capabilities = replace(DictStore.capabilities, max_page_nbytes=1 << 20)

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        vars(self)["capabilities"] = replace(self.capabilities, max_page_nbytes=None)


@caught_by("KV-901:claims_stay_the_same")
class ChangesItsMind(DictStore):
    """The store claims less once it was used."""

    def _put(self, key: Hashable, stored: Stored) -> None:
        super()._put(key, stored)
        if len(self._pages) > 1:
            self.narrow(max_batch=64)


@caught_by("KV-901:claims_are_a_record_of_sound_values")
class HalfACall(DictStore):
    """The store claims a parallelism of 2.5, which is not a number of threads."""

    capabilities = replace(DictStore.capabilities, parallelism=cast("int", 2.5))


@caught_by("KV-901:a_page_that_was_revoked_is_neither_read_nor_stored")
class IgnoresRevocables(DictStore):
    """The store claims to be revocable, but ignores the revocables of pages."""

    capabilities = replace(DictStore.capabilities, revocable=True)

    def _taken(self, page: Page) -> bytes:
        return page.tobytes()

    def _filled(self, page: Page, data: bytes | None) -> bool:
        if data is None or len(data) != page.nbytes:
            return False
        page.copy_from(data)
        return True


@caught_by(
    "KV-901:a_get_writes_nothing_after_the_revoke", "KV-901:a_set_reads_nothing_after_the_revoke"
)
class LooksOnceAtRevocables(IgnoresRevocables):
    """The store claims to be revocable, but looks at a page's revocable only before it begins."""

    def _taken(self, page: Page) -> bytes:
        return super()._taken(page) if _is_accessible(page) else b""

    def _filled(self, page: Page, data: bytes | None) -> bool:
        return _is_accessible(page) and super()._filled(page, data)


def _is_accessible(page: Page) -> bool:
    if page.revocable is None:
        return True
    if not page.revocable.enter():
        return False
    page.revocable.leave()
    return True


# --- KV-902: what is not claimed is half done ------------------------------------------------------


class _Unlisted(DictStore):
    """A store that does not claim to be enumerable. A subclass decides whether it refuses to list."""

    capabilities = replace(DictStore.capabilities, enumerable=False)


@caught_by(
    "KV-902:a_store_that_does_not_list_says_so",
    "KV-902:a_store_that_does_not_list_clears_all_or_nothing",
)
class NotImplementedListing(_Unlisted):
    """The store is not enumerable, and raises NotImplementedError instead of UnsupportedOperation."""

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        raise NotImplementedError(f"{space.id} can't be listed")


# --- KV-903: limits ---------------------------------------------------------------------------------


class _Limited(DictStore):
    """A store with small limits."""

    capabilities = replace(
        DictStore.capabilities, max_batch=_MAX_BATCH, max_page_nbytes=_MAX_PAGE_NBYTES
    )


class _Unchecked(_Limited):
    """A store that declares small limits and does not check them in its calls."""

    def _begin(
        self,
        space: KeySpace,  # noqa: ARG002 - nothing is looked at
        hashes: Sequence[str],  # noqa: ARG002
        pages: Sequence[Page] | None = None,  # noqa: ARG002
    ) -> None:
        self.ensure_open()


@caught_by("KV-903:a_page_one_byte_too_large_is_refused")
class LimitWithoutFrame(_Unchecked):
    """The store compares the limit with the payload alone, although the frame is stored too."""

    def open_space(self, space: KeySpace) -> None:
        if space.page_nbytes > _MAX_PAGE_NBYTES:
            super().open_space(space)
        self.ensure_open()
        self._remember(space)


@caught_by("KV-903:a_page_of_the_largest_size_is_taken")
class LimitOffByOne(_Unchecked):
    """The store refuses key spaces whose pages have exactly the largest size."""

    def open_space(self, space: KeySpace) -> None:
        super().open_space(replace(space, page_nbytes=space.page_nbytes + 1))
        self._remember(space)


@caught_by("KV-903:a_batch_of_the_limit_is_taken")
class FullBatchRefused(_Limited):
    """The last page of a full batch is not stored."""

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        most = _MAX_BATCH - 1
        done = super()._store(space, hashes[:most], contents[:most])
        return done + [False] * len(hashes[most:])


@caught_by("KV-903:a_set_one_past_the_limit_is_whole_or_refused")
class LongSetCut(_Unchecked):
    """If a set is too long, its first pages are stored, and all are reported as stored."""

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        done = super()._store(space, hashes[:_MAX_BATCH], contents[:_MAX_BATCH])
        return done + [True] * len(hashes[_MAX_BATCH:])


@caught_by("KV-903:a_lookup_one_past_the_limit_is_whole_or_refused")
class LongLookupCut(_Unchecked):
    """If a lookup is too long, its first pages are answered, and the rest are misses."""

    def _present(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        found = super()._present(space, hashes[:_MAX_BATCH])
        return found + [False] * len(hashes[_MAX_BATCH:])


@caught_by("KV-903:a_delete_one_past_the_limit_is_whole_or_refused")
class LongDeleteCut(_Unchecked):
    """If a delete is too long, its first pages are removed before it is refused."""

    def _remove(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        removed = super()._remove(space, hashes[:_MAX_BATCH])
        super(_Unchecked, self)._begin(space, hashes)
        return removed


class _FewBytes(FewBytes):
    """A store of files that declares a limit for the bytes of a batch, and does not check it."""

    def _begin(
        self,
        space: KeySpace,  # noqa: ARG002 - nothing is looked at
        hashes: Sequence[str],  # noqa: ARG002
        pages: Sequence[Page] | None = None,  # noqa: ARG002
    ) -> None:
        self.ensure_open()

    def _fitting(self, space: KeySpace) -> int:
        return self.capabilities.fitting_pages(_MAX_BATCH, space.stored_nbytes)


@caught_by("KV-903:a_batch_of_the_most_bytes_is_taken")
class FullBytesRefused(_FewBytes):
    """The last page of a batch that has exactly the most bytes is not stored."""

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        most = max(1, (32 << 10) - 1) // space.stored_nbytes
        done = super()._store(space, hashes[:most], contents[:most])
        return done + [False] * len(hashes[most:])


@caught_by("KV-903:a_batch_of_more_bytes_is_whole_or_refused")
class ManyBytesCut(_FewBytes):
    """If a batch has too many bytes, its first pages are stored, and all are reported as stored."""

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        most = self._fitting(space)
        done = super()._store(space, hashes[:most], contents[:most])
        return done + [True] * len(hashes[most:])


@caught_by("KV-903:one_page_may_have_more_bytes_than_a_batch")
class LargePageRefused(_FewBytes):
    """A page that is larger than the limit of a batch is refused, although nobody can split it."""

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        if space.stored_nbytes > 32 << 10:
            return [False] * len(hashes)
        return super()._store(space, hashes, contents)


@caught_by("KV-903:a_small_store_takes_a_page_of_its_largest_size")
class RefusesTheLastByte(EvictingStore):
    """A page that fills the store exactly is refused, although it is of the size that is declared."""

    def _make_room(self, key: Hashable, nbytes: int) -> bool:
        return nbytes < self._capacity_nbytes and super()._make_room(key, nbytes)
