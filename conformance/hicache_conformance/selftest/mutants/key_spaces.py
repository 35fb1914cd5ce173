"""Wrong stores that mix up key spaces, or fail when they clear or list; KV-10x."""

from __future__ import annotations

import re
import secrets
import shutil
import threading
import time
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import chain, count
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hicache_conformance.run.subject import Scratch
from hicache_conformance.selftest.mutants import caught_by, own
from hicache_conformance.selftest.references.dict_store import DictStore
from hicache_conformance.selftest.references.file_a_page import Shelf, ShelfSettings
from hicache_conformance.selftest.references.rented import Rented
from hicache_conformance.selftest.references.subjects import WireSubject
from hicache_conformance.selftest.references.wire import WireStore
from hicache_conformance.selftest.references.wire_protocol import Operation
from hicache_storage.errors import StorageUnavailable
from hicache_storage.storage import PageInfo

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from hicache_conformance.selftest.references.dict_store import Stored
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page

_OF_A_BUCKET = 512


class _Confused(DictStore):
    """A store whose keys for pages leave out a part of the key space."""

    def _key(self, space: KeySpace, page_hash: str) -> Hashable:
        return self._seen(space), page_hash

    def _seen(self, space: KeySpace) -> Hashable:
        return space.id


def _numbers(space: KeySpace) -> tuple[int, ...]:
    return space.page_tokens, space.page_nbytes, space.frame_nbytes


def _resharded(space: KeySpace, **fields: Any) -> KeySpace:
    return replace(space, shard=replace(space.shard, **fields))


# --- a field that is missing from the identity ----------------------------------------------------


@caught_by("KV-101:a_page_is_not_seen_from_a_neighbour")
class ModelBlind(_Confused):
    """The model is missing from the identity of a page."""

    def _seen(self, space: KeySpace) -> Hashable:
        return replace(space, model="any")


@caught_by(
    "KV-101:a_page_is_not_seen_from_a_neighbour",
    "KV-101:texts_may_be_odd",
    seen_in="SGLang 0.5.23, file; LMCache 0.5.6, fs",
)
class DtypeBlind(_Confused):
    """The dtype is missing from the identity of a page."""

    def _seen(self, space: KeySpace) -> Hashable:
        return replace(space, dtype="any")


@caught_by("KV-101:each_neighbour_keeps_bytes_of_its_own", "KV-101:a_delete_spares_the_neighbours")
class PageSizeBlind(_Confused):
    """The size of a page is missing from its identity."""

    def _seen(self, space: KeySpace) -> Hashable:
        return replace(space, page_nbytes=1)


@caught_by(
    "KV-101:a_page_is_not_seen_from_a_neighbour",
    "KV-101:fields_do_not_run_together",
    seen_in="an author's LMDB store",
)
class TenantBlind(_Confused):
    """The tenant is missing from the identity of a page."""

    def _seen(self, space: KeySpace) -> Hashable:
        return replace(space, tenant="")


# --- an identity that is less than its fields ------------------------------------------------------


@caught_by("KV-101:fields_do_not_run_together", "KV-106:ranks_of_a_sharded_pool_share_nothing")
class RangesSorted(_Confused):
    """The identity has the ranges of layers and heads, but not which range is which."""

    def _seen(self, space: KeySpace) -> Hashable:
        ranges = sorted([space.shard.layers, space.shard.heads or (0, 0)])
        return _resharded(space, layers=(0, 1), heads=None), *ranges


@caught_by("KV-106:ranks_of_a_sharded_draft_share_nothing", seen_in="SGLang 0.5.23, file")
class RanklessBesideReplicated(_Confused):
    """If the model's KV is the same on all ranks, the keys of its other pools leave out the rank too."""

    _replicated: set[str] = own(set)

    def _seen(self, space: KeySpace) -> Hashable:
        if space.pool == "kv" and space.shard.heads is None:
            self._replicated.add(space.model)
        rankless = space.pool != "kv" and space.model in self._replicated
        return _resharded(space, heads=None) if rankless else space


@caught_by("KV-101:texts_do_not_run_together")
class TextsJoined(_Confused):
    """The identity joins the text fields by `-`, although this may occur in them."""

    def _seen(self, space: KeySpace) -> Hashable:
        texts = (space.tenant, space.model, space.revision, space.dtype, space.layout, space.pool)
        return "-".join(texts), _numbers(space), space.shard


