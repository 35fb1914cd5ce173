"""The `file` backend on a file system that fails, and beside files of other programs."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import shutil
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from file_roots import (
    FILE_NBYTES,
    HASHES,
    SPACE,
    failing,
    file_of,
    opened,
    put,
    there,
    used_nbytes,
    within,
)
from hicache_backends.file import FileStorage, process_state
from hicache_backends.file.layout import Layout
from pages import blank, page, space
from processes import descriptors

from hicache_storage import ConfigError, Page, StorageUnavailable, native
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.errors import StorageTimeout

LIMIT_S = 60.0


def is_published(path: str | bytes, *_: object) -> bool:
    return "/spaces/" in os.fsdecode(path)


def is_third(path: str, *_: object) -> bool:
    return path.endswith(HASHES[2])


def is_creating(_: str, flags: int, *__: object) -> bool:
    return bool(flags & os.O_CREAT)


class TestVanishedDirectory:
    @pytest.mark.parametrize("pages", [None, 4], ids=["unlimited", "full"])
    @pytest.mark.parametrize("how", ["removed", "moved"])
    def test_every_set_is_unavailable_and_all_work_again_once_it_is_back(
        self, root: Path, pages: int | None, how: str
    ) -> None:
        away = root.with_name(root.name + "-away")
        with opened(root, pages, timeout_s=5) as storage:
            assert all(put(storage, *range(6)))
            root.rename(away)
            try:
                for number in range(10, 14):
                    with pytest.raises(StorageUnavailable):
                        put(storage, number)
                assert "refused_no_space" not in storage.stats().counters
                assert "io_errors" not in storage.stats().counters
            finally:
                if how == "moved":
                    away.rename(root)
                else:
                    shutil.rmtree(away)
                    root.mkdir()

            assert [True] * 3 == put(storage, 20, 21, 22)
            storage.open_space(space(model="other"))
            assert {20, 21, 22} <= set(there(storage))

    def test_a_writer_that_was_moved_away_and_back_is_alive(self, root: Path) -> None:
        away = root.with_name(root.name + "-away")
        with opened(root) as storage:
            root.rename(away)
            with pytest.raises(StorageUnavailable):
                put(storage, 0)
            away.rename(root)
            with opened(root) as other:
                assert "dead_writers" not in other.stats().counters
            assert [True] == put(storage, 0)

    def test_pages_that_a_removal_under_writers_leaves_get_their_manifest_back(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A program removes the root's files, but stops at a directory that has got a page meanwhile."""
        monkeypatch.setattr("hicache_backends.file.storage._LOOK_INTERVAL_S", 0.0)
        with opened(root) as storage:
            put(storage, 0)
            for name in ("usage", f"spaces/{SPACE.id}/manifest.json"):
                (root / name).unlink()
            shutil.rmtree(root / "writers")
            assert [True] == put(storage, 0)

            assert [SPACE] == list(storage.spaces())
            assert [] == list(storage.unreadable_spaces())

    @pytest.mark.parametrize("pages", [None, 400], ids=["unlimited", "capacity"])
    def test_engines_go_on_after_a_removal_under_their_writes(
        self, root: Path, pages: int | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("hicache_backends.file.storage._LOOK_INTERVAL_S", 0.0)
        ended = threading.Event()

        def write(storage: FileStorage) -> None:
            while not ended.is_set():
                with suppress(StorageUnavailable):
                    put(storage, *range(50))

        engines = [opened(root, pages) for _ in range(3)]
        threads = [threading.Thread(target=write, args=(engine,)) for engine in engines]
        for thread in threads:
            thread.start()
        for _ in range(5):
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir(exist_ok=True)
        ended.set()
        for thread in threads:
            thread.join()

        for number, engine in enumerate(engines):
            assert [True] * 2 == put(engine, 60 + 2 * number, 61 + 2 * number)
            assert [SPACE] == list(engine.spaces())
        assert set(range(60, 66)) <= set(there(engines[0]))
        for engine in engines:
            engine.close()

    def test_clear_delete_and_scan_do_not_take_it_for_empty(self, root: Path) -> None:
        away = root.with_name(root.name + "-away")
        with opened(root) as storage:
            put(storage, 0)
            root.rename(away)
            try:
                calls: list[Callable[[], object]] = [
                    lambda: storage.clear(SPACE),
                    lambda: list(storage.scan(SPACE)),
                    lambda: list(storage.spaces()),
                    lambda: storage.batch_delete(SPACE, HASHES[:1]),
                ]
                for call in calls:
                    with pytest.raises(StorageUnavailable):
                        call()
            finally:
                away.rename(root)
            assert [0] == there(storage)

    def test_processes_old_and_new_keep_to_the_capacity_together(self, root: Path) -> None:
        old = [opened(root, 20) for _ in range(3)]
        for storage in old:
            put(storage, *range(20))
        for path in list(root.iterdir()):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        stores = [*old, opened(root, 20)]
        for turn in range(10):
            for number, storage in enumerate(stores):
                put(storage, *range(50 + 3 * turn + number, 53 + 3 * turn + number))
                assert used_nbytes(root) <= 20 * FILE_NBYTES
        for storage in stores:
            storage.close()

    def test_a_removed_ledger_is_made_anew(self, root: Path) -> None:
        with opened(root, 10) as storage:
            put(storage, *range(5))
            (root / "usage").unlink()
            assert [True] == put(storage, 5)
            assert 16 == (root / "usage").stat().st_size
            assert (storage.stats().nbytes or 0) >= 6 * FILE_NBYTES
            assert all(put(storage, *range(6, 30)))
            assert set(range(22, 30)) <= set(
                there(storage)
            )  # the new sum may be too high, not too low
            assert used_nbytes(root) <= 10 * FILE_NBYTES


class TestTransientErrors:
    @pytest.mark.usefixtures("python_data_plane")
    @pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ENOSPC])
    def test_a_rename_that_fails_for_a_while_ends_no_eviction(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        with opened(root, 20) as storage:
            put(storage, *range(20))
            monkeypatch.setattr(os, "rename", failing("rename", code, is_published))
            assert [False] == put(storage, 100)
            monkeypatch.undo()

            assert [True] * 30 == put(storage, *range(110, 140))
            assert list(range(120, 140)) == there(storage)

    @pytest.mark.usefixtures("python_data_plane")
    def test_victims_that_may_be_removed_at_last_are_found(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with opened(root, 4) as storage:
            put(storage, *range(4))
            monkeypatch.setattr(os, "rename", failing("rename", errno.EACCES, is_published))
            assert [False] == put(storage, 4)
            monkeypatch.undo()
            give_up_s = time.monotonic() + LIMIT_S
            while put(storage, 5) != [True]:
                assert time.monotonic() < give_up_s

    def test_reserved_capacity_is_released_when_the_free_space_is_unknown(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with opened(root, 40, min_free_nbytes="1MiB") as storage:
            put(storage, *range(10))
            monkeypatch.setattr(os, "statvfs", failing("statvfs", errno.EIO))
            for _ in range(6):
                with pytest.raises(StorageUnavailable):
                    storage.batch_set(SPACE, HASHES[50:55], [page()] * 5)
            monkeypatch.undo()

            assert 10 * FILE_NBYTES == storage.stats().nbytes
            assert 0 == storage._process.get().writer.pending_nbytes()
            assert all(put(storage, *range(10, 60)))
            assert 40 == len(there(storage))

    @pytest.mark.usefixtures("python_data_plane")
    @pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EPERM])
    def test_a_page_that_cannot_be_touched_is_read(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        with opened(root, 4) as storage:
            put(storage, 0)
            monkeypatch.setattr(os, "utime", failing("utime", code))
            target = blank()
            assert [True] == storage.batch_get(SPACE, HASHES[:1], [target])
            assert page(seed=0).tobytes() == target.tobytes()
            assert [True] == put(storage, 0)

    @pytest.mark.usefixtures("python_data_plane")
    def test_a_read_only_file_system_is_unavailable_for_sets(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with opened(root) as storage:
            put(storage, 0)
            monkeypatch.setattr(os, "open", failing("open", errno.EROFS, is_creating))
            with pytest.raises(StorageUnavailable):
                put(storage, 1)
            assert [True] == storage.batch_get(SPACE, HASHES[:1], [blank()])
            monkeypatch.undo()
            assert [True] == put(storage, 1)

    def test_an_open_that_fails_leaves_no_file(self, root: Path) -> None:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        with opened(root) as storage:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
            try:
                for number in range(5):
                    with pytest.raises(StorageUnavailable):
                        storage.open_space(space(model=f"m{number}"))
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)

            assert [] == [p for p in root.glob("writers/*/*") if p.name != "lock"]
            storage.open_space(space(model="m0"))

    def test_a_direct_write_that_is_cut_short_is_refused(self, tmp_path: Path) -> None:
        nbytes = 4 << 20
        key_space = space(page_nbytes=nbytes)
        memory = mmap.mmap(-1, nbytes)  # not closed: a traceback may keep views of it
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        with opened(tmp_path / "root", durability="power") as storage:
            if storage.capabilities.alignment == 1:
                pytest.skip("no O_DIRECT here")
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
            try:
                verdicts = storage.batch_set(key_space, HASHES[:1], [Page(memoryview(memory))])
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)

            assert [False] == verdicts
            assert {"refused_no_space": 1} == dict(storage.stats().counters)

    def test_a_clear_that_leaves_a_page_raises(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with opened(root) as storage:
            put(storage, *range(4))
            monkeypatch.setattr(os, "unlink", failing("unlink", errno.EIO, is_third))
            with pytest.raises(StorageUnavailable, match=r"1 page .* but removed 3:"):
                storage.clear(SPACE)
            monkeypatch.undo()
            assert [2] == there(storage)
            assert 1 == storage.clear(SPACE)

    def test_a_clear_that_fails_everywhere_keeps_one_error(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An exception takes a kilobyte, and a read-only file system may have millions of pages."""

        class RefusedError(OSError):
            pass

        alive, most = weakref.WeakSet[RefusedError](), 0

        def refuse(_: str) -> None:
            nonlocal most
            most = max(most, len(alive))
            error = RefusedError(errno.EROFS, os.strerror(errno.EROFS))
            alive.add(error)
            try:
                raise error
            finally:
                del error  # its traceback would keep the error alive

        with opened(root) as storage:
            put(storage, *range(20))
            monkeypatch.setattr(os, "unlink", refuse)
            with pytest.raises(StorageUnavailable, match=r"20 pages .* but removed 0:"):
                storage.clear(SPACE)
            monkeypatch.undo()
            assert most <= 3


class TestDeadlines:
    def test_a_listing_that_hangs_delays_neither_sets_nor_close(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(process_state, "_CLOSE_LIMIT_S", 2.0)
        gate = threading.Event()
        listed = Layout.pages_in

        def hung(layout: Layout, shards: list[str]) -> Any:
            if threading.current_thread().name == "hicache-file-count":
                gate.wait(LIMIT_S)
            return listed(layout, shards)

        monkeypatch.setattr(Layout, "pages_in", hung)
        storage = opened(root, 4, timeout_s=20)
        put(storage, *range(9))
        try:
            answers = [within(lambda n=n: put(storage, n), 15) for n in range(20, 24)]  # type: ignore[misc]
            assert [[True]] * 4 == answers
            assert None is within(storage.close, 15)
        finally:
            gate.set()

    def test_a_process_stopped_in_the_ledger_delays_a_call_once(self, root: Path) -> None:
        with opened(root, 40, timeout_s=10) as storage:
            assert all(storage.batch_set(SPACE, HASHES[:30], [page()] * 30))
            holder = os.open(root / "usage", os.O_RDWR)
            try:
                fcntl.flock(holder, fcntl.LOCK_EX)
                assert [True] * 30 == within(lambda: storage.batch_delete(SPACE, HASHES[:30]), 10)
                assert [[True]] * 3 == [put(storage, n) for n in (50, 51, 52)]
            finally:
                os.close(holder)
            assert 3 * FILE_NBYTES == storage.stats().nbytes

    def test_a_thread_stuck_in_the_ledger_delays_others_until_their_deadline(
        self, root: Path
    ) -> None:
        with opened(root, 40, timeout_s=0.5) as storage:
            put(storage, 0)
            ledger = storage._process.get().ledger
            with ThreadPoolExecutor(1) as pool:
                pool.submit(ledger._lock.acquire).result()
                assert isinstance(within(lambda: put(storage, 1), 15), list)
                pool.submit(ledger._lock.release).result()
            storage.batch_delete(SPACE, HASHES[:2])
            assert 0 == storage.stats().nbytes

    @pytest.mark.parametrize("call", ["exists", "delete"])
    def test_pages_not_looked_up_in_time_are_not_reported_absent(
        self, root: Path, call: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with opened(root, timeout_s=5) as storage:
            put(storage, 0)

            def passed(_: float) -> Deadline:
                return Deadline(-1.0)

            for module in ("storage", "reader"):
                monkeypatch.setattr(f"hicache_backends.file.{module}.Deadline", passed)
            method = storage.batch_exists if call == "exists" else storage.batch_delete
            with pytest.raises(StorageTimeout):
                method(SPACE, HASHES[:1])
            monkeypatch.undo()
            assert [0] == there(storage)

    def test_a_set_does_not_write_pages_that_it_could_not_check_in_time(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with opened(root, 40, timeout_s=LIMIT_S) as storage:

            def late_after_three(paths: list[bytes], *_: Any) -> list[int]:
                return [native.MISS] * 3 + [native.LATE] * (len(paths) - 3)

            monkeypatch.setattr(native, "check_files", late_after_three)
            verdicts = storage.batch_set(SPACE, HASHES[:40], [page()] * 40)
            monkeypatch.undo()

            assert [True] * 3 + [False] * 37 == verdicts
            assert verdicts == storage.batch_exists(SPACE, HASHES[:40])
            assert 37 == storage.stats().counters["timeouts"]

    def test_a_set_begins_no_eviction_after_its_deadline(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The deadline passes when the third page is evicted."""
        with opened(root, 40, timeout_s=LIMIT_S) as storage:
            assert all(storage.batch_set(SPACE, HASHES[:40], [page()] * 40))
            real, claims = native.claim_files, list[int]()

            def late_after_three(paths: Any, targets: Any, times_ns: Any, *args: Any) -> list[int]:
                claims.append(len(paths))
                sizes, *rest = args
                made = real(paths[:3], targets[:3], times_ns[:3], sizes[:3], *rest)
                return [*made, *[native.LATE] * (len(paths) - 3)]

            def left_s(_: Deadline) -> float:
                return float(not claims)

            monkeypatch.setattr(native, "claim_files", late_after_three)
            monkeypatch.setattr(Deadline, "remaining_s", left_s)

            verdicts = storage.batch_set(SPACE, HASHES[40:80], [page()] * 40)

            monkeypatch.undo()
            assert [40] == claims
            assert verdicts == storage.batch_exists(SPACE, HASHES[40:80])
            assert storage.stats().counters["timeouts"] >= 37
            assert used_nbytes(root) <= 40 * FILE_NBYTES


class TestForeignFiles:
    def test_files_behind_a_symlink_are_left_alone(self, root: Path, tmp_path: Path) -> None:
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        blob = elsewhere / ("ab" + "12" * 31)
        blob.write_bytes(b"x" * 5000)
        os.utime(blob, (1, 1))
        dead = tmp_path / "dead"
        dead.mkdir()
        (dead / "lock").touch()
        (dead / "1").write_text("foreign")
        opened(root).close()
        (root / "spaces" / ("0" * 32)).mkdir()
        (root / "spaces" / ("0" * 32) / "ab").symlink_to(elsewhere)
        (root / "spaces" / ("1" * 32)).symlink_to(elsewhere)
        (root / "writers" / ("0" * 16)).symlink_to(dead)

        with opened(root, 2) as storage:
            assert [True] * 4 == put(storage, 0, 1, 2, 3)
        assert 5000 == blob.stat().st_size
        assert "foreign" == (dead / "1").read_text()

    def test_pages_are_neither_stored_nor_found_behind_a_symlink(
        self, root: Path, tmp_path: Path
    ) -> None:
        """`clear` would not find pages behind a symbolic link."""
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        with opened(root) as storage:
            file_of(root, 0).parent.symlink_to(elsewhere)
            assert [False, True] == storage.batch_set(SPACE, HASHES[:2], [page(), page()])
            assert [False, True] == storage.batch_exists(SPACE, HASHES[:2])
            assert [False] == storage.batch_get(SPACE, HASHES[:1], [blank()])
            assert 1 == storage.clear(SPACE)
        assert [] == list(elsewhere.iterdir())

    def test_a_key_space_that_became_a_link_is_refused_before_a_page_is_stored(
        self, root: Path
    ) -> None:
        with opened(root) as storage:
            put(storage, 0)
            directory = file_of(root, 0).parents[1]
            directory.rename(root / "elsewhere")
            directory.symlink_to(root / "elsewhere")
            before = sorted((root / "elsewhere").rglob("*"))
            storage._files_of(SPACE).next_look_s = 0.0

            with pytest.raises(StorageUnavailable, match="symbolic link"):
                storage.batch_set(SPACE, HASHES[:3], [page()] * 3)
            assert before == sorted((root / "elsewhere").rglob("*"))

    @pytest.mark.parametrize("kind", ["text", "link", "directory", "pipe"])
    def test_a_usage_of_another_program_is_refused_and_kept(
        self, root: Path, tmp_path: Path, kind: str
    ) -> None:
        root.mkdir()
        usage, thesis = root / "usage", tmp_path / "thesis"
        thesis.write_text("a thesis of many pages" * 100)
        if kind == "text":
            usage.write_text("my precious quota notes\n")
        elif kind == "link":
            usage.symlink_to(thesis)
        elif kind == "directory":
            usage.mkdir()
        else:
            os.mkfifo(usage)
        before = os.lstat(usage)

        with pytest.raises(ConfigError, match="usage"):
            opened(root)
        assert (before.st_ino, before.st_size) == (os.lstat(usage).st_ino, os.lstat(usage).st_size)
        assert 2200 == thesis.stat().st_size

    def test_a_list_of_another_program_is_kept(self, root: Path) -> None:
        (root / "survey").mkdir(parents=True)
        notes = root / "survey" / "victims"
        notes.write_text("my notes on victims of surveys, longer than a header")
        with opened(root, 4) as storage:
            assert [True] * 9 == put(storage, *range(9))
            assert [5, 6, 7, 8] == there(storage)
        assert notes.read_text().startswith("my notes")

    @pytest.mark.parametrize("pages", [None, 4], ids=["unlimited", "limited"])
    def test_an_implausible_usage_is_counted_again(self, root: Path, pages: int | None) -> None:
        with opened(root) as storage:
            put(storage, 0, 1)
        (root / "usage").write_bytes(b"\xff" * 16)
        with opened(root, pages) as storage:
            assert [True] * 8 == put(storage, *range(2, 10))
            if pages is not None:
                assert [6, 7, 8, 9] == there(storage)


class TestFailedOpens:
    @pytest.mark.parametrize("step", ["usage", "power", "thread"])
    def test_they_leave_nothing_behind(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, step: str
    ) -> None:
        opened(root).close()
        fds, threads = descriptors(), set(threading.enumerate())
        config: dict[str, Any] = {"capacity_nbytes": "1MiB"}
        wanted: type[Exception] = ConfigError
        if step == "usage":
            (root / "usage").unlink()
            (root / "usage").mkdir()
        elif step == "power":
            config["durability"] = "power"
            monkeypatch.setattr(
                "hicache_backends.file.storage.sync_directory", failing("fsync", errno.EACCES)
            )
        else:
            wanted = RuntimeError

            def refuse(_: threading.Thread) -> None:
                raise RuntimeError("can't start new thread")

            monkeypatch.setattr(threading.Thread, "start", refuse)
        for _ in range(5):
            with pytest.raises(wanted):
                FileStorage.from_config({"path": str(root), **config})

        assert fds == descriptors()
        assert not set(threading.enumerate()) - threads
        assert [] == list((root / "writers").iterdir())
