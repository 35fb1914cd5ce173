"""The index for one host, in an embedded SQLite file."""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from hicache_backends.hf3fs.index import sqlite_tables as tables
from hicache_backends.hf3fs.index.base import Index
from hicache_backends.hf3fs.index.sqlite_database import Database, NoSpaceForIndex
from hicache_backends.hf3fs.index.sqlite_reader import PAGES_AFTER, SqliteReader, SqliteView
from hicache_backends.hf3fs.layout import Geometry, Place, written_ns
from hicache_backends.hf3fs.slot_files import SlotFiles
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.errors import HiCacheError, StorageUnavailable

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

    from hicache_backends.hf3fs.index.base import Entry, Limits, View
    from hicache_backends.hf3fs.layout import Layout
    from hicache_backends.hf3fs.writer import Writer

_STEP = 500
_FREE_AFTER = "SELECT slot FROM free WHERE space = ? AND slot > ? ORDER BY slot LIMIT ?"


class SqliteIndex(SqliteReader, Index):
    """An index that the processes of one host share through SQLite's own locks."""

    def __init__(self, layout: Layout, limits: Limits, writer: Writer, timeout_s: float) -> None:
        self._layout = layout
        self._limits = limits
        self._writer = writer
        self._unsettled: list[tuple[bytes, Place]] = []
        """Reserved slots whose `settle` failed. The next `reserve` frees them."""
        self._unsettled_lock = threading.Lock()
        deadline = Deadline(timeout_s)
        self._database = Database(layout, deadline, self._fill)
        super().__init__(self._database, timeout_s)
        deadline = Deadline(timeout_s)  # making the database may have taken long
        try:
            with (
                suppress(HiCacheError),
                self._database.held(deadline),
                self._database.transaction(deadline) as db,
            ):
                tables.collect_dead(db, layout, writer)
                tables.keep_free_pages(db)
                self._update_used(db)
            self._checkpoint(deadline)
        except BaseException:
            self._database.close()
            raise

    @contextmanager
    def writing(self, files: SlotFiles, deadline: Deadline) -> Generator[View, None, None]:
        with (
            self._database.held(deadline),
            self._database.session(deadline, make=False) as session,
        ):
            yield SqliteView(session, tables.id_of(files), deadline)

    def reserve(self, files: SlotFiles, count: int, deadline: Deadline) -> list[Place]:
        try:
            return self._reserve(files, count, deadline)
        except NoSpaceForIndex:
            return []

    def settle(
        self,
        files: SlotFiles,
        entries: Sequence[Entry],
        unused: Sequence[Place],
        deadline: Deadline,
    ) -> None:
        space = tables.id_of(files)
        places = [entry.place for entry in entries] + list(unused)
        try:
            with self._database.transaction(deadline) as db:
                tables.end_reservations(db, space, places)
                if behind_ns := tables.behind_ns(db, (one.used_ns for one in entries)):
                    entries = [one._replace(used_ns=one.used_ns + behind_ns) for one in entries]
                doubles = [place.slot for place in tables.insert(db, space, entries)]
                if doubles:
                    files.invalidate(doubles)
                tables.free(db, space, [*doubles, *(place.slot for place in unused)])
                self._update_used(db)
        except BaseException:
            self._add_unsettled([(space, place) for place in places])
            raise

    def reclaim(self, space_id: str, places: Sequence[Place]) -> None:
        self._add_unsettled([(bytes.fromhex(space_id), place) for place in places])

    def forget(self, files: SlotFiles, wrong: Mapping[str, Place], deadline: Deadline) -> None:
        space = tables.id_of(files)
        with self._database.transaction(deadline) as db:
            gone = [
                place.slot
                for page_hash, place in wrong.items()
                if db.execute(
                    "DELETE FROM pages WHERE space = ? AND page_hash = ? AND stamp = ?",
                    (space, bytes.fromhex(page_hash), place.stamp),
                ).rowcount
            ]
            tables.free(db, space, gone)

    def delete(self, files: SlotFiles, hashes: Sequence[str], deadline: Deadline) -> None:
        space = tables.id_of(files)
        with self._database.transaction(deadline) as db:
            places = tables.find(db, space, hashes)
            files.invalidate([place.slot for place in places.values()])
            tables.remove(db, space, [bytes.fromhex(page_hash) for page_hash in places])
            tables.free(db, space, [place.slot for place in places.values()])
            self._update_used(db)

    def clear(self, files: SlotFiles) -> int:
        """Remove pages in order of hash, so that every page that existed at the start is removed.

        The slots of one step are far apart. They are deallocated at the end, in the order of the
        files.
        """
        space, last, removed = tables.id_of(files), b"", 0
        while True:
            with self._database.transaction(Deadline(self._timeout_s)) as db:
                found = db.execute(PAGES_AFTER, (space, last, _STEP)).fetchall()
                tables.remove(db, space, [row[0] for row in found])
                tables.free(db, space, [row[1] for row in found])
                files.invalidate([row[1] for row in found])
                self._update_used(db)
            removed += len(found)
            if len(found) < _STEP:
                break
            last = found[-1][0]
        self._deallocate_free_slots(files, space)
        return removed

    def touch(self, used: Mapping[tuple[str, str], int], deadline: Deadline) -> None:
        spaces: dict[bytes, list[tuple[bytes, int]]] = {}
        for (space_id, page_hash), used_ns in used.items():
            pages = spaces.setdefault(bytes.fromhex(space_id), [])
            pages.append((bytes.fromhex(page_hash), used_ns))
        with self._database.transaction(deadline) as db:
            behind_ns = tables.behind_ns(db, used.values())
            for space, pages in spaces.items():
                tables.touch(db, space, [(one, used_ns + behind_ns) for one, used_ns in pages])

    def drop(self, space_id: str, deadline: Deadline, *, keep_pages: bool) -> int:
        """Remove a key space while no other process can reserve a slot there."""
        left: StorageUnavailable | None = None
        with self._database.held(deadline), self._database.transaction(deadline) as db:
            tables.collect_dead(db, self._layout, self._writer)
            removed = tables.drop(db, bytes.fromhex(space_id), keep_pages=keep_pages)
            if removed is None:
                return 0
            try:
                self._layout.remove_slots(space_id)
                self._layout.remove_space_dir(space_id)
            except StorageUnavailable as error:
                left = error
            self._update_used(db)
        if left is not None:
            raise left
        return removed

    # --- parts ---------------------------------------------------------------------------------------

    def _reserve(self, files: SlotFiles, count: int, deadline: Deadline) -> list[Place]:
        with self._unsettled_lock:
            unsettled, self._unsettled = self._unsettled, []
        try:
            with self._database.transaction(deadline) as db:
                _free_reserved(db, unsettled)
                reservation = tables.Reservation(
                    db, files, self._limits, self._writer, self._layout
                )
                places = reservation.reserve(count)
                self._update_used(db)
        except BaseException:
            self._add_unsettled(unsettled)
            raise
        self.evicted += reservation.evicted
        if reservation.has_extended:
            self._checkpoint(deadline)
        return places

    def _checkpoint(self, deadline: Deadline) -> None:
        """Write the log to the file, so that the file has the blocks of its free pages."""
        with (
            suppress(HiCacheError),
            self._database.session(deadline, make=False) as session,
            session.step(deadline) as db,
        ):
            db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def _add_unsettled(self, places: Sequence[tuple[bytes, Place]]) -> None:
        with self._unsettled_lock:
            self._unsettled += places

    def _deallocate_free_slots(self, files: SlotFiles, space: bytes) -> None:
        last = -1
        while True:
            with self._database.transaction(Deadline(self._timeout_s)) as db:
                found = db.execute(_FREE_AFTER, (space, last, _STEP)).fetchall()
                files.deallocate([row[0] for row in found])
            if len(found) < _STEP:
                return
            last = found[-1][0]

    def _update_used(self, db: sqlite3.Connection) -> None:
        self.used_nbytes = tables.used_nbytes(db)

    def _fill(self, db: sqlite3.Connection, on_slot: Callable[[], None]) -> None:
        """Fill a new index from the marks of the slots. `on_slot` is called for each slot."""
        for space in self._layout.key_spaces(skip_unreadable=False):
            files = SlotFiles(self._layout, Geometry(space))
            tables.register(db, files)
            self._fill_space(db, files, on_slot)
        tables.keep_free_pages(db)

    def _fill_space(
        self, db: sqlite3.Connection, files: SlotFiles, on_slot: Callable[[], None]
    ) -> None:
        space, allocated = tables.id_of(files), files.allocated()
        places = files.newest(on_slot)
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


def _free_reserved(db: sqlite3.Connection, reserved: Iterable[tuple[bytes, Place]]) -> None:
    """End those reservations that still exist, and free their slots."""
    query = "DELETE FROM reserved WHERE space = ? AND slot = ? AND stamp = ?"
    for space, place in reserved:
        if db.execute(query, (space, *place)).rowcount:
            tables.free(db, space, [place.slot])