@caught_by("KV-101:texts_may_be_odd")
class TenantsFlattened(_Confused):
    """A slash in a tenant becomes a dash, to make it a valid path."""

    def _seen(self, space: KeySpace) -> Hashable:
        return replace(space, tenant=space.tenant.replace("/", "-"))


@caught_by("KV-101:ids_that_are_alike_are_not_equal")
class IdsShortened(_Confused):
    """Keys begin with only the first eight digits of the key space's id."""

    def _seen(self, space: KeySpace) -> Hashable:
        return space.id[:8]


@caught_by(
    "KV-101:another_handle_keeps_neighbours_apart",
    "KV-106:ranks_with_handles_of_their_own_share_nothing",
)
class SpacesNumbered(Shelf):
    """Directories are numbered in the order in which a handle opens its key spaces."""

    _numbers: dict[KeySpace, int] = own(dict)

    def _folder(self, space: KeySpace) -> Path:
        return self._root / f"{self._numbers.setdefault(space, len(self._numbers)):032x}"


# --- pools of one hash ----------------------------------------------------------------------------


@caught_by("KV-102:pools_of_one_hash_coexist", "KV-102:what_is_done_to_the_draft_leaves_the_target")
class OneSizeAHash(DictStore):
    """A set of a page drops pages under the same hash that have a different size."""

    def _put(self, key: Hashable, stored: Stored) -> None:
        for other, one in list(self._pages.items()):
            if one.page_hash == stored.page_hash and len(one.data) != len(stored.data):
                self._drop(other)
        super()._put(key, stored)


@caught_by("KV-102:a_pool_without_the_page_has_a_miss")
class DraftFallsBack(DictStore):
    """If a draft page is absent, the target's page is returned, which has the same size."""

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        found = super()._read(space, page_hash)
        if found is None and space.pool != "kv":
            return super()._read(replace(space, pool="kv"), page_hash)
        return found


# --- ranks ------------------------------------------------------------------------------------------


@caught_by(
    "KV-106:a_replicated_pool_is_one_for_all_handles",
    "KV-106:a_replicated_pool_is_one_for_all_processes",
)
class PagesOfAnInstance(Shelf):
    """Every instance keeps its pages under a name of its own, and shares none."""

    def __init__(self, settings: ShelfSettings) -> None:
        self._token = secrets.token_hex(8)
        super().__init__(settings)

    def _path(self, space: KeySpace, page_hash: str) -> Path:
        return super()._path(space, page_hash).with_name(f"{page_hash}-{self._token}")


@caught_by("KV-106:a_replicated_pool_is_one_for_equal_key_spaces")
class SpacesByObject(DictStore):
    """Key spaces are compared as objects, so equal ones of different ranks do not share pages."""

    _objects: list[KeySpace] = own(list)

    def _key(self, space: KeySpace, page_hash: str) -> Hashable:
        if not any(space is known for known in self._objects):
            self._objects.append(space)
        return id(space), page_hash


class _Misnamed(DictStore):
    """A store that changes the model's name before it uses it."""

    def _key(self, space: KeySpace, page_hash: str) -> Hashable:
        return replace(space, model=f"/{self._name(space.model)}"), page_hash

    def _name(self, model: str) -> str:
        return model


@caught_by("KV-105:no_model_name_aliases_another", seen_in="SGLang 0.5.23, file")
class SlashesFlattened(_Misnamed):
    """`/` in a model's name becomes `-`, so `a/b-c` and `a-b/c` are one model."""

    def _name(self, model: str) -> str:
        return model.replace("/", "-")


@caught_by("KV-105:every_model_name_works", seen_in="SGLang 0.5.23, file")
class LongNamesFail(DictStore):
    """A name of more than 255 bytes gives an OSError, as in most file systems."""

    def open_space(self, space: KeySpace) -> None:
        if len(space.model.encode()) > 255:
            raise OSError(36, "File name too long", space.model)
        super().open_space(space)


@caught_by(
    "KV-105:model_names_survive_reopening", "KV-105:a_model_name_leads_to_no_other_directory"
)
class NamesEscape(Shelf):
    """The directory of a key space has the name of its model, so `..` is outside the store."""

    def _folder(self, space: KeySpace) -> Path:
        folder = self._root.joinpath(*(part[:60] for part in Path(space.model).parts), space.id)
        folder.mkdir(parents=True, exist_ok=True)
        return folder


# --- clearing ------------------------------------------------------------------------------------


class _ClearsMore(DictStore):
    """A store whose clear also clears every key space that it takes for the given one."""

    def clear(self, space: KeySpace) -> int:
        for other in self._known_spaces():
            if other != space and self._is_meant(other, space):
                super().clear(other)
        return super().clear(space)

    def _is_meant(self, other: KeySpace, space: KeySpace) -> bool:
        raise NotImplementedError


@caught_by(
    "KV-103:clear_spares_neighbours",
    "KV-103:clear_spares_look_alikes",
    seen_in="an author's LMDB store",
)
class ClearsByNamePrefix(_ClearsMore):
    """Clearing a model also clears all models whose names begin with the same text."""

    def _is_meant(self, other: KeySpace, space: KeySpace) -> bool:
        return other.model.startswith(space.model)


@caught_by("KV-103:clear_spares_other_programs_files", seen_in="SGLang 0.5.23, file")
class ClearsTheDirectory(Shelf):
    """Clear also removes all foreign files and folders in the store's directory."""

    def clear(self, space: KeySpace) -> int:
        removed = super().clear(space)
        for path in self._root.iterdir():
            if not re.fullmatch(r"[0-9a-f]{32}", path.name):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        return removed


@caught_by("KV-103:clear_spares_another_stores_pages")
class ClearsNextDoor(Shelf):
    """Clear goes through all directories next to the store's own, so it clears other stores too."""

    def clear(self, space: KeySpace) -> int:
        removed = super().clear(space)
        for folder in self._root.parent.glob(f"*/{space.id}"):
            shutil.rmtree(folder)
        return removed


@caught_by("KV-103:clear_counts_the_pages_that_it_removed")
class ClearCountsSets(DictStore):
    """Clear counts sets instead of pages, so a page that was set again counts twice."""

    _set_count: Counter[KeySpace] = own(Counter)

    def _put(self, key: Hashable, stored: Stored) -> None:
        super()._put(key, stored)
        self._set_count[stored.space] += 1

    def clear(self, space: KeySpace) -> int:
        super().clear(space)
        return self._set_count.pop(space, 0)


@caught_by("KV-103:a_cleared_space_starts_anew")
class ClearBarsThePages(DictStore):
    """Clear bars the pages that were there, and a later set does not lift the bar."""

    _barred: set[Hashable] = own(set)

    def clear(self, space: KeySpace) -> int:
        removed = 0
        for info in list(self.scan(space)):
            self._barred.add(self._key(space, info.page_hash))
            removed += 1
        return removed

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        barred = self._key(space, page_hash) in self._barred
        return None if barred else super()._read(space, page_hash)

    def _names(self, space: KeySpace) -> list[PageInfo]:
        names = super()._names(space)
        return [info for info in names if self._key(space, info.page_hash) not in self._barred]


@caught_by("KV-103:clear_reaches_other_handles", "KV-103:what_was_cleared_stays_cleared")
class ClearIsForgotten(Shelf):
    """Clear hides the pages in this instance only, so they are back after reopening."""

    _hidden: set[Hashable] = own(set)

    def clear(self, space: KeySpace) -> int:
        names = [(space, info.page_hash) for info in self.scan(space)]
        self._hidden.update(names)
        return len(names)

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        self._hidden.discard((space, page_hash))
        return super()._write_whole(space, page_hash, data)

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        return None if (space, page_hash) in self._hidden else super()._read(space, page_hash)

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        return (space, page_hash) not in self._hidden and super()._has(space, page_hash)

    def _names(self, space: KeySpace) -> list[PageInfo]:
        names = super()._names(space)
        return [info for info in names if (space, info.page_hash) not in self._hidden]


@caught_by("KV-103:another_handle_clears_what_the_first_set")
class ClearsItsOwnOnly(Shelf):
    """A handle clears only the pages that it has set itself."""

    _own: set[tuple[KeySpace, str]] = own(set)

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        self._own.add((space, page_hash))
        return super()._write_whole(space, page_hash, data)

    def clear(self, space: KeySpace) -> int:
        own = [name for home, name in self._own if home == space and self._has(space, name)]
        return sum(self.batch_delete(space, own))


_STEP = 64


# --- KV-103 ------------------------------------------------------------------------------------------


@caught_by(
    "KV-103:a_clear_that_is_cut_short_says_so", seen_in="redis backend of this project, mended"
)
class ClearStopsInSilence(WireStore):
    """If the connection breaks, clear stops and returns the number of pages removed so far."""

    def clear(self, space: KeySpace) -> int:
        hashes = [info.page_hash for info in self.scan(space)]
        removed = 0
        for start in range(0, len(hashes), _STEP):
            try:
                removed += sum(self.batch_delete(space, hashes[start : start + _STEP]))
            except StorageUnavailable:
                break
        return removed


@caught_by("KV-103:a_clear_without_descriptors_says_so")
class ClearsWhatItCanList(Shelf):
    """A directory that can't be listed is taken for an empty one, and clear returns 0."""

    def _entries(self, folder: Path, name: re.Pattern[str]) -> Iterator[Path]:
        try:
            return super()._entries(folder, name)
        except StorageUnavailable:
            return iter(())


@caught_by("KV-103:clear_removes_every_page")
class ClearCountsItsLastBatch(DictStore):
    """Clear works in batches of 64 and returns the count of the last one."""

    def clear(self, space: KeySpace) -> int:
        hashes = [info.page_hash for info in self.scan(space)]
        removed = 0
        for start in range(0, len(hashes), _STEP):
            removed = sum(self.batch_delete(space, hashes[start : start + _STEP]))
        return removed


@caught_by("KV-103:clear_gives_its_room_back")
class ClearFreesNoRoom(DictStore):
    """Clear removes the pages, but their bytes still count against the capacity."""

    def clear(self, space: KeySpace) -> int:
        nbytes = self._nbytes
        removed = super().clear(space)
        self._nbytes = nbytes
        return removed


# --- KV-104 ------------------------------------------------------------------------------------------


@caught_by("KV-104:a_paused_listing_pins_no_room", seen_in="an author's LMDB store")
class ListingsPinRoom(DictStore):
    """A scan is one read transaction, so pages deleted meanwhile take room until it ends."""

    _listings = 0
    _pinned_nbytes = 0

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


# --- listings ------------------------------------------------------------------------------------


_LISTED_AT_ONCE = 1000


@caught_by("KV-104:long_listings_are_complete")
class ListsAThousand(DictStore):
    """A listing stops after its first thousand pages, because it never asks for the next part."""

    def _names(self, space: KeySpace) -> list[PageInfo]:
        return super()._names(space)[:_LISTED_AT_ONCE]


@caught_by("KV-104:a_page_that_is_being_set_is_listed_as_itself_or_not")
class ListsTemporaryFiles(Shelf):
    """Files that are still being written are listed as pages."""

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
    """A listing gives the size of a page without its frame."""

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        return (PageInfo(info.page_hash, space.page_nbytes) for info in super().scan(space))


@caught_by("KV-104:scan_lists_hashes_of_every_length")
class ListsLongHashesOnly(DictStore):
    """A listing takes only names of 64 digits for pages."""

    def _names(self, space: KeySpace) -> list[PageInfo]:
        return [info for info in super()._names(space) if len(info.page_hash) == 64]


@caught_by("KV-104:scan_follows_every_change")
class ListsEverySet(DictStore):
    """The index for listings has an entry for each set, so a page that was set twice appears twice."""

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
    """A listing walks through the dict itself, which must not change meanwhile."""

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        for stored in self._pages.values():
            if stored.space == space:
                yield PageInfo(stored.page_hash, len(stored.data))


@caught_by(
    "KV-104:a_listing_bears_deletes_by_its_reader", "KV-104:a_listing_bears_changes_half_way"
)
class ScansByOffset(DictStore):
    """A listing asks for the next hundred by offset, so deletes meanwhile make it skip pages."""

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        start = 0
        while part := self._names(space)[start : start + 100]:
            yield from part
            start += len(part)


@caught_by("KV-104:a_listing_bears_sets_by_its_reader", says="twice")
class ScansByNumber(DictStore):
    """A listing goes by a number that each set draws, so pages that are set meanwhile come again."""

    _numbers: dict[Hashable, int] = own(dict)
    _drawn: Iterator[int] = own(count)

    def _put(self, key: Hashable, stored: Stored) -> None:
        super()._put(key, stored)
        self._numbers[key] = next(self._drawn)

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        last = -1
        while True:
            with self._lock:
                later = [
                    (self._numbers[key], stored)
                    for key, stored in self._pages.items()
                    if stored.space == space and self._numbers[key] > last
                ]
            if not later:
                return
            for number, stored in sorted(later, key=itemgetter(0))[:100]:
                last = number
                yield PageInfo(stored.page_hash, len(stored.data))


