"""Reads and writes through the rings of 3FS (USRBIO), which bypass FUSE.

The client, `hf3fs_fuse.io`, comes with 3FS. It moves bytes between files and registered shared
memory, so pages are copied once on their way.
"""

from __future__ import annotations

import errno
import importlib
import os
import threading
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.shared_memory import SharedMemory
from typing import TYPE_CHECKING, Any

from hicache_storage.errors import BackendNotInstalled, ConfigError

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from hicache_storage.backend_support.deadline import Deadline

_CHANNEL_NBYTES = 8 << 20
# If this many transfers are late, 3FS gets no new ones: by then 128 MiB of memory wait for its
# answers.
_MOST_LATE = 16


class Usrbio:
    """preadv and pwritev for files of one 3FS mount. Thread-safe."""

    def __init__(self, client: Any, mount: str) -> None:
        self._client = client
        self._mount = mount
        self._lock = threading.Lock()
        self._idle: list[_Channel] = []
        self._late: list[_Channel] = []
        """Channels whose transfers have not ended."""

    def preadv(
        self, descriptor: int, buffers: Sequence[memoryview], offset: int, deadline: Deadline
    ) -> int:
        """Read as os.preadv does."""
        nbytes = sum(map(len, buffers))
        if nbytes > _CHANNEL_NBYTES:
            return os.preadv(descriptor, buffers, offset)
        channel = self._take()
        done = self._move(channel, descriptor, nbytes, offset, deadline, reading=True)
        start = 0
        for buffer in buffers:
            part = channel.bytes[start : min(start + len(buffer), done)]
            buffer[: len(part)] = part
            start += len(buffer)
        self._give_back(channel)
        return done

    def pwritev(
        self, descriptor: int, buffers: Sequence[memoryview], offset: int, deadline: Deadline
    ) -> int:
        """Write as os.pwritev does."""
        nbytes = sum(map(len, buffers))
        if nbytes > _CHANNEL_NBYTES:
            return os.pwritev(descriptor, buffers, offset)
        channel = self._take()
        start = 0
        for buffer in buffers:
            channel.bytes[start : start + len(buffer)] = buffer
            start += len(buffer)
        done = self._move(channel, descriptor, nbytes, offset, deadline, reading=False)
        self._give_back(channel)
        return done

    def close(self) -> None:
        """Free the rings and their memory."""
        with self._lock:
            channels, self._idle, self._late = self._idle + self._late, [], []
        for channel in channels:
            channel.close()

    def _move(
        self,
        channel: _Channel,
        descriptor: int,
        nbytes: int,
        offset: int,
        deadline: Deadline,
        *,
        reading: bool,
    ) -> int:
        """Move bytes. Return how many were moved.

        After an error the caller must not use the channel any more.
        """
        try:
            result = self._submit(channel, descriptor, nbytes, offset, deadline, reading=reading)
        except BaseException:
            self._put_aside(channel)
            raise
        if result is None:
            self._put_aside(channel)
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        if result < 0:
            self._give_back(channel)
            raise OSError(-result, os.strerror(-result))
        return result

    def _submit(
        self,
        channel: _Channel,
        descriptor: int,
        nbytes: int,
        offset: int,
        deadline: Deadline,
        *,
        reading: bool,
    ) -> int | None:
        """Return the result of the ring, or None if there is none by the deadline."""
        ring = channel.reads if reading else channel.writes
        with _translate_errors():
            self._client.register_fd(descriptor)
            try:
                ring.prepare(channel.vector[0:nbytes], reading, descriptor, offset)
                channel.waiting = ring.submit()
                left = timedelta(seconds=deadline.remaining_s())
                return _first(channel.waiting.wait(min_results=1, timeout=left))
            finally:
                with suppress(Exception):  # the result of the ring counts
                    self._client.deregister_fd(descriptor)

    def _take(self) -> _Channel:
        """Return a channel that has no transfer.

        Raises:
            OSError: There are too many late channels (EMFILE), or no channel can be made.
        """
        with self._lock:
            self._take_back_ended()
            if self._idle:
                return self._idle.pop()
            if len(self._late) >= _MOST_LATE:
                raise OSError(
                    errno.EMFILE, f"{len(self._late)} overdue transfers of 3FS have not ended yet"
                )
        with _translate_errors():
            return _Channel(self._client, self._mount)

    def _take_back_ended(self) -> None:
        """Make late channels idle again if their transfers have ended."""
        for channel in list(self._late):
            with suppress(OSError), _translate_errors():
                if channel.has_ended():
                    self._late.remove(channel)
                    self._idle.append(channel)

    def _put_aside(self, channel: _Channel) -> None:
        """Keep a channel until its transfer has ended. If its ring failed at once, close it."""
        if channel.waiting is None:
            channel.close()
            return
        with self._lock:
            self._late.append(channel)

    def _give_back(self, channel: _Channel) -> None:
        channel.waiting = None
        with self._lock:
            self._idle.append(channel)


class _Channel:
    """Memory registered with 3FS, and a ring for each direction. One call at a time uses them."""

    def __init__(self, client: Any, mount: str) -> None:
        self._memory = SharedMemory(create=True, size=_CHANNEL_NBYTES)
        self.waiting: Any = None
        """The ring of a transfer that has not ended, or None if there is no transfer."""
        try:
            assert self._memory.buf is not None
            self.bytes: memoryview = self._memory.buf
            self.vector = client.make_iovec(self._memory, mount)
            self.reads = client.make_ioring(mount, 1, for_read=True)
            self.writes = client.make_ioring(mount, 1, for_read=False)
        except BaseException:
            self.close()
            raise
        finally:
            self._memory.unlink()

    def has_ended(self) -> bool:
        """Return True if the transfer has ended. Do not wait."""
        if _first(self.waiting.wait(min_results=1, timeout=timedelta())) is None:
            return False
        self.waiting = None
        return True

    def close(self) -> None:
        """Free the memory, after the objects that refer to it."""
        for name in ("vector", "reads", "writes", "waiting"):
            vars(self).pop(name, None)
        with suppress(BufferError):  # the client still refers to the memory
            self._memory.close()


@contextmanager
def _translate_errors() -> Generator[None, None, None]:
    """Raise OSError for every error of 3FS's client."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"3FS's client raised {type(error).__name__}: {error}") from error


def _first(results: Sequence[Any]) -> int | None:
    return int(results[0].result) if results else None


def connect_usrbio(root: str, *, wanted: bool | None) -> Usrbio | None:
    """Return the client for the mount of `root`, or None if it is not wanted or not available.

    Raises:
        BackendNotInstalled, ConfigError: The client is required (True, not None) but not available.
    """
    if wanted is False:
        return None
    try:
        client = importlib.import_module("hf3fs_fuse.io")
    except ImportError as error:
        if wanted is None:
            return None
        raise BackendNotInstalled(
            "hf3fs: usrbio: the client of 3FS, hf3fs_fuse, is not installed: build it from the sources"
            " of 3FS, or leave the field out to go through the mount"
        ) from error
    mount = client.extract_mount_point(root)
    if mount:
        return Usrbio(client, mount)
    if wanted is None:
        return None
    raise ConfigError(
        f"hf3fs: usrbio: {root} is not on a mount of 3FS: mount it, or leave usrbio out"
    )
