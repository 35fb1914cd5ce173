"""The SQLite file of an index: its connections, and how it is made anew where it is lost.

A file that is missing or unusable is made from the slots' marks, and then named by `index.sqlite`, a
symbolic link. Until that is done no call writes to a slot: calls that do hold `lock` shared, who makes
an index holds it alone. A connection whose file is not the one that is named any more is closed by the
next call. No name is used twice: SQLite's last act on a file is to unlink its log by name, and that
could be another's.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING
from urllib.parse import quote

from hicache_storage.errors import HiCacheError, StorageTimeout, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from hicache_backends.hf3fs._layout import Layout

logger = logging.getLogger(__name__)

VERSION = 1
_SCHEMA = f"""
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
_POLL_S = 0.01
_LOG_PAGES = 2000  # 8 MiB: what is in it is synced and copied once
_BROKEN = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
# A connection that finds its file replaced tries again; it is made anew once, not for ever.
_ATTEMPTS = 3


class Session:
    """One connection, used by one call at a time."""

    def __init__(self, layout: Layout, timeout_s: float) -> None:
        self._path = layout.index
        self._identity = _identity(layout.index)
        if self._identity is None:
            raise FileNotFoundError(layout.index)
        self.connection = sqlite3.connect(
            f"file:{quote(os.path.realpath(layout.index))}?mode=rw",
            uri=True,
            timeout=timeout_s,
            isolation_level=None,
            check_same_thread=False,
        )

    def is_current(self) -> bool:
        """Whether the file is still the one that it was opened as."""
        return self._identity == _identity(self._path)

    def is_usable(self) -> bool:
        """Whether it is an index of this version."""
        self.connection.execute(f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}")
        self.connection.execute("PRAGMA synchronous = NORMAL")
        (version,) = self.connection.execute("PRAGMA user_version").fetchone()
        return bool(version == VERSION)

    def close(self) -> None:
        with suppress(sqlite3.Error):
            self.connection.close()


class Database:
    """Connections to the index of one root. Thread-safe; belongs to the process that made it."""

    def __init__(
        self, layout: Layout, timeout_s: float, fill: Callable[[sqlite3.Connection], None]
    ) -> None:
        self._layout = layout
        self._timeout_s = timeout_s
        self._fill = fill
        self._idle: list[Session] = []
        self._writing = threading.Lock()
        self._closed = False
        with self.session():
            pass

    @contextmanager
    def session(self, *, make: bool = True) -> Generator[Session, None, None]:
        """A connection for one call; without `make` only where there is a file."""
        session = self._taken(make=make)
        try:
            with self._translated(session):
                yield session
        finally:
            if self._closed:
                session.close()
            else:
                self._idle.append(session)

    @contextmanager
    def transaction(self) -> Generator[sqlite3.Connection, None, None]:
        """A connection in a transaction that may write."""
        with self.session(make=False) as session, self._turn():
            connection = session.connection
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            if not session.is_current():
                raise self._replaced()

    @contextmanager
    def held(self) -> Generator[None, None, None]:
        """Hold off whoever would make the index anew."""
        for _ in range(_ATTEMPTS):
            with self._locked(fcntl.LOCK_SH, self._timeout_s):
                if _identity(self._layout.index) is not None:
                    yield
                    return
            with self.session():
                pass
        raise self._replaced()

    def close(self) -> None:
        """Close what no call is using; calls close what they use when they end."""
        self._closed = True
        while (session := self._popped()) is not None:
            session.close()

    def abandon(self) -> None:
        """Leave the connections to the process that forked this one: SQLite's must not be touched."""
        _inherited.extend(self._idle)
        self._idle = []

    def _taken(self, *, make: bool) -> Session:
        for _ in range(_ATTEMPTS):
            session = self._opened()
            if session is not None:
                return session
            if not make:
                break
            self._make()
        raise self._replaced()

    def _opened(self) -> Session | None:
        """A connection to the file that is there now; None where it must be made."""
        while (session := self._popped()) is not None:
            if session.is_current():
                return session
            session.close()
        try:
            session = Session(self._layout, self._timeout_s)
        except FileNotFoundError:
            return None
        except (OSError, sqlite3.Error) as error:
            raise self._unavailable(error) from error
        try:
            with self._translated(session):
                if session.is_usable():
                    return session
                self._discard(session, f"no index of version {VERSION}")
        except HiCacheError:
            session.close()
            if _identity(self._layout.index) is None:
                return None
            raise
        session.close()
        return None

    def _popped(self) -> Session | None:
        """A connection that no call is using."""
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _make(self) -> None:
        """Make the file, unless somebody else has."""
        with self._locked(fcntl.LOCK_EX, self._timeout_s):
            if _identity(self._layout.index) is not None:
                return
            try:
                self._layout.remove_indexes()
                name = self._layout.new_index()
                connection = sqlite3.connect(name, isolation_level=None)
                try:
                    connection.executescript(_SCHEMA)
                    connection.execute("BEGIN")
                    self._fill(connection)
                    connection.execute("COMMIT")
                finally:
                    connection.close()
                self._layout.name_index(name)
            except (OSError, sqlite3.Error) as error:
                raise self._unavailable(error) from error

    def _discard(self, session: Session, reason: str) -> None:
        """Remove a file that is of no use; the next call makes it anew."""
        with self._locked(fcntl.LOCK_EX, 0.0):
            if session.is_current():
                logger.warning("%s is %s: it is made anew", self._layout.index, reason)
                self._layout.remove_indexes()

    @contextmanager
    def _turn(self) -> Generator[None, None, None]:
        """One writer of this process at a time: SQLite would let the others poll."""
        if not self._writing.acquire(timeout=self._timeout_s):
            raise StorageTimeout(f"hf3fs: the index was busy for {self._timeout_s} s")
        try:
            yield
        finally:
            self._writing.release()

    @contextmanager
    def _locked(self, kind: int, patience_s: float) -> Generator[None, None, None]:
        try:
            descriptor = os.open(self._layout.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise self._unavailable(error) from error
        try:
            self._await_lock(descriptor, kind, patience_s)
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child may have been forked: it has a copy
            os.close(descriptor)

    def _await_lock(self, descriptor: int, kind: int, patience_s: float) -> None:
        deadline_s = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise StorageTimeout(
                        f"hf3fs: {self._layout.lock} was held for {patience_s} s: the index is"
                        " being made anew, or a call that writes hangs"
                    ) from None
                time.sleep(_POLL_S)
            else:
                return

    @contextmanager
    def _translated(self, session: Session) -> Generator[None, None, None]:
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise StorageTimeout(
                    f"hf3fs: {self._layout.index} was locked for {self._timeout_s} s"
                ) from error
            if code in _BROKEN and session.is_current():
                with suppress(StorageTimeout, StorageUnavailable):
                    self._discard(session, "damaged")
            raise self._unavailable(error) from error
        except OSError as error:
            if isinstance(error, HiCacheError):
                raise
            raise self._unavailable(error) from error

    def _replaced(self) -> StorageUnavailable:
        return StorageUnavailable(
            f"hf3fs: {self._layout.index} was removed or replaced meanwhile: try again"
        )

    def _unavailable(self, error: Exception) -> StorageUnavailable:
        reason = getattr(error, "strerror", None) or str(error)
        return StorageUnavailable(f"hf3fs: {self._layout.index} cannot be used: {reason}")


def _identity(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


_inherited: list[Session] = []