@caught_by("KV-104:a_paused_listing_blocks_nobody")
class ScansUnderLock(DictStore):
    """A listing holds the lock from its first step to its last, so other threads must wait for it."""

    _lock = own(threading.RLock)  # can replace the Lock of the base

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        with self._lock:
            for stored in list(self._pages.values()):
                if stored.space == space:
                    yield PageInfo(stored.page_hash, len(stored.data))


@caught_by("KV-104:two_listings_at_once_are_each_complete")
class ScansWithOneCursor(DictStore):
    """The store has one cursor, so a new listing ends the one before."""

    _cursor: Iterator[PageInfo] = iter(())

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        self._cursor = iter(self._names(space))
        while (info := next(self._cursor, None)) is not None:
            yield info


# --- key spaces -------------------------------------------------------------------------------------


@caught_by("KV-104:listings_survive_closing")
class SpacesGoneWithTheLast(Shelf):
    """Close removes the manifests of all key spaces, so that the next handle lists none."""

    def close(self) -> None:
        for manifest in self._root.glob("*/manifest.json") if not self._closed else ():
            manifest.unlink()
        super().close()


@caught_by("KV-104:every_key_space_is_listed_once")
class SpacesAsOftenAsOpened(DictStore):
    """A key space is listed once for each time that it was opened."""

    _opened: list[KeySpace] = own(list)

    def open_space(self, space: KeySpace) -> None:
        super().open_space(space)
        self._opened.append(space)

    def _known_spaces(self) -> list[KeySpace]:
        return list(self._opened)


@caught_by("KV-104:many_key_spaces_are_listed")
class SpacesOfAPage(DictStore):
    """A listing of key spaces ends after the first hundred."""

    def _known_spaces(self) -> list[KeySpace]:
        return super()._known_spaces()[:100]


@caught_by("KV-104:a_cleared_key_space_is_listed_again")
class SpacesClearedForGood(DictStore):
    """A key space that was cleared is never listed again, even if pages are set in it later."""

    _cleared: set[KeySpace] = own(set)

    def clear(self, space: KeySpace) -> int:
        self._cleared.add(space)
        return super().clear(space)

    def _known_spaces(self) -> list[KeySpace]:
        return [space for space in super()._known_spaces() if space not in self._cleared]


@caught_by("KV-104:key_spaces_are_listed_while_others_open")
class SpacesInTheLiveDict(DictStore):
    """A listing of key spaces walks through the dict itself, which must not change meanwhile."""

    def spaces(self) -> Iterator[KeySpace]:
        return iter(self._spaces)


@caught_by("KV-104:another_handle_lists_the_same")
class SpacesSetHere(Shelf):
    """A handle lists only the pages that it has set itself."""

    _own: set[tuple[KeySpace, str]] = own(set)

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        self._own.add((space, page_hash))
        return super()._write_whole(space, page_hash, data)

    def _names(self, space: KeySpace) -> list[PageInfo]:
        return [info for info in super()._names(space) if (space, info.page_hash) in self._own]


# --- names of stores -----------------------------------------------------------------------------


@caught_by(
    "KV-101:a_stores_name_does_not_run_into_a_field",
    says="set in another store",
    seen_in="an author's PostgreSQL store",
)
class TenantAfterThePrefix(Rented):
    """The tenant is appended to the prefix of the store, without a mark between them."""

    def _exchange(self, operation: Operation, *parts: bytes) -> Sequence[bytes]:
        if operation is Operation.PING:
            return super()._exchange(operation, *parts)
        joined = self._settings.prefix.encode() + b"".join(parts[:1])
        return super(Rented, self)._exchange(operation, joined, *parts[1:])

    def _about(self, operation: Operation, space: KeySpace, *parts: bytes) -> Sequence[bytes]:
        name = f"{space.tenant}@{replace(space, tenant='').id}"
        return self._exchange(operation, name.encode(), *parts)


