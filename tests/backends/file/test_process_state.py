"""The state of a process of the `file` backend, and of its forked children."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from file_roots import opened, run_python, within
from hicache_backends.file.writer import total_pending_nbytes

from hicache_storage.backend_support.deadline import Deadline

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
    with process.ledger._lock, process.writer._lock, process._batches._changed:
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
