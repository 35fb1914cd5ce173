"""Wrong stores: clears and listings that end early in silence, errors that stick, pinned room."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.selftest.mutants import caught_by
from hicache_conformance.selftest.references.dict_store import DictSettings, DictStore
from hicache_conformance.selftest.references.file_a_page import Shelf
from hicache_conformance.selftest.references.wire import WireStore
from hicache_storage.errors import HiCacheError, StorageUnavailable

if TYPE_CHECKING:
    import re
    from collections.abc import Hashable, Iterator, Sequence
    from pathlib import Path

    from hicache_conformance.selftest.references.wire_settings import WireSettings
    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import PageInfo

_STEP = 64


# --- KV-103 ------------------------------------------------------------------------------------------


@caught_by("KV-103", check="a_clear_that_is_cut_short_says_so")
class ClearStopsInSilence(WireStore):
    """A clear whose connection breaks ends there, and returns what it has removed until then."""

    def clear(self, space: KeySpace) -> int:
        hashes = [info.page_hash for info in self.scan(space)]
        removed = 0
        for start in range(0, len(hashes), _STEP):
            try:
                removed += sum(self.batch_delete(space, hashes[start : start + _STEP]))
            except StorageUnavailable:
                break
        return removed


@caught_by("KV-103", check="a_clear_without_descriptors_says_so")
class ClearsWhatItCanList(Shelf):
    """A directory that can't be listed is taken for an empty one, and clear returns 0."""

    def _entries(self, folder: Path, name: re.Pattern[str]) -> Iterator[Path]:
        try:
            return super()._entries(folder, name)
        except StorageUnavailable:
            return iter(())


@caught_by("KV-103", check="clear_removes_every_page")
class ClearCountsItsLastBatch(DictStore):
    """Clear goes in batches of 64 and returns the count of the last one."""

    def clear(self, space: KeySpace) -> int:
        hashes = [info.page_hash for info in self.scan(space)]
        removed = 0
        for start in range(0, len(hashes), _STEP):
            removed = sum(self.batch_delete(space, hashes[start : start + _STEP]))
        return removed


@caught_by("KV-103", check="clear_gives_its_room_back")
class ClearFreesNoRoom(DictStore):
    """Clear removes the pages, and their bytes are counted for ever."""

    def clear(self, space: KeySpace) -> int:
        nbytes = self._nbytes
        removed = super().clear(space)
        self._nbytes = nbytes
        return removed


# --- KV-104 ------------------------------------------------------------------------------------------


@caught_by("KV-104", check="a_paused_listing_pins_no_room")
class ListingsPinRoom(DictStore):
    """A scan is one read transaction: what is deleted meanwhile takes room until it has ended."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        self._listings = 0
        self._pinned_nbytes = 0

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        self.ensure_open()
        return self._pinning(self._names(space))

    def _pinning(self, infos: list[PageInfo]) -> Iterator[PageInfo]:
        self._listings += 1
        try:
            yield from infos
        finally:
            self._listings -= 1
            self._pinned_nbytes = self._pinned_nbytes if self._listings else 0

    def _drop(self, key: Hashable) -> None:
        before = self._nbytes
        super()._drop(key)
        if self._listings:
            self._pinned_nbytes += before - self._nbytes

    def _make_room(self, key: Hashable, nbytes: int) -> bool:
        return super()._make_room(key, nbytes + self._pinned_nbytes)


# --- KV-304 ------------------------------------------------------------------------------------------


@caught_by("KV-304", check="a_listing_that_never_came_is_no_empty_one")
class ListsNothingWhenLate(WireStore):
    """A listing that the server does not answer is an empty one."""

    def _names(self, space: KeySpace) -> list[PageInfo]:
        try:
            return super()._names(space)
        except HiCacheError:
            return []


@caught_by("KV-304", check="a_listing_that_never_came_is_no_empty_one")
class KnowsNoSpacesWhenLate(WireStore):
    """A server that does not say which key spaces there are has none."""

    def _known_spaces(self) -> list[KeySpace]:
        try:
            return super()._known_spaces()
        except HiCacheError:
            return []


@caught_by("KV-304", check="a_silent_server_is_a_timeout")
class RefusesWhenLate(WireStore):
    """A set that the server does not answer is False, and may show later."""

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        try:
            return super()._store(space, hashes, contents)
        except HiCacheError:
            return [False] * len(hashes)


# --- KV-305 ------------------------------------------------------------------------------------------


@caught_by("KV-305", check="a_key_space_that_was_opened_in_vain_works_later")
class RemembersAFailedOpen(WireStore):
    """A key space whose first opening failed is refused for ever, with the error of that time."""

    def __init__(self, settings: WireSettings) -> None:
        super().__init__(settings)
        self._failed: dict[str, HiCacheError] = {}

    def _remember(self, space: KeySpace) -> bool:
        if space.id in self._failed:
            raise self._failed[space.id]
        try:
            return super()._remember(space)
        except HiCacheError as error:
            self._failed[space.id] = error
            raise
