"""The `hf3fs` backend and fork(2): one index for all processes, and locks that end with their owner."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hf3fs_roots import HASHES, NBYTES, SPACE, child, counted, hits, opened, stored
from hicache_backends.hf3fs import fork_guard, writer
from hicache_backends.hf3fs.fork_guard import FORKS
from hicache_backends.hf3fs.index import sqlite_tables
from pages import page
from servers import wait_until

from hicache_storage import StorageUnavailable
from hicache_storage.backend_support.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from hicache_backends.hf3fs import Hf3fsStorage

FORK = multiprocessing.get_context("fork")
SPAWN = multiprocessing.get_context("spawn")


def succeeds(process: BaseProcess) -> bool:
    process.start()
    process.join(60)
    return process.exitcode == 0


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a context manager that holds one set of a storage while it uses a connection."""
    real = sqlite_tables.insert

    @contextmanager
    def holding(storage: Hf3fsStorage, numbers: range) -> Generator[threading.Event, None, None]:
        inside, go_on = threading.Event(), threading.Event()

        def inserting(*arguments: Any, **named: Any) -> Any:
            inside.set()
            assert go_on.wait(60)
            return real(*arguments, **named)

        monkeypatch.setattr(sqlite_tables, "insert", inserting)
        caller = threading.Thread(target=stored, args=(storage, numbers))
        caller.start()
        assert inside.wait(60)
        monkeypatch.setattr(sqlite_tables, "insert", real)
        try:
            yield go_on
        finally:
            go_on.set()
            caller.join(60)

    return holding


