"""The state of a process of the `file` backend, and of its forked children."""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from file_roots import (
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
from hicache_backends.file.page_file import PageFiles
from hicache_backends.file.writer import total_pending_nbytes

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.writer_lock import try_lock

if TYPE_CHECKING:
    from collections.abc import Generator

    from hicache_backends.file import FileStorage

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
    with process.ledger._lock, process.writer._lock, process._batches._lock:
        child = os.fork()
        if not child:
            os._exit(0 if within(storage.close, 30) is None else 1)
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
    """Open a storage with page 0. A root with pages is not scanned by those that open it later."""
    with opened(root) as storage:
        put(storage, 0)
        yield storage


class TestHeal:
    """A damaged page that another process replaces with the right one while this one heals it."""

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
