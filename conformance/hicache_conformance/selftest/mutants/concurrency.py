"""Wrong stores that fail with several threads, several processes or slow pages."""

from __future__ import annotations

import abc
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from hicache_conformance.selftest.mutants import caught_by, own
from hicache_conformance.selftest.references.dict_store import DictStore, Stored
from hicache_conformance.selftest.references.evicting import EvictingStore
from hicache_conformance.selftest.references.file_a_page import Shelf
from hicache_conformance.selftest.references.streaming import StreamingShelf
from hicache_conformance.selftest.references.wire import WireStore
from hicache_storage.storage import PageInfo

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence
    from pathlib import Path

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page

_BEHIND_S = 0.02


# --- threads ---------------------------------------------------------------------------------------


class _LivePages(DictStore):
    """A get copies a page directly from the memory that stores it."""

    def _put(self, key: Hashable, stored: Stored) -> None:
        super()._put(key, stored._replace(data=self._kept(key, stored.data)))

    @abc.abstractmethod
    def _kept(self, key: Hashable, data: bytes) -> bytes:
        """Return the memory that holds the bytes of a page."""


def _poured(data: bytes, room: Any) -> bytes:
    """Copy `data` into `room` and return `room`, which may change later."""
    memoryview(room)[:] = data
    return cast("bytes", room)


@caught_by("KV-501:a_set_while_the_page_is_got_leaves_the_get_whole")
class OverwritesWhatIsRead(_LivePages):
    """A set overwrites a page in the memory from which others are copying it."""

    def _kept(self, key: Hashable, data: bytes) -> bytes:
        stored = self._pages.get(key)
        room = bytearray(len(data)) if stored is None else stored.data
        return _poured(data, room)


@caught_by("KV-501:calls_about_different_pages_do_not_meet")
class OneBufferToRead(DictStore):
    """All gets use one buffer, so two gets at once return the same page, or a mixture."""

    _buffer: bytearray = own(bytearray)

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self._begin(space, hashes, pages)
        return self._answer([self._got(space, *pair) for pair in zip(hashes, pages, strict=True)])

    def _got(self, space: KeySpace, page_hash: str, page: Page) -> bool:
        data = self._read(space, page_hash)
        if data is None or len(data) != page.nbytes:
            return False
        self._buffer[: len(data)] = data
        return self._filled(page, cast("bytes", memoryview(self._buffer)[: len(data)]))


@caught_by(
    "KV-501:two_sets_of_one_page_leave_one_of_them",
    "KV-502:a_set_half_way_in_another_process_mixes_with_nothing",
)
class OneTempName(StreamingShelf):
    """All writers of a page use the same name for its temporary file, so two of them mix in it."""

    def _temp_path(self, path: Path) -> Path:
        return path.with_name(f"{path.name}.tmp")


@caught_by("KV-501:threads_with_pages_of_their_own_keep_them")
class LosesUpdates(DictStore):
    """The dict is copied, changed and put back without a lock, so simultaneous changes get lost."""

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        pages = dict(self._pages)
        pages[self._key(space, page_hash)] = Stored(space, page_hash, data)
        self._spaces[space] = None
        self._pages = pages
        return True


@caught_by("KV-501:all_methods_at_once_raise_nothing")
class ListsTheLiveDict(DictStore):
    """A listing walks through the dict while others change it."""

    def _names(self, space: KeySpace) -> list[PageInfo]:
        pages = self._pages.values()
        return [PageInfo(one.page_hash, len(one.data)) for one in pages if one.space == space]


@caught_by("KV-501:the_answers_about_a_page_fit_one_order")
class CachesPerThread(DictStore):
    """Each thread caches what it has read, so it still finds a page that another thread has deleted."""

    _near: threading.local = own(threading.local)

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        near = vars(self._near).setdefault("pages", {})
        key = self._key(space, page_hash)
        if key not in near:
            data = super()._read(space, page_hash)
            if data is None:
                return None
            near[key] = data
        found: bytes = near[key]
        return found

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        vars(self._near).get("pages", {}).pop(self._key(space, page_hash), None)
        return super()._removed(space, page_hash)


@caught_by(
    "KV-501:a_get_while_the_page_is_set_is_a_miss_or_whole",
    "KV-501:a_delete_while_the_page_is_set_leaves_all_or_nothing",
)
class StoresSoon(DictStore):
    """A set returns True as soon as a thread has been asked to store the page."""

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        later = partial(super()._write_whole, space, page_hash, data)
        threading.Timer(_BEHIND_S, self._unless_closed, (later,)).start()
        return True

    def _unless_closed(self, later: partial[bool]) -> None:
        if not self._closed:
            later()


@caught_by("KV-501:listings_and_clear_while_a_page_is_set_show_no_half_page")
class ListsUnfinishedSets(DictStore):
    """A listing includes the pages of sets that are still running, without bytes."""

    _unfinished: set[tuple[KeySpace, str]] = own(set)

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        begun = {(space, page_hash) for page_hash in hashes}
        self._unfinished |= begun
        try:
            return super().batch_set(space, hashes, pages)
        finally:
            self._unfinished -= begun

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        unfinished = [PageInfo(name, 0) for owner, name in self._unfinished if owner == space]
        return iter([*super().scan(space), *unfinished])


# --- pages that go -----------------------------------------------------------------------------------


@caught_by("KV-503:a_page_deleted_while_its_batch_is_got_is_a_miss")
class LooksBeforeItReads(Shelf):
    """A get asks which files are there, and then opens them as if none could disappear."""

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self._begin(space, hashes, pages)
        present = self._present(space, hashes)
        return [
            there and self._filled(page, self._path(space, page_hash).read_bytes())
            for there, page_hash, page in zip(present, hashes, pages, strict=True)
        ]


@caught_by("KV-503:pages_that_come_and_go_are_whole_or_misses")
class KeyErrorInTheGap(DictStore):
    """A get checks that a page is there, and a moment later relies on that without another check."""

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        if not self._is_known(space, page_hash):
            return None
        return self._pages[self._key(space, page_hash)].data

    def _is_known(self, space: KeySpace, page_hash: str) -> bool:
        return self._key(space, page_hash) in self._pages


@caught_by("KV-503:a_page_deleted_between_exists_and_get_is_a_miss")
class TrustsItsLookup(Shelf):
    """After `exists` found a page, a get raises FileNotFoundError if the page has gone meanwhile."""

    _found: set[tuple[str, str]] = own(set)

    def _present(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        present = super()._present(space, hashes)
        pairs = zip(hashes, present, strict=True)
        self._found.update((space.id, page_hash) for page_hash, there in pairs if there)
        return present

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        if (space.id, page_hash) in self._found:
            return self._path(space, page_hash).read_bytes()
        return super()._read(space, page_hash)


class _Recycling(_LivePages):
    """A store that uses the memory of pages that have gone for the next pages."""

    _free: list[bytes] = own(list)

    def _kept(self, key: Hashable, data: bytes) -> bytes:  # noqa: ARG002 - any room will do
        fitting = [room for room in self._free if len(room) == len(data)]
        if not fitting:
            return _poured(data, bytearray(len(data)))
        self._free.remove(fitting[0])
        return _poured(data, fitting[0])


@caught_by("KV-503:a_page_deleted_while_it_is_got_is_whole_or_a_miss")
class ReusesDeletedRoom(_Recycling):
    """The next page uses a deleted page's memory while somebody is still copying the deleted one."""

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        stored = self._pages.get(self._key(space, page_hash))
        if stored is not None:
            self._free.append(stored.data)
        return super()._removed(space, page_hash)


@caught_by(
    "KV-503:a_page_evicted_while_it_is_got_is_whole_or_a_miss",
    "KV-503:pages_evicted_under_readers_are_whole_or_misses",
)
class ReusesEvictedRoom(EvictingStore):
    """The next page uses an evicted page's memory while somebody is still copying the evicted one."""

    _free: list[bytes] = own(list)

    def _evict(self) -> None:
        self._free.append(next(iter(self._pages.values())).data)
        super()._evict()

    def _put(self, key: Hashable, stored: Stored) -> None:
        fits = bool(self._free) and len(self._free[-1]) == len(stored.data)
        room = self._free.pop() if fits else bytearray(len(stored.data))
        super()._put(key, stored._replace(data=_poured(stored.data, room)))


# --- slow pages --------------------------------------------------------------------------------------


@caught_by("KV-504:calls_proceed_while_others_are_held")
class OneLockForAll(Shelf):
    """A call holds one lock from start to end, so every other call waits."""

    _whole_call: threading.RLock = own(threading.RLock)

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        with self._whole_call:
            return super().batch_get(space, hashes, pages)

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        with self._whole_call:
            return super().batch_set(space, hashes, pages)


@caught_by("KV-504:a_call_proceeds_while_another_gets_no_answer")
class OneConnection(WireStore):
    """The store declares four calls at once, but has one connection."""

    def _has_turn(self) -> bool:
        return self._closed or not self._busy


# --- processes -----------------------------------------------------------------------------------------


@caught_by("KV-502:a_page_set_elsewhere_is_seen_at_once")
class RemembersOthersMisses(Shelf):
    """A handle that has missed a page still misses it until the handle sets the page itself."""

    _missing: set[Path] = own(set)

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        path = self._path(space, page_hash)
        if path in self._missing:
            return None
        data = super()._read(space, page_hash)
        if data is None:
            self._missing.add(path)
        return data

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        self._missing.discard(self._path(space, page_hash))
        return super()._write_whole(space, page_hash, data)


@caught_by("KV-502:processes_that_write_one_page_leave_one_whole_page")
class RemembersOthersHits(Shelf):
    """A handle caches pages that it has read, and serves them after another process has deleted them."""

    _near: dict[Path, bytes] = own(dict)

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        path = self._path(space, page_hash)
        data = self._near.get(path) or super()._read(space, page_hash)
        if data is not None:
            self._near[path] = data
        return data

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        self._near.pop(self._path(space, page_hash), None)
        return super()._write_whole(space, page_hash, data)

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        self._near.pop(self._path(space, page_hash), None)
        return super()._removed(space, page_hash)


@caught_by("KV-502:a_page_deleted_elsewhere_is_gone_at_once")
class RemembersPresence(Shelf):
    """A handle remembers that a page exists, even after another process has deleted it."""

    _present_paths: set[Path] = own(set)

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        path = self._path(space, page_hash)
        if path not in self._present_paths and super()._has(space, page_hash):
            self._present_paths.add(path)
        return path in self._present_paths

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        self._present_paths.add(self._path(space, page_hash))
        return super()._write_whole(space, page_hash, data)

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        self._present_paths.discard(self._path(space, page_hash))
        return super()._removed(space, page_hash)


@caught_by("KV-502:listings_show_what_others_set")
class ListsItsOwn(Shelf):
    """A handle lists only key spaces that it has opened itself."""

    _opened_spaces: dict[KeySpace, None] = own(dict)

    def _remember(self, space: KeySpace) -> bool:
        self._opened_spaces[space] = None
        return super()._remember(space)

    def _known_spaces(self) -> list[KeySpace]:
        found = super()._known_spaces()
        return [space for space in found if space in self._opened_spaces]
