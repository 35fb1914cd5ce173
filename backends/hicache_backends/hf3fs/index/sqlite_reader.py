"""The reading half of the index for one host, and a database for programs that only look."""

from __future__ import annotations

import os
import sqlite3
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from hicache_backends.hf3fs.index import sqlite_tables as tables
from hicache_backends.hf3fs.index.base import MOST_COUNTED, Figures, IndexReader, View
from hicache_backends.hf3fs.index.sqlite_session import BROKEN, Session, code_of, open_index
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.errors import HiCacheError, StorageTimeout, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet
    from contextlib import AbstractContextManager

    from hicache_backends.hf3fs.layout import Layout, Place
    from hicache_backends.hf3fs.slot_files import SlotFiles

_REBUILT = ", and will be rebuilt when an engine opens the store"
_STEP = 500
PAGES_AFTER = (
    "SELECT page_hash, slot FROM pages WHERE space = ? AND page_hash > ? ORDER BY page_hash LIMIT ?"
)
_FROM_FUTURE = "SELECT count(*) FROM (SELECT 1 FROM pages WHERE used_ns > ? LIMIT ?)"


class Sessions(Protocol):
    """A database that lends its connections."""

    def session(self, deadline: Deadline) -> AbstractContextManager[Session]:
        """Lend a connection to one call."""
        ...

    def close(self) -> None:
        """Close the connections."""


class SqliteReader(IndexReader):
    """An index that is read through connections of a database."""

    def __init__(self, database: Sessions, timeout_s: float) -> None:
        self._sessions = database
        self._timeout_s = timeout_s

    @contextmanager
    def view(self, files: SlotFiles, deadline: Deadline) -> Generator[View, None, None]:
        with self._sessions.session(deadline) as session:
            yield SqliteView(session, tables.id_of(files), deadline)

    def used_ns(
        self, files: SlotFiles, hashes: Sequence[str], deadline: Deadline
    ) -> dict[str, int]:
        with self._sessions.session(deadline) as session, session.step(deadline) as connection:
            return tables.used_ns(connection, tables.id_of(files), hashes)

    def pages(self, files: SlotFiles) -> Iterator[str]:
        space, last = tables.id_of(files), b""
        while True:
            deadline = Deadline(self._timeout_s)
            with (
                self._sessions.session(deadline) as session,
                session.step(deadline) as connection,
            ):
                found = connection.execute(PAGES_AFTER, (space, last, _STEP)).fetchall()
            yield from (row[0].hex() for row in found)
            if len(found) < _STEP:
                return
            last = found[-1][0]

    def figures(self, now_ns: int, deadline: Deadline) -> Figures:
        with self._sessions.session(deadline) as session, session.step(deadline) as connection:
            (from_future,) = connection.execute(_FROM_FUTURE, (now_ns, MOST_COUNTED)).fetchone()
            return Figures(tables.used_nbytes(connection), int(from_future))

    def close(self) -> None:
        self._sessions.close()


class SqliteView(View):
    """The index, as one connection sees it."""

    def __init__(self, session: Session, space: bytes, deadline: Deadline) -> None:
        self._session = session
        self._space = space
        self._deadline = deadline
        self._seen: tuple[int, int] | None = None

    def find(self, hashes: Sequence[str]) -> dict[str, Place]:
        with self._session.step(self._deadline) as connection:
            version, found = tables.find_at_version(connection, self._space, hashes)
            self._seen = self._session.openings, version
            return found

    def still(self, places: Mapping[str, Place], deadline: Deadline) -> AbstractSet[str]:
        if not self._session.is_current():
            return set()
        with self._session.step(deadline) as connection:
            if self._state(connection) == self._seen:
                return places.keys()
            now = tables.find(connection, self._space, list(places))
        return {page_hash for page_hash, place in places.items() if now.get(page_hash) == place}

    def _state(self, connection: sqlite3.Connection) -> tuple[int, int]:
        """Return values that change if another connection writes, or if the connection is new."""
        (version,) = connection.execute("PRAGMA data_version").fetchone()
        return self._session.openings, int(version)


class LookedAtDatabase:
    """The index file of a root, for calls that change nothing. It makes no file, not even a log."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    @contextmanager
    def session(self, deadline: Deadline) -> Generator[Session, None, None]:
        """Lend a new connection to one call.

        Raises:
            StorageUnavailable: There is no index, or an engine opened or closed it in the meantime and
                may have changed what was read.
        """
        try:
            session = _LookingSession(self._layout)
            try:
                if not session.is_usable(deadline):
                    raise self._unavailable(
                        f"it is not an index of version {tables.VERSION}{_REBUILT}"
                    )
                yield session
                if not session.is_current():
                    raise self._unavailable(
                        "an engine opened or replaced it during the call: try again"
                    )
            finally:
                session.close()
        except HiCacheError:
            raise
        except FileNotFoundError:
            raise self._unavailable(f"it is missing{_REBUILT}") from None
        except (OSError, sqlite3.Error) as error:
            if code_of(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise StorageTimeout(
                    f"hf3fs: {self._layout.index} was locked for {deadline.timeout_s:g} s"
                ) from error
            rebuilt = _REBUILT if code_of(error) in BROKEN else ""
            raise self._unavailable(f"{error}{rebuilt}") from error

    def close(self) -> None:
        """Do nothing: each call closes its own connection."""

    def _unavailable(self, reason: str) -> StorageUnavailable:
        return StorageUnavailable(f"hf3fs: {self._layout.index} cannot be read: {reason}")


class _LookingSession(Session):
    """A connection that only reads.

    An index that no process has open has no log. SQLite would make a log even for a reader, unless
    the file counts as immutable. Afterwards we check that no process has changed the file.
    """

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._log = f"{self._file}-wal"
        self._immutable = not os.path.exists(self._log)
        self._seen = _state_of(self._file)

    def is_current(self) -> bool:
        """Return True while the index's name leads to this file and the file is unchanged."""
        if not super().is_current():
            return False
        return not self._immutable or (
            not os.path.exists(self._log) and _state_of(self._file) == self._seen
        )

    def _open(self, timeout_s: float) -> sqlite3.Connection:
        # Open the shared memory of the log read-only, and do not make it if it is missing.
        mode = "immutable=1" if self._immutable else "readonly_shm=1"
        return open_index(self._file, f"ro&{mode}", timeout_s)

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Do nothing: only writes need preparation."""


def _state_of(path: str) -> tuple[int, int, int]:
    status = os.stat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns
