"""What a store was not written for is not verified where it is declared, and a violation elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import records
from hicache_conformance.checks import all_checks
from hicache_conformance.run.operator import deployed_store
from hicache_conformance.run.outcomes import Outcome, Verdict
from hicache_conformance.run.runner import RunOptions, run_check
from hicache_conformance.run.subject import Scratch, Subject
from hicache_conformance.selftest.references.file_a_page import Shelf
from hicache_conformance.selftest.references.subjects import subject_of
from xxhash import xxh3_64_digest

from hicache_storage.errors import UnsupportedOperation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_conformance.report.record import CheckRecord

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page

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
