"""The `file` backend when room is short: eviction, recycling, full file systems."""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hicache_backends.file import FileStorage, capacity_scan
from hicache_backends.file.page_file import TRAILER_NBYTES, PageFiles
from hicache_backends.file.victims import VictimQueue
from hicache_backends.file.victims_file import Victim
from pages import blank, hash_of, page, space

from hicache_storage import Page
from hicache_storage.backend_support.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Sequence

SPACE = space()
FILE_NBYTES = 4096 + TRAILER_NBYTES
HASHES = [hash_of(number) for number in range(200)]


def await_first_scan(storage: FileStorage) -> None:
    """Wait for the scan that a storage begins with."""
    victims = storage._process.get().capacity._victims
    assert victims is not None
    deadline_s = time.monotonic() + 20
    while not victims._ended:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def opened(root: Path, pages: int | None = 4, **config: Any) -> FileStorage:
    limit = {} if pages is None else {"capacity_nbytes": pages * FILE_NBYTES}
    storage = FileStorage.from_config({"path": str(root), **limit, **config})
    storage.open_space(SPACE)
    return storage


def put(storage: FileStorage, *numbers: int) -> list[bool]:
    """Set pages one by one, so that each is newer than the one before."""
    return [storage.batch_set(SPACE, [HASHES[n]], [page(seed=n)])[0] for n in numbers]


def there(storage: FileStorage, numbers: Sequence[int] = range(200)) -> list[int]:
    present = storage.batch_exists(SPACE, [HASHES[n] for n in numbers])
    return [n for n, is_there in zip(numbers, present, strict=True) if is_there]


def is_right(storage: FileStorage, number: int) -> bool:
    target = blank()
    hit = storage.batch_get(SPACE, [HASHES[number]], [target]) == [True]
    return hit and target.tobytes() == page(seed=number).tobytes()


def file_of(root: Path, number: int) -> Path:
    return root / "spaces" / SPACE.id / HASHES[number][:2] / HASHES[number]


def used_nbytes(root: Path) -> int:
    return sum(path.stat().st_size for path in root.glob("spaces/*/??/*"))


