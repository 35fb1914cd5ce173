"""Wrong stores that show deleted or refused pages, or wrong times; KV-006, KV-007, KV-010."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from hicache_conformance.selftest.mutants import caught_by, own
from hicache_conformance.selftest.references.dict_store import DictStore, Stored
from hicache_conformance.selftest.references.evicting import EvictingStore
from hicache_conformance.selftest.references.file_a_page import Shelf
from hicache_storage.errors import StorageClosed
from hicache_storage.storage import PageTimes, StorageStats

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from hicache_storage.keys import KeySpace


_SOON_S = 0.1


@caught_by("KV-007:a_page_whose_file_stays_is_not_deleted", says="was deleted")
class TakesFilesForRemoved(Shelf):
    """A delete returns True, also if the file system did not remove the file."""

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        super()._removed(space, page_hash)
        return True


@caught_by("KV-007:deleting_an_absent_page_is_true", says="batch_delete is False")
class AbsentIsFalse(DictStore):
    """Deleting an absent page returns False."""

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        return self._has(space, page_hash) and super()._removed(space, page_hash)


@caught_by("KV-007:a_deleted_page_can_be_set_again", says="set and deleted 1 times before")
class NeverAgain(DictStore):
    """The store remembers a page as deleted; setting it again returns True and changes nothing."""

    _deleted: set[Hashable] = own(set)

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        self._deleted.add(self._key(space, page_hash))
        return super()._removed(space, page_hash)

    def _put(self, key: Hashable, stored: Stored) -> None:
        if key not in self._deleted:
            super()._put(key, stored)


@caught_by("KV-007:deleting_spares_hashes_that_are_alike", says="whose hash is similar")
class DeletesByPattern(DictStore):
    """A delete removes every page whose hash begins with the same 32 digits."""

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        for info in self._names(space):
            if info.page_hash.startswith(page_hash[:32]):
                super()._removed(space, info.page_hash)
        return True


@caught_by("KV-007:a_deleted_page_is_gone", says="batch_get is True for a page that was del")
class ServesWhatItRead(DictStore):
    """A get caches its pages, and a delete does not reach the cache."""

    _cache: dict[Hashable, bytes] = own(dict)

    def _contents(self, space: KeySpace, hashes: Sequence[str]) -> list[bytes | None]:
        keys = [self._key(space, page_hash) for page_hash in hashes]
        for key, data in zip(keys, super()._contents(space, hashes), strict=True):
            if data is not None:
                self._cache[key] = data
        return [self._cache.get(key) for key in keys]


@caught_by("KV-007:a_page_with_the_same_bytes_stays", says="with the same bytes")
class CountsNoReferences(DictStore):
    """Equal pages are stored once, and deleting one of them deletes the bytes of all."""

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        data = self._read(space, page_hash)
        for info in self._names(space):
            if data is not None and self._read(space, info.page_hash) == data:
                super()._removed(space, info.page_hash)
        return super()._removed(space, page_hash)


@caught_by("KV-007:another_handle_sees_no_deleted_page", says="through an earlier handle")
class DeletesInMemory(Shelf):
    """A delete changes only memory, so the page is back when the store is opened again."""

    _hidden: set[tuple[KeySpace, str]] = own(set)

    def _is_hidden(self, space: KeySpace, page_hash: str) -> bool:
        return (space, page_hash) in self._hidden

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        return not self._is_hidden(space, page_hash) and super()._has(space, page_hash)

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        return None if self._is_hidden(space, page_hash) else super()._read(space, page_hash)

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        self._hidden.discard((space, page_hash))
        return super()._write_whole(space, page_hash, data)

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        self._hidden.add((space, page_hash))
        return True


@caught_by("KV-007:a_delete_through_another_handle_counts", says="through another handle")
class CachesForItself(Shelf):
    """Each handle caches what it has read, and does not see what others delete."""

    _kept: dict[tuple[KeySpace, str], bytes] = own(dict)

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        data = self._kept.get((space, page_hash)) or super()._read(space, page_hash)
        if data is not None:
            self._kept[space, page_hash] = data
        return data

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        self._kept[space, page_hash] = data
        return super()._write_whole(space, page_hash, data)

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        self._kept.pop((space, page_hash), None)
        return super()._removed(space, page_hash)


@caught_by("KV-007:what_is_done_later_brings_no_deleted_page_back", says="was deleted")
class RebuildsItsIndex(DictStore):
    """Opening a key space restores what was written, without the deletes since."""

    _log: list[Stored] = own(list)

    def _put(self, key: Hashable, stored: Stored) -> None:
        self._log.append(stored)
        super()._put(key, stored)

    def open_space(self, space: KeySpace) -> None:
        super().open_space(space)
        with self._lock:
            for stored in [one for one in self._log if one.space == space]:
                super()._put(self._key(space, stored.page_hash), stored)


@caught_by("KV-007:a_page_deleted_twice_leaves_room_for_one", says="bytes of the page")
class FreesSlotsTwice(DictStore):
    """Pages lie in numbered slots, and a page that is deleted twice frees its slot for two others."""

    _slots: list[bytes] = own(list)
    _free: list[int] = own(list)
    _slot_of: dict[Hashable, int] = own(dict)

    def _put(self, key: Hashable, stored: Stored) -> None:
        if key not in self._pages:
            self._slots.append(b"")
            self._slot_of[key] = self._free.pop() if self._free else len(self._slots) - 1
        self._slots[self._slot_of[key]] = stored.data
        super()._put(key, stored)

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        if super()._read(space, page_hash) is None:
            return None
        return self._slots[self._slot_of[self._key(space, page_hash)]]

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        slot = self._slot_of.get(self._key(space, page_hash))
        if slot is not None:
            self._free.append(slot)
        return super()._removed(space, page_hash)


@caught_by("KV-007:deleting_many_spares_the_rest", says="pages were deleted")
class CompactsTooMuch(DictStore):
    """When most pages were deleted the store is compacted, and every eighth page is lost."""

    _gone = 0

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        super()._removed(space, page_hash)
        with self._lock:
            self._gone += 1
            if self._gone > max(20, len(self._pages)):
                self._gone = 0
                for key in list(self._pages)[::8]:
                    self._drop(key)
        return True


class _Late(DictStore):
    """A store that repeats some calls a moment after they were made. A subclass chooses which."""

    def _again(self, call: Callable[[], object]) -> None:
        def run() -> None:
            if not self._closed:
                with suppress(StorageClosed):
                    call()

        timer = threading.Timer(_SOON_S, run)
        timer.daemon = True
        timer.start()


@caught_by("KV-007:sets_and_deletes_take_effect_in_order", says="right after it was")
class WritesBehind(_Late):
    """A page shows at once and is written again later, even if it was deleted meanwhile."""

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        self._again(partial(super()._write_whole, space, page_hash, data))
        return super()._write_whole(space, page_hash, data)


# --- times of pages ------------------------------------------------------------------------------


@caught_by("KV-010:times_follow_the_hashes")
class TimesMoveUp(EvictingStore):
    """The times of present pages come first, and those of absent pages after them."""

    def page_times(self, space: KeySpace, hashes: Sequence[str]) -> list[PageTimes]:
        return sorted(super().page_times(space, hashes), key=lambda one: one == PageTimes())


@caught_by("KV-010:a_page_just_set_was_written_just_now")
class TimesInKiloseconds(EvictingStore):
    """The time of the last use is divided by 1,000, as if it were milliseconds."""

    def _times(self, key: Hashable) -> PageTimes:
        used_s = super()._times(key).used_at_s
        return PageTimes(used_at_s=None if used_s is None else used_s / 1000)


@caught_by("KV-010:times_are_the_same_in_every_time_zone", says="depends on the time zone")
class TimesInLocalTime(EvictingStore):
    """A page is written at the local time, which is taken for UTC when it is read."""

    def _times(self, key: Hashable) -> PageTimes:
        written_s = super()._times(key).written_at_s
        if written_s is None:
            return PageTimes()
        local = datetime.fromtimestamp(written_s).replace(tzinfo=UTC)  # noqa: DTZ006
        return PageTimes(written_at_s=local.timestamp())


@caught_by("KV-010:setting_a_present_page_is_a_use", says="does not move the time")
class KeepsTheFirstTimes(EvictingStore):
    """A set of a present page leaves the times of the page as they were."""

    def _put(self, key: Hashable, stored: Stored) -> None:
        before = self._used_s.get(key) if key in self._pages else None
        super()._put(key, stored)
        self._used_s[key] = before or self._used_s[key]


@caught_by("KV-010:a_get_is_a_use_and_asking_is_none", says="of each")
class OnlyTheFirstIsUsed(EvictingStore):
    """A get of several pages moves the time of the last use of the first one only."""

    def _contents(self, space: KeySpace, hashes: Sequence[str]) -> list[bytes | None]:
        before = dict(self._used_s)
        found = super()._contents(space, hashes)
        for key in (self._key(space, page_hash) for page_hash in hashes[1:]):
            if key in before:
                self._used_s[key] = before[key]
        return found


@caught_by("KV-010:a_get_is_a_use_and_asking_is_none")
class GetsAreNoUse(EvictingStore):
    """Gets don't count: the last use of a page is the time when it was written."""

    def _times(self, key: Hashable) -> PageTimes:
        written_s = super()._times(key).written_at_s
        return PageTimes(written_at_s=written_s, used_at_s=written_s)


