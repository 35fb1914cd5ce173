"""The index of one host, in an embedded SQLite file."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from hicache_backends.hf3fs import _rows as rows
from hicache_backends.hf3fs._database import Database
from hicache_backends.hf3fs._index import Index, View
from hicache_backends.hf3fs._reservation import Reservation, collect_dead
from hicache_backends.hf3fs._slot import Geometry
from hicache_backends.hf3fs._slot_files import SlotFiles
from hicache_backends.hf3fs._writer import written_ns
from hicache_storage.errors import HiCacheError

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence

    from hicache_backends.hf3fs._database import Session
    from hicache_backends.hf3fs._index import Entry, Limits
    from hicache_backends.hf3fs._layout import Layout
    from hicache_backends.hf3fs._slot import Place
    from hicache_backends.hf3fs._writer import Writer

_STEP = 500


class SqliteIndex(Index):
    """Shared by the processes of one host, through SQLite's own locks."""

    def __init__(self, layout: Layout, limits: Limits, writer: Writer, timeout_s: float) -> None:
        self._layout = layout
        self._limits = limits
        self._writer = writer
        self._unsettled: list[tuple[bytes, Place]] = []
        """Slots that could not be settled when they should have been."""
        self._database = Database(layout, timeout_s, self._fill)
        with suppress(HiCacheError), self._database.held(), self._database.transaction() as db:
            collect_dead(db, layout, writer)

    @contextmanager
    def view(self, files: SlotFiles) -> Generator[View, None, None]:
        with self._database.session() as session:
            yield _SqliteView(session, rows.id_of(files))

    @contextmanager
    def writing(self, files: SlotFiles) -> Generator[View, None, None]:
        with self._database.held(), self._database.session(make=False) as session:
            yield _SqliteView(session, rows.id_of(files))

    def reserve(self, files: SlotFiles, count: int) -> list[Place]:
        unsettled = tuple(self._unsettled)
        with self._database.transaction() as db:
            _free_reserved(db, unsettled)
            reservation = Reservation(db, files, self._limits, self._writer, self._layout)
            places = reservation.taken(count)
            self.evicted += reservation.evicted
            self._note_use(db)
        self._unsettled = [each for each in self._unsettled if each not in unsettled]
        return places

    def settle(self, files: SlotFiles, entries: Sequence[Entry], unused: Sequence[Place]) -> None:
        space = rows.id_of(files)
        places = [entry.place for entry in entries] + list(unused)
        try:
            with self._database.transaction() as db:
                rows.end_reservations(db, space, places)
                second = [place.slot for place in rows.insert(db, space, entries)]
                if second:
                    files.spoil(second)
                rows.free(db, space, [*second, *(place.slot for place in unused)])
                self._note_use(db)
        except BaseException:
            self._unsettled += [(space, place) for place in places]
            raise

    def forget(self, files: SlotFiles, wrong: Mapping[str, Place]) -> None:
        space = rows.id_of(files)
        with self._database.transaction() as db:
            gone = [
                place.slot
                for page_hash, place in wrong.items()
                if db.execute(
                    "DELETE FROM pages WHERE space = ? AND page_hash = ? AND stamp = ?",
                    (space, bytes.fromhex(page_hash), place.stamp),
                ).rowcount
            ]
            rows.free(db, space, gone)

    def delete(self, files: SlotFiles, hashes: Sequence[str]) -> None:
        space = rows.id_of(files)
        with self._database.transaction() as db:
            places = rows.find(db, space, hashes)
            files.spoil([place.slot for place in places.values()])
            db.executemany(
                "DELETE FROM pages WHERE space = ? AND page_hash = ?",
                [(space, bytes.fromhex(page_hash)) for page_hash in places],
            )
            rows.free(db, space, [place.slot for place in places.values()])
            self._note_use(db)

    def clear(self, files: SlotFiles) -> int:
        space = rows.id_of(files)
        with self._database.transaction() as db:
            slots = [
                row[0] for row in db.execute("SELECT slot FROM pages WHERE space = ?", (space,))
            ]
            db.execute("DELETE FROM pages WHERE space = ?", (space,))
            rows.free(db, space, slots)
            query = "SELECT slot FROM free WHERE space = ? ORDER BY slot"
            files.give_back([row[0] for row in db.execute(query, (space,))])
            self._note_use(db)
        return len(slots)

    def touch(self, used: Mapping[tuple[str, str], int]) -> None:
        touched = [
            (used_ns, bytes.fromhex(space_id), bytes.fromhex(page_hash), used_ns)
            for (space_id, page_hash), used_ns in used.items()
        ]
        query = "UPDATE pages SET used_ns = ? WHERE space = ? AND page_hash = ? AND used_ns < ?"
        with self._database.transaction() as db:
            db.executemany(query, touched)

    def pages(self, files: SlotFiles) -> Iterator[str]:
        space, last = rows.id_of(files), b""
        query = "SELECT page_hash FROM pages WHERE space = ? AND page_hash > ? ORDER BY 1 LIMIT ?"
        while True:
            with self._database.session() as session:
                found = session.connection.execute(query, (space, last, _STEP)).fetchall()
            yield from (row[0].hex() for row in found)
            if len(found) < _STEP:
                return
            last = found[-1][0]

    def close(self) -> None:
        self._database.close()

    def abandon(self) -> None:
        self._database.abandon()

    # --- parts ---------------------------------------------------------------------------------------

    def _note_use(self, db: sqlite3.Connection) -> None:
        self.used_nbytes = rows.used_nbytes(db)

    def _fill(self, db: sqlite3.Connection) -> None:
        """Make the index of what the slots say."""
        for space in self._layout.key_spaces():
            files = SlotFiles(self._layout, Geometry(space))
            rows.register(db, files)
            self._fill_space(db, files)

    def _fill_space(self, db: sqlite3.Connection, files: SlotFiles) -> None:
        space, allocated = rows.id_of(files), files.allocated()
        places = files.newest()
        db.executemany(
            "INSERT INTO pages VALUES (?, ?, ?, ?, ?)",
            [
                (space, bytes.fromhex(h), *place, written_ns(place.stamp))
                for h, place in places.items()
            ],
        )
        taken = {place.slot for place in places.values()}
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
        return rows.find(self._session.connection, self._space, hashes)

    def still(self, places: Mapping[str, Place]) -> set[str]:
        if not self._session.is_current():
            return set()
        if _data_version(self._session) == self._version:
            return set(places)
        now = self.find(list(places))
        return {page_hash for page_hash, place in places.items() if now.get(page_hash) == place}


def _free_reserved(db: sqlite3.Connection, reserved: Iterable[tuple[bytes, Place]]) -> None:
    """End reservations that are still there."""
    query = "DELETE FROM reserved WHERE space = ? AND slot = ? AND stamp = ?"
    for space, place in reserved:
        if db.execute(query, (space, *place)).rowcount:
            rows.free(db, space, [place.slot])


def _data_version(session: Session) -> int:
    """Changes when another connection changes the file."""
    return int(session.connection.execute("PRAGMA data_version").fetchone()[0])
