"""Wrong stores: what they refuse though there is room, and what they make of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hicache_conformance.selftest.mutants import caught_by
from hicache_conformance.selftest.references.dict_store import DictSettings, DictStore
from hicache_conformance.selftest.references.slow import SlowStore
from hicache_storage.storage import StorageStats

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from hicache_storage.keys import KeySpace

_EVERY = 5


class _Counting(DictStore):
    """Counts the pages that it is offered."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        self._offered = 0

    def _is_struck(self) -> bool:
        self._offered += 1
        return self._offered % _EVERY == 0


@caught_by("KV-009", check="an_empty_store_refuses_no_page")
class RefusesEveryFifth(_Counting):
    """Every fifth page is refused, for no reason."""

    def _make_room(self, key: Hashable, nbytes: int) -> bool:
        return not self._is_struck() and super()._make_room(key, nbytes)


@caught_by("KV-006", "KV-009")
class RefusesEveryFifthAndKeepsIt(_Counting):
    """Every fifth set is answered with False, and the page is there all the same."""

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        return super()._write_whole(space, page_hash, data) and not self._is_struck()


@caught_by("KV-006", "KV-009")
class RefusesAndKeepsWhatItMayForget(SlowStore):
    """A store that may forget answers every fifth set with False, and keeps the page all the same."""

    _offered = 0

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        self._offered += 1
        return super()._write_whole(space, page_hash, data) and self._offered % _EVERY != 0


@caught_by("KV-009", check="what_is_refused_is_counted")
class RefusesInSilence(DictStore):
    """A page that has no room is refused, and no counter says so."""

    def stats(self) -> StorageStats:
        stats = super().stats()
        return StorageStats(
            pages=stats.pages, nbytes=stats.nbytes, capacity_nbytes=stats.capacity_nbytes
        )


@caught_by("KV-009", check="what_is_refused_is_counted")
class CountsMissesAndNoRefusals(RefusesInSilence):
    """A page that has no room is refused in silence; lookups that find nothing are counted."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        self._misses = 0

    def _present(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        there = super()._present(space, hashes)
        self._misses += there.count(False)
        return there

    def stats(self) -> StorageStats:
        return replace(super().stats(), counters={"misses": self._misses})
