"""Wrong stores that lose pages, invent pages, or return other bytes; KV-001 to KV-008."""

from __future__ import annotations

import ctypes
import hashlib
import zlib
from itertools import chain
from typing import TYPE_CHECKING

import xxhash

from hicache_conformance.selftest.mutants import caught_by, own
from hicache_conformance.selftest.references.dict_store import DictStore, Stored
from hicache_conformance.selftest.references.file_a_page import Shelf

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence
    from pathlib import Path

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page
    from hicache_storage.storage import PageInfo


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
    """Exists remembers which hashes were set, but not in which key space."""

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        if super()._has(space, page_hash):
            return True
        with self._lock:
            return any(stored.page_hash == page_hash for stored in self._pages.values())


@caught_by("KV-001:looking_into_a_key_space_does_not_make_it")
class SpacesMadeByLooking(DictStore):
    """Looking for a page in a key space creates that key space."""

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        self._remember(space)
        return super()._has(space, page_hash)


@caught_by("KV-001:asking_for_a_page_does_not_make_it", says="only asked for")
class DeletingListsPages(DictStore):
    """A delete of a page that was never there leaves an entry, which `exists` takes for a page."""

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
    """The last page of a batch is not stored, although its verdict is True."""

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        kept = len(hashes) if len(hashes) == 1 else len(hashes) - 1
        stored = super()._store(space, hashes[:kept], contents[:kept])
        return stored + [True] * (len(hashes) - kept)


@caught_by("KV-002:many_pages_are_all_there", says="1100 pages were set in all")
class RemembersAThousand(DictStore):
    """The index has room for 1,000 pages, and drops older ones silently."""

    def _put(self, key: Hashable, stored: Stored) -> None:
        super()._put(key, stored)
        if len(self._pages) > 1000:
            self._drop(next(iter(self._pages)))


class _RemembersMisses(DictStore):
    """A store that remembers which pages it did not find, even after they are set."""

    _absent: set[Hashable] = own(set)

    def _is_known_absent(self, space: KeySpace, page_hash: str, found: object) -> bool:
        key = self._key(space, page_hash)
        if not found:
            self._absent.add(key)
        return key in self._absent


@caught_by("KV-002:a_page_shows_after_misses", says="looked up before it was set, and missed")
class RemembersMisses(_RemembersMisses):
    """Exists remembers the pages that it missed, and still misses them after they were set."""

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        return not self._is_known_absent(space, page_hash, super()._has(space, page_hash))


@caught_by("KV-002:opening_a_key_space_again_keeps_its_pages", says="open_space was called")
class OpeningEmpties(DictStore):
    """`open_space` creates the key space again, so the pages that it had are lost."""

    def open_space(self, space: KeySpace) -> None:
        super().open_space(space)
        for info in self._names(space):
            self._removed(space, info.page_hash)


@caught_by("KV-002:equal_key_spaces_are_one", says="equal key spaces")
class KeySpacesByIdentity(DictStore):
    """Pages are stored under the key space object, so an equal key space does not find them."""

    _objects: list[KeySpace] = own(list)

    def _key(self, space: KeySpace, page_hash: str) -> Hashable:
        if not any(one is space for one in self._objects):
            self._objects.append(space)
        return id(space), page_hash


@caught_by("KV-002:any_length_of_page_hash_works", says="its hash has 32 digits")
class Sha256Only(DictStore):
    """Only page hashes of 64 digits are accepted; others are refused."""

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        return len(page_hash) == 64 and super()._write_whole(space, page_hash, data)


@caught_by("KV-002:pages_in_read_only_memory_can_be_stored", says="TypeError")
class NeedsWritableMemory(DictStore):
    """A set finds the address of a page in a way that fails if the memory is read-only."""

    def _taken(self, page: Page) -> bytes:
        views = [(ctypes.c_char * part.nbytes).from_buffer(part) for part in page.segments]
        return b"".join(view.raw for view in views)


@caught_by("KV-002:a_page_stays_while_others_come_and_go", says="deleted meanwhile")
class NotFoundIsTheLast(DictStore):
    """Deleting an absent page removes the page that was set last (`find` returns -1)."""

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
    """Exists asks a filter that is right about present pages, and sometimes wrong about absent ones."""

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        with self._lock:
            names = [stored.page_hash for stored in self._pages.values() if stored.space == space]
        return any(name[:2] == page_hash[:2] for name in names)


@caught_by("KV-004:a_miss_is_false_for_every_reason", says="TypeError")
class StumblesOverTombstones(DictStore):
    """A delete marks the page as None, and the next get asks for the length of None."""

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
    """A set of a present page returns False, because nothing was stored."""

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        return not super()._has(space, page_hash) and super()._write_whole(space, page_hash, data)


