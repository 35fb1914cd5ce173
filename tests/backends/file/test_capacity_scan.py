"""Scans of the `file` backend: one process scans, and the others evict from its list or a sample."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hicache_backends.file import FileStorage, capacity_scan
from hicache_backends.file.capacity import Capacity
from hicache_backends.file.layout import Layout
from hicache_backends.file.page_file import TRAILER_NBYTES
from hicache_backends.file.victims_file import ScanLock, ScannedPage
from pages import hash_of, page, space
from servers import wait_until

from hicache_storage import native
from hicache_storage.native.reference import directories, files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


NBYTES = 64


SPACE = space(page_nbytes=NBYTES)


FILE_NBYTES = NBYTES + TRAILER_NBYTES


ONE = page(NBYTES)


SPAWN = multiprocessing.get_context("spawn")


LIMIT_S = 60.0


def opened(root: Path, pages: int | None, **config: Any) -> FileStorage:
    limit = {} if pages is None else {"capacity_nbytes": pages * FILE_NBYTES}
    storage = FileStorage.from_config({"path": str(root), **limit, **config})
    storage.open_space(SPACE)
    return storage


def put(storage: FileStorage, numbers: range) -> list[bool]:
    return storage.batch_set(SPACE, [hash_of(n) for n in numbers], [ONE] * len(numbers))


def there(storage: FileStorage, numbers: range) -> list[int]:
    present = storage.batch_exists(SPACE, [hash_of(n) for n in numbers])
    return [n for n, is_there in zip(numbers, present, strict=True) if is_there]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count the scans and the vain claims of all storages of this process."""
    seen = {"scans": 0, "vain": 0}
    scan, claim = capacity_scan.CapacityScanner._scan, Capacity._claim

    def counting_scans(self: capacity_scan.CapacityScanner) -> list[bytes]:
        seen["scans"] += 1
        return scan(self)

    def claiming(self: Capacity, *args: Any) -> list[int]:
        verdicts = claim(self, *args)
        seen["vain"] += verdicts.count(native.MISS)
        return verdicts

    monkeypatch.setattr(capacity_scan.CapacityScanner, "_scan", counting_scans)
    monkeypatch.setattr(Capacity, "_claim", claiming)
    return seen


@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_scans_do_not_grow_with_the_ranks_that_share_a_full_store(
    tmp_path: Path, counted: dict[str, int], monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """Each scan lists 200 files and serves all ranks, which make 1,600 evictions."""
    monkeypatch.setattr(capacity_scan, "LEAST_LISTED", 200)
    monkeypatch.setattr(capacity_scan, "MOST_LISTED", 200)
    with opened(tmp_path, None) as filling:
        assert all(put(filling, range(1600)))
    counted["scans"] = 0
    stores = [opened(tmp_path, 1600) for _ in range(ranks)]
    for turn in range(80):
        assert all(put(stores[turn % ranks], range(5000 + 20 * turn, 5020 + 20 * turn)))
    for storage in stores:
        storage.close()

    assert counted["scans"] <= 1600 // 200 + 4
    assert counted["vain"] <= 200


def test_the_oldest_pages_go_first_whichever_rank_evicts(tmp_path: Path) -> None:
    with opened(tmp_path, 60) as one, opened(tmp_path, 60) as other:
        for number in range(60):
            put(one, range(number, number + 1))
        for number in range(60, 90):
            assert [True] == put(other if number % 2 else one, range(number, number + 1))
        kept = there(one, range(90))

        assert set(range(60, 90)) <= set(kept)
        assert sum(n < 20 for n in kept) <= 4


def test_a_scan_lists_the_older_half_of_the_pages_that_the_one_before_has_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity_scan, "LEAST_LISTED", 10)
    with opened(tmp_path, None) as storage:
        for number in range(100):
            put(storage, range(number, number + 1))
        scanner = storage._process.get().capacity._scanner
        listed = [[page[2] for page in scanner._oldest_first(scanner._scan())] for _ in range(2)]

    names = [[path.rpartition("/")[2] for path in paths] for paths in listed]
    assert [[hash_of(number) for number in range(count)] for count in (10, 50)] == names


def test_pages_of_any_time_are_listed_in_order(tmp_path: Path) -> None:
    with opened(tmp_path, None) as storage:
        put(storage, range(4))
        times_ns = [5 * 10**9, -(10**9), 2**60, 10**9]
        for number, modified_ns in enumerate(times_ns):
            name = hash_of(number)
            path = tmp_path / "spaces" / SPACE.id / name[:2] / name
            os.utime(path, ns=(modified_ns, modified_ns))
        scanner = storage._process.get().capacity._scanner
        listed = list(scanner._oldest_first(scanner._scan()))

    assert sorted(times_ns) == [page[0] for page in listed]
    assert {FILE_NBYTES} == {page[1] for page in listed}
    assert [hash_of(number) for number in (1, 3, 0, 2)] == [
        page[2].rpartition("/")[2] for page in listed
    ]


def test_a_time_beyond_64_bits_does_not_end_a_scan(tmp_path: Path) -> None:
    seconds = [2**62, -(2**62), 32_503_680_000, 0]
    with opened(tmp_path, None) as storage:
        scanner = storage._process.get().capacity._scanner
        pages = [
            (second * 10**9, FILE_NBYTES, f"{scanner._layout.spaces}/{number}")
            for number, second in enumerate(seconds)
        ]

        assert sorted(pages) == list(scanner._oldest_first(scanner._oldest(pages)))


def one_directory(layout: Layout, _: str) -> Iterator[str]:
    """Return all pages as those of one directory."""
    directory = layout.space_dir(SPACE.id)
    for hashes in layout.pages(SPACE.id):
        yield from (f"{directory}/{page_hash[:2]}/{page_hash}" for page_hash in hashes)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No scan sees a page before the gate is open."""
    opening = threading.Event()
    listed = Layout.all_pages

    def waiting(layout: Layout) -> Iterator[str]:
        assert opening.wait(LIMIT_S)
        yield from listed(layout)

    monkeypatch.setattr(Layout, "all_pages", waiting)
    yield opening
    opening.set()


def test_a_full_store_takes_writes_while_its_first_scan_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    with opened(tmp_path, None) as filling:
        for number in range(0, 400, 4):
            put(filling, range(number, number + 4))
    with opened(tmp_path, 400, timeout_s=LIMIT_S) as storage:
        assert all(all(put(storage, range(n, n + 4))) for n in range(1000, 1100, 4))
        assert "evicted" in storage.stats().counters
        kept = there(storage, range(400))
        # A sample evicts its oldest eighth, so nearly all of the younger half stays.
        assert len([n for n in kept if n >= 200]) >= 190
        gate.set()


@pytest.mark.usefixtures("python_data_plane")
def test_a_sample_of_a_slow_file_system_is_part_of_the_sets_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    """A look at all 400 pages of the directory would take 8 s."""
    with opened(tmp_path, None) as filling:
        put(filling, range(400))
    looks = 0
    look = directories._stat

    def looked_at_slowly(path: bytes) -> tuple[int, int, int]:
        nonlocal looks
        looks += 1
        time.sleep(0.02)
        return look(path)

    monkeypatch.setattr(directories, "_stat", looked_at_slowly)
    monkeypatch.setattr(Layout, "pages_in", one_directory)
    with opened(tmp_path, 400, timeout_s=4) as storage:
        assert [True] == put(storage, range(1000, 1001))
        assert 1 <= looks <= 200
        gate.set()


def test_a_sample_of_a_large_store_looks_at_a_part_of_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    with opened(tmp_path, None) as filling:
        put(filling, range(400))
    looked_at = 0
    seen = capacity_scan.CapacityScanner._stat_pages

    def seeing(self: capacity_scan.CapacityScanner, *args: Any) -> Iterator[ScannedPage]:
        nonlocal looked_at
        for one in seen(self, *args):
            looked_at += 1
            yield one

    monkeypatch.setattr(capacity_scan, "_MOST_SAMPLE", 80)
    monkeypatch.setattr(capacity_scan.CapacityScanner, "_stat_pages", seeing)
    monkeypatch.setattr(Layout, "pages_in", one_directory)
    with opened(tmp_path, 400, timeout_s=LIMIT_S) as storage:
        assert [True] == put(storage, range(1000, 1001))
        assert looked_at == 80
        gate.set()


@pytest.mark.usefixtures("python_data_plane")
def test_a_batch_that_evicts_slowly_ends_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The eviction of all 200 pages would take 10 s."""
    with opened(tmp_path, None) as filling:
        put(filling, range(200))
    claims = 0
    claim = files._claim

    def slowly(*args: Any, **options: Any) -> int:
        nonlocal claims
        claims += 1
        time.sleep(0.05)
        return claim(*args, **options)

    monkeypatch.setattr(files, "_claim", slowly)
    with opened(tmp_path, 200, timeout_s=4) as storage:
        stored = put(storage, range(1000, 1200))
        assert any(stored)
        assert claims <= 100
        assert storage.stats().counters["timeouts"] == stored.count(False) >= 100
        assert storage.stats().counters["evicted"] == claims