class TestEviction:
    def test_the_oldest_pages_go_first(self, root: Path) -> None:
        with opened(root) as storage:
            assert [True] * 7 == put(storage, *range(7))
            assert [3, 4, 5, 6] == there(storage)
            assert 3 == storage.stats().counters["evicted"]
            assert 4 * FILE_NBYTES == storage.stats().nbytes == used_nbytes(root)

    @pytest.mark.parametrize("use", ["get", "set"])
    def test_a_page_in_use_stays(self, root: Path, use: str) -> None:
        with opened(root) as storage:
            put(storage, 0, 1, 2, 3)
            if use == "get":
                assert is_right(storage, 0)
            else:
                put(storage, 0)
            put(storage, 4, 5)
            assert [0, 3, 4, 5] == there(storage)

    def test_the_order_survives_reopening(self, root: Path) -> None:
        with opened(root) as storage:
            put(storage, 2, 0, 3, 1)
            assert is_right(storage, 2)
        with opened(root) as storage:
            put(storage, 4, 5)
            assert [1, 2, 4, 5] == there(storage)

    def test_of_one_batch_the_tail_goes_first(self, root: Path) -> None:
        """A prefix is of use without its end, not without its beginning."""
        with opened(root) as storage:
            await_first_scan(storage)  # not halfway through the batch
            assert all(storage.batch_set(SPACE, HASHES[:4], [page(seed=n) for n in range(4)]))
            put(storage, 4)
            assert [0, 1, 2, 4] == there(storage)

    def test_a_scan_that_found_nothing_refuses_no_page_afterwards(self, root: Path) -> None:
        """A fresh store fills up within milliseconds of its first, empty scan."""
        with opened(root) as storage:
            await_first_scan(storage)
            put(storage, 0, 1, 2, 3, 4)
            assert [1, 2, 3, 4] == there(storage)

    def test_gets_within_the_touch_interval_do_not_count(self, root: Path) -> None:
        with opened(root, touch_interval_s=3600) as storage:
            put(storage, 0, 1, 2, 3)
            assert is_right(storage, 0)
            put(storage, 4)
            assert [1, 2, 3, 4] == there(storage)

    def test_a_batch_larger_than_the_capacity_keeps_its_beginning(self, root: Path) -> None:
        with opened(root) as storage:
            put(storage, 9)
            verdicts = storage.batch_set(SPACE, HASHES[:6], [page(seed=n) for n in range(6)])
            assert [True] * 4 + [False] * 2 == verdicts
            assert [0, 1, 2, 3] == there(storage)
            assert 2 == storage.stats().counters["refused_no_space"]

    def test_a_page_larger_than_the_capacity_is_refused(self, root: Path) -> None:
        with opened(root) as storage:
            put(storage, 0, 1)
            large = space(page_nbytes=5 * FILE_NBYTES)
            assert [False] == storage.batch_set(large, HASHES[:1], [page(5 * FILE_NBYTES)])
            assert [0, 1] == there(storage)

    def test_victims_of_other_key_spaces_and_sizes_make_room(self, root: Path) -> None:
        draft = space(pool="draft", page_nbytes=1000)
        with opened(root) as storage:
            assert all(storage.batch_set(draft, HASHES[:9], [page(1000)] * 9))
            assert [True] * 4 == put(storage, 0, 1, 2, 3)
            assert [False] * 9 == storage.batch_exists(draft, HASHES[:9])
            assert "recycled" not in storage.stats().counters

    def test_a_lowered_capacity_is_enforced(self, root: Path) -> None:
        with opened(root, None) as storage:
            put(storage, *range(10))
        with opened(root, 3) as storage:
            put(storage, 10)
            assert [8, 9, 10] == there(storage)

    def test_min_free_evicts(self, root: Path) -> None:
        """More is wanted free than there is: everything old goes, and nothing new comes."""
        with opened(root, None) as storage:
            put(storage, 0, 1, 2)
        free = os.statvfs(root).f_bavail * os.statvfs(root).f_frsize
        with opened(root, None, min_free_nbytes=free * 2) as storage:
            assert [False] == put(storage, 3)
            assert [] == there(storage)
        with opened(root, None, min_free_nbytes=free // 2) as storage:
            assert [True] == put(storage, 3)

    def test_a_victim_that_cannot_be_removed_is_passed_over(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rename = os.rename

        def refusing(source: str, target: str) -> None:
            if source.endswith((HASHES[0], HASHES[1])):
                raise PermissionError(1, "not permitted")
            rename(source, target)

        with opened(root) as storage:
            put(storage, 0, 1, 2, 3)
            monkeypatch.setattr(os, "rename", refusing)
            assert [True] * 6 == put(storage, 4, 5, 6, 7, 8, 9)
            assert [0, 1, 8, 9] == there(storage)
            assert 2 == storage.stats().counters["unremovable"]
            monkeypatch.undo()

    def test_when_nothing_can_be_removed_sets_are_refused_until_it_can(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with opened(root) as storage:
            put(storage, 0, 1, 2, 3)
            rename = os.rename

            def refusing(source: str, target: str) -> None:
                if "/spaces/" in source:
                    raise PermissionError(1, "not permitted")
                rename(source, target)

            monkeypatch.setattr(os, "rename", refusing)
            assert [False, False] == put(storage, 4, 5)
            monkeypatch.undo()
            assert is_right(storage, 0)
            storage.batch_delete(SPACE, HASHES[:2])
            assert [True, True] == put(storage, 4, 5)
            assert 4 * FILE_NBYTES == storage.stats().nbytes

    def test_a_victim_deleted_by_hand_is_passed_over(self, root: Path) -> None:
        with opened(root) as storage:
            put(storage, 0, 1, 2, 3, 4)
            file_of(root, 1).unlink()
            assert [True] * 3 == put(storage, 5, 6, 7)
            assert used_nbytes(root) <= 4 * FILE_NBYTES

    def test_a_long_scan_runs_before_the_list_is_used_up(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(capacity_scan, "_LONG_SCAN_NS", -1)
        monkeypatch.setattr(capacity_scan, "LEAST_LISTED", 8)
        with opened(root, 20) as storage:
            assert all(put(storage, *range(120)))
            assert list(range(100, 120)) == there(storage)

    def test_threads_never_exceed_the_capacity(self, root: Path) -> None:
        with opened(root, 20) as storage:
            stop = threading.Event()
            worst = list[int]()

            def watch() -> None:
                while not stop.is_set():
                    worst.append(used_nbytes_now(root))

            def write(first: int) -> None:
                for start in range(first, first + 50, 5):
                    numbers = range(start, start + 5)
                    hashes = [HASHES[n] for n in numbers]
                    storage.batch_set(SPACE, hashes, [page(seed=n) for n in numbers])

            watcher = threading.Thread(target=watch)
            writers = [threading.Thread(target=write, args=(50 * n,)) for n in range(4)]
            watcher.start()
            for thread in writers:
                thread.start()
            for thread in writers:
                thread.join()
            stop.set()
            watcher.join()

            assert used_nbytes(root) <= 20 * FILE_NBYTES
            assert used_nbytes(root) == storage.stats().nbytes
            # A page renamed while the directories are read may be counted under both of its names.
            assert max(worst) <= 2 * 20 * FILE_NBYTES
            assert all(is_right(storage, n) for n in there(storage))


def used_nbytes_now(root: Path) -> int:
    nbytes = 0
    for path in root.glob("spaces/*/??/*"):
        try:
            nbytes += path.stat().st_size
        except FileNotFoundError:
            continue
    return nbytes


class TestRecycling:
    def test_victims_are_overwritten_in_place(self, root: Path) -> None:
        with opened(root) as storage:
            put(storage, 0, 1, 2, 3)
            inodes = {file_of(root, n).stat().st_ino for n in range(4)}
            put(storage, 4, 5, 6, 7)

            assert inodes == {file_of(root, n).stat().st_ino for n in range(4, 8)}
            assert 4 == storage.stats().counters["recycled"]
            assert all(is_right(storage, n) for n in range(4, 8))

    def test_it_can_be_turned_off(self, root: Path) -> None:
        with opened(root, recycle=False) as storage:
            put(storage, *range(8))
            assert {"evicted": 4} == dict(storage.stats().counters)

    def test_a_file_with_a_foreign_link_is_left_alone(self, root: Path, tmp_path: Path) -> None:
        with opened(root) as storage:
            put(storage, 0, 1, 2, 3)
            link = root / "link"
            os.link(file_of(root, 0), link)
            before = link.read_bytes()
            put(storage, 4)

            assert before == link.read_bytes()
            assert is_right(storage, 4)
            assert "recycled" not in storage.stats().counters

    def test_a_synced_page_is_not_overwritten(self, root: Path) -> None:
        """Half of it could be found under its old name after a loss of power."""
        with opened(root, durability="power") as storage:
            put(storage, 0, 1, 2, 3)
        with opened(root) as storage:
            put(storage, 4, 5, 6, 7, 8)
            assert {"evicted": 5, "recycled": 1} == dict(storage.stats().counters)

    @pytest.mark.parametrize("step", ["opened", "trailer"])
    @pytest.mark.parametrize("new", [1, 0], ids=["other-page", "same-page"])
    def test_a_reader_of_a_victim_sees_it_whole_or_misses(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, step: str, new: int
    ) -> None:
        """The victim is recycled at the two moments between a reader's system calls."""
        with opened(root, 1) as storage:
            put(storage, 0)

            def recycled() -> None:
                monkeypatch.undo()
                if new == 0:
                    put(storage, 1)
                put(storage, new)

            name = {"opened": "pread", "trailer": "preadv"}[step]
            real = getattr(os, name)

            def interrupted(*args: Any) -> Any:
                recycled()
                return real(*args)

            monkeypatch.setattr(os, name, interrupted)
            hit = is_right(storage, 0)

            assert hit == (step == "opened" and new == 0)
            assert is_right(storage, new)

    def test_a_reader_in_the_midst_of_an_overwrite_misses(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A reader that opened the victim reads at each step of the overwrite by hand."""
        with opened(root, None) as storage:
            put(storage, 0)
            files = PageFiles(storage._layout, SPACE)
            path = str(file_of(root, 0))
            answers = list[bool]()
            for name in ("pwrite", "pwritev", "utime"):
                real = getattr(os, name)

                def spied(*args: Any, real: Any = real, **kwargs: Any) -> Any:
                    result = real(*args, **kwargs)
                    if real.__name__ != "pwritev":
                        answers.append(storage_says())
                    return result

                def storage_says() -> bool:
                    return files.read(HASHES[0], blank(), None).name == "HIT"

                monkeypatch.setattr(os, name, spied)
            trailer = files.trailer(HASHES[1], bytes(15), synced=False)
            assert files.recycle(path, page(seed=1), trailer, time.time_ns())

            assert [False, False] == answers

    def test_a_storm_of_readers_never_sees_a_mixed_page(self, root: Path) -> None:
        """Pages name themselves in every 64 bytes; a hit must be of one name throughout."""
        nbytes = 64 << 10
        key_space = space(page_nbytes=nbytes)
        names = [hash_of(n) for n in range(12)]
        sources = [Page(bytearray(name.encode() * (nbytes // 64))) for name in names]
        hits = list[bool]()
        with opened(root, None) as plain:
            plain.open_space(key_space)
        config = {"path": str(root), "capacity_nbytes": 4 * (nbytes + TRAILER_NBYTES)}
        give_up_s = time.monotonic() + 60
        with FileStorage.from_config(config) as storage:

            def goes_on() -> bool:
                recycled = storage.stats().counters.get("recycled", 0)
                return (recycled < 100 or not hits) and time.monotonic() < give_up_s

            def write(offset: int) -> None:
                count = offset
                while goes_on():
                    count += 5
                    number = count % len(names)
                    storage.batch_set(key_space, [names[number]], [sources[number]])

            def read() -> None:
                target = blank(nbytes)
                digests = [hashlib.sha256(source.tobytes()).digest() for source in sources]
                while goes_on():
                    for name, digest in zip(names, digests, strict=True):
                        if storage.batch_get(key_space, [name], [target]) == [True]:
                            hits.append(hashlib.sha256(target.segments[0]).digest() == digest)

            threads = [threading.Thread(target=write, args=(n,)) for n in range(2)]
            threads += [threading.Thread(target=read) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

            assert hits
            assert all(hits)
            assert storage.stats().counters["recycled"] >= 100


def nothing_more() -> tuple[list[Victim], bool]:
    """The list of a store that has none."""
    return [], False


def nothing_sampled(_: Deadline) -> list[Victim]:
    """The sample of a store without pages."""
    return []


class TestVictims:
    def test_a_wait_for_the_first_scan_requests_no_second(self) -> None:
        """A scan in the middle of the first batch would see its head only, and evict the head."""
        may_end = threading.Event()
        scans: list[bool] = []

        def scan() -> list[Victim]:
            scans.append(may_end.wait(20))
            return []

        victims = VictimQueue(scan, nothing_more, nothing_sampled)
        first = victims.request_scan()
        assert not victims.await_scan(first, 0.01)
        may_end.set()
        assert victims.await_scan(first, 20)
        victims.close(Deadline(20))

        assert [True] == scans

    def test_new_pages_end_the_pause_after_a_scan_without_victims(self) -> None:
        found: list[Victim] = []
        victims = VictimQueue(lambda: list(found), nothing_more, nothing_sampled)
        assert victims.next(Deadline(20)) is None
        found.append(Victim(1, 4096, "page"))
        assert victims.next(Deadline(20)) is None

        victims.note_new_pages()

        assert found == [victims.next(Deadline(20))]
        victims.close(Deadline(20))


class TestFullFileSystem:
    def test_no_space_is_false_counted_and_recovers(self, tmp_path: Path) -> None:
        """In a namespace of its own, on a tmpfs of 256 KiB."""
        command = f"mount -t tmpfs -o size=256k none {tmp_path} && exec {sys.executable} -"
        unshare = shutil.which("unshare")
        if unshare is None or subprocess.run([unshare, "-Urm", "true"], check=False).returncode:
            pytest.skip("no user namespaces here")
        done = subprocess.run(
            [unshare, "-Urm", "sh", "-c", command],
            input=_FULL.replace("ROOT", str(tmp_path)),
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "support")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (0, "fine\n") == (done.returncode, done.stdout), done.stderr

    def test_a_file_size_limit_is_false_and_leaves_nothing(self, tmp_path: Path) -> None:
        with opened(tmp_path / "root", None) as storage:
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
            try:
                verdicts = storage.batch_set(SPACE, HASHES[:3], [page()] * 3)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)

            assert [False] * 3 == verdicts
            assert 3 == storage.stats().counters["refused_no_space"]
            assert 0 == used_nbytes(tmp_path / "root") == storage.stats().nbytes
            assert [] == [p for p in (tmp_path / "root").glob("writers/*/*") if p.name != "lock"]
            assert [True] * 3 == storage.batch_set(SPACE, HASHES[:3], [page()] * 3)

    def test_the_rest_of_a_refused_batch_is_not_tried(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tries = list[int]()

        def full(*args: Any) -> int:
            tries.append(1)
            raise OSError(28, "No space left on device")

        with opened(tmp_path / "root", None) as storage:
            monkeypatch.setattr(os, "pwritev", full)
            assert not any(storage.batch_set(SPACE, HASHES[:50], [page()] * 50))
            monkeypatch.undo()

        assert 1 == len(tries)


_FULL = """
import sys
sys.path.insert(0, "tests/support")
from pages import blank, hash_of, page, space
from hicache_backends.file import FileStorage
sp = space()
hashes = [hash_of(n) for n in range(100)]
with FileStorage.from_config({"path": "ROOT/plain"}) as storage:
    verdicts = storage.batch_set(sp, hashes, [page()] * 100)
    stored = verdicts.count(True)
    assert 10 < stored < 100, stored
    assert verdicts == [True] * stored + [False] * (100 - stored)
    assert storage.stats().counters["refused_no_space"] == 100 - stored
    assert storage.batch_get(sp, hashes, [blank() for _ in hashes]) == verdicts
    assert storage.batch_set(sp, hashes[99:], [page()]) == [False]
    assert all(storage.batch_delete(sp, hashes[:5]))
    assert storage.batch_set(sp, hashes[99:], [page()]) == [True]
with FileStorage.from_config({"path": "ROOT/plain", "capacity_nbytes": "1GiB"}) as storage:
    more = [hash_of(n) for n in range(200, 210)]
    first = storage.batch_set(sp, more, [page()] * 10)
    assert not all(first)
    assert all(storage.batch_set(sp, more, [page()] * 10)), "eviction made room"
print("fine")
"""
