"""Stores that list what is not there, or not all that is, or that can't be changed meanwhile."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from itertools import chain, repeat
from typing import TYPE_CHECKING

from hicache_conformance.selftest.mutants import caught_by
from hicache_conformance.selftest.references.dict_store import DictStore
from hicache_conformance.selftest.references.file_a_page import Shelf
from hicache_storage.keys import KeySpace, Shard
from hicache_storage.storage import PageInfo

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from hicache_conformance.selftest.references.dict_store import DictSettings, Stored
    from hicache_conformance.selftest.references.file_a_page import ShelfSettings
    from hicache_storage.page import Page

_LISTED_AT_ONCE = 1000


@caught_by("KV-104")
class ListsAThousand(DictStore):
    """A listing ends after its first thousand pages: nobody asks for the next part."""

    def _names(self, space: KeySpace) -> list[PageInfo]:
        return super()._names(space)[:_LISTED_AT_ONCE]


@caught_by("KV-104")
class ListsSeamsTwice(DictStore):
    """Parts of a listing overlap: each begins with the page that ended the one before."""

    def _names(self, space: KeySpace) -> list[PageInfo]:
        names = super()._names(space)
        return [
            info
            for start in range(0, len(names), _LISTED_AT_ONCE)
            for info in names[max(start - 1, 0) : start + _LISTED_AT_ONCE]
        ]


@caught_by("KV-104")
class ListsWithoutEnd(DictStore):
    """The cursor never moves: the first part of a long listing comes again and again."""

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        names = self._names(space)
        parts = repeat(names[:20]) if len(names) > 20 else [names]
        return chain.from_iterable(parts)


@caught_by("KV-104", check="a_page_that_is_being_set_is_listed_as_itself_or_not")
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


@caught_by("KV-104", check="a_page_that_is_being_set_is_listed_as_itself_or_not")
class ListsPartsOfPages(Shelf):
    """A page has its name from the first byte on, and is listed with as many bytes as there are."""

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        for page_hash, page in zip(hashes, pages, strict=True):
            with self._path(space, page_hash).open("wb", buffering=0) as file:
                file.writelines(page.segments)
        return [True] * len(hashes)

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        return iter(self._names(space))


@caught_by("KV-104")
class ListsManifests(Shelf):
    """Whatever lies in the directory of a key space is listed as a page, its manifest too."""

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        found = self._entries(self._folder(space), re.compile(r"[^.].*"))
        return (PageInfo(path.name, space.stored_nbytes) for path in found)


@caught_by("KV-104")
class ListsPayloadSizes(DictStore):
    """The size that is listed is the page's without its frame."""

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        return (PageInfo(info.page_hash, space.page_nbytes) for info in super().scan(space))


@caught_by("KV-104")
class ListsFileSizes(DictStore):
    """The size that is listed is that of the file, with the checksum that the store appends."""

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        return (PageInfo(info.page_hash, info.nbytes + 8) for info in super().scan(space))


@caught_by("KV-104")
class ListsLongHashesOnly(DictStore):
    """Only names of 64 digits are taken for pages."""

    def _names(self, space: KeySpace) -> list[PageInfo]:
        return [info for info in super()._names(space) if len(info.page_hash) == 64]


@caught_by("KV-104")
class ListsDeletedPages(DictStore):
    """The index of a listing is only added to: what was deleted stays in it."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        self._index: dict[tuple[KeySpace, str], PageInfo] = {}

    def _put(self, key: Hashable, stored: Stored) -> None:
        super()._put(key, stored)
        name = stored.space, stored.page_hash
        self._index[name] = PageInfo(stored.page_hash, len(stored.data))

    def _names(self, space: KeySpace) -> list[PageInfo]:
        return [info for (other, _), info in self._index.items() if other == space]


@caught_by("KV-104")
class ListsEverySet(DictStore):
    """The index of a listing has an entry for every set: a page that was set twice is listed twice."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        self._log: list[Stored] = []

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


@caught_by("KV-104")
class ListsAllPools(DictStore):
    """A listing has the pages of all pools of the model."""

    def _names(self, space: KeySpace) -> list[PageInfo]:
        pools = [one for one in self._known_spaces() if one.model == space.model]
        return [info for pool in pools for info in super(ListsAllPools, self)._names(pool)]

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        return iter(self._names(space))


@caught_by("KV-104")
class ListsByNamePrefix(DictStore):
    """A listing has the pages of every model whose name begins with this one's."""

    def _names(self, space: KeySpace) -> list[PageInfo]:
        alike = [
            one
            for one in self._known_spaces()
            if one.model.startswith(space.model) and replace(one, model=space.model) == space
        ]
        return [info for one in alike for info in super(ListsByNamePrefix, self)._names(one)]


@caught_by("KV-104")
class ScanNeedsAPage(DictStore):
    """A listing of a key space without pages is a KeyError."""

    def _names(self, space: KeySpace) -> list[PageInfo]:
        names = super()._names(space)
        if not names:
            raise KeyError(space.id)
        return names


@caught_by("KV-104")
class ScansTheLiveDict(DictStore):
    """A listing walks through the dict itself, which may not change meanwhile."""

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        for stored in self._pages.values():
            if stored.space == space:
                yield PageInfo(stored.page_hash, len(stored.data))


