"""Stores that clear too much or too little."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from hicache_conformance.selftest.mutants import caught_by
from hicache_conformance.selftest.references.dict_store import DictStore
from hicache_conformance.selftest.references.file_a_page import Shelf

if TYPE_CHECKING:
    from collections.abc import Hashable

    from hicache_conformance.selftest.references.dict_store import DictSettings, Stored
    from hicache_conformance.selftest.references.file_a_page import ShelfSettings
    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import PageInfo


class _ClearsMore(DictStore):
    """A store that clears every key space that it takes for the one that it was told to."""

    def clear(self, space: KeySpace) -> int:
        for other in self._known_spaces():
            if other != space and self._is_meant(other, space):
                super().clear(other)
        return super().clear(space)

    def _is_meant(self, other: KeySpace, space: KeySpace) -> bool:
        raise NotImplementedError


@caught_by("KV-103")
class ClearsAll(_ClearsMore):
    """Clearing one key space clears all of them, as FLUSHDB does."""

    def _is_meant(self, other: KeySpace, space: KeySpace) -> bool:  # noqa: ARG002 - that is the fault
        return True


@caught_by("KV-103")
class ClearsAllPools(_ClearsMore):
    """Clearing one pool clears all pools of its model."""

    def _is_meant(self, other: KeySpace, space: KeySpace) -> bool:
        return (other.model, other.shard) == (space.model, space.shard)


@caught_by("KV-103")
class ClearsByIdPrefix(_ClearsMore):
    """Clearing goes by the first four digits of the id."""

    def _is_meant(self, other: KeySpace, space: KeySpace) -> bool:
        return other.id.startswith(space.id[:4])


@caught_by("KV-103")
class ClearsByNamePrefix(_ClearsMore):
    """Clearing a model clears those whose names begin with its own."""

    def _is_meant(self, other: KeySpace, space: KeySpace) -> bool:
        return other.model.startswith(space.model)


@caught_by("KV-103")
class ClearsByPattern(_ClearsMore):
    """The model's name is part of a pattern, as in `KEYS name:*`, and its `*` is not escaped."""

    def _is_meant(self, other: KeySpace, space: KeySpace) -> bool:
        return fnmatchcase(other.model, space.model)


@caught_by("KV-103", check="clear_spares_other_programs_files")
class ClearsTheDirectory(Shelf):
    """Clearing removes every file and folder that lies in the store's directory, beside its own."""

    def clear(self, space: KeySpace) -> int:
        removed = super().clear(space)
        for path in self._root.iterdir():
            if not re.fullmatch(r"[0-9a-f]{32}", path.name):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        return removed


@caught_by("KV-103")
class ClearsHashNames(Shelf):
    """Clearing removes every file whose name is that of a page, wherever it lies."""

    def clear(self, space: KeySpace) -> int:
        removed = super().clear(space)
        for path in self._root.iterdir():
            if re.fullmatch(r"[0-9a-f]{64}", path.name):
                path.unlink()
        return removed


@caught_by("KV-103", check="clear_spares_another_stores_pages")
class ClearsNextDoor(Shelf):
    """Clearing goes through all directories beside the store's own: other stores of one parent."""

    def clear(self, space: KeySpace) -> int:
        removed = super().clear(space)
        for folder in self._root.parent.glob(f"*/{space.id}"):
            shutil.rmtree(folder)
        return removed


@caught_by("KV-103")
class ClearCountsSets(DictStore):
    """Clear counts sets, not pages: one that was set again counts twice."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        self._set_count: Counter[KeySpace] = Counter()

    def _put(self, key: Hashable, stored: Stored) -> None:
        super()._put(key, stored)
        self._set_count[stored.space] += 1

    def clear(self, space: KeySpace) -> int:
        super().clear(space)
        return self._set_count.pop(space, 0)


@caught_by("KV-103")
class ClearCountsNothing(DictStore):
    """Clear always says 0."""

    def clear(self, space: KeySpace) -> int:
        super().clear(space)
        return 0


@caught_by("KV-103")
class ClearsOneListing(DictStore):
    """Clear removes what one listing shows, and a listing ends at 128."""

    def clear(self, space: KeySpace) -> int:
        hashes = [info.page_hash for info in self.scan(space)][:128]
        return sum(self.batch_delete(space, hashes))


@caught_by("KV-103")
class ClearBarsThePages(DictStore):
    """Clear bars the pages that were there, and a later set does not lift the bar."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        self._barred: set[Hashable] = set()

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


@caught_by("KV-103", check="clear_reaches_other_handles")
class ClearIsForgotten(Shelf):
    """Clear hides the pages in this instance only: reopened, they are back."""

    def __init__(self, settings: ShelfSettings) -> None:
        self._hidden: set[Hashable] = set()
        super().__init__(settings)

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


@caught_by("KV-103", check="clear_reaches_other_handles")
class ClearLeavesCopies(Shelf):
    """Pages that a handle has read stay in its memory when another handle clears them."""

    def __init__(self, settings: ShelfSettings) -> None:
        self._copies: dict[tuple[KeySpace, str], bytes] = {}
        super().__init__(settings)

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        copy = self._copies.get((space, page_hash)) or super()._read(space, page_hash)
        if copy is not None:
            self._copies[space, page_hash] = copy
        return copy

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        self._copies.pop((space, page_hash), None)
        return super()._removed(space, page_hash)


@caught_by("KV-103", check="another_handle_clears_what_the_first_set")
class ClearsItsOwnOnly(Shelf):
    """A handle clears the pages that it has set itself."""

    def __init__(self, settings: ShelfSettings) -> None:
        self._own: set[tuple[KeySpace, str]] = set()
        super().__init__(settings)

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        self._own.add((space, page_hash))
        return super()._write_whole(space, page_hash, data)

    def clear(self, space: KeySpace) -> int:
        own = [name for home, name in self._own if home == space and self._has(space, name)]
        return sum(self.batch_delete(space, own))
