"""Page files of the `file` backend that are overwritten while others read them."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from file_roots import FILE_NBYTES, HASHES, SPACE, file_of, is_right, opened, put, used_nbytes
from hicache_backends.file import FileStorage
from hicache_backends.file.page_file import TRAILER_NBYTES, PageFiles
from pages import blank, hash_of, page, space

from hicache_storage import Page, native
from hicache_storage.backend_support.deadline import Deadline

LIMIT_S = 30.0


class TestRecycling:
    def test_victims_are_overwritten_in_place(self, root: Path) -> None:
        with opened(root, 4) as storage:
            put(storage, 0, 1, 2, 3)
            inodes = {file_of(root, n).stat().st_ino for n in range(4)}
            put(storage, 4, 5, 6, 7)

            assert inodes == {file_of(root, n).stat().st_ino for n in range(4, 8)}
            assert 4 == storage.stats().counters["recycled"]
            assert all(is_right(storage, n) for n in range(4, 8))

    def test_it_can_be_turned_off(self, root: Path) -> None:
        with opened(root, 4, recycle=False) as storage:
            put(storage, *range(8))
            assert {"evicted": 4} == dict(storage.stats().counters)

    def test_a_file_with_a_foreign_link_is_left_alone(self, root: Path, tmp_path: Path) -> None:
        with opened(root, 4) as storage:
            put(storage, 0, 1, 2, 3)
            link = root / "link"
            os.link(file_of(root, 0), link)
            before = link.read_bytes()
            put(storage, 4)

            assert before == link.read_bytes()
            assert is_right(storage, 4)
            assert "recycled" not in storage.stats().counters

    def test_a_synced_page_is_not_overwritten(self, root: Path) -> None:
        """After a loss of power, the file might have half of the new page under the old name."""
        with opened(root, 4, durability="power") as storage:
            put(storage, 0, 1, 2, 3)
        with opened(root, 4) as storage:
            put(storage, 4, 5, 6, 7, 8)
            assert {"evicted": 5, "recycled": 1} == dict(storage.stats().counters)

    def test_a_batch_over_synced_and_other_pages_is_stored_and_counted(self, root: Path) -> None:
        with opened(root, 40, durability="power") as storage:
            assert all(storage.batch_set(SPACE, HASHES[:20], [page()] * 20))
        with opened(root, 40) as storage:
            put(storage, *range(20, 40))
            verdicts = storage.batch_set(
                SPACE, HASHES[40:80], [page(seed=n) for n in range(40, 80)]
            )

            assert [True] * 40 == verdicts
            assert all(is_right(storage, n) for n in range(40, 80))
            assert {"evicted": 40, "recycled": 20} == dict(storage.stats().counters)
            assert 40 * FILE_NBYTES == used_nbytes(root) == storage.stats().nbytes
            assert [] == [path for path in root.glob("writers/*/*") if path.name != "lock"]

    @pytest.mark.parametrize("step", ["opened", "trailer"])
    @pytest.mark.parametrize("new", [1, 0], ids=["other-page", "same-page"])
    @pytest.mark.usefixtures("python_data_plane")
    def test_a_reader_of_a_victim_sees_it_whole_or_misses(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, step: str, new: int
    ) -> None:
        """The evicted page's file is recycled between two system calls of a reader."""
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

    @pytest.mark.usefixtures("python_data_plane")
    def test_a_reader_in_the_midst_of_an_overwrite_misses(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A reader that has opened the victim's file reads it after each step of the overwrite."""
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
                    found = files.read([HASHES[0]], [blank()], None, 0.0, Deadline(LIMIT_S))
                    return found == [native.HIT]

                monkeypatch.setattr(os, name, spied)
            _, names = files.files([HASHES[1]])
            (trailer,) = native.page_trailers(names, False, bytes(8), [0])
            assert files.recycle(path, page(seed=1), trailer, time.time_ns())

            assert [False, False] == answers

    def test_concurrent_readers_never_see_a_mixed_page(self, root: Path) -> None:
        """A page repeats its number in every 64 bytes, so a hit with two numbers would be mixed."""
        nbytes = 64 << 10
        key_space = space(page_nbytes=nbytes)
        names = [hash_of(n) for n in range(12)]
        sources = [Page(bytearray(name.encode() * (nbytes // 64))) for name in names]
        hits = list[bool]()
        with opened(root, None) as plain:
            plain.open_space(key_space)
        config = {
            "path": str(root),
            "capacity_nbytes": 4 * (nbytes + TRAILER_NBYTES),
            "touch_interval_s": 3600,  # a page that is read all the time is no victim otherwise
        }
        give_up_s = time.monotonic() + 100
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
