"""What a case makes is removed when the case ends, or when nothing refers to it any more."""

from __future__ import annotations

import gc
import tempfile
import threading
import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import records
from hicache_conformance.case.case import Case
from hicache_conformance.case.trace import Trace
from hicache_conformance.checks import all_checks
from hicache_conformance.report.record import CheckRecord
from hicache_conformance.run.operator import deployed_store
from hicache_conformance.run.outcomes import NotVerified, Outcome, Verdict, Violation
from hicache_conformance.run.runner import RunOptions, run_check
from hicache_conformance.run.subject import Scratch, Subject
from hicache_conformance.scenarios.attempts import Caller
from hicache_conformance.selftest.mutants import all_mutants
from hicache_conformance.selftest.references.dict_store import DictStore, Stored
from hicache_conformance.selftest.references.file_a_page import Shelf
from hicache_conformance.selftest.references.subjects import DictSubject, WireSubject, subject_of
from pages import space
from xxhash import xxh3_64_digest

from hicache_storage.errors import StorageUnavailable, UnsupportedOperation
from hicache_storage.keys import KeySpace
from hicache_storage.page import Page
from hicache_storage.storage import HiCacheStorage, Retention


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty directory the one for temporary files. No other file is beside it."""
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


def test_the_scratch_is_removed_after_a_case(temporary: Path) -> None:
    with Case(DictSubject()) as case:
        case.new_scratch().path.joinpath("page").touch()

    assert [] == list(temporary.iterdir())


def test_a_case_that_was_not_ended_leaves_nothing(temporary: Path) -> None:
    case = Case(DictSubject())
    assert case.scratch.path.is_relative_to(temporary)

    del case
    gc.collect()
    assert [] == list(temporary.iterdir())


def test_callbacks_at_the_end_of_a_case_run_before_its_scratch_is_removed() -> None:
    seen: list[bool] = []
    with Case(DictSubject()) as case:
        path = case.scratch.path
        case.at_end(lambda: seen.append(path.is_dir()))

    assert [True] == seen


def test_a_store_that_takes_names_for_paths_leaves_nothing(temporary: Path) -> None:
    control = next(one for one in all_mutants() if one.name == "NamesEscape")
    checks = [check for check in all_checks() if check.rule.id == "KV-105"]

    subject = subject_of(control.storage_class)
    said = {check.run.__name__: run_check(subject, check, RunOptions()).message for check in checks}

    assert "outside its directory" in said["a_model_name_leads_to_no_other_directory"]
    assert [temporary] == list(temporary.parent.iterdir())
    assert [] == list(temporary.iterdir())


def test_no_pages_are_missed_without_a_call() -> None:
    with Case(DictSubject()) as case:
        store, space = case.open(), case.space()
        case.must_miss(store, space, [], "was never set")

        assert not [line for line in case.trace.sequence() if "batch_" in line]


# What a trace records about calls, and how much of them it keeps.


class Found:
    """An entry that a listing yields."""

    def __repr__(self) -> str:
        return "Found"


def test_a_listing_is_not_kept_alive() -> None:
    trace = Trace()
    found = Found()
    seen = weakref.ref(found)

    trace.ended(trace.began("scan"), [found])
    del found
    gc.collect()

    assert seen() is None


def test_a_long_listing_is_shown_by_its_first_entries() -> None:
    trace = Trace()

    trace.ended(trace.began("scan"), [Found()] * 9)

    assert ["scan() -> [Found, Found, Found, Found, ... 9 in all]"] == trace.sequence()


def test_a_large_batch_is_shown_by_the_pages_in_question_with_their_verdicts() -> None:
    trace = Trace()
    hashes = [f"{number:08x}" for number in range(6)]

    trace.ended(trace.began("batch_get", hashes), [True, True, False, True, True, True])

    assert ["batch_get([2] 00000002 of 6 pages) -> [2] False"] == trace.sequence("00000002")


def test_a_store_of_many_key_spaces_is_not_taken_for_one_that_leaks(tmp_path: Path) -> None:
    [check] = [
        one for one in all_checks() if one.run.__name__ == "opening_and_closing_keeps_memory"
    ]
    subject = WireSubject()
    with WireSubject.storage_class.from_config(subject.config(Scratch(tmp_path, "x"))) as storage:
        for number in range(800):
            storage.open_space(space(model=f"model-{number}"))

        record = run_check(WireSubject, check, RunOptions(call_limit_s=10))

    assert (Outcome.PASSED, "") == (record.outcome, record.got)


def test_a_clear_is_shown_with_the_pages_that_it_may_have_removed() -> None:
    trace = Trace()
    for line, pages in (("a.clear kv", ()), ("a.batch_set kv", ("ab" * 4,)), ("a.clear kv", ())):
        trace.ended(trace.began(line, pages), 1)
    trace.ended(trace.began("a.batch_set kv", ("cd" * 4,)), 1)

    assert ["a.batch_set kv(abababab) -> 1", "a.clear kv() -> 1"] == trace.sequence("ab" * 4)


# In every check, a page whose set returned False is looked up at once and at the end.

SHOWS = "a page is there although its batch_set returned False"


class KeepsWhatItRefuses(DictStore):
    _sets = 0

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        self._sets += 1
        return super()._write_whole(space, page_hash, data) and self._sets % 5 != 0


class KeepsItLater(DictStore):
    """A store in which a refused page appears when another page is deleted."""

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
    """A store in which a set of a present page returns False and changes nothing."""

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
    """The other set begins after this one was refused, before the probe looks up its page."""

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


# The kit distinguishes what a store always does from what it does in the situation of a check.

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


# A missing operation is `not_verified` if the author declared it absent, and a violation if not.

WORDS = "it deletes no single page"


class KeepsAll(Shelf):
    """A right store whose interface has no delete."""

    absent = {"batch_delete": WORDS}  # noqa: RUF012 - as an author writes it

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        raise UnsupportedOperation("no delete")


class KeepsAllAndReadsNothing(KeepsAll):
    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        raise UnsupportedOperation("no get")


class Undeclared(Subject):
    storage_class = KeepsAll

    def config(self, scratch: Scratch) -> Mapping[str, Any]:
        return {"path": str(scratch.path)}


class Declared(Undeclared):
    absent = KeepsAll.absent


class DeclaredWithoutClear(Undeclared):
    absent = {**KeepsAll.absent, "clear": "nor does it clear"}  # noqa: RUF012 - as above


class DeclaredAndReadsNothing(Declared):
    storage_class = KeepsAllAndReadsNothing


class SetsNothing(Shelf):
    """A store whose interface has no set either."""

    absent = {"batch_set": "it is written by another program"}  # noqa: RUF012 - as above

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        raise UnsupportedOperation("no set")


class ConfigIsItsEngines(Undeclared):
    absent = {"from_config": "its engine checks its config"}  # noqa: RUF012 - as above


def outcome_of(subject: type[Subject], name: str) -> CheckRecord:
    (check,) = [one for one in all_checks() if one.name == name]
    return run_check(subject, check, RunOptions(quick=True))


def test_a_check_that_needs_an_absent_operation_is_not_verified_and_names_it() -> None:
    record = outcome_of(Declared, "KV-007:a_deleted_page_is_gone")

    assert Outcome.NOT_VERIFIED is record.outcome
    assert f"the store was not written for batch_delete: {WORDS}" == record.message


def test_a_refusal_not_declared_absent_is_a_violation() -> None:
    assert Outcome.FAILED is outcome_of(Undeclared, "KV-007:a_deleted_page_is_gone").outcome


def test_another_operation_that_is_refused_is_a_violation() -> None:
    record = outcome_of(DeclaredAndReadsNothing, "KV-003:any_bytes_are_read_back")

    assert Outcome.FAILED is record.outcome


def test_a_check_that_needs_nothing_absent_passes() -> None:
    assert (
        Outcome.PASSED
        is outcome_of(Declared, "KV-201:verdicts_are_in_the_order_of_the_hashes").outcome
    )


def test_an_operation_absent_in_another_process_is_absent() -> None:
    record = outcome_of(Declared, "KV-502:a_page_deleted_elsewhere_is_gone_at_once")

    assert Outcome.NOT_VERIFIED is record.outcome


def test_an_absent_operation_raises_storage_closed_after_close() -> None:
    record = outcome_of(Declared, "KV-301:every_method_after_close_raises_storage_closed")

    assert Outcome.PASSED is record.outcome


class OpensToWrite(Declared):
    absent = {**Declared.absent, "open_read_only": WORDS}  # noqa: RUF012 - as of the base


def test_a_store_that_cannot_be_opened_to_read_only_is_not_asked_what_that_changes() -> None:
    record = outcome_of(OpensToWrite, "KV-308:looking_changes_nothing")

    assert Outcome.NOT_VERIFIED is record.outcome
    assert WORDS in record.message


def test_a_config_that_an_engine_checks_is_not_verified() -> None:
    record = outcome_of(ConfigIsItsEngines, "KV-303:unknown_fields_are_refused_by_name")

    assert Outcome.NOT_VERIFIED is record.outcome


def test_the_verdict_on_a_store_that_lacks_something_is_partial_at_best() -> None:
    passed = records.check_record("KV-002", Outcome.PASSED)
    record = records.record(passed, absent=KeepsAll.absent)

    assert Verdict.PARTIAL is record.verdict
    assert (f"batch_delete: {WORDS}",) == record.reasons


def test_it_excuses_no_failure() -> None:
    failed = records.check_record("KV-002", Outcome.FAILED)

    assert Verdict.FAILED is records.record(failed, absent=KeepsAll.absent).verdict


def test_a_dynamic_store_declares_its_absent_operations() -> None:
    class_of_it = {"backend_name": "acme", "module_path": "odd_stores", "class_name": "Undeleting"}
    _, make_subject = deployed_store("dynamic", class_of_it)

    assert {"batch_delete": WORDS} == make_subject().absent


class ChecksItself(Shelf):
    """A right store that is used without the page store: it keeps a digest with each page."""

    absent = {"page_store": "its engine puts no checksum around pages"}  # noqa: RUF012 - as above

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        sealed = super()._read(space, page_hash)
        if sealed is None or xxh3_64_digest(sealed[8:]) != sealed[:8]:
            return None
        return sealed[8:]

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        return self._read(space, page_hash) is not None

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        return super()._write_whole(space, page_hash, xxh3_64_digest(data) + data)


def test_a_store_used_without_the_page_store_may_find_flipped_bits_itself() -> None:
    record = outcome_of(
        subject_of(ChecksItself), "KV-404:a_flipped_bit_is_no_hit_without_the_page_store"
    )

    assert Outcome.PASSED is record.outcome


def test_the_page_store_is_not_asked_for_pages_that_it_never_sees() -> None:
    record = outcome_of(subject_of(ChecksItself), "KV-404:a_flipped_bit_is_a_miss_and_heals")

    assert Outcome.NOT_VERIFIED is record.outcome


def test_a_store_under_the_page_store_need_not_find_flipped_bits() -> None:
    record = outcome_of(Declared, "KV-404:a_flipped_bit_is_no_hit_without_the_page_store")

    assert Outcome.NOT_DECLARED is record.outcome


SEQUENCES = "KV-002:any_sequence_of_calls_agrees_with_a_dict"


def test_a_sequence_of_calls_leaves_out_what_is_absent() -> None:
    record = outcome_of(DeclaredWithoutClear, SEQUENCES)

    assert (Outcome.PASSED, "") == (record.outcome, record.message)
    assert int(record.evidence["sequences"]) >= 1


def test_a_sequence_that_cannot_do_without_is_not_verified() -> None:
    record = outcome_of(subject_of(SetsNothing), SEQUENCES)

    assert Outcome.NOT_VERIFIED is record.outcome
    assert "it is written by another program" in record.message
