"""The search finds sequences of calls, shortens them, and leaves nothing behind."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
from hicache_conformance.case.case import Case
from hicache_conformance.checks import all_checks
from hicache_conformance.report.record import CheckRecord
from hicache_conformance.run.outcomes import Outcome, Violation
from hicache_conformance.run.runner import RunOptions, run_check
from hicache_conformance.run.subject import Subject
from hicache_conformance.scenarios.model_pair import ModelPair, Step
from hicache_conformance.scenarios.sequence_search import SequenceSearch
from hicache_conformance.selftest.mutants.basics import (
    ClearsTheLastListing,
    OldVersionReturns,
    ReopenedWithoutTheLast,
    SecondDeleteStays,
    SlotFreedTwice,
    StaleSecondHandle,
)
from hicache_conformance.selftest.references.dict_store import DictStore, Stored
from hicache_conformance.selftest.references.subjects import (
    DictSubject,
    EvictingSubject,
    ShelfSubject,
    SlowSubject,
    subject_of,
)

from hicache_storage.errors import install_command
from hicache_storage.keys import KeySpace
from hicache_storage.storage import HiCacheStorage, PageInfo

MODEL = next(one for one in all_checks() if one.run.__name__.startswith("any_sequence_of_calls"))


def verdict_on(subject: type[Subject], seed: int = 0) -> CheckRecord:
    return run_check(subject, MODEL, RunOptions(quick=True, call_limit_s=10, seed=seed))


def found_in(storage_class: type[HiCacheStorage]) -> Violation:
    """Return the violation that a search with plenty of time finds."""
    with (
        Case(subject_of(storage_class)(), seed="found") as case,
        pytest.raises(Violation) as caught,
    ):
        SequenceSearch(case, limit_s=60).run(300)
    return caught.value


@pytest.mark.parametrize("subject", [DictSubject, ShelfSubject, EvictingSubject, SlowSubject])
def test_a_right_store_agrees_with_a_dict(subject: type[Subject]) -> None:
    record = verdict_on(subject)

    assert (Outcome.PASSED, "") == (record.outcome, record.message)
    assert int(record.evidence["sequences"]) >= 1


@pytest.mark.parametrize(
    ("storage_class", "most"),
    [
        (SecondDeleteStays, 6),
        (OldVersionReturns, 4),
        (ClearsTheLastListing, 3),
        (SlotFreedTwice, 6),
        (StaleSecondHandle, 3),
        (ReopenedWithoutTheLast, 2),
    ],
)
def test_a_finding_is_shown_in_the_fewest_steps(
    storage_class: type[HiCacheStorage], most: int
) -> None:
    violation = found_in(storage_class)

    assert len(violation.sequence) <= most


def test_a_seed_makes_the_same_sequence() -> None:
    first, second = (found_in(OldVersionReturns) for _ in range(2))

    assert first.sequence
    assert first.sequence == second.sequence


def test_a_page_that_is_lost_is_named_with_what_was_expected() -> None:
    violation = found_in(SecondDeleteStays)

    assert "the store disagrees with a dict about page" in violation.message
    assert "True: it was set" == violation.expected


def test_without_hypothesis_it_is_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    monkeypatch.delitem(sys.modules, "hicache_conformance.scenarios.sequence_search")

    record = verdict_on(DictSubject)

    assert Outcome.NOT_VERIFIED is record.outcome
    assert install_command("conformance") in record.message


def test_nothing_is_left_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    verdict_on(DictSubject)

    assert [] == list(tmp_path.iterdir())


def test_time_that_is_up_ends_the_search() -> None:
    with Case(DictSubject(), seed="late") as case:
        search = SequenceSearch(case, limit_s=-1000.0)  # a busy machine adds some
        search.run(50)

    assert 0 == search.sequences


# --- the pair ------------------------------------------------------------------------------------


def disagreement(storage_class: type[HiCacheStorage], *steps: Step) -> Violation:
    """Return the violation that these steps lead to."""
    with Case(subject_of(storage_class)()) as case:
        pair = ModelPair(case, "pair")

        def all_steps() -> None:
            for step in steps:
                pair.apply(step)

        with pytest.raises(Violation) as caught:
            all_steps()
    return caught.value


def test_a_step_that_raises_belongs_to_the_sequence() -> None:
    class Raises(DictStore):
        def _removed(self, space: KeySpace, page_hash: str) -> bool:
            raise KeyError(page_hash)

    violation = disagreement(Raises, Step("set", pages=(0,)), Step("delete", pages=(0,)))

    assert ["1. set page 0 of 'kv', version 1", "2. delete page 0 of 'kv'"] == violation.sequence


def test_a_refused_set_is_found() -> None:
    class Refuses(DictStore):
        """A store in which a deleted page can't be set again."""

        def _make_room(self, key: Hashable, nbytes: int) -> bool:
            return key not in self._deleted

        def _drop(self, key: Hashable) -> None:
            if key in self._pages:
                self._deleted.add(key)
            super()._drop(key)

        _deleted: ClassVar[set[Hashable]] = set()

    steps = [Step("set", pages=(0,)), Step("delete", pages=(0,)), Step("set", pages=(0,))]

    assert "batch_set is False" in disagreement(Refuses, *steps).message


def test_a_delete_that_returns_false_is_found() -> None:
    class Denies(DictStore):
        def _answer(self, verdicts: list[bool]) -> list[bool]:
            return verdicts

        def _remove(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
            return [False] * len(hashes)

    assert "batch_delete is False" in disagreement(Denies, Step("delete", pages=(0,))).message


def test_a_listing_that_lacks_a_page_is_found() -> None:
    class Blind(DictStore):
        def _names(self, space: KeySpace) -> list[PageInfo]:
            return []

    violation = disagreement(Blind, Step("set", pages=(2,)), Step("scan"))

    assert ("page 2", "scan lists nothing") == (violation.expected, violation.got)


def test_a_wrong_count_of_clear_is_found() -> None:
    class Miscounts(DictStore):
        def clear(self, space: KeySpace) -> int:
            return super().clear(space) + 1

    assert (
        "clear returns 2" in disagreement(Miscounts, Step("set", pages=(0,)), Step("clear")).message
    )


def test_bytes_of_another_page_are_found() -> None:
    class Mixes(DictStore):
        def _put(self, key: Hashable, stored: Stored) -> None:
            super()._put(key, stored)
            for other in self._pages:
                self._pages[other] = self._pages[other]._replace(data=stored.data)

    violation = disagreement(
        Mixes, Step("set", pages=(0,)), Step("set", pages=(1,)), Step("get", pages=(0,))
    )

    assert "version 1" == violation.expected
    assert "bytes of the page" in violation.got


def test_a_store_that_does_not_overwrite_keeps_the_first_version() -> None:
    from hicache_conformance.selftest.mutants.declarations import OverwritesAnyway

    steps = [Step("set", pages=(0,)), Step("set", pages=(0,)), Step("get", pages=(0,))]

    assert "version 1" == disagreement(OverwritesAnyway, *steps).expected
