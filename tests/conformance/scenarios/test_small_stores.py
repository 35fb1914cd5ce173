"""The kit makes a store small by itself, and reports if it could not."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hicache_backends.file import FileStorage
from hicache_conformance.case.case import Case
from hicache_conformance.checks import all_checks
from hicache_conformance.run.outcomes import NotVerified, Outcome
from hicache_conformance.run.runner import RunOptions, run_check
from hicache_conformance.run.subject import Scratch, Subject
from hicache_conformance.scenarios.setup import store_many
from hicache_conformance.scenarios.small_stores import make_small, small_store
from hicache_conformance.selftest.references.dict_store import DictStore
from hicache_conformance.selftest.references.subjects import (
    RentedSubject,
    ShelfSubject,
    SqliteSubject,
)

LARGE_NBYTES = 256 << 20


class Large(Subject):
    """A store of a usual size."""

    storage_class = DictStore

    def config(self, scratch: Scratch) -> Mapping[str, Any]:
        return {"capacity_nbytes": LARGE_NBYTES}


class LargeWithAHook(Large):
    """A store whose author gives a config of small capacity."""

    def small_config(self, scratch: Scratch, capacity_nbytes: int) -> Mapping[str, Any]:
        return {**self.config(scratch), "capacity_nbytes": capacity_nbytes // 2}


class FreesNoRoom(DictStore):
    def _drop(self, key: Hashable) -> None:
        self._pages.pop(key, None)


class LargeAndFreesNoRoom(Large):
    storage_class = FreesNoRoom


def test_a_store_with_a_large_capacity_in_its_config_is_made_small() -> None:
    with Case(Large()) as case:
        small = small_store(case)

        assert small.capacity_nbytes < LARGE_NBYTES / 100
        assert small.probe.storage.stats().capacity_nbytes == small.capacity_nbytes


def test_a_large_store_is_found_when_deleting_frees_no_capacity() -> None:
    check = next(one for one in all_checks() if one.run.__name__ == "deleting_makes_room_again")

    record = run_check(LargeAndFreesNoRoom, check, RunOptions())

    assert (Outcome.FAILED, True) == (record.outcome, "has lost room" in record.message)


def test_the_hook_of_an_author_goes_before_the_field() -> None:
    with Case(LargeWithAHook()) as case:
        assert make_small(case, 1 << 20) == 1 << 19


def test_a_store_without_a_capacity_field_is_reported_as_not_made_small() -> None:
    with Case(ShelfSubject()) as case, pytest.raises(NotVerified, match="was not made small"):
        make_small(case, 1 << 20)


def test_a_store_that_is_not_the_tests_alone_is_left_as_it_is(tmp_path: Path) -> None:
    class Deployed(SqliteSubject):
        def config(self, scratch: Scratch) -> Mapping[str, Any]:
            return {"path": str(tmp_path / "deployed.sqlite")}

    with Case(Deployed()) as case, pytest.raises(NotVerified, match="not the test's alone"):
        make_small(case, 1 << 20)


class _Named(FileStorage):
    """A directory with the pages of several users, who are told apart by a name."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> _Named:
        return super().from_config(
            {field: value for field, value in config.items() if field != "name"}
        )


def test_a_store_in_which_only_names_are_the_tests_own_is_left_as_it_is(tmp_path: Path) -> None:
    class Shared(Subject):
        storage_class = _Named

        def config(self, scratch: Scratch) -> Mapping[str, Any]:
            config = {"path": str(tmp_path / "pages"), "capacity_nbytes": LARGE_NBYTES}
            return {**config, "name": scratch.prefix}

    with Case(Shared()) as user, Case(Shared()) as case:
        store, space = user.open(), user.space(64 << 10)
        store.open_space(space)
        kept = user.stored(store, space, 40)

        with pytest.raises(NotVerified, match="not the test's alone"):
            small_store(case).fill()
        assert all(store.exists(space, list(kept)))


def test_an_empty_store_that_is_named_by_the_tests_prefix_is_made_small(tmp_path: Path) -> None:
    class Own(Subject):
        storage_class = FileStorage

        def config(self, scratch: Scratch) -> Mapping[str, Any]:
            return {"path": str(tmp_path / scratch.prefix), "capacity_nbytes": LARGE_NBYTES}

    with Case(Own()) as case:
        assert make_small(case, 1 << 20) == 1 << 20


def test_a_store_without_figures_is_made_small_when_it_lists_no_key_space() -> None:
    with Case(RentedSubject()) as case:
        assert make_small(case, 1 << 20) == 1 << 20


def test_a_store_without_figures_that_lists_a_key_space_is_left_as_it_is() -> None:
    with Case(RentedSubject()) as case:
        store, space = case.open(), case.space()
        store.open_space(space)
        case.stored(store, space, 1)

        with pytest.raises(NotVerified, match="not the test's alone"):
            make_small(case, 1 << 20)


def test_a_check_whose_pages_were_refused_is_not_verified() -> None:
    with Case(Large()) as case:
        case.reconfigure(capacity_nbytes=200 * 1024)
        store, space = case.open(), case.space(1024)

        with pytest.raises(NotVerified, match="no room for the pages"):
            store_many(case, store, space, 1000)
