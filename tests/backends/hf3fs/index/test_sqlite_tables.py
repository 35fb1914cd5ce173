"""The tables of a SQLite index, with more rows than one statement takes."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hicache_backends.hf3fs import Hf3fsStorage
from hicache_backends.hf3fs.index import sqlite_tables as tables
from hicache_backends.hf3fs.index.base import Entry
from hicache_backends.hf3fs.layout import Geometry, Place
from lock_waits import lock_waits
from pages import hash_of, page, space

from hicache_storage import StorageUnavailable, native

compiled_only = pytest.mark.skipif(
    native.implementation != "compiled", reason="the reference makes more calls"
)

TARGET = space()
SPACE = bytes(16)
COUNT = 2000
ENTRIES = [Entry(hash_of(n), Place(n, n.to_bytes(24, "big")), 1000 + n) for n in range(COUNT)]
HASHES = [entry.page_hash for entry in ENTRIES]


@pytest.fixture
def db() -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        db.executescript(tables.SCHEMA)
        db.execute("INSERT INTO spaces VALUES (?, 4096, 0, 0)", (SPACE,))
        yield db


def used_ns(db: sqlite3.Connection) -> list[int]:
    return [row[0] for row in db.execute("SELECT used_ns FROM pages ORDER BY slot")]


def test_pages_that_were_inserted_are_found(db: sqlite3.Connection) -> None:
    assert [] == tables.insert(db, SPACE, ENTRIES)
    assert {entry.page_hash: entry.place for entry in ENTRIES} == tables.find(db, SPACE, HASHES)
    assert {} == tables.find(db, bytes([1] * 16), HASHES)
    assert {} == tables.find(db, SPACE, [])


def test_entries_of_pages_that_another_slot_holds_are_returned(db: sqlite3.Connection) -> None:
    tables.insert(db, SPACE, ENTRIES[:1000])
    others = [entry._replace(place=Place(entry.place.slot + COUNT, bytes(24))) for entry in ENTRIES]

    assert [other.place for other in others[:1000]] == tables.insert(db, SPACE, others)
    assert ENTRIES[0].place == tables.find(db, SPACE, HASHES[:1])[HASHES[0]]


def test_removed_pages_are_gone(db: sqlite3.Connection) -> None:
    tables.insert(db, SPACE, ENTRIES)
    tables.remove(db, SPACE, [bytes.fromhex(page_hash) for page_hash in HASHES[:1999]])

    assert HASHES[1999:] == list(tables.find(db, SPACE, HASHES))


def test_a_touch_makes_no_page_older(db: sqlite3.Connection) -> None:
    tables.insert(db, SPACE, ENTRIES)
    times = [500 if n % 2 else 10_000 + n for n in range(COUNT)]
    hashes = [bytes.fromhex(page_hash) for page_hash in HASHES]
    tables.touch(db, SPACE, list(zip(hashes, times, strict=True)))

    assert [1000 + n if n % 2 else 10_000 + n for n in range(COUNT)] == used_ns(db)


def test_a_touch_adds_no_page(db: sqlite3.Connection) -> None:
    tables.touch(db, SPACE, [(bytes(32), 5)])

    assert [] == used_ns(db)


def free_pages(db: sqlite3.Connection) -> int:
    (count,) = db.execute("PRAGMA freelist_count").fetchone()
    return int(count)


def test_free_pages_are_given_when_half_of_them_are_used_up(db: sqlite3.Connection) -> None:
    tables.insert(db, SPACE, ENTRIES)
    db.execute("UPDATE spaces SET allocated = 1000000")
    assert tables.keep_free_pages(db)
    given = free_pages(db)

    db.execute("INSERT INTO reserved VALUES (x'01', 1, zeroblob(?))", (given * 4096 // 3,))
    assert not tables.keep_free_pages(db)
    db.execute("INSERT INTO reserved VALUES (x'01', 2, zeroblob(?))", (given * 4096 // 3,))
    assert tables.keep_free_pages(db)
    assert given <= free_pages(db)


def test_the_index_of_very_many_slots_gets_free_pages_too(db: sqlite3.Connection) -> None:
    db.execute("UPDATE spaces SET allocated = ?", (1 << 26,))

    assert tables.keep_free_pages(db)
    assert 1 << 26 <= 4096 * free_pages(db) < 1 << 27


@pytest.mark.parametrize("stamp", [bytes(24), b"another writer's stamp 1"])
def test_a_missing_reservation_is_an_error(db: sqlite3.Connection, stamp: bytes) -> None:
    rows = [(SPACE, *entry.place) for entry in ENTRIES]
    db.executemany("INSERT INTO reserved VALUES (?, ?, ?)", rows)
    places = [entry.place for entry in ENTRIES]
    tables.end_reservations(db, SPACE, places[:1000])
    db.execute("UPDATE reserved SET stamp = ? WHERE slot = 1500", (stamp + b"!",))

    with pytest.raises(StorageUnavailable, match="no entry"):
        tables.end_reservations(db, SPACE, places[1000:])


@compiled_only
def test_a_set_that_evicts_waits_for_the_lock_as_often_with_many_pages_as_with_one(
    tmp_path: Path,
) -> None:
    capacity = 100 * Geometry(TARGET).slot_nbytes
    config = {"path": str(tmp_path), "capacity_nbytes": capacity, "low_watermark": 0.95}
    with Hf3fsStorage.from_config(config) as storage:
        storage.open_space(TARGET)
        for start in range(0, 120, 30):
            storage.batch_set(TARGET, [hash_of(start + n) for n in range(30)], [page()] * 30)
        before = storage.stats().counters["evicted"]

        many = lock_waits(
            lambda: storage.batch_set(TARGET, [hash_of(n) for n in range(200, 230)], [page()] * 30)
        )
        one = lock_waits(lambda: storage.batch_set(TARGET, [hash_of(300)], [page()]))

        assert before + 31 == storage.stats().counters["evicted"]
    assert one == many


@compiled_only
def test_a_get_waits_few_times_for_the_lock(tmp_path: Path) -> None:
    with Hf3fsStorage.from_config({"path": str(tmp_path)}) as storage:
        storage.open_space(TARGET)
        hashes = [hash_of(number) for number in range(30)]
        storage.batch_set(TARGET, hashes, [page() for _ in hashes])

        waits = lock_waits(lambda: storage.batch_get(TARGET, hashes, [page() for _ in hashes]))

    assert sum(waits.values()) <= 7
