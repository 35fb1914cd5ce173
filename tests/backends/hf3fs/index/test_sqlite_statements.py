"""Reservations in one statement: the same outcome as that of a transaction, or no change at all."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
from hf3fs_roots import counted
from hicache_backends.hf3fs import Hf3fsStorage
from hicache_backends.hf3fs.index import sqlite_statements as statements
from hicache_backends.hf3fs.index import sqlite_tables as tables
from hicache_backends.hf3fs.index.base import Entry
from hicache_backends.hf3fs.layout import STAMP_NBYTES, Geometry, Place
from hypothesis import given, settings
from hypothesis import strategies as st
from lock_waits import lock_waits
from pages import hash_of, page, space

from hicache_storage import native

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TypeAlias

    from hicache_storage import KeySpace

    Call: TypeAlias = tuple[str, KeySpace, list[int]]

pytestmark = pytest.mark.skipif(not statements.AVAILABLE, reason="this SQLite has no RETURNING")
compiled_only = pytest.mark.skipif(
    native.implementation != "compiled", reason="the reference makes more calls"
)

SPACE, OTHER = bytes(16), bytes([1] * 16)
STAMPS = [n.to_bytes(STAMP_NBYTES, "big") for n in range(1, 4)]
TARGET, DRAFT = space(), space(pool="draft")
SLOT_NBYTES = Geometry(TARGET).slot_nbytes


@pytest.fixture
def db() -> Iterator[sqlite3.Connection]:
    """Slots 0 to 9, of 100 bytes: the odd ones have pages, of which slot 9 has the oldest."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        db.executescript(tables.SCHEMA)
        statements.prepare(db)
        db.execute("INSERT INTO spaces VALUES (?, 100, 10, 5)", (SPACE,))
        for slot in range(10):
            if slot % 2:
                row = (SPACE, bytes([slot] * 32), slot, bytes([slot] * STAMP_NBYTES), 1000 - slot)
                db.execute("INSERT INTO pages VALUES (?, ?, ?, ?, ?)", row)
            else:
                db.execute("INSERT INTO free VALUES (?, ?)", (SPACE, slot))
        yield db


def contents(db: sqlite3.Connection) -> dict[str, list[tuple[object, ...]]]:
    return {
        name: db.execute(f"SELECT * FROM {name} ORDER BY 1, 2").fetchall()  # noqa: S608
        for name in ("spaces", "pages", "free", "reserved")
    }


def slots_of(db: sqlite3.Connection, table: str) -> list[int]:
    return [row[0] for row in db.execute(f"SELECT slot FROM {table} ORDER BY slot")]  # noqa: S608


def request(
    *, stamps: int = 3, evicted: int = 0, high: float | None = None, capacity: int | None = None
) -> statements.Request:
    return statements.Request(SPACE, 100, STAMPS[:stamps], evicted, high, capacity)


def test_the_lowest_free_slots_are_reserved_in_the_order_of_the_stamps(
    db: sqlite3.Connection,
) -> None:
    assert ([0, 2, 4], 800) == statements.reserve(db, request())

    rows = [(SPACE, 2 * n, stamp) for n, stamp in enumerate(STAMPS)]
    assert rows == contents(db)["reserved"]
    assert [6, 8] == slots_of(db, "free")


def test_the_oldest_pages_make_room_for_new_ones(db: sqlite3.Connection) -> None:
    assert ([0, 2, 4], 600) == statements.reserve(db, request(evicted=2, high=700, capacity=900))

    assert [1, 3, 5] == slots_of(db, "pages")
    assert [6, 7, 8, 9] == slots_of(db, "free")


def test_a_stamp_of_another_reservation_is_told_apart(db: sqlite3.Connection) -> None:
    between = statements.Request(SPACE, 100, [STAMPS[0], STAMPS[2]], 0, None, None)
    assert statements.reserve(db, statements.Request(SPACE, 100, [STAMPS[1]], 0, None, None))

    assert ([2, 4], 800) == statements.reserve(db, between)


@pytest.mark.parametrize(
    "unusual",
    [
        request(evicted=0, high=700, capacity=900),
        request(evicted=1, high=900, capacity=900),
        request(evicted=1, high=700, capacity=600),
        request(evicted=6, high=700, capacity=900),
        statements.Request(
            SPACE, 100, [bytes([n] * STAMP_NBYTES) for n in range(6)], 0, None, None
        ),
        statements.Request(OTHER, 100, STAMPS, 0, None, None),
    ],
    ids=["must evict", "need not evict", "too large", "too few pages", "too few slots", "unknown"],
)
def test_a_reservation_in_another_state_changes_nothing(
    db: sqlite3.Connection, unusual: statements.Request
) -> None:
    before = contents(db)

    assert statements.reserve(db, unusual) is None
    assert before == contents(db)


def test_a_reservation_evicts_no_page_of_another_key_space(db: sqlite3.Connection) -> None:
    db.execute("INSERT INTO spaces VALUES (?, 100, 1, 1)", (OTHER,))
    db.execute("INSERT INTO pages VALUES (?, ?, 0, ?, 1)", (OTHER, bytes(32), STAMPS[0]))
    before = contents(db)

    assert statements.reserve(db, request(evicted=2, high=700, capacity=900)) is None
    assert before == contents(db)


def test_reserved_slots_are_given_to_their_pages(db: sqlite3.Connection) -> None:
    statements.reserve(db, request(stamps=2))
    entries = [Entry(hash_of(n), Place(2 * n, STAMPS[n]), 5000 + n) for n in range(2)]

    assert statements.settle(db, SPACE, entries)

    hashes = [entry.page_hash for entry in entries]
    assert {entry.page_hash: entry.place for entry in entries} == tables.find(db, SPACE, hashes)
    assert [] == contents(db)["reserved"]


@pytest.mark.parametrize(
    ("page_hash", "stamp"),
    [(bytes([1] * 32).hex(), STAMPS[1]), (hash_of(1), STAMPS[2])],
    ids=["a page that is there", "a missing reservation"],
)
def test_an_unusual_end_changes_nothing(
    db: sqlite3.Connection, page_hash: str, stamp: bytes
) -> None:
    statements.reserve(db, request(stamps=2))
    before = contents(db)
    entries = [Entry(hash_of(0), Place(0, STAMPS[0]), 1), Entry(page_hash, Place(2, stamp), 1)]

    assert not statements.settle(db, SPACE, entries)
    assert before == contents(db)


numbers = st.lists(st.integers(0, 30), min_size=1, max_size=6)
calls = st.tuples(
    st.sampled_from(["set"] * 4 + ["get", "delete"]),
    st.sampled_from([TARGET] * 3 + [DRAFT]),
    numbers,
)


@settings(max_examples=25, deadline=None)
@given(calls=st.lists(calls, max_size=12), capacity=st.one_of(st.none(), st.integers(8, 20)))
def test_sets_by_statements_and_by_transactions_are_equal(
    calls: list[Call], capacity: int | None
) -> None:
    seen = list[object]()
    for available in (True, False):
        with TemporaryDirectory() as folder, patch.object(statements, "AVAILABLE", available):
            seen.append(outcome_of(Path(folder), calls, capacity))

    assert seen[0] == seen[1]


def outcome_of(root: Path, calls: list[Call], capacity: int | None) -> list[object]:
    """Return what a new store answers, and what it holds after each call."""
    config = {"path": str(root), "capacity_nbytes": capacity and capacity * SLOT_NBYTES}
    seen = list[object]()
    with Hf3fsStorage.from_config(config) as storage:
        for pool in (TARGET, DRAFT):
            storage.open_space(pool)
        for verb, pool, some in calls:
            hashes = [hash_of(number) for number in some]
            pages = [page(seed=number) for number in some]
            if verb == "set":
                seen.append(storage.batch_set(pool, hashes, pages))
            elif verb == "get":
                seen.append(storage.batch_get(pool, hashes, pages))
            else:
                storage.batch_delete(pool, hashes)
            everything = [hash_of(number) for number in range(31)]
            seen += [storage.batch_exists(pool, everything) for pool in (TARGET, DRAFT)]
            stats = storage.stats()
            seen += [stats.nbytes, stats.counters.get("evicted")]
        reserved, _, lost = counted(root)
        assert not reserved
        assert not lost
    return seen


@compiled_only
def test_a_set_that_evicts_waits_few_times_for_the_lock(tmp_path: Path) -> None:
    config = {"path": str(tmp_path), "capacity_nbytes": 100 * SLOT_NBYTES}
    with Hf3fsStorage.from_config(config) as storage:
        storage.open_space(TARGET)
        pages = [page() for _ in range(30)]
        for start in range(0, 120, 30):
            storage.batch_set(TARGET, [hash_of(start + n) for n in range(30)], pages)

        waits = lock_waits(
            lambda: storage.batch_set(TARGET, [hash_of(200 + n) for n in range(30)], pages)
        )

        assert 0 < storage.stats().counters["evicted"]
    assert 3 == waits["execute"]
    assert sum(waits.values()) <= 12


@compiled_only
def test_a_get_waits_few_times_for_the_lock(tmp_path: Path) -> None:
    with Hf3fsStorage.from_config({"path": str(tmp_path)}) as storage:
        storage.open_space(TARGET)
        hashes = [hash_of(number) for number in range(30)]
        storage.batch_set(TARGET, hashes, [page() for _ in hashes])

        waits = lock_waits(lambda: storage.batch_get(TARGET, hashes, [page() for _ in hashes]))

    assert sum(waits.values()) <= 7
