"""Whatever is being checked: a page whose set returned False is looked for, at once and in the end."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from hicache_conformance.case.case import Case
from hicache_conformance.checks import all_checks
from hicache_conformance.run.outcomes import Outcome, Violation
from hicache_conformance.run.runner import RunOptions, run_check
from hicache_conformance.scenarios.attempts import Caller
from hicache_conformance.selftest.references.dict_store import DictStore
from hicache_conformance.selftest.references.subjects import DictSubject, subject_of

if TYPE_CHECKING:
    from collections.abc import Hashable

    from hicache_conformance.selftest.references.dict_store import Stored

    from hicache_storage.keys import KeySpace

SHOWS = "a page is there whose batch_set returned False"


class KeepsWhatItRefuses(DictStore):
    _sets = 0

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        self._sets += 1
        return super()._write_whole(space, page_hash, data) and self._sets % 5 != 0


class KeepsItLater(DictStore):
    """A refused page shows when something else is deleted."""

    _late: tuple[Hashable, Stored] | None = None
    _sets = 0

    def _put(self, key: Hashable, stored: Stored) -> None:
        self._sets += 1
        if self._sets % 5 == 0:
            self._late = key, stored
            raise BufferError
        super()._put(key, stored)

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        try:
            return super()._write_whole(space, page_hash, data)
        except BufferError:
            return False

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        if self._late is not None:
            super()._put(*self._late)
        return super()._removed(space, page_hash)


class RefusesTheSecond(DictStore):
    """A second set of a page that is there is answered with False, and changes nothing."""

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        present = self._read(space, page_hash) is not None
        return not present and super()._write_whole(space, page_hash, data)


@pytest.mark.parametrize(
    "name", ["what_was_set_is_there", "a_miss_is_false", "scan_follows_every_change"]
)
def test_a_store_that_keeps_what_it_refuses_fails_whatever_is_checked(name: str) -> None:
    check = next(one for one in all_checks() if one.run.__name__ == name)

    record = run_check(subject_of(KeepsWhatItRefuses), check, RunOptions())

    assert (Outcome.FAILED, SHOWS) == (record.outcome, record.message)
    assert any("batch_set" in line and "False" in line for line in record.sequence)


def test_a_refused_page_that_shows_later_is_found_when_the_check_ends() -> None:
    with Case(subject_of(KeepsItLater)()) as case:
        store, space = case.open(), case.space()
        pages = case.contents(space, case.hashes(5))
        for page_hash, data in pages.items():
            store.set_once(space, {page_hash: data})
        store.delete(space, list(pages)[:1])

        with pytest.raises(Violation, match=SHOWS):
            case.look_again()


def test_a_page_that_was_there_before_its_set_was_refused_is_no_violation() -> None:
    with Case(subject_of(RefusesTheSecond)()) as case:
        store, space = case.open(), case.space()
        pages = case.stored(store, space, 2)

        assert [False, False] == store.set_once(space, pages)
        case.look_again()


def test_a_page_that_was_refused_and_set_again_is_no_violation() -> None:
    with Case(DictSubject()) as case:
        case.reconfigure(capacity_nbytes=2048)
        store, space = case.open(), case.space(1024)
        first = case.stored(store, space, 2)
        late = case.contents(space, case.hashes(1))
        assert [False] == store.set_once(space, late)
        store.delete(space, list(first))
        assert [True] == store.set_once(space, late)

        case.look_again()


def test_a_page_that_another_thread_sets_meanwhile_is_no_violation() -> None:
    """The other set begins when this one has been refused, before its page is looked for."""

    class SetElsewhereMeanwhile(DictStore):
        def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
            if threading.current_thread() is threading.main_thread():
                other.start()
                other.join()
                return False
            return super()._write_whole(space, page_hash, data)

    with Case(subject_of(SetElsewhereMeanwhile)()) as case:
        store, space = case.open(), case.space()
        page = case.contents(space, case.hashes(1))
        other = threading.Thread(target=store.set_once, args=(space, page))

        assert [False] == store.set_once(space, page)
        assert [True] == store.exists(space, list(page))


def test_a_page_that_a_call_outside_the_probe_may_have_set_is_no_violation() -> None:
    with Case(subject_of(RefusesTheSecond)()) as case:
        store, space = case.open(), case.space()
        page = case.contents(space, case.hashes(1))
        assert [True] == Caller(store, space, 10.0).set(page).answer

        assert [False] == store.set_once(space, page)