@caught_by("KV-104", check="a_listing_bears_deletes_by_its_reader")
class ScansByOffset(DictStore):
    """A listing asks for the next hundred by their number: deletes meanwhile move pages out of it."""

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        start = 0
        while part := self._names(space)[start : start + 100]:
            yield from part
            start += len(part)


@caught_by("KV-104", check="a_paused_listing_blocks_nobody")
class ScansUnderLock(DictStore):
    """A listing holds the lock from its first step to its last; its own thread may go on."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        self._lock = threading.RLock()  # type: ignore[assignment]  # it is as good as the other

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        with self._lock:
            for stored in list(self._pages.values()):
                if stored.space == space:
                    yield PageInfo(stored.page_hash, len(stored.data))


@caught_by("KV-104", check="two_listings_at_once_are_each_complete")
class ScansWithOneCursor(DictStore):
    """The store has one cursor: a listing that begins ends the one before."""

    _cursor: Iterator[PageInfo] = iter(())

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        self._cursor = iter(self._names(space))
        while (info := next(self._cursor, None)) is not None:
            yield info


# --- key spaces -------------------------------------------------------------------------------------


@caught_by("KV-104", check="another_handle_lists_the_same")
class SpacesForgotten(Shelf):
    """Key spaces are listed from memory: after reopening there are none."""

    def __init__(self, settings: ShelfSettings) -> None:
        self._seen: dict[KeySpace, None] = {}
        super().__init__(settings)

    def open_space(self, space: KeySpace) -> None:
        super().open_space(space)
        self._seen[space] = None

    def _known_spaces(self) -> list[KeySpace]:
        return list(self._seen)


@caught_by("KV-104", check="listings_survive_closing")
class SpacesGoneWithTheLast(Shelf):
    """Closing removes what describes the key spaces, for others to write anew."""

    def close(self) -> None:
        for manifest in self._root.glob("*/manifest.json") if not self._closed else ():
            manifest.unlink()
        super().close()


@caught_by("KV-104", check="every_key_space_is_listed_once")
class SpacesWithoutShard(DictStore):
    """The manifest of a key space has its names and sizes, and not its shard."""

    def _known_spaces(self) -> list[KeySpace]:
        return [
            KeySpace.from_manifest(
                {**space.manifest(), "shard": {"layers": [0, 1], "heads": None, "context": None}}
            )
            for space in super()._known_spaces()
        ]


@caught_by("KV-104", check="every_key_space_is_listed_once")
class SpacesWithFramesMerged(DictStore):
    """Key spaces are listed with the frame as a part of the page."""

    def _known_spaces(self) -> list[KeySpace]:
        return [
            replace(space, page_nbytes=space.stored_nbytes, frame_nbytes=0)
            for space in super()._known_spaces()
        ]


@caught_by("KV-104", check="every_key_space_is_listed_once")
class SpacesFromNames(DictStore):
    """Key spaces are made up from the names of directories: model and pool, the rest by default."""

    def _known_spaces(self) -> list[KeySpace]:
        return [
            KeySpace(
                model=space.model,
                pool=space.pool,
                dtype="bfloat16",
                layout="page_first",
                page_tokens=16,
                page_nbytes=space.page_nbytes,
                shard=Shard(layers=(0, 32), heads=(0, 8)),
            )
            for space in super()._known_spaces()
        ]


@caught_by("KV-104", check="every_key_space_is_listed_once")
class SpacesAsOftenAsOpened(DictStore):
    """A key space is listed as often as it was opened."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        self._opened: list[KeySpace] = []

    def open_space(self, space: KeySpace) -> None:
        super().open_space(space)
        self._opened.append(space)

    def _known_spaces(self) -> list[KeySpace]:
        return list(self._opened)


@caught_by("KV-104", check="many_key_spaces_are_listed")
class SpacesOfAPage(DictStore):
    """A listing of key spaces ends after its first hundred."""

    def _known_spaces(self) -> list[KeySpace]:
        return super()._known_spaces()[:100]


@caught_by("KV-104", check="a_cleared_key_space_is_listed_again")
class SpacesClearedForGood(DictStore):
    """A key space that was cleared is listed no more, whatever is set in it later."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        self._cleared: set[KeySpace] = set()

    def clear(self, space: KeySpace) -> int:
        self._cleared.add(space)
        return super().clear(space)

    def _known_spaces(self) -> list[KeySpace]:
        return [space for space in super()._known_spaces() if space not in self._cleared]


@caught_by("KV-104", check="key_spaces_are_listed_while_others_open")
class SpacesInTheLiveDict(DictStore):
    """A listing of key spaces walks through the dict itself, which may not change meanwhile."""

    def spaces(self) -> Iterator[KeySpace]:
        return iter(self._spaces)


@caught_by("KV-104", check="another_handle_lists_the_same")
class SpacesSetHere(Shelf):
    """A handle lists the pages that it has set itself."""

    def __init__(self, settings: ShelfSettings) -> None:
        self._own: set[tuple[KeySpace, str]] = set()
        super().__init__(settings)

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        self._own.add((space, page_hash))
        return super()._write_whole(space, page_hash, data)

    def _names(self, space: KeySpace) -> list[PageInfo]:
        return [info for info in super()._names(space) if (space, info.page_hash) in self._own]
