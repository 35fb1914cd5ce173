"""The read-only half of `file`: it changes nothing, and reports what a listing leaves out."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from file_roots import FILE_NBYTES, HASHES, SPACE, failing, file_of, opened, put
from hicache_backends.file import FileStorage
from looks import look, read_only_mount, snapshot
from pages import blank, page

from hicache_storage import KeySpace, Page
from hicache_storage.backend_support.read_only import ReadOnlyStorage
from hicache_storage.registry import open_storage
from hicache_storage.settings import format_nbytes
from hicache_storage.storage import HiCacheStorage


def reader(root: Path, **config: Any) -> HiCacheStorage:
    return open_storage("file", {"path": str(root), **config}, read_only=True)


def a_store(root: Path, pages: int = 20) -> None:
    """Make a store with pages, a damaged page, a cut page, foreign files and a dead writer."""
    with opened(root) as storage:
        put(storage, *range(pages))
    with file_of(root, 0).open("r+b") as file:
        file.seek(-10, os.SEEK_END)
        file.write(b"\xff\xff")
    os.truncate(file_of(root, 1), 100)
    (root / "novel.txt").write_text("precious")
    (file_of(root, 2).parent / "notes").write_text("precious")
    dead = root / "writers" / ("0" * 16)
    dead.mkdir()
    (dead / "lock").touch()
    (dead / "0").write_bytes(b"half a page")


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"capacity_nbytes": 20 * FILE_NBYTES},
        {"capacity_nbytes": 2 * FILE_NBYTES},
        {"min_free_nbytes": 1 << 60},
    ],
    ids=["no-limit", "at-capacity", "stale-capacity", "no-free-space"],
)
class TestLooking:
    def test_it_changes_nothing(self, root: Path, limits: dict[str, int]) -> None:
        a_store(root)
        before = snapshot(root)
        with reader(root, **limits) as storage:
            assert [False] * 2 + [True] * 18 == look(storage, SPACE, HASHES[:20])

        assert before == snapshot(root)

    def test_it_works_on_a_read_only_mount(
        self, root: Path, tmp_path: Path, limits: dict[str, int]
    ) -> None:
        a_store(root)
        with read_only_mount(root, tmp_path / "mount") as mount, reader(mount, **limits) as storage:
            assert [False] * 2 + [True] * 18 == look(storage, SPACE, HASHES[:20])


def test_pages_have_their_bytes(root: Path) -> None:
    a_store(root)
    got = blank()
    with reader(root) as storage:
        assert [True] == storage.batch_get(SPACE, HASHES[5:6], [got])

    assert page(seed=5).tobytes() == got.tobytes()


def test_the_used_bytes_are_those_of_the_ledger(root: Path) -> None:
    with opened(root) as storage:
        put(storage, *range(3))
    with reader(root, capacity_nbytes="1GiB") as storage:
        stats = storage.stats()

    assert (3 * FILE_NBYTES, 1 << 30) == (stats.nbytes, stats.capacity_nbytes)


def test_without_a_ledger_the_used_bytes_are_unknown(root: Path) -> None:
    a_store(root)
    (root / "usage").unlink()
    with reader(root) as storage:
        assert storage.stats().nbytes is None


class TestFaults:
    def test_a_listing_shows_pages_of_a_wrong_length(self, root: Path) -> None:
        a_store(root)
        with reader(root) as storage:
            found = [(fault.page_hash, fault.reason) for fault in storage.faults(SPACE)]

        assert [(HASHES[1], "wrong_size")] == found

    def test_a_closer_look_shows_damaged_trailers_too(self, root: Path) -> None:
        a_store(root)
        with reader(root) as storage:
            found = {fault.page_hash: fault for fault in storage.faults(SPACE, HASHES[:30])}

        assert {HASHES[0]: "corrupt", HASHES[1]: "wrong_size"} == {
            page_hash: fault.reason for page_hash, fault in found.items()
        }
        assert f"100 bytes long instead of {FILE_NBYTES:,}" in found[HASHES[1]].detail

    def test_the_storage_that_writes_removes_none_by_it(self, root: Path) -> None:
        a_store(root)
        with opened(root) as storage:
            assert 2 == len(list(storage.faults(SPACE, HASHES)))
            assert 2 == len(list(storage.faults(SPACE, HASHES)))


class TestDiagnosis:
    @pytest.mark.parametrize(
        ("pages", "fact"),
        [(22, None), (20, "at its limit"), (5, f"would evict {format_nbytes(15 * FILE_NBYTES)}")],
    )
    def test_it_compares_the_used_bytes_with_the_capacity(
        self, root: Path, pages: int, fact: str | None
    ) -> None:
        with opened(root) as storage:
            put(storage, *range(20))
        with reader(root, capacity_nbytes=pages * FILE_NBYTES) as storage:
            found = storage.diagnose()

        assert [bool(fact)] == [one.is_full for one in found]
        assert all((fact or "are free") in one.fact for one in found)
        assert [max(0, pages - 20) * FILE_NBYTES] == [one.free_nbytes for one in found]

    def test_a_file_system_below_its_limit_is_full(self, root: Path) -> None:
        a_store(root)
        with reader(root, min_free_nbytes=1 << 60) as storage:
            assert [True] == [one.is_full for one in storage.diagnose()]


class TestTimes:
    def test_a_use_may_be_later_by_the_touch_interval(self, root: Path) -> None:
        a_store(root)
        with reader(root, capacity_nbytes="1GiB", touch_interval_s="1h") as storage:
            (found,) = storage.page_times(SPACE, HASHES[5:6])

        assert found.used_at_s is not None
        assert 3600 == found.used_within_s

    def test_without_limits_a_time_is_that_of_the_write(self, root: Path) -> None:
        a_store(root)
        with reader(root) as storage:
            (found,) = storage.page_times(SPACE, HASHES[5:6])

        assert found.written_at_s is not None
        assert (None, 0.0) == (found.used_at_s, found.used_within_s)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"durability": "power"},
        {"capacity_nbytes": 1 << 20, "parallelism": 3},
        {"min_free_nbytes": 1, "durability": "power"},
    ],
)
@pytest.mark.parametrize("kind", ["file", "a subclass", "a snapshot without its ledger"])
def test_both_openings_claim_the_same(root: Path, config: dict[str, Any], kind: str) -> None:
    with opened(root, **config) as storage:
        put(storage, 1)
        claimed = storage.capabilities
    storage_class = Shouting if kind == "a subclass" else FileStorage
    if kind == "a snapshot without its ledger":
        (root / "usage").unlink()

    with storage_class.open_read_only({"path": str(root), **config}) as looking:
        assert claimed == looking.capabilities


def test_a_full_disk_changes_no_claim(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise pages of a store with `durability: power` would have other frames on a full disk."""
    with opened(root, durability="power") as storage:
        claimed = storage.capabilities

    monkeypatch.setattr(os, "pwrite", failing("pwrite", errno.ENOSPC))
    with opened(root, durability="power") as storage:
        assert claimed == storage.capabilities


class Shouting(FileStorage):
    """A storage of a third-party backend on the files of `file`."""

    reads = 0

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self.reads += 1
        return super().batch_get(space, hashes, pages)


def test_a_subclass_reads_in_its_own_way_and_evicts_nothing(root: Path) -> None:
    with opened(root) as storage:
        put(storage, *range(20))
    config = {"path": str(root), "capacity_nbytes": 2 * FILE_NBYTES}
    with Shouting.open_read_only(config) as inner:
        assert isinstance(inner, Shouting)
        assert [True] * 20 == look(ReadOnlyStorage(inner), SPACE, HASHES[:20])
        assert inner.reads

    with reader(root) as storage:
        assert [True] * 20 == storage.batch_exists(SPACE, HASHES[:20])
