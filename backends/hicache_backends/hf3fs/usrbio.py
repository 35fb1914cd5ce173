"""Reads and writes through the rings of 3FS (USRBIO), around FUSE.

The client, `hf3fs_fuse.io`, comes with 3FS. It moves bytes between files and shared memory that it was
told of, so pages are copied once on their way.
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

_LANE_NBYTES = 8 << 20
# Beyond that nothing more is handed to a 3FS that does not answer: 128 MiB of memory wait for it then.
_MOST_LATE = 16


class Usrbio:
    """preadv and pwritev for files of one 3FS mount. Thread-safe."""

    def __init__(self, client: Any, mount: str) -> None:
        self._client = client
        self._mount = mount
        self._lock = threading.Lock()
        self._idle: list[_Lane] = []
        self._late: list[_Lane] = []
        """Lanes that something may still be moved to or from."""

    def preadv(
        self, descriptor: int, buffers: Sequence[memoryview], offset: int, deadline: Deadline
    ) -> int:
        """As os.preadv does it."""
        nbytes = sum(map(len, buffers))
        if nbytes > _LANE_NBYTES:
            return os.preadv(descriptor, buffers, offset)
        lane = self._taken()
        done = self._moved(lane, descriptor, nbytes, offset, deadline, reading=True)
        start = 0
        for buffer in buffers:
            part = lane.bytes[start : min(start + len(buffer), done)]
            buffer[: len(part)] = part
            start += len(buffer)
        self._give_back(lane)
        return done

    def pwritev(
        self, descriptor: int, buffers: Sequence[memoryview], offset: int, deadline: Deadline
    ) -> int:
        """As os.pwritev does it."""
        nbytes = sum(map(len, buffers))
        if nbytes > _LANE_NBYTES:
            return os.pwritev(descriptor, buffers, offset)
        lane = self._taken()
        start = 0
        for buffer in buffers:
            lane.bytes[start : start + len(buffer)] = buffer
            start += len(buffer)
        done = self._moved(lane, descriptor, nbytes, offset, deadline, reading=False)
        self._give_back(lane)
        return done

    def close(self) -> None:
        """Give rings and memory back."""
        with self._lock:
            lanes, self._idle, self._late = self._idle + self._late, [], []
        for lane in lanes:
            lane.close()

    def _moved(
        self,
        lane: _Lane,
        descriptor: int,
        nbytes: int,
        offset: int,
        deadline: Deadline,
        *,
        reading: bool,
    ) -> int:
        """Move bytes and return how many; the lane is the caller's again, unless it raises."""
        try:
            result = self._result(lane, descriptor, nbytes, offset, deadline, reading=reading)
        except BaseException:
            self._put_aside(lane)
            raise
        if result is None:
            self._put_aside(lane)
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        if result < 0:
            self._give_back(lane)
            raise OSError(-result, os.strerror(-result))
        return result

    def _result(
        self,
        lane: _Lane,
        descriptor: int,
        nbytes: int,
        offset: int,
        deadline: Deadline,
        *,
        reading: bool,
    ) -> int | None:
        """Return what the ring says; None where it says nothing by the deadline."""
        ring = lane.reads if reading else lane.writes
        with _translated():
            self._client.register_fd(descriptor)
            try:
                ring.prepare(lane.vector[0:nbytes], reading, descriptor, offset)
                lane.waiting = ring.submit()
                left = timedelta(seconds=deadline.remaining_s())
                return _first(lane.waiting.wait(min_results=1, timeout=left))
            finally:
                with suppress(Exception):  # what the ring said counts
                    self._client.deregister_fd(descriptor)

    def _taken(self) -> _Lane:
        """Take a lane that nothing is moved to or from.

        Raises:
            OSError: There are as many late lanes as there may be (EMFILE), or none can be made.
        """
        with self._lock:
            self._reap()
            if self._idle:
                return self._idle.pop()
            if len(self._late) >= _MOST_LATE:
                raise OSError(errno.EMFILE, f"{len(self._late)} transfers of 3FS have not ended")
        with _translated():
            return _Lane(self._client, self._mount)

    def _reap(self) -> None:
        """Take lanes back whose transfers have ended after all."""
        for lane in list(self._late):
            with suppress(OSError), _translated():
                if lane.has_ended():
                    self._late.remove(lane)
                    self._idle.append(lane)

    def _put_aside(self, lane: _Lane) -> None:
        """Keep a lane until its transfer has ended; one whose ring took nothing whole is of no use."""
        if lane.waiting is None:
            lane.close()
            return
        with self._lock:
            self._late.append(lane)

    def _give_back(self, lane: _Lane) -> None:
        lane.waiting = None
        with self._lock:
            self._idle.append(lane)


class _Lane:
    """What one call at a time needs: memory that 3FS knows, and a ring for each direction."""

    def __init__(self, client: Any, mount: str) -> None:
        self._memory = SharedMemory(create=True, size=_LANE_NBYTES)
        self.waiting: Any = None
        """The ring that something was handed to, and that has not said yet what came of it."""
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
        """Ask without waiting whether the transfer has ended."""
        if _first(self.waiting.wait(min_results=1, timeout=timedelta())) is None:
            return False
        self.waiting = None
        return True

    def close(self) -> None:
        """Let go of the memory, after those who refer to it."""
        for name in ("vector", "reads", "writes", "waiting"):
            vars(self).pop(name, None)
        with suppress(BufferError):  # of a client that still refers to it
            self._memory.close()


@contextmanager
def _translated() -> Generator[None, None, None]:
    """Raise OSError for whatever 3FS's client raises."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"3FS's client raised {type(error).__name__}: {error}") from error


def _first(results: Sequence[Any]) -> int | None:
    return int(results[0].result) if results else None


def usrbio_of(root: str, *, wanted: bool | None) -> Usrbio | None:
    """Return the client for the mount that `root` is on; None where it is not wanted, or not to be had.

    Raises:
        BackendNotInstalled, ConfigError: It is wanted (True, not None) and not to be had.
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
    raise ConfigError(f"hf3fs: usrbio: {root} lies on no mount of 3FS: mount it, or leave it out")