@caught_by("KV-010:a_get_is_a_use_and_asking_is_none")
class AskingIsAUse(EvictingStore):
    """Asking for the times of a page counts as a use of it."""

    def _times(self, key: Hashable) -> PageTimes:
        times = super()._times(key)
        self._used_s[key] = time.time()
        return times


# --- refused pages that show ---------------------------------------------------------------------


class _Refusing(DictStore):
    """A store that calls its subclass for each page that it refuses."""

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        taken = super()._write_whole(space, page_hash, data)
        if not taken:
            self._refused(Stored(space, page_hash, data))
        return taken

    def _refused(self, stored: Stored) -> None:
        raise NotImplementedError


@caught_by("KV-006:a_page_that_has_no_room_never_shows", says="batch_set returned False")
class GivesUpBeforeItsWriter(_Refusing):
    """A set gives up and returns False, but the thread that writes goes on."""

    def _refused(self, stored: Stored) -> None:
        timer = threading.Timer(_SOON_S, self._written, [stored])
        timer.daemon = True
        timer.start()

    def _written(self, stored: Stored) -> None:
        with self._lock:
            if not self._closed:
                self._put(self._key(stored.space, stored.page_hash), stored)


@caught_by("KV-006:bytes_that_have_no_room_never_show", says="version 1")
class RefusesWhatItReplaced(_Refusing):
    """If old and new bytes of a page don't fit, a set returns False, but stores the new bytes."""

    def _make_room(self, key: Hashable, nbytes: int) -> bool:
        old = self._pages.get(key)
        return super()._make_room(key, nbytes + (len(old.data) if old else 0))

    def _refused(self, stored: Stored) -> None:
        key = self._key(stored.space, stored.page_hash)
        with self._lock:
            if key in self._pages:
                self._put(key, stored)


class _Remembering(Shelf):
    """A store that remembers the pages whose files could not be written, for its subclass."""

    _unwritten: dict[tuple[KeySpace, str], bytes] = own(dict)

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        written = super()._write_whole(space, page_hash, data)
        if not written:
            self._unwritten[space, page_hash] = data
        return written


@caught_by("KV-006:a_page_that_the_file_system_refused_never_shows", says="shows once")
class KeepsWhatFilesRefused(_Remembering):
    """If a page's file can't be written, its set returns False, but the page stays in a memory cache."""

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        return super()._read(space, page_hash) or self._unwritten.get((space, page_hash))


_EVERY = 5


class _Counting(DictStore):
    """A store that counts the pages that are offered to it."""

    _offered = 0

    def _is_struck(self) -> bool:
        self._offered += 1
        return self._offered % _EVERY == 0


@caught_by("KV-009:an_empty_store_refuses_no_page")
class RefusesEveryFifth(_Counting):
    """Every fifth page is refused for no reason."""

    def _make_room(self, key: Hashable, nbytes: int) -> bool:
        return not self._is_struck() and super()._make_room(key, nbytes)


@caught_by("KV-009:what_is_refused_is_counted")
class RefusesInSilence(DictStore):
    """A page that has no room is refused, but no counter shows that."""

    def stats(self) -> StorageStats:
        stats = super().stats()
        return StorageStats(
            pages=stats.pages, nbytes=stats.nbytes, capacity_nbytes=stats.capacity_nbytes
        )
