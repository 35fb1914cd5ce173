"""The `hf3fs` backend in several processes: killed writers, lost indexes, forks, full file systems."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from hf3fs_roots import HASHES, NBYTES, SLOT_NBYTES, SPACE, child, counted, hits, opened, stored
from hicache_backends.hf3fs import Hf3fsStorage, fork_guard, writer
from hicache_backends.hf3fs.fork_guard import FORKS
from hicache_backends.hf3fs.index import sqlite_tables
from pages import page
from servers import wait_until

from hicache_storage import StorageUnavailable
from hicache_storage.backend_support.deadline import Deadline

_STOP_IN_PHASE = """
import os, sqlite3, sys
os.environ["HICACHE_NATIVE"] = "0"  # the compiled data plane does not call os.pwritev
from hicache_backends.hf3fs import Hf3fsStorage
from hicache_backends.hf3fs.index import sqlite_tables
from pages import hash_of, page, space
root, phase, nbytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
storage = Hf3fsStorage.from_config({"path": root})

def stop():
    print("stopped", flush=True)
    sys.stdin.read()

real = os.pwritev
def pwritev(descriptor, buffers, offset):
    if phase == "reserved":
        stop()
    if phase == "half written":
        real(descriptor, buffers[: len(buffers) // 2], offset)
        stop()
    if phase == "page written":
        real(descriptor, buffers[:-1], offset)
        stop()
    done = real(descriptor, buffers, offset)
    if phase == "written":
        stop()
    return done
os.pwritev = pwritev

insert = sqlite_tables.insert
def inserting(*arguments):
    done = insert(*arguments)
    if phase == "committing":
        stop()
    return done
sqlite_tables.insert = inserting

sources = [page(nbytes, n) for n in range(8, 12)]
print(storage.batch_set(space(page_nbytes=nbytes), [hash_of(n) for n in range(8, 12)], sources))
sys.stdout.flush()
if phase == "committed":
    stop()
"""

PHASES = ["reserved", "half written", "page written", "written", "committing", "committed"]


class TestKilledWriter:
    @pytest.mark.parametrize("phase", PHASES)
    @pytest.mark.parametrize("reused", [False, True], ids=["new", "reused"])
    def test_it_leaves_whole_pages_and_its_slots_come_back(
        self, root: Path, phase: str, *, reused: bool
    ) -> None:
        with opened(root) as storage:
            stored(storage, range(8))
            if reused:  # the marks of the slots name other pages
                stored(storage, range(8, 20))
                storage.batch_delete(SPACE, HASHES[8:20])
        with child(_STOP_IN_PHASE, root, phase, NBYTES) as (pid, output):
            assert output.readline() in ("stopped\n", "[True, True, True, True]\n")
            if phase == "committed":
                output.readline()
            os.kill(pid, signal.SIGKILL)
        done = phase == "committed"
        with opened(root) as storage:
            assert [True] * 8 == hits(storage, range(8))
            assert [done] * 4 == hits(storage, range(8, 12))
            stored(storage, range(8, 64))  # the set needs the dead writer's slots, too
            assert [True] * 64 == hits(storage, range(64))

        assert (0, 64, 0) == counted(root)
        assert [] == list((root / "writers").iterdir())

    @pytest.mark.parametrize("phase", PHASES)
    def test_an_index_made_anew_has_whole_pages_only(self, root: Path, phase: str) -> None:
        with opened(root) as storage:
            stored(storage, range(8))
        with child(_STOP_IN_PHASE, root, phase, NBYTES) as (pid, output):
            assert output.readline()
            os.kill(pid, signal.SIGKILL)
        for path in root.glob("index*"):
            path.unlink()
        with opened(root) as storage:
            assert [True] * 8 == hits(storage, range(8))
            hits(storage, range(8, 12))
            stored(storage, range(8, 16))
            assert [True] * 16 == hits(storage, range(16))

        assert (0, 16, 0) == counted(root)

    def test_a_live_writer_s_slots_are_left_alone(self, root: Path) -> None:
        with child(_STOP_IN_PHASE, root, "reserved", NBYTES) as (_, output):
            assert "stopped\n" == output.readline()
            with opened(root, capacity_nbytes=10 * SLOT_NBYTES) as storage:
                stored(storage, range(20, 25))
                stored(storage, range(30, 35))

            assert 4 == counted(root)[0]

    def test_slots_of_a_live_writer_without_its_lock_file_are_left_alone(self, root: Path) -> None:
        with child(_STOP_IN_PHASE, root, "reserved", NBYTES) as (_, output):
            assert "stopped\n" == output.readline()
            shutil.rmtree(root / "writers")
            with opened(root, capacity_nbytes=10 * SLOT_NBYTES) as storage:
                stored(storage, range(20, 25))
                stored(storage, range(30, 35))

            assert 4 == counted(root)[0]


_WRITE_FOREVER = """
import itertools, sys
from hicache_backends.hf3fs import Hf3fsStorage
from hicache_storage import HiCacheError
from pages import hash_of, page, space
sp = space(page_nbytes=int(sys.argv[2]))
storage = Hf3fsStorage.from_config({"path": sys.argv[1], "capacity_nbytes": int(sys.argv[3])})
sources = [page(sp.page_nbytes, seed) for seed in range(64)]
for turn in itertools.count():
    numbers = [(turn * 8 + n) % 64 for n in range(8)]
    try:
        storage.batch_set(sp, [hash_of(n) for n in numbers], [sources[n] for n in numbers])
        print("set", flush=True)
    except HiCacheError as error:
        print(type(error).__name__, error, flush=True)
"""


class TestLostIndex:
    def test_it_may_vanish_under_load(self, root: Path) -> None:
        capacity = 20 * SLOT_NBYTES
        with (
            child(_WRITE_FOREVER, root, NBYTES, capacity) as (_, one),
            child(_WRITE_FOREVER, root, NBYTES, capacity) as (_, other),
        ):
            for output in (one, other):
                assert "set\n" == output.readline()
            with opened(root, capacity_nbytes=capacity) as storage:
                for _ in range(3):
                    for path in root.glob("index*"):
                        path.unlink(missing_ok=True)
                    for output in (one, other):
                        said = [output.readline() for _ in range(4)]
                        assert "set\n" in said, said
                    for _ in range(4):
                        hits(storage, range(64))
        with opened(root, capacity_nbytes=capacity) as storage:
            stored(storage, range(4))
            assert [True] * 4 == hits(storage, range(4))

        assert 0 == counted(root)[2]

    def test_a_killed_maker_s_work_is_done_again(self, root: Path) -> None:
        with opened(root) as storage:
            stored(storage, range(8))
        for path in root.glob("index*"):
            path.unlink()
        (root / "index-0123456789abcdef.sqlite").write_bytes(b"half an index")
        with opened(root) as storage:
            assert [True] * 8 == hits(storage, range(8))

        assert 1 == len(list(root.glob("index-*.sqlite")))


class TestSharing:
    def test_processes_see_each_other_s_pages_and_stay_within_the_capacity(
        self, root: Path
    ) -> None:
        capacity = 40 * SLOT_NBYTES
        with opened(root, capacity_nbytes=capacity) as storage:
            with child(_WRITE_FOREVER, root, NBYTES, capacity) as (_, output):
                for _ in range(20):
                    assert "set\n" == output.readline()
                    stored(storage, range(4))
                    hits(storage, range(64))
            assert any(hits(storage, range(8, 64)))
            stored(storage, range(4))
            assert (storage.stats().nbytes or 0) <= capacity

    def test_a_forked_child_uses_the_storage_on_its_own(self, root: Path) -> None:
        with opened(root) as storage:
            stored(storage, range(2))
            forked = multiprocessing.get_context("fork").Process(
                target=stored, args=(storage, range(2, 6))
            )
            forked.start()
            forked.join(60)
            assert 0 == forked.exitcode
            stored(storage, range(6, 8))

            assert [True] * 8 == hits(storage, range(8))

    @pytest.mark.usefixtures("python_data_plane")
    def test_a_child_that_was_forked_during_a_call_gives_back_what_it_opened(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The parent's running call never ends in the child, so the child must not wait for it."""
        writing, go_on, pwritev = threading.Event(), threading.Event(), os.pwritev

        def held(*arguments: Any) -> int:
            writing.set()
            assert go_on.wait(60)
            return pwritev(*arguments)

        with opened(root) as storage:
            monkeypatch.setattr(os, "pwritev", held)
            caller = threading.Thread(target=stored, args=(storage, range(2)))
            caller.start()
            assert writing.wait(60)
            forked = multiprocessing.get_context("fork").Process(
                target=_use_and_close, args=(storage, root)
            )
            forked.start()
            forked.join(60)
            go_on.set()
            caller.join(60)

            assert 0 == forked.exitcode

    def test_it_works_after_spawn(self, root: Path) -> None:
        with opened(root) as storage:
            spawned = multiprocessing.get_context("spawn").Process(
                target=_store_in_a_new_process, args=(root,)
            )
            spawned.start()
            spawned.join(60)

            assert 0 == spawned.exitcode
            assert [True] * 4 == hits(storage, range(4))


def _use_and_close(storage: Hf3fsStorage, root: Path) -> None:
    before = _open_below(root)
    hits(storage, range(2))
    storage.close()
    assert before >= _open_below(root)


def _open_below(root: Path) -> int:
    """Return the descriptors of this process below `root`."""
    names = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    return sum(name.startswith(str(root)) for name in names)


def _store_in_a_new_process(root: Path) -> None:
    with opened(root) as storage:
        stored(storage, range(4))


_FILL = """
import sys
from hicache_backends.hf3fs import Hf3fsStorage
from hicache_storage import HiCacheError
from pages import blank, hash_of, page, space
sp = space(page_nbytes=256 << 10)
storage = Hf3fsStorage.from_config({"path": sys.argv[1]})
storage.open_space(sp)
taken = []
for number in range(40):
    if storage.batch_set(sp, [hash_of(number)], [page(sp.page_nbytes, number)]) == [True]:
        taken.append(number)
assert 8 < len(taken) < 40, taken
def whole(number):
    target = blank(sp.page_nbytes)
    hit = storage.batch_get(sp, [hash_of(number)], [target]) == [True]
    return hit and target.tobytes() == page(sp.page_nbytes, number).tobytes()
assert all(map(whole, taken))
assert storage.stats().counters["refused_no_space"] == 40 - len(taken)
storage.batch_delete(sp, [hash_of(number) for number in taken[:4]])
new = [n for n in range(50, 54)
       if storage.batch_set(sp, [hash_of(n)], [page(sp.page_nbytes, n)]) == [True]]
assert len(new) == 4 and all(map(whole, new))
storage.close()
print("refused", 40 - len(taken))
"""


class TestFullFileSystem:
    def test_it_refuses_stays_readable_and_recovers(self, tmp_path: Path) -> None:
        """The process has a user namespace of its own with a tmpfs of 24 MiB."""
        if shutil.which("unshare") is None:
            pytest.skip("no unshare here")
        command = f'mount -t tmpfs -o size=24m none "{tmp_path}" && exec "$@"'
        done = subprocess.run(
            [
                *("unshare", "-Urm", "sh", "-c", command, "sh"),
                *(sys.executable, "-c", _FILL, str(tmp_path)),
            ],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(
                    [str(Path(__file__).parents[2] / "support"), *sys.path]
                ),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        if "Operation not permitted" in done.stderr and "mount" in done.stderr:
            pytest.skip("no user namespaces here")

        assert 0 == done.returncode, done.stderr
        assert done.stdout.startswith("refused ")


# The `hf3fs` backend and fork(2): one index for all processes, and locks that end with their owner.

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
        """The log that the child writes to stays if another process closes its last connection."""
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
        """The search tries the writers' locks in steps that must not wait for the end of the fork."""
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
        """A signal handler may fork in the middle of a step. Neither that fork nor the child waits."""
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
