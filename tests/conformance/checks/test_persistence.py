"""The checks of crashes and corruption, on right stores of unusual kinds."""

from __future__ import annotations

import os
import time
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hicache_conformance.checks import all_checks
from hicache_conformance.run.outcomes import Outcome
from hicache_conformance.run.runner import RunOptions, run_check
from hicache_conformance.run.subject import Scratch, Subject
from hicache_conformance.selftest.references.file_a_page import Shelf, ShelfSettings
from hicache_conformance.selftest.references.streaming import StreamingShelf
from hicache_conformance.selftest.references.subjects import (
    DictSubject,
    SqliteSubject,
    WireSubject,
)

from hicache_storage.errors import StorageUnavailable
from hicache_storage.storage import Capabilities

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from hicache_conformance.report.record import CheckRecord

QUICK = RunOptions(call_limit_s=10, quick=True)
FAMILY = ("KV-401", "KV-402", "KV-403", "KV-404")
ALL_CHECKS = {one.run.__name__: one for one in all_checks()}
CHECKS = {name: one for name, one in ALL_CHECKS.items() if one.rule.id in FAMILY}


def verdict(subject: type[Subject], name: str) -> CheckRecord:
    return run_check(subject, ALL_CHECKS[name], QUICK)


class Files(Subject):
    """A store of files whose author opened no back door."""

    storage_class = StreamingShelf

    def config(self, scratch: Scratch) -> Mapping[str, Any]:
        return {"path": str(scratch.path / "store")}


class ClaimsNothing(Shelf):
    """A store of files whose author has declared nothing."""

    capabilities = Capabilities()


class Exclusive(Shelf):
    """A store for one process at a time, whose lock does not outlive that process."""

    capabilities = replace(Shelf.capabilities, shared=False)

    def __init__(self, settings: ShelfSettings) -> None:
        super().__init__(settings)
        self._pid_file = self._root / "pid"
        if self._pid_file.exists() and self._is_alive(int(self._pid_file.read_text() or "0")):
            raise StorageUnavailable("another process has it open")
        self._pid_file.write_text(str(os.getpid()))

    def close(self) -> None:
        if not self._closed:
            self._pid_file.unlink(missing_ok=True)
        super().close()

    @staticmethod
    def _is_alive(pid: int) -> bool:
        return pid > 0 and os.path.exists(f"/proc/{pid}")  # noqa: PTH110 - as authors write it


class SweepsByAge(Shelf):
    """A store that removes temporary files after an hour, since it can't know their writers."""

    def _temp_path(self, path: Path) -> Path:
        return path.with_name(f".old-{uuid.uuid4().hex}")

    def _sweep(self) -> None:
        for temp in self._root.glob("*/.old-*"):
            if time.time() - temp.stat().st_mtime > 3600:
                temp.unlink(missing_ok=True)


class LeasesPages(Shelf):
    """A store that takes over the lock of a page after a second."""

    def _replaced(self, path: Path, data: bytes) -> bool:
        lock = path.with_suffix(".lock")
        if lock.exists() and time.time() - lock.stat().st_mtime < 1:
            return False
        lock.touch()
        done = super()._replaced(path, data)
        lock.unlink(missing_ok=True)
        return done


class Remembers(Shelf):
    """A store with a cache in front of its files, which serves a page whatever became of its file."""

    capabilities = replace(Shelf.capabilities, shared=False)

    def __init__(self, settings: ShelfSettings) -> None:
        self._near: dict[Path, bytes] = {}
        super().__init__(settings)

    def _read(self, space: Any, page_hash: str) -> bytes | None:
        path = self._path(space, page_hash)
        data = self._near.get(path) or super()._read(space, page_hash)
        if data is not None and len(data) == space.stored_nbytes:
            self._near[path] = data
        return data

    def _has(self, space: Any, page_hash: str) -> bool:
        return self._is_whole(space, self._read(space, page_hash))

    def _write_whole(self, space: Any, page_hash: str, data: bytes) -> bool:
        path = self._path(space, page_hash)
        return self._near.get(path) == data or super()._write_whole(space, page_hash, data)

    def _removed(self, space: Any, page_hash: str) -> bool:
        self._near.pop(self._path(space, page_hash), None)
        return super()._removed(space, page_hash)


