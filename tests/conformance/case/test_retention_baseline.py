"""What a store does by habit is told from what it does in the situation of a check."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hicache_conformance.case.case import Case
from hicache_conformance.run.outcomes import NotVerified, Violation
from hicache_conformance.run.subject import Scratch, Subject
from hicache_conformance.selftest.references.dict_store import DictStore

from hicache_storage.errors import StorageUnavailable
from hicache_storage.storage import Retention

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import HiCacheStorage

FORGETFUL = replace(DictStore.capabilities, retention=Retention.BEST_EFFORT)


class RefusesEveryThird(DictStore):
    _turn = 0

    def _make_room(self, key: Hashable, nbytes: int) -> bool:
        if key in self._pages:
            return True
        self._turn += 1
        return self._turn % 3 != 0 and super()._make_room(key, nbytes)


class RefusesTheModelNamedOdd(DictStore):
    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        return space.model != "odd" and super()._write_whole(space, page_hash, data)


class ForgetsAfterTenReads(DictStore):
    capabilities = FORGETFUL
    _reads = 0

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        self._reads += 1
        if self._reads % 10 == 0:
            self._pages.clear()
        return super()._read(space, page_hash)


class ForgetsTheModelNamedOdd(DictStore):
    capabilities = FORGETFUL

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        return None if space.model == "odd" else super()._read(space, page_hash)


class OneHandle(DictStore):
    is_open = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> OneHandle:
        if cls.is_open:
            raise StorageUnavailable("it is open already")
        cls.is_open = True
        return super().from_config(config)

    def close(self) -> None:
        type(self).is_open = False
        super().close()


def case_of(storage: type[HiCacheStorage], **fields: int) -> Case:
    class OneSubject(Subject):
        storage_class = storage

        def config(self, scratch: Scratch) -> Mapping[str, Any]:
            return fields

    return Case(OneSubject())


def set_and_hold(case: Case, count: int, **changes: str) -> None:
    store, space = case.open(), case.space(64, **changes)
    case.must_hold(store, space, case.stored(store, space, count))


def test_a_page_that_is_refused_now_and_then_is_offered_again() -> None:
    with case_of(RefusesEveryThird) as case:
        set_and_hold(case, 20)


def test_pages_beyond_a_small_capacity_are_no_violation() -> None:
    with case_of(DictStore, capacity_nbytes=10 * 64) as case, pytest.raises(NotVerified):
        set_and_hold(case, 11)


def test_a_page_that_is_refused_in_one_situation_is_a_violation() -> None:
    with case_of(RefusesTheModelNamedOdd) as case, pytest.raises(Violation, match="refused"):
        set_and_hold(case, 3, model="odd")


def test_pages_that_are_forgotten_after_so_many_reads_are_no_violation() -> None:
    with case_of(ForgetsAfterTenReads) as case:
        set_and_hold(case, 7)


def test_a_page_that_is_forgotten_in_one_situation_is_a_violation() -> None:
    with case_of(ForgetsTheModelNamedOdd) as case, pytest.raises(Violation, match="is False"):
        set_and_hold(case, 3, model="odd")


def test_the_pages_of_the_retention_baseline_are_deleted() -> None:
    with case_of(ForgetsTheModelNamedOdd) as case:
        store, space = case.open(), case.space(64, model="odd")
        pages = case.stored(store, space, 3)
        with pytest.raises(Violation, match="is False"):
            case.must_hold(store, space, pages)
        assert len(pages) == store.storage.stats().pages


def test_a_store_of_one_handle_is_asked_for_its_claims_once() -> None:
    with case_of(OneHandle) as case:
        case.open()
        assert case.keeps


def test_a_second_handle_that_does_not_open_is_not_verified() -> None:
    with case_of(OneHandle) as case:
        case.open()
        with pytest.raises(NotVerified, match="one handle at a time"):
            case.open()
