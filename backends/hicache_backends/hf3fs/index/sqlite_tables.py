"""The tables of a SQLite index, and every change of their rows in a transaction.

A set first reserves free slots, then the slots of dead writers, then new slots, and then the slots
of the least recently used pages. If there is a capacity, pages are evicted before it is reached:
from the high watermark down to the low one.
"""

from __future__ import annotations

import time
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from hicache_backends.hf3fs.index.base import MOST_AHEAD_NS
from hicache_backends.hf3fs.layout import Geometry, Place, writer_of, written_ns
from hicache_backends.hf3fs.slot_files import SlotFiles
from hicache_backends.hf3fs.writer import is_dead, tokens
from hicache_storage.errors import StorageUnavailable

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable, Iterator, Sequence

    from hicache_backends.hf3fs.index.base import Entry, Limits
    from hicache_backends.hf3fs.layout import Layout
    from hicache_backends.hf3fs.writer import Writer

_T = TypeVar("_T")

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

# A thread gives up the interpreter lock for each row of a statement, and may have to wait for it.
# So one statement changes many rows, and the result for many pages is one row.
_MOST_VARIABLES = 900
# The time of a touch grows with the square of its pages, so a statement touches only a hundred.
_TOUCH_VARIABLES = 9
_FIND = (
    "SELECT (SELECT data_version FROM pragma_data_version),"
    " group_concat(hex(page_hash) || ' ' || slot || ' ' || hex(stamp)) FROM pages"
    " WHERE space = ? AND page_hash IN ({})"
)
_LEAST_FREE_PAGES = 128
_FREE_PAGES_SHARE = 4
_MOST_RESERVED_NBYTES = 64 << 20
"""More free pages than this are not given at once, because they are written while others wait."""
_ROW_NBYTES = 256
"""What a page takes in the file, more than its free slot took, if the tree's pages are half full."""
_EVICTED_AHEAD = 1000
"""How many more pages than necessary a set may evict. The set waits for their eviction."""
_PAGES = (
    "SELECT {} AS used_ns, slot, slot_nbytes, space, page_hash FROM pages JOIN spaces USING (space)"
    " WHERE pages.used_ns {} :latest AND (:space IS NULL OR space = :space)"
)
_OLDEST = (
    "SELECT group_concat("  # noqa: S608 - constants
    "used_ns || ' ' || slot || ' ' || slot_nbytes || ' ' || hex(space) || ' ' || hex(page_hash)"
    f") FROM (SELECT * FROM ({_PAGES.format(0, '>')} LIMIT :most) UNION ALL"
    f" SELECT * FROM ({_PAGES.format('used_ns', '<=')} ORDER BY pages.used_ns LIMIT :most)"
    " LIMIT :most)"
)
"""First come the pages whose time cannot be true, because it is far ahead."""
_NEWEST = "SELECT max(used_ns) FROM pages WHERE used_ns <= ?"
_STEP_NS = 100_000


def id_of(files: SlotFiles) -> bytes:
    """Return the id of a key space in the form that the tables use."""
    return bytes.fromhex(files.geometry.space.id)


def register(db: sqlite3.Connection, files: SlotFiles) -> None:
    """Add the row of a key space, unless it exists."""
    db.execute(
        "INSERT OR IGNORE INTO spaces VALUES (?, ?, 0, 0)",
        (id_of(files), files.geometry.slot_nbytes),
    )


def find(db: sqlite3.Connection, space: bytes, hashes: Sequence[str]) -> dict[str, Place]:
    """Return the places of those pages that are stored."""
    return find_at_version(db, space, hashes)[1]


def find_at_version(
    db: sqlite3.Connection, space: bytes, hashes: Sequence[str]
) -> tuple[int, dict[str, Place]]:
    """Return SQLite's data version, and the places of those pages that are stored at that version."""
    found: dict[str, Place] = {}
    versions: list[int] = []
    for part in _parts([bytes.fromhex(page_hash) for page_hash in hashes], 1):
        version, text = db.execute(_FIND.format(_marks(part)), (space, *part)).fetchone()
        versions.append(version)
        for row in text.lower().split(",") if text else ():
            page_hash, slot, stamp = row.split(" ")
            found[page_hash] = Place(int(slot), bytes.fromhex(stamp))
    return versions[0] if versions else -1, found


