"""What is special about each kind of reference store, except `WireStore` (`test_wire.py`)."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
from hicache_conformance.selftest.references.blobs import Blobs
from hicache_conformance.selftest.references.dict_store import DictStore
from hicache_conformance.selftest.references.evicting import EvictingStore
from hicache_conformance.selftest.references.file_a_page import Shelf
from hicache_conformance.selftest.references.first_wins import FirstWins
from hicache_conformance.selftest.references.slow import SlowStore
from hicache_conformance.selftest.references.sqlite_store import SqliteStore
from pages import blank, hash_of, page, space

from hicache_storage.errors import (
    ConfigError,
    StorageTimeout,
    StorageUnavailable,
    UnsupportedOperation,
)
from hicache_storage.page import Page
from hicache_storage.storage import HiCacheStorage

A, B, C = hash_of(1), hash_of(2), hash_of(3)
LIMIT_S = 30.0


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf.from_config({"path": str(tmp_path)})


def file_of(tmp_path: Path, page_hash: str) -> Path:
    return tmp_path / space().id / page_hash


# --- in memory -------------------------------------------------------------------------------------


def test_beyond_its_capacity_a_dict_refuses_and_recovers() -> None:
    with DictStore.from_config({"capacity_nbytes": 2 * 4096}) as store:
        assert [True, True, False] == store.batch_set(space(), [A, B, C], [page()] * 3)
        assert [True] == store.batch_set(space(), [A], [page(seed=9)])
        store.batch_delete(space(), [A])
        assert [True] == store.batch_set(space(), [C], [page()])
        assert (2, 2 * 4096, {"refused": 1}) == (
            store.stats().pages,
            store.stats().nbytes,
            store.stats().counters,
        )


def test_a_dict_takes_its_limits_from_its_config() -> None:
    with DictStore.from_config({"max_batch": 1, "max_page_nbytes": 4096}) as store:
        store.open_space(space())
        with pytest.raises(UnsupportedOperation, match="batches of up to 1 pages"):
            store.batch_exists(space(), [A, B])
        with pytest.raises(
            UnsupportedOperation, match=r"of up to 4 KiB, but .* have 4\.00 KiB \(4,097 bytes\)"
        ):
            store.batch_exists(space(page_nbytes=4097), [A])


def test_a_store_that_keeps_the_first_bytes_counts_them_once() -> None:
    with FirstWins.from_config({}) as store:
        store.batch_set(space(), [A, A], [page(seed=1), page(seed=2)])

        assert 4096 == store.stats().nbytes


def test_blobs_take_no_page_in_pieces() -> None:
    with Blobs.from_config({}) as store, pytest.raises(ValueError, match="unpack"):
        store.batch_set(space(), [A], [Page(bytearray(4000), bytearray(96))])


@pytest.mark.parametrize(("start", "nbytes", "counted"), [(0, 4096, 0), (1, 4096, 1), (0, 4095, 1)])
def test_blobs_take_unaligned_pages_and_count_them(start: int, nbytes: int, counted: int) -> None:
    memory = memoryview(bytearray(4096 + 1024))
    start -= Page(memory).addresses[0][0] % -512
    with Blobs.from_config({}) as store:
        answers = store.batch_set(
            space(page_nbytes=nbytes), [A], [Page(memory[start : start + nbytes])]
        )

        assert ([True], counted) == (answers, store.stats().counters.get("unaligned", 0))


def test_the_least_recently_used_page_goes_first() -> None:
    with EvictingStore.from_config({"capacity_nbytes": 2 * 4096}) as store:
        store.batch_set(space(), [A, B], [page(), page()])
        store.batch_get(space(), [A], [blank()])
        store.batch_exists(space(), [B])  # does not renew it

        assert [True] == store.batch_set(space(), [C], [page()])
        assert [True, False, True] == store.batch_exists(space(), [A, B, C])
        assert (8192, 8192, {"evictions": 1}) == (
            store.stats().nbytes,
            store.stats().capacity_nbytes,
            store.stats().counters,
        )


def test_a_present_page_is_replaced_without_an_eviction() -> None:
    with EvictingStore.from_config({"capacity_nbytes": 2 * 4096}) as store:
        store.batch_set(space(), [A, B], [page(), page()])
        store.batch_set(space(), [B], [page(seed=1)])  # the last to go

        assert [True, True] == store.batch_exists(space(), [A, B])


def test_a_slow_store_loses_one_page_in_sixteen_after_three_calls() -> None:
    hashes = [hash_of(number) for number in range(32)]
    with SlowStore.from_config({"delay_s": 0}) as store:
        store.batch_set(space(), hashes, [page()] * 32)

        found = [store.batch_exists(space(), hashes) for _ in range(4)]
    assert [32, 32, 32, 30] == [sum(answers) for answers in found]
    assert [15, 31] == [index for index, there in enumerate(found[-1]) if not there]


def test_a_store_that_is_slower_than_its_timeout_raises() -> None:
    with (
        SlowStore.from_config({"delay_s": 60, "timeout_s": 0.01}) as store,
        pytest.raises(StorageTimeout, match=r"timeout_s = 0\.01"),
    ):
        store.batch_exists(space(), [A])


# --- one file a page -------------------------------------------------------------------------------


def test_clear_removes_damaged_pages_and_counts_whole_ones(shelf: Shelf, tmp_path: Path) -> None:
    shelf.batch_set(space(), [A, B], [page(), page()])
    file_of(tmp_path, A).write_bytes(b"short")

    assert 1 == shelf.clear(space())
    assert ["manifest.json"] == [path.name for path in file_of(tmp_path, A).parent.iterdir()]


def test_foreign_files_in_the_directory_survive(shelf: Shelf, tmp_path: Path) -> None:
    shelf.batch_set(space(), [A], [page()])
    others = [
        tmp_path / "notes.txt",
        tmp_path / ("0" * 32) / "readme",
        tmp_path / space().id / "LOCK",
    ]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_text("theirs")

    assert [space()] == list(shelf.spaces())
    assert 1 == shelf.clear(space())
    Shelf.from_config({"path": str(tmp_path)}).close()
    assert ["theirs"] * 3 == [path.read_text() for path in others]


def test_a_manifest_under_another_name_is_no_key_space(shelf: Shelf, tmp_path: Path) -> None:
    folder = tmp_path / ("0" * 32)
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps(space().manifest()))

    assert [] == list(shelf.spaces())


def test_a_disk_that_fills_up_in_a_write_refuses_and_leaves_nothing(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half_written(path: Path, data: bytes) -> None:
        path.write_bytes(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    shelf.batch_set(space(), [A], [page(seed=1)])
    monkeypatch.setattr(shelf, "_write_file", half_written)

    assert [False, False] == shelf.batch_set(space(), [A, B], [page(seed=2)] * 2)
    assert {A, "manifest.json"} == {path.name for path in (tmp_path / space().id).iterdir()}
    assert page(seed=1).tobytes() == file_of(tmp_path, A).read_bytes()
    assert {"refused": 2} == shelf.stats().counters


def test_opening_removes_what_dead_writers_left_and_nothing_of_live_ones(
    shelf: Shelf, tmp_path: Path
) -> None:
    shelf.batch_set(space(), [A], [page()])
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait(LIMIT_S)
    dead = file_of(tmp_path, f".tmp-{gone.pid}-00")
    alive = file_of(tmp_path, f".tmp-{os.getpid()}-00")
    for path in (dead, alive):
        path.write_bytes(b"half a page")

    Shelf.from_config({"path": str(tmp_path)}).close()
    assert (False, True) == (dead.exists(), alive.exists())


def test_a_file_in_place_of_the_directory_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(StorageUnavailable, match="can't be used"):
        Shelf.from_config({"path": str(tmp_path / "file")})


# --- one SQLite file -------------------------------------------------------------------------------


def test_a_database_that_others_lock_is_a_timeout_until_they_let_go(tmp_path: Path) -> None:
    path = tmp_path / "pages.sqlite"
    with SqliteStore.from_config({"path": str(path), "timeout_s": 0.05}) as store:
        other = sqlite3.connect(path, isolation_level=None)
        try:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StorageTimeout, match="other connections"):
                store.batch_set(space(), [A], [page()])
        finally:
            other.close()
        assert [True] == store.batch_set(space(), [A], [page()])


def test_opening_waits_where_sqlite_does_not(tmp_path: Path) -> None:
    """A switch to a write-ahead log needs a lock for which SQLite itself does not wait."""
    refused = sqlite3.OperationalError("database is locked")
    refused.sqlite_errorcode = sqlite3.SQLITE_BUSY
    with SqliteStore.from_config({"path": str(tmp_path / "pages.sqlite")}) as store:
        database = Mock(wraps=store._database)
        database.execute.side_effect = [refused, *[DEFAULT] * 9]
        store._prepare(database)

    assert 3 == database.execute.call_count


def test_a_blob_of_another_length_is_a_miss_and_heals(tmp_path: Path) -> None:
    path = tmp_path / "pages.sqlite"
    with SqliteStore.from_config({"path": str(path)}) as store:
        store.batch_set(space(), [A], [page()])
        other = sqlite3.connect(path)
        with other:
            other.execute("UPDATE pages SET data = x'00'")
        other.close()

        assert [False] == store.batch_exists(space(), [A])
        assert [False] == store.batch_get(space(), [A], [blank()])
        assert [True] == store.batch_set(space(), [A], [page()])
        assert [True] == store.batch_get(space(), [A], [blank()])


def test_a_file_that_is_no_database_is_unavailable(tmp_path: Path) -> None:
    path = tmp_path / "pages.sqlite"
    path.write_bytes(b"not a database" * 100)

    with pytest.raises(StorageUnavailable, match="not a database"):
        SqliteStore.from_config({"path": str(path)})


# --- both kinds of files ---------------------------------------------------------------------------

_WRITER = """
import importlib, json, resource, sys
sys.path[:0] = json.loads(sys.argv[4])
from pages import blank, hash_of, page, space
store = getattr(importlib.import_module(sys.argv[1]), sys.argv[2]).from_config({"path": sys.argv[3]})
store.open_space(space())
assert store.batch_set(space(), [hash_of(1)], [page(seed=1)]) == [True]
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
large = space(page_nbytes=1 << 20)
refused = store.batch_set(large, [hash_of(2)], [page(1 << 20)])
read = store.batch_get(space(), [hash_of(1)], [blank()])
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
recovered = store.batch_set(large, [hash_of(2)], [page(1 << 20)])
store.close()
print(json.dumps([refused, read, recovered]))
"""


@pytest.mark.parametrize(("storage_class", "name"), [(Shelf, "shelf"), (SqliteStore, "db.sqlite")])
def test_a_process_whose_files_may_not_grow_is_refused_and_recovers(
    storage_class: type[HiCacheStorage], name: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            _WRITER,
            storage_class.__module__,
            storage_class.__name__,
            str(tmp_path / name),
            json.dumps(sys.path),
        ],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )

    assert ("", [[False], [True], [True]]) == (done.stderr, json.loads(done.stdout or "null"))
    assert [] == [path for path in tmp_path.rglob("*") if path.name.startswith(".tmp")]


@pytest.mark.parametrize("storage_class", [Shelf, SqliteStore])
@pytest.mark.parametrize(
    ("config", "message"),
    [({}, "path: .*required"), ({"path": ""}, "path: "), ({"path": "a\0b"}, "path: ")],
)
def test_a_path_that_is_none_is_refused(
    storage_class: type[HiCacheStorage], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        storage_class.from_config(config)
