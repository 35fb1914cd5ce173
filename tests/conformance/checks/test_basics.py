"""The checks of basics and batches, on right stores of unusual kinds."""

from __future__ import annotations

import os
import random
import time
import uuid
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hicache_backends.hf3fs import Hf3fsStorage
from hicache_conformance.checks import Check, all_checks
from hicache_conformance.report.record import CheckRecord
from hicache_conformance.run.outcomes import Outcome
from hicache_conformance.run.runner import RunOptions, run_check
from hicache_conformance.run.subject import Scratch, Subject
from hicache_conformance.selftest.mutants import mutant_named
from hicache_conformance.selftest.references.blobs import Blobs
from hicache_conformance.selftest.references.dict_store import DictStore
from hicache_conformance.selftest.references.evicting import EvictingStore
from hicache_conformance.selftest.references.file_a_page import Shelf, ShelfSettings
from hicache_conformance.selftest.references.first_wins import FirstWins
from hicache_conformance.selftest.references.slow import SlowStore
from hicache_conformance.selftest.references.streaming import StreamingShelf
from hicache_conformance.selftest.references.subjects import (
    DictSubject,
    OneByOneSubject,
    RentedSubject,
    ShelfSubject,
    SqliteSubject,
    TinyPagesSubject,
    WireSubject,
)
from hicache_conformance.selftest.selftest import subject_for

from hicache_storage.errors import StorageTimeout, StorageUnavailable
from hicache_storage.keys import KeySpace
from hicache_storage.page import Page
from hicache_storage.storage import Capabilities, Retention

CHECKS = {check.run.__name__: check for check in all_checks()}
QUICK = RunOptions(call_limit_s=10, quick=True)
ACCUSED = {Outcome.FAILED, Outcome.ERROR, Outcome.UNKNOWN}
SLOW = pytest.mark.slow


def of_modules(*names: str) -> list[Check]:
    return [one for one in all_checks() if one.run.__module__.rpartition(".")[2] in names]


# --- right stores of unusual kinds ----------------------------------------------------------------


class Aligned(Blobs):
    """A store that requires pages in memory at multiples of 4096."""

    capabilities = replace(Blobs.capabilities, alignment=4096)


class AlignedSegments(DictStore):
    """A store that requires segments at multiples of 4096."""

    capabilities = replace(DictStore.capabilities, alignment=4096)


class FiftyPages(EvictingStore):
    """A cache of 50 entries of any size."""

    def _make_room(self, key: Hashable, nbytes: int) -> bool:
        while key not in self._pages and len(self._pages) >= 50:
            self._evict()
        return super()._make_room(key, nbytes)


class ForgetsByChance(DictStore):
    """A cache that forgets one page in a hundred at each call."""

    capabilities = replace(DictStore.capabilities, retention=Retention.BEST_EFFORT)

    def _present(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self._forget(space, hashes)
        return super()._present(space, hashes)

    def _contents(self, space: KeySpace, hashes: Sequence[str]) -> list[bytes | None]:
        self._forget(space, hashes)
        return super()._contents(space, hashes)

    def _forget(self, space: KeySpace, hashes: Sequence[str]) -> None:
        for page_hash in hashes:
            if self._chance.random() < 0.01:
                self._removed(space, page_hash)

    _chance = random.Random(5)


def subject(storage_class: type[Any], **config: Any) -> Any:
    def configured(self: Subject, scratch: Scratch) -> Mapping[str, Any]:
        return config

    fields = {"storage_class": storage_class, "config": configured, "__module__": __name__}
    return type(f"{storage_class.__name__}Subject", (Subject,), fields)


BASICS = ("round_trips", "contents", "removal", "refusals", "sizes", "verdicts", "duplicates")
MODULES = (*BASICS, "batch_sizes", "buffers")
UNUSUAL = {
    "pages of 1 byte": subject(DictStore, max_page_nbytes=1),
    "pages of 16 bytes": subject(DictStore, max_page_nbytes=16),
    "batches of 1": subject(DictStore, max_batch=1),
    "batches of 3": subject(DictStore, max_batch=3, max_page_nbytes=4096),
    "64 KiB": subject(DictStore, capacity_nbytes=64 << 10),
    "4 KiB that evict": subject(EvictingStore, capacity_nbytes=4096),
    "50 pages": subject(FiftyPages, capacity_nbytes=1 << 30),
    "forgets by chance": subject(ForgetsByChance),
    "first wins": subject(FirstWins),
    "aligned": subject(Aligned),
    "aligned segments": subject(AlignedSegments),
}


@pytest.mark.parametrize(
    ("kind", "module"),
    [("pages of 1 byte", "round_trips"), ("4 KiB that evict", "verdicts"), ("64 KiB", "contents")],
)
def test_a_small_right_store_passes(kind: str, module: str) -> None:
    must_not_accuse(UNUSUAL[kind], QUICK, module)


@SLOW
@pytest.mark.parametrize("kind", UNUSUAL)
def test_an_unusual_right_store_passes(kind: str) -> None:
    must_not_accuse(UNUSUAL[kind], QUICK, *MODULES)


@SLOW
def test_a_slow_right_store_passes() -> None:
    """It uses up each check's limit of work, so it is put under the checks of a quick run only."""
    slow = subject(SlowStore, delay_s=0.001, max_batch=1)
    must_not_accuse(slow, QUICK, *MODULES, only_quick=True)


def must_not_accuse(
    made: type[Subject], options: RunOptions, *modules: str, only_quick: bool = False
) -> None:
    checks = [check for check in of_modules(*modules) if check.quick or not only_quick]
    records = [run_check(made, check, options) for check in checks]

    assert [] == [(one.name, one.message) for one in records if one.outcome in ACCUSED]
    assert len(records) // 2 < sum(one.outcome is Outcome.PASSED for one in records)


class _Hf3fs(Subject):
    """A store of 64 MiB in blocks of 4096 bytes, so that a page of 512 segments is a large one."""

    storage_class = Hf3fsStorage

    def config(self, scratch: Scratch) -> Mapping[str, Any]:
        return {"path": str(scratch.path), "capacity_nbytes": "64MiB"}


def test_a_batch_beyond_the_capacity_of_a_small_store_is_not_requested() -> None:
    record = run_check(_Hf3fs, CHECKS["batches_of_many_segments_work"], RunOptions(call_limit_s=30))

    assert (Outcome.PASSED, "") == (record.outcome, record.message)


# --- checks that do not apply --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "name", "outcome"),
    [
        (DictSubject, "a_page_that_the_file_system_refused_never_shows", Outcome.NOT_DECLARED),
        (DictSubject, "a_damaged_page_changes_no_other", Outcome.NOT_VERIFIED),
        (DictSubject, "nothing_is_written_after_a_get_that_timed_out", Outcome.NOT_DECLARED),
        (DictSubject, "pages_outlive_an_orderly_close", Outcome.NOT_DECLARED),
        (DictSubject, "another_handle_sees_no_deleted_page", Outcome.NOT_DECLARED),
        (DictSubject, "a_delete_through_another_handle_counts", Outcome.NOT_DECLARED),
        (ShelfSubject, "a_page_that_has_no_room_never_shows", Outcome.NOT_VERIFIED),
        (UNUSUAL["aligned"], "any_segmentation_is_read_back_in_any_other", Outcome.NOT_DECLARED),
        (UNUSUAL["batches of 1"], "duplicates_are_each_read", Outcome.NOT_DECLARED),
    ],
)
def test_a_check_that_does_not_apply_gives_the_reason(
    made: type[Subject], name: str, outcome: Outcome
) -> None:
    assert outcome == run_check(made, CHECKS[name], QUICK).outcome


# The checks of a store's life cycle, on right stores of unusual kinds.


def record_of(name: str, subject: type[Subject]) -> CheckRecord:
    check = next(one for one in all_checks() if one.run.__name__ == name)
    return run_check(subject, check, RunOptions())


def test_a_store_of_one_page_a_call_may_be_forked() -> None:
    record = record_of("a_forked_child_works_or_is_refused", OneByOneSubject)

    assert (Outcome.PASSED, "") == (record.outcome, record.message)


@pytest.mark.timeout(200)
def test_the_memory_of_a_store_of_tiny_pages_is_measured() -> None:
    record = record_of("opening_and_closing_keeps_memory", TinyPagesSubject)

    assert (Outcome.PASSED, "") == (record.outcome, record.message)


@pytest.mark.parametrize(
    ("subject", "outcome"),
    [
        (RentedSubject, Outcome.PASSED),
        (subject_for(mutant_named("ShowsAShortPassword")), Outcome.FAILED),
    ],
)
def test_a_short_password_is_looked_for_where_it_is_one(
    subject: type[Subject], outcome: Outcome
) -> None:
    record = record_of("secrets_are_shown_nowhere", subject)

    assert outcome is record.outcome
    assert "url" in record.evidence["secrets that are too short to be looked for everywhere"]
    assert "kv:kv@" not in record.got


# The checks of crashes and corruption, on right stores of unusual kinds.

FAMILY = ("KV-401", "KV-402", "KV-403", "KV-404")
OF_FAMILY = {name: one for name, one in CHECKS.items() if one.rule.id in FAMILY}


def verdict(subject: type[Subject], name: str) -> CheckRecord:
    return run_check(subject, CHECKS[name], QUICK)


class Files(Subject):
    """A store of files whose author opened no back door."""

    storage_class = StreamingShelf

    def config(self, scratch: Scratch) -> Mapping[str, Any]:
        return {"path": str(scratch.path / "store")}


class ClaimsNothing(Shelf):
    """A store of files whose author has declared no capabilities."""

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
    """A store with a cache in front of its files, which still returns a page whose file was damaged."""

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
    """A store that has room for two pages."""

    def _write_whole(self, space: Any, page_hash: str, data: bytes) -> bool:
        there = sum(path.is_file() for path in self._root.rglob("*") if len(path.stem) >= 32)
        return there < 2 and super()._write_whole(space, page_hash, data)


def of_shelf(store: type[Shelf]) -> type[Subject]:
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
    record = verdict(of_shelf(store), name)

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
    record = verdict(of_shelf(HasLittleRoom), name)

    assert record.outcome is Outcome.NOT_VERIFIED, record


def test_growth_of_a_log_is_not_counted_as_debris() -> None:
    record = verdict(SqliteSubject, "killed_writers_leave_nothing_that_grows")

    assert record.outcome is Outcome.PASSED, record


@pytest.mark.parametrize(
    "name", [name for name, one in OF_FAMILY.items() if one.rule.id == "KV-402"]
)
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


class OutOfTime(DictStore):
    """A store that needs longer than its time limit for more than 30 MiB."""

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        if sum(page.nbytes for page in pages) > 30 << 20:
            raise StorageTimeout("no answer within 2 s")
        return super().batch_set(space, hashes, pages)


class OutOfTimeSubject(DictSubject):
    storage_class = OutOfTime


def test_a_batch_that_takes_too_long_is_told_to_be_smaller() -> None:
    check = CHECKS["batches_past_the_sizes_at_which_stores_split_are_whole"]

    record = run_check(OutOfTimeSubject, check, QUICK)

    assert record.outcome is Outcome.FAILED
    assert "max_batch_nbytes" in record.expected
