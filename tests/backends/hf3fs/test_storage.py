"""The `hf3fs` backend as a storage: slots, batches, eviction, lost indexes, damage and settings."""

from __future__ import annotations

import errno
import mmap
import os
import random
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hicache_backends.hf3fs import Hf3fsStorage, reader, slot_files
from hicache_backends.hf3fs.layout import BLOCK_NBYTES, MARK_NBYTES, Geometry, Place
from hicache_backends.hf3fs.slot_files import SlotFiles
from pages import blank, hash_of, page, space
from storm.hazards import FullDisk
from storm.worlds import small_disk

from hicache_storage import (
    ConfigError,
    Durability,
    KeySpace,
    Page,
    Retention,
    StorageClosed,
    StorageTimeout,
    StorageUnavailable,
)
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.settings import format_nbytes

SPACE = space()
SLOT_NBYTES = Geometry(SPACE).slot_nbytes
HASHES = [hash_of(number) for number in range(100)]


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def storage(root: Path, request: pytest.FixtureRequest) -> Iterator[Hf3fsStorage]:
    with opened(root, direct=request.param) as storage:
        storage.open_space(SPACE)
        yield storage


def opened(root: Path, **config: Any) -> Hf3fsStorage:
    return Hf3fsStorage.from_config({"path": str(root), **config})


def stored(storage: Hf3fsStorage, numbers: range, key_space: KeySpace = SPACE) -> None:
    hashes = [hash_of(number) for number in numbers]
    pages = [page(key_space.stored_nbytes, seed=n) for n in numbers]
    assert [True] * len(hashes) == storage.batch_set(key_space, hashes, pages)


def got(storage: Hf3fsStorage, page_hash: str) -> bytes | None:
    target = blank()
    return target.tobytes() if storage.batch_get(SPACE, [page_hash], [target]) == [True] else None


def aligned(nbytes: int, seed: int = 0) -> Page:
    """Return a page whose memory begins at a multiple of the block size."""
    memory = memoryview(mmap.mmap(-1, nbytes))
    memory[:] = random.Random(seed).randbytes(nbytes)
    return Page(memory)


def place_of(storage: Hf3fsStorage, page_hash: str) -> Place:
    files = storage._files_of(SPACE)
    with storage._mount.get().index.view(files, Deadline(30)) as view:
        return view.find([page_hash])[page_hash]


def slots_file(root: Path, key_space: KeySpace = SPACE) -> Path:
    return root / "spaces" / key_space.id / "slots-0000"


def lose_index(root: Path) -> None:
    for path in root.glob("index*"):
        path.unlink()


def query(root: Path, statement: str) -> list[Any]:
    with closing(sqlite3.connect(root / "index.sqlite")) as db:
        return db.execute(statement).fetchall()