class HasLittleRoom(Shelf):
    """A store that is full with two pages."""

    def _write_whole(self, space: Any, page_hash: str, data: bytes) -> bool:
        there = sum(path.is_file() for path in self._root.rglob("*") if len(path.stem) >= 32)
        return there < 2 and super()._write_whole(space, page_hash, data)


def subject_for(store: type[Shelf]) -> type[Subject]:
    return type(f"Of{store.__name__}", (Files,), {"storage_class": store, "__module__": __name__})


@pytest.mark.parametrize(
    ("store", "name"),
    [
        (StreamingShelf, "a_writer_killed_half_way_through_a_page_leaves_it_absent_or_whole"),
        (StreamingShelf, "a_damaged_object_is_a_miss"),
        (ClaimsNothing, "an_overwrite_killed_at_a_byte_leaves_old_or_new_bytes"),
        (ClaimsNothing, "killed_writers_leave_nothing_that_grows"),
        (Exclusive, "pages_survive_sigkill_of_their_writer"),
        (Exclusive, "a_writer_killed_while_it_opens_leaves_a_store_that_opens"),
        (SweepsByAge, "killed_writers_leave_nothing_that_grows"),
        (LeasesPages, "a_writer_killed_at_a_byte_leaves_the_page_absent_or_whole"),
        (Remembers, "a_damaged_object_is_a_miss"),
        (Remembers, "a_damaged_object_heals_when_it_is_set_after_a_miss"),
        (Remembers, "a_damaged_object_heals_when_it_is_set_unseen"),
        (Remembers, "a_flipped_bit_is_a_miss_and_heals"),
    ],
)
def test_a_right_store_passes(store: type[Shelf], name: str) -> None:
    record = verdict(subject_for(store), name)

    assert record.outcome is Outcome.PASSED, record


@pytest.mark.parametrize(
    "name",
    [
        "a_set_half_way_in_another_process_mixes_with_nothing",
        "without_free_descriptors_nothing_breaks",
        "a_disk_without_room_refuses_the_page",
        "refused_pages_leave_no_debris",
        "pages_survive_sigkill_of_their_writer",
    ],
)
def test_a_full_right_store_passes(name: str) -> None:
    record = verdict(subject_for(HasLittleRoom), name)

    assert record.outcome is Outcome.NOT_VERIFIED, record


def test_growth_of_a_log_is_not_counted_as_debris() -> None:
    record = verdict(SqliteSubject, "killed_writers_leave_nothing_that_grows")

    assert record.outcome is Outcome.PASSED, record


@pytest.mark.parametrize("name", [name for name, one in CHECKS.items() if one.rule.id == "KV-402"])
def test_a_memory_has_nothing_that_a_dead_writer_could_leave(name: str) -> None:
    assert verdict(DictSubject, name).outcome in (Outcome.NOT_DECLARED, Outcome.NOT_VERIFIED)


def test_a_store_behind_a_server_is_cut_off_in_the_middle_of_a_set() -> None:
    name = "a_connection_cut_in_a_set_leaves_the_page_absent_or_whole"

    assert verdict(WireSubject, name).outcome is Outcome.PASSED


def test_pages_in_a_shared_file_can_have_flipped_bits_only() -> None:
    cut = verdict(SqliteSubject, "a_damaged_object_is_a_miss")
    flipped = verdict(SqliteSubject, "a_flipped_bit_is_a_miss_and_heals")

    assert (Outcome.NOT_VERIFIED, Outcome.PASSED) == (cut.outcome, flipped.outcome)
    assert "back door `tamper`" in cut.message
