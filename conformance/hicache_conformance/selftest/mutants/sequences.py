"""Stores that are right call by call, and go wrong after a certain sequence of calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.selftest.mutants import caught_by, own
from hicache_conformance.selftest.references.dict_store import DictStore
from hicache_conformance.selftest.references.file_a_page import Shelf

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from hicache_conformance.selftest.references.dict_store import Stored
    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import PageInfo


@caught_by("KV-007:a_deleted_page_can_be_set_again")
class SecondDeleteStays(DictStore):
    """A page that was deleted twice never comes back: set, delete, set, delete, set."""

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
    """Deleting an absent page frees its old slot again: two later pages share it, and their bytes."""

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
    """A log of versions: deleting a page that was set twice brings its first bytes back."""

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
    """Clear removes what scan listed last: pages that were set since then stay."""

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
    """A handle remembers for ever that a page was missing when it looked: another one may set it."""

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
    """A page that was set last is in memory until the next set: closing loses it."""

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
