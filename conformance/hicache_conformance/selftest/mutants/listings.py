"""Stores that list what is not there, or not all that is, or that can't be changed meanwhile."""

from __future__ import annotations

import re
import threading
from itertools import chain
from typing import TYPE_CHECKING

from hicache_conformance.selftest.mutants import caught_by, own
from hicache_conformance.selftest.references.dict_store import DictStore
from hicache_conformance.selftest.references.file_a_page import Shelf
from hicache_storage.storage import PageInfo

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from hicache_conformance.selftest.references.dict_store import Stored
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page

_LISTED_AT_ONCE = 1000


@caught_by("KV-104:long_listings_are_complete")
class ListsAThousand(DictStore):
    """A listing ends after its first thousand pages: nobody asks for the next part."""

    def _names(self, space: KeySpace) -> list[PageInfo]:
        return super()._names(space)[:_LISTED_AT_ONCE]


@caught_by("KV-104:a_page_that_is_being_set_is_listed_as_itself_or_not")
class ListsTemporaryFiles(Shelf):
    """Files that are being written, piece by piece, are listed as pages."""

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        for page_hash, page in zip(hashes, pages, strict=True):
            path = self._path(space, page_hash)
            temp = self._temp_path(path)
            with temp.open("wb") as file:
                file.writelines(page.segments)
            self._publish(temp, path)
        return [True] * len(hashes)

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        temps = self._entries(self._folder(space), re.compile(r"\.tmp-.*"))
        found = [PageInfo(temp.name, space.stored_nbytes) for temp in temps]
        return chain(super().scan(space), found)


@caught_by("KV-104:scan_lists_every_page_once_with_its_size")
class ListsPayloadSizes(DictStore):
    """The size that is listed is the page's without its frame."""

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        return (PageInfo(info.page_hash, space.page_nbytes) for info in super().scan(space))


@caught_by("KV-104:scan_lists_hashes_of_every_length")
class ListsLongHashesOnly(DictStore):
    """Only names of 64 digits are taken for pages."""

    def _names(self, space: KeySpace) -> list[PageInfo]:
        return [info for info in super()._names(space) if len(info.page_hash) == 64]


@caught_by("KV-104:scan_follows_every_change")
class ListsEverySet(DictStore):
    """The index of a listing has an entry for every set: a page that was set twice is listed twice."""

    _log: list[Stored] = own(list)

    def _put(self, key: Hashable, stored: Stored) -> None:
        super()._put(key, stored)
        self._log.append(stored)

    def _names(self, space: KeySpace) -> list[PageInfo]:
        there = {info.page_hash for info in super()._names(space)}
        return [
            PageInfo(stored.page_hash, len(stored.data))
            for stored in self._log
            if stored.space == space and stored.page_hash in there
        ]


@caught_by("KV-104:ten_thousand_pages_are_listed_while_others_write")
class ScansTheLiveDict(DictStore):
    """A listing walks through the dict itself, which may not change meanwhile."""

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        for stored in self._pages.values():
            if stored.space == space:
                yield PageInfo(stored.page_hash, len(stored.data))


@caught_by(
    "KV-104:a_listing_bears_deletes_by_its_reader", "KV-104:a_listing_bears_changes_half_way"
)
class ScansByOffset(DictStore):
    """A listing asks for the next hundred by their number: deletes meanwhile move pages out of it."""

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        start = 0
        while part := self._names(space)[start : start + 100]:
            yield from part
            start += len(part)


@caught_by("KV-104:a_paused_listing_blocks_nobody")
class ScansUnderLock(DictStore):
    """A listing holds the lock from its first step to its last; its own thread may go on."""

    _lock = own(threading.RLock)  # type: ignore[assignment]  # it is as good as the other

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        with self._lock:
            for stored in list(self._pages.values()):
                if stored.space == space:
                    yield PageInfo(stored.page_hash, len(stored.data))


@caught_by("KV-104:two_listings_at_once_are_each_complete")
class ScansWithOneCursor(DictStore):
    """The store has one cursor: a listing that begins ends the one before."""

    _cursor: Iterator[PageInfo] = iter(())

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        self._cursor = iter(self._names(space))
        while (info := next(self._cursor, None)) is not None:
            yield info


# --- key spaces -------------------------------------------------------------------------------------


@caught_by("KV-104:listings_survive_closing")
class SpacesGoneWithTheLast(Shelf):
    """Closing removes what describes the key spaces, for others to write anew."""

    def close(self) -> None:
        for manifest in self._root.glob("*/manifest.json") if not self._closed else ():
            manifest.unlink()
        super().close()


@caught_by("KV-104:every_key_space_is_listed_once")
class SpacesAsOftenAsOpened(DictStore):
    """A key space is listed as often as it was opened."""

    _opened: list[KeySpace] = own(list)

    def open_space(self, space: KeySpace) -> None:
        super().open_space(space)
        self._opened.append(space)

    def _known_spaces(self) -> list[KeySpace]:
        return list(self._opened)


@caught_by("KV-104:many_key_spaces_are_listed")
class SpacesOfAPage(DictStore):
    """A listing of key spaces ends after its first hundred."""

    def _known_spaces(self) -> list[KeySpace]:
        return super()._known_spaces()[:100]


@caught_by("KV-104:a_cleared_key_space_is_listed_again")
class SpacesClearedForGood(DictStore):
    """A key space that was cleared is listed no more, whatever is set in it later."""

    _cleared: set[KeySpace] = own(set)

    def clear(self, space: KeySpace) -> int:
        self._cleared.add(space)
        return super().clear(space)

    def _known_spaces(self) -> list[KeySpace]:
        return [space for space in super()._known_spaces() if space not in self._cleared]


@caught_by("KV-104:key_spaces_are_listed_while_others_open")
class SpacesInTheLiveDict(DictStore):
    """A listing of key spaces walks through the dict itself, which may not change meanwhile."""

    def spaces(self) -> Iterator[KeySpace]:
        return iter(self._spaces)


@caught_by("KV-104:another_handle_lists_the_same")
class SpacesSetHere(Shelf):
    """A handle lists the pages that it has set itself."""

    _own: set[tuple[KeySpace, str]] = own(set)

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        self._own.add((space, page_hash))
        return super()._write_whole(space, page_hash, data)

    def _names(self, space: KeySpace) -> list[PageInfo]:
        return [info for info in super()._names(space) if (space, info.page_hash) in self._own]
