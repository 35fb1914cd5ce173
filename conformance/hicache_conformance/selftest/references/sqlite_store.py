"""A store that keeps pages as BLOBs in one SQLite file."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from hicache_conformance.selftest.references.plain import FileName, PlainStore
from hicache_storage.errors import StorageTimeout, StorageUnavailable
from hicache_storage.keys import KeySpace
from hicache_storage.settings import ByteSize, Field, PositiveSeconds, Settings
from hicache_storage.storage import Capabilities, Durability, PageInfo, Retention

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

_SCHEMA = """
CREATE TABLE IF NOT EXISTS spaces (id TEXT PRIMARY KEY, manifest TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS pages
    (space TEXT NOT NULL, hash TEXT NOT NULL, data BLOB NOT NULL, PRIMARY KEY (space, hash));
"""
_FULL = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_IOERR})
_BUSY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_RETRY_S = 0.01
_LONGEST_S = 86_400.0
"""The longest time limit: SQLite counts milliseconds in 32 bits."""


class SqliteSettings(Settings):
    """The config of `SqliteStore`."""

    path: FileName
    """The database file, which the store creates if it is missing."""
    capacity_nbytes: ByteSize | None = Field(default=None, ge=64 << 10)
    """How large the file may become."""
    timeout_s: PositiveSeconds = 30.0
    """How long a call waits for other writers, in this process and elsewhere."""


class SqliteStore(PlainStore):
    """A store with one connection, used by one thread at a time, and a transaction for each page.

    Its own methods: `_rows` runs every statement, `_changed` runs those that write. The statements
    are in the methods of `PlainStore`.
    """

    capabilities = Capabilities(
        retention=Retention.UNTIL_DELETED,
        durability=Durability.CRASH,
        shared=True,
        enumerable=True,
        max_page_nbytes=16 << 20,
    )

    def __init__(self, settings: SqliteSettings) -> None:
        super().__init__()
        self._timeout_s = min(settings.timeout_s, _LONGEST_S)
        self._capacity_nbytes = settings.capacity_nbytes
        self._path = Path(settings.path).expanduser().absolute()
        self._lock = threading.Lock()
        self._remembered: set[str] = set()
        self._database = self._opened()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(SqliteSettings.parse("sqlite", config))

    def close(self) -> None:
        if self.is_forked_copy:  # a close here would release the locks of the parent
            super().close()
            return
        with self._lock:
            super().close()
            self._database.close()

    # --- one page ------------------------------------------------------------------------------------

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        question = "SELECT length(data) FROM pages WHERE space = ? AND hash = ?"
        return self._rows(question, space.id, page_hash) == [(space.stored_nbytes,)]

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        question = "SELECT data FROM pages WHERE space = ? AND hash = ?"
        found = self._rows(question, space.id, page_hash)
        return found[0][0] if found else None

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        change = "INSERT OR REPLACE INTO pages VALUES (?, ?, ?)"
        return self._remember(space) and self._changed(change, space.id, page_hash, data)

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        change = "DELETE FROM pages WHERE space = ? AND hash = ?"
        return self._changed(change, space.id, page_hash)

    # --- listings --------------------------------------------------------------------------------------

    def _remember(self, space: KeySpace) -> bool:
        if space.id not in self._remembered:
            change = "INSERT OR IGNORE INTO spaces VALUES (?, ?)"
            if not self._changed(change, space.id, json.dumps(space.manifest())):
                return False
            self._remembered.add(space.id)
        return True

    def _known_spaces(self) -> list[KeySpace]:
        found = self._rows("SELECT manifest FROM spaces")
        return [KeySpace.from_manifest(json.loads(manifest)) for (manifest,) in found]

    def _names(self, space: KeySpace) -> list[PageInfo]:
        found = self._rows("SELECT hash, length(data) FROM pages WHERE space = ?", space.id)
        return [PageInfo(*row) for row in found]

    # --- the database ----------------------------------------------------------------------------------

    def _rows(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Run one statement, which is one transaction, and return its rows."""
        with self._translated(), self._alone():
            return self._database.execute(statement, values).fetchall()

    def _changed(self, statement: str, *values: Any) -> bool:
        """Make one change and return True. Return False if it has no room; then nothing has changed."""
        try:
            self._rows(statement, *values)
        except StorageUnavailable as error:
            if _code(error.__cause__) not in _FULL:
                raise
            self._counters.add("refused")
            return False
        return True

    @contextmanager
    def _alone(self) -> Generator[None, None, None]:
        if not self._lock.acquire(timeout=self._timeout_s):
            raise self._late("other threads")
        try:
            self.ensure_open()
            yield
        finally:
            self._lock.release()

    @contextmanager
    def _translated(self) -> Generator[None, None, None]:
        try:
            yield
        except sqlite3.Error as error:
            if _code(error) in _BUSY:
                raise self._late("other connections") from error
            raise StorageUnavailable(f"sqlite: {self._path}: {error}") from error

    def _late(self, who: str) -> StorageTimeout:
        return StorageTimeout(f"sqlite: {who} kept {self._path} busy for {self._timeout_s} s")

    def _opened(self) -> sqlite3.Connection:
        with self._translated():
            database = sqlite3.connect(
                self._path,
                timeout=self._timeout_s,
                isolation_level=None,
                check_same_thread=False,
            )
            try:
                self._prepare(database)
            except BaseException:
                database.close()
                raise
            return database

    def _prepare(self, database: sqlite3.Connection) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            try:
                database.execute("PRAGMA journal_mode = WAL")
                database.executescript(_SCHEMA)
                break
            except sqlite3.OperationalError as error:  # SQLite does not always wait here
                if _code(error) not in _BUSY or time.monotonic() > deadline_s:
                    raise
                time.sleep(_RETRY_S)
        database.execute("PRAGMA synchronous = OFF")  # a crash of the process loses nothing
        if self._capacity_nbytes is not None:
            (block_nbytes,) = database.execute("PRAGMA page_size").fetchone()
            blocks = self._capacity_nbytes // block_nbytes
            database.execute(f"PRAGMA max_page_count = {blocks}")


def _code(error: BaseException | None) -> int | None:
    """Return the primary result code of an error of SQLite."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF
