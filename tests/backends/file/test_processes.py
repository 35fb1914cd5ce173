"""The `file` backend in several processes: shared roots and killed writers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
from file_roots import (
    FILE_NBYTES,
    HASHES,
    SPACE,
    file_of,
    is_right,
    opened,
    put,
    run_python,
    used_nbytes,
    within,
)
from hicache_backends.file import FileStorage
from hicache_backends.file.page_file import TRAILER_NBYTES, PageFiles
from hicache_backends.file.writer import total_pending_nbytes
from pages import blank, hash_of, page, space

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.writer_lock import try_lock

SPAWN = multiprocessing.get_context("spawn")
_WRITE_FOREVER = """
import itertools, sys
from hicache_backends.file import FileStorage
from pages import hash_of, page, space
nbytes, capacity = int(sys.argv[2]), sys.argv[3]
sp = space(page_nbytes=nbytes)
config = {"path": sys.argv[1]}
if capacity != "none":
    config["capacity_nbytes"] = int(capacity)
storage = FileStorage.from_config(config)
sources = [page(nbytes, seed) for seed in range(8)]
for count in itertools.count():
    hashes = [hash_of(n) for n in range(8 * count, 8 * count + 8)]
    print(storage.batch_set(sp, hashes, sources).count(True), flush=True)