class TestSlots:
    def test_a_page_lies_between_two_equal_marks(self, storage: Hf3fsStorage, root: Path) -> None:
        stored(storage, range(1))
        data = slots_file(root).read_bytes()[:SLOT_NBYTES]

        assert page().tobytes() == data[BLOCK_NBYTES : 2 * BLOCK_NBYTES]
        assert b"HiSl" == data[:4]
        assert data[:MARK_NBYTES] == data[2 * BLOCK_NBYTES :][:MARK_NBYTES]

    def test_a_mark_holds_the_page_hash_and_the_stamp_of_the_write(self) -> None:
        geometry = Geometry(SPACE)
        found = geometry.read_mark(geometry.mark(HASHES[0], b"s" * 24))

        assert found is not None
        assert (HASHES[0], b"s" * 24) == (found.page_hash, found.stamp)

    def test_a_mark_of_another_key_space_does_not_count(self) -> None:
        mark = Geometry(space(revision="2")).mark(HASHES[0], b"s" * 24)

        assert None is Geometry(SPACE).read_mark(mark)

    def test_slots_of_odd_pages_are_whole_blocks(self) -> None:
        for nbytes in (1, 3839, 3840, 3841, 4095, 4097, 1 << 20):
            geometry = Geometry(space(page_nbytes=nbytes))

            assert 0 == geometry.slot_nbytes % BLOCK_NBYTES
            assert geometry.tail_nbytes >= MARK_NBYTES

    def test_pages_of_whole_blocks_begin_at_a_block(self) -> None:
        geometry = Geometry(space(page_nbytes=1 << 20))

        assert (BLOCK_NBYTES, (1 << 20) + 2 * BLOCK_NBYTES) == (
            geometry.lead_nbytes,
            geometry.slot_nbytes,
        )

    def test_files_end_and_others_begin(self) -> None:
        geometry = Geometry(space(page_nbytes=64 << 20))

        assert 15 == geometry.slots_per_file
        assert (0, 14 * geometry.slot_nbytes) == geometry.position(14)
        assert (1, 0) == geometry.position(15)

    def test_two_writes_never_share_a_stamp(self, storage: Hf3fsStorage) -> None:
        stamps = set[bytes]()
        for _ in range(3):
            stored(storage, range(1))
            stamps.add(place_of(storage, HASHES[0]).stamp)
            storage.batch_delete(SPACE, HASHES[:1])

        assert 3 == len(stamps)

    @pytest.mark.usefixtures("python_data_plane")
    def test_neighbours_are_moved_in_one_call(
        self, storage: Hf3fsStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stored(storage, range(50, 51))
        calls: list[int] = []
        real = os.pwritev

        def counting(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            calls.append(len(buffers))
            return real(descriptor, buffers, offset)

        monkeypatch.setattr(os, "pwritev", counting)
        # A page may begin a block by chance, and is then moved apart from its neighbours.
        pages = [Page(memoryview(bytearray(4097))[1:]) for _ in range(8)]
        assert [True] * 8 == storage.batch_set(SPACE, HASHES[:8], pages)

        assert [24] == calls


class TestPages:
    @pytest.mark.parametrize("count", [1, 7, 130])
    def test_aligned_pages_in_aligned_memory(self, storage: Hf3fsStorage, count: int) -> None:
        key_space = space(page_nbytes=65536)
        sources = [aligned(65536, seed) for seed in range(count)]
        targets = [aligned(65536) for _ in range(count)]
        hashes = [hash_of(number) for number in range(count)]

        assert [True] * count == storage.batch_set(key_space, hashes, sources)
        assert [True] * count == storage.batch_get(key_space, hashes, targets)
        assert [one.tobytes() for one in sources] == [one.tobytes() for one in targets]

    @pytest.mark.parametrize(("local", "alignment"), [(True, 1), (False, BLOCK_NBYTES)])
    def test_the_page_cache_is_used_where_no_other_machine_writes_behind_it(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, *, local: bool, alignment: int
    ) -> None:
        def known(_: str) -> bool:
            return local

        monkeypatch.setattr("hicache_backends.hf3fs.reader.is_local", known)

        with opened(root) as storage:
            assert storage.capabilities.alignment == alignment

    def test_direct_and_buffered_handles_see_each_other_s_pages(self, root: Path) -> None:
        key_space = space(page_nbytes=65536)
        with opened(root, direct=True) as direct, opened(root, direct=False) as buffered:
            for number, (writer, reader) in enumerate([(direct, buffered), (buffered, direct)] * 3):
                source, target = aligned(65536, number), aligned(65536)
                assert [True] == writer.batch_set(key_space, [HASHES[number]], [source])
                assert [True] == reader.batch_get(key_space, [HASHES[number]], [target])
                assert source.tobytes() == target.tobytes()

    def test_aligned_and_other_memory_go_together(self, storage: Hf3fsStorage) -> None:
        key_space = space(page_nbytes=65536)
        sources = [aligned(65536, 1), page(65536, seed=2), aligned(65536, 3)]
        odd = Page(memoryview(mmap.mmap(-1, 65537))[1:])
        targets = [aligned(65536), odd, aligned(65536)]

        assert [True] * 3 == storage.batch_set(key_space, HASHES[:3], sources)
        assert [True] * 3 == storage.batch_get(key_space, HASHES[:3], targets)
        assert [one.tobytes() for one in sources] == [one.tobytes() for one in targets]
        assert "io_errors" not in storage.stats().counters

    @pytest.mark.parametrize("nbytes", [4096, 4100, 1 << 20])
    def test_a_page_gets_a_digest_where_it_asks_for_one(self, root: Path, nbytes: int) -> None:
        key_space = space(page_nbytes=nbytes)
        source, targets = page(nbytes), [blank(nbytes), blank(nbytes)]
        for target in targets:
            target.digest_skip = 32
        with opened(root) as storage:
            storage.batch_set(key_space, HASHES[:1], [source])
            assert [True, False] == storage.batch_get(key_space, HASHES[:2], targets)

        expected = xxhash.xxh3_64_intdigest(source.tobytes()[32:])
        assert [expected, None] == [target.digest for target in targets]

    @pytest.mark.usefixtures("python_data_plane")
    def test_each_duplicate_has_the_verdict_of_its_own_read(
        self, storage: Hf3fsStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stored(storage, range(1))
        real = os.preadv
        fails = [True, False]

        def failing_once(*arguments: Any) -> int:
            if fails.pop(0):
                raise OSError(5, "I/O error")
            return real(*arguments)

        monkeypatch.setattr(os, "preadv", failing_once)
        targets = [blank(), blank()]
        hits = storage.batch_get(SPACE, [HASHES[0], HASHES[0]], targets)

        assert [False, True] == sorted(hits)
        content = page(SPACE.stored_nbytes, seed=0).tobytes()
        assert hits == [target.tobytes() == content for target in targets]


class TestReuse:
    def test_a_deleted_page_s_slot_is_used_again(self, storage: Hf3fsStorage, root: Path) -> None:
        stored(storage, range(10))
        nbytes = slots_file(root).stat().st_size
        for start in range(10, 5000, 10):
            storage.batch_delete(SPACE, [hash_of(n) for n in range(start - 10, start)])
            stored(storage, range(start, start + 10))

        assert nbytes == slots_file(root).stat().st_size
        assert 10 * SLOT_NBYTES == storage.stats().nbytes

    @pytest.mark.usefixtures("python_data_plane")
    def test_a_reader_whose_slot_was_reused_misses(
        self, storage: Hf3fsStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Between read and second look-up, the slot gets another page and then the first one again."""
        stored(storage, range(1))
        real = os.preadv

        def overtaken(*arguments: Any) -> int:
            done = real(*arguments)
            monkeypatch.setattr(os, "preadv", real)
            storage.batch_delete(SPACE, HASHES[:1])
            stored(storage, range(1))
            return done

        monkeypatch.setattr(os, "preadv", overtaken)
        assert None is got(storage, HASHES[0])
        assert page().tobytes() == got(storage, HASHES[0])

    def test_readers_of_reused_slots_see_whole_pages_or_misses(self, root: Path) -> None:
        key_space = space(page_nbytes=65536)
        sources = [aligned(65536, seed) for seed in range(40)]
        wanted = {hash_of(n): source.tobytes() for n, source in enumerate(sources)}
        stop = threading.Event()
        wrong: list[str] = []
        slots = 8 * Geometry(key_space).slot_nbytes
        with opened(root, capacity_nbytes=slots, high_watermark=1, low_watermark=1) as storage:

            def read() -> None:
                target = aligned(65536)
                while not stop.is_set():
                    for page_hash, data in wanted.items():
                        hit = storage.batch_get(key_space, [page_hash], [target])
                        if hit == [True] and target.tobytes() != data:
                            wrong.append(page_hash)

            readers = [threading.Thread(target=read) for _ in range(2)]
            for reader in readers:
                reader.start()
            for turn in range(300):
                numbers = [(turn * 3 + n) % 40 for n in range(3)]
                storage.batch_set(
                    key_space, [hash_of(n) for n in numbers], [sources[n] for n in numbers]
                )
            stop.set()
            for reader in readers:
                reader.join()
            assert storage.stats().counters["evicted"] > 500

        assert [] == wrong

    def test_two_writers_of_one_page_leak_no_slot(self, root: Path) -> None:
        with opened(root) as one, opened(root) as other:
            barrier = threading.Barrier(2)

            def write(storage: Hf3fsStorage) -> None:
                for start in range(0, 100, 10):
                    barrier.wait(10)
                    stored(storage, range(start, start + 10))

            threads = [threading.Thread(target=write, args=[each]) for each in (one, other)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        assert [(100,)] == query(root, "SELECT count(*) FROM pages")
        assert [(0,)] == query(root, "SELECT count(*) FROM reserved")
        assert [(100,)] == query(root, "SELECT taken FROM spaces")
        assert [(0,)] == query(
            root, "SELECT allocated - taken - (SELECT count(*) FROM free) FROM spaces"
        )

    @pytest.mark.usefixtures("python_data_plane")
    def test_pages_that_fail_to_be_written_leak_no_slot(
        self, storage: Hf3fsStorage, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def failing(*_: object) -> int:
            raise OSError(5, "I/O error")

        with monkeypatch.context() as patched:
            patched.setattr(os, "pwritev", failing)
            assert [False] * 3 == storage.batch_set(SPACE, HASHES[:3], [page()] * 3)

        assert [False] * 3 == storage.batch_exists(SPACE, HASHES[:3])
        assert [(0, 0)] == query(root, "SELECT taken, (SELECT count(*) FROM reserved) FROM spaces")
        assert 3 == storage.stats().counters["io_errors"]

    @pytest.mark.usefixtures("python_data_plane")
    def test_slots_reserved_by_an_interrupted_call_come_back(
        self, storage: Hf3fsStorage, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(*_: object) -> int:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(os, "pwritev", interrupted)
            with pytest.raises(KeyboardInterrupt):
                storage.batch_set(SPACE, HASHES[:3], [page()] * 3)

        assert [(0,)] == query(root, "SELECT count(*) FROM reserved")


class TestWritesInDoubt:
    """A mount over a network may report an error and carry the write out later."""

    @pytest.mark.usefixtures("python_data_plane")
    @pytest.mark.parametrize("number", [errno.EIO, errno.ETIMEDOUT])
    def test_a_late_write_of_a_mount_lands_in_no_other_page(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        late: list[tuple[int, list[bytes], int]] = []

        def failing(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            late.append((os.dup(descriptor), [bytes(buffer) for buffer in buffers], offset))
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr("hicache_backends.hf3fs.reader.is_local", _is_remote)
        with opened(root, direct=False) as storage:
            with monkeypatch.context() as patched:
                patched.setattr(os, "pwritev", failing)
                assert [False] == storage.batch_set(SPACE, HASHES[:1], [page(seed=1)])
            stored(storage, range(2, 3))
            for descriptor, buffers, offset in late:
                lead_nbytes = len(buffers[0])
                os.pwrite(descriptor, buffers[1], offset + lead_nbytes)
                os.close(descriptor)

            assert page(seed=2).tobytes() == got(storage, HASHES[2])
            assert [False] == storage.batch_exists(SPACE, HASHES[:1])

    @pytest.mark.usefixtures("python_data_plane")
    @pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC])
    def test_a_refused_write_is_not_in_doubt(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        def failing(*_: object) -> int:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr("hicache_backends.hf3fs.reader.is_local", _is_remote)
        with opened(root, direct=False) as storage:
            with monkeypatch.context() as patched:
                patched.setattr(os, "pwritev", failing)
                assert [False] * 3 == storage.batch_set(SPACE, HASHES[:3], [page()] * 3)

            assert [(0,)] == query(root, "SELECT count(*) FROM reserved")


def _is_remote(_: str) -> bool:
    return False


class TestEviction:
    def test_the_least_recently_used_go_first(self, root: Path) -> None:
        with opened(root, capacity_nbytes=10 * SLOT_NBYTES) as storage:
            stored(storage, range(9))
            assert page().tobytes() == got(storage, HASHES[0])
            stored(storage, range(20, 21))

            assert [True, True] == storage.batch_exists(SPACE, [HASHES[0], HASHES[20]])
            assert [False] == storage.batch_exists(SPACE, [HASHES[8]])

    def test_a_batch_loses_its_tail_first(self, root: Path) -> None:
        with opened(root, capacity_nbytes=10 * SLOT_NBYTES, low_watermark=0.5) as storage:
            stored(storage, range(8))
            stored(storage, range(20, 22))

            assert [True] * 3 + [False] * 5 == storage.batch_exists(SPACE, HASHES[:8])

    def test_the_watermarks_are_kept(self, root: Path) -> None:
        limits = {"capacity_nbytes": 100 * SLOT_NBYTES, "high_watermark": 0.8, "low_watermark": 0.5}
        with opened(root, **limits) as storage:
            stored(storage, range(80))
            assert 80 * SLOT_NBYTES == storage.stats().nbytes
            stored(storage, range(80, 81))

            assert 50 * SLOT_NBYTES == storage.stats().nbytes
            assert 31 == storage.stats().counters["evicted"]

    def test_a_large_page_evicts_as_many_small_ones_as_it_takes(self, root: Path) -> None:
        large = space(pool="draft", page_nbytes=8 * 4096)
        large_nbytes = Geometry(large).slot_nbytes
        with opened(root, capacity_nbytes=large_nbytes + 10 * SLOT_NBYTES) as storage:
            stored(storage, range(12))
            stored(storage, range(50, 51), large)

            assert [True] == storage.batch_exists(large, HASHES[50:51])
            assert storage.stats().counters["evicted"] > 1

    def test_all_key_spaces_share_the_capacity(self, root: Path) -> None:
        draft = space(pool="draft", page_nbytes=8192)
        with opened(root, capacity_nbytes=20 * SLOT_NBYTES, low_watermark=0.95) as storage:
            stored(storage, range(19))
            stored(storage, range(50, 55), draft)

            assert (storage.stats().nbytes or 0) <= 20 * SLOT_NBYTES
            assert 5 == len(list(storage.scan(draft)))

    def test_the_slot_of_a_victim_of_another_key_space_is_freed(self, root: Path) -> None:
        one, other = space(page_nbytes=1 << 20), space(pool="draft", page_nbytes=1 << 20)
        capacity = 16 * Geometry(one).slot_nbytes
        with opened(root, capacity_nbytes=capacity, direct=False) as storage:
            stored(storage, range(15), one)
            stored(storage, range(15), other)
            blocks = sum(512 * path.stat().st_blocks for path in root.glob("spaces/*/slots-*"))

        assert blocks <= capacity + (2 << 20)

    def test_a_batch_that_is_larger_than_the_capacity_is_taken_in_part(self, root: Path) -> None:
        with opened(root, capacity_nbytes=10 * SLOT_NBYTES) as storage:
            verdicts = storage.batch_set(SPACE, HASHES[:30], [page(seed=n) for n in range(30)])

            assert [True] * 10 + [False] * 20 == verdicts
            assert verdicts == storage.batch_exists(SPACE, HASHES[:30])
            assert 20 == storage.stats().counters["refused_no_space"]

    def test_a_full_disk_stops_no_set_that_slots_are_left_for(self, tmp_path: Path) -> None:
        answers: list[list[bool]] = []
        with small_disk(tmp_path / "disk", 24 << 20) as disk, opened(disk / "pages") as storage:
            stored(storage, range(4))
            FullDisk(disk).strike(
                random.Random(0),
                lambda _: answers.extend(
                    storage.batch_set(SPACE, [each], [page()]) for each in HASHES[4:40]
                ),
            )
            stored(storage, range(40, 44))

            assert [[True]] * 36 == answers
            assert [True] * 44 == storage.batch_exists(SPACE, HASHES[:44])

    def test_a_full_disk_stops_no_set_that_evicts(self, tmp_path: Path) -> None:
        """The index takes some 40 MiB of changes, while it has 16 MiB of blocks for them."""
        answers: list[list[bool]] = []

        def store(storage: Hf3fsStorage, number: int) -> list[bool]:
            hashes = [hash_of(each) for each in range(100 * number, 100 * number + 100)]
            return storage.batch_set(SPACE, hashes, [page()] * 100)

        with small_disk(tmp_path / "disk", 48 << 20) as disk:
            limit = {"capacity_nbytes": 1000 * SLOT_NBYTES, "direct": False}
            with opened(disk / "pages", **limit) as storage:
                answers.extend(store(storage, number) for number in range(12))
                FullDisk(disk).strike(
                    random.Random(0),
                    lambda _: answers.extend(store(storage, number) for number in range(12, 300)),
                )

                assert [[True] * 100] * 300 == answers
                assert "refused_no_space" not in storage.stats().counters

    @pytest.mark.parametrize("ahead_s", [10**9, 3600, 200])
    def test_pages_that_are_used_after_a_clock_was_set_back_stay(
        self, root: Path, ahead_s: int
    ) -> None:
        with opened(root, capacity_nbytes=20 * SLOT_NBYTES) as storage:
            stored(storage, range(18))
        with closing(sqlite3.connect(root / "index.sqlite")) as db:
            db.execute("UPDATE pages SET used_ns = used_ns + ?", (ahead_s * 10**9,))
            db.commit()
        with opened(root, capacity_nbytes=20 * SLOT_NBYTES, low_watermark=0.95) as storage:
            tail = HASHES[9:18]  # as a tail of its batch, it is older than the head
            assert all(storage.batch_get(SPACE, tail, [blank() for _ in range(9)]))
            stored(storage, range(20, 29))

            assert [True] * 9 == storage.batch_exists(SPACE, tail)
            assert [True] * 9 == storage.batch_exists(SPACE, HASHES[20:29])
            assert [False] * 7 == storage.batch_exists(SPACE, HASHES[2:9])

    def test_a_page_larger_than_the_capacity_is_refused(self, root: Path) -> None:
        with opened(root, capacity_nbytes=1000) as storage:
            assert [False] == storage.batch_set(SPACE, HASHES[:1], [page()])


class TestCapacity:
    def test_a_capacity_below_one_page_is_refused_with_both_figures(self, root: Path) -> None:
        figures = rf"is .*\({SLOT_NBYTES - 1:,} bytes\), but .* takes {format_nbytes(SLOT_NBYTES)}:"
        with (
            opened(root, capacity_nbytes=SLOT_NBYTES - 1) as storage,
            pytest.raises(ConfigError, match=figures),
        ):
            storage.open_space(SPACE)

    def test_a_capacity_of_one_page_holds_one(self, root: Path) -> None:
        with opened(root, capacity_nbytes=SLOT_NBYTES) as storage:
            storage.open_space(SPACE)
            stored(storage, range(1))
            stored(storage, range(1, 2))

            assert [False, True] == storage.batch_exists(SPACE, HASHES[:2])

    @pytest.mark.parametrize(("slots", "warns"), [(4, True), (8, False)])
    def test_a_capacity_that_evicts_more_than_half_is_warned_of_with_both_figures(
        self, root: Path, caplog: pytest.LogCaptureFixture, *, slots: int, warns: bool
    ) -> None:
        with opened(root) as storage:
            stored(storage, range(10))
        with opened(root, capacity_nbytes=slots * SLOT_NBYTES) as storage:
            assert 10 * SLOT_NBYTES == storage.stats().nbytes
        said = [record.getMessage() for record in caplog.records]

        assert warns == any(
            format_nbytes(slots * SLOT_NBYTES) in each and format_nbytes(10 * SLOT_NBYTES) in each
            for each in said
        )


class TestLostIndex:
    def test_pages_are_found_again(self, storage: Hf3fsStorage, root: Path) -> None:
        odd = space(page_nbytes=1000, pool="draft")
        stored(storage, range(50))
        stored(storage, range(7), odd)
        storage.batch_delete(SPACE, HASHES[:5])
        storage.close()
        lose_index(root)
        with opened(root) as again:
            assert [False] * 5 + [True] * 45 == again.batch_exists(SPACE, HASHES[:50])
            assert [True] * 7 == again.batch_exists(odd, HASHES[:7])
            assert page(seed=7).tobytes() == got(again, HASHES[7])
            stored(again, range(60, 100))
            assert page(seed=7).tobytes() == got(again, HASHES[7])

    def test_an_open_handle_finds_them_again(self, storage: Hf3fsStorage, root: Path) -> None:
        stored(storage, range(3))
        lose_index(root)

        assert page(seed=2).tobytes() == got(storage, HASHES[2])
        stored(storage, range(3, 6))
        assert 6 == len(list(storage.scan(SPACE)))
        lose_index(root)
        stored(storage, range(6, 8))
        assert 8 == len(list(storage.scan(SPACE)))

    def test_a_cleared_page_does_not_come_back(self, storage: Hf3fsStorage, root: Path) -> None:
        stored(storage, range(3))
        storage.clear(SPACE)
        lose_index(root)

        assert [False] * 3 == storage.batch_exists(SPACE, HASHES[:3])

    @pytest.mark.parametrize("content", [b"", b"not an index", bytes(100_000)])
    def test_a_damaged_index_is_made_anew(
        self, storage: Hf3fsStorage, root: Path, content: bytes
    ) -> None:
        stored(storage, range(3))
        storage.close()
        (root / "index.sqlite").resolve().write_bytes(content)
        with opened(root) as again:
            assert page(seed=2).tobytes() == got(again, HASHES[2])

    def test_a_rebuild_names_the_manifest_that_it_cannot_read(
        self, storage: Hf3fsStorage, root: Path, unread: Callable[[Path], None]
    ) -> None:
        storage.close()
        lose_index(root)
        manifest = root / "spaces" / SPACE.id / "manifest.json"
        unread(manifest)

        with pytest.raises(StorageUnavailable, match=f"{manifest} cannot be used: Input/output"):
            opened(root)

    def test_an_index_of_another_version_is_made_anew(
        self, storage: Hf3fsStorage, root: Path
    ) -> None:
        stored(storage, range(3))
        storage.close()
        query(root, "PRAGMA user_version = 77")
        with opened(root) as again:
            assert page(seed=2).tobytes() == got(again, HASHES[2])

    def test_an_index_older_than_the_slots_costs_hits_and_no_bytes(
        self, storage: Hf3fsStorage, root: Path, tmp_path: Path
    ) -> None:
        stored(storage, range(10))
        storage.close()
        index = (root / "index.sqlite").resolve()
        shutil.copy(index, tmp_path / "old")
        with opened(root) as later:
            later.batch_delete(SPACE, HASHES[:5])
            stored(later, range(20, 25))
        shutil.copy(tmp_path / "old", index)
        with opened(root) as again:
            for number in range(10):
                assert got(again, HASHES[number]) in (None, page(seed=number).tobytes())
            assert page(seed=9).tobytes() == got(again, HASHES[9])
            stored(again, range(10))
            assert page(seed=0).tobytes() == got(again, HASHES[0])

    def test_half_a_page_is_not_found_again(self, storage: Hf3fsStorage, root: Path) -> None:
        """A writer that is killed while it overwrites a page leaves such a slot."""
        stored(storage, range(2))
        slot = place_of(storage, HASHES[1]).slot
        storage.close()
        mark = Geometry(SPACE).mark(HASHES[50], b"s" * 24)
        with slots_file(root).open("r+b") as file:
            file.seek(slot * SLOT_NBYTES)
            file.write(mark.ljust(BLOCK_NBYTES, b"\0") + b"new bytes")
        lose_index(root)
        with opened(root) as again:
            assert [True, False] == again.batch_exists(SPACE, HASHES[:2])
            assert [False] == again.batch_exists(SPACE, [HASHES[50]])

    def test_of_two_copies_the_later_one_counts(self, storage: Hf3fsStorage, root: Path) -> None:
        stored(storage, range(1))
        files = SlotFiles(storage._layout, Geometry(SPACE))
        early = files.geometry.mark(HASHES[0], bytes(24)).ljust(BLOCK_NBYTES, b"\0")
        with slots_file(root).open("r+b") as file:
            file.seek(5 * SLOT_NBYTES)
            file.write(early + b"x" * 4096 + early)

        assert place_of(storage, HASHES[0]) == files.newest()[HASHES[0]]


class TestDamage:
    @pytest.mark.parametrize("first", ["get", "set"])
    @pytest.mark.parametrize("offset", [0, 10, 60, 127, 8192, 8200, 8319])
    def test_a_bit_of_a_mark_costs_the_page_and_heals(
        self, storage: Hf3fsStorage, root: Path, offset: int, first: str
    ) -> None:
        stored(storage, range(2))
        at = place_of(storage, HASHES[0]).slot * SLOT_NBYTES + offset
        with slots_file(root).open("r+b", buffering=0) as file:
            flipped = bytes([os.pread(file.fileno(), 1, at)[0] ^ 1])
            os.pwrite(file.fileno(), flipped, at)
        if first == "get":
            assert None is got(storage, HASHES[0])
            assert [False] == storage.batch_exists(SPACE, HASHES[:1])
        stored(storage, range(1))

        assert page().tobytes() == got(storage, HASHES[0])
        assert page(seed=1).tobytes() == got(storage, HASHES[1])
        assert 1 == storage.stats().counters["healed"]

    def test_a_set_is_refused_where_the_index_keeps_the_old_entry(
        self, storage: Hf3fsStorage, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stored(storage, range(2))
        os.truncate(slots_file(root), 0)

        def failing(*_: object) -> None:
            raise StorageTimeout("the index was locked")

        with monkeypatch.context() as patched:
            patched.setattr(storage._mount.get().index, "forget", failing)
            assert None is got(storage, HASHES[0])
            with pytest.raises(StorageTimeout):
                storage.batch_set(SPACE, HASHES[:1], [page()])
        stored(storage, range(2))

        assert page().tobytes() == got(storage, HASHES[0])

    @pytest.mark.parametrize("nbytes", [0, 1, 3 * SLOT_NBYTES - 1])
    def test_a_truncated_file_heals(self, storage: Hf3fsStorage, root: Path, nbytes: int) -> None:
        stored(storage, range(5))
        os.truncate(slots_file(root), nbytes)
        for number in range(5):
            assert got(storage, HASHES[number]) in (None, page(seed=number).tobytes())
        stored(storage, range(5))

        assert page(seed=4).tobytes() == got(storage, HASHES[4])

    def test_a_removed_file_heals(self, storage: Hf3fsStorage, root: Path) -> None:
        stored(storage, range(5))
        shutil.rmtree(root / "spaces" / SPACE.id)
        assert None is got(storage, HASHES[1])
        stored(storage, range(5))

        assert page(seed=4).tobytes() == got(storage, HASHES[4])
        assert [SPACE] == list(storage.spaces())

    def test_a_vanished_root_is_unavailable_and_works_again_when_it_is_back(
        self, storage: Hf3fsStorage, root: Path
    ) -> None:
        away = root.with_name(root.name + "-away")
        stored(storage, range(1))
        root.rename(away)
        try:
            with pytest.raises(StorageUnavailable):
                storage.batch_set(SPACE, HASHES[1:2], [page()])
            with pytest.raises(StorageUnavailable):
                storage.batch_exists(SPACE, HASHES[:1])
        finally:
            away.rename(root)

        assert page().tobytes() == got(storage, HASHES[0])
        stored(storage, range(1, 2))

    def test_a_removed_root_works_again_when_it_is_back_and_empty(
        self, storage: Hf3fsStorage, root: Path
    ) -> None:
        stored(storage, range(2))
        shutil.rmtree(root)
        with pytest.raises(StorageUnavailable):
            storage.batch_set(SPACE, HASHES[:1], [page()])
        root.mkdir()

        assert [False, False] == storage.batch_exists(SPACE, HASHES[:2])
        stored(storage, range(3))
        assert page(seed=2).tobytes() == got(storage, HASHES[2])
        assert [SPACE] == list(storage.spaces())


class TestScope:
    def test_clear_removes_its_pages_and_nothing_else(
        self, storage: Hf3fsStorage, root: Path
    ) -> None:
        other = space(pool="draft")
        stored(storage, range(3))
        stored(storage, range(1), other)
        strangers = [root / "notes", root / "spaces" / SPACE.id / "notes", root / "index-notes"]
        for path in strangers:
            path.write_text("foreign")

        assert 3 == storage.clear(SPACE)
        assert [] == list(storage.scan(SPACE))
        assert [True] == storage.batch_exists(other, HASHES[:1])
        assert ["foreign"] * 3 == [path.read_text() for path in strangers]

    def test_clear_deallocates_slots_that_follow_each_other_in_one_call(
        self, storage: Hf3fsStorage, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stored(storage, range(400))
        real, calls = slot_files.fallocate, list[int]()

        def counted(fd: int, mode: int, offset: int, nbytes: int) -> None:
            calls.append(nbytes)
            real(fd, mode, offset, nbytes)

        monkeypatch.setattr(slot_files, "fallocate", counted)

        assert 400 == storage.clear(SPACE)
        assert len(calls) == 1
        assert 0 == sum(path.stat().st_blocks for path in root.glob("spaces/*/slots-*"))

    def test_slots_apart_are_deallocated_one_by_one(self, storage: Hf3fsStorage) -> None:
        stored(storage, range(6))
        files = storage._files_of(SPACE)
        places = sorted((place_of(storage, one).slot, one) for one in HASHES[:6])

        assert 3 == files.deallocate([places[0][0], places[1][0], places[4][0]])

        left = [got(storage, page_hash) is not None for _, page_hash in places]
        assert [False, False, True, True, False, True] == left


class TestLifecycle:
    def test_a_scan_ends_with_its_storage(self, storage: Hf3fsStorage) -> None:
        stored(storage, range(3))
        listing = storage.scan(SPACE)
        next(listing)
        storage.close()
        with pytest.raises(StorageClosed):
            next(listing)

    def test_pages_not_begun_in_time_are_misses(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with opened(root) as storage:
            stored(storage, range(2))
            transfers = storage._mount.get()._transfers
            for name in ("read", "write"):
                monkeypatch.setattr(transfers, name, _too_late(getattr(transfers, name)))

            assert [False, False] == storage.batch_set(SPACE, HASHES[2:4], [page(), page()])
            assert [False, False] == storage.batch_get(SPACE, HASHES[:2], [blank(), blank()])
            assert 4 == storage.stats().counters["timeouts"]

    def test_a_page_that_was_not_looked_at_in_time_is_neither_healed_nor_written(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = SlotFiles.check

        def late(files: SlotFiles, places: Any, _: Deadline) -> dict[str, int]:
            return real(files, places, Deadline(0))

        with opened(root) as storage:
            stored(storage, range(2))
            with monkeypatch.context() as patched:
                patched.setattr(SlotFiles, "check", late)
                verdicts = storage.batch_set(SPACE, HASHES[:3], [page(seed=n) for n in range(3)])

            assert [False, False, True] == verdicts
            assert {"timeouts": 2} == storage.stats().counters
            assert [True] * 3 == storage.batch_exists(SPACE, HASHES[:3])


def _too_late(move: Any) -> Any:
    """Return a version of `move` whose deadline has passed."""

    def moving(files: SlotFiles, items: Any, _: Deadline) -> Any:
        return move(files, items, Deadline(0))

    return moving


class TestSettings:
    @pytest.mark.parametrize(
        ("config", "named"),
        [
            ({"path": "ROOT", "index": "mysql"}, "index"),
            ({"path": "ROOT", "low_watermark": 0.99}, "low_watermark"),
            ({"path": "ROOT", "high_watermark": 1.1}, "high_watermark"),
        ],
    )
    def test_a_wrong_field_is_named(
        self, tmp_path: Path, config: dict[str, Any], named: str
    ) -> None:
        config = {key: str(tmp_path) if value == "ROOT" else value for key, value in config.items()}
        with pytest.raises(ConfigError, match=named):
            Hf3fsStorage.from_config(config)

    def test_it_declares_what_it_was_configured_for(self, tmp_path: Path) -> None:
        with opened(tmp_path / "a", parallelism=2, direct=False) as plain:
            assert Retention.UNTIL_DELETED is plain.capabilities.retention
            assert Durability.CRASH is plain.capabilities.durability
            assert (1, 2) == (plain.capabilities.alignment, plain.capabilities.parallelism)
        with opened(tmp_path / "b", capacity_nbytes="1MiB", direct=True) as narrow:
            assert Retention.UNTIL_PRESSURE is narrow.capabilities.retention
            assert BLOCK_NBYTES == narrow.capabilities.alignment


def test_the_key_spaces_that_a_storage_remembers_are_bounded(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_MOST_SPACES", 2)
    with opened(root) as storage:
        for tokens in range(1, 6):
            storage.batch_exists(space(page_tokens=tokens), [hash_of(1)])

        assert 2 == storage._files_of.cache_info().currsize