@caught_by("KV-101:a_stores_name_does_not_run_into_a_field", says="set in another store")
class PoolAfterThePath(Shelf):
    """The pool is appended to the path of the store, so another store's directory may be meant."""

    def _folder(self, space: KeySpace) -> Path:
        return Path(f"{self._root}{space.pool}") / replace(space, pool="-").id

    def _remember(self, space: KeySpace) -> bool:
        self._folder(space).parent.mkdir(exist_ok=True)
        return super()._remember(space)


@caught_by("KV-101:a_stores_name_does_not_run_into_a_field", says="set in another store")
class ModelBeforeTheName(Shelf):
    """The directories of all stores are in one, called by the model and the name of the store."""

    def _folder(self, space: KeySpace) -> Path:
        name = f"{space.model.replace('/', '+')}{self._root.name}"
        return self._root.parent / name / replace(space, model="-").id

    def _remember(self, space: KeySpace) -> bool:
        self._folder(space).parent.mkdir(exist_ok=True)
        return super()._remember(space)


@caught_by("KV-101:stores_whose_names_are_alike_are_apart", says="set in another store")
class SignsAreDashes(Shelf):
    """The directories of all stores are in one, and each sign in a store's name becomes a dash."""

    def _folder(self, space: KeySpace) -> Path:
        return self._root.parent / re.sub(r"\W|_", "-", self._root.name) / "pages" / space.id

    def _remember(self, space: KeySpace) -> bool:
        self._folder(space).parent.mkdir(parents=True, exist_ok=True)
        return super()._remember(space)


@caught_by("KV-104:each_store_lists_its_own", says="in another store only")
class ListsNamesThatBeginAlike(Shelf):
    """A listing of key spaces covers all stores whose names begin with the name of this one."""

    def _known_spaces(self) -> list[KeySpace]:
        roots = self._root.parent.glob(f"{self._root.name}*")
        stores = [Shelf(ShelfSettings(path=str(one))) for one in roots if one.is_dir()]
        return [space for store in stores for space in store.spaces()]


@caught_by("KV-104:each_store_lists_its_own", says="another store of this process")
class NamesSpacesOnce(Shelf):
    """The class remembers which key spaces have a manifest, though each directory needs its own."""

    _done: ClassVar[set[KeySpace]] = set()

    def _remember(self, space: KeySpace) -> bool:
        self._folder(space).mkdir(parents=True, exist_ok=True)
        if space in self._done:
            return True
        self._done.add(space)
        return super()._remember(space)


# --- remove_space ----------------------------------------------------------------------------------


@caught_by("KV-104:pages_whose_hashes_begin_alike_are_listed", says="does not list a page")
class ListsAPartOfEachBucket(DictStore):
    """Names are in buckets by the first digits of the hash, and a scan reads 512 of each."""

    def _names(self, space: KeySpace) -> list[PageInfo]:
        seen = Counter[str]()
        found: list[PageInfo] = []
        for info in super()._names(space):
            seen[info.page_hash[:2]] += 1
            if seen[info.page_hash[:2]] <= _OF_A_BUCKET:
                found.append(info)
        return found


@caught_by("KV-104:what_sets_and_deletes_at_once_leave_is_listed", says="does not list a page")
class UnlistsWhatWasSetSince(DictStore):
    """A delete takes the page out of the index a moment later, though it may have been set since."""

    _unlisted: set[Hashable] = own(set)

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        removed = super()._removed(space, page_hash)
        time.sleep(0.001)
        self._unlisted.add(self._key(space, page_hash))
        return removed

    def _put(self, key: Hashable, stored: Stored) -> None:
        self._unlisted.discard(key)
        super()._put(key, stored)

    def _names(self, space: KeySpace) -> list[PageInfo]:
        found = super()._names(space)
        return [one for one in found if self._key(space, one.page_hash) not in self._unlisted]


class _Listed(WireStore):
    """A store that lists the pages of an index, which all its handles share."""

    _index: ClassVar[dict[str, set[str]]] = defaultdict(set)

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        stored = super()._store(space, hashes, contents)
        self._note(space, hashes)
        return stored

    def _note(self, space: KeySpace, hashes: Sequence[str]) -> None:
        self._index[space.id].update(hashes)

    def _names(self, space: KeySpace) -> list[PageInfo]:
        names = self._index[space.id]
        return [one for one in super()._names(space) if one.page_hash in names]


class _ListedSubject(WireSubject):
    storage_class = _Listed

    def tamper(self, space: KeySpace, page_hash: str, data: bytes | None) -> None:
        if data is None:
            with WireStore.from_config(self.config(Scratch(Path(), ""))) as store:
                store.batch_delete(space, [page_hash])


