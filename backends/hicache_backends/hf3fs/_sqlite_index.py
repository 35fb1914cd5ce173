"""The index of one host, in an embedded SQLite file."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hicache_backends.hf3fs._database import Database
from hicache_backends.hf3fs._index import Index, View
from hicache_backends.hf3fs._slot import Geometry, Place
from hicache_backends.hf3fs._slot_files import SlotFiles
from hicache_backends.hf3fs._writer import is_dead, writer_of, written_ns
from hicache_storage.errors import StorageUnavailable

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from hicache_backends.hf3fs._database import Session
    from hicache_backends.hf3fs._index import Entry, Limits
    from hicache_backends.hf3fs._layout import Layout
    from hicache_backends.hf3fs._writer import Writer

logger = logging.getLogger(__name__)

_STEP = 500
# What is evicted at once beyond what is needed: a set waits for it.
_EVICTED_AHEAD = 1000


class SqliteIndex(Index):
    """Shared by the processes of one host, through SQLite's own locks."""

    def __init__(self, layout: Layout, limits: Limits, writer: Writer, timeout_s: float) -> None:
        self._layout = layout
        self._limits = limits
        self._writer = writer
        self._unsettled: list[tuple[bytes, Place]] = []
        self._database = Database(layout, timeout_s, self._fill)

    @contextmanager
    def view(self, files: SlotFiles) -> Generator[View, None, None]:
        with self._database.session() as session:
            yield _SqliteView(session, _id(files))

    @contextmanager
    def writing(self) -> Generator[None, None, None]:
        with self._database.held():
            yield

    def reserve(self, files: SlotFiles, count: int) -> list[Place]:
        with self._database.transaction() as db:
            self._free_unsettled(db)
            return _Reservation(db, files, self._limits, self._writer, self._layout).taken(
                self, count
            )

    def settle(self, files: SlotFiles, entries: Sequence[Entry], unused: Sequence[Place]) -> None:
        space = _id(files)
        places = [entry.place for entry in entries] + list(unused)
        try:
            with self._database.transaction() as db:
                _must_be_ours(db, space, places)
                second = [entry.place.slot for entry in entries if not _insert(db, space, entry)]
                if second:
                    files.spoil(second)
                _free(db, space, [*second, *(place.slot for place in unused)])
                self._note_use(db)
        except BaseException:
            self._unsettled += [(space, place) for place in places]
            raise

    def forget(self, files: SlotFiles, wrong: Mapping[str, Place]) -> None:
        space = _id(files)
        with self._database.transaction() as db:
            gone = [
                place.slot
                for page_hash, place in wrong.items()
                if db.execute(
                    "DELETE FROM pages WHERE space = ? AND page_hash = ? AND stamp = ?",
                    (space, bytes.fromhex(page_hash), place.stamp),
                ).rowcount
            ]
            _free(db, space, gone)

    def delete(self, files: SlotFiles, hashes: Sequence[str]) -> None:
        space = _id(files)
        with self._database.transaction() as db:
            places = _find(db, space, hashes)
            files.spoil([place.slot for place in places.values()])
            db.executemany(
                "DELETE FROM pages WHERE space = ? AND page_hash = ?",
                [(space, bytes.fromhex(page_hash)) for page_hash in places],
            )
            _free(db, space, [place.slot for place in places.values()])
            self._note_use(db)

    def clear(self, files: SlotFiles) -> int:
        space = _id(files)
        with self._database.transaction() as db:
            slots = [row[0] for row in db.execute("SELECT slot FROM pages WHERE space = ?", (space,))]
            db.execute("DELETE FROM pages WHERE space = ?", (space,))
            _free(db, space, slots)
            query = "SELECT slot FROM free WHERE space = ? ORDER BY slot"
            files.give_back([row[0] for row in db.execute(query, (space,))])
            self._note_use(db)
        return len(slots)

    def touch(self, used: Mapping[tuple[str, str], int]) -> None:
        rows = [
            (used_ns, bytes.fromhex(space_id), bytes.fromhex(page_hash), used_ns)
            for (space_id, page_hash), used_ns in used.items()
        ]
        with self._database.transaction() as db:
            db.executemany(
                "UPDATE pages SET used_ns = ? WHERE space = ? AND page_hash = ? AND used_ns < ?",
                rows,
            )

    def pages(self, files: SlotFiles) -> Iterator[str]:
        space, last = _id(files), b""
        query = (
            "SELECT page_hash FROM pages WHERE space = ? AND page_hash > ? ORDER BY page_hash LIMIT ?"
        )
        while True:
            with self._database.session() as session:
                rows = session.connection.execute(query, (space, last, _STEP)).fetchall()
            yield from (row[0].hex() for row in rows)
            if len(rows) < _STEP:
                return
            last = rows[-1][0]

    def close(self) -> None:
        self._database.close()

    def abandon(self) -> None:
        self._database.abandon()

    # --- parts ---------------------------------------------------------------------------------------

    def _free_unsettled(self, db: sqlite3.Connection) -> None:
        """Slots that could not be settled when they should have been."""
        unsettled, self._unsettled = self._unsettled, []
        for space, place in unsettled:
            query = "DELETE FROM reserved WHERE space = ? AND slot = ? AND stamp = ?"
            if db.execute(query, (space, *place)).rowcount:
                _free(db, space, [place.slot])

    def _note_use(self, db: sqlite3.Connection) -> None:
        self.used_nbytes = _used_nbytes(db)

    def _fill(self, db: sqlite3.Connection) -> None:
        """Make the index of what the slots say."""
        for space in self._layout.key_spaces():
            files = SlotFiles(self._layout, Geometry(space))
            _register(db, files)
            self._fill_space(db, files)

    def _fill_space(self, db: sqlite3.Connection, files: SlotFiles) -> None:
        space, allocated = _id(files), files.allocated()
        newest: dict[str, Place] = {}
        for slot, found in files.pages():
            place = newest.get(found.page_hash)
            if place is None or place.stamp < found.stamp:
                newest[found.page_hash] = Place(slot, found.stamp)
        db.executemany(
            "INSERT INTO pages VALUES (?, ?, ?, ?, ?)",
            [
                (space, bytes.fromhex(h), place.slot, place.stamp, written_ns(place.stamp))
                for h, place in newest.items()
            ],
        )
        taken = {place.slot for place in newest.values()}
        db.executemany(
            "INSERT INTO free VALUES (?, ?)",
            ((space, slot) for slot in range(allocated) if slot not in taken),
        )
        db.execute(
            "UPDATE spaces SET allocated = ?, taken = ? WHERE space = ?",
            (allocated, len(taken), space),
        )


