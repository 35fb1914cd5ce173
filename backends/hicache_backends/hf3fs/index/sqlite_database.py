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
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from hicache_backends.hf3fs.background import AT_OPEN_S, Background
from hicache_backends.hf3fs.fork_guard import FORKS
from hicache_backends.hf3fs.index.sqlite_session import VERSION, Session, identity_of
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.errors import HiCacheError, StorageTimeout, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from hicache_backends.hf3fs.layout import Layout

    AtWork: TypeAlias = Callable[[], None]

logger = logging.getLogger(__name__)

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
# So long SQLite waits for another process at once. Between two such waits a fork may happen.
_PATIENCE_S = 0.25
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_BROKEN = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
# A connection that finds its file replaced tries again; it is made anew once, not for ever.
_ATTEMPTS = 3
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class Database:
    """Connections to the index of one root. Thread-safe; belongs to the process that made it."""

    def __init__(
        self, layout: Layout, deadline: Deadline, fill: Callable[[sqlite3.Connection, AtWork], None]
    ) -> None:
        self._layout = layout
        self._fill = fill
        self._making = Background()
        self._idle: list[Session] = []
        self._idle_lock = threading.Lock()
        self._writing = threading.Lock()
        self._closed = False
        session = self._taken(deadline, Deadline(AT_OPEN_S), make=True)
        self._give_back(session)

    @contextmanager
    def session(self, deadline: Deadline, *, make: bool = True) -> Generator[Session, None, None]:
        """Lend a connection to one call; without `make` only where there is a file."""
        session = self._taken(deadline, deadline, make=make)
        try:
            with self._translated(session, deadline):
                yield session
        finally:
            self._give_back(session)

    @contextmanager
    def transaction(self, deadline: Deadline) -> Generator[sqlite3.Connection, None, None]:
        """Lend a connection in a transaction that may write."""
        with self.session(deadline, make=False) as session, self._turn(deadline):
            while True:
                with session.step(deadline, patience_s=_PATIENCE_S) as connection:
                    if not _begun(connection, deadline):
                        continue
                    try:
                        yield connection
                        connection.execute("COMMIT")
                    except BaseException:
                        if connection.in_transaction:
                            connection.execute("ROLLBACK")
                        raise
                break
            if not session.is_current():
                raise self._replaced()

    @contextmanager
    def held(self, deadline: Deadline) -> Generator[None, None, None]:
        """Hold off whoever would make the index anew."""
        for _ in range(_ATTEMPTS):
            with self._locked(fcntl.LOCK_SH, deadline):
                if self._identity() is not None:
                    yield
                    return
            with self.session(deadline):
                pass
        raise self._replaced()

    def close(self) -> None:
        """Close what no call is using; calls close what they use when they end."""
        self._making.close()
        with self._idle_lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for session in idle:
            session.close()

    # --- parts ---------------------------------------------------------------------------------------

    def _give_back(self, session: Session) -> None:
        with self._idle_lock:
            if not self._closed:
                self._idle.append(session)
                return
        session.close()

    def _taken(self, deadline: Deadline, made_by: Deadline, *, make: bool) -> Session:
        for _ in range(_ATTEMPTS):
            session = self._opened(deadline)
            if session is not None:
                return session
            if not make:
                break
            self._making.run(partial(self._make, Deadline(deadline.timeout_s)), made_by)
        raise self._replaced()

    def _opened(self, deadline: Deadline) -> Session | None:
        """Return a connection to the file that is there now; None where it must be made."""
        while (session := self._popped()) is not None:
            if self._identity() is not None and session.is_current():
                return session
            session.close()
        try:
            session = Session(self._layout)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unavailable(error) from error
        try:
            with self._translated(session, deadline):
                if session.is_usable(deadline):
                    return session
                self._discard(session, f"no index of version {VERSION}")
        except HiCacheError:
            session.close()
            if self._identity() is None:
                return None
            raise
        session.close()
        return None

    def _popped(self) -> Session | None:
        """Take a connection that no call is using."""
        with self._idle_lock:
            return self._idle.pop() if self._idle else None

    def _identity(self) -> tuple[int, int] | None:
        try:
            return identity_of(self._layout.index)
        except OSError as error:
            raise self._unavailable(error) from error

    def _make(self, deadline: Deadline) -> None:
        """Make the file, unless somebody else has."""
        with self._locked(fcntl.LOCK_EX, deadline):
            if self._identity() is not None:
                return
            try:
                self._layout.remove_indexes()
                name = self._layout.new_index()
                self._fill_file(name, deadline)
                self._layout.name_index(name)
            except HiCacheError:
                raise
            except (OSError, sqlite3.Error) as error:
                raise self._unavailable(error) from error

    def _fill_file(self, name: str, deadline: Deadline) -> None:
        """Make an index of what the slots say."""
        owner = _Maker()
        with FORKS.step(deadline, owner):
            owner.connection = sqlite3.connect(name, isolation_level=None)
            FORKS.connected(owner)
            try:
                owner.connection.executescript(_SCHEMA)
                owner.connection.execute("BEGIN")
                self._fill(owner.connection, self._making.check)
                owner.connection.execute("COMMIT")
            finally:
                owner.disconnect()
                FORKS.disconnected(owner)

    def _discard(self, session: Session, reason: str) -> None:
        """Remove a file that is of no use; the next call makes it anew.

        This call may hold the lock itself: it is not waited for.
        """
        with self._locked(fcntl.LOCK_EX, Deadline(0)):
            if session.is_current():
                logger.warning("%s is %s: it is made anew", self._layout.index, reason)
                self._layout.remove_indexes()

    @contextmanager
    def _turn(self, deadline: Deadline) -> Generator[None, None, None]:
        """Let one thread of this process write at a time: SQLite would let the others poll."""
        if not self._writing.acquire(timeout=deadline.remaining_s()):
            raise StorageTimeout(f"hf3fs: the index was busy for {deadline.timeout_s:g} s")
        try:
            yield
        finally:
            self._writing.release()

    @contextmanager
    def _locked(self, kind: int, deadline: Deadline) -> Generator[None, None, None]:
        try:
            with FORKS.step(deadline):
                descriptor = os.open(self._layout.lock, _LOCK_FLAGS, 0o666)
                FORKS.hold(descriptor)
        except HiCacheError:
            raise
        except OSError as error:
            raise self._unavailable(error) from error
        try:
            self._await_lock(descriptor, kind, deadline)
            yield
        finally:
            FORKS.release(descriptor)

    def _await_lock(self, descriptor: int, kind: int, deadline: Deadline) -> None:
        while True:
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                if deadline.passed():
                    raise StorageTimeout(
                        f"hf3fs: {self._layout.lock} was held for {deadline.timeout_s:g} s: the index"
                        " is being made anew, or a call that writes hangs"
                    ) from None
                time.sleep(min(_POLL_S, deadline.remaining_s()))
            except OSError as error:
                raise self._unavailable(error) from error
            else:
                return

    @contextmanager
    def _translated(self, session: Session, deadline: Deadline) -> Generator[None, None, None]:
        try:
            yield
        except sqlite3.Error as error:
            if _code(error) in _BUSY:
                raise StorageTimeout(
                    f"hf3fs: {self._layout.index} was locked for {deadline.timeout_s:g} s"
                ) from error
            if _code(error) in _BROKEN:
                with suppress(HiCacheError, OSError):
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


class _Maker:
    """The owner of the connection by which an index is made."""

    def __init__(self) -> None:
        self.connection: sqlite3.Connection | None = None

    def disconnect(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()


def _begun(connection: sqlite3.Connection, deadline: Deadline) -> bool:
    """Begin a transaction that may write, unless another process has one."""
    try:
        connection.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        if _code(error) not in _BUSY or deadline.passed():
            raise
        return False
    return True


def _code(error: sqlite3.Error) -> int:
    """Return SQLite's primary result code."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF
