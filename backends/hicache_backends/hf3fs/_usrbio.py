"""Reads and writes through the rings of 3FS (USRBIO), around FUSE.

The client, `hf3fs_fuse.io`, comes with 3FS. It moves bytes between files and shared memory that it was
told of, so pages are copied once on their way.
"""

from __future__ import annotations

import errno
import importlib
import os
import threading
from datetime import timedelta
from multiprocessing.shared_memory import SharedMemory
from typing import TYPE_CHECKING, Any

from hicache_storage.errors import BackendNotInstalled, ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

_LANE_NBYTES = 8 << 20


class Usrbio:
    """preadv and pwritev for files of one 3FS mount. Thread-safe."""

    def __init__(self, client: Any, mount: str, timeout_s: float) -> None:
        self._client = client
        self._mount = mount
        self._timeout = timedelta(seconds=timeout_s)
        self._lock = threading.Lock()
        self._idle: list[_Lane] = []
        self._late: list[_Lane] = []
        """Lanes that something may still be moved to or from."""

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """As os.preadv does it."""
        nbytes = sum(map(len, buffers))
        if nbytes > _LANE_NBYTES:
            return os.preadv(descriptor, buffers, offset)
        lane = self._taken()
        done = self._moved(lane, descriptor, nbytes, offset, reading=True)
        start = 0
        for buffer in buffers:
            part = lane.bytes[start : min(start + len(buffer), done)]
            buffer[: len(part)] = part
            start += len(buffer)
        self._give_back(lane)
        return done

    def pwritev(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """As os.pwritev does it."""
        nbytes = sum(map(len, buffers))
        if nbytes > _LANE_NBYTES:
            return os.pwritev(descriptor, buffers, offset)
        lane = self._taken()
        start = 0
        for buffer in buffers:
            lane.bytes[start : start + len(buffer)] = buffer
            start += len(buffer)
        done = self._moved(lane, descriptor, nbytes, offset, reading=False)
        self._give_back(lane)
        return done

    def close(self) -> None:
        """Give rings and memory back."""
        with self._lock:
            lanes, self._idle, self._late = self._idle + self._late, [], []
        for lane in lanes:
            lane.close()

    def _moved(
        self, lane: _Lane, descriptor: int, nbytes: int, offset: int, *, reading: bool
    ) -> int:
        """How many bytes were moved."""
        ring = lane.reads if reading else lane.writes
        results: list[Any] = []
        self._client.register_fd(descriptor)
        try:
            ring.prepare(lane.vector[0:nbytes], reading, descriptor, offset)
            results = ring.submit().wait(min_results=1, timeout=self._timeout)
        finally:
            self._client.deregister_fd(descriptor)
            if not results:
                self._late.append(lane)
        if not results:
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        done = int(results[0].result)
        if done < 0:
            self._give_back(lane)
            raise OSError(-done, os.strerror(-done))
        return done

    def _taken(self) -> _Lane:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return _Lane(self._client, self._mount)

    def _give_back(self, lane: _Lane) -> None:
        with self._lock:
            self._idle.append(lane)


class _Lane:
    """What one call at a time needs: memory that 3FS knows, and a ring for each direction."""

    def __init__(self, client: Any, mount: str) -> None:
        self._memory = SharedMemory(create=True, size=_LANE_NBYTES)
        assert self._memory.buf is not None
        self.bytes: memoryview = self._memory.buf
        self.vector = client.make_iovec(self._memory, mount)
        self.reads = client.make_ioring(mount, 1, for_read=True)
        self.writes = client.make_ioring(mount, 1, for_read=False)
        self._memory.unlink()

    def close(self) -> None:
        """Let go of the memory, after those who refer to it."""
        del self.vector, self.reads, self.writes
        self._memory.close()


def usrbio_of(root: str, timeout_s: float, *, wanted: bool | None) -> Usrbio | None:
    """The client for the mount that `root` is on; None where it is not wanted, or not to be had.

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
        return Usrbio(client, mount, timeout_s)
    if wanted is None:
        return None
    raise ConfigError(f"hf3fs: usrbio: {root} lies on no mount of 3FS: mount it, or leave it out")
