"""The index of one host, in an embedded SQLite file."""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from hicache_backends.hf3fs.index import sqlite_rows as rows
from hicache_backends.hf3fs.index.base import Index, View
from hicache_backends.hf3fs.index.sqlite_database import Database
from hicache_backends.hf3fs.index.sqlite_reservation import Reservation, collect_dead
from hicache_backends.hf3fs.slot_files import SlotFiles
from hicache_backends.hf3fs.slots import Geometry
from hicache_backends.hf3fs.writer import written_ns
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.errors import HiCacheError

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

    from hicache_backends.hf3fs.index.base import Entry, Limits
    from hicache_backends.hf3fs.index.sqlite_session import Session
    from hicache_backends.hf3fs.layout import Layout
    from hicache_backends.hf3fs.slots import Place
    from hicache_backends.hf3fs.writer import Writer

_STEP = 500
_PAGES_BEHIND = (
    "SELECT page_hash, slot FROM pages WHERE space = ? AND page_hash > ? ORDER BY page_hash LIMIT ?"
)
_FREE_BEHIND = "SELECT slot FROM free WHERE space = ? AND slot > ? ORDER BY slot LIMIT ?"


class SqliteIndex(Index):
    """Shared by the processes of one host, through SQLite's own locks."""

    def __init__(self, layout: Layout, limits: Limits, writer: Writer, timeout_s: float) -> None:
        self._layout = layout
        self._limits = limits
        self._writer = writer
        self._timeout_s = timeout_s
        self._unsettled: list[tuple[bytes, Place]] = []
        """Slots that could not be settled when they should have been."""
        self._unsettled_lock = threading.Lock()
        deadline = Deadline(timeout_s)
        self._database = Database(layout, deadline, self._fill)
        deadline = Deadline(timeout_s)  # it may have taken long
        try:
            with (
                suppress(HiCacheError),
                self._database.held(deadline),
                self._database.transaction(deadline) as db,
            ):
                collect_dead(db, layout, writer)
                self._note_use(db)
        except BaseException:
            self._database.close()
            raise

    @contextmanager
    def view(self, files: SlotFiles, deadline: Deadline) -> Generator[View, None, None]:
        with self._database.session(deadline) as session:
            yield _SqliteView(session, rows.id_of(files), deadline)

    @contextmanager
    def writing(self, files: SlotFiles, deadline: Deadline) -> Generator[View, None, None]:
        with (
            self._database.held(deadline),
            self._database.session(deadline, make=False) as session,
        ):
            yield _SqliteView(session, rows.id_of(files), deadline)

    def reserve(self, files: SlotFiles, count: int, deadline: Deadline) -> list[Place]:
        with self._unsettled_lock:
            unsettled, self._unsettled = self._unsettled, []
        try:
            with self._database.transaction(deadline) as db:
                _free_reserved(db, unsettled)
                reservation = Reservation(db, files, self._limits, self._writer, self._layout)
                places = reservation.taken(count)
                self._note_use(db)
        except BaseException:
            self._left_unsettled(unsettled)
            raise
        self.evicted += reservation.evicted
        return places

    def settle(
        self,
        files: SlotFiles,
        entries: Sequence[Entry],
        unused: Sequence[Place],
        deadline: Deadline,
    ) -> None:
        space = rows.id_of(files)
        places = [entry.place for entry in entries] + list(unused)
        try:
            with self._database.transaction(deadline) as db:
                rows.end_reservations(db, space, places)
                second = [place.slot for place in rows.insert(db, space, entries)]
                if second:
                    files.spoil(second)
                rows.free(db, space, [*second, *(place.slot for place in unused)])
                self._note_use(db)
        except BaseException:
            self._left_unsettled([(space, place) for place in places])
            raise

    def reclaim(self, space_id: str, places: Sequence[Place]) -> None:
        self._left_unsettled([(bytes.fromhex(space_id), place) for place in places])

    def forget(self, files: SlotFiles, wrong: Mapping[str, Place], deadline: Deadline) -> None:
        space = rows.id_of(files)
        with self._database.transaction(deadline) as db:
            gone = [
                place.slot
                for page_hash, place in wrong.items()
                if db.execute(
                    "DELETE FROM pages WHERE space = ? AND page_hash = ? AND stamp = ?",
                    (space, bytes.fromhex(page_hash), place.stamp),
                ).rowcount
            ]
            rows.free(db, space, gone)

    def delete(self, files: SlotFiles, hashes: Sequence[str], deadline: Deadline) -> None:
        space = rows.id_of(files)
        with self._database.transaction(deadline) as db:
            places = rows.find(db, space, hashes)
            files.spoil([place.slot for place in places.values()])
            rows.remove(db, space, [bytes.fromhex(page_hash) for page_hash in places])
            rows.free(db, space, [place.slot for place in places.values()])
            self._note_use(db)

    def clear(self, files: SlotFiles) -> int:
        """Remove pages in the order of their hashes, so that all that were there at the beginning go."""
        space, last, removed = rows.id_of(files), b"", 0
        while True:
            with self._database.transaction(Deadline(self._timeout_s)) as db:
                found = db.execute(_PAGES_BEHIND, (space, last, _STEP)).fetchall()
                rows.remove(db, space, [row[0] for row in found])
                rows.free(db, space, [row[1] for row in found])
                files.give_back([row[1] for row in found])
                self._note_use(db)
            removed += len(found)
            if len(found) < _STEP:
                break
            last = found[-1][0]
        self._give_free_slots_back(files, space)
        return removed

    def touch(self, used: Mapping[tuple[str, str], int], deadline: Deadline) -> None:
        touched = [
            (used_ns, bytes.fromhex(space_id), bytes.fromhex(page_hash), used_ns)
            for (space_id, page_hash), used_ns in used.items()
        ]
        query = "UPDATE pages SET used_ns = ? WHERE space = ? AND page_hash = ? AND used_ns < ?"
        with self._database.transaction(deadline) as db:
            db.executemany(query, touched)

    def pages(self, files: SlotFiles) -> Iterator[str]:
        space, last = rows.id_of(files), b""
        while True:
            deadline = Deadline(self._timeout_s)
            with (
                self._database.session(deadline) as session,
                session.step(deadline) as connection,
            ):
                found = connection.execute(_PAGES_BEHIND, (space, last, _STEP)).fetchall()
            yield from (row[0].hex() for row in found)
            if len(found) < _STEP:
                return
            last = found[-1][0]

    def close(self) -> None:
        self._database.close()

    # --- parts ---------------------------------------------------------------------------------------

    def _left_unsettled(self, places: Sequence[tuple[bytes, Place]]) -> None:
        with self._unsettled_lock:
            self._unsettled += places

    def _give_free_slots_back(self, files: SlotFiles, space: bytes) -> None:
        last = -1
        while True:
            with self._database.transaction(Deadline(self._timeout_s)) as db:
                found = db.execute(_FREE_BEHIND, (space, last, _STEP)).fetchall()
                files.give_back([row[0] for row in found])
            if len(found) < _STEP:
                return
            last = found[-1][0]

    def _note_use(self, db: sqlite3.Connection) -> None:
        self.used_nbytes = rows.used_nbytes(db)

    def _fill(self, db: sqlite3.Connection, at_work: Callable[[], None]) -> None:
        """Make the index of what the slots say."""
        for space in self._layout.key_spaces():
            files = SlotFiles(self._layout, Geometry(space))
            rows.register(db, files)
            self._fill_space(db, files, at_work)

    def _fill_space(
        self, db: sqlite3.Connection, files: SlotFiles, at_work: Callable[[], None]
    ) -> None:
        space, allocated = rows.id_of(files), files.allocated()
        places = files.newest(at_work)
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
    def __init__(self, session: Session, space: bytes, deadline: Deadline) -> None:
        self._session = session
        self._space = space
        self._deadline = deadline
        self._seen: tuple[int, int] | None = None

    def find(self, hashes: Sequence[str]) -> dict[str, Place]:
        with self._session.step(self._deadline) as connection:
            self._seen = self._state(connection)
            return rows.find(connection, self._space, hashes)

    def still(self, places: Mapping[str, Place], deadline: Deadline) -> set[str]:
        if not self._session.is_current():
            return set()
        with self._session.step(deadline) as connection:
            if self._state(connection) == self._seen:
                return set(places)
            now = rows.find(connection, self._space, list(places))
        return {page_hash for page_hash, place in places.items() if now.get(page_hash) == place}

    def _state(self, connection: sqlite3.Connection) -> tuple[int, int]:
        """Return what changes when another connection changes the file, or this one is another."""
        (version,) = connection.execute("PRAGMA data_version").fetchone()
        return self._session.openings, int(version)


def _free_reserved(db: sqlite3.Connection, reserved: Iterable[tuple[bytes, Place]]) -> None:
    """End reservations that are still there."""
    query = "DELETE FROM reserved WHERE space = ? AND slot = ? AND stamp = ?"
    for space, place in reserved:
        if db.execute(query, (space, *place)).rowcount:
            rows.free(db, space, [place.slot])