class TestSqliteIndex:
    def test_parent_child_and_other_processes_share_one_index(self, root: Path) -> None:
        """Another process that closes its last connection does not remove the log of the child."""
        ours, theirs = FORK.Pipe()
        storage = opened(root)
        stored(storage, range(8))
        forked = FORK.Process(target=_in_child, args=(storage, theirs))
        forked.start()
        assert ours.recv() == "seen"
        storage.close()
        ours.send("go on")
        assert ours.recv() == "set"
        assert succeeds(SPAWN.Process(target=_in_stranger, args=(root,)))
        ours.send("go on")
        forked.join(60)

        assert 0 == forked.exitcode
        assert succeeds(SPAWN.Process(target=_sees_all, args=(root, 32)))
        assert (0, 32, 0) == counted(root)

    def test_a_fork_closes_connections_that_no_step_uses(self, root: Path) -> None:
        with opened(root) as storage:
            stored(storage, range(2))
            assert _sqlite_files()
            forked = FORK.Process(target=_has_no_sqlite_file)

            assert succeeds(forked)
            assert [True] * 2 == hits(storage, range(2))

    def test_a_fork_waits_for_a_transaction(self, root: Path, held: Callable[..., Any]) -> None:
        with opened(root) as storage:
            stored(storage, range(2))
            with held(storage, range(2, 4)) as go_on:

                def let_go() -> None:
                    wait_until(lambda: FORKS._forking, limit_s=30)
                    go_on.set()

                letting_go = threading.Thread(target=let_go)
                letting_go.start()
                forked = FORK.Process(target=stored, args=(storage, range(4, 8)))

                assert succeeds(forked)
                letting_go.join(60)
            assert [True] * 8 == hits(storage, range(8))

    def test_a_fork_while_a_transaction_looks_for_dead_writers_is_no_harm(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The locks are tried in steps of their own, which must not wait for the fork."""
        real, inside = writer.tokens, threading.Event()

        def tokens(directory: str) -> set[str]:
            inside.set()
            wait_until(lambda: FORKS._forking, limit_s=30)
            return real(directory)

        with opened(root) as storage, opened(root):
            monkeypatch.setattr(sqlite_tables, "tokens", tokens)
            caller = threading.Thread(target=stored, args=(storage, range(2)))
            caller.start()
            assert inside.wait(60)
            monkeypatch.setattr(sqlite_tables, "tokens", real)

            assert succeeds(FORK.Process(target=stored, args=(storage, range(2, 4))))
            caller.join(60)
            assert [True] * 4 == hits(storage, range(4))

    def test_a_child_that_was_forked_in_a_transaction_refuses_the_index(
        self, root: Path, held: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(fork_guard, "WAIT_S", 0.1)
        with opened(root) as storage:
            stored(storage, range(2))
            with held(storage, range(2, 4)):
                forked = FORK.Process(target=_is_refused, args=(storage, root))

                assert succeeds(forked)
            assert [True] * 4 == hits(storage, range(4))
            stored(storage, range(4, 6))

        assert (0, 6, 0) == counted(root)

    def test_threads_may_use_the_index_at_the_moment_of_a_fork(self, root: Path) -> None:
        stop = threading.Event()
        with opened(root) as storage:

            def use(first: int) -> None:
                while not stop.is_set():
                    numbers = range(first, first + 4)
                    stored(storage, numbers)
                    hits(storage, numbers)
                    storage.batch_delete(SPACE, [HASHES[number] for number in numbers])

            threads = [threading.Thread(target=use, args=(first,)) for first in (40, 48, 56)]
            for thread in threads:
                thread.start()
            try:
                for number in range(12):
                    numbers = range(number, number + 1)
                    assert succeeds(FORK.Process(target=stored, args=(storage, numbers)))
            finally:
                stop.set()
                for thread in threads:
                    thread.join(60)
            assert [True] * 12 == hits(storage, range(12))

        assert (0, 12, 0) == counted(root)


_FORKS_IN_A_WRITE = """
import os, sys
os.environ["HICACHE_NATIVE"] = "0"  # the compiled data plane does not call os.pwritev
from hicache_backends.hf3fs import Hf3fsStorage
from pages import hash_of, page, space
root, nbytes = sys.argv[1], int(sys.argv[2])
storage = Hf3fsStorage.from_config({"path": root})

def pwritev(*arguments):
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        sys.stdin.read()
        os._exit(0)
    sys.stdin.read()
os.pwritev = pwritev
storage.batch_set(space(page_nbytes=nbytes), [hash_of(0)], [page(nbytes)])
"""


class TestLocks:
    def test_a_child_that_never_uses_the_storage_keeps_no_lock_of_its_dead_parent(
        self, root: Path
    ) -> None:
        """The parent was killed while it wrote a page."""
        with opened(root) as storage:
            stored(storage, range(8, 16))
        with child(_FORKS_IN_A_WRITE, root, NBYTES) as (parent, output):
            grandchild = int(output.readline())
            os.kill(parent, signal.SIGKILL)
            wait_until(lambda: _has_parent_other_than(grandchild, parent), limit_s=30)
            with opened(root, timeout_s=20) as storage:
                assert 0 == counted(root)[0]
            for path in root.glob("index*"):
                path.unlink()
            with opened(root, timeout_s=20) as storage:
                stored(storage, range(2))
                assert [True] * 8 == hits(storage, range(8, 16))
            assert Path(f"/proc/{grandchild}").exists()
            os.kill(grandchild, signal.SIGKILL)


class TestForksInAStep:
    def test_nobody_waits_for_a_step_of_the_thread_that_forks(self) -> None:
        """A signal handler may fork. Neither this fork nor one of the child waits for the step."""
        assert succeeds(FORK.Process(target=_fork_twice, daemon=True))

    def test_a_descriptor_that_the_child_has_closed_is_not_closed_again(
        self, tmp_path: Path
    ) -> None:
        assert succeeds(FORK.Process(target=_fork_with_a_lock, args=(tmp_path,)))


def _fork_twice() -> None:
    fork_guard.WAIT_S = 600.0
    with FORKS.step(Deadline(60)):
        forked = os.fork()
    if not forked:
        signal.alarm(30)
        if os.fork():
            os.wait()
        os._exit(0)
    assert (forked, 0) == os.waitpid(forked, 0)


def _fork_with_a_lock(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    FORKS.hold(descriptor)
    forked = os.fork()
    if not forked:
        reused = os.open(directory, os.O_RDONLY)
        FORKS.release(descriptor)
        os.fstat(reused)
        os._exit(0 if reused == descriptor else 1)
    assert (forked, 0) == os.waitpid(forked, 0)


def _has_parent_other_than(pid: int, parent: int) -> bool:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) != parent


def _in_child(storage: Hf3fsStorage, parent: Connection) -> None:
    assert [True] * 8 == hits(storage, range(8))
    parent.send("seen")
    parent.recv()
    stored(storage, range(8, 16))
    assert [True] * 16 == hits(storage, range(16))
    parent.send("set")
    parent.recv()
    assert [True] * 24 == hits(storage, range(24))
    stored(storage, range(24, 32))
    storage.close()


def _in_stranger(root: Path) -> None:
    with opened(root) as storage:
        assert [True] * 16 == hits(storage, range(16))
        stored(storage, range(16, 24))


def _sees_all(root: Path, count: int) -> None:
    with opened(root) as storage:
        assert [True] * count == hits(storage, range(count))


def _has_no_sqlite_file() -> None:
    assert [] == _sqlite_files()


def _sqlite_files() -> list[str]:
    names = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    return [name for name in names if ".sqlite" in name]


def _is_refused(storage: Hf3fsStorage, root: Path) -> None:
    with pytest.raises(StorageUnavailable, match="forked"):
        hits(storage, range(2))
    with pytest.raises(StorageUnavailable, match="forked"):
        storage.batch_set(SPACE, HASHES[8:9], [page(NBYTES)])
    with pytest.raises(StorageUnavailable, match="forked"):
        opened(root)
