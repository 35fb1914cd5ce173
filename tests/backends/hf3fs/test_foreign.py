"""Files of other programs under a root of `hf3fs`, and file systems that do not answer."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from hf3fs_roots import HASHES, NBYTES, SPACE, hits, opened, stored
from hicache_backends.hf3fs import Hf3fsStorage
from pages import page
from processes import descriptors
from servers import RedisServer

from hicache_storage import ConfigError, HiCacheError, StorageUnavailable


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def a_file(root: Path) -> None:
    (root / "index.sqlite").write_bytes(b"precious" * 100)


def a_database(root: Path) -> None:
    with closing(sqlite3.connect(root / "index.sqlite")) as db:
        db.executescript("CREATE TABLE precious (id); INSERT INTO precious VALUES (1);")


def a_link(root: Path) -> None:
    (root / "precious").write_bytes(b"precious" * 100)
    (root / "index.sqlite").symlink_to("precious")


def a_link_by_our_name(root: Path) -> None:
    (root / "precious").write_bytes(b"precious" * 100)
    (root / f"index-{'0' * 16}.sqlite").symlink_to("precious")
    (root / "index.sqlite").symlink_to(f"index-{'0' * 16}.sqlite")


class TestIndex:
    @pytest.mark.parametrize("make", [a_file, a_database, a_link, a_link_by_our_name])
    def test_a_foreign_index_is_refused_and_left(
        self, root: Path, make: Callable[[Path], None]
    ) -> None:
        root.mkdir(parents=True)
        make(root)
        before = (root / "index.sqlite").read_bytes()
        with pytest.raises(StorageUnavailable, match="not an index"):
            Hf3fsStorage.from_config({"path": str(root)})

        assert before == (root / "index.sqlite").read_bytes()

    def test_an_index_replaced_by_a_foreign_one_is_refused_and_left(self, root: Path) -> None:
        with opened(root) as storage:
            stored(storage, range(2))
            (root / "index.sqlite").unlink()
            a_database(root)
            before = (root / "index.sqlite").read_bytes()
            for _ in range(2):
                with pytest.raises(StorageUnavailable):
                    hits(storage, range(2))
                with pytest.raises(StorageUnavailable):
                    stored(storage, range(2, 4))
            assert before == (root / "index.sqlite").read_bytes()
            (root / "index.sqlite").unlink()

            assert [True] * 2 == hits(storage, range(2))

    def test_an_index_that_cannot_be_looked_up_is_not_rebuilt(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A rebuild of the index would bring deleted pages back and lose access times."""
        real = os.stat

        def failing(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
            if str(path).endswith("index.sqlite"):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return real(path, *arguments, **options)

        with opened(root) as storage:
            stored(storage, range(2))
            index = (root / "index.sqlite").readlink()
            with monkeypatch.context() as patched:
                patched.setattr(os, "stat", failing)
                with pytest.raises(StorageUnavailable):
                    hits(storage, range(2))
                with pytest.raises(StorageUnavailable):
                    stored(storage, range(2, 4))

            assert index == (root / "index.sqlite").readlink()
            assert [True] * 2 == hits(storage, range(2))
            stored(storage, range(2, 4))


class TestFiles:
    def test_a_key_space_s_directory_that_is_a_link_is_refused(
        self, root: Path, tmp_path: Path
    ) -> None:
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / "slots-0000").write_bytes(b"precious" * 1000)
        (root / "spaces").mkdir(parents=True)
        (root / "spaces" / SPACE.id).symlink_to(elsewhere)
        with Hf3fsStorage.from_config({"path": str(root)}) as storage:
            with pytest.raises(StorageUnavailable, match="symbolic link"):
                storage.open_space(SPACE)
            with suppress(HiCacheError):
                assert [False] == storage.batch_set(SPACE, HASHES[:1], [page(NBYTES)])
            with suppress(HiCacheError):
                storage.clear(SPACE)

        assert b"precious" * 1000 == (elsewhere / "slots-0000").read_bytes()
        assert ["slots-0000"] == names_in(elsewhere)

    def test_targets_of_foreign_links_are_left(self, root: Path, tmp_path: Path) -> None:
        precious = tmp_path / "precious"
        precious.write_bytes(b"precious" * 1000)
        directory = root / "spaces" / SPACE.id
        directory.mkdir(parents=True)
        (directory / "manifest.json.new").symlink_to(precious)
        (directory / "slots-0000").symlink_to(precious)
        with Hf3fsStorage.from_config({"path": str(root)}) as storage:
            with suppress(HiCacheError):
                storage.open_space(SPACE)
            with suppress(HiCacheError):
                storage.batch_set(SPACE, HASHES[:1], [page(NBYTES)])
            with suppress(HiCacheError):
                storage.clear(SPACE)

        assert b"precious" * 1000 == precious.read_bytes()

    def test_a_file_among_the_writers_that_is_not_empty_is_nobody_s_lock(self, root: Path) -> None:
        strange = root / "writers" / ("0" * 16)
        strange.parent.mkdir(parents=True)
        strange.write_text("precious")
        with opened(root) as storage:
            stored(storage, range(2))

        assert "precious" == strange.read_text()

    @pytest.mark.parametrize("content", [b"", b"not an id", b"\xff" * 16])
    def test_a_root_id_that_is_none_is_refused(self, tmp_path: Path, content: bytes) -> None:
        """Two roots with one id would use one index for different slots."""
        with RedisServer(tmp_path / "redis") as server:
            root = tmp_path / "root"
            root.mkdir()
            (root / "root-id").write_bytes(content)
            with pytest.raises(ConfigError, match="root-id"):
                Hf3fsStorage.from_config({"path": str(root), "index": server.url})

            assert content == (root / "root-id").read_bytes()
            assert [] == list((root / "writers").iterdir())


class TestFailedOpens:
    @pytest.mark.parametrize(
        "config",
        [{}, {"index": "redis://127.0.0.1:1"}, {"usrbio": True}],
        ids=["sqlite", "redis", "usrbio"],
    )
    def test_they_leave_nothing_behind(self, tmp_path: Path, config: dict[str, Any]) -> None:
        root = tmp_path / "root"
        root.mkdir()
        if "index" not in config:
            a_file(root)  # a SQLite index can be neither opened nor made

        def fail() -> None:
            with pytest.raises((HiCacheError, ImportError)):
                Hf3fsStorage.from_config({"path": str(root), "timeout_s": 5, **config})

        fail()
        fds, threads, names = descriptors(), set(threading.enumerate()), names_in(root)
        for _ in range(20):
            fail()

        assert fds == descriptors()
        assert not set(threading.enumerate()) - threads
        assert names == names_in(root)
        assert [] == names_in(root / "writers")

    def test_a_failure_after_the_index_was_opened_leaves_nothing_behind(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def failing(*_: object) -> None:
            raise RuntimeError("a bug")

        with opened(root):
            pass
        fds = descriptors()
        with monkeypatch.context() as patched:
            patched.setattr("hicache_backends.hf3fs.index.sqlite_tables.collect_dead", failing)
            for _ in range(20):
                with pytest.raises(RuntimeError):
                    opened(root)

        assert fds == descriptors()
        assert [] == names_in(root / "writers")


class TestListing:
    def test_the_key_spaces_of_a_vanished_root_are_unavailable(self, root: Path) -> None:
        with opened(root) as storage:
            (root / "spaces").rename(root / "away")
            try:
                with pytest.raises(StorageUnavailable):
                    list(storage.spaces())
            finally:
                (root / "away").rename(root / "spaces")

            assert [SPACE] == list(storage.spaces())
