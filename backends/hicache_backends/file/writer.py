"""The directory in which a live writer keeps its unpublished files, and the removal of dead writers.

writers/TOKEN/lock    locked as long as the writer lives; it contains 8 bytes: the pending bytes
writers/TOKEN/N       a file that is being written, or a victim that will be overwritten

Pending bytes are in the ledger but not yet on disk, or on disk but no longer in the ledger.
"""

from __future__ import annotations

import itertools
import os
import re
import struct
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from hicache_storage import native
from hicache_storage.backend_support.filesystem import open_own, read_own
from hicache_storage.backend_support.interrupts import held
from hicache_storage.backend_support.writer_lock import (
    WRITER_TOKEN,
    new_token,
    try_lock,
    try_lock_at,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.backend_support.deadline import Deadline

_TEMP_NAME = re.compile(r"[0-9]+")
_LOCK = "lock"
_PENDING = struct.Struct("<Q")
_LEAST_WAIT_S = 0.01
_CLOSE_WAIT_S = 1.0


class _WriterDirectory(NamedTuple):
    """A writer's directory, and the lock that shows that the writer is alive."""

    token: str
    path: str
    lock_fd: int


class Writer:
    """One writer's directory under `root`. Thread-safe; belongs to the process that made it."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._lock = threading.RLock()
        self._serials = itertools.count()
        self._pending: dict[int, int] = {}
        """The pending bytes of each thread that has some."""
        self._closed = False
        self._directory = _make_directory(root)

    def temp_path(self) -> str:
        """Return a path that no other call returns. No file exists there yet."""
        return f"{self._directory.path}/{next(self._serials)}"

    def trailers(self, names: Sequence[bytes], *, synced: bool) -> list[bytes]:
        """Return a trailer for one write of each name, with a nonce that was never used before.

        A nonce consists of a random part per writer and a counter.
        """
        token = bytes.fromhex(self._directory.token)
        serials = [next(self._serials) for _ in names]
        return native.page_trailers(names, synced, token, serials)

    def pending_nbytes(self) -> int:
        """Return the bytes that are in the ledger but not yet on disk. No I/O."""
        return sum(list(self._pending.values()))

    def is_pending(self) -> bool:
        """Return True if bytes are pending for this thread."""
        return threading.get_ident() in self._pending

    def add_pending(self, nbytes: int, deadline: Deadline) -> None:
        """Record that `nbytes` more (fewer, if negative) are pending for this thread.

        If another thread holds the lock past the deadline, the next change also writes this change.
        """
        if nbytes:
            thread = threading.get_ident()
            self._pending[thread] = self._pending.get(thread, 0) + nbytes
            if not self._pending[thread]:
                del self._pending[thread]
            self._record_pending(deadline)

    def forget_pending(self, deadline: Deadline) -> None:
        """Record that nothing is pending for this thread."""
        self._pending.pop(threading.get_ident(), None)
        self._record_pending(deadline)

    def restore(self, deadline: Deadline) -> None:
        """Make the directory again if it has vanished.

        The old lock is held until the new one is held. So if the root was only moved away and comes
        back, other processes see that the writer is alive.

        Raises:
            OSError: FileNotFoundError if the root has vanished, too.
        """
        with held(self._lock, max(deadline.remaining_s(), _LEAST_WAIT_S)) as is_held:
            if not is_held or self._closed or not _is_gone(f"{self._directory.path}/{_LOCK}"):
                return
            with suppress(FileExistsError):
                os.mkdir(self._root)
            lost, self._directory = self._directory, _make_directory(self._root)
            os.close(lost.lock_fd)
            self._write_pending()

    def close(self) -> None:
        """Remove the directory with all its files. Idempotent."""
        with held(self._lock, _CLOSE_WAIT_S) as is_held:
            if is_held and not self._closed:
                self._closed = True
                _remove(self._directory.path)
                os.close(self._directory.lock_fd)

    def abandon(self) -> None:
        """Leave the directory to the process that forked this one and still uses it.

        Take no lock: the thread that held it when the process was forked does not exist here.
        """
        if not self._closed:
            self._closed = True
            os.close(self._directory.lock_fd)

    def _record_pending(self, deadline: Deadline) -> None:
        with held(self._lock, max(deadline.remaining_s(), _LEAST_WAIT_S)) as is_held:
            if is_held:
                self._write_pending()

    def _write_pending(self) -> None:
        if not self._closed:
            with suppress(OSError):
                record = _PENDING.pack(max(0, self.pending_nbytes()))
                os.pwrite(self._directory.lock_fd, record, 0)


def collect_dead(root: str) -> int:
    """Remove the directories of writers that died. Return the number of these writers."""
    dead = 0
    for directory in _directories(root):
        try:
            fd = open_own(f"{directory}/{_LOCK}", os.O_RDWR)
        except FileNotFoundError:
            with suppress(OSError):  # not locked yet, or half removed: remove it if empty
                os.rmdir(directory)
            continue
        except OSError:
            continue
        try:
            if try_lock(fd):
                _remove(directory)
                dead += 1
        except OSError:
            continue  # without file locks we cannot see whether a writer is dead
        finally:
            os.close(fd)
    return dead


def total_pending_nbytes(root: str) -> int:
    """Add up the pending bytes of all live writers."""
    return sum(_pending_in(f"{directory}/{_LOCK}") for directory in _directories(root))


def _pending_in(path: str) -> int:
    try:
        record = read_own(path, _PENDING.size)
    except OSError:
        return 0
    return int(_PENDING.unpack(record)[0]) if len(record) == _PENDING.size else 0


def _make_directory(root: str) -> _WriterDirectory:
    """Make a directory and lock it.

    If a collector removes it before it is locked, make another one.
    """
    while True:
        token = new_token()
        directory = f"{root}/{token}"
        os.mkdir(directory)
        try:
            with suppress(FileNotFoundError):
                lock_fd = _make_lock(f"{directory}/{_LOCK}")
                if lock_fd >= 0:
                    return _WriterDirectory(token, directory, lock_fd)
        except OSError:
            with suppress(OSError):
                os.rmdir(directory)
            raise


def _make_lock(path: str) -> int:
    """Create a file and lock it. Return -1 if another process locked or removed it first."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        if try_lock_at(path, fd):
            return fd
    except OSError:
        return fd  # without file locks no collector can lock the file either
    os.close(fd)
    return -1


def _remove(directory: str) -> None:
    with suppress(OSError):
        for name in os.listdir(directory):
            if _TEMP_NAME.fullmatch(name):
                with suppress(OSError):
                    os.unlink(f"{directory}/{name}")
    with suppress(OSError):  # last: until then other processes see that a writer used this
        os.unlink(f"{directory}/{_LOCK}")
    with suppress(OSError):
        os.rmdir(directory)


def _directories(root: str) -> list[str]:
    """Return the directories of all writers. Leave out links, which belong to other programs."""
    try:
        with os.scandir(root) as entries:
            return [
                entry.path
                for entry in entries
                if WRITER_TOKEN.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            ]
    except OSError:
        return []


def _is_gone(path: str) -> bool:
    """Return True if nothing exists at `path`, and False if the file system does not answer."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False