"""


class TestKilledWriter:
    @pytest.mark.parametrize("pages", [None, 16], ids=["growing", "recycling"])
    def test_it_leaves_whole_pages_only(self, root: Path, pages: int | None) -> None:
        nbytes = 256 << 10
        key_space = space(page_nbytes=nbytes)
        capacity = "none" if pages is None else str(pages * (nbytes + TRAILER_NBYTES))
        sources = [page(nbytes, seed).tobytes() for seed in range(8)]
        for lines in (3, 7):
            child = run_python(_WRITE_FOREVER, root, nbytes, capacity)
            assert child.stdout is not None
            with child.stdout as output:
                for _ in range(lines):
                    assert "8\n" == output.readline()
                child.send_signal(signal.SIGKILL)
                child.wait()

        with FileStorage.from_config({"path": str(root)}) as storage:
            found = [info.page_hash for info in storage.scan(key_space)]
            seeds = {hash_of(n): n % 8 for n in range(4000)}
            targets = [blank(nbytes) for _ in found]
            assert len(found) >= 8
            assert all(storage.batch_get(key_space, found, targets))
            assert all(
                target.tobytes() == sources[seeds[page_hash]]
                for page_hash, target in zip(found, targets, strict=True)
            )

    def test_its_debris_is_collected_by_the_next_open(self, root: Path) -> None:
        child = run_python(_WRITE_FOREVER, root, 1 << 20, "none")
        assert child.stdout is not None
        with child.stdout as output:
            assert output.readline()
            (own,) = (root / "writers").iterdir()
            (own / "12345").write_bytes(b"half a page")
            with opened(root) as storage:
                assert own.exists(), "a live writer's directory was collected"
            child.send_signal(signal.SIGKILL)
            child.wait()
        with opened(root) as storage:
            assert not own.exists()
            assert 1 == storage.stats().counters["dead_writers"]
        assert [] == list((root / "writers").iterdir())

    def test_the_ledger_is_right_again_after_a_scan(self, root: Path) -> None:
        """A killed writer leaves the byte count too high, which costs capacity until the next scan."""
        capacity = 16 * FILE_NBYTES
        with opened(root, capacity_nbytes=capacity) as storage:
            storage._process.get().ledger.add(5 * FILE_NBYTES, Deadline(1))
        os.utime(root / "survey", (0, 0))  # no other process has just counted the pages
        with opened(root, capacity_nbytes=capacity) as storage:
            hashes = [hash_of(n) for n in range(16)]
            assert [True] * 16 == [storage.batch_set(SPACE, [h], [page()])[0] for h in hashes]
            assert [True] * 16 == storage.batch_exists(SPACE, hashes)
            assert 16 * FILE_NBYTES == storage.stats().nbytes


def _write_many(root: str, first: int, capacity: int, results: Connection) -> None:
    with FileStorage.from_config({"path": root, "capacity_nbytes": capacity}) as storage:
        ok = 0
        for start in range(first, first + 300, 6):
            numbers = range(start, start + 6)
            pages = [page(seed=n) for n in numbers]
            ok += sum(storage.batch_set(SPACE, [hash_of(n) for n in numbers], pages))
        results.send((ok, dict(storage.stats().counters)))
        results.close()


def _write_same(root: str, results: Connection) -> None:
    with FileStorage.from_config({"path": root}) as storage:
        results.send(storage.batch_set(SPACE, HASHES[:100], [page(seed=n) for n in range(100)]))
        results.close()


class TestSharing:
    def test_a_page_set_by_one_process_is_read_by_another(self, root: Path) -> None:
        receive, send = SPAWN.Pipe(duplex=False)
        child = SPAWN.Process(target=_write_same, args=(str(root), send))
        with opened(root) as storage:
            child.start()
            assert [True] * 100 == receive.recv()
            child.join()
            assert all(is_right(storage, number) for number in range(100))

    def test_writers_of_one_page_leave_one_whole_page(self, root: Path) -> None:
        pipes = [SPAWN.Pipe(duplex=False) for _ in range(3)]
        children = [SPAWN.Process(target=_write_same, args=(str(root), pipe[1])) for pipe in pipes]
        for child in children:
            child.start()
        assert [[True] * 100] * 3 == [receive.recv() for receive, _ in pipes]
        for child in children:
            child.join()
        with opened(root) as storage:
            assert all(is_right(storage, number) for number in range(100))
            assert 100 == len(list(storage.scan(SPACE)))

    def test_three_writers_never_exceed_the_capacity(self, root: Path) -> None:
        capacity = 40 * FILE_NBYTES
        opened(root).close()
        pipes = [SPAWN.Pipe(duplex=False) for _ in range(3)]
        children = [
            SPAWN.Process(target=_write_many, args=(str(root), 1000 * n, capacity, pipe[1]))
            for n, pipe in enumerate(pipes)
        ]
        for child in children:
            child.start()
        results: list[Any] = []
        while len(results) < 3:
            names = sum(1 for _ in root.glob("spaces/*/??/*"))
            assert names <= 2 * 40, "a listing may see a renamed file twice, but never so many"
            ready = wait([receive for receive, _ in pipes], timeout=0)
            results += [receive.recv() for receive, _ in pipes if receive in ready]
            pipes = [pipe for pipe in pipes if pipe[0] not in ready]
        for child in children:
            child.join()

        with opened(root, capacity_nbytes=capacity) as storage:
            storage.batch_set(SPACE, HASHES[:1], [page()])
            assert used_nbytes(root) <= capacity
            assert used_nbytes(root) <= (storage.stats().nbytes or 0) <= capacity
            assert all(is_right(storage, n) for n in range(1000, 1300) if storage_has(storage, n))
        assert all(ok > 150 for ok, _ in results), results
        assert all(counters["recycled"] > 50 for _, counters in results), results


def storage_has(storage: FileStorage, number: int) -> bool:
    return storage.batch_exists(SPACE, [hash_of(number)]) == [True]


# The state of a process of the `file` backend, and of its forked children.

LIMIT_S = 60.0


def test_an_idle_child_keeps_nothing_of_a_killed_parent_alive(root: Path) -> None:
    reader, writer = os.pipe()
    parent = os.fork()
    if not parent:
        storage = opened(root, 4)
        unpublished = storage._process.get().writer
        Path(unpublished.temp_path()).write_bytes(b"half a page")
        unpublished.add_pending(1 << 30, Deadline(1))
        if not os.fork():
            os.write(writer, str(os.getpid()).encode())
        time.sleep(LIMIT_S)
        os._exit(0)
    child = int(os.read(reader, 20))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    os.close(reader)
    os.close(writer)
    try:
        with opened(root) as storage:
            assert 1 == storage.stats().counters["dead_writers"]
            assert 0 == total_pending_nbytes(str(root / "writers"))
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_child_forked_under_a_lock_can_close(root: Path) -> None:
    """Another thread of the parent may hold any lock at the time of the fork."""
    storage = opened(root, 4)
    process = storage._process.get()
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with process.ledger._lock, process.writer._lock, process.writing():
            held.set()
            done.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(60)
    child = os.fork()
    if not child:
        os._exit(0 if within(storage.close, 30) is None else 1)
    done.set()
    holder.join()
    assert 0 == os.waitpid(child, 0)[1]
    storage.close()


_FORK = """
import os, sys
from hicache_backends.file import FileStorage
from pages import blank, hash_of, page, space
sp = space()
storage = FileStorage.from_config({"path": sys.argv[1], "capacity_nbytes": "1MiB"})
assert storage.batch_set(sp, [hash_of(0)], [page()]) == [True]
child = os.fork()
if child == 0:
    ok = storage.batch_get(sp, [hash_of(0)], [blank()]) == [True]
    ok &= storage.batch_set(sp, [hash_of(1)], [page(seed=1)]) == [True]
    ok &= len(os.listdir(sys.argv[1] + "/writers")) == 2
    storage.close()
    os._exit(0 if ok else 1)
