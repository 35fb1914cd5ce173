"""The SQLite file of an index: its idle connections, and the rebuild of a lost file.

A missing or unusable file is built from the slots' marks. Then the symbolic link `index.sqlite` is
pointed at it. No call writes to a slot during a rebuild: such a call holds `lock` shared, and a
rebuild holds it exclusively. If the link has been pointed at another file, the next call closes
connections to the old file. No file name is used twice, because SQLite unlinks a file's log by name
when the last connection is closed, and a file of the same name could already have a log of its own.

A connection is opened in a step, closed before a fork, and opened again by the next step
(`fork_guard`).
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeAlias

from hicache_backends.hf3fs.fork_guard import FORKS
from hicache_backends.hf3fs.index.base import AT_OPEN_S, Rebuild
from hicache_backends.hf3fs.index.sqlite_session import BROKEN, Session, code_of, identity_of
from hicache_backends.hf3fs.index.sqlite_tables import SCHEMA, VERSION
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.writer_lock import try_lock
from hicache_storage.errors import HiCacheError, StorageTimeout, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from hicache_backends.hf3fs.layout import Layout

    Fill: TypeAlias = Callable[[sqlite3.Connection, Callable[[], None]], None]

logger = logging.getLogger(__name__)

_POLL_S = 0.01
# How long SQLite waits for another process at a time. A fork may happen between two such waits.
_WAIT_S = 0.25
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
# How often a call tries to connect, because the file may be missing or may have been replaced.
_ATTEMPTS = 3
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class Database:
    """The connections to the index of one root. Thread-safe; belongs to the process that made it."""

    def __init__(self, layout: Layout, deadline: Deadline, fill: Fill) -> None:
        self._layout = layout
        self._fill = fill
        self._timeout_s = deadline.timeout_s
        self._rebuild = Rebuild(self._make)
        self._idle: list[Session] = []
        self._idle_lock = threading.Lock()
        self._writing = threading.Lock()
        self._held = _HeldIdentity()
        self._closed = False
        session = self._take(deadline, Deadline(AT_OPEN_S), make=True)
        self._give_back(session)

    @contextmanager
    def session(self, deadline: Deadline, *, make: bool = True) -> Generator[Session, None, None]:
        """Lend a connection to one call. `make`: rebuild a missing file."""
        session = self._take(deadline, deadline, make=make)
        try:
            with self._translate_errors(session, deadline):
                yield session
        finally:
            self._give_back(session)

    @contextmanager
    def transaction(self, deadline: Deadline) -> Generator[sqlite3.Connection, None, None]:
        """Lend a connection in a transaction that may write."""
        with self.session(deadline, make=False) as session, self._turn(deadline):
            while True:
                with session.step(deadline, _WAIT_S) as connection:
                    if not _begin(connection, deadline):
                        continue
                    try:
                        yield connection
                        connection.execute("COMMIT")
                    except BaseException:
                        if connection.in_transaction:
                            connection.execute("ROLLBACK")
                        raise
                break
            self._require_current(session)

    @contextmanager
    def held(self, deadline: Deadline) -> Generator[None, None, None]:
        """Hold off every rebuild of the index. Meanwhile this thread's connections stay current."""
        for _ in range(_ATTEMPTS):
            with self._locked(fcntl.LOCK_SH, deadline):
                self._held.identity = self._identity()
                if self._held.identity is not None:
                    try:
                        yield
                    finally:
                        self._held.identity = None
                    return
            with self.session(deadline):
                pass
        raise self._replaced()

    def close(self) -> None:
        """Close the idle connections. A running call closes its own connection when it ends."""
        self._rebuild.close()
        with self._idle_lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for session in idle:
            session.close()

    # --- connections -----------------------------------------------------------------------------

    def _give_back(self, session: Session) -> None:
        with self._idle_lock:
            if not self._closed:
                self._idle.append(session)
                return
        session.close()

    def _take(self, deadline: Deadline, rebuild_deadline: Deadline, *, make: bool) -> Session:
        for _ in range(_ATTEMPTS):
            session = self._open(deadline)
            if session is not None:
                return session
            if not make:
                break
            self._rebuild.run(rebuild_deadline)
        raise self._replaced()

    def _open(self, deadline: Deadline) -> Session | None:
        """Return a connection to the current file, or None if the file must be built."""
        while (session := self._pop_idle()) is not None:
            if session.identity == (self._held.identity or self._identity()):
                return session
            session.close()
        try:
            session = Session(self._layout)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unavailable(error) from error
        try:
            with self._translate_errors(session, deadline):
                if session.is_usable(deadline):
                    return session
                self._discard(session, f"not an index of version {VERSION}")
        except HiCacheError:
            session.close()
            if self._identity() is None:
                return None
            raise
        session.close()
        return None

    def _pop_idle(self) -> Session | None:
        with self._idle_lock:
            return self._idle.pop() if self._idle else None

    def _identity(self) -> tuple[int, int] | None:
        try:
            return identity_of(self._layout.index)
        except OSError as error:
            raise self._unavailable(error) from error

    @contextmanager
    def _turn(self, deadline: Deadline) -> Generator[None, None, None]:
        """Let one thread of this process write at a time. SQLite would make other threads poll."""
        if not self._writing.acquire(timeout=deadline.remaining_s()):
            raise StorageTimeout(f"hf3fs: the index was busy for {deadline.timeout_s:g} s")
        try:
            yield
        finally:
            self._writing.release()

    # --- the file --------------------------------------------------------------------------------

    def _make(self) -> None:
        """Build the file, unless another process has built it."""
        with self._locked(fcntl.LOCK_EX, Deadline(self._timeout_s)):
            if self._identity() is not None:
                return
            try:
                self._layout.restore()  # the root may be back, and empty
                self._layout.remove_indexes()
                name = self._layout.new_index()
                self._fill_file(name, Deadline(self._timeout_s))
                self._layout.name_index(name)
            except HiCacheError:
                raise
            except (OSError, sqlite3.Error) as error:
                raise self._unavailable(error) from error

    def _fill_file(self, name: str, deadline: Deadline) -> None:
        """Build an index from the marks of the slots."""
        owner = _NewFile()
        with FORKS.step(deadline, owner):
            owner.connection = sqlite3.connect(name, isolation_level=None)
            FORKS.connected(owner)
            try:
                owner.connection.executescript(SCHEMA)
                owner.connection.execute("BEGIN")
                self._fill(owner.connection, self._rebuild.check)
                owner.connection.execute("COMMIT")
            finally:
                owner.disconnect()
                FORKS.disconnected(owner)

    def _discard(self, session: Session, reason: str) -> None:
        """Remove an unusable file. The next call builds it again.

        Do not wait for the lock, because this call may hold the lock itself.
        """
        with self._locked(fcntl.LOCK_EX, Deadline(0)):
            if session.is_current():
                logger.warning("%s is %s, so it is rebuilt", self._layout.index, reason)
                self._layout.remove_indexes()

    @contextmanager
    def _locked(self, kind: int, deadline: Deadline) -> Generator[None, None, None]:
        try:
            with FORKS.step(deadline):
                fd = os.open(self._layout.lock, _LOCK_FLAGS, 0o666)
                FORKS.hold(fd)
        except HiCacheError:
            raise
        except OSError as error:
            raise self._unavailable(error) from error
        try:
            self._await_lock(fd, kind, deadline)
            yield
        finally:
            FORKS.release(fd)

    def _await_lock(self, fd: int, kind: int, deadline: Deadline) -> None:
        try:
            while not try_lock(fd, kind):
                if deadline.passed():
                    raise StorageTimeout(
                        f"hf3fs: {self._layout.lock} was held for {deadline.timeout_s:g} s: the"
                        " index is being rebuilt, or a call that writes hangs"
                    )
                time.sleep(min(_POLL_S, deadline.remaining_s()))
        except HiCacheError:
            raise
        except OSError as error:
            raise self._unavailable(error) from error

    # --- errors ----------------------------------------------------------------------------------

    @contextmanager
    def _translate_errors(self, session: Session, deadline: Deadline) -> Generator[None]:
        try:
            yield
        except sqlite3.Error as error:
            if code_of(error) in _BUSY:
                raise StorageTimeout(
                    f"hf3fs: {self._layout.index} was locked for {deadline.timeout_s:g} s"
                ) from error
            if code_of(error) in BROKEN:
                with suppress(HiCacheError, OSError):
                    self._discard(session, "damaged")
            unavailable = self._unavailable(error)
            if code_of(error) == sqlite3.SQLITE_FULL:
                raise NoSpaceForIndex(*unavailable.args) from error
            raise unavailable from error
        except OSError as error:
            if isinstance(error, HiCacheError):
                raise
            raise self._unavailable(error) from error

    def _require_current(self, session: Session) -> None:
        if not session.is_current():
            raise self._replaced()

    def _replaced(self) -> StorageUnavailable:
        return StorageUnavailable(
            f"hf3fs: {self._layout.index} was removed or replaced during the call: try again"
        )

    def _unavailable(self, error: Exception) -> StorageUnavailable:
        reason = getattr(error, "strerror", None) or str(error)
        path = getattr(error, "filename", None) or self._layout.index  # a rebuild reads manifests
        return StorageUnavailable(f"hf3fs: {path} cannot be used: {reason}")


class NoSpaceForIndex(StorageUnavailable):
    """The file system is full, so the index could not grow. The transaction has changed nothing."""


class _HeldIdentity(threading.local):
    """The identity of the index whose rebuild this thread holds off, or None."""

    identity: tuple[int, int] | None = None


class _NewFile:
    """The owner of the connection that builds an index."""

    connection: sqlite3.Connection | None = None

    def disconnect(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()


def _begin(connection: sqlite3.Connection, deadline: Deadline) -> bool:
    """Begin a transaction that may write. Return False while another process has one."""
    try:
        connection.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        if code_of(error) not in _BUSY or deadline.passed():
            raise
        return False
    return True
