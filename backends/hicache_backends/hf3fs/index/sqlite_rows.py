"""What is done to the rows of a SQLite index (`_database` has the tables)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_backends.hf3fs.slots import Place
from hicache_storage.errors import StorageUnavailable

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Sequence

    from hicache_backends.hf3fs.index.base import Entry
    from hicache_backends.hf3fs.slot_files import SlotFiles

_STEP = 500


def id_of(files: SlotFiles) -> bytes:
    return bytes.fromhex(files.geometry.space.id)


def register(db: sqlite3.Connection, files: SlotFiles) -> None:
    """Give a key space its row."""
    db.execute(
        "INSERT OR IGNORE INTO spaces VALUES (?, ?, 0, 0)",
        (id_of(files), files.geometry.slot_nbytes),
    )


def find(db: sqlite3.Connection, space: bytes, hashes: Sequence[str]) -> dict[str, Place]:
    found: dict[str, Place] = {}
    for start in range(0, len(hashes), _STEP):
        part = [bytes.fromhex(page_hash) for page_hash in hashes[start : start + _STEP]]
        marks = ",".join("?" * len(part))
        query = (
            "SELECT page_hash, slot, stamp FROM pages"  # noqa: S608 - question marks only
            f" WHERE space = ? AND page_hash IN ({marks})"
        )
        for page_hash, slot, stamp in db.execute(query, (space, *part)):
            found[page_hash.hex()] = Place(slot, stamp)
    return found


def insert(db: sqlite3.Connection, space: bytes, entries: Sequence[Entry]) -> list[Place]:
    """Pages are in their slots from now on; the places of those that another slot has already."""
    added = db.executemany(
        "INSERT OR IGNORE INTO pages VALUES (?, ?, ?, ?, ?)",
        [
            (space, bytes.fromhex(page_hash), *place, used_ns)
            for page_hash, place, used_ns in entries
        ],
    ).rowcount
    if not entries or added == len(entries):
        return []
    there = find(db, space, [entry.page_hash for entry in entries])
    return [entry.place for entry in entries if there[entry.page_hash] != entry.place]


def remove(db: sqlite3.Connection, space: bytes, hashes: Sequence[bytes]) -> None:
    """Remove pages; their slots are nobody's, and not free yet."""
    query = "DELETE FROM pages WHERE space = ? AND page_hash = ?"
    db.executemany(query, [(space, page_hash) for page_hash in hashes])


def end_reservations(db: sqlite3.Connection, space: bytes, places: Sequence[Place]) -> None:
    """End reservations.

    Raises:
        StorageUnavailable: They had ended; that is what another index does not know.
    """
    query = "DELETE FROM reserved WHERE space = ? AND slot = ? AND stamp = ?"
    rows = [(space, *place) for place in places]
    if rows and db.executemany(query, rows).rowcount != len(rows):
        raise StorageUnavailable(
            "hf3fs: the index does not know of a slot that was reserved: it was replaced"
        )


def free(db: sqlite3.Connection, space: bytes, slots: Sequence[int]) -> None:
    """Slots that a page or a writer had are nobody's."""
    rows = [(space, slot) for slot in slots]
    db.executemany("INSERT INTO free VALUES (?, ?)", rows)
    db.execute("UPDATE spaces SET taken = taken - ? WHERE space = ?", (len(rows), space))


def used_nbytes(db: sqlite3.Connection) -> int:
    (nbytes,) = db.execute("SELECT coalesce(sum(taken * slot_nbytes), 0) FROM spaces").fetchone()
    return int(nbytes)
