"""The place where one live writer keeps its unpublished files, and the end of those that died.

writers/TOKEN/lock    held locked as long as the writer lives; inside, 8 bytes: the bytes promised to it
writers/TOKEN/N       a file that is being written, or a victim on its way to be overwritten
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import re
import secrets
import struct
import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from hicache_backends.file.descriptors import open_own, read_own
from hicache_backends.file.page_file import NONCE_NBYTES

if TYPE_CHECKING:
    from hicache_storage.backend_support.deadline import Deadline

_TOKEN_NAME = re.compile(r"[0-9a-f]{16}")
_TEMP_NAME = re.compile(r"[0-9]+")
_LOCK = "lock"
_PENDING = struct.Struct("<Q")
_SERIAL_NBYTES = 7
_LEAST_PATIENCE_S = 0.01


class _Place(NamedTuple):
    """A writer's directory, and the lock that says that it lives."""

    token: bytes
    directory: str
    lock_fd: int


class Writer:
    """One writer's directory under `root`. Thread-safe; belongs to the process that made it."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._serials = itertools.count()
        self._pending_nbytes = 0
        self._owed: deque[int] = deque()
        self._closed = False
        self._place = _made(root)

    def temp_path(self) -> str:
        """A path that nobody else uses. Nothing is there yet."""
        return f"{self._place.directory}/{next(self._serials)}"

    def nonce(self) -> bytes:
        """Bytes that no write had before: random per writer, counted within it."""
        return self._place.token + next(self._serials).to_bytes(_SERIAL_NBYTES, "little")

    def promised(self) -> int:
        """The bytes that are added to the ledger and not yet on disk. No I/O."""
        return self._pending_nbytes + sum(list(self._owed))

    def pend(self, nbytes: int, deadline: Deadline) -> None:
        """Note that `nbytes` more (fewer, if negative) are added to the ledger and not yet on disk.

        Where another thread is stuck with the note, this change goes with the next.
        """
        self._owed.append(nbytes)
        if not self._lock.acquire(timeout=max(deadline.remaining_s(), _LEAST_PATIENCE_S)):
            return
        try:
            self._note()
        finally:
            self._lock.release()

    def restore(self, deadline: Deadline) -> None:
        """Make the directory anew if it has vanished.

        The old lock is held until there is a new one: a root that was only moved away is moved back
        with a writer that lives.

        Raises:
            FileNotFoundError: So has the root.
        """
        if not self._lock.acquire(timeout=max(deadline.remaining_s(), _LEAST_PATIENCE_S)):
            return
        try:
            if self._closed or not _is_gone(f"{self._place.directory}/{_LOCK}"):
                return
            with suppress(FileExistsError):
                os.mkdir(self._root)
            lost, self._place = self._place, _made(self._root)
            os.close(lost.lock_fd)
            self._note()
        finally:
            self._lock.release()

    def close(self) -> None:
        """Remove the directory with all that is in it. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                _remove(self._place.directory)
                os.close(self._place.lock_fd)

    def forget(self) -> None:
        """Leave the directory to the process that forked this one, which still uses it.

        Takes no lock: a thread that held it when the process was forked does not exist here.
        """
        if not self._closed:
            self._closed = True
            os.close(self._place.lock_fd)

    def _note(self) -> None:
        while self._owed:
            self._pending_nbytes += self._owed.popleft()
        if not self._closed:
            with suppress(OSError):
                os.pwrite(self._place.lock_fd, _PENDING.pack(max(0, self._pending_nbytes)), 0)


def collect_dead(root: str) -> int:
    """Remove what writers left behind that died; how many writers that were."""
    dead = 0
    for directory in _directories(root):
        try:
            fd = open_own(f"{directory}/{_LOCK}", os.O_RDWR)
        except FileNotFoundError:
            with suppress(OSError):  # about to be locked, or half removed: gone only if it is empty
                os.rmdir(directory)
            continue
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(directory)
            dead += 1
        except OSError:
            pass
        finally:
            os.close(fd)
    return dead


def pending_nbytes(root: str) -> int:
    """The bytes that all live writers were promised and may not have written yet."""
    return sum(_pending(f"{directory}/{_LOCK}") for directory in _directories(root))


def _pending(path: str) -> int:
    try:
        record = read_own(path, _PENDING.size)
    except OSError:
        return 0
    return int(_PENDING.unpack(record)[0]) if len(record) == _PENDING.size else 0


def _made(root: str) -> _Place:
    """Make a directory and lock it, again if a collector took it for a dead writer's in between."""
    while True:
        token = secrets.token_bytes(NONCE_NBYTES - _SERIAL_NBYTES)
        directory = f"{root}/{token.hex()}"
        os.mkdir(directory)
        try:
            with suppress(FileNotFoundError):
                lock_fd = _locked(f"{directory}/{_LOCK}")
                if lock_fd >= 0:
                    return _Place(token, directory, lock_fd)
        except OSError:
            with suppress(OSError):
                os.rmdir(directory)
            raise


def _locked(path: str) -> int:
    """A new file, locked; -1 where somebody else locked or removed it first."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.exists(path):
            return fd
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            return (
                fd  # a file system without locks: collectors can't lock either, and leave it alone
            )
    os.close(fd)
    return -1


def _remove(directory: str) -> None:
    with suppress(OSError):
        for name in os.listdir(directory):
            if _TEMP_NAME.fullmatch(name):
                with suppress(OSError):
                    os.unlink(f"{directory}/{name}")
    with suppress(OSError):  # the lock goes last: until then others know whose directory this was
        os.unlink(f"{directory}/{_LOCK}")
    with suppress(OSError):
        os.rmdir(directory)


def _directories(root: str) -> list[str]:
    """The directories of all writers. A link to a directory is none of ours."""
    try:
        with os.scandir(root) as entries:
            return [
                entry.path
                for entry in entries
                if _TOKEN_NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            ]
    except OSError:
        return []


def _is_gone(path: str) -> bool:
    """Whether nothing is there. An error that tells nothing is no proof of it."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False
