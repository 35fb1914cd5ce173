"""The capacity of the `file` backend: eviction, limits, and refused pages."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest
from file_roots import (
    FILE_NBYTES,
    HASHES,
    SPACE,
    file_of,
    is_right,
    opened,
    put,
    there,
    used_nbytes,
)
from hicache_backends.file import FileStorage
from hicache_backends.file.layout import Layout
from lock_waits import lock_waits
from pages import hash_of, page, space

from hicache_storage import UnsupportedOperation, native
from hicache_storage.settings import format_nbytes


def await_first_count(storage: FileStorage) -> None:
    """Wait for the end of the count of all pages that a storage starts when it opens."""
    counting = storage._process.get().capacity._counting
    assert counting is not None
    counting.join(20)
    assert not counting.is_alive()


class TestEviction:
    def test_the_oldest_pages_go_first(self, root: Path) -> None:
        with opened(root, 4) as storage:
            assert [True] * 7 == put(storage, *range(7))
            assert [3, 4, 5, 6] == there(storage)
            assert 3 == storage.stats().counters["evicted"]
            assert 4 * FILE_NBYTES == storage.stats().nbytes == used_nbytes(root)

    @pytest.mark.parametrize("use", ["get", "set"])
    def test_a_page_in_use_stays(self, root: Path, use: str) -> None:
        with opened(root, 4) as storage:
            put(storage, 0, 1, 2, 3)
            if use == "get":
                assert is_right(storage, 0)
            else:
                put(storage, 0)
            put(storage, 4, 5)
            assert [0, 3, 4, 5] == there(storage)

    def test_the_order_survives_reopening(self, root: Path) -> None:
        with opened(root, 4) as storage:
            put(storage, 2, 0, 3, 1)
            assert is_right(storage, 2)
        with opened(root, 4) as storage:
            put(storage, 4, 5)
            assert [1, 2, 4, 5] == there(storage)

    def test_the_tail_of_a_batch_is_evicted_first(self, root: Path) -> None:
        """A prefix without its end is useful, and a prefix without its beginning is not."""
        with opened(root, 4) as storage:
            await_first_count(storage)
            assert all(storage.batch_set(SPACE, HASHES[:4], [page(seed=n) for n in range(4)]))
            put(storage, 4)
            assert [0, 1, 2, 4] == there(storage)

    def test_a_sweep_that_found_nothing_refuses_no_page_afterwards(self, root: Path) -> None:
        """A fresh store fills up within milliseconds of its first, empty sweep."""
        with opened(root, 4) as storage:
            await_first_count(storage)
            put(storage, 0, 1, 2, 3, 4)
            assert [1, 2, 3, 4] == there(storage)

    def test_gets_within_the_touch_interval_do_not_count(self, root: Path) -> None:
        with opened(root, 4, touch_interval_s=3600) as storage:
            put(storage, 0, 1, 2, 3)
            assert is_right(storage, 0)
            put(storage, 4)
            assert [1, 2, 3, 4] == there(storage)

    def test_a_batch_larger_than_the_capacity_keeps_its_beginning(self, root: Path) -> None:
        with opened(root, 4) as storage:
            put(storage, 9)
            verdicts = storage.batch_set(SPACE, HASHES[:6], [page(seed=n) for n in range(6)])
            assert [True] * 4 + [False] * 2 == verdicts
            assert [0, 1, 2, 3] == there(storage)
            assert 2 == storage.stats().counters["refused_no_space"]

    def test_a_page_larger_than_the_capacity_is_refused(self, root: Path) -> None:
        with opened(root, 4) as storage:
            put(storage, 0, 1)
            large = space(page_nbytes=5 * FILE_NBYTES)
            assert [False] == storage.batch_set(large, HASHES[:1], [page(5 * FILE_NBYTES)])
            assert [0, 1] == there(storage)

    def test_victims_of_other_key_spaces_and_sizes_free_capacity(self, root: Path) -> None:
        draft = space(pool="draft", page_nbytes=1000)
        with opened(root, 4) as storage:
            assert all(storage.batch_set(draft, HASHES[:9], [page(1000)] * 9))
            assert [True] * 4 == put(storage, 0, 1, 2, 3)
            assert [False] * 9 == storage.batch_exists(draft, HASHES[:9])
            assert "recycled" not in storage.stats().counters

    def test_a_lowered_capacity_is_enforced(self, root: Path) -> None:
        with opened(root, None) as storage:
            put(storage, *range(10))
        with opened(root, 3) as storage:
            put(storage, 10)
            assert [8, 9, 10] == there(storage)

    def test_min_free_evicts(self, root: Path) -> None:
        """The limit exceeds the free space, so every old page goes and every new page is refused."""
        with opened(root, None) as storage:
            put(storage, 0, 1, 2)
        free = os.statvfs(root).f_bavail * os.statvfs(root).f_frsize
        with opened(root, None, min_free_nbytes=free * 2) as storage:
            assert [False] == put(storage, 3)
            assert [] == there(storage)
        with opened(root, None, min_free_nbytes=free // 2) as storage:
            assert [True] == put(storage, 3)

    @pytest.mark.usefixtures("python_data_plane")
    def test_a_victim_that_cannot_be_removed_is_passed_over(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rename = os.rename

        def refusing(source: str | bytes, target: str | bytes) -> None:
            if os.fsdecode(source).endswith((HASHES[0], HASHES[1])):
                raise PermissionError(1, "not permitted")
            rename(source, target)

        with opened(root, 4) as storage:
            put(storage, 0, 1, 2, 3)
            monkeypatch.setattr(os, "rename", refusing)
            assert [True] * 6 == put(storage, 4, 5, 6, 7, 8, 9)
            assert [0, 1, 8, 9] == there(storage)
            assert 2 == storage.stats().counters["unremovable"]
            monkeypatch.undo()

    @pytest.mark.usefixtures("python_data_plane")
    def test_when_nothing_can_be_removed_sets_are_refused_until_it_can(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with opened(root, 4) as storage:
            put(storage, 0, 1, 2, 3)
            rename = os.rename

            def refusing(source: str | bytes, target: str | bytes) -> None:
                if "/spaces/" in os.fsdecode(source):
                    raise PermissionError(1, "not permitted")
                rename(source, target)

            monkeypatch.setattr(os, "rename", refusing)
            assert [False, False] == put(storage, 4, 5)
            monkeypatch.undo()
            assert is_right(storage, 0)
            storage.batch_delete(SPACE, HASHES[:2])
            assert [True, True] == put(storage, 4, 5)
            assert 4 * FILE_NBYTES == storage.stats().nbytes

    def test_a_victim_deleted_by_hand_is_passed_over(self, root: Path) -> None:
        with opened(root, 4) as storage:
            put(storage, 0, 1, 2, 3, 4)
            file_of(root, 1).unlink()
            assert [True] * 3 == put(storage, 5, 6, 7)
            assert used_nbytes(root) <= 4 * FILE_NBYTES

    def test_threads_never_exceed_the_capacity(self, root: Path) -> None:
        with opened(root, 20) as storage:
            stop = threading.Event()
            worst = list[int]()

            def watch() -> None:
                while not stop.is_set():
                    worst.append(used_nbytes(root))

            def write(first: int) -> None:
                for start in range(first, first + 50, 5):
                    numbers = range(start, start + 5)
                    hashes = [HASHES[n] for n in numbers]
                    storage.batch_set(SPACE, hashes, [page(seed=n) for n in numbers])

            watcher = threading.Thread(target=watch)
            writers = [threading.Thread(target=write, args=(50 * n,)) for n in range(4)]
            watcher.start()
            for thread in writers:
                thread.start()
            for thread in writers:
                thread.join()
            stop.set()
            watcher.join()

            assert used_nbytes(root) <= 20 * FILE_NBYTES
            assert used_nbytes(root) == storage.stats().nbytes
            # A page renamed while the directories are read may be counted under both of its names.
            assert max(worst) <= 2 * 20 * FILE_NBYTES
            assert all(is_right(storage, n) for n in there(storage))


@pytest.mark.skipif(native.implementation != "compiled", reason="the reference makes a call a page")
class TestCost:
    """Beside a busy thread, each system call costs 5 ms, because it gives up the interpreter lock."""

    def test_a_batch_that_evicts_as_many_pages_is_a_few_calls(self, root: Path) -> None:
        with opened(root, 1000) as storage:
            hashes = [hash_of(number) for number in range(1400)]
            for start in range(0, 1200, 100):
                storage.batch_set(SPACE, hashes[start : start + 100], [page()] * 100)
            await_first_count(storage)
            waits = lock_waits(lambda: storage.batch_set(SPACE, hashes[1200:], [page()] * 200))

            assert waits.total() <= 14, waits
            assert all(storage.batch_exists(SPACE, hashes[1200:]))

    def test_a_count_of_few_pages_is_a_few_calls(self, root: Path) -> None:
        with opened(root, 1000) as storage:
            hashes = [hash_of(number) for number in range(500)]
            storage.batch_set(SPACE, hashes, [page()] * 500)
            await_first_count(storage)
            waits = lock_waits(storage._process.get().capacity._run_count)

            assert waits.total() <= 40, waits


class TestLimit:
    def test_a_capacity_below_one_page_is_refused_with_both_figures(self, root: Path) -> None:
        config = {"path": str(root), "capacity_nbytes": FILE_NBYTES - 1}
        with FileStorage.from_config(config) as storage:
            with pytest.raises(UnsupportedOperation, match=r"\(4,159 bytes\).*\(4,160 bytes\)"):
                storage.open_space(SPACE)
            storage.open_space(space(page_nbytes=4095))
            assert 4095 == storage.capabilities.max_page_nbytes
            assert 1 == len(list(storage.spaces()))

    def test_a_capacity_that_evicts_more_than_half_is_warned_of_with_both_figures(
        self, root: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with opened(root) as storage:
            put(storage, *range(10))
        with caplog.at_level(logging.WARNING):
            opened(root, 5).close()
            assert [] == caplog.records
        with opened(root) as storage:
            put(storage, *range(10))
        with caplog.at_level(logging.WARNING):
            opened(root, 3).close()

        (record,) = caplog.records
        assert f"take {format_nbytes(10 * FILE_NBYTES)}, but" in record.getMessage()
        assert f"capacity_nbytes is {format_nbytes(3 * FILE_NBYTES)}:" in record.getMessage()


def test_a_process_that_opens_a_new_root_keeps_the_usage_of_an_earlier_one(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def beaten(layout: Layout) -> bool:
        """Pretend that another process set five pages after this process had looked at the root."""
        Path(layout.usage).write_bytes((5 * FILE_NBYTES).to_bytes(8, "little") + bytes(8))
        return True

    monkeypatch.setattr(Layout, "is_new", beaten)
    with opened(root) as storage:
        assert 5 * FILE_NBYTES == storage.stats().nbytes
