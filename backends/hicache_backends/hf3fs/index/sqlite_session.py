"""One connection to the SQLite index: opened in a step, closed before a fork, opened again after it."""

from __future__ import annotations

import os
import sqlite3
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING
from urllib.parse import quote

from hicache_backends.hf3fs.fork_guard import FORKS, WAIT_S
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.errors import HiCacheError

if TYPE_CHECKING:
    from collections.abc import Generator

    from hicache_backends.hf3fs.layout import Layout

VERSION = 1
_LOG_PAGES = 2000  # 8 MiB: what is in it is synced and copied once


class Session:
    """One connection, used by one call at a time."""

    def __init__(self, layout: Layout) -> None:
        """Note which file is the index now.

        Raises:
            FileNotFoundError: There is none.
        """
        self._path = layout.index
        file, identity = layout.index_file(), identity_of(layout.index)
        if file is None or identity is None:
            raise FileNotFoundError(layout.index)
        self._file, self._identity = file, identity
        self.connection: sqlite3.Connection | None = None
        self.openings = 0
        """How many connections there were. SQLite's data version means something within one only."""

    @contextmanager
    def step(
        self, deadline: Deadline, *, patience_s: float | None = None
    ) -> Generator[sqlite3.Connection, None, None]:
        """Use the connection; SQLite waits for locks until the deadline, or for `patience_s`."""
        with FORKS.step(deadline, self):
            connection = self.connection or self._connected(deadline)
            wait_s = deadline.remaining_s()
            if patience_s is not None:
                wait_s = min(wait_s, patience_s)
            connection.execute(f"PRAGMA busy_timeout = {int(wait_s * 1000)}")
            yield connection

    def is_current(self) -> bool:
        """Return True while the file is the one that the index's name leads to."""
        return self._identity == identity_of(self._path)

    def is_usable(self, deadline: Deadline) -> bool:
        """Return True when the file is an index of this version."""
        with self.step(deadline) as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            return bool(version == VERSION)

    def disconnect(self) -> None:
        """Close the connection; called in a step, or by the fork itself."""
        connection, self.connection = self.connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()

    def close(self) -> None:
        """Close the connection. A session that is used again opens another."""
        if self.connection is None:
            return
        with suppress(HiCacheError), FORKS.step(Deadline(2 * WAIT_S), self):
            self.disconnect()
            FORKS.disconnected(self)

    def _connected(self, deadline: Deadline) -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"file:{quote(self._file)}?mode=rw",
            uri=True,
            timeout=deadline.remaining_s(),
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            self._require_same_file()
            connection.execute(f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}")
            connection.execute("PRAGMA synchronous = NORMAL")
        except BaseException:
            connection.close()
            raise
        self.connection = connection
        self.openings += 1
        FORKS.connected(self)
        return connection

    def _require_same_file(self) -> None:
        if identity_of(self._file) != self._identity:
            raise FileNotFoundError(self._file)


def identity_of(path: str) -> tuple[int, int] | None:
    """Return device and inode of the file that `path` leads to, or None where there is none.

    Raises:
        OSError: The file system does not say. An index is not taken for lost then.
    """
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino
