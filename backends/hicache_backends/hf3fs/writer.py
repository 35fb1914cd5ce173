"""Writers, and which of them are dead.

writers/TOKEN is held locked as long as the writer lives. The kernel lets go of it when it dies, however.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import secrets
import time
from contextlib import suppress

from hicache_backends.hf3fs.fork_guard import FORKS, WAIT_S
from hicache_storage.backend_support.deadline import Deadline

_TOKEN_NBYTES = 8
_SERIAL_NBYTES = 8
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
_MISSING_NS = 600 * 10**9
_TOKEN_NAME = re.compile(r"[0-9a-f]{16}")


class Writer:
    """One writer's token and lock. Thread-safe; belongs to the process that made it."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._serials = itertools.count()
        self._descriptor = -1
        while (
            self._descriptor < 0
        ):  # a collector may take it for a dead writer's before it is locked
            self.token = secrets.token_hex(_TOKEN_NBYTES)
            self._descriptor = _locked(f"{directory}/{self.token}", os.O_CREAT | os.O_EXCL)

    def stamp(self) -> bytes:
        """What no write had before."""
        serial = next(self._serials).to_bytes(_SERIAL_NBYTES, "big")
        return time.time_ns().to_bytes(8, "big") + bytes.fromhex(self.token) + serial

    def close(self) -> None:
        """Unlock and remove the file. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):
                os.unlink(f"{self._directory}/{self.token}")
            FORKS.release(descriptor)


def writer_of(stamp: bytes) -> str:
    """The token of the writer that made a stamp."""
    return stamp[8 : 8 + _TOKEN_NBYTES].hex()


def written_ns(stamp: bytes) -> int:
    """When a stamp was made."""
    return int.from_bytes(stamp[:8], "big")


def is_dead(directory: str, token: str, reserved_ns: int) -> bool:
    """Whether the writer with this token, whose last reservation is known, is gone.

    The file that it left is removed then. One whose file is missing may have lost it: it is given time.
    """
    path = f"{directory}/{token}"
    try:
        descriptor = _locked(path, 0)
    except FileNotFoundError:
        return time.time_ns() - reserved_ns > _MISSING_NS
    except OSError:
        return False
    if descriptor < 0:
        return False
    with suppress(OSError):
        if not os.fstat(descriptor).st_size:  # ours are empty
            os.unlink(path)
    FORKS.release(descriptor)
    return True


def tokens(directory: str) -> set[str]:
    """Of all writers that have a file."""
    try:
        return {name for name in os.listdir(directory) if _TOKEN_NAME.fullmatch(name)}
    except FileNotFoundError:
        return set()


def _locked(path: str, flags: int) -> int:
    """Return a descriptor that holds the lock; -1 where somebody else does, or the file was removed.

    A forked child closes its copy, so that the lock ends with this process.
    """
    with FORKS.step(Deadline(2 * WAIT_S)):
        descriptor = os.open(path, _FLAGS | flags, 0o666)
        FORKS.hold(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.exists(path):
            return descriptor
    except BlockingIOError:
        pass
    except OSError:
        FORKS.release(descriptor)
        raise
    FORKS.release(descriptor)
    return -1