@caught_by("KV-005:other_bytes_leave_a_page_whole", says="up to byte 512")
class PatchesTheFirstBlock(DictStore):
    """A set of a present page replaces only its first 512 bytes."""

    def _put(self, key: Hashable, stored: Stored) -> None:
        old = self._pages.get(key)
        if old is not None:
            stored = Stored(stored.space, stored.page_hash, stored.data[:512] + old.data[512:])
        super()._put(key, stored)


@caught_by("KV-005:another_handle_can_set_a_page_again", says="another handle")
class LeavesOthersPagesAlone(Shelf):
    """A set of a page that another handle has set returns False, because this handle does not own it."""

    _own: set[tuple[KeySpace, str]] = own(set)

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        if (space, page_hash) not in self._own and super()._has(space, page_hash):
            return False
        self._own.add((space, page_hash))
        return super()._write_whole(space, page_hash, data)


# --- hits with bytes that were never set ----------------------------------------------


@caught_by("KV-003:any_bytes_are_read_back", says="the page holds zeros only")
class ZerosAreAbsent(DictStore):
    """A page of zeros is taken for an empty slot."""

    def _is_whole(self, space: KeySpace, data: bytes | None) -> bool:
        return super()._is_whole(space, data) and data is not None and any(data)

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        return [self._write_whole(space, *pair) for pair in zip(hashes, contents, strict=True)]


class _Deduplicated(DictStore):
    """A store that keeps equal pages once. A subclass decides which pages count as equal."""

    _bodies: dict[Hashable, bytes] = own(dict)

    def _print_of(self, data: bytes) -> Hashable:
        raise NotImplementedError

    def _put(self, key: Hashable, stored: Stored) -> None:
        body = self._bodies.setdefault(self._print_of(stored.data), stored.data)
        super()._put(key, stored._replace(data=body))


@caught_by("KV-003:pages_that_are_nearly_equal_are_apart", says="another page differs")
class ComparesEnds(_Deduplicated):
    """If pages have equal lengths and equal first and last 64 bytes, only one of them is stored."""

    def _print_of(self, data: bytes) -> Hashable:
        return len(data), data[:64], data[-64:]


@caught_by("KV-003:pages_that_are_nearly_equal_are_apart", says="the same CRC-32 or Adler-32")
class ComparesCrc32(_Deduplicated):
    """If pages have equal lengths and the same CRC-32, only one of them is stored."""

    def _print_of(self, data: bytes) -> Hashable:
        return len(data), zlib.crc32(data)


@caught_by("KV-003:pages_that_are_nearly_equal_are_apart", says="the same CRC-32 or Adler-32")
class ComparesAdler32(_Deduplicated):
    """If pages have equal lengths and the same Adler-32, only one of them is stored."""

    def _print_of(self, data: bytes) -> Hashable:
        return len(data), zlib.adler32(data)


@caught_by("KV-003:hashes_that_are_alike_are_apart", says="zeros at the end")
class HashesPadded(DictStore):
    """Page hashes are padded with zeros to 64 bytes."""

    def _key(self, space: KeySpace, page_hash: str) -> Hashable:
        return space.id, bytes.fromhex(page_hash).ljust(64, b"\0")


class _SizeBlind(DictStore):
    """Pages are stored under their hash and model alone, whatever their size."""

    def _key(self, space: KeySpace, page_hash: str) -> Hashable:
        return space.model, page_hash


@caught_by(
    "KV-003:a_page_of_another_size_is_no_hit",
    says="is read with 999",
    seen_in="SGLang 0.5.23, file; LMCache 0.5.6, fs",
)
class LongerPagesServe(_SizeBlind):
    """A longer page under the same hash is a hit, and its first bytes are returned."""

    def _is_whole(self, space: KeySpace, data: bytes | None) -> bool:
        return data is not None and len(data) >= space.stored_nbytes

    def _contents(self, space: KeySpace, hashes: Sequence[str]) -> list[bytes | None]:
        found = super()._contents(space, hashes)
        return [None if data is None else data[: space.stored_nbytes] for data in found]


@caught_by("KV-003:sizes_under_one_hash_are_apart", says="other page sizes have this hash")
class OneSizeAtATime(_SizeBlind):
    """A page with a different size under the same hash replaces the one that was there."""


@caught_by("KV-003:a_page_reads_the_same_every_time", says="never set")
class ServesItsLastRead(DictStore):
    """A read that finds nothing returns what the last read left in the buffer, if the size matches."""

    _buffer = b""

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        data = super()._read(space, page_hash)
        if data is not None:
            self._buffer = data
        elif len(self._buffer) == space.stored_nbytes and space.stored_nbytes > 4096:
            return self._buffer
        return data


