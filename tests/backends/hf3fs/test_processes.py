"""The `hf3fs` backend in several processes: killed writers, lost indexes, forks, full file systems."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hf3fs_roots import HASHES, NBYTES, SLOT_NBYTES, SPACE, child, counted, hits, opened, stored

if TYPE_CHECKING:
    from hicache_backends.hf3fs import Hf3fsStorage

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
        """The call of the parent never ends in the child, and the child must not wait for it."""
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
