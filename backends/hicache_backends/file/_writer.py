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
from contextlib import suppress

from hicache_backends.file._page_file import NONCE_NBYTES

_TOKEN_NAME = re.compile(r"[0-9a-f]{16}")
_TEMP_NAME = re.compile(r"[0-9]+")
_LOCK = "lock"
_PENDING = struct.Struct("<Q")
_SERIAL_NBYTES = 7


class Writer:
    """One writer's directory under `root`. Thread-safe; belongs to the process that made it."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._pending_nbytes = 0
        self._serials = itertools.count()
        self._token = b""
        self._directory = ""
        self._lock_fd = -1
        self._open()

    def temp_path(self) -> str:
        """A path that nobody else uses. Nothing is there yet."""
        return f"{self._directory}/{next(self._serials)}"

    def nonce(self) -> bytes:
        """Bytes that no write had before: random per writer, counted within it."""
        return self._token + next(self._serials).to_bytes(_SERIAL_NBYTES, "little")

    def pend(self, nbytes: int) -> None:
        """Note that `nbytes` more (fewer, if negative) are added to the ledger and not yet on disk."""
        with self._lock:
            self._pending_nbytes += nbytes
            if self._lock_fd >= 0:
                with suppress(OSError):
                    os.pwrite(self._lock_fd, _PENDING.pack(self._pending_nbytes), 0)

    def restore(self) -> None:
        """Make the directory anew if it has vanished.

        Raises:
            FileNotFoundError: So has the root.
        """
        with self._lock:
            if self._lock_fd >= 0 and not os.path.exists(f"{self._directory}/{_LOCK}"):
                os.close(self._lock_fd)
                self._lock_fd = -1
                with suppress(FileExistsError):
                    os.mkdir(self._root)
                self._open()

    def close(self) -> None:
        """Remove the directory with all that is in it. Idempotent."""
        with self._lock:
            fd, self._lock_fd = self._lock_fd, -1
            if fd >= 0:
                _remove(self._directory)
                os.close(fd)

    def forget(self) -> None:
        """Leave the directory to the process that forked this one, which still uses it.

        Takes no lock: a thread that held it when the process was forked does not exist here.
        """
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)

    def _open(self) -> None:
        """Make a directory and lock it, again if a collector took it for a dead writer's in between."""
        while True:
            self._token = secrets.token_bytes(NONCE_NBYTES - _SERIAL_NBYTES)
            self._directory = f"{self._root}/{self._token.hex()}"
            os.mkdir(self._directory)
            self._lock_fd = -1
            with suppress(FileNotFoundError):
                self._lock_fd = _locked(f"{self._directory}/{_LOCK}")
            if self._lock_fd >= 0:
                return


def collect_dead(root: str) -> int:
    """Remove what writers left behind that died; how many writers that were."""
    dead = 0
    for name in _names(root, _TOKEN_NAME):
        directory = f"{root}/{name}"
        try:
            fd = os.open(f"{directory}/{_LOCK}", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
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
    return sum(_pending(f"{root}/{name}/{_LOCK}") for name in _names(root, _TOKEN_NAME))


def _pending(path: str) -> int:
    try:
        with open(path, "rb", buffering=0) as file:
            record = file.read(_PENDING.size) or b""
    except OSError:
        return 0
    return int(_PENDING.unpack(record)[0]) if len(record) == _PENDING.size else 0


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
    for name in _names(directory, _TEMP_NAME):
        with suppress(OSError):
            os.unlink(f"{directory}/{name}")
    with suppress(OSError):  # the lock goes last: until then others know whose directory this was
        os.unlink(f"{directory}/{_LOCK}")
    with suppress(OSError):
        os.rmdir(directory)


def _names(directory: str, name: re.Pattern[str]) -> list[str]:
    try:
        return [found for found in os.listdir(directory) if name.fullmatch(found)]
    except OSError:
        return []