@caught_by("KV-008:every_size_of_page_works", says="pages of 1 bytes")
class OneByteIsNothing(DictStore):
    """An object of one byte counts as a marker, not as a page."""

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        data = super()._read(space, page_hash)
        return None if data is not None and len(data) == 1 else data


@caught_by("KV-008:large_pages_work", says="pages of 1048577 bytes")
class LosesMegabytes(DictStore):
    """Pages of more than 1 MiB are not stored, although their verdict is True (as with some servers)."""

    def _put(self, key: Hashable, stored: Stored) -> None:
        if len(stored.data) <= 1 << 20:
            super()._put(key, stored)


@caught_by(
    "KV-008:sizes_coexist_in_one_store",
    "KV-102:pools_of_one_hash_coexist",
    says="other page sizes were used|of 'mamba'",
    seen_in="SGLang 0.5.23, hf3fs",
)
class SizedByTheFirst(DictStore):
    """Slots are as large as the pages of the key space that was opened first."""

    _slot_nbytes = 0

    def open_space(self, space: KeySpace) -> None:
        super().open_space(space)
        self._slot_nbytes = self._slot_nbytes or space.stored_nbytes

    def _put(self, key: Hashable, stored: Stored) -> None:
        super()._put(key, stored._replace(data=stored.data[: self._slot_nbytes]))


@caught_by(
    "KV-008:a_frame_is_a_part_of_the_page",
    "KV-008:any_segmentation_is_read_back_in_any_other",
    says="a frame of 64 bytes|was set in 2 segments",
)
class ReadsAsItWrote(DictStore):
    """A get finds a page only if it uses the same segments as the set."""

    _cuts: dict[bytes, list[int]] = own(dict)

    def _taken(self, page: Page) -> bytes:
        data = super()._taken(page)
        self._cuts[data] = [part.nbytes for part in page.segments]
        return data

    def _filled(self, page: Page, data: bytes | None) -> bool:
        cuts = [part.nbytes for part in page.segments]
        return data is not None and self._cuts[data] == cuts and super()._filled(page, data)


@caught_by("KV-008:batches_of_many_segments_work", says="512 segments each")
class OneVectorABatch(DictStore):
    """A batch is written as one vector of at most 1,024 segments (IOV_MAX); the rest stays zero."""

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self._begin(space, hashes, pages)
        vector = list(chain.from_iterable(page.segments for page in pages))[:1024]
        written = b"".join(vector).ljust(space.stored_nbytes * len(pages), b"\0")
        starts = range(0, len(written), space.stored_nbytes)
        parts = [written[start : start + space.stored_nbytes] for start in starts]
        return self._answer(self._store(space, hashes, parts))


@caught_by("KV-008:segments_may_lie_in_any_order", says="shifted by 2000 bytes")
class SortsSegments(DictStore):
    """Segments are copied in the order of their addresses, so that fewer pieces are needed."""

    def _taken(self, page: Page) -> bytes:
        order = sorted(zip(page.addresses, page.segments, strict=True), key=lambda pair: pair[0])
        return b"".join(segment for _, segment in order)


@caught_by("KV-004:a_batch_writes_into_its_own_pages_only", says="of 2 segments")
class ZeroesMissesInOnePiece(DictStore):
    """A miss fills the page with zeros from its first byte on, as if its memory were one piece."""

    def _filled(self, page: Page, data: bytes | None) -> bool:
        if data is None:
            ctypes.memset(page.addresses[0][0], 0, min(page.nbytes, _reach(page)))
        return super()._filled(page, data)


def _reach(page: Page) -> int:
    """Return how many bytes of the page's memory follow the start of its first segment."""
    return max(address + nbytes for address, nbytes in page.addresses) - page.addresses[0][0]


# --- right call by call, wrong after a sequence --------------------------------------------------


@caught_by("KV-007:a_deleted_page_can_be_set_again")
class SecondDeleteStays(DictStore):
    """After two deletes a page never comes back: set, delete, set, delete, set."""

    _deletes: dict[Hashable, int] = own(dict)

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        key = self._key(space, page_hash)
        if key in self._pages:
            self._deletes[key] = self._deletes.get(key, 0) + 1
        return super()._removed(space, page_hash)

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        buried = self._deletes.get(self._key(space, page_hash), 0) > 1
        return None if buried else super()._read(space, page_hash)