class _UnlistsWhatWasAbsentSubject(_ListedSubject):
    pass


@caught_by(
    "KV-104:a_page_that_is_set_during_a_listing_is_listed_later",
    says="does not list a page",
    subject=_UnlistsWhatWasAbsentSubject,
)
class UnlistsWhatWasAbsent(_Listed):
    """A scan takes the pages out of the index that were absent a moment before."""

    def _names(self, space: KeySpace) -> list[PageInfo]:
        found = super()._names(space)
        absent = self._index[space.id] - {one.page_hash for one in found}
        self._greet()  # another round trip, in which the pages may be set
        self._index[space.id] -= absent
        return found


_UnlistsWhatWasAbsentSubject.storage_class = UnlistsWhatWasAbsent


@caught_by(
    "KV-104:a_page_of_a_set_that_broke_off_is_listed_if_it_is_there", says="does not list a page"
)
class ListsAPageAfterwards(_Listed):
    """A page is listed one round trip after it was stored, so a writer that dies leaves it unlisted."""

    def _note(self, space: KeySpace, hashes: Sequence[str]) -> None:
        self._greet()
        super()._note(space, hashes)


@caught_by("KV-104:a_damaged_manifest_hides_no_other_key_space", says="raised StorageUnavailable")
class StumblesOverAManifest(Shelf):
    """A manifest that is damaged makes `spaces()` raise."""

    def _known_spaces(self) -> list[KeySpace]:
        found = super()._known_spaces()
        if len(found) < sum(1 for _ in self._root.iterdir()):
            raise StorageUnavailable(f"shelf: {self._root} has a manifest that is damaged")
        return found


@caught_by("KV-103:a_clear_that_may_not_remove_files_says_so", says="clear returned 0")
class ClearsWhatItCan(Shelf):
    """Clear removes the files that it can, and returns their number."""

    def clear(self, space: KeySpace) -> int:
        return sum(self._removed(space, info.page_hash) for info in self._names(space))


class _RemovesFolders(Shelf):
    def remove_space(self, space_id: str) -> int:
        removed = sum(self.clear(space) for space in self._known_spaces() if space.id == space_id)
        shutil.rmtree(self._root / space_id, ignore_errors=True)
        return removed


@caught_by("KV-103:a_removed_key_space_can_be_used_again", says="batch_set refused")
class RemembersRemovedFolders(_RemovesFolders):
    """A handle that has read a page never makes its folder again, though `remove_space` removes it."""

    _known: set[str] = own(set)

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        data = super()._read(space, page_hash)
        if data is not None:
            self._known.add(space.id)
        return data

    def _remember(self, space: KeySpace) -> bool:
        return space.id in self._known or super()._remember(space)


@caught_by("KV-103:a_removed_key_space_can_be_used_again", says="does not list a key space")
class NamesARemovedSpaceNoMore(_RemovesFolders):
    """A handle writes the manifest of a key space once, even if it has removed it since."""

    _named: set[KeySpace] = own(set)

    def _remember(self, space: KeySpace) -> bool:
        if space in self._named:
            self._folder(space).mkdir(exist_ok=True)
            return True
        self._named.add(space)
        return super()._remember(space)


@caught_by("KV-103:a_removed_key_space_is_gone_and_no_other", says="lists a key space")
class RemovedSpaceIsListed(DictStore):
    """`remove_space` removes the pages of a key space, but not its name."""

    def _drop_name(self, space_id: str) -> None:
        del space_id


@caught_by("KV-103:a_removed_key_space_is_gone_and_no_other")
class RemovesTheModel(DictStore):
    """`remove_space` removes all key spaces of the model, because their ids are looked up by it."""

    def remove_space(self, space_id: str) -> int:
        models = {one.model for one in self._known_spaces() if one.id == space_id}
        return sum(
            super(RemovesTheModel, self).remove_space(one.id)
            for one in self._known_spaces()
            if one.model in models
        )


@caught_by("KV-103:a_removed_key_space_gives_its_room_back")
class RemovedSpaceKeepsItsRoom(DictStore):
    """The bytes of a removed key space still count as used."""

    def remove_space(self, space_id: str) -> int:
        used = self._nbytes
        removed = super().remove_space(space_id)
        self._nbytes = used
        return removed
