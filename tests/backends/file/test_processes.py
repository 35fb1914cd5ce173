"""The `file` backend in several processes: shared roots and killed writers."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import pytest
from file_roots import FILE_NBYTES, HASHES, SPACE, is_right, opened, run_python, used_nbytes
from hicache_backends.file import FileStorage
from hicache_backends.file.page_file import TRAILER_NBYTES
from pages import blank, hash_of, page, space

from hicache_storage.backend_support.deadline import Deadline

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path


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
        """A killed writer leaves the sum too high, which only costs capacity until the next scan."""
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
