"""An exception that a store raises is the store's failure. One that the kit raises is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hicache_conformance.checks import all_checks
from hicache_conformance.run.attribution import blamed
from hicache_conformance.run.outcomes import Outcome
from hicache_conformance.run.runner import RunOptions, run_check
from hicache_conformance.selftest.references.dict_store import DictStore
from hicache_conformance.selftest.references.file_a_page import Shelf
from hicache_conformance.selftest.references.subjects import DictSubject, ShelfSubject, subject_of

from hicache_storage.errors import StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hicache_conformance.report.record import CheckRecord
    from hicache_conformance.run.subject import Subject

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import HostBuffer


class CannotDelete(DictStore):
    def _remove(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        raise StorageUnavailable("the table is broken")


class DeletesNothing(DictStore):
    def _remove(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        return [False] * len(hashes)


class RegistersNothing(DictStore):
    def register_buffer(self, buffer: HostBuffer) -> None:
        raise TypeError(f"no buffer: {type(buffer)}")


class RaisesOnAShortWrite(Shelf):
    def _write_file(self, path: Path, data: bytes) -> None:
        try:
            super()._write_file(path, data)
        except OSError as error:
            raise BufferError("half a page") from error


def record_of(subject: type[Subject], name: str) -> CheckRecord:
    check = next(one for one in all_checks() if one.run.__name__ == name)
    return run_check(subject, check, RunOptions())


@pytest.mark.parametrize(
    ("store", "check", "message"),
    [
        (CannotDelete, "a_deleted_page_is_gone", "batch_delete raised StorageUnavailable"),
        (DeletesNothing, "a_deleted_page_is_gone", "batch_delete is False"),
        (
            RegistersNothing,
            "every_method_after_close_raises_storage_closed",
            "register_buffer raised TypeError",
        ),
        (RaisesOnAShortWrite, "a_disk_without_room_refuses_the_page", "BufferError"),
    ],
    ids=["raises", "returns-false", "foreign-exception", "in-another-process"],
)
def test_it_is_a_failure_of_the_store_and_is_named(
    store: type[DictStore | Shelf], check: str, message: str
) -> None:
    record = record_of(subject_of(store), check)

    assert record.outcome is Outcome.FAILED
    assert message in record.message


def test_an_error_of_the_kit_is_reported_as_its_own() -> None:
    for subject in (DictSubject, ShelfSubject):
        with pytest.raises(ZeroDivisionError) as raised:
            _ = 1 // 0

        assert blamed(raised.value, subject.storage_class) is None
