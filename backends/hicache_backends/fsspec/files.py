"""Read, publish, remove and list the files of one filesystem.

Every operation is a coroutine. With an asynchronous filesystem it waits for each call. With a blocking
filesystem every call blocks instead, so the coroutine never waits.
"""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from hicache_backends.fsspec.layout import UNPUBLISHED, WRITING
from hicache_backends.fsspec.protocols import Publishing
from hicache_storage.backend_support.writer_lock import new_token

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_backends.fsspec.protocols import Protocol

_OPENING_S = 0.1
_STALE_S = 86_400.0
"""How old an unpublished file must be before its writer counts as dead."""

# The attributes that hold a filesystem's connections. fsspec has no call that closes them.
_CONNECTIONS = ("_s3", "_session", "service_client")  # of s3fs, of gcsfs, of adlfs
_BLOCKING_CONNECTIONS = ("client", "ftp")  # of sftp, of ftp


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a directory."""

    name: str
    nbytes: int
    is_file: bool
    modified_s: float | None
    """Seconds since the epoch. None: the filesystem does not report the time."""


class Files:
    """The files below the directory of a URL. The first call opens the filesystem. Thread-safe.

    Every operation may raise any exception of the filesystem. If the file is missing, it raises
    FileNotFoundError.
    """

    def __init__(
        self,
        protocol: Protocol,
        publishing: Publishing,
        open_filesystem: Callable[[], tuple[Any, str]],
        *,
        blocking: bool,
    ) -> None:
        self._protocol = protocol
        self._publishing = publishing
        self._open_filesystem = open_filesystem
        self._blocking = blocking
        self._lock = threading.Lock()
        self._opened: tuple[Any, str] | None = None
        self._token = new_token()
        self._serials = itertools.count()

    async def read(self, name: str) -> bytes:
        """Return all bytes of a file."""
        data: bytes = await self._call("cat_file", self._path(name))
        return data

    async def write(self, name: str, data: bytes) -> bool:
        """Publish `data` as the file: all of it or nothing, as far as the filesystem allows.

        Return True if the file's directory existed, and False if the directory had to be made.
        """
        try:
            await self._publish(name, data)
        except FileNotFoundError:
            if not self._protocol.has_directories:
                raise
            for directory in {name.rpartition("/")[0], WRITING}:
                await self._call("makedirs", self._path(directory), exist_ok=True)
            await self._publish(name, data)
            return False
        return True

    async def remove(self, name: str) -> None:
        """Remove a file."""
        await self._call("rm_file", self._path(name))

    async def remove_directory(self, name: str) -> None:
        """Remove an empty directory, unless the filesystem might remove one that has files, too."""
        if self._protocol.publishing is Publishing.RENAME:
            with suppress(OSError):
                await self._call("rmdir", self._path(name))

    async def size(self, name: str) -> int | None:
        """Return the size of a file, or None for anything that is not a file."""
        info = await self._info(self._path(name))
        return int(info["size"]) if info["type"] == "file" else None

    async def entries(self, directory: str, prefix: str = "") -> list[Entry]:
        """Return the entries of a directory that begin with `prefix`: none if it is missing.

        Pass a prefix only if the protocol has `lists_by_prefix`.
        """
        path = self._path(directory)
        try:
            if prefix:
                by_name = await self._call("find", path, prefix=prefix, detail=True)
                found = [one for name, one in by_name.items() if _parent_of(name) == path]
            else:
                found = await self._call("ls", path, detail=True)
        except FileNotFoundError:
            return []
        return [
            Entry(
                one["name"].rstrip("/").rpartition("/")[2],
                one["size"] or 0,
                one["type"] == "file",
                _modified_s(one),
            )
            for one in found
        ]

    async def connect(self, _: None = None) -> None:
        """Make the client of an asynchronous filesystem. This sends nothing, but may take a while."""
        set_session = getattr(self._filesystem()[0], "set_session", None)
        if set_session is not None:
            await set_session()

    async def check(self, _: None = None) -> None:
        """Raise if the store does not answer. A missing directory counts as an answer.

        Raises:
            FileNotFoundError: The bucket does not exist.
        """
        if await self.is_root_missing() and not self._protocol.has_directories:
            raise FileNotFoundError

    async def collect(self, _: None = None) -> None:
        """Remove unpublished files of dead writers."""
        oldest_s = time.time() - _STALE_S
        for entry in await self.entries(WRITING) if self._protocol.has_directories else ():
            is_stale = entry.modified_s is not None and entry.modified_s < oldest_s
            if is_stale and UNPUBLISHED.fullmatch(entry.name):
                with suppress(OSError):
                    await self.remove(f"{WRITING}/{entry.name}")

    async def is_root_missing(self, _: None = None) -> bool:
        """Return True if the root itself (the directory or the bucket) is missing."""
        path = self._filesystem()[1]
        root = path if self._protocol.has_directories else path.partition("/")[0]
        try:
            await self._info(root)
        except FileNotFoundError:
            return True
        return False

    async def disconnect(self, _: None = None) -> None:
        """Close the filesystem. The next call opens it again."""
        if self._blocking:
            self.close_connections()
        elif (filesystem := self._detach()) is not None:
            for name in _CONNECTIONS:
                connection = getattr(filesystem, name, None)
                if connection is not None:
                    with suppress(Exception):
                        await connection.close()

    def close_connections(self) -> None:
        """Close a blocking filesystem, and wake up threads that wait for an answer."""
        filesystem = self._detach()
        for name in _BLOCKING_CONNECTIONS:
            connection = getattr(filesystem, name, None)
            if connection is not None:
                with suppress(Exception):
                    connection.close()

    # --- parts ---------------------------------------------------------------------------------------

    async def _publish(self, name: str, data: bytes) -> None:
        match self._publishing:
            case Publishing.PUT:
                await self._call("pipe_file", self._path(name), data)
            case Publishing.RENAME:
                temporary = f"{WRITING}/{self._token}-{next(self._serials)}"
                await self._create(temporary, data, name)
            case Publishing.DIRECT:
                if not await self._has_size(name, len(data)):
                    await self._create(name, data, name)

    async def _create(self, name: str, data: bytes, final_name: str) -> None:
        """Write a file. If `final_name` differs from `name`, rename it.

        Leave no file behind on failure.
        """
        try:
            await self._call("pipe_file", self._path(name), data)
            if name != final_name:
                await self._rename(self._path(name), self._path(final_name))
        except BaseException:
            with suppress(Exception):
                await self.remove(name)
            raise

    async def _rename(self, path: str, final_path: str) -> None:
        if self._protocol.rename is not None:
            self._protocol.rename(path, final_path)
        else:
            await self._call("mv", path, final_path)

    async def _has_size(self, name: str, nbytes: int) -> bool:
        try:
            return await self.size(name) == nbytes
        except FileNotFoundError:
            return False

    async def _info(self, path: str) -> dict[str, Any]:
        info: dict[str, Any] = await self._call("info", path)
        return info

    async def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        filesystem = self._filesystem()[0]
        if self._blocking:
            return getattr(filesystem, method)(*arguments, **options)
        return await getattr(filesystem, f"_{method}")(*arguments, **options)

    def _path(self, name: str) -> str:
        return f"{self._filesystem()[1]}/{name}".rstrip("/")

    def _detach(self) -> Any:
        """Return the open filesystem and forget it. Return None if none is open."""
        if not self._lock.acquire(timeout=_OPENING_S):
            return None  # another thread is opening it, perhaps forever
        try:
            opened, self._opened = self._opened, None
        finally:
            self._lock.release()
        return opened and opened[0]

    def _filesystem(self) -> tuple[Any, str]:
        opened = self._opened
        if opened is None:
            with self._lock:
                if self._opened is None:
                    filesystem, root = self._open_filesystem()
                    filesystem.dircache.use_listings_cache = False
                    self._opened = filesystem, root.rstrip("/")
                opened = self._opened
        return opened


def _parent_of(name: str) -> str:
    return name.rstrip("/").rpartition("/")[0]


def _modified_s(info: dict[str, Any]) -> float | None:
    """Return the time of the last write.

    Filesystems that rename report it as a datetime or a number.
    """
    modified = info.get("mtime")
    if isinstance(modified, datetime):
        return modified.timestamp()
    return float(modified) if isinstance(modified, (int, float)) else None