class _SqliteView(View):
    def __init__(self, session: Session, space: bytes) -> None:
        self._session = session
        self._space = space
        self._version = _data_version(session)

    def find(self, hashes: Sequence[str]) -> dict[str, Place]:
        return _find(self._session.connection, self._space, hashes)

    def still(self, places: Mapping[str, Place]) -> set[str]:
        if not self._session.is_current():
            return set()
        if _data_version(self._session) == self._version:
            return set(places)
        now = self.find(list(places))
        return {page_hash for page_hash, place in places.items() if now.get(page_hash) == place}


class _Reservation:
    """The slots that one set asks for, in one transaction."""

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
        self._space = _id(files)
        self._limits = limits
        self._writer = writer
        self._layout = layout
        self._slot_nbytes = files.geometry.slot_nbytes

    def taken(self, index: SqliteIndex, count: int) -> list[Place]:
        db, space = self._db, self._space
        _register(db, self._files)
        count = self._with_room(index, count)
        slots = self._free(count)
        if len(slots) < count and self._collect_dead():
            slots = self._free(count)
        if len(slots) < count:
            self._grow(count - len(slots))
            slots = self._free(count)
        if len(slots) < count and self._limits.capacity_nbytes is not None:
            index.evicted += self._evict((count - len(slots)) * self._slot_nbytes, own=True)
            slots = self._free(count)
        places = [Place(slot, self._writer.stamp()) for slot in slots]
        db.executemany(
            "DELETE FROM free WHERE space = ? AND slot = ?", [(space, slot) for slot in slots]
        )
        db.executemany(
            "INSERT INTO reserved VALUES (?, ?, ?)", [(space, *place) for place in places]
        )
        db.execute("UPDATE spaces SET taken = taken + ? WHERE space = ?", (len(slots), space))
        index.used_nbytes = _used_nbytes(db)
        return places

    def _with_room(self, index: SqliteIndex, count: int) -> int:
        """Evict what must go for `count` more slots; how many there is room for then."""
        wanted_nbytes = count * self._slot_nbytes
        if self._limits.to_evict(_used_nbytes(self._db), wanted_nbytes):
            self._collect_dead()
        surplus = self._limits.to_evict(_used_nbytes(self._db), wanted_nbytes)
        if surplus:
            index.evicted += self._evict(surplus, ahead=count + _EVICTED_AHEAD)
        room = self._limits.room(_used_nbytes(self._db))
        return count if room is None else min(count, room // self._slot_nbytes)

    def _evict(self, nbytes: int, *, ahead: int | None = None, own: bool = False) -> int:
        """Remove the least recently used pages, until so many bytes are free; how many pages."""
        victims: dict[bytes, list[tuple[bytes, int]]] = {}
        query = (
            "SELECT space, page_hash, slot, slot_nbytes FROM pages JOIN spaces USING (space)"
            f" {'WHERE space = ?' if own else ''} ORDER BY used_ns LIMIT ?"
        )
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
        self._db.executemany(
            "DELETE FROM pages WHERE space = ? AND page_hash = ?",
            [(space, page_hash) for page_hash, _ in pages],
        )
        slots = [slot for _, slot in pages]
        _free(self._db, space, slots)
        if space != self._space:
            owner = self._layout.key_space(space.hex())
            if owner is not None:
                SlotFiles(self._layout, Geometry(owner)).give_back(slots)

    def _free(self, count: int) -> list[int]:
        query = "SELECT slot FROM free WHERE space = ? ORDER BY slot LIMIT ?"
        return [row[0] for row in self._db.execute(query, (self._space, count))]

    def _grow(self, missing: int) -> None:
        query = "SELECT allocated FROM spaces WHERE space = ?"
        (before,) = self._db.execute(query, (self._space,)).fetchone()
        room = self._limits.room(_used_nbytes(self._db))
        most = None if room is None else room // self._slot_nbytes
        after = self._files.grow(before, missing, most)
        self._db.executemany(
            "INSERT INTO free VALUES (?, ?)", [(self._space, slot) for slot in range(before, after)]
        )
        self._db.execute("UPDATE spaces SET allocated = ? WHERE space = ?", (after, self._space))

    def _collect_dead(self) -> bool:
        """Free what writers had reserved that have died; whether there were any."""
        rows = self._db.execute("SELECT space, slot, stamp FROM reserved").fetchall()
        dead = {
            writer
            for writer in {writer_of(stamp) for _, _, stamp in rows} - {self._writer.token}
            if is_dead(self._layout.writers, writer)
        }
        for space, slot, stamp in rows:
            if writer_of(stamp) in dead:
                query = "DELETE FROM reserved WHERE space = ? AND slot = ?"
                self._db.execute(query, (space, slot))
                _free(self._db, space, [slot])
        return bool(dead)


def _id(files: SlotFiles) -> bytes:
    return bytes.fromhex(files.geometry.space.id)


def _register(db: sqlite3.Connection, files: SlotFiles) -> None:
    """Give a key space its row."""
    db.execute(
        "INSERT OR IGNORE INTO spaces VALUES (?, ?, 0, 0)", (_id(files), files.geometry.slot_nbytes)
    )


def _find(db: sqlite3.Connection, space: bytes, hashes: Sequence[str]) -> dict[str, Place]:
    found: dict[str, Place] = {}
    for start in range(0, len(hashes), _STEP):
        part = [bytes.fromhex(page_hash) for page_hash in hashes[start : start + _STEP]]
        query = (
            "SELECT page_hash, slot, stamp FROM pages WHERE space = ? AND page_hash IN"
            f" ({','.join('?' * len(part))})"
        )
        for page_hash, slot, stamp in db.execute(query, (space, *part)):
            found[page_hash.hex()] = Place(slot, stamp)
    return found


def _insert(db: sqlite3.Connection, space: bytes, entry: Entry) -> bool:
    """Whether there was no such page yet."""
    row = (space, bytes.fromhex(entry.page_hash), *entry.place, entry.used_ns)
    return db.execute("INSERT OR IGNORE INTO pages VALUES (?, ?, ?, ?, ?)", row).rowcount == 1


def _must_be_ours(db: sqlite3.Connection, space: bytes, places: Sequence[Place]) -> None:
    """End reservations.

    Raises:
        StorageUnavailable: They had ended; that is what another index does not know.
    """
    query = "DELETE FROM reserved WHERE space = ? AND slot = ? AND stamp = ?"
    for place in places:
        if not db.execute(query, (space, *place)).rowcount:
            raise StorageUnavailable(
                "hf3fs: the index does not know of a slot that was reserved: it was replaced"
            )


def _free(db: sqlite3.Connection, space: bytes, slots: Sequence[int]) -> None:
    """Slots that a page or a writer had are nobody's."""
    rows = [(space, slot) for slot in slots]
    db.executemany("INSERT INTO free VALUES (?, ?)", rows)
    db.execute("UPDATE spaces SET taken = taken - ? WHERE space = ?", (len(rows), space))


def _used_nbytes(db: sqlite3.Connection) -> int:
    (nbytes,) = db.execute("SELECT coalesce(sum(taken * slot_nbytes), 0) FROM spaces").fetchone()
    return int(nbytes)


def _data_version(session: Session) -> int:
    """Changes when another connection changes the file."""
    return int(session.connection.execute("PRAGMA data_version").fetchone()[0])