def test_a_lost_usage_does_not_delay_opening_where_nothing_is_limited(
    tmp_path: Path, gate: threading.Event
) -> None:
    with opened(tmp_path, None) as storage:
        put(storage, range(10))
    (tmp_path / "usage").unlink()
    with opened(tmp_path, None) as storage:
        assert all(put(storage, range(10, 20)))
        assert (tmp_path / "usage").stat().st_size == 0
        gate.set()
        wait_until(lambda: (tmp_path / "usage").stat().st_size == 16)
        assert (storage.stats().nbytes or 0) >= 20 * FILE_NBYTES


def test_a_lost_usage_never_lets_a_store_exceed_its_capacity(
    tmp_path: Path, gate: threading.Event
) -> None:
    with opened(tmp_path, None) as storage:
        put(storage, range(10))
    (tmp_path / "usage").unlink()
    with opened(tmp_path, 12, timeout_s=0.5) as storage:
        assert [False] * 4 == put(storage, range(10, 14))
        assert {"timeouts": 4} == dict(storage.stats().counters)
        gate.set()
        wait_until(lambda: put(storage, range(10, 14)) == [True] * 4)
        assert 12 >= len(there(storage, range(20)))


def _hold(path: str, done: Any) -> None:
    """Take the right to scan, and do not use it."""
    lock = ScanLock(Layout(path))
    done.send(lock.acquire())
    time.sleep(LIMIT_S)


@pytest.mark.parametrize(
    ("sign", "last_beat_s"),
    [(signal.SIGKILL, 0), (signal.SIGSTOP, -1000), (signal.SIGSTOP, 1000)],
    ids=["killed", "stopped", "stopped-before-the-clock-was-set-back"],
)
def test_a_scanning_process_that_died_or_was_stopped_ends_no_eviction(
    tmp_path: Path, sign: signal.Signals, last_beat_s: int
) -> None:
    with opened(tmp_path, None) as storage:
        put(storage, range(40))
    receive, send = SPAWN.Pipe(duplex=False)
    child = SPAWN.Process(target=_hold, args=(str(tmp_path), send), daemon=True)
    child.start()
    try:
        assert receive.poll(LIMIT_S)
        assert receive.recv()
        with opened(tmp_path, 40, timeout_s=LIMIT_S) as storage:
            assert all(put(storage, range(40, 44)))  # the victims come from a sample
            assert child.pid is not None
            os.kill(child.pid, sign)
            beat_s = time.time() + last_beat_s
            os.utime(tmp_path / "survey" / "lock", (beat_s, beat_s))
            wait_until((tmp_path / "survey" / "victims").exists)
            assert all(put(storage, range(50, 70)))
    finally:
        child.kill()
        child.join()
        receive.close()
        send.close()


def test_a_wait_for_a_long_scan_polls_less_and_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each poll opens two files, which may be on another machine."""
    looks, waited_s = list[float](), 0.0

    class Stopping(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            nonlocal waited_s
            assert timeout is not None
            waited_s += timeout
            looks.append(timeout)
            if waited_s > 60:
                self.set()
            return self.is_set()

    with opened(tmp_path, None) as storage:
        process = storage._process.get()
        scanner = process.capacity._scanner
        scanner._stopping = Stopping()
        holder = ScanLock(process.layout)
        assert holder.acquire()
        monkeypatch.setattr(capacity_scan, "time", SimpleNamespace(monotonic=lambda: waited_s))

        assert not scanner._is_our_turn()

        monkeypatch.undo()
        holder.release()
    assert looks[0] <= 0.01
    assert len(looks) < 300
