"""The `file` backend among processes: shared roots, killed writers, forks, and durability."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hicache_backends.file import FileStorage
from hicache_backends.file.page_file import TRAILER_NBYTES
from pages import blank, hash_of, page, space

from hicache_storage import Page
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.vectored_io import DIRECT_ALIGNMENT

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

SPACE = space()
FILE_NBYTES = 4096 + TRAILER_NBYTES
HASHES = [hash_of(number) for number in range(100)]
SPAWN = multiprocessing.get_context("spawn")


def opened(root: Path, **config: Any) -> FileStorage:
    storage = FileStorage.from_config({"path": str(root), **config})
    storage.open_space(SPACE)
    return storage


def is_right(storage: FileStorage, number: int) -> bool:
    target = blank()
    hit = storage.batch_get(SPACE, [hash_of(number)], [target]) == [True]
    return hit and target.tobytes() == page(seed=number).tobytes()


def used_nbytes(root: Path) -> int:
    nbytes = 0
    for path in root.glob("spaces/*/??/*"):
        try:
            nbytes += path.stat().st_size
        except FileNotFoundError:
            continue
    return nbytes


def run_python(script: str, *args: object) -> subprocess.Popen[str]:
    """A child that runs `script` with the tests' helpers at hand."""
    tests = Path(__file__).parents[2] / "support"
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, args)],
        env={**os.environ, "PYTHONPATH": str(tests)},
        stdout=subprocess.PIPE,
        text=True,
    )


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

    def test_what_it_left_is_collected_by_the_next_open(self, root: Path) -> None:
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
        results.send(storage.batch_set(SPACE, HASHES, [page(seed=n) for n in range(100)]))
        results.close()


class TestSharing:
    def test_what_one_process_set_another_sees(self, root: Path) -> None:
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
            ready = select.select([receive.fileno() for receive, _ in pipes], [], [], 0)[0]
            for receive, _ in list(pipes):
                if receive.fileno() in ready:
                    results.append(receive.recv())
                    pipes = [pipe for pipe in pipes if pipe[0] is not receive]
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


class TestPower:
    def test_data_is_synced_before_the_name_and_the_name_before_the_verdict(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls = list[str]()
        names: dict[int, str] = {}
        real_open = os.open

        def opening(path: str, *args: Any, **kwargs: Any) -> int:
            fd = real_open(path, *args, **kwargs)
            names[fd] = str(path)
            return fd

        def noting(name: str, real: Any) -> Any:
            def call(first: Any, *args: Any, **kwargs: Any) -> Any:
                calls.append(f"{name} {names.get(first, first)}")
                return real(first, *args, **kwargs)

            return call

        with opened(root, durability="power") as storage:
            monkeypatch.setattr(os, "open", opening)
            for name in ("fdatasync", "fsync", "rename"):
                monkeypatch.setattr(os, name, noting(name, getattr(os, name)))
            assert [True] == storage.batch_set(SPACE, HASHES[:1], [page()])
            monkeypatch.undo()

        directory = f"{root}/spaces/{SPACE.id}"
        fan = f"{directory}/{HASHES[0][:2]}"
        steps = [call.split(" ")[0] for call in calls]
        assert steps[0] == "fdatasync"
        assert "rename" in steps
        assert steps.index("rename") < steps.index("fsync")
        assert {f"fsync {fan}", f"fsync {directory}"} <= set(calls)

    @pytest.mark.parametrize(
        ("nbytes", "shift", "segments"),
        [
            (2 << 20, 0, 1),
            (2 << 20, 0, 8),
            (2 << 20, 1, 1),
            ((2 << 20) + 1, 0, 1),
            (4096, 0, 1),
            (100, 0, 1),
        ],
        ids=["direct", "direct-segments", "odd-address", "odd-size", "small", "tiny"],
    )
    def test_pages_read_back_however_they_were_written(
        self, root: Path, nbytes: int, shift: int, segments: int
    ) -> None:
        import mmap

        key_space = space(page_nbytes=nbytes)
        with mmap.mmap(-1, nbytes + 2 * DIRECT_ALIGNMENT) as memory, memoryview(memory) as view:
            view[shift : shift + nbytes] = page(nbytes).segments[0]
            step = nbytes // segments
            source = Page(
                *(view[shift + n * step : shift + (n + 1) * step] for n in range(segments))
            )
            with opened(root, durability="power") as storage:
                assert [True] == storage.batch_set(key_space, HASHES[:1], [source])
            for segment in source.segments:
                segment.release()
            del source
        target = blank(nbytes)
        with opened(root) as storage:
            assert [True] == storage.batch_get(key_space, HASHES[:1], [target])
            assert page(nbytes).tobytes() == target.tobytes()
            assert nbytes + TRAILER_NBYTES == used_nbytes(root)

    def test_a_refused_direct_write_falls_back(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import mmap

        nbytes = 2 << 20
        real = os.open
        flags = list[int]()

        def refusing(path: str, flag: int, *args: Any, **kwargs: Any) -> int:
            if flag & os.O_DIRECT:
                flags.append(flag)
                raise OSError(22, "Invalid argument")
            return real(path, flag, *args, **kwargs)

        key_space = space(page_nbytes=nbytes)
        with mmap.mmap(-1, nbytes) as memory:
            monkeypatch.setattr(os, "open", refusing)
            with opened(root, durability="power") as storage:
                assert 1 == storage.capabilities.alignment
                view = memoryview(memory)
                assert [True] == storage.batch_set(key_space, HASHES[:1], [Page(view)])
                assert [True] == storage.batch_get(key_space, HASHES[:1], [blank(nbytes)])
                view.release()
        assert 2 == len(flags)

    def test_a_page_that_was_not_synced_is_written_again(self, root: Path) -> None:
        with opened(root) as storage:
            assert [True] == storage.batch_set(SPACE, HASHES[:1], [page()])
        (path,) = root.glob("spaces/*/??/*")
        before = path.read_bytes()
        with opened(root, durability="power") as storage:
            for _ in range(2):
                assert [True] == storage.batch_set(SPACE, HASHES[:1], [page()])
            assert FILE_NBYTES == storage.stats().nbytes
            after = path.read_bytes()
        assert before != after
        assert before[:4096] == after[:4096]

    def test_a_name_that_cannot_be_synced_is_refused_and_gone(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def failing(fd: int) -> None:
            raise OSError(5, "Input/output error")

        with opened(root, durability="power") as storage:
            monkeypatch.setattr(os, "fsync", failing)
            assert [False] == storage.batch_set(SPACE, HASHES[:1], [page()])
            monkeypatch.undo()
            assert [False] == storage.batch_exists(SPACE, HASHES[:1])
            assert 0 == storage.stats().nbytes