def insert(db: sqlite3.Connection, space: bytes, entries: Sequence[Entry]) -> list[Place]:
    """Add pages. Return the places of the entries whose pages are already in another slot."""
    rows = [
        (space, bytes.fromhex(page_hash), *place, used_ns) for page_hash, place, used_ns in entries
    ]
    if _insert_rows(db, "INSERT OR IGNORE INTO pages", rows) == len(entries):
        return []
    there = find(db, space, [entry.page_hash for entry in entries])
    return [entry.place for entry in entries if there[entry.page_hash] != entry.place]


def behind_ns(db: sqlite3.Connection, times_ns: Iterable[int]) -> int:
    """Return what to add to times of this host's clock. If it was set back, they follow the newest."""
    now_ns = time.time_ns()
    (newest_ns,) = db.execute(_NEWEST, (now_ns + MOST_AHEAD_NS,)).fetchone()
    if newest_ns is None or newest_ns <= now_ns:
        return 0
    return int(newest_ns) + _STEP_NS - min(times_ns, default=now_ns)


def touch(db: sqlite3.Connection, space: bytes, used: Sequence[tuple[bytes, int]]) -> None:
    """Store the access times of pages, if they are later than the stored ones, or these are not true."""
    latest_ns = time.time_ns() + MOST_AHEAD_NS
    for part in _parts(used, _TOUCH_VARIABLES):
        hashes = [page_hash for page_hash, _ in part]
        query = (
            "UPDATE pages SET used_ns ="  # noqa: S608 - question marks only
            " max(CASE WHEN used_ns > ? THEN 0 ELSE used_ns END,"
            f" CASE page_hash {'WHEN ? THEN ? ' * len(part)} END)"
            f" WHERE space = ? AND page_hash IN ({_marks(part)})"
        )
        db.execute(query, (latest_ns, *chain.from_iterable(part), space, *hashes))


def used_ns(db: sqlite3.Connection, space: bytes, hashes: Sequence[str]) -> dict[str, int]:
    """Return the access times of those pages that are stored."""
    found: dict[str, int] = {}
    for part in _parts([bytes.fromhex(page_hash) for page_hash in hashes], 1):
        query = (
            "SELECT lower(hex(page_hash)), used_ns FROM pages"  # noqa: S608 - question marks only
            f" WHERE space = ? AND page_hash IN ({_marks(part)})"
        )
        found |= dict(db.execute(query, (space, *part)))
    return found


def remove(db: sqlite3.Connection, space: bytes, hashes: Sequence[bytes]) -> None:
    """Remove pages. The caller frees their slots."""
    for part in _parts(hashes, 1):
        query = f"DELETE FROM pages WHERE space = ? AND page_hash IN ({_marks(part)})"  # noqa: S608
        db.execute(query, (space, *part))


def end_reservations(db: sqlite3.Connection, space: bytes, places: Sequence[Place]) -> None:
    """End reservations. The caller frees the slots or gives them to pages.

    Raises:
        StorageUnavailable: A reservation is missing, so it was not made in this index.
    """
    ended = 0
    for part in _parts(places, 2):
        slots, stamps = zip(*part, strict=True)
        query = (
            "DELETE FROM reserved"  # noqa: S608 - question marks only. No two writes share a stamp.
            f" WHERE space = ? AND slot IN ({_marks(slots)}) AND stamp IN ({_marks(stamps)})"
        )
        ended += db.execute(query, (space, *slots, *stamps)).rowcount
    if ended != len(places):
        raise StorageUnavailable(
            "hf3fs: the index was replaced, because it has no entry for a slot that was reserved"
        )


def free(db: sqlite3.Connection, space: bytes, slots: Sequence[int]) -> None:
    """Free slots that belonged to a page or a writer."""
    if slots:
        _insert_rows(db, "INSERT INTO free", [(space, slot) for slot in slots])
        db.execute("UPDATE spaces SET taken = taken - ? WHERE space = ?", (len(slots), space))


def drop(db: sqlite3.Connection, space: bytes, *, keep_pages: bool) -> int | None:
    """Remove all rows of a key space. Return the number of its pages.

    If a writer has slots there, or with `keep_pages` if there are pages, change nothing and return
    None.
    """
    reserved, pages = (
        db.execute(f"SELECT count(*) FROM {table} WHERE space = ?", (space,)).fetchone()[0]  # noqa: S608 - constants
        for table in ("reserved", "pages")
    )
    if reserved or (pages and keep_pages):
        return None
    for table in ("pages", "free", "spaces"):
        db.execute(f"DELETE FROM {table} WHERE space = ?", (space,))  # noqa: S608 - constants
    return int(pages)


def keep_free_pages(db: sqlite3.Connection) -> bool:
    """Give the file pages that are not in use, so that it need not grow on a full disk.

    All of them are written, so that is done when half are used up. Return False if it had enough.
    """
    (free_pages,) = db.execute("PRAGMA freelist_count").fetchone()
    (pages,) = db.execute("PRAGMA page_count").fetchone()
    (page_nbytes,) = db.execute("PRAGMA page_size").fetchone()
    (slots,) = db.execute("SELECT coalesce(sum(allocated - taken), 0) FROM spaces").fetchone()
    wanted = max(_LEAST_FREE_PAGES, pages // _FREE_PAGES_SHARE) + slots * _ROW_NBYTES // page_nbytes
    wanted = min(wanted, _MOST_RESERVED_NBYTES // page_nbytes)
    if free_pages >= wanted / 2:
        return False
    row = (b"", -1, wanted * page_nbytes)
    db.execute("INSERT INTO reserved VALUES (?, ?, zeroblob(?))", row)
    db.execute("DELETE FROM reserved WHERE space = ?", row[:1])
    return True


def used_nbytes(db: sqlite3.Connection) -> int:
    """Return the bytes of all slots in use."""
    (nbytes,) = db.execute("SELECT coalesce(sum(taken * slot_nbytes), 0) FROM spaces").fetchone()
    return int(nbytes)


def collect_dead(db: sqlite3.Connection, layout: Layout, writer: Writer) -> bool:
    """Free the slots that dead writers had reserved. Return True if there were such slots."""
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


def _parts(items: Sequence[_T], variables: int) -> Iterator[Sequence[_T]]:
    """Yield the items in lists, one for each statement. An item takes `variables` variables."""
    step = _MOST_VARIABLES // variables
    return (items[start : start + step] for start in range(0, len(items), step))


def _marks(values: Sequence[object]) -> str:
    """Return a question mark for each value."""
    return ",".join("?" * len(values))


def _insert_rows(db: sqlite3.Connection, statement: str, rows: Sequence[tuple[object, ...]]) -> int:
    """Run an INSERT with its rows. Return how many rows were added."""
    added = 0
    for part in _parts(rows, len(rows[0]) if rows else 1):
        values = ",".join([f"({_marks(part[0])})"] * len(part))
        added += db.execute(f"{statement} VALUES {values}", [*chain.from_iterable(part)]).rowcount
    return added


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
        self.has_extended = False
        """True if the file has got free pages. It extends at the next checkpoint."""

    def reserve(self, count: int) -> list[Place]:
        """Reserve `count` slots, or as many as possible."""
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
            missing = count - len(slots)
            self.evicted += self._evict(missing * self._slot_nbytes, missing, own=True)
            slots = self._free_slots(count)
        places = [Place(slot, self._writer.stamp()) for slot in slots]
        for part in _parts(slots, 1):
            query = f"DELETE FROM free WHERE space = ? AND slot IN ({_marks(part)})"  # noqa: S608
            db.execute(query, (space, *part))
        _insert_rows(db, "INSERT INTO reserved", [(space, *place) for place in places])
        db.execute("UPDATE spaces SET taken = taken + ? WHERE space = ?", (len(slots), space))
        return places

    def _evict_for(self, count: int) -> int:
        """Evict pages for `count` more slots. Return how many slots fit now."""
        wanted_nbytes = count * self._slot_nbytes
        if self._limits.to_evict(used_nbytes(self._db), wanted_nbytes):
            collect_dead(self._db, self._layout, self._writer)
        surplus = self._limits.to_evict(used_nbytes(self._db), wanted_nbytes)
        if surplus:
            self.evicted += self._evict(surplus, count + _EVICTED_AHEAD)
        most = self._most_slots()
        return count if most is None else min(count, most)

    def _most_slots(self) -> int | None:
        """Return the number of slots that the capacity leaves, or None if there is no capacity."""
        free_nbytes = self._limits.free_nbytes(used_nbytes(self._db))
        return None if free_nbytes is None else free_nbytes // self._slot_nbytes

    def _evict(self, nbytes: int, most: int, *, own: bool = False) -> int:
        """Remove the least recently used pages until `nbytes` are free.

        Return how many were removed.
        """
        evicted = 0
        while nbytes > 0 and evicted < most:
            victims: dict[bytes, list[tuple[bytes, int]]] = {}
            wanted = min(-(-nbytes // self._slot_nbytes), most - evicted)
            for space, page_hash, slot, slot_nbytes in self._oldest(wanted, own=own):
                if nbytes <= 0:
                    break
                nbytes -= slot_nbytes
                victims.setdefault(space, []).append((page_hash, slot))
            for space, pages in victims.items():
                self._remove(space, pages)
                evicted += len(pages)
            if not victims:
                break
        return evicted

    def _oldest(self, most: int, *, own: bool) -> list[tuple[bytes, bytes, int, int]]:
        """Return the least recently used pages: key space, hash, slot and size of the slot."""
        latest_ns = time.time_ns() + MOST_AHEAD_NS
        wanted = {"space": self._space if own else None, "latest": latest_ns, "most": most}
        (text,) = self._db.execute(_OLDEST, wanted).fetchone()
        rows = [row.split(" ") for row in text.split(",")] if text else []
        rows.sort(key=lambda row: int(row[0]))
        return [
            (bytes.fromhex(space), bytes.fromhex(page_hash), int(slot), int(slot_nbytes))
            for _, slot, slot_nbytes, space, page_hash in rows
        ]

    def _remove(self, space: bytes, pages: Sequence[tuple[bytes, int]]) -> None:
        remove(self._db, space, [page_hash for page_hash, _ in pages])
        slots = [slot for _, slot in pages]
        free(self._db, space, slots)
        if space != self._space:
            owner = self._layout.key_space(space.hex())
            if owner is not None:
                SlotFiles(self._layout, Geometry(owner)).deallocate(slots)

    def _free_slots(self, count: int) -> list[int]:
        query = (
            "SELECT group_concat(slot) FROM"
            " (SELECT slot FROM free WHERE space = ? ORDER BY slot LIMIT ?)"
        )
        (text,) = self._db.execute(query, (self._space, count)).fetchone()
        return sorted(map(int, text.split(","))) if text else []

    def _grow(self, missing: int) -> None:
        query = "SELECT allocated FROM spaces WHERE space = ?"
        (before,) = self._db.execute(query, (self._space,)).fetchone()
        after = self._files.grow(before, missing, self._most_slots())
        _insert_rows(
            self._db, "INSERT INTO free", [(self._space, slot) for slot in range(before, after)]
        )
        self._db.execute("UPDATE spaces SET allocated = ? WHERE space = ?", (after, self._space))
        if after > before:
            self.has_extended = keep_free_pages(self._db)
