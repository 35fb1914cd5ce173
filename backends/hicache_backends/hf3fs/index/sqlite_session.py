"""A connection to the SQLite file of an index: opened in a step, closed before a fork."""

from __future__ import annotations

import os
import sqlite3
from contextlib import contextmanager, suppress
from math import inf
from typing import TYPE_CHECKING
from urllib.parse import quote

from hicache_backends.hf3fs.fork_guard import FORKS, WAIT_S
from hicache_backends.hf3fs.index.sqlite_tables import VERSION
from hicache_backends.hf3fs.slot_files import KEEP_SIZE, fallocate
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.errors import HiCacheError

if TYPE_CHECKING:
    from collections.abc import Generator

    from hicache_backends.hf3fs.layout import Layout

BROKEN = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_LOG_PAGES = 2000  # 8 MiB: each page of the log is synced and copied once
_RESERVED_NBYTES = 16 << 20
"""The blocks of the log that are reserved, so that slots can be freed on a full disk."""
_WAIT_BITS = 5  # coarse steps, so that most calls need not set another wait


class Session:
    """A connection to the current file, used by one call at a time.

    Raises:
        FileNotFoundError: There is no file.
    """

    def __init__(self, layout: Layout) -> None:
        self._path = layout.index
        file, identity = layout.index_file(), identity_of(layout.index)
        if file is None or identity is None:
            raise FileNotFoundError(layout.index)
        self._file, self.identity = file, identity
        self.connection: sqlite3.Connection | None = None
        self._wait_ms = -1  # the wait that was last set on the connection
        self.openings = 0
        """How many connections were made.

        SQLite's data versions are comparable only within one connection.
        """

    @contextmanager
    def step(self, deadline: Deadline, limit_s: float = inf) -> Generator[sqlite3.Connection]:
        """Lend the connection. SQLite waits for locks until the deadline, but at most `limit_s`."""
        with FORKS.step(deadline, self):
            connection = self.connection or self._connect(deadline)
            wait_ms = int(min(deadline.remaining_s(), limit_s) * 1000)
            wait_ms -= wait_ms % (1 << max(0, wait_ms.bit_length() - _WAIT_BITS))
            if wait_ms != self._wait_ms:
                connection.execute(f"PRAGMA busy_timeout = {wait_ms}")
                self._wait_ms = wait_ms
            yield connection

    def is_current(self) -> bool:
        """Return True while the index's name leads to this file."""
        return self.identity == identity_of(self._path)

    def is_usable(self, deadline: Deadline) -> bool:
        """Return True if the file is an index of this version."""
        with self.step(deadline) as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            return bool(version == VERSION)

    def disconnect(self) -> None:
        """Close the connection. Only steps and forks call this."""
        connection, self.connection = self.connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()

    def close(self) -> None:
        """Close the connection. If the session is used again, it opens another connection."""
        if self.connection is None:
            return
        with suppress(HiCacheError), FORKS.step(Deadline(2 * WAIT_S), self):
            self.disconnect()
            FORKS.disconnected(self)

    def _connect(self, deadline: Deadline) -> sqlite3.Connection:
        connection = self._open(deadline.remaining_s())
        try:
            self._require_same_file()
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        self.connection = connection
        self._wait_ms = -1
        self.openings += 1
        FORKS.connected(self)
        return connection

    def _open(self, timeout_s: float) -> sqlite3.Connection:
        return open_index(self._file, "rw", timeout_s)

    def _prepare(self, connection: sqlite3.Connection) -> None:
        connection.execute(f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA user_version").fetchone()  # opens the log
        with suppress(OSError):  # the disk is full, or cannot reserve blocks
            _reserve_blocks(f"{self._file}-wal")

    def _require_same_file(self) -> None:
        if identity_of(self._file) != self.identity:
            raise FileNotFoundError(self._file)


def open_index(path: str, mode: str, timeout_s: float) -> sqlite3.Connection:
    """Connect to a file with the `mode` of its URI."""
    return sqlite3.connect(
        f"file:{quote(path)}?mode={mode}",
        uri=True,
        timeout=timeout_s,
        isolation_level=None,
        check_same_thread=False,
    )


def _reserve_blocks(log: str) -> None:
    """Reserve blocks beyond the end of a log. SQLite keeps its locks in other files."""
    fd = os.open(log, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fallocate(fd, KEEP_SIZE, 0, _RESERVED_NBYTES)
    finally:
        os.close(fd)


def identity_of(path: str) -> tuple[int, int] | None:
    """Return the device and inode of the file that `path` leads to, or None if there is none.

    Raises:
        OSError: The file system does not answer. Then the index does not count as lost.
    """
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino


def code_of(error: BaseException) -> int:
    """Return SQLite's primary result code, or 0 if the error is not one of SQLite."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF
