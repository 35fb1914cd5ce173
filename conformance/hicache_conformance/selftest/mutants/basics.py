"""Wrong stores: pages that are there and should not be, and the other way round; KV-001 to KV-005."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from hicache_conformance.selftest.mutants import caught_by, own
from hicache_conformance.selftest.references.dict_store import DictStore, Stored
from hicache_conformance.selftest.references.file_a_page import Shelf

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page


# --- KV-001 --------------------------------------------------------------------------------------


@caught_by(
    "KV-001:a_fresh_key_space_is_empty",
    "KV-001:a_new_key_space_takes_over_nothing",
    says="lists pages that are not there",
)
class AskingMakesPages(DictStore):
    """A get of a missing page leaves a page of zeros in its place (a defaultdict)."""

    def _contents(self, space: KeySpace, hashes: Sequence[str]) -> list[bytes | None]:
        found = super()._contents(space, hashes)
        for page_hash, data in zip(hashes, found, strict=True):
            if data is None:
                self._write_whole(space, page_hash, bytes(space.stored_nbytes))
        return found


@caught_by("KV-001:a_new_key_space_of_a_used_store_is_empty", says="another key space")
class HashesOfAllSpaces(DictStore):
    """Exists knows which hashes were set, and not in which key space."""

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        if super()._has(space, page_hash):
            return True
        with self._lock:
            return any(stored.page_hash == page_hash for stored in self._pages.values())


@caught_by("KV-001:looking_into_a_key_space_does_not_make_it")
class SpacesMadeByLooking(DictStore):
    """A key space of which a page was looked for is there from then on."""

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        self._remember(space)
        return super()._has(space, page_hash)


@caught_by("KV-001:asking_for_a_page_does_not_make_it", says="only asked for")
class DeletingListsPages(DictStore):
    """A delete of a page that was never there leaves an entry, which exists takes for a page."""

    _entries: set[Hashable] = own(set)

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        return self._key(space, page_hash) in self._entries or super()._has(space, page_hash)

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        if not super()._has(space, page_hash):
            self._entries.add(self._key(space, page_hash))
        return super()._removed(space, page_hash)


# --- KV-002 --------------------------------------------------------------------------------------


@caught_by("KV-002:what_was_set_is_there", says="batch_get is False for a page whose")
class LosesTheLastPage(DictStore):
    """The last page of a batch is not stored, and its verdict is True."""

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        kept = len(hashes) if len(hashes) == 1 else len(hashes) - 1
        stored = super()._store(space, hashes[:kept], contents[:kept])
        return stored + [True] * (len(hashes) - kept)


@caught_by("KV-002:many_pages_are_all_there", says="1100 pages were set in all")
class RemembersAThousand(DictStore):
    """The index has room for 1,000 pages; older ones go without a word."""

    def _put(self, key: Hashable, stored: Stored) -> None:
        super()._put(key, stored)
        if len(self._pages) > 1000:
            self._drop(next(iter(self._pages)))


class _RemembersMisses(DictStore):
    """Has a list of pages that were not found, which set does not change."""

    _absent: set[Hashable] = own(set)

    def _is_known_absent(self, space: KeySpace, page_hash: str, found: object) -> bool:
        key = self._key(space, page_hash)
        if not found:
            self._absent.add(key)
        return key in self._absent


@caught_by("KV-002:a_page_shows_after_misses", says="looked for in vain before")
class RemembersMisses(_RemembersMisses):
    """A page that exists did not find once stays missing for it: set does not update its memory."""

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        return not self._is_known_absent(space, page_hash, super()._has(space, page_hash))


@caught_by("KV-002:opening_a_key_space_again_keeps_its_pages", says="open_space was called")
class OpeningEmpties(DictStore):
    """Opening a key space makes it anew, and loses the pages that it had."""

    def open_space(self, space: KeySpace) -> None:
        super().open_space(space)
        for info in self._names(space):
            self._removed(space, info.page_hash)


@caught_by("KV-002:equal_key_spaces_are_one", says="equal key spaces")
class KeySpacesByIdentity(DictStore):
    """Pages are kept under the object that is the key space, not under what it says."""

    _objects: list[KeySpace] = own(list)

    def _key(self, space: KeySpace, page_hash: str) -> Hashable:
        if not any(one is space for one in self._objects):
            self._objects.append(space)
        return id(space), page_hash


@caught_by("KV-002:any_length_of_page_hash_works", says="its hash has 32 digits")
class Sha256Only(DictStore):
    """Page hashes are taken to have 64 digits; others are refused."""

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        return len(page_hash) == 64 and super()._write_whole(space, page_hash, data)


@caught_by("KV-002:pages_in_read_only_memory_can_be_stored", says="TypeError")
class NeedsWritableMemory(DictStore):
    """The address of a page to store is found in a way that needs memory which can be written to."""

    def _taken(self, page: Page) -> bytes:
        views = [(ctypes.c_char * part.nbytes).from_buffer(part) for part in page.segments]
        return b"".join(view.raw for view in views)


@caught_by("KV-002:a_page_stays_while_others_come_and_go", says="deleted meanwhile")
class NotFoundIsTheLast(DictStore):
    """Deleting an absent page removes the page that was set last (`find` gives -1)."""

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        key = self._key(space, page_hash)
        with self._lock:
            absent = key not in self._pages
            newest = next(reversed(self._pages), None)
            if absent and newest is not None and self._pages[newest].space == space:
                self._drop(newest)
        return super()._removed(space, page_hash)


# --- KV-004 --------------------------------------------------------------------------------------


@caught_by("KV-004:a_miss_is_false", says="True for a page that was never set")
class BloomFilter(DictStore):
    """Exists asks a filter that is right about what is there, and sometimes wrong about the rest."""

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        with self._lock:
            names = [stored.page_hash for stored in self._pages.values() if stored.space == space]
        return any(name[:2] == page_hash[:2] for name in names)


@caught_by("KV-004:a_miss_is_false_for_every_reason", says="TypeError")
class StumblesOverTombstones(DictStore):
    """A deleted page is marked as None, and the next get takes the length of it."""

    _tombstones: set[Hashable] = own(set)

    def _put(self, key: Hashable, stored: Stored) -> None:
        self._tombstones.discard(key)
        super()._put(key, stored)

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        if super()._has(space, page_hash):
            self._tombstones.add(self._key(space, page_hash))
        return super()._removed(space, page_hash)

    def _contents(self, space: KeySpace, hashes: Sequence[str]) -> list[bytes | None]:
        if self._tombstones.intersection(self._key(space, page_hash) for page_hash in hashes):
            raise TypeError("object of type 'NoneType' has no len()")
        return super()._contents(space, hashes)


# --- KV-005 --------------------------------------------------------------------------------------


@caught_by("KV-005:a_present_page_can_be_set_again", says="there already")
class RefusesPresentPages(DictStore):
    """A set of a page that is there returns False: nothing was stored."""

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        return not super()._has(space, page_hash) and super()._write_whole(space, page_hash, data)


@caught_by("KV-005:other_bytes_leave_a_page_whole", says="up to byte 512")
class PatchesTheFirstBlock(DictStore):
    """Of a page that is there only the first 512 bytes are replaced."""

    def _put(self, key: Hashable, stored: Stored) -> None:
        old = self._pages.get(key)
        if old is not None:
            stored = Stored(stored.space, stored.page_hash, stored.data[:512] + old.data[512:])
        super()._put(key, stored)


@caught_by("KV-005:another_handle_can_set_a_page_again", says="another handle")
class LeavesOthersPagesAlone(Shelf):
    """A set of a page that another handle has set returns False: it is not this one's."""

    _own: set[tuple[KeySpace, str]] = own(set)

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        if (space, page_hash) not in self._own and super()._has(space, page_hash):
            return False
        self._own.add((space, page_hash))
        return super()._write_whole(space, page_hash, data)
