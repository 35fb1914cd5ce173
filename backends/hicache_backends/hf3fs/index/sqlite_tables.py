"""The tables of a SQLite index, and every change of their rows in a transaction.

A set reserves free slots first; then the slots of dead writers, new slots, and the slots of the least
recently used pages. With a capacity, pages are evicted before it is reached: from the high watermark on,
down to the low one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_backends.hf3fs.layout import Geometry, Place, writer_of, written_ns
from hicache_backends.hf3fs.slots import SlotFiles
from hicache_backends.hf3fs.writer import is_dead, tokens
from hicache_storage.errors import StorageUnavailable

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Sequence

    from hicache_backends.hf3fs.index.base import Entry, Limits
    from hicache_backends.hf3fs.layout import Layout
    from hicache_backends.hf3fs.writer import Writer

VERSION = 1
SCHEMA = f"""
PRAGMA journal_mode = WAL;
BEGIN;
CREATE TABLE spaces (
    space BLOB PRIMARY KEY, slot_nbytes INTEGER, allocated INTEGER, taken INTEGER
) WITHOUT ROWID;
CREATE TABLE pages (
    space BLOB, page_hash BLOB, slot INTEGER, stamp BLOB, used_ns INTEGER,
    PRIMARY KEY (space, page_hash)
) WITHOUT ROWID;
CREATE INDEX pages_by_use ON pages (used_ns);
CREATE TABLE free (space BLOB, slot INTEGER, PRIMARY KEY (space, slot)) WITHOUT ROWID;
CREATE TABLE reserved (
    space BLOB, slot INTEGER, stamp BLOB, PRIMARY KEY (space, slot)
) WITHOUT ROWID;
PRAGMA user_version = {VERSION};
COMMIT;
"""

_STEP = 500
# The pages that are evicted at once beyond the needed ones: a set waits for them.
_EVICTED_AHEAD = 1000
_OLDEST = "SELECT space, page_hash, slot, slot_nbytes FROM pages JOIN spaces USING (space)"


def id_of(files: SlotFiles) -> bytes:
    """Return the id of a key space as it is in the tables."""
    return bytes.fromhex(files.geometry.space.id)


def register(db: sqlite3.Connection, files: SlotFiles) -> None:
    """Add the row of a key space, unless it is there."""
    db.execute(
        "INSERT OR IGNORE INTO spaces VALUES (?, ?, 0, 0)",
        (id_of(files), files.geometry.slot_nbytes),
    )


def find(db: sqlite3.Connection, space: bytes, hashes: Sequence[str]) -> dict[str, Place]:
    """Return the places of the pages that are there."""
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
    """Add pages; return the places of the entries whose pages another slot holds already."""
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
    """Remove pages. The caller frees their slots."""
    query = "DELETE FROM pages WHERE space = ? AND page_hash = ?"
    db.executemany(query, [(space, page_hash) for page_hash in hashes])


def end_reservations(db: sqlite3.Connection, space: bytes, places: Sequence[Place]) -> None:
    """End reservations. The caller frees the slots, or gives them to pages.

    Raises:
        StorageUnavailable: A reservation is missing: this index is not the one that made it.
    """
    query = "DELETE FROM reserved WHERE space = ? AND slot = ? AND stamp = ?"
    rows = [(space, *place) for place in places]
    if rows and db.executemany(query, rows).rowcount != len(rows):
        raise StorageUnavailable(
            "hf3fs: the index has no entry for a slot that was reserved: it was replaced"
        )


def free(db: sqlite3.Connection, space: bytes, slots: Sequence[int]) -> None:
    """Free slots that belonged to a page or a writer."""
    rows = [(space, slot) for slot in slots]
    db.executemany("INSERT INTO free VALUES (?, ?)", rows)
    db.execute("UPDATE spaces SET taken = taken - ? WHERE space = ?", (len(rows), space))


def used_nbytes(db: sqlite3.Connection) -> int:
    """Return the bytes of all slots in use."""
    (nbytes,) = db.execute("SELECT coalesce(sum(taken * slot_nbytes), 0) FROM spaces").fetchone()
    return int(nbytes)


def collect_dead(db: sqlite3.Connection, layout: Layout, writer: Writer) -> bool:
    """Free the slots that dead writers had reserved; return True when there were any."""
    reserved = db.execute("SELECT space, slot, stamp FROM reserved").fetchall()
    latest = dict.fromkeys(tokens(layout.writers), 0)
    for _, _, stamp in reserved:
        token = writer_of(stamp)
        latest[token] = max(latest.get(token, 0), written_ns(stamp))
    dead = {
        token
        for token, reserved_ns in latest.items()
        if token != writer.token and is_dead(layout.writers, token, reserved_ns)
    }
    left = [(space, slot) for space, slot, stamp in reserved if writer_of(stamp) in dead]
    for space, slot in left:
        db.execute("DELETE FROM reserved WHERE space = ? AND slot = ?", (space, slot))
        free(db, space, [slot])
    return bool(left)


class Reservation:
    """The reservation of slots for one set, in one transaction."""

    def __init__(
        self,
        db: sqlite3.Connection,
        files: SlotFiles,
        limits: Limits,
        writer: Writer,
        layout: Layout,
    ) -> None:
        self._db = db
        self._files = files
        self._space = id_of(files)
        self._limits = limits
        self._writer = writer
        self._layout = layout
        self._slot_nbytes = files.geometry.slot_nbytes
        self.evicted = 0

    def reserve(self, count: int) -> list[Place]:
        """Reserve `count` slots, or as many as there can be."""
        db, space = self._db, self._space
        register(db, self._files)
        count = self._evict_for(count)
        slots = self._free_slots(count)
        if len(slots) < count and collect_dead(db, self._layout, self._writer):
            slots = self._free_slots(count)
        if len(slots) < count:
            self._grow(count - len(slots))
            slots = self._free_slots(count)
        if len(slots) < count and self._limits.capacity_nbytes is not None:
            self.evicted += self._evict((count - len(slots)) * self._slot_nbytes, own=True)
            slots = self._free_slots(count)
        places = [Place(slot, self._writer.stamp()) for slot in slots]
        db.executemany(
            "DELETE FROM free WHERE space = ? AND slot = ?", [(space, slot) for slot in slots]
        )
        db.executemany(
            "INSERT INTO reserved VALUES (?, ?, ?)", [(space, *place) for place in places]
        )
        db.execute("UPDATE spaces SET taken = taken + ? WHERE space = ?", (len(slots), space))
        return places

    def _evict_for(self, count: int) -> int:
        """Evict pages for `count` more slots; return the number of slots that fit then."""
        wanted_nbytes = count * self._slot_nbytes
        if self._limits.to_evict(used_nbytes(self._db), wanted_nbytes):
            collect_dead(self._db, self._layout, self._writer)
        surplus = self._limits.to_evict(used_nbytes(self._db), wanted_nbytes)
        if surplus:
            self.evicted += self._evict(surplus, ahead=count + _EVICTED_AHEAD)
        most = self._most_slots()
        return count if most is None else min(count, most)

    def _most_slots(self) -> int | None:
        """Return the number of slots that the capacity leaves; None when there is no capacity."""
        free_nbytes = self._limits.free_nbytes(used_nbytes(self._db))
        return None if free_nbytes is None else free_nbytes // self._slot_nbytes

    def _evict(self, nbytes: int, *, ahead: int | None = None, own: bool = False) -> int:
        """Remove the least recently used pages until `nbytes` are free; return the number of pages."""
        victims: dict[bytes, list[tuple[bytes, int]]] = {}
        query = f"{_OLDEST} {'WHERE space = ?' if own else ''} ORDER BY used_ns LIMIT ?"
        most = ahead or -(-nbytes // self._slot_nbytes)
        for space, page_hash, slot, slot_nbytes in self._db.execute(
            query, (self._space, most) if own else (most,)
        ):
            if nbytes <= 0:
                break
            nbytes -= slot_nbytes
            victims.setdefault(space, []).append((page_hash, slot))
        for space, pages in victims.items():
            self._remove(space, pages)
        return sum(map(len, victims.values()))

    def _remove(self, space: bytes, pages: Sequence[tuple[bytes, int]]) -> None:
        remove(self._db, space, [page_hash for page_hash, _ in pages])
        slots = [slot for _, slot in pages]
        free(self._db, space, slots)
        if space != self._space:
            owner = self._layout.key_space(space.hex())
            if owner is not None:
                SlotFiles(self._layout, Geometry(owner)).deallocate(slots)

    def _free_slots(self, count: int) -> list[int]:
        query = "SELECT slot FROM free WHERE space = ? ORDER BY slot LIMIT ?"
        return [row[0] for row in self._db.execute(query, (self._space, count))]

    def _grow(self, missing: int) -> None:
        query = "SELECT allocated FROM spaces WHERE space = ?"
        (before,) = self._db.execute(query, (self._space,)).fetchone()
        after = self._files.grow(before, missing, self._most_slots())
        self._db.executemany(
            "INSERT INTO free VALUES (?, ?)", [(self._space, slot) for slot in range(before, after)]
        )
        self._db.execute("UPDATE spaces SET allocated = ? WHERE space = ?", (after, self._space))