@caught_by("KV-002:any_sequence_of_calls_agrees_with_a_dict")
class SlotFreedTwice(DictStore):
    """Deleting an absent page frees its old slot again, so two later pages share it, and its bytes."""

    _slots: list[bytes] = own(list)
    _slot_of: dict[Hashable, int] = own(dict)
    _free: list[int] = own(list)

    def _put(self, key: Hashable, stored: Stored) -> None:
        if key not in self._pages:
            self._slot_of[key] = self._free.pop() if self._free else len(self._slots)
            self._slots += [b""] * (self._slot_of[key] + 1 - len(self._slots))
        self._slots[self._slot_of[key]] = stored.data
        super()._put(key, stored)

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        key = self._key(space, page_hash)
        if key in self._slot_of:
            self._free.append(self._slot_of[key])
        return super()._removed(space, page_hash)

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        data = super()._read(space, page_hash)
        return None if data is None else self._slots[self._slot_of[self._key(space, page_hash)]]


@caught_by("KV-007:one_delete_is_enough", says="had been set four times")
class OldVersionReturns(DictStore):
    """A log keeps all versions: deleting a page that was set twice brings its first bytes back."""

    _older: dict[Hashable, list[Stored]] = own(dict)

    def _put(self, key: Hashable, stored: Stored) -> None:
        if key in self._pages:
            self._older.setdefault(key, []).append(self._pages[key])
        super()._put(key, stored)

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        key = self._key(space, page_hash)
        super()._removed(space, page_hash)
        if self._older.get(key):
            super()._put(key, self._older[key].pop())
        return True


@caught_by("KV-002:any_sequence_of_calls_agrees_with_a_dict")
class ClearsTheLastListing(DictStore):
    """Clear removes what scan listed last, so pages that were set since then stay."""

    _listed: dict[KeySpace, list[PageInfo]] = own(dict)

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        self._listed[space] = list(super().scan(space))
        return iter(self._listed[space])

    def clear(self, space: KeySpace) -> int:
        infos = self._listed.pop(space, None)
        if infos is None:
            return super().clear(space)
        there = [info.page_hash for info in infos if self._has(space, info.page_hash)]
        return sum(self.batch_delete(space, there))


@caught_by("KV-002:any_sequence_of_calls_agrees_with_a_dict")
class StaleSecondHandle(Shelf):
    """A handle that has missed a page still misses it after another handle has set it."""

    _missing: set[tuple[KeySpace, str]] = own(set)

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        if (space, page_hash) in self._missing:
            return False
        found = super()._has(space, page_hash)
        if not found:
            self._missing.add((space, page_hash))
        return found

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        self._missing.discard((space, page_hash))
        return super()._write_whole(space, page_hash, data)


@caught_by("KV-002:pages_outlive_an_orderly_close", says="read by the next handle")
class ReopenedWithoutTheLast(Shelf):
    """The page that was set last stays in memory until the next set, so close loses it."""

    _last: tuple[KeySpace, str, bytes] | None = None

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        previous, self._last = self._last, (space, page_hash, data)
        return previous is None or super()._write_whole(*previous)

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        if self._is_last(space, page_hash):
            self._last = None
        return super()._removed(space, page_hash)

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        if self._last is not None and self._is_last(space, page_hash):
            return self._last[2]
        return super()._read(space, page_hash)

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        return self._is_last(space, page_hash) or super()._has(space, page_hash)

    def _is_last(self, space: KeySpace, page_hash: str) -> bool:
        return self._last is not None and self._last[:2] == (space, page_hash)


# --- keys of 32 bits -----------------------------------------------------------------------------


@caught_by("KV-003:hashes_that_are_alike_are_apart", "KV-007:deleting_spares_hashes_that_are_alike")
class KeysOfFourBytes(DictStore):
    """The key of a page is the first four bytes of the SHA-256 of its hash."""

    def _key(self, space: KeySpace, page_hash: str) -> Hashable:
        return space.id, hashlib.sha256(page_hash.encode()).digest()[:4]


@caught_by("KV-003:hashes_that_are_alike_are_apart")
class FilesByXxhash32(Shelf):
    """The name of a page's file is the xxHash32 of its page hash."""

    def _path(self, space: KeySpace, page_hash: str) -> Path:
        return self._folder(space) / f"{xxhash.xxh32_intdigest(page_hash.encode()):032x}"


@caught_by(
    "KV-003:pages_of_many_hashes_are_apart",
    seen_in="an author's PostgreSQL store",
)
class UniqueInFourBytes(DictStore):
    """The key of a page is four bytes of a hash of its key space and its page hash together."""

    def _key(self, space: KeySpace, page_hash: str) -> Hashable:
        return hashlib.sha256(f"{space.id}{page_hash}".encode()).digest()[:4]