assert os.waitpid(child, 0)[1] == 0
idle = os.fork()
if idle == 0:
    storage.close()
    os._exit(0)
assert os.waitpid(idle, 0)[1] == 0
assert len(os.listdir(sys.argv[1] + "/writers")) == 1
assert storage.batch_get(sp, [hash_of(1)], [blank()]) == [True]
assert storage.batch_set(sp, [hash_of(2)], [page(seed=2)]) == [True]
assert storage.stats().nbytes == 3 * 4160
storage.close()
print("fine")
"""


def test_a_forked_child_has_files_of_its_own(root: Path) -> None:
    child = run_python(_FORK, root)
    output, _ = child.communicate()
    assert ("fine\n", 0) == (output, child.returncode)


@contextmanager
def filled(root: Path) -> Generator[FileStorage]:
    """Open a storage with page 0. Storages that open a root with pages do not scan it."""
    with opened(root) as storage:
        put(storage, 0)
        yield storage


class TestHeal:
    """A damaged page that another process replaces by the right one while this process heals it."""

    @pytest.fixture
    def pages(self, root: Path) -> Generator[tuple[FileStorage, FileStorage]]:
        with filled(root) as healer, opened(root) as other:
            with file_of(root, 0).open("r+b") as file:
                file.seek(-10, os.SEEK_END)
                file.write(b"\xff\xff")
            yield healer, other

    def test_the_right_page_is_not_taken_away(
        self, pages: tuple[FileStorage, FileStorage], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        healer, other = pages
        real, real_rename = PageFiles.check, os.rename
        renamed: list[Any] = []

        def rename(source: Any, *args: Any, **options: Any) -> None:
            renamed.append(source)
            real_rename(source, *args, **options)

        def check(*args: Any) -> list[int]:
            found = real(*args)
            monkeypatch.setattr(PageFiles, "check", real)
            other.batch_delete(SPACE, HASHES[:1])
            put(other, 0)
            monkeypatch.setattr(os, "rename", rename)
            return found

        monkeypatch.setattr(PageFiles, "check", check)
        is_right(healer, 0)

        assert [] == renamed
        assert is_right(other, 0)

    def test_healers_of_one_page_take_turns(
        self, pages: tuple[FileStorage, FileStorage], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        healer, other = pages
        real, seen = PageFiles.check, list[bool]()

        def check(*args: Any) -> list[int]:
            monkeypatch.setattr(PageFiles, "check", real)
            fd = os.open(args[0].path(args[1][0]), os.O_RDONLY)
            seen.append(try_lock(fd))
            os.close(fd)
            return real(*args)

        monkeypatch.setattr(PageFiles, "check", check)
        is_right(healer, 0)

        assert [False] == seen
        assert [True] == put(other, 0)
        assert is_right(other, 0)

    @pytest.mark.parametrize("call", ["nothing", "set"])
    def test_one_that_was_taken_away_all_the_same_goes_back_unless_another_is_there(
        self,
        root: Path,
        pages: tuple[FileStorage, FileStorage],
        monkeypatch: pytest.MonkeyPatch,
        call: str,
    ) -> None:
        healer, other = pages
        real = os.rename

        def rename(*args: Any) -> None:
            monkeypatch.setattr(os, "rename", real)
            other.batch_delete(SPACE, HASHES[:1])
            put(other, 0)
            real(*args)
            if call == "set":
                put(other, 0)

        monkeypatch.setattr(os, "rename", rename)
        is_right(healer, 0)

        assert is_right(other, 0)
        assert used_nbytes(root) == other._process.get().ledger.totals(Deadline(1)).used
