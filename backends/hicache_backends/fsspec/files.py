"""The few calls of a filesystem that a store of pages needs, and how a file is published by each kind.

Every operation is a coroutine. On an asynchronous filesystem it waits; on a blocking one it never does.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from hicache_backends.fsspec.protocols import Publishing

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_backends.fsspec.protocols import Protocol

_WRITING = "writing"
"""The directory of files that are not published yet."""
_OPENING_S = 0.1
_STALE_S = 86_400.0
"""No write takes so long: its writer has died."""

# What holds the connections of a filesystem: fsspec has no call that closes them.
_CONNECTIONS = ("_s3", "_session", "service_client")  # of s3fs, of gcsfs, of adlfs
_BLOCKING_CONNECTIONS = ("client", "ftp")  # of sftp, of ftp


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of a directory."""

    name: str
    nbytes: int
    modified_s: float | None
    """Since the epoch; None where the filesystem does not tell."""


class Files:
    """Files below the directory of a URL. Thread-safe; opened at the first call.

    Raises what the filesystem raises; FileNotFoundError for a file that is missing.
    """

    def __init__(
        self,
        protocol: Protocol,
        publishing: Publishing,
        opening: Callable[[], tuple[Any, str]],
        *,
        blocking: bool,
    ) -> None:
        self._protocol = protocol
        self._publishing = publishing
        self._opening = opening
        self._blocking = blocking
        self._lock = threading.Lock()
        self._opened: tuple[Any, str] | None = None
        self._token = secrets.token_hex(8)
        self._serials = itertools.count()

    async def read(self, name: str) -> bytes:
        """All of a file."""
        data: bytes = await self._call("cat_file", self._path(name))
        return data

    async def write(self, name: str, data: bytes) -> None:
        """Make `data` the file: whole or not at all, as far as the filesystem lets us."""
        try:
            await self._publish(name, data)
        except FileNotFoundError:
            if not self._protocol.has_directories:
                raise
            for directory in {name.rpartition("/")[0], _WRITING}:
                await self._call("makedirs", self._path(directory), exist_ok=True)
            await self._publish(name, data)

    async def remove(self, name: str) -> None:
        """Remove a file."""
        await self._call("rm_file", self._path(name))

    async def size(self, name: str) -> int | None:
        """How many bytes a file has; None for what is no file."""
        found = await self._info(self._path(name))
        return int(found["size"]) if found["type"] == "file" else None

    async def entries(self, directory: str, prefix: str = "") -> list[Entry]:
        """Return what is in a directory and begins with `prefix`; nothing where it is missing.

        Only a protocol that `lists_by_prefix` is given one.
        """
        path = self._path(directory)
        try:
            if prefix:
                named = await self._call("find", path, prefix=prefix, detail=True)
                found = [one for name, one in named.items() if _parent_of(name) == path]
            else:
                found = await self._call("ls", path, detail=True)
        except FileNotFoundError:
            return []
        return [
            Entry(one["name"].rstrip("/").rpartition("/")[2], one["size"] or 0, _modified_s(one))
            for one in found
        ]

    async def connect(self, _: None = None) -> None:
        """Make the client of an asynchronous filesystem: it asks nobody, and may take a while."""
        set_session = getattr(self._filesystem()[0], "set_session", None)
        if set_session is not None:
            await set_session()

    async def check(self, _: None = None) -> None:
        """Raise unless the place is there, or can be made; remove what dead writers left in it.

        Raises:
            FileNotFoundError: There is no such bucket.
        """
        if not self._protocol.has_directories:
            await self._info(self._filesystem()[1].partition("/")[0])
            return
        oldest_s = time.time() - _STALE_S
        for entry in await self.entries(_WRITING):
            if entry.modified_s is not None and entry.modified_s < oldest_s:
                with suppress(OSError):
                    await self.remove(f"{_WRITING}/{entry.name}")

    async def is_gone(self, _: None = None) -> bool:
        """Return True where the place itself is missing, and with it everything that was there."""
        root = self._filesystem()[1]
        place = root if self._protocol.has_directories else root.partition("/")[0]
        try:
            await self._info(place)
        except FileNotFoundError:
            return True
        return False

    async def disconnect(self, _: None = None) -> None:
        """Close what is open. The next call opens it anew."""
        if self._blocking:
            self.hang_up()
        elif (filesystem := self._taken()) is not None:
            for name in _CONNECTIONS:
                connection = getattr(filesystem, name, None)
                if connection is not None:
                    with suppress(Exception):
                        await connection.close()

    def hang_up(self) -> None:
        """The same for a blocking filesystem. It wakes those who wait for an answer."""
        filesystem = self._taken()
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
                passing = f"{_WRITING}/{self._token}-{next(self._serials)}"
                await self._create(passing, data, name)
            case Publishing.DIRECT:
                if not await self._holds(name, len(data)):
                    await self._create(name, data, name)

    async def _create(self, name: str, data: bytes, final_name: str) -> None:
        """Write a file and give it its name, which may be its own; or leave nothing."""
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

    async def _holds(self, name: str, nbytes: int) -> bool:
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

    def _taken(self) -> Any:
        """The open filesystem, which is forgotten here; None where there is none."""
        if not self._lock.acquire(timeout=_OPENING_S):
            return None  # somebody is opening it, which may hang: there is nothing to close yet
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
                    filesystem, root = self._opening()
                    filesystem.dircache.use_listings_cache = False
                    self._opened = filesystem, root.rstrip("/")
                opened = self._opened
        return opened


def _parent_of(name: str) -> str:
    return name.rstrip("/").rpartition("/")[0]


def _modified_s(info: dict[str, Any]) -> float | None:
    """When a file was written, as the filesystems that rename say it."""
    modified = info.get("mtime")
    if isinstance(modified, datetime):
        return modified.timestamp()
    return float(modified) if isinstance(modified, (int, float)) else None
